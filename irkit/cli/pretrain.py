"""``irkit pretrain``: a recipe in, a model that was trained on texts out."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from irkit.cli.output import note, show_table
from irkit.errors import BadValueError

__all__ = ["pretrain"]


def pretrain(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML or JSON file.")],
    out: Annotated[Path | None, typer.Option(help="Directory of the model.")] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Such as pretraining.train.max_steps=1000."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that was trained there before.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, train nothing.")] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the whole recipe.")] = False,
) -> None:
    """Pre-train a model on texts, and train a retriever from it, by a recipe.

    What was interrupted goes on from its last checkpoint when the same command is given again. torchrun and
    accelerate launch start it on several devices.
    """
    from irkit.training.pretraining.recipe import PretrainRecipe

    resolved = PretrainRecipe.resolve(recipe, override or ())
    if print_config:
        typer.echo(resolved.to_yaml(), nl=False)
        return
    if out is None:
        raise BadValueError("irkit pretrain: no --out; give the directory that the model shall have")
    from irkit.training.pretraining.running import check, run
    from irkit.training.validation import read_means

    if dry_run:
        model = check(resolved, out, overwrite=overwrite)
        size = sum(each.numel() for each in model.parameters()) / 1e6
        what = f"{resolved.model.name} ({model.kind} {model.dim}, {size:,.1f} million parameters)"
        if resolved.trained_vocabulary is not None:
            what = f"a vocabulary of {resolved.trained_vocabulary.size:,} and {resolved.model.name}"
        note(f"would train {what} into {out}")
        return
    start = time.monotonic()
    try:
        run(resolved, out, overwrite=overwrite)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("- give the same command again to go on with this training") from None
    if os.environ.get("RANK", "0") != "0":
        return
    if (out / "evaluation.jsonl").is_file():
        show_table(["collection", "measure", "value"], read_means(out / "evaluation.jsonl"))
    note(f"trained in {time.monotonic() - start:,.1f} s. Try: irkit index {out} CORPUS --out INDEX")
