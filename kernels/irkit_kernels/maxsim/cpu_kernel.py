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
    """Scores ``(n_q, n_d)`` or ``(p,)``, and the argmax as `op.maxsim` documents it, or ``(0,)``."""
    if plan.kind == "float32":
        queries, documents = queries.floats(), documents.floats()
    packed, first, shift, query_scales = _pack(queries, plan)
    values, missing = documents.values.contiguous(), -documents.values.shape[1] % plan.packed
    if missing:
        values = F.pad(values, (0, missing))
    query_offsets, document_offsets = queries.offsets.contiguous(), documents.offsets.contiguous()
    document_scales = first if documents.scales is None else documents.scales.contiguous()

    tokens, longest = len(queries.values), len(queries.values)
    work = tokens * values.numel()
    shape: tuple[int, ...] = (queries.rows, documents.rows)
    argmax_shape: tuple[int, ...] = (documents.rows, tokens)
    jobs, starts = documents.rows, first
    if pairs is None:
        pairs = first  # not read
    else:
        jobs, pairs, lengths = len(pairs), pairs.contiguous(), query_offsets.diff()
        starts = torch.zeros(jobs + 1, dtype=torch.int64)
        torch.cumsum(lengths[pairs[:, 0]], 0, out=starts[1:])
        shape, argmax_shape, longest = (jobs,), (int(starts[-1]),), int(lengths.max()) if jobs else 0
        work = work // max(1, queries.rows * documents.rows) * jobs
    scores = torch.empty(shape)
    argmax = torch.empty(argmax_shape if with_argmax else 0, dtype=torch.int32)
    tensors = [packed, shift, query_scales, query_offsets, first, values, document_scales, document_offsets]
    pointers = [tensor.data_ptr() for tensor in (*tensors, pairs, starts, scores)]
    pointers.append(argmax.data_ptr() if with_argmax else 0)
    kernel = compile_plan(plan)

    def run(start: int, stop: int) -> None:
        best, place = torch.empty(2, longest + plan.lanes)  # room for whole vectors
        memory = (best.data_ptr(), place.data_ptr())
        kernel(*pointers, *memory, packed.shape[1], queries.rows, documents.rows, start, stop)

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
        Words ``(vectors, words of a token, lanes)`` int32; if ``paired``, the vector at which each query
        begins, int32; for int8, by lane, 128 times the sum of the token, which is what unsigned document
        tokens add to its products, and its scale. What does not apply is any tensor.
    """
    x, offsets, scales = queries
    lanes: Tensor | slice = slice(len(x))
    first, size = offsets, -(-len(x) // plan.lanes) * plan.lanes
    if plan.paired:
        lengths = offsets.diff().long()
        vectors = (lengths + (plan.lanes - 1)) // plan.lanes
        first, size = (vectors.cumsum(0) - vectors).int(), int(vectors.sum()) * plan.lanes
        shifts = torch.repeat_interleave(first * plan.lanes - offsets[:-1], lengths, output_size=len(x))
        lanes = torch.arange(len(x)) + shifts
    table = x.new_zeros(size, x.shape[1] + -x.shape[1] % plan.packed)
    table[lanes, : x.shape[1]] = x
    words = table.view(torch.int32).view(-1, plan.lanes, table.shape[1] // plan.packed)
    words = words.transpose(1, 2).contiguous()
    if scales is None:
        return words, first, first, first
    by_lane = scales.new_ones(size)
    by_lane[lanes] = scales
    return words, first, table.sum(1, dtype=torch.int32) * 128, by_lane
