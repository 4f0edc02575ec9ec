"""MaxSim on CUDA: one program scores a query against a document."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._tuning import size_class, tuned
from .reference import Tokens

__all__ = ["forward", "score"]

_OPTIONS = {"enable_fp_fusion": True}  # multiply-adds may be fused; Triton warns of changing its default
_WIDEST = 128  # dimensions multiplied at once
_CONFIGS = [
    triton.Config({"BLOCK_D": block}, num_warps=warps, num_stages=stages)
    for block, warps, stages in ((32, 2, 3), (32, 4, 3), (64, 4, 2), (64, 4, 3), (128, 4, 2), (128, 8, 3))
]


@triton.jit
def _best(
    queries,
    documents,
    document_scales,
    rows,
    q_stop,
    d_start,
    d_stop,
    D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    QUANTIZED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return the largest inner product of each query token, and the row of the document token that has it."""
    dims = tl.arange(0, BLOCK_K)
    q_pointers = queries + rows.to(tl.int64)[:, None] * D + dims[None, :]
    best = tl.full(rows.shape, float("-inf"), tl.float32)
    argmax = tl.full(rows.shape, -1, tl.int32)
    has_nan = tl.zeros(rows.shape, tl.int32)
    for first in range(d_start, d_stop, BLOCK_D):
        # similarities of a block of document tokens
        columns = first + tl.arange(0, BLOCK_D)
        d_pointers = documents + columns.to(tl.int64)[None, :] * D + dims[:, None]
        similarity = tl.zeros([rows.shape[0], BLOCK_D], tl.int32 if QUANTIZED else tl.float32)
        for k in range(0, D, BLOCK_K):
            inside = k + dims < D
            q = tl.load(q_pointers + k, mask=(rows < q_stop)[:, None] & inside[None, :], other=0)
            d = tl.load(d_pointers + k, mask=(columns < d_stop)[None, :] & inside[:, None], other=0)
            if QUANTIZED:
                similarity = tl.dot(q, d, similarity, out_dtype=tl.int32)
            else:
                similarity = tl.dot(q, d, similarity, input_precision="ieee")
        similarity = similarity.to(tl.float32)
        if QUANTIZED:
            similarity *= tl.load(document_scales + columns, mask=columns < d_stop, other=0)[None, :]
        # running maximum; NaN is remembered apart, because tl.max may lose it
        not_nan = similarity == similarity
        has_nan = tl.maximum(has_nan, tl.max((~not_nan).to(tl.int32), 1))
        similarity = tl.where((columns < d_stop)[None, :] & not_nan, similarity, float("-inf"))
        high, column = tl.max(similarity, 1, return_indices=True, return_indices_tie_break_left=True)
        argmax = tl.where((high > best) | (argmax < 0), tl.minimum(first + column, d_stop - 1), argmax)
        best = tl.maximum(best, high)
    return tl.where(has_nan > 0, float("nan"), best), argmax


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
    size,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PAIRED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    WITH_ARGMAX: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Score one query against one document.

    Program i scores pair i or, without pairs, query ``i % n_q`` against document ``i // n_q``, so that
    neighbouring programs read the same document.
    """
    job = tl.program_id(0).to(tl.int64)
    if PAIRED:
        query, document, target = tl.load(pairs + 2 * job), tl.load(pairs + 2 * job + 1), job
    else:
        query, document = job % n_q, job // n_q
        target = query * n_d + document
    q_start, q_stop = tl.load(query_offsets + query), tl.load(query_offsets + query + 1)
    d_start, d_stop = tl.load(document_offsets + document), tl.load(document_offsets + document + 1)
    total = 0.0
    for first in range(q_start, q_stop, BLOCK_Q):
        rows = first + tl.arange(0, BLOCK_Q)
        best, best_row = _best(
            queries, documents, document_scales, rows, q_stop, d_start, d_stop, D, BLOCK_K, QUANTIZED, BLOCK_D
        )
        if QUANTIZED and d_start < d_stop:
            best *= tl.load(query_scales + rows, mask=rows < q_stop, other=0)
        total += tl.sum(tl.where(rows < q_stop, best, 0.0))
        if WITH_ARGMAX:
            pointers = argmax + rows - q_start
            if PAIRED:
                pointers += tl.load(argmax_offsets + job)
            else:
                pointers += document * tl.load(query_offsets + n_q) + q_start
            tl.store(pointers, best_row, mask=rows < q_stop)
    tl.store(out + target, total)


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
    # one program per pair
    scores = values.new_empty(shape, dtype=torch.float32)
    argmax = values.new_empty(argmax_shape if with_argmax else 0, dtype=torch.int32)
    quantized = queries.scales is not None
    if jobs:
        average = tokens // max(1, queries.rows)
        with _on(values):
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
                size_class(jobs, len(documents.values) // max(1, documents.rows)),
                D=d,
                BLOCK_Q=min(64, max(16, triton.next_power_of_2(average))),
                BLOCK_K=32
                if values.dtype == torch.float32
                else min(_WIDEST, max(32, triton.next_power_of_2(d))),
                PAIRED=pairs is not None,
                QUANTIZED=quantized,
                WITH_ARGMAX=with_argmax,
                **_OPTIONS,
            )
    return scores, argmax


def _on(tensor: Tensor) -> torch.cuda.device | nullcontext[None]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
