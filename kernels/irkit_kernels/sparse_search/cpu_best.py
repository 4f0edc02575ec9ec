"""The lists that approximate search reads: the best postings of each term."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["best_lists", "longest"]

BLOCK = 1 << 22  # postings read or sorted at a time
_CODES = 255

Array = NDArray[Any]


def longest(n: int) -> int:
    """Return the maximum number of postings that a list keeps, for ``n`` documents."""
    return max(2048, n // 100)


def best_lists(
    forward: tuple[Array, Array, Array, Array | None],
    dim: int,
    allocate: Callable[..., Array],
    most: int | None = None,
    block: int = BLOCK,
) -> dict[str, Array]:
    """Keep the postings of the highest weights of each term, ordered by row; among equals the lowest rows.

    Args:
        forward: ``offsets (n + 1)``, ``terms``, ``weights`` and ``scales (n,)`` or None of the documents.
        dim: Size of the vocabulary.
        allocate: ``allocate(name, shape, dtype)`` makes the arrays of the postings.
        most: Maximum number of postings that a list keeps; by default `longest`.
        block: Number of postings that are read or sorted at a time.

    Returns:
        ``best_offsets (dim + 1,)`` into ``best`` uint32, postings: a row in the upper 24 bits and a code in
        the lower 8. The code times ``best_scales (dim,)`` is the weight, rounded up. ``best_missed (dim,)``
        is the highest weight that a list does not keep, rounded up likewise.
    """
    n = len(forward[0]) - 1
    counts, largest = np.zeros(dim, np.int64), np.zeros(dim, np.float32)
    for _, terms, weights in _blocks(forward, block):
        counts += np.bincount(terms, minlength=dim)
        np.maximum.at(largest, terms, weights)
    kept = np.minimum(counts, longest(n) if most is None else most)
    offsets = np.concatenate([[0], np.cumsum(kept)])
    best = allocate("best", (int(offsets[-1]),), np.uint32)
    scales = np.where(largest > 0, largest / np.float32(_CODES), np.float32(0))
    missed = np.zeros(dim, np.float32)
    for first, last in _groups(counts, block):
        if not counts[first:last].any():
            continue
        rows, terms, codes = _group(forward, first, last, scales, block)
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
    forward: tuple[Array, Array, Array, Array | None], first: int, last: int, scales: Array, block: int
) -> tuple[Array, Array, Array]:
    """Return rows, terms (counted from ``first``) and codes of all postings of some terms, ordered by row."""
    parts: list[tuple[Array, Array, Array]] = []
    for rows, terms, weights in _blocks(forward, block, first, last):
        levels = np.zeros(len(rows), np.float32)
        np.divide(weights, scales[terms], out=levels, where=weights > 0)
        codes = np.clip(np.ceil(levels), weights > 0, _CODES).astype(np.uint8)
        parts.append((rows, (terms - first).astype(np.uint16), codes))
    rows, terms, codes = (np.concatenate(column) for column in zip(*parts, strict=True))
    return rows, terms, codes


def _groups(counts: Array, block: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of terms that have together at most a block of postings, at least one term each.

    A range has at most 2**16 terms, so that they fit into two bytes.
    """
    ends, first = np.cumsum(counts), 0
    while first < len(counts):
        before = ends[first] - counts[first]
        last = int(np.searchsorted(ends, before + block, "right"))
        last = min(max(last, first + 1), first + (1 << 16), len(counts))
        yield first, last
        first = last


def _blocks(
    forward: tuple[Array, Array, Array, Array | None], block: int, first: int = 0, last: int | None = None
) -> Iterator[tuple[Array, Array, Array]]:
    """Yield rows, terms and float32 weights of postings, block by block."""
    offsets, terms, weights, scales = forward
    for start in range(0, len(terms), block):
        here = np.asarray(terms[start : start + block])
        values = weights[start : start + block]
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


def _rows(offsets: Array, positions: Array) -> Array:
    return (np.searchsorted(offsets, positions, "right") - 1).astype(np.int32)
