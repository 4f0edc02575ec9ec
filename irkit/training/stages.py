"""Stages of a recipe: each has a directory of its own, which is there when the stage is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from irkit.errors import StorageError
from irkit.training.checkpoints import publish
from irkit.training.model_recipe import ModelRecipe, PretrainedModel

__all__ = ["DONE", "publish_stage", "stage", "stage_model"]

DONE = "modules.json"
"""What a directory gets last, and is a model by."""
_OF_STAGE = ("checkpoints", "recipe.yaml")


@contextmanager
def stage(folder: Path) -> Iterator[Path | None]:
    """A directory to write a stage into, which gets its name at the end; None if that is there.

    Raises:
        StorageError: It cannot be made.
    """
    if folder.is_dir():
        yield None
        return
    aside = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    except OSError as error:
        raise StorageError(f"making {aside}: {error.strerror}") from error
    yield aside
    publish(aside, folder)


def stage_model(source: ModelRecipe, folder: Path) -> PretrainedModel:
    """The model of a stage, with what the recipe says of the source beside what the stage has changed."""
    kept = PretrainedModel.model_fields.keys() & type(source).model_fields.keys() - {
        "kind",
        "name",
        "pooling",
    }
    return PretrainedModel(name=str(folder), **{name: getattr(source, name) for name in kept})


def publish_stage(folder: Path, place: Path, kept: Sequence[str] = ()) -> None:
    """Give the model of a stage to the whole; weights are there once if the file system has links.

    Args:
        folder: Of the stage.
        place: Of the whole.
        kept: Names of what stays with the stage, beside its checkpoints and its recipe.

    Raises:
        StorageError: Writing failed.
    """
    try:
        paths = [path for path in folder.iterdir() if path.name not in (*_OF_STAGE, *kept)]
        for path in sorted(paths, key=lambda path: path.name == DONE):
            target, aside = place / path.name, place / f".{path.name}.partial"
            for old in (target, aside):
                shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
            if path.is_dir():
                shutil.copytree(path, aside, copy_function=_link)
            else:
                _link(path, aside)
            aside.rename(target)
    except OSError as error:
        raise StorageError(f"saving the model to {place}: {error}") from error


def _link(source: str | Path, target: str | Path) -> None:
    if Path(source).suffix == ".safetensors":
        with suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)
