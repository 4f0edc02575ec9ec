"""Arrange the codes of rows by list, take them out again, and decode them; see `layout` in README.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .cpu_frame import BLOCK

__all__ = ["arrange", "codes_at", "codes_of", "decode", "empty_segment", "put", "two_floats", "unpack_signs"]

Array = NDArray[Any]
Allocate = Callable[[str, tuple[int, ...], Any], Array]

_HALF = BLOCK // 2  # rows of a block whose bits are the lower halves of bytes
_AS_THEY_ARE = ("planes", "factors", "level_factors", "biases")  # one element per row of a segment


def arrange(codes: Mapping[str, Array], n_lists: int, first_row: int = 0) -> dict[str, Array]:
    """Order codes by list, ties by row, to a segment for a `Searcher`.

    Args:
        codes: The result of `Encoder.encode`, or of `codes_of`, which has ``rows``, too.
        n_lists: Number of lists.
        first_row: The row of the first vector; not used if there are ``rows``.

    Returns:
        By name: ``offsets (lists + 1,)`` int64 and ``rows (n,)`` uint32; ``signs (ceil(n / 32), 4 * width)``
        uint8, see `put`; the others, except for the kept rows, as they were, in the new order.
    """
    rows = codes.get("rows", np.arange(first_row, first_row + len(codes["lists"]), dtype=np.uint32))
    segment, positions = empty_segment(codes, codes["lists"], rows, n_lists, _zeros)
    put(segment, positions, codes)
    return segment


def empty_segment(
    like: Mapping[str, Array], lists: Array, rows: Array, n_lists: int, allocate: Allocate
) -> tuple[dict[str, Array], Array]:
    """Return a segment of rows whose lists are known; `put` adds their codes, block by block.

    Args:
        like: Codes of any rows.
        lists: ``(n,)`` the list of each row.
        rows: ``(n,)`` their numbers.
        n_lists: Number of lists.
        allocate: ``allocate(name, shape, dtype)`` returns an array of zeros.

    Returns:
        The segment, as of `arrange`, and the position ``(n,)`` of each row in it.
    """
    n, order = len(lists), np.argsort(lists, kind="stable")
    positions = np.empty(n, np.int64)
    positions[order] = np.arange(n)
    segment = {"offsets": allocate("offsets", (n_lists + 1,), np.int64)}
    segment["offsets"][1:] = np.cumsum(np.bincount(lists, minlength=n_lists))
    segment["rows"] = allocate("rows", (n,), np.uint32)
    segment["rows"][:] = rows[order]
    size = like["signs"].shape[1]
    segment["signs"] = allocate("signs", (-(-n // BLOCK), BLOCK * size), np.uint8)
    for name in _AS_THEY_ARE:
        if name in like:
            segment[name] = allocate(name, (n, *like[name].shape[1:]), like[name].dtype)
    return segment, positions


def put(segment: Mapping[str, Array], positions: Array, codes: Mapping[str, Array]) -> None:
    """Write the codes of some rows to their positions, once.

    A block of 32 rows has 16 bytes of signs for each 4 dimensions: byte i holds the bits of row i in its
    lower half, and the bits of row i + 16 in its upper half.
    """
    for name in _AS_THEY_ARE:
        if name in codes:
            segment[name][positions] = codes[name]
    signs = codes["signs"]
    fours = np.stack([signs & 15, signs >> 4], 2).reshape(len(signs), 2 * signs.shape[1])
    blocks = segment["signs"].reshape(-1, fours.shape[1], _HALF)
    upper = positions % BLOCK >= _HALF
    for half in (0, 1):
        chosen = np.flatnonzero(upper == half)
        here = positions[chosen]
        blocks[here // BLOCK, :, here % _HALF] |= fours[chosen] << np.uint8(4 * half)


def codes_at(segment: Mapping[str, Array], positions: Array) -> dict[str, Array]:
    """Return the codes of the rows at some positions of a segment.

    Returns:
        By name what `Encoder.encode` returns, except for the kept rows, and ``rows``.
    """
    packed = segment["signs"]
    blocks = packed.reshape(len(packed), packed.shape[1] // _HALF, _HALF)
    fours = blocks[positions // BLOCK, :, positions % _HALF]
    fours = fours >> (positions % BLOCK >= _HALF).astype(np.uint8)[:, None] * np.uint8(4) & 15
    lists = np.searchsorted(segment["offsets"], positions, side="right") - 1
    codes = {"lists": lists.astype(np.int32), "signs": fours[:, ::2] | fours[:, 1::2] << 4}
    return codes | {name: segment[name][positions] for name in ("rows", *_AS_THEY_ARE) if name in segment}


def codes_of(segment: Mapping[str, Array]) -> dict[str, Array]:
    """Return all codes of a segment in the order of the rows, to be arranged anew."""
    return codes_at(segment, np.argsort(segment["rows"], kind="stable"))


def unpack_signs(packed: Array, n: int) -> Array:
    """Return the signs ``(n, width / 8)`` of rows, in their order, that `put` packed."""
    fours = packed.shape[1] // _HALF
    blocks = packed.reshape(len(packed), fours, _HALF).transpose(0, 2, 1)
    rows = np.concatenate([blocks & 15, blocks >> 4], 1).reshape(len(packed) * BLOCK, fours)
    return np.ascontiguousarray(rows[:n, ::2] | rows[:n, 1::2] << 4)


def decode(codes: Mapping[str, Array], centroids: Tensor) -> Tensor:
    """Return the rotated vectors that codes of 2 or 4 bits stand for: scores by codes are products with them.

    Args:
        codes: As of `codes_at`.
        centroids: ``(lists, width)``, the attribute ``rotated`` of an `Encoder`.

    Returns:
        ``(n, width)`` float32.
    """
    width = centroids.shape[1]
    others = 8 * codes["planes"].shape[1] // width
    planes = codes["planes"].reshape(-1, others, width // 8)
    levels = np.zeros((len(planes), width), np.uint8)
    for bit in range(others + 1):
        plane = codes["signs"] if bit == others else planes[:, bit]
        levels |= np.unpackbits(plane, axis=1, bitorder="little") << np.uint8(bit)
    factors, base_factors = map(torch.from_numpy, two_floats(codes["level_factors"]))
    vectors = torch.from_numpy(levels).float().sub_(0.5 * ((1 << others + 1) - 1)).mul_(factors[:, None])
    return vectors.addcmul_(centroids[torch.from_numpy(codes["lists"])], (1 + base_factors)[:, None])


def two_floats(words: Array) -> tuple[Array, Array]:
    """Return the two float32 numbers that are in each uint32 as bfloat16."""
    return (words & np.uint32(0xFFFF0000)).view(np.float32), (words << np.uint32(16)).view(np.float32)


def _zeros(name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    return np.zeros(shape, dtype)
