"""A random rotation that is quick to apply: signs, Hadamard transforms and orders, see `cpu_prepare`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._jit import compile_ir, compiled_once
from .._threads import share, threads_for
from .cpu_frame import CHUNK
from .cpu_prepare import ROUNDS
from .cpu_rotate import ROTATION, write_rotation

__all__ = [
    "MAX_DIM",
    "Rotation",
    "make_rotation",
    "padded",
    "rotate",
    "rotate_back",
    "rotate_rows",
    "rotate_rows_back",
    "rotation_matrix",
]

MAX_DIM = 4096  # sums of signs of more dimensions would not fit 16 bits

Array = NDArray[Any]

_WORD = {name: offset // 8 for name, offset in ROTATION.offsets.items()}
_PER_THREAD = 1 << 17  # numbers that are rotated by a thread, at least


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
        values = _hadamard(values * (torch.from_numpy(signs.astype(np.float32)) / 8))
        values = values[:, torch.from_numpy(order.astype(np.int64))]
    return values


def rotate_back(vectors: Tensor, rotation: Rotation, dim: int) -> Tensor:
    """Return ``(n, dim)`` float32, the vectors that `rotate` turns into ``vectors (n, width)``.

    As in `rotate`, the result of a row does not depend on other rows, unlike a product with the matrix.
    """
    values = vectors.float()
    for signs, order in zip(rotation.signs[::-1], rotation.order[::-1], strict=True):
        back = torch.from_numpy(np.argsort(order))
        values = _hadamard(values[:, back]) * (torch.from_numpy(signs.astype(np.float32)) / 8)
    return values[:, :dim].contiguous()


def rotate_rows(vectors: Tensor, rotation: Rotation) -> Tensor:
    """Return what `rotate` returns, by machine code; ``vectors`` may be of any dtype, on any device."""
    values = np.zeros((len(vectors), rotation.signs.shape[1]), np.float32)
    values[:, : vectors.shape[1]] = vectors.detach().to("cpu", torch.float32).numpy()
    _run(values, rotation, False)
    return torch.from_numpy(values)


def rotate_rows_back(vectors: Tensor, rotation: Rotation, dim: int) -> Tensor:
    """Return what `rotate_back` returns, by machine code."""
    values = np.array(vectors.numpy(), np.float32, order="C")
    order = np.argsort(rotation.order, axis=1).astype(np.int32)
    _run(values, Rotation(rotation.signs[::-1], order[::-1]), True)
    return torch.from_numpy(values[:, :dim].copy())


def _run(values: Array, rotation: Rotation, back: bool) -> None:
    """Rotate ``values (n, width)`` in place; threads share the rows."""
    signs, order = rotation.signs.astype(np.float32) / 8, np.ascontiguousarray(rotation.order, np.uint32)
    work, (n, width) = _compiled(back), values.shape

    def rotate(start: int, stop: int) -> None:
        scratch, frame = np.empty(width, np.float32), np.zeros(len(_WORD), np.int64)
        arrays = {"rows": values[start:stop], "signs": signs, "order": order, "scratch": scratch}
        for name, array in arrays.items():
            frame[_WORD[name]] = array.__array_interface__["data"][0]
        frame[_WORD["n"]], frame[_WORD["width"]] = stop - start, width
        work(frame.__array_interface__["data"][0])

    share(rotate, n, threads_for(values.size, _PER_THREAD))


@compiled_once
def _compiled(back: bool) -> Callable[..., None]:
    return compile_ir(write_rotation(back), "rotate_rows", [ctypes.c_void_p])


def _hadamard(values: Tensor) -> Tensor:
    """Transform each 64 numbers of ``values (n, width)``, see `cpu_prepare`."""
    n, width = values.shape
    distance = 1
    while distance < CHUNK:
        pairs = values.view(n, width // CHUNK, CHUNK // (2 * distance), 2, distance)
        low, high = pairs[:, :, :, 0], pairs[:, :, :, 1]
        values = torch.stack([low + high, low - high], 3)
        distance *= 2
    return values.reshape(n, width)


def rotation_matrix(dim: int, rotation: Rotation) -> Tensor:
    """Return the matrix ``(dim, width)`` that rotates row vectors from the right."""
    return rotate(torch.eye(dim), rotation)
