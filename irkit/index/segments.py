"""Files of several arrays: what a structure over some rows consists of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from irkit.errors import CorruptError
from irkit.index.files import Array, allocate
from irkit.index.store import Store

__all__ = ["Allocate", "Segment", "add_segment", "drop_segments", "read_segments"]

Allocate: TypeAlias = Callable[[str, tuple[int, ...], Any], Array]
"""``allocate(name, shape, dtype)``: an array of zeros in the file, to be written to."""

_ALIGNMENT = 64  # bytes: a line of cache
_KEY = "segments"  # of the manifest's index: a list of {"start", "stop", "fields"}


class Segment(NamedTuple):
    """A structure over rows ``start`` to ``stop``; its arrays are mapped."""

    start: int
    stop: int
    arrays: dict[str, Array]


def read_segments(store: Store, check: Callable[[Segment], None] = lambda segment: None) -> list[Segment]:
    """The segments of an index, in order of their rows.

    Args:
        store: Where they are kept.
        check: Called once with each, and not again as long as its file is the same.

    Raises:
        CorruptError: The manifest and a file do not fit together.
    """
    segments = []
    for place, about in enumerate(_segments(store)):
        segment = Segment(about["start"], about["stop"], _views(store, _file(place), about["fields"]))
        store.once(_file(place), partial(check, segment))
        segments.append(segment)
    return segments


def add_segment(
    store: Store, start: int, stop: int, build: Callable[[Allocate], Mapping[str, Array]]
) -> None:
    """Add a segment behind the others, inside ``store.update()``.

    Args:
        store: Where it is kept.
        start: Its first row.
        stop: The row after its last.
        build: Makes its arrays; those that it got from ``allocate`` under their name are written already.
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

    store.replace(_file(len(segments)), write)
    about = {"start": start, "stop": stop, "fields": fields}
    store.meta["index"] |= {_KEY: [*segments, about]}


def drop_segments(store: Store, kept: int) -> None:
    """Forget all but the first ``kept`` segments, inside ``store.update()``."""
    segments = _segments(store)
    for place in range(kept, len(segments)):
        store.drop(_file(place))
    store.meta["index"] |= {_KEY: segments[:kept]}


def _segments(store: Store) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = store.meta["index"].get(_KEY, [])
    return found


def _file(place: int) -> str:
    return f"segment_{chr(ord('a') + place)}.bin"  # far fewer than 26, as their sizes fall geometrically


def _views(store: Store, file: str, fields: Mapping[str, Any]) -> dict[str, Array]:
    content, views = store.read(file), {}
    for name, (begin, dtype, shape) in fields.items():
        end = begin + math.prod(shape) * np.dtype(dtype).itemsize
        if end > len(content):
            raise CorruptError(
                f"index {store.path}: {file} is too short for its arrays; restore the directory from a copy "
                "or rebuild the index"
            )
        views[name] = content[begin:end].view(dtype).reshape(shape)
    return views
