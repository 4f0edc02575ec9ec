"""Rotary positions on CUDA: a program rotates a block of tokens of one head."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rotate", "rotate_heads"]

_OPTIONS = {"enable_fp_fusion": True}  # multiply-adds may be fused; Triton warns of changing its default
_PAIRS = 2048  # of a program


@triton.jit
def rotate_heads(
    x,
    cos,
    sin,
    out,
    tokens,
    stride,
    heads,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Rotate all pairs of a block of tokens in one head; the tokens of ``x`` are ``stride`` numbers apart."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head, pair = tl.program_id(1), tl.arange(0, BLOCK_P)
    inside = (token < tokens)[:, None] & (pair < HALF)[None, :]
    angle = token[:, None] * HALF + pair[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    step: tl.constexpr = 1 if INTERLEAVED else HALF  # from the first number of a pair to the second
    first = (head * 2 * HALF + (2 * pair if INTERLEAVED else pair))[None, :]
    source = x + token[:, None] * stride + first
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + step, mask=inside, other=0.0).to(tl.float32)
    target = out + token[:, None] * (heads * 2 * HALF) + first
    tl.store(target, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + step, (b * c + a * s).to(out.dtype.element_ty), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, interleaved: bool) -> None:
    """Fill ``out (n, heads, d)``, see `rotary`."""
    tokens, heads, width = x.shape
    block = triton.next_power_of_2(width // 2)
    each = max(1, _PAIRS // block)
    if not x.numel():
        return
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        rotate_heads[(triton.cdiv(tokens, each), heads)](
            x,
            cos,
            sin,
            out,
            tokens,
            x.stride(0),
            heads,
            HALF=width // 2,
            INTERLEAVED=interleaved,
            BLOCK_T=each,
            BLOCK_P=block,
            num_warps=4,
            **_OPTIONS,
        )
