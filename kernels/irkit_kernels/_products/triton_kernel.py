"""Gradients of chosen inner products on CUDA: each row gathers its own, in their order."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gather_sum", "product_gradients"]

_OPTIONS = {"enable_fp_fusion": True}  # multiply-adds may be fused; Triton warns of changing its default
_WIDEST = 128  # columns of a program


@triton.jit
def gather_sum(
    out, table, order, starts, indices, weights, D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr
):
    """``out[i]``: the sum of ``weights[e] * table[indices[e]]`` over ``order[starts[i]:starts[i + 1]]``.

    Entries with a negative index are passed over.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    start, stop = tl.load(starts + row), tl.load(starts + row + 1)
    total = tl.zeros([BLOCK_K], tl.float32)
    for first in range(start, stop, BLOCK_E):
        places = first + tl.arange(0, BLOCK_E)
        entries = tl.load(order + places, mask=places < stop, other=0)
        index = tl.load(indices + entries, mask=places < stop, other=-1)
        weight = tl.load(weights + entries, mask=index >= 0, other=0.0)
        pointers = table + index.to(tl.int64)[:, None] * D + columns[None, :]
        values = tl.load(pointers, mask=(index >= 0)[:, None] & (columns < D)[None, :], other=0.0)
        total += tl.sum(weight[:, None] * values.to(tl.float32), 0)
    tl.store(out + row * D + columns, total, mask=columns < D)


def product_gradients(
    left: Tensor, right: Tensor, left_rows: Tensor, right_rows: Tensor, grads: Tensor
) -> tuple[Tensor, Tensor]:
    """As `irkit_kernels._products.product_gradients`; products are sorted by the row they add to."""
    return (
        _gather(left, right.contiguous(), left_rows, right_rows, grads),
        _gather(right, left.contiguous(), right_rows, left_rows, grads),
    )


def _gather(like: Tensor, table: Tensor, keys: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    n, d = out.shape
    ordered, order = keys.sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(n + 1, dtype=keys.dtype, device=keys.device))
    block = min(_WIDEST, triton.next_power_of_2(d))
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        gather_sum[(n, triton.cdiv(d, block))](
            out, table, order, starts, indices, weights, D=d, BLOCK_E=16, BLOCK_K=block, **_OPTIONS
        )
    return out
