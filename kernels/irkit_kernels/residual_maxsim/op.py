"""Build and search documents whose tokens are stored as ``a * centroid + b * levels``, in few bits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import codebook as codebook_
from . import cpu_build as build
from . import cpu_kernel as cpu
from .checks import (
    check_codebook,
    check_codes,
    check_documents,
    check_row,
    check_tokens,
    check_vectors,
)
from .cpu_exact import ENTRY
from .cpu_kernel import Codes, PackedCentroids, QueryTable
from .cpu_tile import TILE
from .reference import NBITS, WINDOW, Tokens

__all__ = [
    "PackedCentroids",
    "QueryTable",
    "Tokens",
    "assign",
    "assign_near",
    "decode",
    "encode",
    "exact_maxsim",
    "interaction",
    "pack_centroids",
    "probe",
    "query_table",
    "residual_maxsim",
    "train_codebook",
]


def assign(values: NDArray[np.float32], centroids: NDArray[np.float32]) -> NDArray[np.int32]:
    """Find the centroid with the largest inner product for each vector.

    Args:
        values: ``(n, d)``.
        centroids: ``(K, d)``, at least one.

    Returns:
        ``(n,)`` int32.
    """
    check_vectors("assign", centroids=centroids)
    check_vectors("assign", width=centroids.shape[1], values=values)
    return build.assign(np.ascontiguousarray(values), np.ascontiguousarray(centroids))


def assign_near(
    values: NDArray[np.float32],
    centroids: NDArray[np.float32],
    hubs: NDArray[np.float32],
    near: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Find for each vector the nearest of the centroids that are near its nearest hub, by inner products.

    Args:
        values: ``(n, d)``.
        centroids: ``(K, d)``.
        hubs: ``(G, d)``, at least one.
        near: ``(G, M)`` below K, at least one per hub: the centroids that are near it.

    Returns:
        ``(n,)`` int32.
    """
    check_vectors("assign_near", centroids=centroids)
    check_vectors("assign_near", width=centroids.shape[1], values=values, hubs=hubs)
    if near.dtype != np.int32 or near.ndim != 2 or len(near) != len(hubs) or not near.size:
        raise ValueError(
            f"assign_near: near is {near.dtype} {near.shape}; expected int32 ({len(hubs)}, M), M above 0"
        )
    if near.min() < 0 or near.max() >= len(centroids):
        raise ValueError(f"assign_near: got near {near.min()} to {near.max()} of {len(centroids)} centroids")
    values, centroids, hubs = map(np.ascontiguousarray, (values, centroids, hubs))
    return build.assign_near(values, centroids, hubs, np.ascontiguousarray(near))


def train_codebook(residuals: NDArray[np.float32], nbits: int) -> NDArray[np.int8]:
    """Find the 256 levels of a trellis code with a small squared error for a sample of residuals.

    The level of a number is chosen by the last 8 bits so far: its own ``nbits`` and the ones before. So few
    bits choose among many levels; `cpu_trellis` explains the code.

    Args:
        residuals: ``(n, d)``, differences of vectors and their centroids.
        nbits: 1, 2, 4 or 8.

    Returns:
        ``(2**(8 - nbits), 2**nbits)`` int8, the levels by the bits before and the bits of the number. They
        are in steps of 1/32 of the root mean square of a residual's numbers. With 8 bits always -128 to 127.

    Source: Marcellin and Fischer 1990 (Trellis coded quantization of memoryless and Gauss-Markov sources);
    levels indexed by windows of the bits: Tseng et al., QTIP, arXiv 2406.11235, section 3. Levels are found
    as by Lloyd 1982, alternating with the best paths through the trellis.
    """
    if nbits not in NBITS:
        raise ValueError(f"train_codebook: got nbits {nbits}, expected one of {NBITS}")
    check_vectors("train_codebook", residuals=residuals)
    return codebook_.train(np.ascontiguousarray(residuals), nbits)


def encode(
    values: NDArray[np.float32],
    centroids: NDArray[np.float32],
    codes: Codes,
    codebook: NDArray[np.int8],
) -> Tokens:
    """Encode vectors as ``a * centroid + b * levels``.

    Twice, Viterbi's algorithm finds the levels nearest to the residual, and ``a`` and ``b`` are fitted by
    least squares. The first residual is taken from the best multiple of the centroid.

    Args:
        values: ``(n, d)``.
        centroids: ``(K, d)``, of any norm.
        codes: ``(n,)`` uint16 or int32 below K, the centroid of each vector; becomes part of the result.
        codebook: From `train_codebook`.

    Returns:
        ``n`` tokens.
    """
    check_vectors("encode", centroids=centroids)
    check_vectors("encode", width=centroids.shape[1], values=values)
    check_codes("encode", codes, len(centroids))
    nbits = check_codebook("encode", codebook)
    if nbits == WINDOW and (codebook != np.arange(-128, 128)).any():
        raise ValueError("encode: got a codebook of 8 bits other than train_codebook's, -128 to 127")
    if len(codes) != len(values):
        raise ValueError(f"encode: got {len(values)} vectors but {len(codes)} codes")
    return build.encode(np.ascontiguousarray(values), np.ascontiguousarray(centroids), codes, codebook)


def decode(tokens: Tokens, centroids: NDArray[np.float32], codebook: NDArray[np.int8]) -> NDArray[np.float32]:
    """Decode tokens, the inverse of `encode` up to rounding.

    Args:
        tokens: ``n`` tokens.
        centroids: ``(K, d)``, the ones passed to `encode`.
        codebook: The one passed to `encode`.

    Returns:
        ``(n, d)`` float32, ``a * centroid + b * levels``.
    """
    check_vectors("decode", centroids=centroids)
    check_tokens("decode", tokens, centroids.shape[1], codebook)
    check_codes("decode", tokens.codes, len(centroids))
    return build.decode(tokens, np.ascontiguousarray(centroids), codebook)


def pack_centroids(centroids: NDArray[np.float32]) -> PackedCentroids:
    """Round centroids ``(K, d)`` to bytes and pack them for `query_table`, once for all queries."""
    check_vectors("pack_centroids", centroids=centroids)
    if not np.isfinite(centroids).all():
        raise ValueError("pack_centroids: got a centroid with NaN or infinity")
    return cpu.pack_centroids(np.ascontiguousarray(centroids))


def query_table(query: NDArray[np.float32], centroids: PackedCentroids) -> QueryTable:
    """Score every centroid for every token of a query; numbers of both are rounded to 8 bits.

    Args:
        query: ``(m, d)``, not empty.
        centroids: From `pack_centroids`.

    Returns:
        The table that the other functions of a search read; about ``5 * K * m`` bytes.
    """
    check_vectors("query_table", width=centroids.dim, query=query)
    if not len(query) or not np.isfinite(query).all():
        raise ValueError("query_table: got a query without tokens or with NaN or infinity in them")
    return cpu.query_table(np.ascontiguousarray(query), centroids)


def probe(
    table: QueryTable,
    nprobe: int,
    list_offsets: NDArray[np.int64],
    list_documents: NDArray[np.int32],
    keep: NDArray[np.bool_],
    count: int,
) -> NDArray[np.int32]:
    """Find the documents that have the most of the query tokens' best centroids.

    The count of a document is the number of pairs of a query token and one of its ``nprobe`` best centroids
    that the document has.

    Args:
        table: The table of the query. A token of zeros has no best centroids.
        nprobe: Number of best centroids per query token, at least 1; more if several have the same score.
        list_offsets: ``(K + 1,)``; the documents of centroid ``c`` start at ``list_offsets[c]``.
        list_documents: The documents of all centroids, below ``len(keep)``.
        keep: ``(documents,)``, True for documents that may be returned.
        count: Number of documents wanted, at least 1. If more have a best centroid, documents with a lower
            count than the ``count``-th are left out; documents with the same count stay. Counts end at 255.

    Returns:
        Documents with a count of at least 1, in ascending order.
    """
    if count < 1:
        raise ValueError(f"probe: got count {count}, expected at least 1")
    counts = probe_counts(table, nprobe, list_offsets, list_documents, keep)
    return collect(counts, least_count(counts, count))


def probe_counts(
    table: QueryTable,
    nprobe: int,
    list_offsets: NDArray[np.int64],
    list_documents: NDArray[np.int32],
    keep: NDArray[np.bool_],
) -> NDArray[np.uint8]:
    """Return the counts ``(documents,)`` of `probe`, 0 where ``keep`` is False; arguments are its own."""
    check_row("probe", np.int64, list_offsets=list_offsets)
    check_row("probe", np.int32, list_documents=list_documents)
    check_row("probe", np.bool_, keep=keep)
    if nprobe < 1:
        raise ValueError(f"probe: got nprobe {nprobe}, expected at least 1")
    if len(list_offsets) != table.count + 1:
        raise ValueError(f"probe: got {len(list_offsets)} list_offsets for {table.count} centroids")
    counts = np.zeros(len(keep), np.uint8)
    if len(keep):
        nprobe = min(nprobe, table.count)
        best = np.empty((nprobe, table.plan.lanes), np.float32)
        numbers = (nprobe, table.count, len(list_documents), len(keep) - 1)
        table.call(cpu.probe(table.plan), (best, list_offsets, list_documents, counts), *numbers)
    counts *= keep.view(np.uint8)
    return counts


def least_count(counts: NDArray[np.uint8], count: int) -> int:
    """Return the lowest count, at least 1, of the documents that `probe` finds if ``count`` are wanted."""
    levels = range(2, int(counts.max(initial=0)) + 1)
    return 1 + bisect_right(levels, -count, key=lambda level: -int(np.count_nonzero(counts >= level)))


def collect(counts: NDArray[np.uint8], least: int) -> NDArray[np.int32]:
    """Return the documents, ascending int32, whose count is at least ``least``, which is from 1 to 255."""
    check_row("collect", np.uint8, counts=counts)
    if not 1 <= least <= 255:
        raise ValueError(f"collect: got least {least}, expected a count from 1 to 255")
    documents = np.empty(int(np.count_nonzero(counts >= least)), np.int32)
    cpu.collect()(*cpu.addresses(counts, documents), len(counts), least)
    return documents


def interaction(
    table: QueryTable, codes: Codes, offsets: NDArray[np.int64], documents: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Score documents roughly: MaxSim with each token replaced by its centroid, in 256 steps.

    Args:
        table: The table of the query.
        codes: ``(tokens,)`` uint16 or int32, the centroids of all tokens.
        offsets: ``(all documents + 1,)``; the tokens of document ``i`` start at ``offsets[i]``; not checked.
        documents: The documents to score.

    Returns:
        ``(len(documents),)`` int32, in units of ``table.step`` above a constant of the query; 0 for documents
        without tokens.
    """
    check_codes("interaction", codes)
    check_documents("interaction", offsets, documents)
    out = np.empty(len(documents), np.int32)
    kernel = cpu.interaction(table.plan, cpu.code_type(codes))
    table.call(kernel, (codes, offsets, documents, out), len(documents), table.count - 1)
    return out


def residual_maxsim(
    table: QueryTable,
    tokens: Tokens,
    offsets: NDArray[np.int64],
    codebook: NDArray[np.int8],
    documents: NDArray[np.int32],
) -> NDArray[np.float32]:
    """Score documents by MaxSim with their compressed tokens; query and centroids are rounded to 8 bits.

    Args:
        table: The table of the query.
        tokens: The tokens of all documents. A code above the last centroid is read as the last centroid.
        offsets: ``(all documents + 1,)``; the tokens of document ``i`` start at ``offsets[i]``; not checked.
        codebook: The one passed to `encode`.
        documents: The documents to score.

    Returns:
        ``(len(documents),)`` float32; minus infinity for documents without tokens.
    """
    return _maxsim(cpu.residual_maxsim, table, tokens, offsets, codebook, documents)


def exact_maxsim(
    query: NDArray[np.float32],
    table: QueryTable,
    centroids: NDArray[np.float32],
    tokens: Tokens,
    offsets: NDArray[np.int64],
    codebook: NDArray[np.int8],
    documents: NDArray[np.int32],
) -> NDArray[np.float32]:
    """Score documents by MaxSim with their decoded tokens, in float32.

    Scores as of `residual_maxsim` tell which tokens may be a maximum; only these are decoded.

    Args:
        query: ``(m, d)``, the one that the table is of.
        table: The table of the query.
        centroids: ``(K, d)``, the ones that the table is of.
        tokens: As for `residual_maxsim`, and so are the next ones.
        offsets: ``(all documents + 1,)``.
        codebook: The one passed to `encode`.
        documents: The documents to score.

    Returns:
        ``(len(documents),)`` float32; minus infinity for documents without tokens.
    """
    check_vectors("exact_maxsim", width=table.dim, query=query, centroids=centroids)
    check_documents("exact_maxsim", offsets, documents)
    if len(centroids) != table.count:
        raise ValueError(f"exact_maxsim: got {len(centroids)} centroids, expected the table's {table.count}")
    floats, errors = cpu.exact_query(query, table)
    longest = int((offsets[documents + 1] - offsets[documents]).max(initial=0))
    uppers = np.empty((max(1, longest), len(floats)), np.float32)
    decoded = np.empty(floats.shape[1], np.float32)
    listed = np.empty((len(uppers) * len(table.query) + 1) * ENTRY, np.uint32)
    more = np.ascontiguousarray(centroids), floats, errors, uppers, decoded, listed
    return _maxsim(cpu.exact_maxsim, table, tokens, offsets, codebook, documents, (table.dim,), *more)


def _maxsim(
    variant: Callable[..., Callable[..., None]],
    table: QueryTable,
    tokens: Tokens,
    offsets: NDArray[np.int64],
    codebook: NDArray[np.int8],
    documents: NDArray[np.int32],
    chosen: tuple[int, ...] = (),
    *more: NDArray[Any],
) -> NDArray[np.float32]:
    """Run compiled code that scores documents; ``chosen`` are further arguments of its ``variant``."""
    nbits, width = check_tokens("residual_maxsim", tokens, table.dim, codebook)
    check_documents("residual_maxsim", offsets, documents)
    out = np.empty(len(documents), np.float32)
    maxima = 4 * len(table.query) * table.plan.lanes  # bytes
    scratch = np.empty(TILE * table.plan.stride(nbits, width) + maxima, np.uint8)
    kernel = variant(table.plan, cpu.code_type(tokens.codes), nbits, width, *chosen)
    arrays = (*tokens, offsets, cpu.shifted(codebook), documents, out, scratch, *more)
    table.call(kernel, arrays, len(documents), table.count - 1)
    return out
