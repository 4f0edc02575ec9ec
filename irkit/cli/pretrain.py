"""``irkit pretrain``: a recipe in, a model that was trained on texts out."""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer

from irkit.cli.options import DryRun, ModelOut, Overwrite, PrintConfig, Recipe, check_verb, goes_on
from irkit.cli.output import note, show_table
from irkit.errors import BadValueError

__all__ = ["pretrain"]


def pretrain(
    recipe: Recipe,
    out: ModelOut = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Such as pretraining.train.max_steps=1000."),
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
) -> None:
    """Pre-train a model on texts, and train a retriever from it.

    What was interrupted goes on from its last checkpoint when the same command is given again. torchrun and
    accelerate launch start it on several devices.
    """
    from irkit.training.pretraining.recipe import PretrainRecipe

    check_verb(recipe, "pretrain")
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
    with goes_on("training"):
        run(resolved, out, overwrite=overwrite)
    if os.environ.get("RANK", "0") != "0":
        return
    if (out / "evaluation.jsonl").is_file():
        show_table(["collection", "measure", "value"], read_means(out / "evaluation.jsonl"))
    note(f"trained in {time.monotonic() - start:,.1f} s. Try: irkit index {out} CORPUS --out INDEX")
