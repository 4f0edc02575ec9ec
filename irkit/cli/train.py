"""``irkit train``: a recipe in, a model out."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from irkit.cli.options import DryRun, ModelOut, Overwrite, PrintConfig, Recipe, check_verb, goes_on
from irkit.cli.output import note, show_table
from irkit.errors import BadValueError

__all__ = ["train"]


def train(
    recipe: Recipe,
    out: ModelOut = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Such as train.learning_rate=2e-5.")
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
) -> None:
    """Train a model by a recipe.

    A training that was interrupted goes on from its last checkpoint when the same command is given again.
    torchrun and accelerate launch start it on several devices.
    """
    from irkit.training.recipe import TrainRecipe

    check_verb(recipe, "train")
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
    with goes_on("training"):
        carry_out(prepared, out, overwrite=overwrite)
    if prepared.trainer.args.process_index == 0:
        if prepared.collections:
            show_table(["collection", "measure", "value"], read_means(out / "evaluation.jsonl"))
        note(f"trained in {time.monotonic() - start:,.1f} s. Try: irkit index {out} CORPUS --out INDEX")
