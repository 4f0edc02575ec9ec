"""One training of a study, and its files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from irkit.config import read_mapping
from irkit.errors import ConfigError
from irkit.files import explained, write_text
from irkit.study.config import StudyConfig, folder_name

__all__ = ["Trial", "trials"]


@dataclass(frozen=True)
class Trial:
    """A variant trained with a seed.

    Attributes:
        variant: Name of the variant.
        seed: As ``train.seed``.
        recipe: The whole recipe.
        folder: What `irkit train` makes: the model, its recipe, ``evaluation.jsonl`` when it is finished.
            Beside it are the recipe as it was given, ``.yaml``, all output, ``.log``, and after a failure its
            message, ``.failed``.
    """

    variant: str
    seed: int
    recipe: dict[str, Any]
    folder: Path

    def beside(self, suffix: str) -> Path:
        """The file beside the folder that ends in ``suffix``."""
        return self.folder.with_name(self.folder.name + suffix)

    @property
    def scores(self) -> Path:
        """What a training writes last: values by query."""
        return self.folder / "evaluation.jsonl"

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        written_last = self.folder / "modules.json"
        return self.scores.exists() and (written_last.exists() or self.beside(".done").exists())

    @property
    def failure(self) -> str | None:
        """Why it ended, if it did without having finished."""
        try:
            return self.beside(".failed").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def check(self) -> None:
        """Refuse to go on with what was begun with another recipe.

        Raises:
            ConfigError: The recipe differs.
        """
        begun = (self.folder / "recipe.yaml").exists()
        if not begun or not self.beside(".yaml").exists():
            return
        old, new = _flat(read_mapping(self.beside(".yaml"))), _flat(self.recipe)
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                raise ConfigError(
                    f"{self.folder} was begun with {key}: {old.get(key)!r}, the study now says "
                    f"{new.get(key)!r}; take another --out, or remove this folder"
                )

    def write_recipe(self) -> Path:
        """Write what `irkit train` reads."""
        path = self.beside(".yaml")
        with explained(f"making {path.parent}"):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, yaml.safe_dump(self.recipe, sort_keys=False, allow_unicode=True))
        return path

    def drop_model(self) -> None:
        """Keep results and recipe alone."""
        with explained(f"removing the model in {self.folder}"):
            self.beside(".done").touch()
            for path in self.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.suffix != ".jsonl" and path.name != "recipe.yaml":
                    path.unlink()


def trials(study: StudyConfig, out: Path) -> list[Trial]:
    """All trainings of a study in the order in which they run."""
    return [
        Trial(variant, seed, recipe, out / "runs" / folder_name(variant) / f"seed-{seed}")
        for variant, seed, recipe in study.recipes()
    ]


def _flat(node: Any, path: str = "") -> dict[str, Any]:
    """Keys with dots."""
    if not isinstance(node, Mapping) or not node:
        return {path: node}
    return {
        below: value
        for key, part in node.items()
        for below, value in _flat(part, f"{path}.{key}" if path else str(key)).items()
    }
