"""``irkit pretrain``: train a model on texts alone by a recipe."""

from __future__ import annotations

import os
import time
from typing import Annotated

from irkit.cli.output import note
from irkit.cli.recipe_files import check_verb, hint_resume, print_recipe, require_out, show_means
from irkit.cli.shared_options import DryRun, ModelOut, Overwrite, PrintConfig, Recipe, set_option


def pretrain(
    recipe: Recipe,
    out: ModelOut = None,
    override: Annotated[
        list[str] | None, set_option("Set a key of the recipe, such as pretraining.train.max_steps=1000.")
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
) -> None:
    """Pre-train a model on texts, and train a retriever from it.

    After an interruption, the same command resumes from the last checkpoint. torchrun and accelerate launch
    start it on several devices.
    """
    from irkit.training.pretraining.pretrain_recipe import PretrainRecipe

    check_verb(recipe, "pretrain")
    resolved = PretrainRecipe.resolve(recipe, override or ())
    if print_config:
        print_recipe(resolved)
        return
    out = require_out(out, "pretrain")
    from irkit.training.pretraining.pretrain_run import check, run

    if dry_run:
        model = check(resolved, out, overwrite=overwrite)
        size = sum(weights.numel() for weights in model.parameters()) / 1e6
        what = f"{resolved.model.name} ({model.kind} {model.dim}, {size:,.1f} million parameters)"
        if resolved.trained_vocabulary is not None:
            what = f"a vocabulary of {resolved.trained_vocabulary.size:,} and {resolved.model.name}"
        note(f"would train {what} into {out}")
        return
    start = time.monotonic()
    with hint_resume(" to go on with this training"):
        run(resolved, out, overwrite=overwrite)
    if os.environ.get("RANK", "0") == "0":
        show_means(out)
        note(f"trained in {time.monotonic() - start:,.1f} s. Try: irkit index {out} CORPUS --out INDEX")
