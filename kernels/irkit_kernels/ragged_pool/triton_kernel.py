"""Pooling on CUDA: one program fills a block of rows and columns of the output, and writes nothing else."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._tuning import size_class, tuned

__all__ = ["fill", "pool"]

_OPTIONS = {"enable_fp_fusion": True}  # multiply-adds may be fused; Triton warns of changing its default
_CONFIGS = [
    triton.Config({"BLOCK_R": r, "BLOCK_D": d}, num_warps=warps)
    for r, d, warps in ((32, 128, 4), (8, 256, 4), (16, 256, 4), (16, 256, 8), (4, 1024, 4), (8, 1024, 8))
]


@tuned(_CONFIGS)
@triton.jit(do_not_specialize=["size"])
def fill(
    values,
    offsets,
    pooled,
    out,
    rows,
    n,
    steps,
    size,
    D: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    SUMMANDS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Fill a block of rows and columns of ``out``.

    Forward, a row is a window and sums tokens. Transposed, a row is a token and sums the windows it lies in.
    """
    sum_dtype: tl.constexpr = tl.float64 if values.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row_exists, column_exists = row < rows, column < D
    row = tl.minimum(row, rows - 1)

    # the sequence of each row, by binary search in the offsets of the output
    ends = offsets if TRANSPOSED else pooled
    low, high = tl.zeros([BLOCK_R], tl.int32), tl.zeros([BLOCK_R], tl.int32) + n
    for _ in range(steps):  # ends[low] <= row < ends[high]
        middle = (low + high) // 2
        before = tl.load(ends + middle) <= row
        low, high = tl.where(before, middle, low), tl.where(before, high, middle)
    first_token, first_window = tl.load(offsets + low), tl.load(pooled + low)
    tokens = tl.load(offsets + low + 1) - first_token
    last = tl.load(pooled + low + 1) - first_window - 1
    last_weight = 1.0 / (tokens - last * STRIDE).to(sum_dtype)  # only the last window may be shorter

    # sum the weighted tokens of each window, or the weighted windows of each token
    local = row - (first_token if TRANSPOSED else first_window)
    total = tl.zeros([BLOCK_R, BLOCK_D], sum_dtype)
    for j in range(SUMMANDS):
        if TRANSPOSED:
            window = local // STRIDE - j
            inside = (window >= 0) & (window <= last) & (local < window * STRIDE + KERNEL)
            source = first_window + window
        else:
            window = local
            inside = local * STRIDE + j < tokens
            source = first_token + local * STRIDE + j
        pointers = values + source.to(tl.int64)[:, None] * D + column[None, :]
        x = tl.load(pointers, mask=(row_exists & inside)[:, None] & column_exists[None, :], other=0.0)
        total += x.to(sum_dtype) * tl.where(window == last, last_weight, 1.0 / KERNEL)[:, None]
    pointers = out + row.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(pointers, total, mask=row_exists[:, None] & column_exists[None, :])


def pool(
    values: Tensor, offsets: Tensor, pooled: Tensor, kernel: int, stride: int, rows: int, transposed: bool
) -> Tensor:
    """Compute `cpu_kernel.pool` on the device of the tensors."""
    n, d = len(offsets) - 1, values.shape[1]
    out = values.new_empty(rows, d)

    def grid(config: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(rows, config["BLOCK_R"]), triton.cdiv(d, config["BLOCK_D"])

    if out.numel():
        with torch.cuda.device(values.device) if values.is_cuda else nullcontext():
            fill[grid](
                values,
                offsets,
                pooled,
                out,
                rows,
                n,
                n.bit_length(),
                size_class(rows // 16),
                D=d,
                KERNEL=kernel,
                STRIDE=stride,
                SUMMANDS=triton.cdiv(kernel, stride) if transposed else kernel,
                TRANSPOSED=transposed,
                **_OPTIONS,
            )
    return out
