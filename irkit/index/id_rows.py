"""Rows by the hashes of their ids: a sorted table of most rows on the disk, and sorted runs in memory.

``hashes.bin`` has the hash of each row. `sort_hashes` writes ``sorted_hashes.bin``, all hashes in order, and
``sorted_rows.bin``, their rows. A look-up reads a few pages of these. Rows that were added since are sorted
in memory, as runs whose lengths fall geometrically.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from irkit.index.array_files import Array, corrupt
from irkit.index.layout import element_positions
from irkit.index.store import Store

Run: TypeAlias = tuple[Array, Array]  # sorted hashes, and their rows

_HASHES, _SORTED, _ROWS = "hashes.bin", "sorted_hashes.bin", "sorted_rows.bin"


def find_hashes(store: Store, keys: Array) -> tuple[Array, Array]:
    """Return pairs of a position in ``keys (n,)`` and a row whose id has this hash.

    A key has several rows if an id was removed and added again, or if two ids have the same hash.

    Raises:
        CorruptError: The table has rows that are not there.
    """
    runs = store.extended("hashes", [_HASHES, _SORTED], lambda before: _sort_new(store, before or []))
    if store.rows(_SORTED):
        runs = [(store.read(_SORTED), store.read(_ROWS)), *runs]
    numbers, rows = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for hashes, order in runs:
        first, last = np.searchsorted(hashes, keys, "left"), np.searchsorted(hashes, keys, "right")
        counts = last - first
        numbers.append(np.repeat(np.arange(len(keys)), counts))
        rows.append(order[element_positions(last, counts)].astype(np.int64))
    result = np.concatenate(rows)
    if result.max(initial=-1) >= store.rows(_HASHES):
        raise corrupt(store.path, f"{_ROWS} has rows that are not there")
    return np.concatenate(numbers), result


def sort_hashes(store: Store) -> None:
    """Rewrite the table if it lacks many rows; call this inside ``store.update()``."""
    hashes, covered = store.read(_HASHES), store.rows(_SORTED)
    if len(hashes) - covered <= max(store.limits.unsorted, covered // 8):
        return
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    for name, array in ((_SORTED, ordered), (_ROWS, order.astype(np.uint32))):
        store.drop(name)
        store.append(name, array)


def _sort_new(store: Store, before: list[Run]) -> list[Run]:
    """Return sorted runs of the rows that are not in the table; long earlier runs are kept."""
    start = store.rows(_SORTED) + sum(len(hashes) for hashes, _ in before)
    new = store.read(_HASHES)[start:] if store.rows(_HASHES) else np.empty(0, np.uint64)
    runs = [*before, _sorted(new, np.arange(start, start + len(new)))] if len(new) else before
    while len(runs) > 1 and len(runs[-2][0]) < 2 * len(runs[-1][0]):
        merged = _sorted(*(np.concatenate(pair) for pair in zip(*runs[-2:], strict=True)))
        runs = [*runs[:-2], merged]
    return runs


def _sorted(hashes: Array, rows: Array) -> Run:
    order = np.argsort(hashes, kind="stable")
    return hashes[order], rows[order]
