"""The packed linear layer on the CPU: packs weights, compiles the code and distributes rows among threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._jit import compile_ir, compiled_once, cpu_features
from .._threads import share, threads_for
from .cpu_tile import (
    BLOCK,
    LANES,
    PANEL,
    TILE_ROWS,
    Kind,
    Plan,
    header,
    panel_columns,
    per_word,
    write_feed_forward,
    write_linear,
)

__all__ = [
    "MAX_K",
    "STORED",
    "AddedNorm",
    "feed_forward",
    "has_dot",
    "kind_of",
    "linear",
    "pack",
    "packed_shape",
]

MAX_K = (2**31 - 1) // (255 * 127)  # the int32 sums of more products could overflow
STORED: dict[Kind, torch.dtype] = {"int8": torch.uint8, "bfloat16": torch.int16}
"""Dtype of the packed weight of each kind: integers, which no cast of a module to another float changes."""
_MIN_WORK = 1 << 25  # multiply-adds per thread, about 0.15 ms; fewer are not worth another thread


def has_dot(kind: Kind) -> bool:
    """Return whether this CPU has the dot product instruction that makes this kind faster than float32."""
    return {"int8": "avx512vnni", "bfloat16": "avx512bf16"}[kind] in cpu_features()


def kind_of(packed: Tensor) -> Kind | None:
    """Return the kind of a packed weight, by its dtype; None for what is none."""
    return next((kind for kind, dtype in STORED.items() if packed.dtype == dtype), None)


def packed_shape(n: int, k: int, gated: bool, kind: Kind) -> tuple[int, int, int]:
    """Return the shape of the packed weight of a layer from ``k`` to ``n`` features, see `pack`.

    The second number tells gated weights from plain ones: 2 or 1.
    """
    parts, words = 2 if gated else 1, -(-k // per_word(kind))
    size = 4 * (header(kind) + PANEL * words) // STORED[kind].itemsize
    return -(-n // panel_columns(gated)), parts, size // parts


def pack(weight: np.ndarray, scale: np.ndarray | None, bias: np.ndarray | None, gated: bool) -> np.ndarray:
    """Pack rounded weights, their ``scale (n,)`` and ``bias (n,)`` in the order that tiles read.

    A ``gated`` layer has twice as many rows, ``(2 n, k)``: activated features, then gates. A panel holds 32
    of each then.

    Args:
        weight: ``(n, k)`` int8, or the bits of bfloat16 as int16.
        scale: float32, for int8 only.
        bias: float32, or None.
        gated: Whether the layer is gated.

    Returns:
        Of `packed_shape`. Each matrix in it is a panel of 64 features: its `header`, then its weights as
        ``[word along k][64 features][number of the word]``.
    """
    kind: Kind = "int8" if weight.dtype == np.int8 else "bfloat16"
    parts, width = (2, PANEL // 2) if gated else (1, PANEL)
    n, k, unit = len(weight) // parts, weight.shape[1], per_word(kind)
    panels, words = -(-n // width), -(-k // unit)

    def in_panels(rows: np.ndarray, columns: int) -> np.ndarray:
        padded: np.ndarray = np.zeros((parts, panels * width, columns), rows.dtype)
        padded[:, :n, : rows.shape[1]] = rows.reshape(parts, n, -1)
        return padded.reshape(parts, panels, width, columns).swapaxes(0, 1).reshape(panels, PANEL, columns)

    padded = in_panels(weight, unit * words)
    body = padded.reshape(panels, PANEL, words, unit).swapaxes(1, 2).reshape(panels, -1)
    biases = np.zeros(len(weight), np.float32) if bias is None else bias.astype(np.float32)
    heads = [biases] if scale is None else [padded.sum(2, dtype=np.int32), scale, biases]
    rows = [head if head.ndim == 2 else in_panels(head[:, None], 1)[:, :, 0] for head in heads]
    packed = np.concatenate([np.ascontiguousarray(part).view(weight.dtype) for part in (*rows, body)], axis=1)
    stored = packed.view(np.uint8) if kind == "int8" else packed
    return stored.reshape(packed_shape(n, k, gated, kind))


class AddedNorm(NamedTuple):
    """What is added to the results of layers, and the LayerNorm of the sums.

    Attributes:
        added: ``(m, n)`` contiguous float32.
        scale: ``(n,)`` float32.
        shift: ``(n,)`` float32.
        eps: Added to the variance.
    """

    added: Tensor
    scale: Tensor
    shift: Tensor
    eps: float

    def pointers(self, start: int) -> tuple[int, int, int]:
        """Return the addresses from row ``start`` on."""
        added = self.added.data_ptr() + 4 * self.added.shape[1] * start
        return added, self.scale.data_ptr(), self.shift.data_ptr()


def linear(
    x: Tensor,
    packed: Tensor,
    out: Tensor,
    activation: str,
    gated: bool,
    kind: Kind,
    norm: AddedNorm | None = None,
) -> None:
    """Compute ``out (m, n)`` from ``x (m, k)``, both contiguous, float32 or bfloat16."""
    (m, k), n = x.shape, out.shape[1]
    reads_half, writes_half = (rows.dtype == torch.bfloat16 for rows in (x, out))
    kernel = _compiled_linear(
        Plan(kind, activation, gated, has_dot(kind), reads_half, writes_half, norm is not None)
    )

    def run(start: int, stop: int) -> None:
        scratch = torch.empty(_scratch_size(k, kind), dtype=torch.uint8, device="cpu")
        rows, results = (each.data_ptr() + each.shape[1] * each.itemsize * start for each in (x, out))
        added, eps = norm.pointers(start) if norm else (0, 0, 0), norm.eps if norm else 0.0
        kernel(rows, packed.data_ptr(), results, scratch.data_ptr(), *added, stop - start, k, n, eps)

    _share(run, m, m * k * (2 * n if gated else n))


def feed_forward(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    hidden: int,
    out: Tensor,
    activation: str,
    gated: bool,
    kind: Kind,
    norm: AddedNorm | None = None,
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
        kind: Of both weights.
        norm: What is added to the result, and its LayerNorm.
    """
    (m, k), n = x.shape, out.shape[1]
    kernel = _compiled_feed_forward(Plan(kind, activation, gated, has_dot(kind), normed=norm is not None))

    def run(start: int, stop: int) -> None:
        size = 4 * BLOCK * hidden + _scratch_size(max(k, hidden), kind)
        scratch = torch.empty(size, dtype=torch.uint8, device="cpu")
        rows, results = x.data_ptr() + 4 * k * start, out.data_ptr() + 4 * n * start
        weights, eps = (up.data_ptr(), down.data_ptr()), norm.eps if norm else 0.0
        added = norm.pointers(start) if norm else (0, 0, 0)
        kernel(rows, *weights, results, scratch.data_ptr(), *added, stop - start, k, hidden, n, eps)

    _share(run, m, m * hidden * ((2 * k if gated else k) + n))


def _scratch_size(k: int, kind: Kind) -> int:
    """Return the bytes of a rounded block of rows of ``k`` numbers."""
    words = -(-k // per_word(kind))
    return BLOCK * (-(-words // LANES) * LANES * 4 + 8)


def _share(run: Callable[[int, int], None], rows: int, work: int) -> None:
    share(run, rows, threads_for(work, _MIN_WORK), parts=1, multiple=TILE_ROWS)


@compiled_once
def _compiled_linear(plan: Plan) -> Callable[..., None]:
    pointers, numbers = [ctypes.c_void_p] * 7, [ctypes.c_int64] * 3
    return compile_ir(write_linear(plan), "linear", [*pointers, *numbers, ctypes.c_float])


@compiled_once
def _compiled_feed_forward(plan: Plan) -> Callable[..., None]:
    pointers, numbers = [ctypes.c_void_p] * 8, [ctypes.c_int64] * 4
    return compile_ir(write_feed_forward(plan), "feed_forward", [*pointers, *numbers, ctypes.c_float])
