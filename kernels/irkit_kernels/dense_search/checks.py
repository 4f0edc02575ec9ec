"""Checks of arrays that were read from files: a search of them must stay within them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cpu_frame import BLOCK
from .rotation import MAX_DIM, Rotation, padded

__all__ = ["check_kept", "check_margins", "check_rotation", "check_segment"]

Array = NDArray[Any]
_KEPT = ("int8", "float16", "float32")


def check_rotation(rotation: Rotation, dim: int) -> int:
    """Return the dimensions of rotated vectors, and raise an error if a rotation is not of ``dim``."""
    if not 0 < dim <= MAX_DIM:
        raise ValueError(f"dense_search: got {dim} dimensions, expected 1 to {MAX_DIM}")
    width = padded(dim)
    for name, array in zip(rotation._fields, rotation, strict=True):
        if array.shape != (3, width) or array.dtype.kind != "i":
            raise ValueError(
                f"dense_search: the rotation's {name} are {array.dtype} {array.shape}, expected integers "
                f"(3, {width})"
            )
    if (np.sort(rotation.order) != np.arange(width)).any():
        raise ValueError("dense_search: the rotation's order is not one of all dimensions")
    return width


def check_segment(segment: Mapping[str, Array], n_lists: int, width: int, euclidean: bool) -> int:
    """Return the bits per dimension of a segment, and raise an error if a search would leave its arrays.

    Codes, factors and row numbers are not checked, because a search stays within its memory with any.

    Args:
        segment: Arrays by name, as `arrange` returns them.
        n_lists: Number of lists.
        width: Dimensions of rotated vectors.
        euclidean: Whether the metric is euclidean, which needs biases.

    Raises:
        ValueError: An array is missing, or has another dtype or shape, or lists end beyond their array.
    """
    rows = segment.get("rows")
    n = 0 if rows is None else len(rows)
    planes = segment.get("planes")
    nbits = 1 if planes is None else 8 * planes.shape[-1] // width + 1
    expected: dict[str, tuple[type, tuple[int, ...]]] = {
        "offsets": (np.int64, (n_lists + 1,)),
        "rows": (np.uint32, (n,)),
        "signs": (np.uint8, (-(-n // BLOCK), 4 * width)),
        "factors": (np.uint32, (n,)),
    }
    if planes is not None:
        expected["planes"] = np.uint8, (n, (nbits - 1) * width // 8)
        expected["level_factors"] = np.uint32, (n,)
    if euclidean:
        expected["biases"] = np.float32, (n,)
    for name, (dtype, shape) in expected.items():
        _check(name, segment.get(name), dtype, shape)
    if nbits not in (1, 2, 4):
        raise ValueError(f"dense_search: planes are of codes of {nbits} bits, expected 1, 2 or 4")
    offsets = segment["offsets"]
    if offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any() or offsets[-1] != n:
        raise ValueError(f"dense_search: offsets do not rise from 0 to {n}")
    return nbits


def check_kept(kept: Array | None, scales: Array | None, n_rows: int, dim: int, width: int) -> str:
    """Return the kind of the kept rows, and raise an error if they do not have the right shape."""
    if kept is None:
        return "none"
    kind = str(kept.dtype)
    if kind not in _KEPT:
        raise ValueError(f"dense_search: kept rows are {kind}, expected one of {', '.join(_KEPT)}")
    _check("kept", kept, kept.dtype, (n_rows, width if kind == "int8" else dim))
    if kind == "int8":
        _check("kept_scales", scales, np.float32, (n_rows,))
    return kind


def check_margins(margins: Array | None, n_lists: int) -> None:
    """Raise an error if there are margins, but not one of each list."""
    if margins is not None:
        _check("margins", margins, np.float32, (n_lists,))


def _check(name: str, array: Array | None, dtype: Any, shape: tuple[int, ...]) -> None:
    if array is None or array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        actual = None if array is None else (array.dtype, array.shape)
        raise ValueError(f"dense_search: {name} is {actual}, expected {np.dtype(dtype)} {shape}")
