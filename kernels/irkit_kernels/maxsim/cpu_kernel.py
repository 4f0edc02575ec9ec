"""MaxSim on the CPU: chooses the code, lays out the queries, and distributes jobs among threads."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from .._jit import compile_ir, compiled_once, cpu_features
from .._products import vector_lanes
from .._simd import converts_half
from .._threads import share, threads_for
from .cpu_tile import FRAME, PART, Plan, write_maxsim
from .reference import Tokens

__all__ = ["compile_plan", "maxsim", "plan_for", "plan_for_stored"]

_FRAME = struct.Struct(f"={len(FRAME.fields)}q")
_MIN_WORK = 1 << 23  # multiply-adds per thread, about 0.15 ms; fewer are not worth another thread


def plan_for(dtype: torch.dtype, paired: bool = False) -> Plan | None:
    """Return the fastest plan for a dtype on this CPU, maybe one of float32; None without llvmlite."""
    return _plan_for(dtype, paired, cpu_features())


def plan_for_stored(dtype: torch.dtype, paired: bool) -> Plan | None:
    """Return the plan of float32 queries and documents in float16 or int8; None if it cannot be compiled."""
    features = cpu_features()
    if not features or (dtype == torch.float16 and not converts_half()):
        return None
    return Plan("float32", vector_lanes(features), paired, str(dtype).removeprefix("torch."))


@cache
def _plan_for(dtype: torch.dtype, paired: bool, features: frozenset[str]) -> Plan | None:
    if not features:
        return None
    if dtype == torch.bfloat16 and "avx512bf16" in features:
        return Plan("bfloat16", 16, paired)
    if dtype == torch.int8 and "avx512vnni" in features:
        return Plan("int8", 16, paired)
    stored = plan_for_stored(dtype, paired) if dtype in (torch.float16, torch.int8) else None
    return stored or Plan("float32", vector_lanes(features), paired)


def maxsim(
    queries: Tokens,
    documents: Tokens,
    pairs: Tensor | None,
    with_argmax: bool,
    plan: Plan,
    work: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Score queries against documents by compiled code.

    Args:
        queries: Queries.
        documents: Documents.
        pairs: See `maxsim_forward`.
        with_argmax: Whether to return the argmax.
        plan: The plan of the code.
        work: Multiply-adds in all; by default those of documents of mean length.

    Returns:
        Scores ``(n_q, n_d)`` or ``(p,)``, float32. And the argmax of `maxsim_forward`; any tensor if
        ``with_argmax`` is False.
    """
    # inputs as the plan reads them: dtype, whole words, contiguous
    if plan.kind == "float32" and queries.values.dtype != torch.float32:
        queries = queries.floats()
        documents = documents if plan.stored else documents.floats()
    (tokens, dim), packed = queries.values.shape, plan.packed
    words = -(-dim // packed)
    if missing := words * packed - dim:
        queries, documents = (x._replace(values=F.pad(x.values, (0, missing))) for x in (queries, documents))
    rows, first, shift, query_scales = _arrange_queries(queries, plan)
    values, n_rows, n_q, n_d = documents.values.contiguous(), rows.shape[0], queries.rows, documents.rows
    estimate = tokens * values.numel()
    query_offsets, document_offsets = queries.offsets.contiguous(), documents.offsets.contiguous()

    # outputs; a job is a document against all queries, or a pair
    shape: tuple[int, ...] = (n_q, n_d)
    argmax_shape: tuple[int, ...] = (n_d, tokens)
    jobs, starts = n_d, None
    if pairs is not None:
        jobs, pairs = pairs.shape[0], pairs.contiguous()
        shape, estimate = (jobs,), estimate // max(1, n_q * n_d) * jobs
        if with_argmax:
            starts = pairs.new_zeros(jobs + 1)
            torch.cumsum(query_offsets.diff()[pairs[:, 0]], 0, out=starts[1:])
            argmax_shape = (int(starts[-1]),)
    scores = values.new_empty(*shape, dtype=torch.float32)  # *shape is faster than a tuple
    argmax = scores.new_empty(argmax_shape, dtype=torch.int32) if with_argmax else None

    # scratch memory: packed queries; maxima and their positions, in whole vectors; part of a document
    size, padded_tokens = -(-n_rows // plan.lanes) * plan.lanes * words, tokens + plan.lanes
    own_size = 2 * padded_tokens + (PART * dim if plan.stored else 0)
    memory = scores.new_empty(size + own_size)
    document_scales = None if documents.scales is None else documents.scales.contiguous()
    tensors = [memory, shift, query_scales, query_offsets, first, values, document_scales, document_offsets]
    tensors += [pairs, starts, scores, argmax]
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]

    # the first call packs the queries; on one thread it also does all jobs
    sizes, kernel = (n_rows, words, n_q, n_d), compile_plan(plan)
    threads = min(jobs, threads_for(estimate if work is None else work, _MIN_WORK))

    def call(rows: int, own: int, start: int, stop: int) -> None:
        places = (own + 4 * part * padded_tokens for part in range(3))
        best, best_token, converted = places
        kernel(_FRAME.pack(rows, *pointers, best, best_token, *sizes, start, stop, converted))

    call(rows.data_ptr(), pointers[0] + 4 * size, 0, jobs if threads <= 1 else 0)

    def run(start: int, stop: int) -> None:
        memory = scores.new_empty(own_size)
        call(0, memory.data_ptr(), start, stop)

    if threads > 1:
        share(run, jobs, threads)
    return scores, scores if argmax is None else argmax


@compiled_once
def compile_plan(plan: Plan) -> Callable[..., None]:
    """Compile the code of a plan."""
    return compile_ir(write_maxsim(plan), "maxsim", [ctypes.c_void_p])


def _arrange_queries(queries: Tokens, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Arrange query tokens so that each row becomes one lane of the packed queries.

    Returns:
        Four tensors. 1. The rows, ``(lanes, d)``. 2. ``(n_q,)`` int32, the number of the vector at which each
        query starts; only ``paired`` plans read it. 3. For int8, 128 times the sum of the numbers of each
        row, the amount that unsigned document tokens add to its products; else None. 4. For int8, the scale
        of each row; else None.
    """
    x, offsets, scales = queries
    first = offsets  # 0, where there is one query
    if plan.paired and queries.rows > 1:
        lengths = offsets.diff().long()
        vectors = (lengths + (plan.lanes - 1)) // plan.lanes
        first, size = (vectors.cumsum(0) - vectors).int(), int(vectors.sum()) * plan.lanes
        shifts = torch.repeat_interleave(first * plan.lanes - offsets[:-1], lengths, output_size=len(x))
        lanes = torch.arange(len(x), device=x.device) + shifts
        x = x.new_zeros(size, x.shape[1]).index_copy_(0, lanes, x)
        if scales is not None:
            scales = scales.new_ones(size).index_copy_(0, lanes, scales)
    x = x.contiguous()
    if scales is None:
        return x, first, None, None
    rest = (0, -len(x) % plan.lanes)
    return x, first, F.pad(x.sum(1, dtype=torch.int32) * 128, rest), F.pad(scales, rest)
