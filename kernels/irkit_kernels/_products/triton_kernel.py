"""Gradients of chosen inner products on CUDA: each row gathers its own, in their order."""

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
    """``out[i]``: the sum of ``weights[e] * table[index of e]`` over the entries e of row i, in their order.

    The entries are those in ``order[slice(*ranges[i])]``, and ``indices`` holds their index; those with
    a negative one are passed over. Entries of a grid of ``count`` rows of ``width``, row by row, are left
    (``KIND`` 1) those of column i, without an order, or right (``KIND`` 2) of the index that is their column.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    if KIND == 1:
        start, stop = row * 0, row * 0 + count
    else:
        start, stop = tl.load(ranges + 2 * row), tl.load(ranges + 2 * row + 1)
    total = tl.zeros([BLOCK_K], tl.float32)
    for first in range(start, stop, BLOCK_E):
        places = first + tl.arange(0, BLOCK_E)
        if KIND == 1:
            entries = places * width + row
        else:
            entries = tl.load(order + places, mask=places < stop, other=0)
            if KIND == 2:  # the order is within the row of the grid
                entries += places // width * width
        index = tl.load(indices + entries, mask=places < stop, other=-1)
        real = index >= 0
        if KIND == 2:
            index = entries % width
        weight = tl.load(weights + entries, mask=real, other=0.0)
        pointers = table + index.to(tl.int64)[:, None] * D + columns[None, :]
        values = tl.load(pointers, mask=real[:, None] & (columns < D)[None, :], other=0.0)
        total += tl.sum(weight[:, None] * values.to(tl.float32), 0)
    tl.store(out + row * D + columns, total, mask=columns < D)


def product_gradients(
    left: Tensor, right: Tensor, left_rows: Tensor, right_rows: Tensor, grads: Tensor
) -> tuple[Tensor, Tensor]:
    """As `irkit_kernels._products.product_gradients`; products are sorted by the row they add to."""
    return (
        _gather(left, right, *_sorted(left_rows, len(left)), right_rows, grads),
        _gather(right, left, *_sorted(right_rows, len(right)), left_rows, grads),
    )


def grid_gradients(
    left: Tensor, right: Tensor, right_offsets: Tensor, right_rows: Tensor, grads: Tensor
) -> tuple[Tensor, Tensor]:
    """`product_gradients` of a grid: product ``(i, j)`` is of ``left[j]`` and ``right[right_rows[i, j]]``.

    The left side is in order as it is. The right side is sorted within each row of the grid, for those of
    row i are between ``right_offsets[i]`` and ``right_offsets[i + 1]``: no sort is of more than ``len(left)``
    products, and there may be more than 2^31 of them in all. Products whose right row is -1 are passed over;
    the host does not wait to learn how many remain.

    Args:
        left: ``(l, d)`` floating point.
        right: ``(r, d)``.
        right_offsets: ``(n + 1,)`` int32, from 0 to r.
        right_rows: ``(n, l)`` int32, contiguous.
        grads: ``(n, l)`` float32, contiguous.
    """
    # even keys, and behind those of its row of the grid an odd one for what is passed over
    keys = torch.where(right_rows < 0, 2 * right_offsets[1:, None] - 1, 2 * right_rows)
    keys, order = keys.sort(dim=1, stable=True)
    bounds = torch.arange(2 * len(right), dtype=keys.dtype, device=keys.device).view(-1, 2)
    ranges = torch.searchsorted(keys.view(-1), bounds)
    return (
        _gather(left, right, order, ranges, right_rows, grads, kind=1),
        _gather(right, left, order, ranges, right_rows, grads, kind=2),
    )


def _sorted(keys: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The order of the keys, and ``(rows, 2)`` where those of each row begin and end in it."""
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
