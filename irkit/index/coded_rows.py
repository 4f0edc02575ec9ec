"""Codes of the rows of segments, by row: to copy them to another segment, and to decode them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
from irkit_kernels.dense_search import codes_at, empty_segment, put

from irkit.index.array_files import Array
from irkit.index.segments import Allocate, Segment, add_segment, drop_segments, read_segments
from irkit.index.store import Store

Codes: TypeAlias = dict[str, Array]
Blocks: TypeAlias = Sequence[tuple[int, int]]

_GROWTH = 4  # a segment this many times as large as all that follows it is not merged


class CodedRows:
    """Codes by row.

    Args:
        segments: Segments that follow each other.

    Attributes:
        stop: The row after the last one.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.stop = segments[-1].stop if segments else 0
        self._segments = segments
        self._starts = np.array([segment.start for segment in segments], np.int64)
        self._positions = [
            np.argsort(segment.arrays["rows"], kind="stable").astype(np.uint32) for segment in segments
        ]

    def take(self, rows: Array) -> Codes:
        """Return the codes of ``rows (n,)``, in this order; for their names see `codes_at`."""
        owners = np.searchsorted(self._starts, rows, side="right") - 1
        order, parts = [], []
        for number in np.unique(owners) if len(rows) else [0]:
            own, segment = np.flatnonzero(owners == number), self._segments[number]
            positions = self._positions[number][rows[own] - segment.start]
            parts.append(codes_at(segment.arrays, positions.astype(np.int64)))
            order.append(own)
        if len(parts) == 1:
            return parts[0]
        back = np.argsort(np.concatenate(order))
        return {name: np.concatenate([part[name] for part in parts])[back] for name in parts[0]}


def add_codes(
    store: Store,
    start: int,
    stop: int,
    n_lists: int,
    blocks: Callable[[int, int], Blocks],
    lists: Callable[[Array], Array],
    codes: Callable[[Array, Array], Codes],
) -> None:
    """Put the rows after the last segment into a new segment, with the small segments before them.

    Rows of segments keep their codes. Memory is bounded: codes are made, or copied, block by block, and
    written to their positions in the mapped file, whose pages the kernel can take back at any time.

    Args:
        store: Store of the index, inside ``update()``.
        start: The first row without a segment.
        stop: The row after the last.
        n_lists: Number of lists.
        blocks: Cuts rows from a first one to that before a second one.
        lists: Returns the lists of new rows.
        codes: Returns the codes of new rows, whose lists are its second argument.
    """
    segments = read_segments(store)
    stay, first, most = len(segments), start, store.limits.dense_segment
    while stay and first - segments[stay - 1].start < _GROWTH * (stop - first):
        if stop - segments[stay - 1].start > most:
            break
        stay -= 1
        first = segments[stay].start
    old = CodedRows(segments[stay:])
    drop_segments(store, stay)

    def build(allocate: Allocate, begin: int, end: int) -> Codes:
        parts = [*blocks(begin, min(end, start)), *blocks(max(begin, start), end)]
        row_lists = [np.arange(*part) for part in parts]
        own = np.concatenate(
            [old.take(rows)["lists"] if rows[0] < start else lists(rows) for rows in row_lists]
        ).astype(np.int32)
        like = codes(row_lists[0][:0], own[:0])
        segment, targets = empty_segment(like, own, np.concatenate(row_lists), n_lists, allocate)
        for rows in row_lists:
            part = slice(rows[0] - begin, rows[-1] + 1 - begin)
            put(segment, targets[part], old.take(rows) if rows[0] < start else codes(rows, own[part]))
        return segment

    for begin in range(first, stop, most):
        end = min(begin + most, stop)
        add_segment(store, begin, end, partial(build, begin=begin, end=end))
