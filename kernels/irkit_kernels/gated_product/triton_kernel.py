"""Gated products on CUDA: a program fills a block of one row."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gate", "multiply"]

_OPTIONS = {"enable_fp_fusion": True}  # multiply-adds may be fused; Triton warns of changing its default
_BLOCK = 1024  # numbers of a program


@triton.jit
def gate(x, out, D: tl.constexpr, ACTIVATION: tl.constexpr, GATE_LAST: tl.constexpr, BLOCK: tl.constexpr):
    """Activate and multiply a block of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    first = tl.load(x + row * 2 * D + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + row * 2 * D + D + column, mask=inside, other=0.0).to(tl.float32)
    y, factor = (second, first) if GATE_LAST else (first, second)
    if ACTIVATION == "gelu":
        y = 0.5 * y * (1 + tl.erf(0.7071067811865476 * y))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 is the logistic function of 2 u
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    elif ACTIVATION == "silu":
        y = y * tl.sigmoid(y)
    else:
        y = tl.where(y <= 0, 0.0, y)  # keeps NaN
    tl.store(out + row * D + column, (y * factor).to(out.dtype.element_ty), mask=inside)


def multiply(x: Tensor, out: Tensor, activation: str, gate_last: bool) -> None:
    """Fill ``out (n, d)``, see `gated_product`."""
    n, d = out.shape
    block = min(_BLOCK, triton.next_power_of_2(d))
    if not n:
        return
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        gate[(n, triton.cdiv(d, block))](
            x, out, D=d, ACTIVATION=activation, GATE_LAST=gate_last, BLOCK=block, num_warps=4, **_OPTIONS
        )
