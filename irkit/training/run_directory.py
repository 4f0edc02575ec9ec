"""The directory of a run, which becomes a model directory when ``modules.json`` appears in it.

`irkit train`, `irkit pretrain`, `irkit transfer-vocab` and each run of `irkit study` write such a directory.
It can be killed at any moment, and the same command resumes it::

    recipe.yaml        the recipe; it is written first, and only the same recipe resumes
    checkpoints/       the newest checkpoints of the trainer, see `irkit.training.checkpoints`
    log.jsonl          losses, learning rates and measures: one object per logged step
    evaluation.jsonl   measures of the finished model: one object per collection, measure and query
    stages/NAME/       the stages of a recipe that has several, see `run_stage`
    replaced/          the model that was here before, until the new one is complete
    modules.json       written last, after all other files of the model

A run calls `check_directory` before any work, `prepare_directory` before it writes, and `finish_directory` at
the end.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from irkit.config import Config, read_mapping
from irkit.errors import StorageError
from irkit.utils.atomic import check_folder, explained, publish_entries, publish_folder, write_text

DONE = "modules.json"
"""The file that is written last; a directory that has it is a model."""
_RECIPE, _REPLACED = "recipe.yaml", "replaced"


def is_complete(directory: Path) -> bool:
    """Return True if the directory is a finished model."""
    return (directory / DONE).is_file()


def check_directory(directory: Path, recipe: Config, overwrite: bool = False) -> None:
    """Refuse a directory that holds anything but an unfinished run of the same recipe.

    Raises:
        StorageError: The directory holds other files, a finished model or a run of another recipe, or it
            cannot be written to.
    """
    check_folder(directory, f"training into {directory}")
    # a trainer leaves folders, and a kill unfinished files, before the recipe is written
    if not any(path.is_file() and path.suffix != ".part" for path in directory.rglob("*")):
        return
    if not (directory / _RECIPE).is_file():
        names = ", ".join(sorted(path.name for path in directory.iterdir())[:3])
        raise StorageError(
            f"training into {directory}: the directory holds other files ({names}); "
            "choose a new or an empty one"
        )
    if overwrite:
        return
    if is_complete(directory):
        raise StorageError(
            f"training into {directory}: it holds a trained model; choose another directory or --overwrite"
        )
    if not _is_begun(directory, recipe):
        raise StorageError(
            f"training into {directory}: what was begun there has another recipe, {directory / _RECIPE}; go "
            "on with that one, choose another directory or --overwrite"
        )


def prepare_directory(directory: Path, recipe: Config, overwrite: bool = False) -> None:
    """Write the recipe, and clear the directory unless it holds an unfinished run of the same recipe.

    With ``overwrite`` a finished model is moved to ``replaced/``, where it stays until `finish_directory`.

    Raises:
        StorageError: The directory cannot be written to.
    """
    with explained(f"training into {directory}"):
        if overwrite and directory.exists() and not _is_begun(directory, recipe):
            _clear(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(".*.part"):  # of a killed process
            _remove(leftover)
        if not (directory / _RECIPE).exists():
            write_text(directory / _RECIPE, recipe.to_yaml())


def finish_directory(
    directory: Path, source: Path, *, leave: tuple[str, ...] = (), move: bool = False
) -> None:
    """Put a model into the directory, ``modules.json`` last, and delete the model that it replaces.

    Args:
        directory: Becomes a model directory.
        source: Directory of the model, such as the one of the last stage.
        leave: Names of files in ``source`` that are not copied; files of a run are never copied.
        move: Delete ``source``, before ``modules.json`` appears: a kill at any moment leaves either an
            unfinished run, whose trainer saves the model again, or a model without leftovers.

    Raises:
        StorageError: Writing failed.
    """
    skipped = ("checkpoints", _RECIPE, *leave)
    with explained(f"saving the model to {directory}"):
        modules = (source / DONE).read_text(encoding="utf-8")
        publish_entries((path for path in source.iterdir() if path.name not in (*skipped, DONE)), directory)
        if move:
            shutil.rmtree(source)
        write_text(directory / DONE, modules)
    with explained(f"training into {directory}"):
        _remove(directory / _REPLACED)


def run_stage(folder: Path, make: Callable[[Path], object], *, resumes: bool = False) -> Path:
    """Make the directory of a stage, unless the stage is complete already.

    Args:
        folder: Directory of the stage.
        make: Writes the stage into the directory that it is called with.
        resumes: The stage is a run of its own: ``make`` is called with ``folder``, resumes what it finds
            there, and completes it with ``modules.json``. Otherwise ``make`` writes into ``.NAME.partial``,
            which gets its name when it is whole; a killed stage starts from its beginning.

    Returns:
        The folder.

    Raises:
        StorageError: The directory cannot be made.
    """
    if resumes:
        if not is_complete(folder):
            make(folder)
    elif not folder.is_dir():
        aside = folder.with_name(f".{folder.name}.partial")
        with explained(f"making {aside}"):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        make(aside)
        publish_folder(aside, folder)
    return folder


def _is_begun(directory: Path, recipe: Config) -> bool:
    """Return True if the directory holds an unfinished run of the same recipe."""
    if not (directory / _RECIPE).is_file() or is_complete(directory):
        return False
    return read_mapping(directory / _RECIPE) == recipe.model_dump(mode="json")


def _clear(directory: Path) -> None:
    """Move a finished model to ``replaced/``; delete an unfinished run."""
    replaced, complete = directory / _REPLACED, is_complete(directory)
    if complete and is_complete(replaced):
        shutil.rmtree(replaced)
    last = [DONE, _RECIPE]  # if the process is killed between the two, the same command still resumes
    for path in sorted(directory.iterdir(), key=lambda path: path.name in last and last.index(path.name) + 1):
        if path != replaced and complete:
            replaced.mkdir(exist_ok=True)
            path.replace(replaced / path.name)
        elif path != replaced:
            _remove(path)


def _remove(path: Path) -> None:
    """Delete a file or a directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
