"""Search on CUDA: a few programs read each list of documents, and one program scores each pair."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._tuning import size_class, tuned
from .reference import bits_of

__all__ = ["interaction", "probe", "residual_maxsim", "score", "visit"]

_OPTIONS = {"enable_fp_fusion": True}  # multiply-adds may be fused; Triton warns of changing its default
_ENTRIES = 1024  # documents of a list that a program reads at a time
_SHARES = 8  # programs per list: few visits should use the whole device, and some lists are long
_CONFIGS = [
    triton.Config({"BLOCK_D": block}, num_warps=warps, num_stages=stages)
    for block, warps, stages in ((16, 1, 2), (32, 2, 2), (32, 4, 3), (64, 4, 2), (64, 4, 3), (128, 4, 2))
]


@triton.jit
def _residual(
    packed,
    codebook,
    queries,
    tokens,
    d_stop,
    rows,
    q_stop,
    D: tl.constexpr,
    NBITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Return the products ``[BLOCK_D, BLOCK_Q]`` float32 of the levels of tokens with query tokens."""
    total = tl.zeros([BLOCK_D, BLOCK_Q], tl.float32)
    columns = tl.arange(0, BLOCK_W)
    for plane in range(8 // NBITS):
        for first in range(0, WIDTH, BLOCK_W):
            # windows of 8 bits, see `reference.windows`
            bytes_ = first + columns
            dims = plane * WIDTH + bytes_
            dim_exists = (bytes_ < WIDTH) & (dims < D)
            pointers = packed + tokens.to(tl.int64)[:, None] * WIDTH + bytes_[None, :]
            inside = (tokens < d_stop)[:, None] & dim_exists[None, :]
            windows = tl.load(pointers, mask=inside, other=0).to(tl.int32)
            if NBITS < 8:
                before = tl.load(pointers - 1, mask=inside & (bytes_ > 0)[None, :], other=0).to(tl.int32)
                windows = (((before << 8) | windows) >> (8 - NBITS * (plane + 1))) & 255
            # levels times query tokens
            levels = tl.load(codebook + windows)
            q = tl.load(
                queries + rows.to(tl.int64)[None, :] * D + dims[:, None],
                mask=(rows < q_stop)[None, :] & dim_exists[:, None],
                other=0.0,
            )
            total = tl.dot(levels.to(q.dtype), q, total, input_precision="ieee")
    return total


@tuned(_CONFIGS)
@triton.jit(do_not_specialize=["size"])
def score(
    table,
    queries,
    query_offsets,
    codes,
    coefficients,
    packed,
    document_offsets,
    codebook,
    pairs,
    out,
    n_centroids,
    n_queries,
    size,
    D: tl.constexpr,
    NBITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Score one pair by MaxSim; if ``NBITS`` is 0, with each token replaced by its centroid."""
    job = tl.program_id(0).to(tl.int64)
    query, document = tl.load(pairs + 2 * job), tl.load(pairs + 2 * job + 1)
    q_start, q_stop = tl.load(query_offsets + query), tl.load(query_offsets + query + 1)
    d_start, d_stop = tl.load(document_offsets + document), tl.load(document_offsets + document + 1)
    width = tl.load(query_offsets + n_queries).to(tl.int64)  # of a row of the table
    total = 0.0
    # the best token of the document for each of a block of query tokens
    for first_q in range(q_start, q_stop, BLOCK_Q):
        rows = first_q + tl.arange(0, BLOCK_Q)
        best = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        for first in range(d_start, d_stop, BLOCK_D):
            tokens = first + tl.arange(0, BLOCK_D)
            inside = tokens < d_stop
            centroids = tl.load(codes + tokens, mask=inside, other=0).to(tl.int64)
            centroids = tl.where((centroids < 0) | (centroids >= n_centroids), n_centroids - 1, centroids)
            scores = tl.load(
                table + centroids[:, None] * width + rows[None, :],
                mask=inside[:, None] & (rows < q_stop)[None, :],
                other=0.0,
            ).to(tl.float32)
            if NBITS > 0:
                residual = _residual(
                    packed,
                    codebook,
                    queries,
                    tokens,
                    d_stop,
                    rows,
                    q_stop,
                    D,
                    NBITS,
                    WIDTH,
                    BLOCK_W,
                    BLOCK_D,
                    BLOCK_Q,
                )
                a = tl.load(coefficients + 2 * tokens.to(tl.int64), mask=inside, other=0.0).to(tl.float32)
                b = tl.load(coefficients + 2 * tokens.to(tl.int64) + 1, mask=inside, other=0.0).to(tl.float32)
                scores = a[:, None] * scores + b[:, None] * residual
            best = tl.maximum(best, tl.max(tl.where(inside[:, None], scores, float("-inf")), 0))
        total += tl.sum(tl.where(rows < q_stop, best, 0.0))
    tl.store(out + job, tl.where(d_start < d_stop, total, float("-inf")))


@triton.jit
def visit(list_offsets, lists, visits, counts, n, BLOCK: tl.constexpr, SHARES: tl.constexpr):
    """Add 1 to the counts of the documents of a list; ``SHARES`` programs share the blocks of a list."""
    job = tl.program_id(0).to(tl.int64)
    query, centroid = tl.load(visits + 2 * job), tl.load(visits + 2 * job + 1)
    start = tl.load(list_offsets + centroid, mask=centroid >= 0, other=0)
    stop = tl.load(list_offsets + centroid + 1, mask=centroid >= 0, other=0)
    for first in range(start + tl.program_id(1) * BLOCK, stop, BLOCK * SHARES):
        positions = first + tl.arange(0, BLOCK)
        documents = tl.load(lists + positions, mask=positions < stop, other=-1)
        inside = (documents >= 0) & (documents < n)
        ones = tl.full([BLOCK], 1, tl.int32)
        tl.atomic_add(counts + query * n + documents, ones, mask=inside, sem="relaxed")


def probe(
    list_offsets: Tensor,
    lists: Tensor,
    visits: Tensor,
    counts: Tensor,
    *,
    entries: int = _ENTRIES,
    shares: int = _SHARES,
) -> Tensor:
    """Count what `tensor_op.tensor_probe` counts.

    Args:
        list_offsets: As for `tensor_op.tensor_probe`.
        lists: As for `tensor_op.tensor_probe`.
        visits: As for `tensor_op.tensor_probe`.
        counts: ``(n_q, n)`` int32 zeros, to which the counts are added.
        entries: Documents of a list that are read at a time.
        shares: Number of programs that share one list.

    Returns:
        ``counts``.
    """
    if counts.numel() and len(visits):
        with torch.cuda.device(lists.device) if lists.is_cuda else nullcontext():
            visit[(len(visits), shares)](
                *(x.contiguous() for x in (list_offsets, lists, visits)),
                counts,
                counts.shape[1],
                BLOCK=entries,
                SHARES=shares,
            )
    return counts


def interaction(
    table: Tensor, query_offsets: Tensor, codes: Tensor, document_offsets: Tensor, pairs: Tensor
) -> Tensor:
    """Compute `tensor_op.tensor_interaction`."""
    unused = table.new_empty(0)
    parts = (table, unused, query_offsets, codes, unused, unused, document_offsets, unused, pairs)
    return _launch(*parts, nbits=0)


def residual_maxsim(
    queries: Tensor,
    table: Tensor,
    query_offsets: Tensor,
    tokens: tuple[Tensor, Tensor, Tensor],
    document_offsets: Tensor,
    codebook: Tensor,
    pairs: Tensor,
) -> Tensor:
    """Compute `tensor_op.tensor_maxsim`."""
    parts = (table, queries, query_offsets, *tokens, document_offsets, codebook, pairs)
    return _launch(*parts, nbits=bits_of(codebook))


def _launch(table: Tensor, queries: Tensor, query_offsets: Tensor, *rest: Tensor, nbits: int) -> Tensor:
    codes, coefficients, packed, document_offsets, codebook, pairs = rest
    out = table.new_empty(len(pairs), dtype=torch.float32)
    if not len(pairs):
        return out
    width = packed.shape[1] if nbits else 1
    average = table.shape[1] // max(1, len(query_offsets) - 1)
    with torch.cuda.device(table.device) if table.is_cuda else nullcontext():
        score[(len(pairs),)](
            *(x.contiguous() for x in (table, queries, query_offsets, codes, coefficients, packed)),
            *(x.contiguous() for x in (document_offsets, codebook, pairs)),
            out,
            len(table),
            len(query_offsets) - 1,
            size_class(len(pairs), len(codes) // max(1, len(document_offsets) - 1)),
            D=queries.shape[1] if nbits else 1,
            NBITS=nbits,
            WIDTH=width,
            # products of float32 are held in registers, which larger blocks would overflow
            BLOCK_W=min(32 if queries.dtype == torch.float32 else 64, max(16, triton.next_power_of_2(width))),
            BLOCK_Q=min(64, max(16, triton.next_power_of_2(average))),
            **_OPTIONS,
        )
    return out
