"""Recipes that come with irkit: each can be read, and says how it is run."""

from pathlib import Path

import pytest
import yaml

from irkit.training.pretraining.pretrain_recipe import PretrainRecipe
from irkit.training.train_recipe import TrainRecipe
from irkit.vocabulary.transfer_recipe import VocabularyRecipe

RECIPES = sorted((Path(__file__).parents[1] / "examples" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_of_ours_can_be_read(path: Path, tmp_path: Path) -> None:
    stages: dict[str, tuple[type[TrainRecipe], str]] = {
        "vocabulary": (VocabularyRecipe, "transfer-vocab"),
        "pretraining": (PretrainRecipe, "pretrain"),
    }
    found = [stages[key] for key in yaml.safe_load(path.read_text()) if key in stages]
    kind, verb = found[0] if found else (TrainRecipe, "train")
    recipe = kind.resolve(path)
    arguments = recipe.arguments(tmp_path)
    assert arguments.seed == recipe.train.get("seed", 42)
    assert kind.resolve(yaml.safe_load(recipe.to_yaml())) == recipe
    if path.stem != "notes":  # which docs/training.md runs
        assert f"irkit {verb} examples/recipes/{path.name} --out " in path.read_text()


def test_each_recipe_has_a_twin_for_a_laptop() -> None:
    names = {path.stem for path in RECIPES} - {"notes", "vocabulary_chemistry"}  # a study has that one
    assert {f"{name.removesuffix('_local').removesuffix('_released')}_local" for name in names} <= names
