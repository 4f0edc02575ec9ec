"""The codec of lists: the centroids that a k-means over a sample of rows trains."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from irkit_kernels.dense_search import assign, list_margins
from irkit_kernels.dense_search.lists import quantized

from irkit.index.array_files import Array

_ROUNDS = (8, 8, 4, 4, 2, 2, 1, 1)  # one of so many rows takes part in each: the first ones need few
_BLOCK = 1 << 14  # rows whose means are computed at once
_LARGEST = 1e30  # square of a row's length that float32 can compute with
_UNIT = 1e-2  # rows whose squared lengths differ from 1 by less count as normalised


class ListCodec(NamedTuple):
    """What the codes of rows refer to.

    Attributes:
        centroids: ``(lists, width)`` int8, rotated.
        scales: ``(lists,)`` float32, factors of the centroids.
        margins: What `list_margins` returns; None for normalised rows.
        trained: Number of rows of the index when the centroids were trained.
    """

    centroids: Array
    scales: Array
    margins: Array | None
    trained: int


def train_codec(
    sample: Array, lists: int, seed: int, rotation: torch.Tensor, trained: int
) -> ListCodec | None:
    """Train the centroids of ``lists`` lists; return None if float32 cannot compute with the rows.

    Args:
        sample: ``(n, dim)`` float32, at least ``lists`` rows.
        lists: Number of centroids.
        seed: Seed of the choice of the first centroids.
        rotation: ``(dim, width)``, see `irkit_kernels.dense_search.rotation.rotation_matrix`.
        trained: Number of rows that the sample is of.
    """
    squares = np.einsum("ij,ij->i", sample, sample, dtype=np.float64)
    if squares.max(initial=0) > _LARGEST:
        return None
    centroids = train_lists(sample, lists, seed)
    codes, scales = quantized((torch.from_numpy(centroids) @ rotation).numpy())
    is_unit = np.abs(squares - 1).max(initial=0) <= _UNIT
    margins = None if is_unit else list_margins(sample, centroids, assign(sample, centroids))
    return ListCodec(codes, scales, margins, trained)


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
