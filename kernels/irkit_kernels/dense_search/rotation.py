"""A random rotation that is quick to apply: signs, Hadamard transforms and orders, see `cpu_prepare`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .cpu_frame import CHUNK
from .cpu_prepare import ROUNDS

__all__ = ["MAX_DIM", "Rotation", "make_rotation", "padded", "rotate", "rotation_matrix"]

MAX_DIM = 4096  # sums of signs of more dimensions would not fit 16 bits

Array = NDArray[Any]


class Rotation(NamedTuple):
    """What three rounds of signs, transforms and orders need.

    Attributes:
        signs: ``(3, width)`` int8, -1 or 1.
        order: ``(3, width)`` int32, permutations: number i is read from ``order[i]``.
    """

    signs: Array
    order: Array


def padded(dim: int) -> int:
    """Return the dimensions of a rotated vector: a multiple of 64."""
    return -(-dim // CHUNK) * CHUNK


def make_rotation(dim: int, seed: int = 0) -> Rotation:
    """Draw a rotation of vectors of ``dim`` numbers, up to `MAX_DIM`."""
    if not 0 < dim <= MAX_DIM:
        raise ValueError(f"dense_search: got {dim} dimensions, expected 1 to {MAX_DIM}")
    rng, width = np.random.default_rng(seed), padded(dim)
    signs = 2 * rng.integers(0, 2, (ROUNDS, width), np.int8) - 1
    return Rotation(signs, np.stack([rng.permutation(width) for _ in range(ROUNDS)]).astype(np.int32))


def rotate(vectors: Tensor, rotation: Rotation) -> Tensor:
    """Rotate ``vectors (n, dim)``, in float32 with the roundings of the machine code.

    Returns:
        ``(n, width)``.
    """
    width = rotation.signs.shape[1]
    values = torch.nn.functional.pad(vectors.float(), (0, width - vectors.shape[1]))
    for signs, order in zip(rotation.signs, rotation.order, strict=True):
        values = (values * (torch.from_numpy(signs.astype(np.float32)) / 8)).view(-1, width // CHUNK, CHUNK)
        distance = 1
        while distance < CHUNK:
            pairs = values.view(len(values), width // CHUNK, -1, 2, distance)
            low, high = pairs[:, :, :, 0], pairs[:, :, :, 1]
            values = torch.stack([low + high, low - high], 3).flatten(2)
            distance *= 2
        values = values.flatten(1)[:, torch.from_numpy(order.astype(np.int64))]
    return values


def rotation_matrix(dim: int, rotation: Rotation) -> Tensor:
    """Return the matrix ``(dim, width)`` that rotates row vectors from the right."""
    return rotate(torch.eye(dim), rotation)
