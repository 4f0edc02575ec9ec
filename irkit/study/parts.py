"""What the runs of a study are made of, looked at before the first of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from irkit.config import Config
from irkit.errors import IrkitError

if TYPE_CHECKING:
    from irkit.training.recipe import TrainRecipe

__all__ = ["check_parts"]

Part = tuple[str, Any, Callable[[Any], object]]  # what it is, what the recipe says of it, what opens it


def check_parts(recipes: Mapping[str, TrainRecipe]) -> dict[str, IrkitError]:
    """Open the models, data, texts and collections of recipes; those that several have, once.

    Args:
        recipes: By the name of their variant.

    Returns:
        What is wrong with a variant, of those that cannot be trained.
    """
    known: dict[str, IrkitError | None] = {}
    failures: dict[str, IrkitError] = {}
    for variant, recipe in recipes.items():
        for kind, config, open_part in _parts(recipe):
            said = config.model_dump(mode="json") if isinstance(config, Config) else config
            key = json.dumps([kind, said], sort_keys=True)
            if key not in known:
                known[key] = _error_of(open_part, config)
            if (error := known[key]) is not None:
                failures.setdefault(variant, error)
    return failures


def _error_of(open_part: Callable[[Any], object], config: Any) -> IrkitError | None:
    try:
        open_part(config)
    except IrkitError as error:
        return error
    return None


def _parts(recipe: TrainRecipe) -> Iterator[Part]:
    from irkit.model.hub import local_directory
    from irkit.tokenizer import Tokenizer
    from irkit.training.data import check, open_data
    from irkit.training.model_recipe import make_model
    from irkit.training.pretraining.recipe import PretrainRecipe
    from irkit.training.texts import first_texts, read_corpora
    from irkit.training.validation import open_collections
    from irkit.vocabulary.recipe import VocabularyRecipe

    corpora: list[str | None] = []
    if isinstance(recipe, PretrainRecipe) and recipe.pretraining is not None:
        corpora = [*recipe.pretraining.texts, recipe.pretraining.validation]
    if isinstance(recipe, VocabularyRecipe) and (plan := recipe.vocabulary) is not None:
        corpora = list(plan.texts)
        if plan.adaptation is not None:
            corpora += [*plan.adaptation.texts, plan.adaptation.validation]
        if isinstance(plan.target, str):
            yield "tokenizer", plan.target, lambda name: Tokenizer.from_pretrained(local_directory(name))
    # a model whose vocabulary is trained first cannot be made yet
    if not (isinstance(recipe, PretrainRecipe) and recipe.trained_vocabulary is not None):
        yield "model", recipe.model, make_model
    for corpus in filter(None, corpora):
        yield "texts", corpus, lambda source: first_texts(read_corpora([source]), 1)
    for data in recipe.data:
        yield "data", data, lambda config: check(open_data([config]))
    for collection in recipe.evaluation:
        yield "evaluation", collection, lambda config: open_collections([config])
