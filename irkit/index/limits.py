"""Sizes at which an index changes its method, and sizes of the blocks that it works in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from irkit_kernels.sparse_search import Thresholds


@dataclass(frozen=True)
class Limits:
    """Sizes that decide how an index works, never what it finds beyond what its configuration allows.

    `Store.open` and `Store.build` take one, and everything in the store follows it. Copies of an index, in
    object stores and for other engines, follow `current_limits`. The defaults are right for use; smaller
    ones let a test reach every method with little data.

    Attributes:
        verify_bytes: Bytes of an index up to which opening it compares checksums by default.
        read_bytes: Bytes of a block that is read from a file.
        take_rows: Rows copied from a file between two releases of its pages.
        read_documents: Documents read at once while they are iterated.
        unsorted: Ids, and entries of metadata, that are not in tables on the disk; or an eighth of those that
            are, if that is more.
        filter_rows: Rows whose metadata a filter reads at once.
        compact_bytes: Bytes of documents that a compaction copies at once.
        scan_scores: Scores that a scan makes at once (8 MB).
        scan_gpu_scores: Scores that a scan on a GPU makes at once (64 MB, and their keys 128 MB).
        scan_numbers: Numbers of documents that a scan, or a rescoring, reads or makes at once (32 MB).
        flat_scan: Dense vectors that `flat` scores without a look at their codes.
        flat_share: `flat` also scores all vectors without codes if there are fewer than ``flat_share``
            vectors per hit, if a filter allows less than 1 / ``flat_share`` of them, or if the codes leave
            more than 1 / ``flat_share`` of them. The first and the last rule use 2 instead for vectors in
            another dtype than float32, which are converted. These rules hold for graphs of FAISS, too.
        bm25_drift: Relative change of the mean length of documents that makes BM25 compute all weights again.
        bm25_uncounted: Share of the rows that statistics of BM25 need not include; opening counts them.
        inverted_unlisted: Rows that are not listed on disk; a search lists them in memory.
        inverted_segment: Rows of a segment of lists, at most.
        inverted_exact: Documents up to which the mode "auto" is exact.
        inverted_kernel: Thresholds of the kernel ``sparse_search``; None takes its defaults.
        dense_scan: Rows that are scanned by an index of the kind `dense`, as lists would not be faster.
        dense_scan_per_hit: Rows for each hit that it scans, too.
        dense_points: Rows for each of its lists, at least.
        dense_segment: Rows of a segment of its lists, at most.
        faiss_scan: Rows that are scanned, as a structure would not be faster.
        faiss_scan_per_hit: Rows for each hit that are scanned, too.
        faiss_codes_per_hit: Rows for each hit up to which a search of a graph scans codes of all rows instead
            of walking, if `flat` would scan them.
        faiss_points: Vectors for each centroid that FAISS asks for.
        faiss_queries: Queries that FAISS searches at once.
        faiss_add: Rows that are added to a structure at once: a second's work for a graph.
        faiss_gpu_hits: Hits per query, and lists visited, that FAISS allows on a GPU.
        plaid_uncompressed: Tokens that are not compressed; a search scores them as they are.
        plaid_scan: Documents that are all ranked by their centroids, instead of visiting lists.
        plaid_block: Tokens that are compressed at once.
        plaid_list_block: Tokens that are listed at once.
        plaid_direct: Centroids that one k-means trains; more are trained within clusters.
        plaid_hubs: Centroids from which on a CPU compares a token only with those near its hub.
        plaid_candidates: Documents whose means are scored, at least.
        plaid_visited: Centroids that a query visits, at least.
        plaid_margin: Documents scored exactly beyond those that are to be returned.
        shared_bytes: Bytes of all shards up to which actors share the queries, and each searches all shards;
            of more, each searches its shards for all queries.
        upload_tries: Attempts at a file in an object store, and at a download of an index that is replaced
            meanwhile.
        upload_pause: Seconds before the second attempt; twice as many before each further one.
        bulk_bytes: Bytes of a bulk file for OpenSearch or Elasticsearch, whose servers take up to 100 MB.
        narrow: Numbers up to which terms, centroids and documents are stored in two bytes each.
    """

    verify_bytes: int = 1 << 26
    read_bytes: int = 1 << 24
    take_rows: int = 1 << 12
    read_documents: int = 1 << 10
    unsorted: int = 1 << 14
    filter_rows: int = 1 << 14
    compact_bytes: int = 1 << 26
    scan_scores: int = 1 << 21
    scan_gpu_scores: int = 1 << 24
    scan_numbers: int = 1 << 23
    flat_scan: int = 1024
    flat_share: int = 16
    bm25_drift: float = 0.01
    bm25_uncounted: float = 1 / 64
    inverted_unlisted: int = 1024
    inverted_segment: int = 1 << 24
    inverted_exact: int = 200_000
    inverted_kernel: Thresholds | None = None
    dense_scan: int = 2048
    dense_scan_per_hit: int = 16
    dense_points: int = 16
    dense_segment: int = 1 << 22
    faiss_scan: int = 2048
    faiss_scan_per_hit: int = 64
    faiss_codes_per_hit: int = 400
    faiss_points: int = 39
    faiss_queries: int = 2048
    faiss_add: int = 2048
    faiss_gpu_hits: int = 2048
    plaid_uncompressed: int = 1 << 14
    plaid_scan: int = 2048
    plaid_block: int = 1 << 17
    plaid_list_block: int = 1 << 20
    plaid_direct: int = 512
    plaid_hubs: int = 4096
    plaid_candidates: int = 256
    plaid_visited: int = 32
    plaid_margin: int = 4
    shared_bytes: int = 1 << 32
    upload_tries: int = 4
    upload_pause: float = 0.5
    bulk_bytes: int = 32 << 20
    narrow: int = 1 << 16


_current = [Limits()]


def current_limits() -> Limits:
    """Return the `Limits` of stores that are opened now: the limits of `use_limits`, or the defaults."""
    return _current[-1]


@contextmanager
def use_limits(limits: Limits) -> Iterator[None]:
    """Give these limits to the stores that are opened inside the ``with`` block, in any thread.

    Examples:
        >>> with use_limits(Limits(faiss_scan=10)):
        ...     current_limits().faiss_scan
        10
    """
    _current.append(limits)
    try:
        yield
    finally:
        _current.pop(next(position for position, known in enumerate(_current) if known is limits))
