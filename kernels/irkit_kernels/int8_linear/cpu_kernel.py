"""The int8 linear map on the CPU: how weights are packed, and how rows are shared among threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from .._jit import compile_ir, cpu_features
from .._threads import share
from .cpu_tile import BLOCK, HEADER, LANES, PANEL, TILE_ROWS, write_ir

__all__ = ["MAX_K", "has_vnni", "linear", "pack", "packed_shape"]

MAX_K = (2**31 - 1) // (255 * 127)  # up to here the int32 sums cannot overflow
_MIN_WORK = 1 << 25  # multiply-adds worth a thread, about 0.15 ms


def has_vnni() -> bool:
    """Whether this CPU has the dot product instruction that makes int8 worth while."""
    return "avx512vnni" in cpu_features()


def packed_shape(n: int, k: int) -> tuple[int, int]:
    """Shape of the packed weight of a map from ``k`` to ``n`` features."""
    return -(-n // PANEL), HEADER + PANEL * (-(-k // 4) * 4)


def pack(weight: np.ndarray, scale: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Lay out int8 ``weight (n, k)``, float32 ``scale (n,)`` and ``bias (n,)`` as a tile reads them.

    Returns:
        uint8 of `packed_shape`: a panel of 64 output features a row, first their sums of weights, scales and
        biases, then their weights: 4 along k of the first feature, 4 of the second, ..., then the next 4
        along k of the first feature, ...
    """
    n, k = weight.shape
    panels, steps = -(-n // PANEL), -(-k // 4)
    padded = np.zeros((panels * PANEL, 4 * steps), np.int8)
    padded[:n, :k] = weight
    header = np.zeros((3, panels * PANEL), np.int32)
    header[0] = padded.sum(1, dtype=np.int32)
    header[1, :n] = scale.astype(np.float32).view(np.int32)
    if bias is not None:
        header[2, :n] = bias.astype(np.float32).view(np.int32)
    heads = header.reshape(3, panels, PANEL).swapaxes(0, 1).reshape(panels, -1)
    body = padded.reshape(panels, PANEL, steps, 4).swapaxes(1, 2).reshape(panels, -1)
    return np.concatenate([heads.view(np.uint8), body.view(np.uint8)], axis=1)


def linear(x: Tensor, packed: Tensor, out: Tensor, *, gelu: bool, threads: int) -> None:
    """Fill float32 ``out (m, n)`` from float32 ``x (m, k)``, all contiguous, on any number of threads."""
    (m, k), n = x.shape, out.shape[1]
    kernel = _compiled(gelu, has_vnni())
    scratch_size = BLOCK * (-(-k // LANES) * LANES + 8)

    def run(start: int, stop: int) -> None:
        scratch = torch.empty(scratch_size, dtype=torch.uint8, device="cpu")
        rows, results = x.data_ptr() + 4 * k * start, out.data_ptr() + 4 * n * start
        kernel(rows, packed.data_ptr(), results, scratch.data_ptr(), stop - start, k, n)

    share(run, m, min(threads, m * k * n // _MIN_WORK), parts=1, multiple=TILE_ROWS)


@cache
def _compiled(gelu: bool, vnni: bool) -> Callable[..., None]:
    pointers, numbers = [ctypes.c_void_p] * 4, [ctypes.c_int64] * 3
    return compile_ir(write_ir(gelu, vnni), "int8_linear", [*pointers, *numbers])
