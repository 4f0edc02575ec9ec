"""Pooled maxima on the CPU: chooses the code, packs the tokens, and distributes terms among threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .._jit import compile_ir, compiled_once, cpu_features
from .._products import vector_lanes
from .._threads import share, threads_for
from .cpu_tile import BLOCK, Plan, write_ir

__all__ = ["compile_plan", "maxima", "plan_for"]

_MIN_WORK = 1 << 23  # multiply-adds per thread, about 0.15 ms; fewer are not worth another thread
_TERMS = 1 << 11  # terms converted at a time, if their matrix cannot be read in place
_CACHE = 1 << 19  # bytes per block of tokens: half of a second-level cache


def plan_for(dtype: torch.dtype) -> Plan | None:
    """Return the fastest plan for a dtype on this CPU, possibly the one of float32; None without llvmlite."""
    features = cpu_features()
    if not features:
        return None
    if dtype == torch.bfloat16 and "avx512bf16" in features:
        return Plan("bfloat16", 16)
    return Plan("float32", vector_lanes(features))


def maxima(
    hidden: Tensor, offsets: Tensor, weight: Tensor, with_argmax: bool, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Compute the largest product of each term with a token of each sequence.

    Returns:
        The maxima ``(n, v)`` float32, -inf without tokens. And the argmax ``(n, v)`` int32: the token of each
        maximum, -1 without tokens; ``(0, v)`` if ``with_argmax`` is False.
    """
    n, (v, d), tokens = len(offsets) - 1, weight.shape, len(hidden)
    best = torch.full((n, v), -torch.inf, dtype=torch.float32, device="cpu")
    argmax = torch.full((n if with_argmax else 0, v), -1, dtype=torch.int32, device="cpu")

    # blocks of tokens, and the range of sequences that have tokens in each
    packed, words = _pack(hidden, plan)
    pair = 2 * plan.lanes
    block = max(pair, min(BLOCK, _CACHE // (4 * words)) // pair * pair)
    offsets, kernel, starts = (
        offsets.contiguous(),
        compile_plan(plan),
        torch.arange(0, tokens, block, device="cpu"),
    )
    first = torch.searchsorted(offsets, starts, right=True) - 1
    last = torch.searchsorted(offsets, (starts + block).clamp(max=tokens))
    spans = torch.stack([first, last], 1)
    outputs = best.data_ptr(), argmax.data_ptr() if with_argmax else 0

    def run(start: int, stop: int) -> None:
        logits = torch.empty(plan.rows * BLOCK + plan.lanes, dtype=torch.float32, device="cpu")
        step = v if _readable(weight, plan) else _TERMS
        for first in range(start, stop, step):
            last = min(first + step, stop)
            part = _words(weight[first:last], plan)
            inputs = (packed, part, offsets, spans)
            pointers = [tensor.data_ptr() for tensor in inputs]
            kernel(*pointers, *outputs, logits.data_ptr(), words, tokens, block, v, first, last)

    work = tokens * v * d
    share(run, v, threads_for(work, _MIN_WORK), multiple=plan.rows)
    return best, argmax


@compiled_once
def compile_plan(plan: Plan) -> Callable[..., None]:
    """Compile the code of a plan."""
    return compile_ir(write_ir(plan), "splade_pool", [ctypes.c_void_p] * 7 + [ctypes.c_int64] * 6)


def _pack(hidden: Tensor, plan: Plan) -> tuple[Tensor, int]:
    """Pack tokens, one per lane: ``(vectors, words, lanes)`` int32; return them and the number of words."""
    words = _words(hidden, plan)
    words = F.pad(words, (0, 0, 0, -len(words) % plan.lanes))
    packed = words.view(-1, plan.lanes, words.shape[1]).transpose(1, 2).contiguous()
    return packed, words.shape[1]


def _words(x: Tensor, plan: Plan) -> Tensor:
    """Return rows as words ``(rows, words)`` int32, without a copy if they are readable in place."""
    missing = -x.shape[1] % plan.packed
    x = x.to(getattr(torch, plan.kind)).contiguous()
    return (F.pad(x, (0, missing)) if missing else x).view(torch.int32)


def _readable(x: Tensor, plan: Plan) -> bool:
    """Return whether the code can read the rows in place: right dtype, contiguous, whole words."""
    kind = getattr(torch, plan.kind)
    return x.dtype == kind and x.is_contiguous() and x.shape[1] % plan.packed == 0
