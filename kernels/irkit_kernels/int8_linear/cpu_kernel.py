"""The int8 linear layer on the CPU: packs weights, compiles the code and distributes rows among threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .._jit import compile_ir, compiled_once, cpu_features
from .._threads import share, threads_for
from .cpu_tile import BLOCK, HEADER, LANES, PANEL, TILE_ROWS, panel_columns, write_feed_forward, write_ir

__all__ = ["MAX_K", "feed_forward", "has_vnni", "linear", "pack", "packed_shape"]

MAX_K = (2**31 - 1) // (255 * 127)  # the int32 sums of more products could overflow
_MIN_WORK = 1 << 25  # multiply-adds per thread, about 0.15 ms; fewer are not worth another thread


def has_vnni() -> bool:
    """Return whether this CPU has the dot product instruction that makes int8 faster than float32."""
    return "avx512vnni" in cpu_features()


def packed_shape(n: int, k: int, gated: bool = False) -> tuple[int, int, int]:
    """Return the shape of the packed weight of a layer from ``k`` to ``n`` features, see `pack`.

    The second number tells gated weights from plain ones: 2 or 1.
    """
    parts = 2 if gated else 1
    return -(-n // panel_columns(gated)), parts, (HEADER + PANEL * (-(-k // 4) * 4)) // parts


def pack(weight: np.ndarray, scale: np.ndarray, bias: np.ndarray | None, gated: bool = False) -> np.ndarray:
    """Pack int8 ``weight (n, k)``, float32 ``scale (n,)`` and ``bias (n,)`` in the order that tiles read.

    A ``gated`` layer has twice as many rows, ``(2 n, k)``: activated features, then gates. A panel holds 32
    of each then.

    Returns:
        uint8 of `packed_shape`. Each matrix in it is a panel of 64 features: their sums of weights, scales
        and biases, then their weights as ``[k / 4][64 features][4 along k]``.
    """
    parts, width = (2, PANEL // 2) if gated else (1, PANEL)
    n, k = len(weight) // parts, weight.shape[1]
    panels, steps = -(-n // width), -(-k // 4)

    def in_panels(rows: np.ndarray, columns: int, dtype: type) -> np.ndarray:
        padded: np.ndarray = np.zeros((parts, panels * width, columns), dtype)
        padded[:, :n, : rows.shape[1]] = rows.reshape(parts, n, -1)
        return padded.reshape(parts, panels, width, columns).swapaxes(0, 1).reshape(-1, columns)

    padded = in_panels(weight, 4 * steps, np.int8)
    header = np.zeros((3, panels * PANEL), np.int32)
    header[0] = padded.sum(1, dtype=np.int32)
    for row, numbers in ((1, scale), (2, bias)):
        if numbers is not None:
            header[row] = in_panels(numbers.astype(np.float32)[:, None], 1, np.float32)[:, 0].view(np.int32)
    heads = header.reshape(3, panels, PANEL).swapaxes(0, 1).reshape(panels, -1)
    body = padded.reshape(panels, PANEL, steps, 4).swapaxes(1, 2).reshape(panels, -1)
    packed = np.concatenate([heads.view(np.uint8), body.view(np.uint8)], axis=1)
    return packed.reshape(packed_shape(n, k, gated))


def linear(x: Tensor, packed: Tensor, out: Tensor, activation: str, gated: bool) -> None:
    """Compute ``out (m, n)`` from ``x (m, k)``, both contiguous float32."""
    (m, k), n = x.shape, out.shape[1]
    kernel = _compiled_linear(activation, gated, has_vnni())

    def run(start: int, stop: int) -> None:
        scratch = torch.empty(_scratch_size(k), dtype=torch.uint8, device="cpu")
        rows, results = x.data_ptr() + 4 * k * start, out.data_ptr() + 4 * n * start
        kernel(rows, packed.data_ptr(), results, scratch.data_ptr(), stop - start, k, n)

    _share(run, m, m * k * (2 * n if gated else n))


def feed_forward(
    x: Tensor, up: Tensor, down: Tensor, hidden: int, out: Tensor, activation: str, gated: bool
) -> None:
    """Compute ``out (m, n)`` from ``x (m, k)``, both contiguous float32, by two layers.

    Args:
        x: What the first layer reads.
        up: Its packed weight.
        down: The packed weight of the second.
        hidden: Number of features of the first.
        out: What the second layer writes.
        activation: That of the first.
        gated: Whether the first is gated.
    """
    (m, k), n = x.shape, out.shape[1]
    kernel = _compiled_feed_forward(activation, gated, has_vnni())

    def run(start: int, stop: int) -> None:
        size = 4 * BLOCK * hidden + _scratch_size(max(k, hidden))
        scratch = torch.empty(size, dtype=torch.uint8, device="cpu")
        rows, results = x.data_ptr() + 4 * k * start, out.data_ptr() + 4 * n * start
        weights = up.data_ptr(), down.data_ptr()
        kernel(rows, *weights, results, scratch.data_ptr(), stop - start, k, hidden, n)

    _share(run, m, m * hidden * ((2 * k if gated else k) + n))


def _scratch_size(k: int) -> int:
    """Return the bytes of a quantised block of rows of ``k`` numbers."""
    return BLOCK * (-(-k // LANES) * LANES + 8)


def _share(run: Callable[[int, int], None], rows: int, work: int) -> None:
    share(run, rows, threads_for(work, _MIN_WORK), parts=1, multiple=TILE_ROWS)


@compiled_once
def _compiled_linear(activation: str, gated: bool, vnni: bool) -> Callable[..., None]:
    pointers, numbers = [ctypes.c_void_p] * 4, [ctypes.c_int64] * 3
    return compile_ir(write_ir(activation, gated, vnni), "int8_linear", [*pointers, *numbers])


@compiled_once
def _compiled_feed_forward(activation: str, gated: bool, vnni: bool) -> Callable[..., None]:
    pointers, numbers = [ctypes.c_void_p] * 5, [ctypes.c_int64] * 4
    return compile_ir(write_feed_forward(activation, gated, vnni), "feed_forward", [*pointers, *numbers])
