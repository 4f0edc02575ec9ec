"""Lists as a search reads them: in groups, with their centroids as bytes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .cpu_frame import PANEL
from .cpu_lists import NO_LIST
from .rotation import Rotation, rotate

__all__ = ["Groups", "group_lists", "list_biases", "panels", "quantized"]

Array = NDArray[Any]

_FEWEST = 512  # fewer lists are not grouped
_ROUNDS = 8  # of k-means


class Groups(NamedTuple):
    """Groups of lists with near centroids; a search visits groups first, then the lists of the best groups.

    Attributes:
        members: For each group, the ascending numbers of its lists.
        centroids: ``(groups, dim)`` float32.
        biases: ``(groups,)`` float32, see `list_biases`.
    """

    members: list[Array]
    centroids: Array
    biases: Array


def list_biases(centroids: Array, euclidean: bool, margins: Array | None) -> Array:
    """Return ``(lists,)`` float32: what a search adds to the product of each centroid with a unit query.

    The sum ranks the lists.
    """
    if margins is not None and not euclidean:
        return margins.astype(np.float32)
    squares = np.square(centroids, dtype=np.float32).sum(1)
    return -squares if euclidean else squares * np.float32(-0.5)


def group_lists(centroids: Array, euclidean: bool, margins: Array | None) -> Groups:
    """Group lists by k-means of their centroids; see `list_biases` for the arguments.

    The same lists are grouped in the same way on every machine but for roundings.
    """
    n = len(centroids)
    count = 1 if n < _FEWEST else round(math.sqrt(n))
    points = torch.from_numpy(np.array(centroids, np.float32))
    order = torch.from_numpy(np.random.default_rng(0).permutation(n))
    means = points[order[:count]].clone() if n else points.new_zeros(1, points.shape[1])
    assigned = torch.zeros(n, dtype=torch.long)
    for _ in range(_ROUNDS if count > 1 else 1):
        assigned = torch.addmm(-0.5 * means.square().sum(1), points, means.T).argmax(1)
        counts = torch.bincount(assigned, minlength=count)[:, None]
        sums = torch.zeros_like(means).index_add_(0, assigned, points)
        means = torch.where(counts > 0, sums / counts.clamp(min=1), means)
    own, sizes = _without_empty(assigned.numpy(), count)
    means_array = means.numpy()[sizes > 0]
    sizes = sizes[sizes > 0]
    members = [np.flatnonzero(own == number) for number in range(len(sizes))]
    biases = list_biases(means_array, euclidean, None)
    if margins is not None and not euclidean and n:
        # The margins of lists, and half the mean square of what the group adds to their residuals.
        mean = float(margins.mean())
        root = mean + math.sqrt(mean**2 + float(np.square(centroids, dtype=np.float32).sum()) / n)
        spreads = np.square(points.numpy() - means_array[own]).sum(1) / (2 * max(root, 1e-30))
        biases = (np.bincount(own, margins + spreads) / sizes).astype(np.float32)
    return Groups(members, means_array, biases)


def _without_empty(own: Array, count: int) -> tuple[Array, Array]:
    """Number the groups anew, without empty ones; return the new numbers, and the old groups' sizes."""
    sizes = np.bincount(own, minlength=count)
    return (np.cumsum(sizes > 0) - 1)[own], sizes


def panels(centroids: Array, biases: Array, members: list[Array], rotation: Rotation) -> tuple[Array, ...]:
    """Pack the centroids of lists, group by group, see `cpu_lists`.

    Returns:
        Panels, scales, biases and numbers by slot, and the slots at which groups begin and end.
    """
    rotated = rotate(torch.from_numpy(np.array(centroids, np.float32)), rotation).numpy()
    codes, scales = quantized(rotated)
    sizes = [-(-len(own) // PANEL) * PANEL for own in members]
    starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
    numbers = np.full(starts[-1], NO_LIST, np.uint32)
    for start, own in zip(starts, members, strict=False):
        numbers[start : start + len(own)] = own
    exists = numbers != NO_LIST
    lists = numbers[exists].astype(np.int64)

    def by_slot(values: Array, kind: Any) -> Array:
        slots = np.zeros((len(numbers), *values.shape[1:]), kind)
        slots[exists] = values[lists]
        return slots

    width = codes.shape[1]
    levels = by_slot(codes.astype(np.int16) + 128, np.uint8)
    packed = levels.reshape(len(numbers) // PANEL, PANEL, width // 4, 4).swapaxes(1, 2)
    return (
        np.ascontiguousarray(packed),
        by_slot(scales, np.float32),
        by_slot(biases, np.float32),
        numbers,
        starts,
    )


def quantized(rows: Array) -> tuple[Array, Array]:
    """Round rows to int8 with a float32 scale each."""
    scales = (np.abs(rows).max(1, initial=0) / np.float32(127)).astype(np.float32)
    codes = np.rint(rows / np.where(scales > 0, scales, np.float32(1))[:, None])
    return np.clip(codes, -127, 127).astype(np.int8), scales
