"""MaxSim on CUDA: a program scores some queries against some documents."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._tuning import INTERPRETED, size_class, tuned
from .reference import Tokens

__all__ = ["OPTIONS", "WIDEST", "forward", "on_device_of", "score"]

_INTERPRETED = tl.constexpr(INTERPRETED)
OPTIONS = {"enable_fp_fusion": True}  # multiply-adds may be fused; Triton warns of changing its default
WIDEST = 128  # dimensions multiplied at once
_ROWS, _SLOTS = 128, 16  # at most so many tokens in a block of queries, and queries in a program
_EACH, _PROGRAMS = 8, 2048  # up to 8 documents per program, if that leaves so many programs
_TRIED = (32, 2, 3), (32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 8, 3), (128, 4, 2), (128, 8, 3)
_CONFIGS = [
    triton.Config({"BLOCK_D": block}, num_warps=warps, num_stages=stages) for block, warps, stages in _TRIED
]


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest_of_rows(x):
    """Return the maximum of each row, NaN if one number is; `tl.max` may lose it."""
    if _INTERPRETED:  # which calls `_larger` for each number, too slow for tests
        is_nan = x != x
        high = tl.max(tl.where(is_nan, float("-inf"), x), 1)
        return tl.where(tl.max(is_nan.to(tl.int32), 1) > 0, float("nan"), high)
    else:
        return tl.reduce(x, 1, _larger)


@triton.jit
def _load_queries(queries, rows, first_dim, q_stop, D: tl.constexpr, BLOCK_K: tl.constexpr):
    dims = first_dim + tl.arange(0, BLOCK_K)
    pointers = queries + rows.to(tl.int64)[:, None] * D + dims[None, :]
    return tl.load(pointers, mask=(rows < q_stop)[:, None] & (dims < D)[None, :], other=0)


@triton.jit
def _best(
    queries,
    block,
    documents,
    document_scales,
    rows,
    q_stop,
    d_start,
    d_stop,
    D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    QUANTIZED: tl.constexpr,
    WITH_ARGMAX: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return the largest inner product of each query token, and the row of the document token that has it.

    ``block`` has the query tokens, loaded before, and is not used if they have more than ``BLOCK_K``
    dimensions.
    """
    best = tl.full(rows.shape, float("-inf"), tl.float32)
    argmax = tl.full(rows.shape, -1, tl.int32)
    for first in range(d_start, d_stop, BLOCK_D):
        # similarities of a block of document tokens; the last token is repeated, which changes no maximum
        columns = tl.minimum(first + tl.arange(0, BLOCK_D), d_stop - 1)
        similarity = tl.zeros([rows.shape[0], BLOCK_D], tl.int32 if QUANTIZED else tl.float32)
        for k in range(0, D, BLOCK_K):
            dims = k + tl.arange(0, BLOCK_K)
            pointers = documents + columns.to(tl.int64)[None, :] * D + dims[:, None]
            d = tl.load(pointers, mask=(dims < D)[:, None], other=0)
            q = block if D <= BLOCK_K else _load_queries(queries, rows, k, q_stop, D, BLOCK_K)
            if QUANTIZED:
                similarity = tl.dot(q, d, similarity, out_dtype=tl.int32)
            else:
                similarity = tl.dot(q, d, similarity, input_precision="ieee")
        similarity = similarity.to(tl.float32)
        if QUANTIZED:
            similarity *= tl.load(document_scales + columns)[None, :]
        # running maximum, NaN if one is NaN; its column is the first that is not smaller
        high = _largest_of_rows(similarity)
        if WITH_ARGMAX:
            reached = tl.where(similarity < high[:, None], 2147483647, columns[None, :])
            argmax = tl.where((high <= best) & (argmax >= 0), argmax, tl.min(reached, 1))
        best = _larger(best, high)
    return best, argmax


@tuned(_CONFIGS)
@triton.jit(do_not_specialize=["size"])
def score(
    queries,
    query_scales,
    query_offsets,
    documents,
    document_scales,
    document_offsets,
    pairs,
    argmax_offsets,
    out,
    argmax,
    n_q,
    n_d,
    group,
    each,
    size,
    D: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PAIRED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    WITH_ARGMAX: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Score a pair or, without pairs, ``group`` queries, at most ``SLOTS``, against ``each`` documents.

    Queries of a group lie back to back, so blocks of ``BLOCK_Q`` tokens are taken from all of them together.
    Programs of all groups against the same documents are neighbours, so that one reads what another has read.
    """
    job = tl.program_id(0).to(tl.int64)
    if PAIRED:
        query, first_document = tl.load(pairs + 2 * job), tl.load(pairs + 2 * job + 1)
        last_document = first_document + 1
    else:
        groups = tl.cdiv(n_q, group)
        query, first_document = job % groups * group, job // groups * each
        last_document = tl.minimum(first_document + each, n_d)
    # the queries of the group, and their tokens
    members, last = query + tl.arange(0, SLOTS), tl.minimum(query + group, n_q)
    starts = tl.load(query_offsets + members, mask=members < last, other=0)
    stops = tl.load(query_offsets + members + 1, mask=members < last, other=0)
    q_start, q_stop = tl.load(query_offsets + query), tl.load(query_offsets + last)
    total_q = tl.load(query_offsets + n_q)
    for first in range(q_start, tl.maximum(q_stop, q_start + 1), BLOCK_Q):
        rows = first + tl.arange(0, BLOCK_Q)
        block = _load_queries(queries, rows, 0, q_stop, D, BLOCK_K)
        inside = (rows[:, None] >= starts[None, :]) & (rows[:, None] < stops[None, :])
        for document in range(first_document, last_document):
            d_start, d_stop = tl.load(document_offsets + document), tl.load(document_offsets + document + 1)
            best, best_row = _best(
                queries,
                block,
                documents,
                document_scales,
                rows,
                q_stop,
                d_start,
                d_stop,
                D,
                BLOCK_K,
                QUANTIZED,
                WITH_ARGMAX,
                BLOCK_D,
            )
            if QUANTIZED and d_start < d_stop:
                best *= tl.load(query_scales + rows, mask=rows < q_stop, other=0)
            if WITH_ARGMAX:
                if PAIRED:
                    pointers = argmax + tl.load(argmax_offsets + job) + rows - q_start
                else:
                    pointers = argmax + document * total_q + rows  # int64, as `job` is
                tl.store(pointers, best_row, mask=rows < q_stop)
            # sums of this block, added to those of the blocks before
            totals = tl.sum(tl.where(inside, best[:, None], 0.0), 0)
            pointers = out + (job + members - query if PAIRED else members * n_d + document)
            if first > q_start:
                tl.debug_barrier()  # what other threads of this program have stored
                totals += tl.load(pointers, mask=members < last, other=0.0)
            tl.store(pointers, totals, mask=members < last)


def forward(
    queries: Tokens, documents: Tokens, pairs: Tensor | None, with_argmax: bool, maxima: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `cpu_kernel.maxsim` on the device of the tensors.

    The host waits for the device only with pairs and ``with_argmax``, if ``maxima`` is None.
    """
    values = queries.values.contiguous()
    tokens, d, jobs = len(values), values.shape[1], queries.rows * documents.rows
    # shapes of the results: a grid, or a list of pairs
    shape: tuple[int, ...] = (queries.rows, documents.rows)
    argmax_shape: tuple[int, ...] = (documents.rows, tokens)
    starts = queries.offsets  # a placeholder, which the kernel does not read
    if pairs is not None:
        pairs, jobs = pairs.contiguous(), len(pairs)
        shape, argmax_shape = (jobs,), (0,)
        if with_argmax:
            lengths = queries.offsets.diff()[pairs[:, 0]]
            ends = lengths.cumsum(0)
            if maxima is None:
                maxima = int(ends[-1]) if jobs else 0
            starts, argmax_shape = ends - lengths, (maxima,)
    # a program for each pair, or for a group of queries and some documents
    group, block_q = _groups(tokens, queries.rows, pairs is None and values.dtype != torch.float32)
    each = 1
    if pairs is None and jobs:
        groups = triton.cdiv(queries.rows, group)
        each = max(1, min(_EACH, groups * documents.rows // _PROGRAMS))
        jobs = groups * triton.cdiv(documents.rows, each)
    scores = values.new_empty(shape, dtype=torch.float32)
    argmax = values.new_empty(argmax_shape if with_argmax else 0, dtype=torch.int32)
    quantized = queries.scales is not None
    if jobs:
        with on_device_of(values):
            score[(jobs,)](
                values,
                queries.scales.contiguous() if queries.scales is not None else scores,
                queries.offsets.contiguous(),
                documents.values.contiguous(),
                documents.scales.contiguous() if documents.scales is not None else scores,
                documents.offsets.contiguous(),
                pairs if pairs is not None else starts,
                starts,
                scores,
                argmax,
                queries.rows,
                documents.rows,
                group,
                each,
                size_class(jobs, len(documents.values) // max(1, documents.rows)),
                D=d,
                SLOTS=triton.next_power_of_2(group),
                BLOCK_Q=block_q,
                BLOCK_K=32
                if values.dtype == torch.float32
                else min(WIDEST, max(32, triton.next_power_of_2(d))),
                PAIRED=pairs is not None,
                QUANTIZED=quantized,
                WITH_ARGMAX=with_argmax,
                **OPTIONS,
            )
    return scores, argmax


def _groups(tokens: int, n_q: int, joined: bool) -> tuple[int, int]:
    """Return how many queries a program scores, and how many of their tokens it multiplies at once.

    The matrix units of Hopper multiply at least 64 rows at once, and a document is read once for all of them,
    so a block is made of several short queries if they may be ``joined``. The host knows only their average
    length: blocks are filled if it looks like the length of all of them, otherwise to three quarters, because
    a group that is longer than a block takes two.
    """
    if n_q <= 1 or not joined:
        return 1, min(64, max(16, triton.next_power_of_2(tokens // max(1, n_q))))
    if tokens <= _ROWS:  # a single block
        return min(_SLOTS, n_q), max(16, triton.next_power_of_2(tokens))
    average = triton.cdiv(tokens, n_q)
    alike = _ROWS % average == 0 and tokens == average * n_q
    return max(1, min(_SLOTS, (_ROWS if alike else _ROWS * 3 // 4) // average)), _ROWS


def on_device_of(tensor: Tensor) -> torch.cuda.device | nullcontext[None]:
    """Launch kernels on the GPU that has a tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
