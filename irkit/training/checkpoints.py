"""Checkpoints of a training: directories that appear whole or not at all."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from irkit.errors import CorruptError, StorageError
from irkit.utils.atomic import explained, remove_folder

STATE = "training"
"""Folder of a checkpoint with everything that a resume needs; the rest is a model directory."""
_WEIGHTS = "weights.safetensors"


def all_checkpoints(folder: str | Path) -> list[Path]:
    """Return the checkpoints ``checkpoint-STEP`` in a folder, the oldest first."""
    matches = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in Path(folder).glob("*")]
    return [path for _, path in sorted((int(match[1]), path) for match, path in matches if match)]


def newest_checkpoint(folder: str | Path) -> Path | None:
    """Return the checkpoint of the last step, or None; unfinished checkpoints have other names."""
    return next(reversed(all_checkpoints(folder)), None)


def rotate(folder: str | Path, limit: int | None, best: str | Path | None = None) -> None:
    """Delete old checkpoints; the newest, the ``best`` and the last of the others remain, ``limit`` in all.

    Args:
        folder: Folder of the checkpoints.
        limit: Number of checkpoints to keep; None or 0 deletes none. The newest and the best always stay.
        best: Checkpoint of the best model, if there is one.

    Raises:
        StorageError: Deleting failed.
    """
    paths = all_checkpoints(folder)
    if limit is None or limit < 1:
        return
    remaining = {paths[-1]} if paths else set()
    remaining |= {path for path in paths if best is not None and path.name == Path(best).name}
    for path in reversed(paths):
        if len(remaining) < limit:
            remaining.add(path)
        elif path not in remaining:
            with explained(f"deleting {path}"):
                remove_folder(path)


@contextlib.contextmanager
def saving(checkpoint: Path) -> Iterator[None]:
    """Turn the errors of torch, safetensors and Python on a full disk into a StorageError."""
    try:
        with explained(f"saving {checkpoint}"):
            yield
    except SafetensorError as error:
        raise StorageError(f"saving {checkpoint}: {error}") from error
    except RuntimeError as error:
        if "inline_container" not in str(error):  # the writer of torch.save
            raise
        raise StorageError(f"saving {checkpoint}: torch could not write it; is the disk full?") from error


def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters by name; with fsdp they are gathered, and all processes call this."""
    named = ((name, value) for name, value in module.named_parameters() if value.requires_grad)
    return {
        name: value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()
        for name, value in named
    }


@torch.no_grad()
def put_weights(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load `trained_weights` into a module.

    Raises:
        CorruptError: The weights do not fit the module; the message names their ``source``.
    """
    trained: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
    expected, actual = ({name: value.shape for name, value in part.items()} for part in (trained, weights))
    if expected != actual:
        odd = sorted(expected.items() ^ actual.items(), key=str)[0]
        raise CorruptError(
            f"resuming from {source}: it is of another model or of other learning_rates; {odd[0]} "
            f"{tuple(odd[1])} is only in one of them"
        )
    for name, value in trained.items():
        weight = weights[name].to(value.device)
        if isinstance(value, DTensor):
            weight = distribute_tensor(weight, value.device_mesh, value.placements)
        value.copy_(weight)


def save_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write named tensors to the file in ``folder`` that `load_weights` reads; call it inside `saving`."""
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / _WEIGHTS)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Read the file of `save_weights`.

    Raises:
        StorageError: The file does not exist.
        CorruptError: The file is damaged.
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
