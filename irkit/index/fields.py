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

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from irkit.data.document import JSON
from irkit.index.array_files import Array, corrupt, lengthen
from irkit.index.layout import element_positions
from irkit.index.store import Store

EMPTY, NULL, BOOL, INT, FLOAT, HUGE, STRING, DICT, LIST = range(9)
"""Types of entries. EMPTY stands for an empty list; dictionaries and lists in a list have no value."""

_TYPES = {NoneType: NULL, bool: BOOL, int: INT, float: FLOAT, str: STRING, dict: DICT, list: LIST}
_ENTRIES, _RUNS, _STRINGS, _ENDS = (
    "field_entries.bin",
    "field_runs.bin",
    "field_strings.bin",
    "field_ends.bin",
)
ORDER_ROWS, SORTED, GROUPS = "field_order.bin", "field_sorted.bin", "field_groups.bin"
"""Arrays of `irkit.index.sorted_fields`."""
_EMPTY_ARRAYS: dict[str, Array] = {
    _ENTRIES: np.empty((0, 2), np.int64),
    _RUNS: np.empty((0, 3), np.int64),
    _STRINGS: np.empty(0, np.uint8),
    _ENDS: np.empty(0, np.int64),
}


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
    """What runs were read from, their number, and the runs of each key and type."""

    token: object
    total: int
    runs: dict[tuple[str, int], Array]


class Fields:
    """The metadata of the documents of a store, by key and type."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._groups = _Groups(None, 0, {})
        self._columns: dict[tuple[str, int, bool], Column] = {}

    def append(self, row: int, metadata: Sequence[Mapping[str, JSON]]) -> None:
        """Store the metadata of rows ``row``, ``row + 1``, ... inside ``store.update()``."""
        counts = [self.store.rows(name) for name in _EMPTY_ARRAYS]
        for name, array in encode_fields(row, metadata, counts).items():
            self.store.append(name, array)

    def types(self, key: str) -> dict[int, Array]:
        """Return the types that values of a key have, and the runs of each; none for an unknown key."""
        groups = self._read_groups().runs
        return {kind: groups[key, kind] for kind in range(LIST + 1) if (key, kind) in groups}

    def keys(self) -> set[str]:
        """Return all keys."""
        return {key for key, _ in self._read_groups().runs}

    def kinds(self) -> list[tuple[str, int]]:
        """Return all pairs of a key and a type, in order of their first runs."""
        groups = self._read_groups().runs
        return sorted(groups, key=lambda pair: int(groups[pair][0]))

    def size(self) -> int:
        """Return the number of entries."""
        return len(self._read(_ENTRIES))

    def key_number(self, key: str, kind: int) -> int:
        """Return a number of a key as a string."""
        return int(self._read(_RUNS)[self._read_groups().runs[key, kind][0], 0])

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
        start, end = self.store.derived(("sorted fields", self), self._find_sorted)[1].get(
            (key, kind), (0, 0)
        )
        if start == end:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        return self.store.read(ORDER_ROWS)[start:end], self.store.read(SORTED)[start:end]

    def _find_sorted(self) -> tuple[int, dict[tuple[str, int], tuple[int, int]]]:
        """Return the number of runs whose entries are sorted, and per key and type where its entries lie."""
        entries = self.store.rows(ORDER_ROWS)
        if not entries:
            return 0, {}
        stops, groups, ends = self._read(_RUNS)[:, 2], self.store.read(GROUPS), self._read(_ENDS)
        runs = int(np.searchsorted(stops, entries, "right"))
        edges = np.concatenate([[0], groups[:, 2]])
        fine = runs and stops[runs - 1] == entries == edges[-1] and (np.diff(edges) >= 0).all()
        if not fine or groups[:, 0].min() < 0 or groups[:, 0].max() >= len(ends):
            raise corrupt(self.store.path, "the sorted columns of its metadata do not fit together")
        names = zip(self.decode(groups[:, 0]), groups[:, 1].tolist(), strict=True)
        return runs, dict(zip(names, zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True), strict=True))

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
        token, n_runs, groups = self._read_groups()
        first = 0 if whole else self.store.derived(("sorted fields", self), self._find_sorted)[0]
        # what an earlier call has read; nothing of another state
        column = self._columns.get((key, kind, whole))
        if column is None or (column.token, column.first) != (token, first) or column.runs > n_runs:
            nothing = np.empty(0, np.int64)
            values = nothing.view(np.float64) if kind == FLOAT else nothing
            column = Column(nothing, values, (nothing, nothing, nothing), token, first, first)
        # runs that were added since
        group = groups[key, kind]
        new = group[np.searchsorted(group, column.runs) :]
        if len(new):
            ends = self._read(_RUNS)[:, 2]
            lengths = ends[new] - np.where(new > 0, ends[new - 1], 0)
            entries = _gather(self._read(_ENTRIES), ends[new], lengths)
            rows, values = entries[:, 0], entries[:, 1]
            n_strings, strings = len(self._read(_ENDS)), column.strings
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
        return self._read(_STRINGS), self._read(_ENDS)

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
        stored: Array = self.store.read(name) if self.store.rows(name) else _EMPTY_ARRAYS[name]
        return stored

    def _encode_old(self) -> dict[str, Array]:
        """Return the arrays of an index of before, whose metadata is JSON."""
        parts = list(encode_old_metadata(self.store))
        return {
            name: np.concatenate([empty, *(part[name] for part in parts)])
            for name, empty in _EMPTY_ARRAYS.items()
        }

    def _read_groups(self) -> _Groups:
        return self.store.derived(("fields", self), self._group)

    def _group(self) -> _Groups:
        """Group the runs by key and type."""
        store = self.store
        token: object = (store.epoch, os.getpid(), has_old_metadata(store))
        runs, entries, ends = self._read(_RUNS), len(self._read(_ENTRIES)), self._read(_ENDS)
        before, done, groups = self._groups
        if before != token or done > len(runs):
            done, groups = 0, {}
        if done < len(runs):
            stops = runs[max(done - 1, 0) :, 2]
            new = runs[done:]
            fine = stops[0] >= 0 and (np.diff(stops) >= 0).all() and stops[-1] == entries
            fine = fine and new[:, 0].min() >= 0 and new[:, 0].max() < len(ends)
            if not (fine and new[:, 1].min() >= EMPTY and new[:, 1].max() <= LIST):
                raise corrupt(store.path, "the runs of its metadata do not fit together")
            # A key has a number in each chunk of documents: compare bytes, and decode different ones alone.
            data, (starts, lengths) = self.strings()[0].data, self._spans(new[:, 0])
            ids: dict[bytes, int] = {}
            spans = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
            names = np.array([ids.setdefault(bytes(data[start:end]), len(ids)) for start, end in spans])
            keys = self.decode(new[np.unique(names, return_index=True)[1], 0])
            codes, place = np.unique(names * 16 + new[:, 1], return_inverse=True)
            order = np.argsort(place, kind="stable") + done
            parts = np.split(order, np.cumsum(np.bincount(place))[:-1])
            groups = dict(groups)
            for code, part in zip(codes.tolist(), parts, strict=True):
                pair = (keys[code // 16], code % 16)
                groups[pair] = np.concatenate([groups[pair], part]) if pair in groups else part
        self._groups = _Groups(token, len(runs), groups)
        return self._groups


def encode_fields(
    row: int, metadata: Iterable[Mapping[str, JSON]], counts: Sequence[int]
) -> dict[str, Array]:
    """Return rows to append to each array.

    Args:
        row: Row of the first document.
        metadata: Metadata of each document, as JSON is parsed.
        counts: Entries, runs, bytes of strings, and strings that are stored.
    """
    n_entries, _, n_bytes, n_strings = counts
    numbers: dict[str, int] = {}
    new: list[bytes] = []

    def number(string: str) -> int:
        known = numbers.get(string)
        if known is None:
            known = n_strings + len(new)
            new.append(string.encode("utf-8", "surrogatepass"))
            numbers[string] = known
        return known

    # collect rows and values by key and type
    groups: dict[tuple[str, int], tuple[list[int], list[Any]]] = {}
    for at, values in enumerate(metadata, row):
        for key, value in values.items():
            for kind, stored in _entries(value):
                if kind in (STRING, HUGE):
                    stored = number(stored)
                rows, column = groups.setdefault((key, kind), ([], []))
                rows.append(at)
                column.append(stored)
    # write each group as one run of entries
    runs, parts, end = [], [_EMPTY_ARRAYS[_ENTRIES]], n_entries
    for (key, kind), (rows, column) in groups.items():
        bits = np.array(column, np.float64).view(np.int64) if kind == FLOAT else np.array(column, np.int64)
        parts.append(np.stack([np.array(rows, np.int64), bits], axis=1))
        end += len(rows)
        runs.append((number(key), kind, end))
    ends = n_bytes + np.cumsum([*map(len, new)], dtype=np.int64)
    return {
        _ENTRIES: np.concatenate(parts),
        _RUNS: np.array(runs, np.int64).reshape(-1, 3),
        _STRINGS: np.frombuffer(b"".join(new), np.uint8),
        _ENDS: ends,
    }


def has_old_metadata(store: Store) -> bool:
    """Return whether metadata is stored as lines of JSON, as it was before there were columns."""
    return "metadata.jsonl" in store.sizes()


def encode_old_metadata(store: Store) -> Iterator[dict[str, Array]]:
    """Yield the arrays for metadata that is stored as lines of JSON, block by block.

    Raises:
        CorruptError: It cannot be read.
    """
    counts = [0] * len(_EMPTY_ARRAYS)
    ends, lines = store.read("ends.bin")[:, 2], store.read("metadata.jsonl").data
    for start in range(0, len(ends), store.limits.filter_rows):
        stops = ends[start : start + store.limits.filter_rows].tolist()
        starts = [int(ends[start - 1]) if start else 0, *stops[:-1]]
        try:
            metadata = [
                json.loads(bytes(lines[begin:end])) if end > begin else {}
                for begin, end in zip(starts, stops, strict=True)
            ]
            arrays = encode_fields(start, metadata, counts)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise corrupt(store.path, f"its metadata cannot be read ({error!r:.100})") from error
        counts = [count + len(arrays[name]) for count, name in zip(counts, _EMPTY_ARRAYS, strict=True)]
        yield arrays


def _entries(value: JSON) -> Iterator[tuple[int, Any]]:
    """Yield type and value of each element of a value; equal elements once."""
    if not isinstance(value, list):
        yield _entry(value)
        return
    seen = set()
    for kind, stored in map(_entry, value):
        mark = (stored, INT if kind == FLOAT else kind)  # 1 and 1.0 are equal, 1 and true are not
        if mark not in seen:
            seen.add(mark)
            yield kind, stored
    if not value:
        yield EMPTY, 0


def type_of(value: JSON) -> int:
    """Return the type of a value that is an element, or no list."""
    kind = _TYPES[type(value)]
    return HUGE if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63 else kind


def _entry(value: JSON) -> tuple[int, Any]:
    kind = type_of(value)
    if kind == HUGE:
        return kind, str(value)
    return kind, 0 if kind in (NULL, DICT, LIST) else value


def _distinct(numbers: Array, count: int) -> Array:
    """Return the different ones of ``numbers`` below ``count``, in order."""
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
