"""One run of a study, and its files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from irkit.config import dump_yaml, read_json, read_mapping
from irkit.errors import ConfigError
from irkit.study.study_config import StudyConfig, folder_name
from irkit.training.run_directory import is_complete
from irkit.utils.atomic import explained, write_text

FACTS = "vocabulary_transfer.json"  # `irkit.vocabulary.transfer.FACTS`, without the imports of that module


@dataclass(frozen=True)
class Trial:
    """One run of a study: a variant that is trained with one seed.

    Attributes:
        variant: Name of the variant.
        seed: Value of ``train.seed``.
        recipe: The whole recipe.
        folder: Directory of the run, see `irkit.training.run_directory`. Files beside the directory have its
            name and a suffix: ``.yaml`` is the recipe, ``.log`` the output of the process, ``.failed`` the
            message of a failure.
    """

    variant: str
    seed: int
    recipe: dict[str, Any]
    folder: Path

    def beside(self, suffix: str) -> Path:
        """Return the path of a file beside ``folder``: the path of ``folder`` with ``suffix`` appended."""
        return self.folder.with_name(self.folder.name + suffix)

    @property
    def results(self) -> Path:
        """Path of the measures of the finished model by query; the file is written just before the model."""
        return self.folder / "evaluation.jsonl"

    @property
    def tokens_per_word(self) -> float | None:
        """Tokens per word of the new vocabulary, in the texts of the adaptation; None without a transfer."""
        if not (path := self.folder / FACTS).exists():
            return None
        return float(read_json(path)["fragmentation"]["target"])

    @property
    def finished(self) -> bool:
        """Whether the run is complete; its model may be deleted."""
        return self.results.exists() and (is_complete(self.folder) or self.beside(".done").exists())

    @property
    def failure(self) -> str | None:
        """Message of the last attempt if it failed; None if it did not fail, or the run is complete."""
        if self.finished:
            return None
        try:
            return self.beside(".failed").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def check(self) -> None:
        """Check that a run that was begun before had the same recipe.

        Raises:
            ConfigError: The run was begun with another recipe.
        """
        begun = (self.folder / "recipe.yaml").exists()
        if not begun or not self.beside(".yaml").exists():
            return
        old, new = dict(_flatten(read_mapping(self.beside(".yaml")))), dict(_flatten(self.recipe))
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                raise ConfigError(
                    f"{self.folder} was begun with {key}: {old.get(key)!r}, the study now says "
                    f"{new.get(key)!r}; take another --out, or remove this folder"
                )

    def write_recipe(self) -> Path:
        """Write the recipe to the ``.yaml`` file beside ``folder``, and return the path of this file."""
        path = self.beside(".yaml")
        with explained(f"making {path.parent}"):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, dump_yaml(self.recipe))
        return path

    def drop_model(self) -> None:
        """Delete all of ``folder`` but recipe, ``.jsonl`` files and facts of a transfer; `finished` stays."""
        with explained(f"removing the model in {self.folder}"):
            self.beside(".done").touch()
            for path in self.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.suffix != ".jsonl" and path.name not in ("recipe.yaml", FACTS):
                    path.unlink()


def trials(study: StudyConfig, out: Path) -> list[Trial]:
    """Return all runs of a study, in the order in which they start."""
    return [
        Trial(variant, seed, recipe, out / "runs" / folder_name(variant) / f"seed-{seed}")
        for variant, seed, recipe in study.recipes()
    ]


def _flatten(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield pairs of a key and a value for nested mappings; the keys of all levels are joined by dots."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
