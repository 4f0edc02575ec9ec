"""Pooled maxima on the CPU: which code runs, how tokens are packed, how terms are shared among threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from .._jit import compile_ir, cpu_features
from .._products import vector_lanes
from .._threads import share
from .cpu_tile import BLOCK, ROWS, Plan, write_ir

__all__ = ["compile_plan", "maxima", "plan_for"]

_MIN_WORK = 1 << 23  # multiply-adds worth a thread, about 0.15 ms
_TERMS = 1 << 11  # terms converted at a time, where their matrix cannot be read as it is
_CACHE = 1 << 19  # bytes of a block of tokens: half of a second-level cache


def plan_for(dtype: torch.dtype) -> Plan | None:
    """The fastest code for a dtype on this CPU, which may be that for float32; None without a compiler."""
    features = cpu_features()
    if not features:
        return None
    if dtype == torch.bfloat16 and "avx512bf16" in features:
        return Plan("bfloat16", 16)
    return Plan("float32", vector_lanes(features))


def maxima(
    hidden: Tensor, offsets: Tensor, weight: Tensor, with_argmax: bool, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Largest product of a term with a token of the sequence ``(n, v)`` float32, -inf without tokens.

    And the number of that token, int32, -1 without tokens, or ``(0, v)``.
    """
    n, (v, d), tokens = len(offsets) - 1, weight.shape, len(hidden)
    best = torch.full((n, v), -torch.inf, dtype=torch.float32, device="cpu")
    place = torch.full((n if with_argmax else 0, v), -1, dtype=torch.int32, device="cpu")
    packed, words = _pack(hidden, plan)
    pair = 2 * plan.lanes
    block = max(pair, min(BLOCK, _CACHE // (4 * words)) // pair * pair)
    offsets, kernel, starts = (
        offsets.contiguous(),
        compile_plan(plan),
        torch.arange(0, tokens, block, device="cpu"),
    )
    # the first sequence with a token in each block, and the one after the last
    first = torch.searchsorted(offsets, starts, right=True) - 1
    last = torch.searchsorted(offsets, (starts + block).clamp(max=tokens))
    spans = torch.stack([first, last], 1)
    outputs = best.data_ptr(), place.data_ptr() if with_argmax else 0

    def run(start: int, stop: int) -> None:
        logits = torch.empty(ROWS * BLOCK + plan.lanes, dtype=torch.float32, device="cpu")
        step = v if _readable(weight, plan) else _TERMS
        for first in range(start, stop, step):
            last = min(first + step, stop)
            part = _words(weight[first:last], plan)
            inputs = (packed, part, offsets, spans)
            pointers = [tensor.data_ptr() for tensor in inputs]
            kernel(*pointers, *outputs, logits.data_ptr(), words, tokens, block, v, first, last)

    work = tokens * v * d
    share(run, v, min(torch.get_num_threads(), work // _MIN_WORK), multiple=ROWS)
    return best, place


@cache
def compile_plan(plan: Plan, cpu: str | None = None) -> Callable[..., None]:
    """Machine code for a plan; for another CPU by its LLVM name."""
    return compile_ir(write_ir(plan), "splade_pool", [ctypes.c_void_p] * 7 + [ctypes.c_int64] * 6, cpu=cpu)


def _pack(hidden: Tensor, plan: Plan) -> tuple[Tensor, int]:
    """Tokens as the code reads them, a lane each: ``(vectors, words, lanes)`` int32; and the words."""
    words = _words(hidden, plan)
    words = F.pad(words, (0, 0, 0, -len(words) % plan.lanes))
    packed = words.view(-1, plan.lanes, words.shape[1]).transpose(1, 2).contiguous()
    return packed, words.shape[1]


def _words(x: Tensor, plan: Plan) -> Tensor:
    """Rows as words ``(rows, words)`` int32, without a copy if they are readable."""
    missing = -x.shape[1] % plan.packed
    x = x.to(getattr(torch, plan.kind)).contiguous()
    return (F.pad(x, (0, missing)) if missing else x).view(torch.int32)


def _readable(x: Tensor, plan: Plan) -> bool:
    kind = getattr(torch, plan.kind)
    return x.dtype == kind and x.is_contiguous() and x.shape[1] % plan.packed == 0
