"""BM25 in an index, which stores how often each term occurs in each document, and weighs it when it is read.

A weight depends on the mean length of all documents, which every change of the index moves, so rows store
counts. `renew` stores the statistics that weights need: the number of documents, of their tokens, and of the
documents that have each term. What was added or removed since then is counted when they are read, so that
they are always exact.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from irkit.index.array_files import Array, corrupt
from irkit.index.layout import element_positions, removed_rows, row_ends
from irkit.index.store import Store

_ROWS = 1 << 14  # removed documents that are counted at once
_NONE = {"rows": 0, "removed": 0, "documents": 0, "tokens": 0}


class Statistics(NamedTuple):
    """Statistics of the documents that are not removed.

    Attributes:
        documents: Their number.
        tokens: The number of their tokens.
        frequencies: ``(dim,)`` number of documents that have each term.
    """

    documents: int
    tokens: int
    frequencies: Array


def begin(store: Store, k1: float, b: float) -> None:
    """Make the empty index of a store one of BM25, inside ``update``; nothing happens if it is one already.

    Documents that are added to it are counts of terms, over a vocabulary that may grow. Documents that it
    returns are weights, see `saturate`. The other half of BM25, how rare a term is, belongs to the queries.
    """
    store.meta["index"].setdefault("bm25", {"k1": k1, "b": b, "mean": None, "counted": _NONE})


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

    Weights change when the mean length is 1 % away from the one that they were made with.
    """
    settings = store.meta["index"].get("bm25")
    if settings is None:
        return False
    now, mean = statistics(store), settings["mean"]
    counted = {"rows": store.meta["index"]["rows"], "removed": store.rows("removed.bin")}
    if any(settings["counted"][key] != value for key, value in counted.items()):
        counted |= {"documents": now.documents, "tokens": now.tokens}
        content = now.frequencies.astype("<u4").tobytes()
        store.replace("frequencies.bin", lambda path: path.write_bytes(content))
        store.meta["index"]["bm25"] = settings = settings | {"counted": counted}
    drifted = mean is None or abs(_mean(now) - mean) > store.limits.bm25_drift * mean
    if drifted:
        store.meta["index"]["bm25"] = settings | {"mean": _mean(now)}
    return drifted


def statistics(store: Store) -> Statistics:
    """Return exact statistics, whatever was added and removed since the last `renew`."""
    return store.derived("bm25", lambda: _count(store))


def _mean(now: Statistics) -> float:
    return max(1, now.tokens) / max(1, now.documents)


def _count(store: Store) -> Statistics:
    """Add what was added since the last `renew` to the stored statistics, and subtract what was removed."""
    about = store.meta["index"]
    counted, dim = about["bm25"]["counted"], max(1, about["dim"])
    frequencies = np.zeros(dim, np.int64)
    if store.rows("frequencies.bin"):
        stored = store.read("frequencies.bin").view("<u4")
        frequencies[: len(stored)] = stored
    documents, tokens = counted["documents"] + about["rows"] - counted["rows"], counted["tokens"]
    if not about["rows"]:
        return Statistics(documents, tokens, frequencies)
    lengths, total = store.read("lengths.bin"), store.rows("terms.bin")
    ends = store.derived("ends", lambda: row_ends(store.path, lengths, total))
    first = int(ends[counted["rows"] - 1]) if counted["rows"] else 0
    if first < store.rows("terms.bin"):
        for block in store.blocks("terms.bin", first):
            frequencies += _counts(store, block, dim)
        tokens += sum(int(block.sum(dtype=np.int64)) for block in store.blocks("weights.bin", first))
    gone = np.empty(0, np.int64)
    if store.rows("removed.bin"):
        gone = np.sort(store.read("removed.bin")[counted["removed"] :])
        removed_rows(store.path, gone, about["rows"])
    for start in range(0, len(gone), _ROWS):
        rows = gone[start : start + _ROWS]
        positions = element_positions(ends[rows], lengths[rows])
        if len(positions):
            frequencies -= _counts(store, store.take("terms.bin", positions), dim)
            tokens -= int(store.take("weights.bin", positions).sum(dtype=np.int64))
    return Statistics(documents - len(gone), tokens, frequencies)


def _counts(store: Store, terms: Array, dim: int) -> Array:
    """Return how often each term is there, ``(dim,)``."""
    if len(terms) and not 0 <= terms.min() <= terms.max() < dim:
        raise corrupt(store.path, f"it has terms {terms.min()} to {terms.max()} of {dim}")
    return np.bincount(terms, minlength=dim)
