"""Checks of lists that were read from a file: a search of them must stay within their arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cpu_frame import RANGE, STEP

__all__ = ["check_lists"]

Array = NDArray[Any]

_RECORD = np.dtype([("start", "<i8"), ("range", "<i4"), ("count", "<i4"), ("scale", "<f4")])
_EXACT = {
    "list_offsets": (np.int64, 1),
    "lists": (np.int32, 2),
    "postings": (np.uint8, 1),
    "gains": (np.float32, 1),
}
_BEST = {
    "best_offsets": (np.int64, 1),
    "best": (np.uint32, 1),
    "best_scales": (np.float32, 1),
    "best_missed": (np.float32, 1),
}


def check_lists(arrays: Mapping[str, Array], n: int, dim: int) -> None:
    """Raise an error if a search of some lists would leave their arrays.

    The rows and codes of postings are not checked: whatever their values, a search stays within its memory.

    Args:
        arrays: By name, as `build` returns them.
        n: Documents.
        dim: Size of the vocabulary.

    Raises:
        ValueError: An array is missing or has another dtype or length, or a list ends beyond its array.
    """
    for name, (dtype, axes) in (_EXACT | (_BEST if "best" in arrays else {})).items():
        array = arrays.get(name)
        fine = array is not None and array.dtype == dtype and array.ndim == axes and array.flags.c_contiguous
        if not fine:
            actual = None if array is None else (array.dtype, array.shape)
            raise ValueError(f"sparse_search: {name} is {actual}, expected {axes} axes of {np.dtype(dtype)}")
    lengths = {
        "list_offsets": dim + 1,
        "gains": dim,
        "best_offsets": dim + 1,
        "best_scales": dim,
        "best_missed": dim,
    }
    wrong = [name for name, length in lengths.items() if name in arrays and len(arrays[name]) != length]
    if wrong or arrays["lists"].shape[1] != 5:
        raise ValueError(f"sparse_search: {wrong or 'lists'} is not of {dim} terms")
    pairs = [("list_offsets", "lists")] + [("best_offsets", "best")] * ("best" in arrays)
    for offsets, items in pairs:
        _check_offsets(offsets, arrays[offsets], len(arrays[items]))
    _check_records(arrays["list_offsets"], arrays["lists"], len(arrays["postings"]), n)


def _check_offsets(name: str, offsets: Array, count: int) -> None:
    if offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any() or offsets[-1] != count:
        raise ValueError(f"sparse_search: {name} do not rise from 0 to {count}")


def _check_records(offsets: Array, lists: Array, size: int, n: int) -> None:
    """Check that each list lies within the postings, and that the lists of a term are in order of ranges."""
    records = lists.reshape(-1).view(_RECORD)
    first_bytes, numbers, counts = (
        np.ascontiguousarray(records[name]) for name in ("start", "range", "count")
    )
    if not len(records):
        return
    ranges = -(-n // RANGE)
    if numbers.min() < 0 or numbers.max() >= ranges or counts.min() < -1:
        raise ValueError(f"sparse_search: lists of ranges {numbers.min()} to {numbers.max()} of {ranges}")
    vector = np.where(numbers == ranges - 1, -(-(n - (ranges - 1) * RANGE) // STEP) * STEP, RANGE)
    taken = np.where(counts < 0, vector, 3 * counts.astype(np.int64))
    if first_bytes.min() < 0 or (first_bytes > size - taken).any():
        raise ValueError(f"sparse_search: a list ends beyond the {size} bytes of postings")
    follows = np.ones(len(records), np.bool_)  # another list of the same term
    starts = offsets[:-1]
    follows[starts[starts < len(records)]] = False
    if (numbers[1:] <= numbers[:-1])[follows[1:]].any():
        raise ValueError("sparse_search: a term has two lists of a range, or not in order")
