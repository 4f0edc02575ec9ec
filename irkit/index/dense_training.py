"""The k-means that trains the centroids of lists."""

from __future__ import annotations

import numpy as np
from irkit_kernels.dense_search import assign

from irkit.index.array_files import Array

_ROUNDS = (8, 8, 4, 4, 2, 2, 1, 1)  # one of so many rows takes part in each: the first ones need few
_BLOCK = 1 << 14  # rows whose means are computed at once


def train_lists(values: Array, count: int, seed: int) -> Array:
    """Train centroids by k-means, from random rows.

    Args:
        values: ``(n, dim)`` float32, at least ``count``.
        count: Number of centroids.
        seed: Seed of the choice of the first centroids.

    Returns:
        ``(count, dim)`` float32.
    """
    first = np.sort(np.random.default_rng(seed).choice(len(values), count, replace=False))
    centroids: Array = values[first].copy()
    for step in _ROUNDS:
        part = values[::step]
        lists = assign(part, centroids)
        order = np.argsort(lists, kind="stable")
        sums = np.zeros_like(centroids)
        for start in range(0, len(order), _BLOCK):
            rows = order[start : start + _BLOCK]
            owners, starts = np.unique(lists[rows], return_index=True)
            sums[owners] += np.add.reduceat(part[rows], starts)
        sizes = np.bincount(lists, minlength=count)
        filled = sizes > 0  # a list without rows keeps its centroid
        centroids[filled] = sums[filled] / sizes[filled, None]
    return centroids
