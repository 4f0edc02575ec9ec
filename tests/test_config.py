"""Configuration files: numbers, overrides, and errors that name the key."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import ValidationError

from irkit.cli.recipe_options import IndexRecipe
from irkit.config import Config, dump_yaml, read_json, read_mapping, with_overrides
from irkit.errors import ConfigError, StorageError
from irkit.study import StudyConfig
from irkit.training.train_recipe import TrainRecipe


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


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    settings = {"1e-5": ["1.5e3", "2e5", "no", "2024-05-01", "0x1F", "1_0", ".5"], "rate": 1e-5, "n": 7}
    (tmp_path / "a.yaml").write_text(dump_yaml(settings))
    assert read_mapping(tmp_path / "a.yaml") == settings


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
    assert with_overrides({"a": None}, ["a.b.c=2"]) == {"a": {"b": {"c": 2}}}
    with pytest.raises(StorageError, match="missing"):
        read_mapping(tmp_path / "missing.yaml")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        read_json(tmp_path / "x.json")


BOMB = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [{','.join(9 * [f'*{a}'])}]\n" for a, b in pairwise("abcdefghi")
)
MERGED = "a: &a {x: 1}\n" + "".join(
    f"{b}: &{b} {{<<: [{','.join(9 * [f'*{a}'])}]}}\n" for a, b in pairwise("abcdefghi")
)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "aliases stand for more than 100,000 values"),
        (MERGED, "aliases stand for more than 100,000 values"),
        ("a: &a [*a]", "aliases stand for more"),
        ("a: &a {b: *a}", "aliases stand for more"),
        ("a: &a {<<: *a}", "aliases stand for more"),
        (f"a: &a {'x' * 10_000}\nb: [{', '.join(20 * ['*a'])}]", "aliases stand for more"),
        ("a: " + 1_000 * "[", "nested too deeply"),
        ("a: " + 5_000 * "9", "not valid YAML"),
        ("a: !!int x", "not valid YAML"),
        ("a: !!bool x", "not valid YAML"),
        ("a: !!timestamp 2024-05-01", "could not determine a constructor"),
        ("a: !!set {x, y}", "could not determine a constructor"),
        ("a: !!binary aGk=", "could not determine a constructor"),
        ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ],
    ids=lambda text: text[:24],
)
def test_hostile_yaml_is_refused_before_it_grows(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    readers = [
        lambda: read_mapping(file),
        lambda: Recipe.read(file),
        lambda: IndexRecipe.resolve(str(file), {}, []),
        lambda: TrainRecipe.resolve(file),
        lambda: StudyConfig.resolve(file),
    ]
    for read in readers:
        with pytest.raises(ConfigError, match=message) as caught:
            read()
        assert str(file) in str(caught.value)
    value = text.removeprefix("a: ")
    if "\n" not in text and "<<" not in text:
        with pytest.raises(ConfigError, match="is not a YAML value"):
            with_overrides({}, [f"a={value}"])


def test_aliases_that_people_write_are_read(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("one: &same {rate: 1, names: [a, b]}\ntwo: *same\nthree: {<<: *same, rate: 2}\n")
    same = {"rate": 1, "names": ["a", "b"]}
    assert read_mapping(file) == {"one": same, "two": same, "three": same | {"rate": 2}}
    word = "x" * 200_000  # more characters than aliases may stand for
    file.write_text(f"words: [{word}]")
    assert read_mapping(file)["words"] == [word]


def test_values_that_yaml_has_no_form_for_are_refused() -> None:
    around: dict[str, object] = {}
    around["a"] = around
    for data in (around, {"a": {1, 2}}, {"a": Path("x")}):
        with pytest.raises(ConfigError, match="expected keys, numbers, strings, lists"):
            with_overrides(data, [])


def test_json_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": ' + 200_000 * "[")
    with pytest.raises(ConfigError, match=r"x.json: not valid JSON"):
        read_json(tmp_path / "x.json")
