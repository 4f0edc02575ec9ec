"""MaxSim on the CPU: which code runs, how queries are packed, and how jobs are shared among threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from .._jit import compile_ir, cpu_features
from .._threads import share
from .cpu_tile import Plan, write_add_rows, write_maxsim
from .reference import Tokens

__all__ = ["backward", "compile_plan", "maxsim", "plan_for"]

_MIN_WORK = 1 << 23  # multiply-adds worth a thread, about 0.15 ms
_MIN_ENTRIES = 1 << 14  # rows added worth a thread


def plan_for(dtype: torch.dtype, paired: bool = False) -> Plan | None:
    """The fastest code for a dtype on this CPU, which may be that for float32; None without a compiler."""
    features = cpu_features()
    if not features:
        return None
    if dtype == torch.bfloat16 and "avx512bf16" in features:
        return Plan("bfloat16", 16, paired)
    if dtype == torch.int8 and "avx512vnni" in features:
        return Plan("int8", 16, paired)
    return Plan("float32", _lanes(), paired)


def maxsim(
    queries: Tokens, documents: Tokens, pairs: Tensor | None, with_argmax: bool, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Scores ``(n_q, n_d)`` or ``(p,)``, and the argmax as `op.maxsim` documents it, or ``(0,)``."""
    if plan.kind == "float32":
        queries, documents = queries.floats(), documents.floats()
    first, size, lanes = _lay_out(queries.offsets, plan)
    d = queries.values.shape[1]
    table = queries.values.new_zeros(size, -(-d // plan.packed) * plan.packed)
    table[lanes, :d] = queries.values
    packed = table.view(torch.int32).view(-1, plan.lanes, table.shape[1] // plan.packed)
    packed = packed.transpose(1, 2).contiguous()
    values = documents.values.contiguous()
    if d < table.shape[1]:
        values = F.pad(values, (0, table.shape[1] - d))
    shift, query_scales, document_scales = first, first, first  # not read
    if documents.scales is not None and queries.scales is not None:
        shift = table.sum(1, dtype=torch.int32) * 128
        query_scales = queries.scales.new_ones(size)
        query_scales[lanes] = queries.scales
        document_scales = documents.scales.contiguous()

    tokens = len(queries.values)
    work = tokens * len(values) * d
    if pairs is None:
        jobs, most = documents.rows, size
        scores, argmax_shape = torch.empty(queries.rows, jobs), (jobs, tokens)
        pairs = starts = first
    else:
        jobs, pairs = len(pairs), pairs.contiguous()
        work = work // max(1, queries.rows * documents.rows) * jobs
        most = int(queries.offsets.diff().max()) + plan.lanes if jobs else 0
        starts = torch.zeros(jobs + 1, dtype=torch.int64)
        torch.cumsum(queries.offsets.diff()[pairs[:, 0]], 0, out=starts[1:])
        scores, argmax_shape = torch.empty(jobs), (int(starts[-1]),)
    argmax = torch.empty(argmax_shape if with_argmax else 0, dtype=torch.int32)
    tensors = [packed, shift, query_scales, queries.offsets, first, values, document_scales]
    tensors += [documents.offsets, pairs, starts, scores]
    pointers = [tensor.data_ptr() for tensor in tensors] + [argmax.data_ptr() if with_argmax else 0]
    kernel = compile_plan(plan)

    def run(start: int, stop: int) -> None:
        scratch = torch.empty(2, most)
        memory = [row.data_ptr() for row in scratch]
        kernel(*pointers, *memory, packed.shape[1], queries.rows, documents.rows, start, stop)

    share(run, jobs, min(torch.get_num_threads(), jobs, work // _MIN_WORK))
    return scores, argmax


def backward(
    queries: Tensor, documents: Tensor, query_tokens: Tensor, document_tokens: Tensor, grads: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients from the maxima, one after the other: ``(e,)`` tokens of both (int32) and gradient (float32).

    Threads have columns of their own, so the result does not depend on their number.
    """
    entries, d = grads.shape[0], queries.shape[1]
    tables, tokens = (
        (queries.float().contiguous(), documents.float().contiguous()),
        (
            query_tokens.contiguous(),
            document_tokens.contiguous(),
        ),
    )
    outs = [torch.zeros_like(table) for table in tables]
    grads, kernel = grads.contiguous(), _compiled_add_rows()

    def run(start: int, stop: int) -> None:
        for i in range(2):
            tensors = (outs[i], tables[1 - i], tokens[i], tokens[1 - i], grads)
            kernel(*(tensor.data_ptr() for tensor in tensors), entries, d, start, stop)

    share(run, d, min(torch.get_num_threads(), entries // _MIN_ENTRIES), parts=1, multiple=_lanes())
    return outs[0].to(queries.dtype), outs[1].to(documents.dtype)


@cache
def compile_plan(plan: Plan, cpu: str | None = None) -> Callable[..., None]:
    """Machine code for a plan; for another CPU by its LLVM name."""
    arguments = [ctypes.c_void_p] * 14 + [ctypes.c_int64] * 5
    return compile_ir(write_maxsim(plan), "maxsim", arguments, cpu=cpu)


@cache
def _compiled_add_rows() -> Callable[..., None]:
    arguments = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 4
    return compile_ir(write_add_rows(_lanes()), "add_rows", arguments)


def _lanes() -> int:
    features = cpu_features()
    if "avx512f" in features:
        return 16
    return 8 if {"avx2", "fma"} <= features else 4


def _lay_out(offsets: Tensor, plan: Plan) -> tuple[Tensor, int, Tensor | slice]:
    """First vector of each query (if ``paired``), number of lanes, and lanes of the tokens."""
    total = int(offsets[-1])
    if not plan.paired:
        return offsets, -(-total // plan.lanes) * plan.lanes, slice(total)
    lengths = offsets.diff().long()
    vectors = (lengths + (plan.lanes - 1)) // plan.lanes
    first = vectors.cumsum(0) - vectors
    shifts = torch.repeat_interleave(first * plan.lanes - offsets[:-1], lengths, output_size=total)
    return first.int(), int(vectors.sum()) * plan.lanes, torch.arange(total) + shifts
