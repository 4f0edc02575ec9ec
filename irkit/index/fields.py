"""Typed columns of metadata, which filters read instead of JSON; they only grow, as all arrays of an index.

An *entry* is a key, a row, and a value of that key: ``{"tags": ["a", "b"]}`` makes two. Equal elements of a
list make one. The entries of documents that are added together are sorted by key and type, so that entries
of one key and type lie back to back; such a stretch is a *run*. The arrays are:

* ``field_entries.bin`` ``(entries, 2)``: the row, and the value in 8 bytes: an integer, the bits of a
  float64, a boolean, or the number of a string. A longer integer is the number of its digits as a string.
* ``field_runs.bin`` ``(runs, 3)``: the key (number of a string), the type, and the entry after the last.
* ``field_strings.bin`` and ``field_ends.bin``: strings in UTF-8, and where each ends. Strings are numbered in
  order. Documents that are added together share their strings; others may repeat them, so an addition reads
  nothing of what is stored.

A column, all entries of a key and a type, is collected in memory when it is needed, and extended by the new
runs after an addition. Filters look sorted columns up (`irkit.index.sorted_fields`) and collect only what was
added since these were written. The arrays belong to the `Store` of the documents, so one commit stores
documents and metadata. An embedded database would have a commit of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from irkit.data.document import JSON
from irkit.index.array_files import Array, corrupt, lengthen
from irkit.index.field_encoding import (
    EMPTY,
    EMPTY_ARRAYS,
    ENDS,
    ENTRIES,
    FLOAT,
    HUGE,
    LIST,
    RUNS,
    STRING,
    STRINGS,
    encode_fields,
    encode_old_metadata,
    has_old_metadata,
)
from irkit.index.layout import element_positions
from irkit.index.store import Store

ORDER_ROWS, SORTED, GROUPS = "field_order.bin", "field_sorted.bin", "field_groups.bin"
"""Arrays of `irkit.index.sorted_fields`."""


@dataclass(frozen=True)
class Column:
    """The entries of a key and a type.

    Attributes:
        rows: ``(n,)`` int64, the row of each entry.
        values: ``(n,)`` int64 or float64.
        strings: Number, start and length ``(m,)`` of each string among the values; some may be there twice.
        token: What the column was read from.
        runs: Runs of the index when it was read.
        first: The first run that may be part of it.
    """

    rows: Array
    values: Array
    strings: tuple[Array, Array, Array]
    token: object
    runs: int
    first: int


class _Groups(NamedTuple):
    """What runs were read from, the first one, the one after the last, and the runs of each key and type."""

    token: object
    first: int
    total: int
    runs: dict[tuple[str, int], Array]


class _Sorted(NamedTuple):
    """Number of runs whose entries are in sorted columns, and where the entries of each key and type lie."""

    runs: int
    spans: dict[tuple[str, int], tuple[int, int]]


class Fields:
    """The metadata of the documents of a store, by key and type."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._groups = dict[bool, _Groups]()
        self._columns: dict[tuple[str, int, bool], Column] = {}

    def append(self, row: int, metadata: Sequence[Mapping[str, JSON]]) -> None:
        """Store the metadata of rows ``row``, ``row + 1``, ... inside ``store.update()``."""
        counts = [self.store.rows(name) for name in EMPTY_ARRAYS]
        for name, array in encode_fields(row, metadata, counts).items():
            self.store.append(name, array)

    def types(self, key: str) -> set[int]:
        """Return the types that values of a key have; none for an unknown key."""
        return {kind for kind in range(LIST + 1) if self._has(key, kind)}

    def keys(self) -> set[str]:
        """Return all keys."""
        return {key for key, _ in (*self._read_sorted().spans, *self._read_groups(whole=False).runs)}

    def kinds(self) -> list[tuple[str, int]]:
        """Return all pairs of a key and a type, in order of their first runs."""
        groups = self._read_groups().runs
        return sorted(groups, key=lambda pair: int(groups[pair][0]))

    def size(self) -> int:
        """Return the number of entries."""
        return len(self._read(ENTRIES))

    def key_number(self, key: str, kind: int) -> int:
        """Return a number of a key as a string."""
        return int(self._read(RUNS)[self._read_groups().runs[key, kind][0], 0])

    def string(self, number: int) -> bytes:
        """Return a string."""
        blob, ends = self.strings()
        known = 0 <= number < len(ends)
        start, end = (int(ends[number - 1]) if number else 0, int(ends[number])) if known else (0, -1)
        if not 0 <= start <= end <= len(blob):
            raise corrupt(self.store.path, "strings of its metadata lie outside of their file")
        return blob[start:end].tobytes()

    def sorted_group(self, key: str, kind: int) -> tuple[Array, Array]:
        """Return rows and values of the sorted entries of a key and a type."""
        start, end = self._read_sorted().spans.get((key, kind), (0, 0))
        if start == end:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        return self.store.read(ORDER_ROWS)[start:end], self.store.read(SORTED)[start:end]

    def _has(self, key: str, kind: int) -> bool:
        pair = (key, kind)
        return pair in self._read_sorted().spans or pair in self._read_groups(whole=False).runs

    def _read_sorted(self) -> _Sorted:
        """Return what the sorted columns cover; an addition leaves it as it is."""
        if not self.store.rows(ORDER_ROWS):
            return _Sorted(0, {})

        def extend(before: _Sorted | None) -> _Sorted:
            return before or self._find_sorted()

        return self.store.extended("sorted fields", [ORDER_ROWS, GROUPS], extend)

    def _find_sorted(self) -> _Sorted:
        entries = self.store.rows(ORDER_ROWS)
        stops, groups, ends = self._read(RUNS)[:, 2], self.store.read(GROUPS), self._read(ENDS)
        runs = int(np.searchsorted(stops, entries, "right"))
        edges = np.concatenate([[0], groups[:, 2]])
        is_consistent = runs and stops[runs - 1] == entries == edges[-1] and (np.diff(edges) >= 0).all()
        if not is_consistent or groups[:, 0].min() < 0 or groups[:, 0].max() >= len(ends):
            raise corrupt(self.store.path, "the sorted columns of its metadata do not fit together")
        names = zip(self.decode(groups[:, 0]), groups[:, 1].tolist(), strict=True)
        spans = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        return _Sorted(runs, dict(zip(names, spans, strict=True)))

    def column(self, key: str, kind: int, count: int, *, whole: bool = True) -> Column:
        """Return the rows and values stored under a metadata key with values of one type.

        Args:
            key: A key that some document has.
            kind: A type that some value of the key has.
            count: Number of documents in the index; a row beyond it is an error.
            whole: Return all entries. If False, leave out those that the sorted columns cover.

        Raises:
            CorruptError: An entry refers to a row or a string that does not exist.
        """
        token, first, n_runs, groups = self._read_groups(whole)
        # what an earlier call has read; nothing of another state
        column = self._columns.get((key, kind, whole))
        if column is None or (column.token, column.first) != (token, first) or column.runs > n_runs:
            nothing = np.empty(0, np.int64)
            values = nothing.view(np.float64) if kind == FLOAT else nothing
            column = Column(nothing, values, (nothing, nothing, nothing), token, first, first)
        # runs that were added since
        group = groups.get((key, kind), np.empty(0, np.int64))
        new = group[np.searchsorted(group, column.runs) :]
        if len(new):
            ends = self._read(RUNS)[:, 2]
            lengths = ends[new] - np.where(new > 0, ends[new - 1], 0)
            entries = _gather(self._read(ENTRIES), ends[new], lengths)
            rows, values = entries[:, 0], entries[:, 1]
            n_strings, strings = len(self._read(ENDS)), column.strings
            wrong = rows.min() < 0 or rows.max() >= count
            if kind in (STRING, HUGE):
                wrong = wrong or values.min() < 0 or values.max() >= n_strings
                if not wrong:
                    numbers = _distinct(values, n_strings)
                    starts, sizes = self._spans(numbers)
                    strings = (
                        lengthen(strings[0], numbers),
                        lengthen(strings[1], starts),
                        lengthen(strings[2], sizes),
                    )
            if wrong:
                raise corrupt(self.store.path, f"metadata {key!r:.60} has rows or strings that are not there")
            if kind == FLOAT:
                values = values.copy().view(np.float64)
            rows, values = lengthen(column.rows, rows), lengthen(column.values, values)
            column = Column(rows, values, strings, token, n_runs, first)
        self._columns[key, kind, whole] = column
        return column

    def strings(self) -> tuple[Array, Array]:
        """Return ``(bytes,)`` of all strings, and ``(strings,)`` where each ends."""
        return self._read(STRINGS), self._read(ENDS)

    def decode(self, numbers: Array) -> list[str]:
        """Return the strings of ``numbers (n,)``."""
        data, (starts, lengths) = self.strings()[0].data, self._spans(numbers)
        spans = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        try:
            return [bytes(data[start:end]).decode("utf-8", "surrogatepass") for start, end in spans]
        except UnicodeDecodeError as error:
            raise corrupt(self.store.path, f"a string of its metadata cannot be read ({error})") from error

    def integers(self, numbers: Array) -> list[int]:
        """Return the integers whose digits are the strings of ``numbers (n,)``."""
        try:
            return [int(digits) for digits in self.decode(numbers)]
        except ValueError as error:
            raise corrupt(self.store.path, f"an integer of its metadata cannot be read ({error})") from error

    def _spans(self, numbers: Array) -> tuple[Array, Array]:
        """Return where the strings of ``numbers (n,)`` start, and their lengths."""
        blob, ends = self.strings()
        stops = ends[numbers]
        starts = np.where(numbers > 0, ends[numbers - 1], 0)
        lengths = stops - starts
        if len(numbers) and (starts.min() < 0 or lengths.min() < 0 or stops.max() > len(blob)):
            raise corrupt(self.store.path, "strings of its metadata lie outside of their file")
        return starts, lengths

    def _read(self, name: str) -> Array:
        if has_old_metadata(self.store):
            return self.store.derived(("old fields", self), self._encode_old)[name]
        stored: Array = self.store.read(name) if self.store.rows(name) else EMPTY_ARRAYS[name]
        return stored

    def _encode_old(self) -> dict[str, Array]:
        """Return the arrays of an older index, whose metadata is JSON."""
        parts = list(encode_old_metadata(self.store))
        return {
            name: np.concatenate([empty, *(part[name] for part in parts)])
            for name, empty in EMPTY_ARRAYS.items()
        }

    def _read_groups(self, whole: bool = True) -> _Groups:
        """Return all runs by key and type; without ``whole``, those that the sorted columns lack."""
        return self.store.derived(("fields", self, whole), lambda: self._group(whole))

    def _group(self, whole: bool) -> _Groups:
        store, first = self.store, 0 if whole else self._read_sorted().runs
        token: object = (store.epoch, os.getpid(), has_old_metadata(store))
        # the arrays must fit together
        runs, entries, ends = self._read(RUNS), len(self._read(ENTRIES)), self._read(ENDS)
        text = int(ends[-1]) if len(ends) else 0
        if (int(runs[-1, 2]) if len(runs) else 0, text) != (entries, len(self._read(STRINGS))):
            raise corrupt(store.path, "the arrays of its metadata do not fit together")
        # go on from the groups of an earlier state, if rows were only added since
        nothing = _Groups(token, first, first, {})
        known = self._groups.get(whole, nothing)
        if known[:2] != nothing[:2] or known.total > len(runs):
            known = nothing
        done, groups = known.total, known.runs
        if done < len(runs):
            stops = runs[max(done - 1, 0) :, 2]
            new = runs[done:]
            is_consistent = stops[0] >= 0 and (np.diff(stops) >= 0).all()
            is_consistent = is_consistent and new[:, 0].min() >= 0 and new[:, 0].max() < len(ends)
            if not (is_consistent and new[:, 1].min() >= EMPTY and new[:, 1].max() <= LIST):
                raise corrupt(store.path, "the runs of its metadata do not fit together")
            # A key has a number in each chunk of documents: compare bytes, and decode different ones alone.
            data, (starts, lengths) = self.strings()[0].data, self._spans(new[:, 0])
            ids: dict[bytes, int] = {}
            spans = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
            names = np.array([ids.setdefault(bytes(data[start:end]), len(ids)) for start, end in spans])
            keys = self.decode(new[np.unique(names, return_index=True)[1], 0])
            # the runs of each pair of key and type
            codes, inverse = np.unique(names * 16 + new[:, 1], return_inverse=True)
            order = np.argsort(inverse, kind="stable") + done
            parts = np.split(order, np.cumsum(np.bincount(inverse))[:-1])
            groups = dict(groups)
            for code, part in zip(codes.tolist(), parts, strict=True):
                pair = (keys[code // 16], code % 16)
                groups[pair] = np.concatenate([groups[pair], part]) if pair in groups else part
        self._groups[whole] = known = _Groups(token, first, len(runs), groups)
        return known


def _distinct(numbers: Array, count: int) -> Array:
    """Return the distinct ``numbers`` below ``count``, in order."""
    if count > 8 * len(numbers):
        return np.unique(numbers)
    present = np.zeros(count, np.bool_)
    present[numbers] = True
    return np.flatnonzero(present)


def _gather(entries: Array, ends: Array, lengths: Array) -> Array:
    """Return copies of the entries of runs."""
    if len(ends) <= 1 << 13:  # slices are faster than positions
        spans = zip((ends - lengths).tolist(), ends.tolist(), strict=True)
        return np.concatenate([entries[start:end] for start, end in spans])
    gathered: Array = entries[element_positions(ends, lengths)]
    return gathered
