"""BM25 in an index: it keeps how often each term occurs in each document, and weighs that when it is read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from irkit.errors import CorruptError
from irkit.index.files import REMEDY, Array
from irkit.index.layout import removed_rows, row_ends
from irkit.index.store import Store

__all__ = ["Statistics", "begin", "mean_length", "rarity", "renew", "saturate", "statistics", "weigh"]

_DRIFT = 0.01  # of the mean length, beyond which all weights are made anew
_ROWS = 1 << 14  # of removed documents, looked at together
_NONE = {"rows": 0, "removed": 0, "documents": 0, "tokens": 0}


class Statistics(NamedTuple):
    """Of the documents that are there: their number, that of their tokens, ``(dim,)`` those of each term."""

    documents: int
    tokens: int
    frequencies: Array


def begin(store: Store, k1: float, b: float) -> None:
    """Make the empty index of a store one of BM25, inside ``update``; nothing happens if it is one.

    What is added to it are counts, over a vocabulary that may grow; what it gives back are weights, see
    `saturate`. The other half of BM25, how rare a term is, belongs to the queries.
    """
    store.meta["index"].setdefault("bm25", {"k1": k1, "b": b, "mean": None, "counted": _NONE})


def saturate(counts: Array, lengths: Array, k1: float, b: float, mean: float) -> Array:
    """Weights of terms in documents: ``count / (count + k1 (1 - b + b length / mean))``.

    Args:
        counts: How often a term occurs in a document.
        lengths: Tokens of that document, beside ``counts``.
        k1: 0 asks only whether a term occurs; the larger, the more it counts how often.
        b: How far the length matters, from 0 (not at all) to 1.
        mean: Of the lengths of all documents.

    Source: Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009, eq. 3.15, without the factor
    k1 + 1 that all terms share, as in Lucene 8 and later.
    """
    counts = counts.astype(np.float64)
    weights: Array = (counts / (counts + k1 * (1 - b + b * lengths / mean))).astype(np.float32)
    return weights


def weigh(
    store: Store, arrays: dict[str, Array], formula: tuple[float, float] | None = None
) -> dict[str, Array]:
    """Of an index of BM25 the arrays of some rows with weights in the place of counts; others unchanged.

    Args:
        store: That of the index.
        arrays: As ``Sparse.arrays`` gives them; counts may be of any dtype.
        formula: k1 and b; None is those that the index was built with.
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
    """Mean length of a document that weights are made with: that of the last `renew`."""
    mean = store.meta["index"]["bm25"]["mean"]
    return float(mean) if mean is not None else _mean(statistics(store))


def rarity(store: Store, terms: Array) -> Array:
    """Weights of ``terms (n,)`` in queries, idf: ``ln(1 + (N - df + 0.5) / (df + 0.5))``."""
    now = statistics(store)
    having = now.frequencies[terms]
    weights: Array = np.log1p((now.documents - having + 0.5) / (having + 0.5))
    return weights


def renew(store: Store) -> bool:
    """Keep the statistics, inside ``update``; whether all weights changed, and lists of them are outdated.

    They do when the mean length is 1 % away from the one they were made with.
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
    drifted = mean is None or abs(_mean(now) - mean) > _DRIFT * mean
    if drifted:
        store.meta["index"]["bm25"] = settings | {"mean": _mean(now)}
    return drifted


def statistics(store: Store) -> Statistics:
    """Exact ones, whatever was added and removed since `renew` kept some."""
    return store.derived("bm25", lambda: _count(store))


def _mean(now: Statistics) -> float:
    return max(1, now.tokens) / max(1, now.documents)


def _count(store: Store) -> Statistics:
    """What was kept and what has come and gone since."""
    about = store.meta["index"]
    counted, dim = about["bm25"]["counted"], max(1, about["dim"])
    frequencies = np.zeros(dim, np.int64)
    if store.rows("frequencies.bin"):
        kept = store.read("frequencies.bin").view("<u4")
        frequencies[: len(kept)] = kept
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
        starts = np.where(rows > 0, ends[rows - 1], 0)
        lengths = ends[rows] - starts
        places = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        if len(places):
            frequencies -= _counts(store, store.take("terms.bin", places), dim)
            tokens -= int(store.take("weights.bin", places).sum(dtype=np.int64))
    return Statistics(documents - len(gone), tokens, frequencies)


def _counts(store: Store, terms: Array, dim: int) -> Array:
    """``(dim,)`` how often each term is there."""
    if len(terms) and not 0 <= terms.min() <= terms.max() < dim:
        raise CorruptError(
            f"index {store.path}: it has terms {terms.min()} to {terms.max()} of {dim}; {REMEDY}"
        )
    return np.bincount(terms, minlength=dim)
