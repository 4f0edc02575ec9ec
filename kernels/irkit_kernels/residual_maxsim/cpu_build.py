"""Building on the CPU: compiles the code that assigns, encodes and decodes, and calls it on threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .._jit import compile_ir, compiled_once
from .._threads import share, threads_for
from . import cpu_assign
from .cpu_assign import BLOCK, PANEL, write_assign
from .cpu_kernel import Codes, addresses, code_type, has_vnni, shifted
from .cpu_tile import Plan
from .cpu_trellis import scale_of, scratch_size
from .cpu_vectors import write_decode, write_encode
from .reference import STEPS, Tokens, bits_of, packed_width

__all__ = ["assign", "assign_near", "decode", "encode"]

_MIN_WORK = 1 << 25  # multiply-adds per thread; fewer are not worth another thread
_ENCODING = 512  # multiply-adds per number that is encoded
_MOST = np.finfo(np.float16).max


def assign(values: NDArray[np.float32], centroids: NDArray[np.float32]) -> NDArray[np.int32]:
    """Return the centroid ``(K, d)`` with the largest inner product for each of ``values (n, d)``."""
    (n, dim), count = values.shape, len(centroids)
    kernel = _assign(dim, has_vnni())
    rounded, bias, squares = _to_bytes(centroids)
    panels, square = _to_panels(rounded, bias), float(squares.max())
    out = np.empty(n, np.int32)

    def run(start: int, stop: int) -> None:
        scratch = np.empty(cpu_assign.scratch_size(dim), np.uint8)
        arrays = (values[start:stop], panels, centroids, out[start:stop], scratch)
        kernel(*addresses(*arrays), square, stop - start, count)

    share(run, n, threads_for(n * dim * count, _MIN_WORK), multiple=BLOCK)
    return out


def assign_near(
    values: NDArray[np.float32],
    centroids: NDArray[np.float32],
    hubs: NDArray[np.float32],
    near: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Return the nearest of the centroids near the nearest hub of each value, see `op.assign_near`."""
    (n, dim), count = values.shape, near.shape[1]
    kernel, out = _assign(dim, has_vnni()), np.empty(n, np.int32)
    # values in order of their hubs
    hub = assign(values, hubs)
    order = np.argsort(hub, kind="stable")
    starts = np.searchsorted(hub[order], np.arange(len(hubs) + 1))
    rounded, bias, squares = _to_bytes(centroids)

    def run(start: int, stop: int) -> None:
        scratch = np.empty(cpu_assign.scratch_size(dim), np.uint8)
        for number in range(start, stop):
            rows, own = order[starts[number] : starts[number + 1]], near[number]
            if len(rows):
                codes, panels = np.empty(len(rows), np.int32), _to_panels(rounded[own], bias[own])
                arrays = (values[rows], panels, centroids[own], codes, scratch)
                kernel(*addresses(*arrays), float(squares[own].max()), len(rows), count)
                out[rows] = own[codes]

    share(run, len(hubs), threads_for(n * dim * count, _MIN_WORK))
    return out


def encode(
    values: NDArray[np.float32],
    centroids: NDArray[np.float32],
    codes: Codes,
    codebook: NDArray[np.int8],
) -> Tokens:
    """Encode ``values (n, d)`` by compiled code, see `op.encode`."""
    (n, dim), nbits, vnni = values.shape, bits_of(codebook), has_vnni()
    width = packed_width(dim, nbits)
    kernel = _encode(dim, code_type(codes), nbits, width, vnni)
    coefficients, packed = np.empty((n, 2), np.float32), np.empty((n, width), np.uint8)
    levels, numbers = shifted(codebook), codebook.astype(np.float32) * scale_of(nbits)

    def run(start: int, stop: int) -> None:
        size = scratch_size(dim, nbits, width) + Plan(dim, 1, vnni).stride(nbits, width)
        part, scratch = slice(start, stop), np.zeros(size, np.uint8)
        inputs = (values[part], centroids, codes[part], levels, numbers)
        arrays = (*inputs, coefficients[part], packed[part], scratch)
        kernel(*addresses(*arrays), STEPS * dim**0.5, stop - start, len(centroids) - 1)

    share(run, n, threads_for(n * dim * _ENCODING, _MIN_WORK))
    np.clip(coefficients, -_MOST, _MOST, out=coefficients)
    return Tokens(codes, coefficients.astype(np.float16), packed)


def decode(tokens: Tokens, centroids: NDArray[np.float32], codebook: NDArray[np.int8]) -> NDArray[np.float32]:
    """Return ``a * centroid + b * levels`` of ``n`` tokens: ``(n, d)`` float32."""
    (n, width), dim, nbits = tokens.packed.shape, centroids.shape[1], bits_of(codebook)
    vnni = has_vnni()
    kernel, levels = _decode(dim, code_type(tokens.codes), nbits, width, vnni), shifted(codebook)
    out = np.empty((n, dim), np.float32)

    def run(start: int, stop: int) -> None:
        scratch = np.empty(Plan(dim, 1, vnni).stride(nbits, width), np.uint8)
        part = slice(start, stop)
        arrays = (*(x[part] for x in tokens), centroids, levels, out[part], scratch)
        kernel(*addresses(*arrays), stop - start, len(centroids) - 1)

    share(run, n, threads_for(n * dim * 16, _MIN_WORK))
    return out


def _to_bytes(
    centroids: NDArray[np.float32],
) -> tuple[NDArray[np.int8], NDArray[np.int32], NDArray[np.float32]]:
    """Round centroids to bytes on one scale.

    Returns:
        The bytes, ``(K, d)`` and zeros up to a multiple of 4; and of each centroid ``(K,)`` -128 times the
        sum of its bytes, and the sum of their squares.
    """
    count, dim = centroids.shape
    high = np.abs(centroids).max()
    scale = np.float32(127) / high if high > 0 else np.float32(1)
    q = np.zeros((count, dim + -dim % 4), np.int8)
    q[:, :dim] = np.rint(centroids * scale)
    return q, -128 * q.sum(1, dtype=np.int32), np.square(q, dtype=np.float32).sum(1)


def _to_panels(q: NDArray[np.int8], bias: NDArray[np.int32]) -> NDArray[np.int32]:
    """Pack centroids, 64 per row: the bias of each, then 4 dimensions of each, the next 4, and so on."""
    count, width = q.shape
    panels, steps = -(-count // PANEL), width // 4
    words = np.zeros((panels * PANEL, 1 + steps), np.int32)
    words[:count, 0], words[:count, 1:] = bias, q.view(np.int32)
    words[count:, 0] = -(2**30)  # the rest of the last panel is never highest
    return words.reshape(panels, PANEL, 1 + steps).swapaxes(1, 2).reshape(panels, -1)


@compiled_once
def _assign(dim: int, vnni: bool) -> Callable[..., None]:
    return _compile(write_assign(dim, vnni), "assign", 5, 1, 2)


@compiled_once
def _encode(dim: int, code: str, nbits: int, width: int, vnni: bool) -> Callable[..., None]:
    return _compile(write_encode(dim, code, nbits, width, vnni), "encode", 8, 1, 2)


@compiled_once
def _decode(dim: int, code: str, nbits: int, width: int, vnni: bool) -> Callable[..., None]:
    return _compile(write_decode(dim, code, nbits, width, vnni), "decode", 7, 0, 2)


def _compile(ir: str, name: str, pointers: int, floats: int, numbers: int) -> Callable[..., None]:
    kinds = [ctypes.c_void_p] * pointers + [ctypes.c_float] * floats + [ctypes.c_int64] * numbers
    return compile_ir(ir, name, kinds)
