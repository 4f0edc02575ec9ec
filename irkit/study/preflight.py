"""Open everything that the recipes of a study name, before the first run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from irkit.config import Config
from irkit.errors import IrkitError

if TYPE_CHECKING:
    from irkit.training.train_recipe import TrainRecipe


def check_parts(recipes: Mapping[str, TrainRecipe]) -> dict[str, IrkitError]:
    """Open the models, data, texts and collections of recipes; a part of several recipes is opened once.

    Args:
        recipes: Recipes by variant.

    Returns:
        The first error of each variant that cannot be trained.
    """
    errors: dict[str, IrkitError | None] = {}
    failures: dict[str, IrkitError] = {}
    for variant, recipe in recipes.items():
        for kind, setting, open_part in _parts(recipe):
            value = setting.model_dump(mode="json") if isinstance(setting, Config) else setting
            key = json.dumps([kind, value], sort_keys=True)
            if key not in errors:
                errors[key] = None
                try:
                    open_part(setting)
                except IrkitError as error:
                    errors[key] = error
            if (failure := errors[key]) is not None:
                failures.setdefault(variant, failure)
    return failures


def _parts(recipe: TrainRecipe) -> Iterator[tuple[str, Any, Callable[[Any], object]]]:
    """Yield the kind of each part, its setting in the recipe, and a function that opens it."""
    from irkit.model.hub import local_directory
    from irkit.tokenizer import Tokenizer
    from irkit.training.model_recipe import make_model
    from irkit.training.pretraining.corpus import first_texts, read_corpora
    from irkit.training.pretraining.pretrain_recipe import PretrainRecipe
    from irkit.training.training_data import check, open_data
    from irkit.training.validation import open_collections
    from irkit.vocabulary.transfer_recipe import VocabularyRecipe

    corpora: list[str | None] = []
    if isinstance(recipe, PretrainRecipe) and recipe.pretraining is not None:
        corpora = [*recipe.pretraining.texts, recipe.pretraining.validation]
    if isinstance(recipe, VocabularyRecipe) and (plan := recipe.vocabulary) is not None:
        corpora = list(plan.texts)
        if plan.adaptation is not None:
            corpora += [*plan.adaptation.texts, plan.adaptation.validation]
        if isinstance(plan.target, str):
            yield "tokenizer", plan.target, lambda name: Tokenizer.from_pretrained(local_directory(name))
    # a model whose vocabulary must be trained first cannot be made yet
    if not (isinstance(recipe, PretrainRecipe) and recipe.trained_vocabulary is not None):
        yield "model", recipe.model, make_model
    for corpus in filter(None, corpora):
        yield "texts", corpus, lambda source: first_texts(read_corpora([source]), 1)
    for data in recipe.data:
        yield "data", data, lambda config: check(open_data([config]))
    for collection in recipe.evaluation:
        yield "evaluation", collection, lambda config: open_collections([config])
