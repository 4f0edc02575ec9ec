"""``irkit train``: train a model by a recipe."""

from __future__ import annotations

import time
from typing import Annotated

from irkit.cli.output import note
from irkit.cli.recipe_files import check_verb, hint_resume, print_recipe, require_out, show_means
from irkit.cli.shared_options import DryRun, ModelOut, Overwrite, PrintConfig, Recipe, set_option


def train(
    recipe: Recipe,
    out: ModelOut = None,
    override: Annotated[
        list[str] | None, set_option("Set a key of the recipe, such as train.learning_rate=2e-5.")
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
) -> None:
    """Train a model by a recipe.

    After an interruption, the same command resumes from the last checkpoint. torchrun and accelerate launch
    start it on several devices.
    """
    from irkit.training.train_recipe import TrainRecipe

    check_verb(recipe, "train")
    resolved = TrainRecipe.resolve(recipe, override or ())
    if print_config:
        print_recipe(resolved)
        return
    out = require_out(out, "train")
    from irkit.training.train_run import prepare, run_recipe

    prepared = prepare(resolved, out, overwrite=overwrite)
    model = prepared.step.model
    size = sum(weights.numel() for weights in model.parameters()) / 1e6
    what = f"{resolved.model.name} ({model.kind} {model.dim}, {size:,.1f} million parameters)"
    if dry_run:
        note(f"would train {what} on {prepared.counts['examples']:,} examples into {out}")
        return
    is_main = prepared.trainer.args.process_index == 0
    if is_main:
        note(f"training {what} on {prepared.counts['examples']:,} examples")
    start = time.monotonic()
    with hint_resume(" to go on with this training"):
        run_recipe(prepared, out, overwrite=overwrite)
    if is_main:
        show_means(out)
        note(f"trained in {time.monotonic() - start:,.1f} s. Try: irkit index {out} CORPUS --out INDEX")
