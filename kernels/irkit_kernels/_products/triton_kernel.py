"""Gradients of selected inner products on CUDA: each row sums its own contributions, in their order."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gather_sum", "grid_gradients", "product_gradients"]

_OPTIONS = {"enable_fp_fusion": True}  # multiply-adds may be fused; Triton warns of changing its default
_WIDEST = 128  # columns of a program


@triton.jit
def gather_sum(
    out,
    table,
    order,
    ranges,
    indices,
    weights,
    count,
    width,
    D: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute ``out[i] = sum of weights[e] * table[index(e)]`` over the entries e of row i, in their order.

    Entries with a negative ``indices[e]`` are skipped. ``KIND`` says which entries belong to row i, and which
    row of the table each reads:

    * ``KIND`` 0: the entries ``order[ranges[i, 0]:ranges[i, 1]]``; ``index(e) = indices[e]``.
    * ``KIND`` 1: entries form a grid of ``count`` rows of ``width``, row by row. Row i has the entries of
      column i; ``index(e) = indices[e]``, and ``order`` is not read.
    * ``KIND`` 2: the same grid, and entries as for ``KIND`` 0, where ``order`` is sorted within each row of
      the grid; ``index(e)`` is the column of e.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    if KIND == 1:
        start, stop = row * 0, row * 0 + count
    else:
        start, stop = tl.load(ranges + 2 * row), tl.load(ranges + 2 * row + 1)
    total = tl.zeros([BLOCK_K], tl.float32)
    for first in range(start, stop, BLOCK_E):
        # entries of this step, and the row of the table of each
        positions = first + tl.arange(0, BLOCK_E)
        if KIND == 1:
            entries = positions * width + row
        else:
            entries = tl.load(order + positions, mask=positions < stop, other=0)
            if KIND == 2:  # `order` counts from the start of the row of the grid
                entries += positions // width * width
        index = tl.load(indices + entries, mask=positions < stop, other=-1)
        valid = index >= 0
        if KIND == 2:
            index = entries % width
        # add their weighted rows
        weight = tl.load(weights + entries, mask=valid, other=0.0)
        pointers = table + index.to(tl.int64)[:, None] * D + columns[None, :]
        values = tl.load(pointers, mask=valid[:, None] & (columns < D)[None, :], other=0.0)
        total += tl.sum(weight[:, None] * values.to(tl.float32), 0)
    tl.store(out + row * D + columns, total, mask=columns < D)


def product_gradients(
    left: Tensor, right: Tensor, left_rows: Tensor, right_rows: Tensor, grads: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `irkit_kernels._products.product_gradients`; products are sorted by the row they add to."""
    return (
        _gather(left, right, *_sorted(left_rows, len(left)), right_rows, grads),
        _gather(right, left, *_sorted(right_rows, len(right)), left_rows, grads),
    )


def grid_gradients(
    left: Tensor, right: Tensor, right_offsets: Tensor, right_rows: Tensor, grads: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `product_gradients` of a grid: product ``(i, j)`` is ``<left[j], right[right_rows[i, j]]>``.

    Products of one row of ``left`` form a column of the grid and need no sorting. For ``right`` each row of
    the grid is sorted by itself, because the rows of ``right`` in row i of the grid lie between
    ``right_offsets[i]`` and ``right_offsets[i + 1]``. So no sort is larger than ``len(left)``, which matters
    because CUDA sorts at most 2^31 - 1 numbers at once. The host never waits for the device.

    Args:
        left: ``(l, d)`` floating point.
        right: ``(r, d)``.
        right_offsets: ``(n + 1,)`` int32, from 0 to r.
        right_rows: ``(n, l)`` int32, contiguous; products with row -1 are skipped.
        grads: ``(n, l)`` float32, contiguous.

    Returns:
        The gradients of ``left`` and ``right``, in their dtypes.
    """
    # Keys of the sort are even; a skipped product gets an odd key, larger than all of its row of the grid.
    keys = torch.where(right_rows < 0, 2 * right_offsets[1:, None] - 1, 2 * right_rows)
    keys, order = keys.sort(dim=1, stable=True)
    bounds = torch.arange(2 * len(right), dtype=keys.dtype, device=keys.device).view(-1, 2)
    ranges = torch.searchsorted(keys.view(-1), bounds)
    return (
        _gather(left, right, order, ranges, right_rows, grads, kind=1),
        _gather(right, left, order, ranges, right_rows, grads, kind=2),
    )


def _sorted(keys: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Sort the products by the row that each one adds to.

    Args:
        keys: ``(e,)``, the row of each product.
        rows: Number of rows.

    Returns:
        ``(e,)`` int64, the numbers of the products in sorted order. And ``(rows, 2)``: per row, the start and
        the end of its products in this order.
    """
    ordered, order = keys.sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(rows + 1, dtype=keys.dtype, device=keys.device))
    return order, torch.stack([starts[:-1], starts[1:]], dim=1)


def _gather(
    like: Tensor,
    table: Tensor,
    order: Tensor,
    ranges: Tensor,
    indices: Tensor,
    weights: Tensor,
    kind: int = 0,
) -> Tensor:
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    n, d = out.shape
    block = min(_WIDEST, triton.next_power_of_2(d))
    count, width = indices.shape if kind else (0, 1)
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        gather_sum[(n, triton.cdiv(d, block))](
            out,
            table.contiguous(),
            order,
            ranges,
            indices,
            weights,
            count,
            width,
            D=d,
            KIND=kind,
            BLOCK_E=16,
            BLOCK_K=block,
            **_OPTIONS,
        )
    return out
