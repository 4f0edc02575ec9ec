"""The lists that exact search of few documents reads: the documents of each term, with exact weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cpu_few import GROUP, STEP

__all__ = ["build_few"]

_DENSE = 8  # a list of more than one in so many documents is a vector

Array = NDArray[Any]
Forward = tuple[Array, Array, Array, Array | None]


def build_few(forward: Forward, dim: int) -> tuple[Array, Array, Array] | None:
    """Return the documents of each term, with unrounded weights.

    Args:
        forward: ``offsets (n + 1)``, ``terms``, ``weights`` and ``scales (n,)`` or None of the documents.
        dim: Size of the vocabulary.

    Returns:
        ``lists (dim + 1, 2)`` int32: the first posting and the number of postings, including those that
        fill up a turn (-1: a vector, a weight for each document); then rows uint16 and weights float32 of
        the postings. None if a document's terms are not in rising order, in which scores are added up here.
    """
    offsets, terms, values, scales = forward
    n, lengths = len(offsets) - 1, np.diff(offsets)
    documents = np.repeat(np.arange(n), lengths)
    if (np.diff(documents * dim + terms) <= 0).any():
        return None
    values = np.asarray(values, np.float32)
    if scales is not None:
        values = values * np.repeat(scales, lengths)
    counts = np.bincount(terms, minlength=dim + 1)
    dense = counts > n // _DENSE
    sizes = np.where(dense, n + -n % STEP, counts + -counts % GROUP)
    by_size = np.argsort(~dense, kind="stable")  # vectors first, in whole lines of the cache
    starts = np.empty(dim + 1, np.int64)
    starts[by_size] = np.cumsum(sizes[by_size]) - sizes[by_size]
    order = np.argsort(terms, kind="stable")
    number = np.repeat(np.arange(dim + 1), counts)
    rank = np.arange(len(terms)) - np.repeat(np.cumsum(counts) - counts, counts)
    at = starts[number] + np.where(dense[number], documents[order], rank)
    rows = (np.arange(sizes.sum()) % max(1, n)).astype(np.uint16)  # a weight of 0 adds nothing to any
    weights = np.zeros(len(rows), np.float32)
    rows[at], weights[at] = documents[order], values[order]
    return np.stack([starts, np.where(dense, -1, sizes)], 1).astype(np.int32), rows, weights
