"""BM25 in an index, which stores how often each term occurs in each document, and weighs it when it is read.

A weight depends on the mean length of all documents, which every change of the index moves, so rows store
counts. `renew` stores the statistics that weights need: the number of documents, of their tokens, and of the
documents that have each term. What was added or removed since then is counted when the statistics are read,
so they are always exact.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from irkit.index.array_files import Array, corrupt
from irkit.index.layout import element_positions, removed_rows, row_ends
from irkit.index.store import Store

_ROWS = 1 << 14  # removed documents that are counted at once
_COUNTED = ["lengths.bin", "terms.bin", "weights.bin", "removed.bin"]
_NOTHING: Array = np.empty(0, np.uint32)
_NONE = {"rows": 0, "removed": 0, "documents": 0, "tokens": 0}


class Statistics(NamedTuple):
    """Statistics of the documents that are not removed.

    Attributes:
        documents: Their number.
        tokens: The number of their tokens.
        frequencies: ``(dim,)`` number of documents that have each term.
        rows: Rows that were counted.
        removed: Removals that were subtracted.
    """

    documents: int
    tokens: int
    frequencies: Array
    rows: int
    removed: int


def begin(store: Store, k1: float, b: float) -> None:
    """Make the empty index of a store one of BM25, inside ``update``; nothing happens if it is one already.

    Documents that are added to it are counts of terms, over a vocabulary that may grow. Documents that the
    index returns have weights, see `saturate`. The other half of BM25, how rare a term is, belongs to the
    queries.
    """
    store.meta["index"].setdefault("bm25", {"k1": k1, "b": b, "mean": None, "counted": _NONE})


def begin_as(store: Store, source: Store) -> None:
    """Call `begin` with the settings of the index of ``source``, if that is one of BM25."""
    if settings := source.meta["index"].get("bm25"):
        begin(store, settings["k1"], settings["b"])


def saturate(counts: Array, lengths: Array, k1: float, b: float, mean: float) -> Array:
    """Return weights of terms in documents: ``count / (count + k1 (1 - b + b length / mean))``.

    Args:
        counts: How often a term occurs in a document.
        lengths: Tokens of the document of each count.
        k1: How much repetitions of a term add; 0 ignores them.
        b: How much the length matters, from 0 (not at all) to 1.
        mean: Mean length of all documents.

    Source: Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009, eq. 3.15, without the factor
    k1 + 1 that all terms share, as in Lucene 8 and later.
    """
    counts = counts.astype(np.float64)
    weights: Array = (counts / (counts + k1 * (1 - b + b * lengths / mean))).astype(np.float32)
    return weights


def weigh(
    store: Store, arrays: dict[str, Array], formula: tuple[float, float] | None = None
) -> dict[str, Array]:
    """Replace counts by weights in the arrays of rows of a BM25 index; change no other index.

    Args:
        store: Store of the index.
        arrays: Arrays of ``Sparse.arrays``; counts may be of any dtype.
        formula: k1 and b; None takes those that the index was built with.
    """
    settings = store.meta["index"].get("bm25")
    if settings is None:
        return arrays
    counts, rows = arrays["weights"], arrays["lengths"]
    sums = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    ends = np.cumsum(rows)
    lengths = np.repeat(sums[ends] - sums[ends - rows], rows)
    k1, b = formula or (settings["k1"], settings["b"])
    weights = saturate(counts, lengths, k1, b, mean_length(store))
    return arrays | {"weights": weights}


def mean_length(store: Store) -> float:
    """Return the mean length of documents that weights use: the mean at the last `renew`."""
    mean = store.meta["index"]["bm25"]["mean"]
    return float(mean) if mean is not None else _mean(statistics(store))


def rarity(store: Store, terms: Array) -> Array:
    """Return the weights of ``terms (n,)`` in queries, idf: ``ln(1 + (N - df + 0.5) / (df + 0.5))``."""
    now = statistics(store)
    matching = now.frequencies[terms]
    weights: Array = np.log1p((now.documents - matching + 0.5) / (matching + 0.5))
    return weights


def renew(store: Store) -> bool:
    """Store the statistics, inside ``update``; return whether all weights changed.

    Weights change when the mean length is 1 % away from the one that they were made with. In a shard they
    have the mean that all shards share.
    """
    settings = store.meta["index"].get("bm25")
    if settings is None:
        return False
    now, mean = statistics(store), settings["mean"]
    counted = {"rows": store.meta["index"]["rows"], "removed": store.rows("removed.bin")}
    new = sum(value - settings["counted"][key] for key, value in counted.items())
    if new > store.limits.bm25_uncounted * counted["rows"]:
        counted |= {"documents": now.documents, "tokens": now.tokens}
        content = now.frequencies.astype("<u4").tobytes()
        store.replace("frequencies.bin", lambda path: path.write_bytes(content))
        store.meta["index"]["bm25"] = settings = settings | {"counted": counted}
    new = settings["shared"] if "shared" in settings else renewed_mean(store)
    if new != mean:
        store.meta["index"]["bm25"] = settings | {"mean": new}
    return bool(new != mean)


def renewed_mean(store: Store) -> float:
    """Return the mean length that weights should use now: the stored one, unless it is 1 % away."""
    now, mean = _mean(statistics(store)), store.meta["index"]["bm25"]["mean"]
    drifted = mean is None or abs(now - mean) > store.limits.bm25_drift * mean
    return now if drifted else float(mean)


def element_ends(store: Store, elements: str) -> Array:
    """Return ``(n,)`` where the elements of each row end, in the array ``elements``."""
    total = store.rows(elements)

    def extend(before: Array | None) -> Array:
        return row_ends(store.path, store.read("lengths.bin"), total, before)

    return store.extended("ends", ["lengths.bin"], extend)


def statistics(store: Store) -> Statistics:
    """Return exact statistics, whatever was added and removed since the last `renew`.

    The statistics of an index in shards are sums over the shards.
    """
    if store.parts:
        key = "bm25", *(part.version for part in store.parts)
        return store.derived(key, lambda: _sum([statistics(part) for part in store.parts]))
    return store.extended("bm25", _COUNTED, lambda before: _count(store, before))


def _sum(shards: list[Statistics]) -> Statistics:
    frequencies = np.zeros(max(len(now.frequencies) for now in shards), np.int64)
    for now in shards:
        frequencies[: len(now.frequencies)] += now.frequencies
    documents, tokens, rows, removed = (
        sum(getattr(now, name) for now in shards) for name in ("documents", "tokens", "rows", "removed")
    )
    return Statistics(documents, tokens, frequencies, rows, removed)


def _mean(now: Statistics) -> float:
    return max(1, now.tokens) / max(1, now.documents)


def _count(store: Store, before: Statistics | None) -> Statistics:
    """Return statistics: the stored ones or ``before``, and what was added and removed since."""
    about = store.meta["index"]
    n, dim = about["rows"], max(1, about["dim"])
    known = before or _stored(store)
    frequencies = np.zeros(dim, np.int64)
    frequencies[: len(known.frequencies)] = known.frequencies
    documents, tokens = known.documents + n - known.rows, known.tokens
    if not n:
        return Statistics(documents, tokens, frequencies, n, 0)
    lengths, ends = store.read("lengths.bin"), element_ends(store, "terms.bin")
    first = int(ends[known.rows - 1]) if known.rows else 0
    if first < store.rows("terms.bin"):
        for block in store.blocks("terms.bin", first):
            frequencies += _counts(store, block, dim)
        tokens += sum(int(block.sum(dtype=np.int64)) for block in store.blocks("weights.bin", first))
    gone = np.empty(0, np.int64)
    if store.rows("removed.bin"):
        gone = np.sort(store.read("removed.bin")[known.removed :])
        removed_rows(store.path, gone, n)
    for start in range(0, len(gone), _ROWS):
        rows = gone[start : start + _ROWS]
        positions = element_positions(ends[rows], lengths[rows])
        if len(positions):
            frequencies -= _counts(store, store.take("terms.bin", positions), dim)
            tokens -= int(store.take("weights.bin", positions).sum(dtype=np.int64))
    return Statistics(documents - len(gone), tokens, frequencies, n, known.removed + len(gone))


def _stored(store: Store) -> Statistics:
    """Return the statistics of the last `renew`."""
    counted = store.meta["index"]["bm25"]["counted"]
    stored = store.read("frequencies.bin").view("<u4") if store.rows("frequencies.bin") else _NOTHING
    return Statistics(counted["documents"], counted["tokens"], stored, counted["rows"], counted["removed"])


def _counts(store: Store, terms: Array, dim: int) -> Array:
    """Return how often ``terms`` has each of ``dim`` terms: ``(dim,)``."""
    if len(terms) and not 0 <= terms.min() <= terms.max() < dim:
        raise corrupt(store.path, f"it has terms {terms.min()} to {terms.max()} of {dim}")
    return np.bincount(terms, minlength=dim)
