"""Checkpoints of a training: directories that appear whole or not at all."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from irkit.errors import CorruptError, StorageError
from irkit.files import explained
from irkit.formats import flush

__all__ = [
    "STATE",
    "all_checkpoints",
    "load_weights",
    "newest_checkpoint",
    "publish",
    "rotate",
    "save_weights",
    "saving",
]

STATE = "training"
"""Folder of a checkpoint with what going on with the training takes; the rest is a model directory."""
_WEIGHTS = "weights.safetensors"


def all_checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints ``checkpoint-STEP`` in a folder, the oldest first."""
    found = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in Path(folder).glob("*")]
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


def newest_checkpoint(folder: str | Path) -> Path | None:
    """The checkpoint of the last step, or None if there is none; unfinished ones have other names."""
    return next(reversed(all_checkpoints(folder)), None)


def publish(unfinished: Path, checkpoint: Path) -> None:
    """Give a finished directory its name, after all its content has reached the disk.

    Raises:
        StorageError: Writing failed.
    """
    with explained(f"saving {checkpoint}"):
        flush(unfinished)
        _remove(checkpoint)
        unfinished.rename(checkpoint)


def rotate(folder: str | Path, limit: int | None, best: str | Path | None = None) -> None:
    """Delete all but the last ``limit`` checkpoints; of these the ``best`` one is kept in any case.

    The newest is kept too, so that training can go on.

    Raises:
        StorageError: Deleting failed.
    """
    paths = all_checkpoints(folder)
    if limit is None or limit < 1:
        return
    kept = {paths[-1]} if paths else set()
    kept |= {path for path in paths if best is not None and path.name == Path(best).name}
    for path in reversed(paths):
        if len(kept) < limit:
            kept.add(path)
        elif path not in kept:
            with explained(f"deleting {path}"):
                _remove(path)


@contextlib.contextmanager
def saving(checkpoint: Path) -> Iterator[None]:
    """Turn what torch, safetensors and Python each make of a full disk into a StorageError."""
    try:
        with explained(f"saving {checkpoint}"):
            yield
    except SafetensorError as error:
        raise StorageError(f"saving {checkpoint}: {error}") from error
    except RuntimeError as error:
        if "inline_container" not in str(error):  # the part of torch.save that writes
            raise
        raise StorageError(f"saving {checkpoint}: torch could not write it; is the disk full?") from error


def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """Trained parameters by name, whole where processes have parts of them: then all have to call this."""
    named = ((name, value) for name, value in module.named_parameters() if value.requires_grad)
    return {
        name: value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()
        for name, value in named
    }


@torch.no_grad()
def put_weights(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Undo `trained_weights`.

    Raises:
        CorruptError: The weights are not those of the module; the message names their ``source``.
    """
    trained: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
    known, given = ({name: value.shape for name, value in each.items()} for each in (trained, weights))
    if known != given:
        odd = sorted(known.items() ^ given.items(), key=str)[0]
        raise CorruptError(
            f"resuming from {source}: it is of another model or of other learning_rates; {odd[0]} "
            f"{tuple(odd[1])} is only in one of them"
        )
    for name, value in trained.items():
        new = weights[name].to(value.device)
        if isinstance(value, DTensor):
            new = distribute_tensor(new, value.device_mesh, value.placements)
        value.copy_(new)


def save_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write named tensors beside the rest of the state of a training, inside `saving`."""
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / _WEIGHTS)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """What `save_weights` wrote.

    Raises:
        StorageError: It is not there.
        CorruptError: It is damaged.
    """
    path = folder / _WEIGHTS
    if not path.is_file():
        raise StorageError(
            f"resuming from {folder.parent}: there is no {STATE}/{_WEIGHTS}; no such checkpoint"
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CorruptError(f"resuming from {path}: {error}") from error


def _remove(checkpoint: Path) -> None:
    """Delete a directory that nobody takes for a checkpoint meanwhile."""
    if checkpoint.exists():
        doomed = checkpoint.with_name(f".{checkpoint.name}.deleted")
        shutil.rmtree(doomed, ignore_errors=True)
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)
