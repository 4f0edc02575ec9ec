"""Configuration of a study: variants of one recipe, each trained with several seeds."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, model_validator

from irkit.arguments import suggest
from irkit.config import Config, read_mapping, with_overrides
from irkit.errors import BadTypeError, ConfigError

Changes = dict[str, Any]
"""New values by key of the recipe, with dots."""


class StudyConfig(Config):
    """Variants of a recipe, each trained with all seeds.

    The variants are the entries of ``variants``, then every combination of one value of each axis of
    ``grid``. Changes are written as keys with dots, such as ``model.projection.depth``. A new value replaces
    the whole value of the recipe.

    Attributes:
        name: Title of the report.
        recipe: Recipe of `irkit train`, `pretrain` or `transfer-vocab` without a seed. A study file may give
            the path of a recipe file instead, relative to the study file.
        variants: For each name of a variant, its changes of the recipe.
        grid: For each axis, its possible values: changes of the recipe by name; or, if the axis is a key of
            the recipe, a list of values of this key.
        exclude: Combinations of the grid to leave out. Each gives a name or a value for some axes; a variant
            that has all of these is left out.
        baseline: Name of the variant that the others are compared with.
        seeds: Values of ``train.seed``.
        keep_models: Whether the trained models are kept; results and recipes always stay.

    Examples:
        >>> study = StudyConfig(
        ...     recipe={"model": {"name": "MODEL", "kind": "multi_vector"}},
        ...     variants={"linear": {"model.projection": "linear"}},
        ...     grid={"model.projection.depth": [2, 3], "rate": {"slow": {"train.learning_rate": 1e-6}}},
        ...     baseline="linear",
        ...     seeds=[1, 2],
        ... )
        >>> list(study.changes())
        ['linear', 'depth=2, slow', 'depth=3, slow']

    Source: Clavié et al. 2026, "Simple Projection Variants Improve ColBERT Performance", tables 1 to 4.
    """

    name: str = "Study"
    recipe: dict[str, Any]
    variants: dict[str, Changes] = Field({})
    grid: dict[str, list[Any] | dict[str, Changes]] = Field({})
    exclude: list[dict[str, Any]] = Field([])
    baseline: str
    seeds: list[int] = Field(min_length=1)
    keep_models: bool = True

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = list(self.changes())
        if len(names) < 2:
            raise ValueError(f"expected two variants or more, got {len(names)}; add some to variants or grid")
        folders = Counter(map(folder_name, names))
        for what, count in (("folder of a variant", folders), ("seed", Counter(map(str, self.seeds)))):
            if twice := [part for part in count if count[part] > 1]:
                raise ValueError(f"{what} {twice[0]!r} is there twice; expected different ones")
        if self.baseline not in names:
            raise ValueError(f"baseline: no variant {self.baseline!r}; {suggest(self.baseline, names)}")
        return self

    @classmethod
    def resolve(
        cls, study: StudyConfig | Mapping[str, Any] | str | Path, overrides: Iterable[str] = ()
    ) -> StudyConfig:
        """Make the configuration of a study, and check it.

        Args:
            study: A study, its keys and values, or a YAML file.
            overrides: Changes of the recipe of all variants, such as ``"train.max_steps=10"``.

        Raises:
            ConfigError: A key or a value is unknown, or missing.
            StorageError: A file cannot be read.
        """
        source, folder = "study", Path()
        if isinstance(study, str | Path):
            source, folder, study = str(study), Path(study).parent, read_mapping(study)
        if not isinstance(study, Mapping | StudyConfig):
            raise BadTypeError(f"study: got {study!r:.60}, expected a file or keys and values")
        data = study.model_dump(mode="json") if isinstance(study, StudyConfig) else dict(study)
        if isinstance(data.get("recipe"), str):
            data["recipe"] = read_mapping(folder / data["recipe"])
        if isinstance(data.get("recipe"), Mapping):
            data["recipe"] = with_overrides(data["recipe"], overrides)
        return cls.parse(data, source)

    def changes(self) -> dict[str, Changes]:
        """Return for each variant its changes of the recipe: name to key to value, in the report's order.

        Variants of the grid are included.
        """
        combinations = dict[str, Changes]()
        for labels, changes in self._combinations():
            if (name := ", ".join(labels)) in combinations:
                raise ValueError(f"grid: two combinations are named {name!r}; rename values")
            combinations[name] = changes
        if both := sorted(self.variants.keys() & combinations.keys()):
            raise ValueError(f"variant {both[0]!r} is in variants and in grid; rename it in variants")
        return self.variants | combinations

    def recipes(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yield the variant's name, the seed and the whole recipe of every run.

        All variants with the first seed come first, then all with the second.

        Raises:
            ConfigError: A change does not fit the recipe.
        """
        for seed in self.seeds:
            for name, changes in self.changes().items():
                items = [*changes.items(), ("train.seed", seed)]
                try:
                    recipe = with_overrides(self.recipe, [f"{key}={_quoted(v)}" for key, v in items])
                except ConfigError as error:
                    raise ConfigError(f"variant {name!r}: {error}") from error
                yield name, seed, recipe

    def _combinations(self) -> Iterator[tuple[list[str], Changes]]:
        if not self.grid:
            return
        axes: list[dict[str, Changes]] = []
        for axis, values in self.grid.items():
            if isinstance(values, list):
                labels = [_label(axis, value) for value in values]
                if again := [label for label in labels if labels.count(label) > 1]:
                    raise ValueError(f"grid: axis {axis!r} has {again[0]!r} twice; name its values")
                values = {label: {axis: value} for label, value in zip(labels, values, strict=True)}
            if not values:
                raise ValueError(f"grid: axis {axis!r} has no values")
            axes.append(values)
        left_out = [self._labels(combination) for combination in self.exclude]
        for combination in itertools.product(*(axis.items() for axis in axes)):
            labels = [label for label, _ in combination]
            if not any(skipped <= set(zip(self.grid, labels, strict=True)) for skipped in left_out):
                yield labels, {key: value for _, changes in combination for key, value in changes.items()}

    def _labels(self, combination: Mapping[str, Any]) -> set[tuple[str, str]]:
        """Convert an entry of ``exclude`` to pairs of an axis and the label of its value, after a check."""
        labels = set()
        for axis, value in combination.items():
            if axis not in self.grid:
                raise ValueError(f"exclude: the grid has no axis {axis!r}; {suggest(axis, list(self.grid))}")
            values = self.grid[axis]
            known = values if isinstance(values, list) else list(values)
            if (choice := value if isinstance(values, list) else str(value)) not in known:
                near = suggest(str(value), list(map(str, known)))
                raise ValueError(f"exclude: axis {axis!r} has no {value!r}; {near}")
            choice = known[known.index(choice)]  # 1 of the grid for 1.0
            labels.add((axis, _label(axis, choice) if isinstance(values, list) else choice))
        return labels


def folder_name(variant: str) -> str:
    """Convert the name of a variant to the name of its folder: lower case, with ``-`` for other signs."""
    return re.sub(r"[^\w.=+]+", "-", variant).strip("-.").lower() or "-"


def _quoted(value: Any) -> str:
    """Return a value as YAML with quoted strings, so that no string is read as another type."""
    return yaml.safe_dump(value, default_style='"', allow_unicode=True, sort_keys=False)


def _label(axis: str, value: Any) -> str:
    return f"{axis.rpartition('.')[2]}={value if isinstance(value, str) else json.dumps(value)}"
