"""Encode metadata as the arrays of `irkit.index.fields`: entries, runs and strings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np

from irkit.data.document import JSON
from irkit.index.array_files import Array, corrupt
from irkit.index.store import Store

EMPTY, NULL, BOOL, INT, FLOAT, HUGE, STRING, DICT, LIST = range(9)
"""Types of entries. EMPTY stands for an empty list; dictionaries and lists in a list have no value."""

ENTRIES, RUNS, STRINGS, ENDS = "field_entries.bin", "field_runs.bin", "field_strings.bin", "field_ends.bin"
EMPTY_ARRAYS: dict[str, Array] = {
    ENTRIES: np.empty((0, 2), np.int64),
    RUNS: np.empty((0, 3), np.int64),
    STRINGS: np.empty(0, np.uint8),
    ENDS: np.empty(0, np.int64),
}
_TYPES = {NoneType: NULL, bool: BOOL, int: INT, float: FLOAT, str: STRING, dict: DICT, list: LIST}


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
    runs, parts, end = [], [EMPTY_ARRAYS[ENTRIES]], n_entries
    for (key, kind), (rows, column) in groups.items():
        bits = np.array(column, np.float64).view(np.int64) if kind == FLOAT else np.array(column, np.int64)
        parts.append(np.stack([np.array(rows, np.int64), bits], axis=1))
        end += len(rows)
        runs.append((number(key), kind, end))
    ends = n_bytes + np.cumsum([*map(len, new)], dtype=np.int64)
    return {
        ENTRIES: np.concatenate(parts),
        RUNS: np.array(runs, np.int64).reshape(-1, 3),
        STRINGS: np.frombuffer(b"".join(new), np.uint8),
        ENDS: ends,
    }


def has_old_metadata(store: Store) -> bool:
    """Return whether metadata is stored as lines of JSON, as it was before there were columns."""
    return "metadata.jsonl" in store.sizes()


def encode_old_metadata(store: Store) -> Iterator[dict[str, Array]]:
    """Yield the arrays for metadata that is stored as lines of JSON, block by block.

    Raises:
        CorruptError: It cannot be read.
    """
    counts = [0] * len(EMPTY_ARRAYS)
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
        counts = [count + len(arrays[name]) for count, name in zip(counts, EMPTY_ARRAYS, strict=True)]
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
