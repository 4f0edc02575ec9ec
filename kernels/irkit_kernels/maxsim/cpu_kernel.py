"""MaxSim on the CPU: which code runs, how queries are packed, and how jobs are shared among threads."""

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
from .cpu_tile import Plan, write_maxsim
from .reference import Tokens

__all__ = ["compile_plan", "maxsim", "plan_for"]

_MIN_WORK = 1 << 23  # multiply-adds worth a thread, about 0.15 ms


def plan_for(dtype: torch.dtype, paired: bool = False) -> Plan | None:
    """The fastest code for a dtype on this CPU, which may be that for float32; None without a compiler."""
    features = cpu_features()
    if not features:
        return None
    if dtype == torch.bfloat16 and "avx512bf16" in features:
        return Plan("bfloat16", 16, paired)
    if dtype == torch.int8 and "avx512vnni" in features:
        return Plan("int8", 16, paired)
    return Plan("float32", vector_lanes(features), paired)


def maxsim(
    queries: Tokens, documents: Tokens, pairs: Tensor | None, with_argmax: bool, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Scores ``(n_q, n_d)`` or ``(p,)``, and the argmax as `maxsim_forward` has it, or any tensor."""
    if plan.kind == "float32" and queries.values.dtype != torch.float32:
        queries, documents = queries.floats(), documents.floats()
    (tokens, dim), values = queries.values.shape, documents.values.contiguous()
    words, first, shift, query_scales = _pack(queries, plan)
    if missing := -dim % plan.packed:
        values = F.pad(values, (0, missing))
    jobs, work = documents.rows, tokens * values.numel()
    scores, starts = torch.empty((queries.rows, jobs) if pairs is None else pairs.shape[0]), first
    places: tuple[int, ...] = (jobs, tokens)
    query_offsets, document_offsets = queries.offsets.contiguous(), documents.offsets.contiguous()
    if pairs is not None:
        jobs, pairs, work = len(pairs), pairs.contiguous(), work // max(1, queries.rows * jobs) * len(pairs)
        if with_argmax:
            starts = torch.zeros(jobs + 1, dtype=torch.int64)
            torch.cumsum(query_offsets.diff()[pairs[:, 0]], 0, out=starts[1:])
            places = (int(starts[-1]),)
    argmax = torch.empty(places, dtype=torch.int32) if with_argmax else first
    document_scales = values if documents.scales is None else documents.scales.contiguous()
    tensors = [words, shift, query_scales, query_offsets, first, values, document_scales, document_offsets]
    tensors += [first if pairs is None else pairs, starts, scores]
    pointers = [tensor.data_ptr() for tensor in tensors] + [argmax.data_ptr() if with_argmax else 0]
    sizes = (words.shape[1], queries.rows, documents.rows)
    kernel, room = compile_plan(plan), tokens + plan.lanes  # whole vectors

    def run(start: int, stop: int) -> None:
        best = torch.empty(2 * room)  # and the places
        kernel(*pointers, best.data_ptr(), best.data_ptr() + 4 * room, *sizes, start, stop)

    share(run, jobs, min(torch.get_num_threads(), jobs, work // _MIN_WORK))
    return scores, argmax


@cache
def compile_plan(plan: Plan, cpu: str | None = None) -> Callable[..., None]:
    """Machine code for a plan; for another CPU by its LLVM name."""
    arguments = [ctypes.c_void_p] * 14 + [ctypes.c_int64] * 5
    return compile_ir(write_maxsim(plan), "maxsim", arguments, cpu=cpu)


def _pack(queries: Tokens, plan: Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries as the code reads them: a lane each token.

    Returns:
        Words ``(vectors, words of a token, lanes)``; if ``paired``, the vector at which each query
        begins, int32; for int8, by lane, 128 times the sum of the token, which is what unsigned document
        tokens add to its products, and its scale. What does not apply is any tensor.
    """
    x, offsets, scales = queries
    first = offsets  # 0, where there is one query
    if plan.paired and queries.rows > 1:
        lengths = offsets.diff().long()
        vectors = (lengths + (plan.lanes - 1)) // plan.lanes
        first, size = (vectors.cumsum(0) - vectors).int(), int(vectors.sum()) * plan.lanes
        shifts = torch.repeat_interleave(first * plan.lanes - offsets[:-1], lengths, output_size=len(x))
        lanes = torch.arange(len(x)) + shifts
        x = x.new_zeros(size, x.shape[1]).index_copy_(0, lanes, x)
        if scales is not None:
            scales = scales.new_ones(size).index_copy_(0, lanes, scales)
    rows, dims = -x.shape[0] % plan.lanes, -x.shape[1] % plan.packed
    x = F.pad(x, (0, dims, 0, rows)) if rows or dims else x.contiguous()
    words = x if plan.packed == 1 else x.view(torch.int32)
    words = words.view(-1, plan.lanes, words.shape[1]).mT.contiguous()
    if scales is None:
        return words, first, first, first
    return words, first, x.sum(1, dtype=torch.int32) * 128, F.pad(scales, (0, rows))
