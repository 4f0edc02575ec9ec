"""Norms of rows on CUDA: a program reads whole rows once and writes them once."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["normalize", "normalize_rows"]

_OPTIONS = {"enable_fp_fusion": True}  # multiply-adds may be fused; Triton warns of changing its default
_NUMBERS = 4096  # of a program, which has more than one row if rows are short


@triton.jit
def normalize_rows(
    x,
    weight,
    bias,
    added,
    out,
    rows,
    heads,
    stride,
    eps,
    offset,
    D: tl.constexpr,
    RMS: tl.constexpr,
    WITH_WEIGHT: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    WITH_ADDED: tl.constexpr,
    KEEP_SUM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Normalise a block of rows. ``heads`` rows lie side by side, the next ones ``stride`` further."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (column < D)[None, :]
    place = (row // heads * stride + row % heads * D)[:, None] + column[None, :]
    target = row[:, None] * D + column[None, :]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if WITH_ADDED:
        # the sum is rounded, as if it were stored before it is normalised
        total = (values + tl.load(added + target, mask=inside, other=0.0)).to(added.dtype.element_ty)
        if KEEP_SUM:
            tl.store(added + target, total, mask=inside)
        values = total.to(tl.float32)
    if not RMS:
        mean = tl.sum(values, 1) / D
        values = tl.where(inside, values - mean[:, None], 0.0)
    values = values / tl.sqrt(tl.sum(values * values, 1) / D + eps)[:, None]
    if WITH_WEIGHT:
        values *= (tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32) + offset)[None, :]
    if WITH_BIAS:
        values += tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    tl.store(out + target, values.to(out.dtype.element_ty), mask=inside)


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    added: Tensor | None,
    out: Tensor,
    *,
    eps: float,
    rms: bool,
    offset: float,
) -> None:
    """Fill ``out``, and ``added`` with the sum unless it is ``out``, see `row_norm`."""
    width = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    block = triton.next_power_of_2(width)
    each = max(1, _NUMBERS // block)
    if not x.numel():
        return
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        normalize_rows[(triton.cdiv(len(x) * heads, each),)](
            x,
            x if weight is None else weight,
            x if bias is None else bias,
            x if added is None else added,
            out,
            len(x) * heads,
            heads,
            x.stride(0),
            eps,
            offset,
            D=width,
            RMS=rms,
            WITH_WEIGHT=weight is not None,
            WITH_BIAS=bias is not None,
            WITH_ADDED=added is not None,
            KEEP_SUM=added is not None and added is not out,
            BLOCK_R=each,
            BLOCK_D=block,
            num_warps=4 if block <= 2048 else 8,
            **_OPTIONS,
        )
