"""Lists of the best postings of each term, which approximate search begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["best_lists", "longest"]

_BLOCK = 1 << 22  # postings read or sorted at a time
_CODES = 255

Array = NDArray[Any]


def longest(n: int) -> int:
    """Postings that a list keeps, of ``n`` documents."""
    return max(2048, n // 100)


def best_lists(
    forward: tuple[Array, Array, Array, Array | None], dim: int, allocate: Callable[..., Array]
) -> dict[str, Array]:
    """The postings of the highest weights of each term, by row; of equal ones those of the lowest rows.

    Args:
        forward: ``offsets (n + 1)``, ``terms``, ``weights`` and ``scales (n,)`` or None of the documents.
        dim: Size of the vocabulary.
        allocate: ``allocate(name, shape, dtype)`` makes the arrays of the postings.

    Returns:
        ``best_offsets (dim + 1,)`` into ``best``, postings: a row, and in the lowest 8 bits a code, which
        times ``best_scales (dim,)`` is the weight, rounded up; ``best_missed (dim,)`` the highest weight that
        is not among them, likewise.
    """
    n = len(forward[0]) - 1
    counts, most = np.zeros(dim, np.int64), np.zeros(dim, np.float32)
    for _, terms, weights in _pieces(forward):
        counts += np.bincount(terms, minlength=dim)
        np.maximum.at(most, terms, weights)
    kept = np.minimum(counts, longest(n))
    offsets = np.concatenate([[0], np.cumsum(kept)])
    best = allocate("best", (int(offsets[-1]),), np.uint32)
    scales = np.where(most > 0, most / np.float32(_CODES), np.float32(0))
    missed = np.zeros(dim, np.float32)
    for first, last in _groups(counts):
        if not counts[first:last].any():
            continue
        rows, terms, codes = _group(forward, first, last, scales)
        number, most_kept = counts[first:last], kept[first:last]
        order = np.argsort(_CODES - codes, kind="stable")  # sorts of few bits are by digits
        order = order[np.argsort(terms[order], kind="stable")]
        starts = np.cumsum(number) - number
        chosen = np.zeros(len(rows), bool)
        chosen[order[np.arange(len(rows)) - np.repeat(starts, number) < np.repeat(most_kept, number)]] = True
        short = np.flatnonzero(number > most_kept)
        missed[first + short] = codes[order[(starts + most_kept)[short]]] * scales[first + short]
        rows, codes, terms = rows[chosen], codes[chosen], terms[chosen]
        order = np.argsort(terms, kind="stable")
        best[offsets[first] : offsets[last]] = rows[order].astype(np.uint32) << 8 | codes[order]
    return {"best_offsets": offsets, "best": best, "best_scales": scales, "best_missed": missed}


def _group(
    forward: tuple[Array, Array, Array, Array | None], first: int, last: int, scales: Array
) -> tuple[Array, Array, Array]:
    """Rows, terms from the first and codes of all postings of some terms, by row."""
    parts: list[tuple[Array, Array, Array]] = []
    for rows, terms, weights in _pieces(forward, first, last):
        levels = np.zeros(len(rows), np.float32)
        np.divide(weights, scales[terms], out=levels, where=weights > 0)
        codes = np.clip(np.ceil(levels), weights > 0, _CODES).astype(np.uint8)
        parts.append((rows, (terms - first).astype(np.uint16), codes))
    rows, terms, codes = (np.concatenate(column) for column in zip(*parts, strict=True))
    return rows, terms, codes


def _groups(counts: Array) -> Iterator[tuple[int, int]]:
    """Ranges of terms that have at most a block of postings, or are one term, and fit into two bytes."""
    ends, first = np.cumsum(counts), 0
    while first < len(counts):
        before = ends[first] - counts[first]
        last = int(np.searchsorted(ends, before + _BLOCK, "right"))
        last = min(max(last, first + 1), first + (1 << 16), len(counts))
        yield first, last
        first = last


def _pieces(
    forward: tuple[Array, Array, Array, Array | None], first: int = 0, last: int | None = None
) -> Iterator[tuple[Array, Array, Array]]:
    """Rows, terms and weights of postings block by block; only of terms ``first`` to ``last`` if given."""
    offsets, terms, weights, scales = forward
    for start in range(0, len(terms), _BLOCK):
        here = np.asarray(terms[start : start + _BLOCK])
        values = weights[start : start + _BLOCK]
        if last is None:
            rows = (
                np.empty(0, np.int32)
                if scales is None
                else _rows(offsets, np.arange(start, start + len(here)))
            )
        else:
            chosen = np.flatnonzero((here >= first) & (here < last))
            here, values, rows = here[chosen], values[chosen], _rows(offsets, chosen + start)
        values = values.astype(np.float32)
        yield rows, here, values if scales is None else values * scales[rows]


def _rows(offsets: Array, places: Array) -> Array:
    return (np.searchsorted(offsets, places, "right") - 1).astype(np.int32)
