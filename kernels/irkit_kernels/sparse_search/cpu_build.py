"""The lists that exact search reads: the postings of each term, cut into ranges of documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cpu_frame import RANGE, STEP
from .cpu_range import DENSE_COST

__all__ = ["build_exact"]

Array = NDArray[Any]
Forward = tuple[Array, Array, Array, Array | None]

_DENSE = 8  # a list of more than one in so many documents is a vector: 1 byte per document, not 3 per posting
_LINE = 64  # vectors begin at a cache line
_CODES = 255


def build_exact(forward: Forward, dim: int, allocate: Callable[..., Array]) -> dict[str, Array]:
    """Sort postings by term, then by range of documents; weights become bytes, rounded up.

    Reads the documents twice, range by range.

    Args:
        forward: ``offsets (n + 1)``, ``terms``, ``weights`` and ``scales (n,)`` or None of the documents.
        dim: Size of the vocabulary.
        allocate: ``allocate(name, shape, dtype)`` makes the array of the postings.

    Returns:
        ``list_offsets (dim + 1,)`` into ``lists (n_lists, 5)`` int32: the position in ``postings`` (two
        words), the range, the number of postings (-1: a vector), and the bits of the float32 that one step
        of a code stands for. A list in ``postings`` is its codes, then its rows within the range as uint16.
        A vector is a code for each document of the range. ``gains (dim,)``: the highest weight of each term
        divided by the cost of its lists, to order terms by.
    """
    n = len(forward[0]) - 1
    terms, ranges, counts = _count(forward, dim)
    length = np.minimum(RANGE, -(-(n - ranges * RANGE) // STEP) * STEP)
    dense = counts > length // _DENSE
    sizes = np.where(dense, length + _LINE, 3 * counts)
    starts = np.cumsum(sizes) - sizes
    starts[dense] += -starts[dense] % _LINE
    postings = allocate("postings", (int(sizes.sum()) + _LINE,), np.uint8)
    scales = np.zeros(len(terms), np.float32)
    order = np.argsort(ranges, kind="stable")  # lists by range, then term
    ends = np.cumsum(np.bincount(ranges, minlength=-(-n // RANGE)))
    for first, last, own in zip(range(0, n, RANGE), range(RANGE, n + RANGE, RANGE), ends, strict=True):
        mine = order[int(own) - np.count_nonzero(ranges == first // RANGE) : int(own)]
        scales[mine] = _write(
            _read(forward, first, min(last, n)), counts[mine], dense[mine], starts[mine], postings
        )
    lists = np.empty((len(terms), 5), np.int32)
    lists[:, :2] = starts.view(np.int32).reshape(-1, 2)
    lists[:, 2], lists[:, 3], lists[:, 4] = ranges, np.where(dense, -1, counts), scales.view(np.int32)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(terms, minlength=dim))])
    return {
        "list_offsets": offsets,
        "lists": lists,
        "postings": postings,
        "gains": _gains(offsets, scales, np.where(dense, length // DENSE_COST, counts)),
    }


def _read(forward: Forward, first: int, last: int) -> tuple[Array, Array, Array]:
    """Return rows within the range, terms and weights of the postings of some documents."""
    offsets, terms, weights, scales = forward
    start, stop = int(offsets[first]), int(offsets[last])
    lengths = np.diff(offsets[first : last + 1])
    values = np.asarray(weights[start:stop], np.float32)
    if scales is not None:
        values = values * np.repeat(scales[first:last], lengths)
    return np.repeat(np.arange(last - first, dtype=np.uint16), lengths), np.asarray(terms[start:stop]), values


def _ranges_of_terms(forward: Forward) -> Iterator[Array]:
    """Yield, per range of documents, the terms of all its postings in the order of documents."""
    offsets, terms = forward[:2]
    n = len(offsets) - 1
    for first in range(0, n, RANGE):
        yield terms[int(offsets[first]) : int(offsets[min(n, first + RANGE)])]


def _count(forward: Forward, dim: int) -> tuple[Array, Array, Array]:
    """Return three arrays with an entry per list: term, range, postings; sorted by term, then range."""
    columns = []
    for number, terms in enumerate(_ranges_of_terms(forward)):
        counts = np.bincount(terms, minlength=dim)
        used = np.flatnonzero(counts)
        columns.append(np.stack([used, np.full(len(used), number), counts[used]]))
    lists = np.concatenate([np.empty((3, 0), np.int64), *columns], axis=1)
    terms, ranges, counts = lists[:, np.argsort(lists[0], kind="stable")]
    return terms, ranges, counts


def _write(
    triples: tuple[Array, Array, Array], counts: Array, dense: Array, list_starts: Array, postings: Array
) -> Array:
    """Write the lists of a range to ``postings``, in the order of terms; return the scale of each list."""
    rows, terms, weights = triples
    if not len(rows):
        return np.empty(0, np.float32)
    order = np.argsort(terms, kind="stable")
    rows, weights = rows[order], weights[order]
    starts = np.cumsum(counts) - counts
    scales = np.maximum(np.maximum.reduceat(weights, starts) / np.float32(_CODES), np.float32(1e-30))
    codes = np.minimum(np.ceil(weights / np.repeat(scales, counts)), _CODES).astype(np.uint8)
    vector, positions = np.repeat(dense, counts), np.repeat(list_starts, counts)
    rank = np.arange(len(rows)) - np.repeat(starts, counts)
    postings[positions + np.where(vector, rows, rank)] = codes
    sparse = ~vector
    positions = (positions + np.repeat(counts, counts) + 2 * rank)[sparse]
    postings[positions] = (rows[sparse] & 255).astype(np.uint8)
    postings[positions + 1] = (rows[sparse] >> 8).astype(np.uint8)
    return scales


def _gains(offsets: Array, scales: Array, costs: Array) -> Array:
    """Return the highest weight of each term divided by the cost of its lists."""
    used = np.flatnonzero(np.diff(offsets))
    gains = np.zeros(len(offsets) - 1, np.float32)
    if len(used):
        highest, cost = (f.reduceat(x, offsets[used]) for f, x in ((np.maximum, scales), (np.add, costs)))
        gains[used] = highest / np.maximum(cost, 1)
    return gains
