"""Configuration files: numbers, overrides, and errors that name the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from irkit.config import Config, read_json, read_mapping, with_overrides
from irkit.errors import ConfigError, StorageError


class Train(Config):
    learning_rate: float = 1e-3
    epochs: int = 1


class Recipe(Config):
    model: str
    train: Train = Train()


def test_yaml_numbers_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("model: m\ntrain:\n  learning_rate: 1e-5\n")
    recipe = Recipe.read(file)
    assert recipe.train.learning_rate == 1e-5
    changed = Recipe.read(file, ["train.learning_rate=2E-4", "train.epochs=3", "model=x: y"[:7]])
    assert (changed.train.learning_rate, changed.train.epochs, changed.model) == (2e-4, 3, "x")
    assert read_mapping(file)["train"]["learning_rate"] == 1e-5
    for text, value in [
        ("1e5", 1e5),
        ("-2.5e-3", -0.0025),
        (".5", 0.5),
        ("7", 7),
        ("1.0", 1.0),
        ("2024-05-01", "2024-05-01"),
        ("e5", "e5"),
    ]:
        assert with_overrides({}, [f"a.b={text}"]) == {"a": {"b": value}}
    file.write_text("model: 2024-05-01\n")
    assert Recipe.read(file, "train.epochs=2") == Recipe(model="2024-05-01", train=Train(epochs=2))
    assert Recipe.read(file).to_yaml().startswith("model: '2024-05-01'")
    with pytest.raises(ValidationError):
        recipe.model = "frozen"
    with pytest.raises(ConfigError, match=r"Recipe: .*unknown key 'modell'; did you mean 'model'"):
        Recipe(modell="x")


def test_a_changed_copy_is_checked() -> None:
    recipe = Recipe(model="m")
    assert recipe.model_copy(update={"train": {"epochs": 3}}) == Recipe(model="m", train=Train(epochs=3))
    assert recipe.model_copy(update={"model": "n"}).model_fields_set == {"model"}
    with pytest.raises(ConfigError, match=r"Train: unknown key 'epoch'; did you mean 'epochs'"):
        recipe.train.model_copy(update={"epoch": 3})
    with pytest.raises(ConfigError, match=r"Train: epochs: .*integer"):
        recipe.train.model_copy(update={"epochs": "many"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: m\ntrain: {lerning_rate: 1}",
            "unknown key 'train.lerning_rate'; did you mean 'learning_rate'",
        ),
        ("model: m\nzzz: 1", "unknown key 'zzz'; known keys: model, train"),
        ("train: {}", "missing key 'model'"),
        ("model: m\ntrain: fast", "train: expected keys and values, got 'fast'"),
        ("model: m\ntrain: {epochs: many}", "train.epochs: .* got 'many'"),
        ("- 1\n- 2", "top level, got list"),
        ("a: [", "not valid YAML"),
    ],
)
def test_bad_files_name_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        Recipe.read(file)
    assert str(file) in str(caught.value)


def test_bad_overrides_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected key=value"):
        with_overrides({}, ["learning_rate"])
    with pytest.raises(ConfigError, match="'a' is a value"):
        with_overrides({"a": 1}, ["a.b=2"])
    with pytest.raises(StorageError, match="missing"):
        read_mapping(tmp_path / "missing.yaml")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        read_json(tmp_path / "x.json")
