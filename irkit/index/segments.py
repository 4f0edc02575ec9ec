"""Segments: structures over ranges of rows, each with its arrays in one file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from irkit.index.array_files import Array, allocate, corrupt
from irkit.index.layout import segment_name
from irkit.index.store import Store

Allocate: TypeAlias = Callable[[str, tuple[int, ...], Any], Array]
"""``allocate(name, shape, dtype)`` returns an array of zeros in the file, to be written to."""

_ALIGNMENT = 64  # bytes: a cache line
_KEY = "segments"  # in the manifest: a list of {"start", "stop", "fields"}


class Segment(NamedTuple):
    """A structure over rows ``start`` to ``stop``; its arrays are mapped."""

    start: int
    stop: int
    arrays: dict[str, Array]


def read_segments(store: Store, check: Callable[[Segment], None] = lambda segment: None) -> list[Segment]:
    """Return the segments of an index, in order of their rows.

    Args:
        store: Store of the index.
        check: Called once with each segment, and not again as long as its file is the same.

    Raises:
        CorruptError: The manifest and a file do not fit together.
    """
    segments = []
    for number, about in enumerate(_segments(store)):
        segment = Segment(about["start"], about["stop"], _views(store, segment_name(number), about["fields"]))
        store.once(segment_name(number), partial(check, segment))
        segments.append(segment)
    return segments


def covered_rows(store: Store) -> int:
    """Return the number of rows in segments: the first ones of the index."""
    segments = _segments(store)
    return int(segments[-1]["stop"]) if segments else 0


def add_segment(
    store: Store, start: int, stop: int, build: Callable[[Allocate], Mapping[str, Array]]
) -> None:
    """Add a segment after the others, inside ``store.update()``.

    Args:
        store: Store of the index.
        start: Its first row.
        stop: The row after its last row.
        build: Returns its arrays by name; arrays from ``allocate`` are in the file already.
    """
    segments, fields = _segments(store), dict[str, Any]()

    def write(path: Path) -> None:
        path.touch()
        end = 0

        def append(name: str, shape: tuple[int, ...], dtype: Any) -> Array:
            nonlocal end
            begin, dtype = -(-end // _ALIGNMENT) * _ALIGNMENT, np.dtype(dtype).newbyteorder("<")
            end = begin + math.prod(shape) * dtype.itemsize
            fields[name] = [begin, dtype.str, list(shape)]
            return allocate(path, begin, shape, dtype)

        for name, array in build(append).items():
            if name not in fields:
                append(name, array.shape, array.dtype)[...] = array

    store.replace(segment_name(len(segments)), write)
    about = {"start": start, "stop": stop, "fields": fields}
    store.meta["index"] |= {_KEY: [*segments, about]}


def drop_segments(store: Store, count: int) -> None:
    """Drop all segments but the first ``count``, inside ``store.update()``."""
    segments = _segments(store)
    for number in range(count, len(segments)):
        store.drop(segment_name(number))
    store.meta["index"] |= {_KEY: segments[:count]}


def _segments(store: Store) -> list[dict[str, Any]]:
    segments: list[dict[str, Any]] = store.meta["index"].get(_KEY, [])
    return segments


def _views(store: Store, file: str, fields: Mapping[str, Any]) -> dict[str, Array]:
    content, views = store.read(file), {}
    for name, (begin, dtype, shape) in fields.items():
        end = begin + math.prod(shape) * np.dtype(dtype).itemsize
        if end > len(content):
            raise corrupt(store.path, f"{file} is too short for its arrays")
        views[name] = content[begin:end].view(dtype).reshape(shape)
    return views
