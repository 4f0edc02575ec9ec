"""Where an index computes: on a GPU that torch can use, if it may and its memory suffices."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal, TypeVar

import torch

from irkit.errors import ConfigError

__all__ = ["check_device", "on_device"]

T = TypeVar("T")
_GIB = 1 << 30


def check_device(choice: Literal["auto", "cpu", "gpu"]) -> None:
    """Refuse ``"gpu"`` where torch finds none.

    Raises:
        ConfigError: It does not.
    """
    if choice == "gpu" and not torch.cuda.is_available():
        raise ConfigError("index: device is 'gpu', but torch finds none; set it to 'auto' or 'cpu'")


def on_device(
    choice: Literal["auto", "cpu", "gpu"], purpose: str, needed: int, work: Callable[[torch.device], T]
) -> T:
    """Do something on the device that a configuration chooses.

    Args:
        choice: ``device`` of the configuration.
        purpose: What is done, in the -ing form, for messages.
        needed: Bytes that it takes on a GPU.
        work: Called with the device; once more with the CPU where a GPU's memory runs out under ``"auto"``,
            which is told by a warning.

    Returns:
        What ``work`` returns.

    Raises:
        ConfigError: ``"gpu"`` is chosen, and torch finds none or its memory does not suffice.
    """
    check_device(choice)
    cpu = torch.device("cpu")
    if choice == "cpu" or not torch.cuda.is_available():
        return work(cpu)
    free = _free()
    if needed <= free:
        try:
            return work(torch.device("cuda"))
        except torch.OutOfMemoryError:
            pass  # what it had allocated is let go of with the exception
    lacks = f"{purpose} takes {needed / _GIB:.1f} GB of the GPU"
    if choice == "gpu":
        raise ConfigError(
            f"index: {lacks}, which has {free / _GIB:.1f} GB free; free some, or set device to 'auto' "
            "or 'cpu'"
        )
    # always the same words, so that Python shows them once
    warnings.warn(f"index: {lacks}, which are not free, so the CPU does it", stacklevel=3)
    return work(cpu)


def _free() -> int:
    """Return the bytes of GPU memory that are free, or that torch has cached for later allocations."""
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
