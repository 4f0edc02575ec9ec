"""``irkit train``: a recipe in, a model out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from irkit.cli.output import note, show_table
from irkit.errors import BadValueError

__all__ = ["train"]


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML or JSON file.")],
    out: Annotated[Path | None, typer.Option(help="Directory of the model.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Such as train.learning_rate=2e-5.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that was trained there before.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, train nothing.")] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the whole recipe.")] = False,
) -> None:
    """Train a model by a recipe.

    A training that was interrupted goes on from its last checkpoint when the same command is given again.
    torchrun and accelerate launch start it on several devices.
    """
    from irkit.training.recipe import TrainRecipe

    resolved = TrainRecipe.resolve(recipe, override or ())
    if print_config:
        typer.echo(resolved.to_yaml(), nl=False)
        return
    if out is None:
        raise BadValueError("irkit train: no --out; give the directory that the model shall have")
    from irkit.training.running import carry_out, prepare
    from irkit.training.validation import read_means

    prepared = prepare(resolved, out, overwrite=overwrite)
    model = prepared.step.model
    size = sum(each.numel() for each in model.parameters()) / 1e6
    what = f"{resolved.model.name} ({model.kind} {model.dim}, {size:,.1f} million parameters)"
    if dry_run:
        note(f"would train {what} on {prepared.counts['examples']:,} examples into {out}")
        return
    if prepared.trainer.args.process_index == 0:
        note(f"training {what} on {prepared.counts['examples']:,} examples")
    start = time.monotonic()
    try:
        carry_out(prepared, out, overwrite=overwrite)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("- give the same command again to go on with this training") from None
    if prepared.trainer.args.process_index == 0:
        if prepared.collections:
            show_table(["collection", "measure", "value"], read_means(out / "evaluation.jsonl"))
        note(f"trained in {time.monotonic() - start:,.1f} s. Try: irkit index {out} CORPUS --out INDEX")
