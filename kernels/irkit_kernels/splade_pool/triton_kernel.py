"""Pooled vocabulary weights on CUDA: each program pools all tokens of one sequence for one tile of terms."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._tuning import size_class, tuned

__all__ = ["forward", "pool"]

_OPTIONS = {"enable_fp_fusion": True}  # multiply-adds may be fused; Triton warns of changing its default
_GROUP = 16  # sequences that pass over the vocabulary together, so that their tokens stay in the cache
_CONFIGS = [
    triton.Config({"BLOCK_V": block}, num_warps=warps, num_stages=stages)
    for block, warps, stages in ((64, 4, 4), (128, 4, 3), (128, 8, 3), (128, 8, 4), (256, 8, 3))
]


@triton.jit
def _activate(x, LOGS: tl.constexpr):
    """Apply relu, then ``LOGS`` times log1p, whose error stays small for small x."""
    x = tl.where(x <= 0, 0.0, x)  # keeps NaN
    for _ in tl.static_range(LOGS):
        one = 1 + x
        correction = tl.where(one < 16777216, (x - (one - 1)) / one, 0.0)  # for the rounding of 1 + x
        x = tl.log(one) + correction
    return x


@tuned(_CONFIGS)
@triton.jit(do_not_specialize=["size"])
def pool(
    hidden,
    offsets,
    weight,
    bias,
    out,
    argmax,
    n,
    v,
    size,
    D: tl.constexpr,
    LOGS: tl.constexpr,
    SUM: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    WITH_ARGMAX: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Pool one sequence for one tile of terms.

    A group is ``GROUP`` sequences. Programs are numbered by sequence within a group first, then by tile of
    terms, then by group, so that neighbouring programs read the same tile of the matrix.
    """
    size = GROUP * tl.cdiv(v, BLOCK_V)
    group, within = tl.program_id(0) // size, tl.program_id(0) % size
    members = tl.minimum(n - group * GROUP, GROUP)
    sequence = (group * GROUP + within % members).to(tl.int64)
    terms = (within // members).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    term_exists = terms < v
    start, stop = tl.load(offsets + sequence), tl.load(offsets + sequence + 1)
    dims = tl.arange(0, BLOCK_K)
    w_pointers = weight + terms[None, :] * D + dims[:, None]
    shift = tl.zeros([BLOCK_V], tl.float32)
    if WITH_BIAS:
        shift = tl.load(bias + terms, mask=term_exists, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_V], tl.float32)
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    best_token = tl.full([BLOCK_V], -1, tl.int32)
    has_nan = tl.zeros([BLOCK_V], tl.int32)
    for first in range(start, stop, BLOCK_T):
        # logits of a block of tokens
        tokens = first + tl.arange(0, BLOCK_T)
        inside = tokens < stop
        h_pointers = hidden + tokens.to(tl.int64)[:, None] * D + dims[None, :]
        logits = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
        for k in range(0, D, BLOCK_K):
            dim_exists = k + dims < D
            h = tl.load(h_pointers + k, mask=inside[:, None] & dim_exists[None, :], other=0.0)
            w = tl.load(w_pointers + k, mask=term_exists[None, :] & dim_exists[:, None], other=0.0)
            # float32 as the sum of three products of tensor cores, whose error is no larger than that of FMAs
            logits = tl.dot(h, w, logits, input_precision="tf32x3")
        # running sum or maximum; NaN is remembered apart, because tl.max may lose it
        if SUM:
            total += tl.sum(tl.where(inside[:, None], _activate(logits + shift[None, :], LOGS), 0.0), 0)
        else:
            not_nan = logits == logits
            has_nan = tl.maximum(has_nan, tl.max((~not_nan).to(tl.int32), 0))
            logits = tl.where(inside[:, None] & not_nan, logits, float("-inf"))
            if WITH_ARGMAX:
                high, row = tl.max(logits, 0, return_indices=True, return_indices_tie_break_left=True)
                token = tl.minimum(first + row, stop - 1)
                best_token = tl.where((high > best) | (best_token < 0), token, best_token)
            else:
                high = tl.max(logits, 0)
            best = tl.maximum(best, high)
    if not SUM:
        total = _activate(tl.where(has_nan > 0, float("nan"), best) + shift, LOGS)
    tl.store(out + sequence * v + terms, total, mask=term_exists)
    if WITH_ARGMAX:
        tl.store(argmax + sequence * v + terms, best_token, mask=term_exists)


def forward(
    hidden: Tensor,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    pooling: str,
    with_argmax: bool = True,
    *,
    group: int = _GROUP,
) -> tuple[Tensor, Tensor]:
    """Compute `tiled.forward` on the device of the tensors, in groups of ``group`` sequences (see `pool`)."""
    n, (v, d) = len(offsets) - 1, weight.shape
    with_argmax = with_argmax and pooling == "max"
    out = hidden.new_empty(n, v, dtype=torch.float32)
    argmax = hidden.new_empty(n if with_argmax else 0, v, dtype=torch.int32)
    average = len(hidden) // max(1, n)
    # products of float32 and the positions of maxima are held in registers: larger blocks would overflow them
    half = hidden.dtype != torch.float32
    most = 128 if half and not with_argmax else 64

    def grid(config: dict[str, int]) -> tuple[int]:
        return (n * triton.cdiv(v, config["BLOCK_V"]),)

    if n:
        with torch.cuda.device(hidden.device) if hidden.is_cuda else nullcontext():
            pool[grid](
                hidden.contiguous(),
                offsets.contiguous(),
                weight.contiguous(),
                (offsets if bias is None else bias).contiguous(),
                out,
                argmax,
                n,
                v,
                size_class(n * triton.cdiv(v, 128), average),
                D=d,
                LOGS=activation.count("log1p"),
                SUM=pooling == "sum",
                WITH_BIAS=bias is not None,
                WITH_ARGMAX=with_argmax,
                GROUP=group,
                BLOCK_T=min(most, max(16, triton.next_power_of_2(average))),
                BLOCK_K=min(64, max(16, triton.next_power_of_2(d))) if half else 16,
                **_OPTIONS,
            )
    return out, argmax
