"""Choose the device of an index: a GPU of torch, if the settings allow it and its memory suffices."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal, TypeVar

import torch

from irkit.errors import ConfigError

T = TypeVar("T")
_GIB = 1 << 30


def check_device(choice: Literal["auto", "cpu", "gpu"]) -> None:
    """Check that torch finds a GPU if ``"gpu"`` is chosen.

    Raises:
        ConfigError: torch finds no GPU.
    """
    if choice == "gpu" and not torch.cuda.is_available():
        raise ConfigError("index: device is 'gpu', but torch finds none; set it to 'auto' or 'cpu'")


def on_device(
    choice: Literal["auto", "cpu", "gpu"], purpose: str, needed: int, work: Callable[[torch.device], T]
) -> T:
    """Do work on the device that a configuration chooses.

    Args:
        choice: ``device`` of the configuration.
        purpose: Name of the work in the -ing form, for messages.
        needed: Bytes that the work takes on a GPU.
        work: Called with the device. If the memory of a GPU runs out under ``"auto"``, it is called again
            with the CPU, and a warning says so.

    Returns:
        What ``work`` returns.

    Raises:
        ConfigError: ``"gpu"`` is chosen, and torch finds no GPU, or its memory does not suffice.
    """
    check_device(choice)
    cpu = torch.device("cpu")
    if choice == "cpu" or not torch.cuda.is_available():
        return work(cpu)
    # what torch has cached serves later allocations, too
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if needed <= free:
        try:
            return work(torch.device("cuda"))
        except torch.OutOfMemoryError:
            pass  # its allocations are released with the exception
    lacks = f"{purpose} takes {needed / _GIB:.1f} GB of the GPU"
    if choice == "gpu":
        raise ConfigError(
            f"index: {lacks}, which has {free / _GIB:.1f} GB free; free some, or set device to 'auto' "
            "or 'cpu'"
        )
    # always the same words, so that Python shows the warning once
    warnings.warn(f"index: {lacks}, which are not free, so the CPU does it", stacklevel=3)
    return work(cpu)
