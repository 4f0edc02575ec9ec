"""Which row of which shard each document is, and which shard each id belongs to."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from irkit.index.array_files import Array, corrupt
from irkit.index.layout import element_positions
from irkit.index.part_store import PartStore
from irkit.index.store import Store
from irkit.index.topk import Hits, TopK
from irkit.index.windowed import WindowedIndex

SEQUENCE = "sequence.bin"
_CHANCE = 3  # standard deviations
_MOST = 1 << 32  # rows: `irkit.index.topk` has 32 bits for them
_MOST_MISSING = (
    1 << 24
)  # numbers that no row has, because a change was interrupted; 7 times the rows may be, too


class Placement(NamedTuple):
    """Where global rows are.

    Attributes:
        shards: ``(n,)`` int16, the shard of each global row; -1 for a number that no document has.
        rows: ``(n,)`` int64, its row there.
    """

    shards: Array
    rows: Array

    def split(self, rows: Array) -> list[tuple[int, Array, Array]]:
        """Return shard, positions in ``rows (n,)`` and rows there, for each shard that has some of them."""
        owners = self.shards[rows]
        parts = []
        for shard in np.unique(owners[owners >= 0]).tolist():
            positions = np.flatnonzero(owners == shard)
            parts.append((shard, positions, self.rows[rows[positions]]))
        return parts


def shard_of(ids: Sequence[str], count: int) -> Array:
    """Return the shard of each id: its 64-bit BLAKE2 hash, modulo the number of shards."""
    hashes = (hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest() for name in ids)
    numbers: Array = (np.frombuffer(b"".join(hashes), "<u8") % count).astype(np.int64)
    return numbers


def chance(count: int, share: float) -> float:
    """Return what chance may add to the part of ``count`` documents that a shard has.

    Ids are on shards by chance (`shard_of`), so a shard with a ``share`` of all documents has about
    ``count * share`` of those that are best for a query. It has more than this result beyond that for about
    one query in a thousand.
    """
    return _CHANCE * math.sqrt(count * share * (1 - share)) + 1


def most_of(count: int, share: float) -> int:
    """Return how many of ``count`` documents a shard with a ``share`` of all may have, see `chance`."""
    return min(count, math.ceil(count * share + chance(count, share)))


def global_rows(part: Store) -> Array:
    """Return ``(n,)`` the global row of each row of a shard.

    Raises:
        CorruptError: There is a number that no row has.
    """
    if not part.rows(SEQUENCE):
        return np.empty(0, np.int64)
    rows = part.read(SEQUENCE)

    def check() -> None:
        if not 0 <= rows.min() <= rows.max() < _MOST:
            raise corrupt(part.path, f"its rows are numbered from {rows.min()} to {rows.max()}")

    part.once(SEQUENCE, check)
    return rows


def in_order(part: Store) -> bool:
    """Return whether the rows of a shard are in order of addition, as they are unless it was resharded."""
    return part.derived("in order", lambda: bool((np.diff(global_rows(part)) > 0).all()))


def ordered_hits(part: Store, n: int, k: int, find: Callable[[int], Hits]) -> Hits:
    """Return hits among which are the best ``k`` by global row of equal scores.

    Args:
        part: Store of a shard.
        n: Its number of rows.
        k: Number of hits.
        find: Function that takes a number of hits and returns the best ones. Among equal scores, lower rows
            of the shard come first.
    """
    hits, width = find(k), k
    while width < n and not in_order(part):
        tied = (hits.rows[:, -1] >= 0) & (hits.scores[:, -1] == hits.scores[:, k - 1])
        if not tied.any():
            break
        width = min(2 * width, n)
        hits = find(width)
    return hits


def push_hits(best: TopK, numbers: Array, hits: Hits) -> None:
    """Push hits of a shard by the global rows ``numbers (n,)`` of its rows."""
    if len(numbers):
        best.push_pairs(hits.scores, np.where(hits.rows < 0, -1, numbers[hits.rows]))


def wants_gpu(index: Any) -> bool:
    """Return whether the configuration of an index allows a GPU, and there is one."""
    return getattr(index.config, "device", "cpu") != "cpu" and torch.cuda.is_available()


def check_count(store: Store, n: int) -> None:
    """Refuse far more global rows than shards have, because arrays of all global rows are made.

    Raises:
        CorruptError: ``n`` is such a number.
    """
    stored = sum(part.rows(SEQUENCE) for part in store.parts)
    if n > 8 * stored + _MOST_MISSING:
        raise corrupt(store.path, f"{n:,} documents are numbered, and its shards have {stored:,}")


def row_count(store: Store) -> int:
    """Return the number of global rows that shards have, rows of removed documents included."""
    store = _whole(store)

    def count() -> int:
        n = max((int(global_rows(part).max(initial=-1)) + 1 for part in store.parts), default=0)
        check_count(store, n)
        return n

    return store.derived(("rows", *(part.version for part in store.parts)), count)


def placement(store: Store) -> Placement:
    """Return where the global rows of all shards are.

    Raises:
        CorruptError: Two rows have the same number.
    """
    store = _whole(store)

    def make() -> Placement:
        n = row_count(store)
        shards, rows = np.full(n, -1, np.int16), np.zeros(n, np.int64)
        for number, part in enumerate(store.parts):
            own = global_rows(part)
            if (shards[own] >= 0).any() or len(np.unique(own)) < len(own):
                raise corrupt(part.path, "another shard has a document with the same number")
            shards[own], rows[own] = number, np.arange(len(own))
        return Placement(shards, rows)

    return store.derived(("placement", *(part.version for part in store.parts)), make)


class WindowNumbers(NamedTuple):
    """The windows of all shards, numbered document by document in the order of the global rows of documents.

    Attributes:
        ends: ``(n,)`` for each global row of documents, the number after its last window.
        owners: ``(m,)`` the document of each window.
        numbers: For each shard the number of each of its windows.
        placement: Where the windows are.
    """

    ends: Array
    owners: Array
    numbers: list[Array]
    placement: Placement


def number_windows(store: Store, n: int, parts: Sequence[WindowedIndex]) -> WindowNumbers:
    """Number the windows of all shards; the heads of a model have the same windows.

    Args:
        store: The whole.
        n: Number of global rows of documents.
        parts: Indexes of the shards.
    """
    store = _whole(store)

    def make() -> WindowNumbers:
        placement(store)  # checks that no two documents have the same row
        counts = [np.diff(part._ends(), prepend=0) for part in parts]
        rows = [global_rows(part.store)[: len(part)] for part in parts]
        total = np.zeros(n, np.int64)
        for own, own_counts in zip(rows, counts, strict=True):
            total[own] = own_counts
        ends = np.cumsum(total)
        numbers = [
            element_positions(ends[own], own_counts) for own, own_counts in zip(rows, counts, strict=True)
        ]
        where = Placement(np.empty(total.sum(), np.int16), np.empty(total.sum(), np.int64))
        for shard, own in enumerate(numbers):
            where.shards[own], where.rows[own] = shard, np.arange(len(own))
        return WindowNumbers(ends, np.repeat(np.arange(n), total), numbers, where)

    return store.derived(("windows", n, *(part.store.version for part in parts)), make)


def _whole(store: Store) -> Store:
    """Return the store whose rows all representations have, so that their placement is computed once."""
    return store.whole if isinstance(store, PartStore) else store
