"""Documents in windows in several shards: the windows of all are one `ShardedIndex`, and so one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from irkit.core.representation import Representation
from irkit.index import Index, WindowedIndex
from irkit.index.array_files import Array
from irkit.index.index_base import as_rows
from irkit.index.layout import element_positions
from irkit.index.state import snapshot
from irkit.index.windowed import window_counts
from irkit.shards.placement import placement
from irkit.shards.sharded_documents import ShardedDocuments
from irkit.shards.sharded_index import ShardedIndex, add_rows, new_routes, note_rows, shard_facts


class ShardedWindows(WindowedIndex):
    """Documents in windows in all shards, with the interface of `WindowedIndex`; rows are global ones.

    Each shard is a `WindowedIndex`. The windows of all shards are numbered in the order of their documents,
    as in one index (see `irkit.shards.placement.number_windows`), and a `ShardedIndex` finds them. So a
    search is that of one index.

    Attributes:
        parts: Indexes of the shards.
    """

    inner: ShardedIndex

    def __init__(self, inner: ShardedIndex, documents: ShardedDocuments) -> None:
        """Use `open_parts`; ``inner`` is the index of the windows of all shards."""
        assert inner.cut is not None
        self.parts, self._documents = inner.cut, documents
        super().__init__(inner.store, inner, self.parts[0].windows)

    def __len__(self) -> int:
        """Return the number of global rows, including rows of removed documents."""
        return len(self._documents)

    @property
    @snapshot
    def live(self) -> Array:
        """Return ``(len(self),)`` bool, True for the global rows of documents that are not removed."""
        return self._documents._live()

    def add_windows(self, representation: Representation, spans: Sequence[Array]) -> range:
        """Add windows of the documents that were added last, see `WindowedIndex.add_windows`."""
        counts = window_counts(representation, spans)
        ends = np.cumsum(counts)
        with self.store.update():
            self._check("adding documents", representation)
            routes = new_routes(self._documents, self.parts, len(spans))
            for part, positions in zip(self.parts, routes, strict=True):
                windows = element_positions(ends[positions], counts[positions])
                own = [spans[position] for position in positions.tolist()]
                add_rows(part, representation[windows], spans=own)
            note_rows(self.store, len(self))
            return range(len(self) - len(spans), len(self))

    def copy(self, source: Index, rows: Array) -> None:
        """Not called: `irkit.shards.reshard` copies documents into the shards."""
        raise NotImplementedError

    def remove(self, rows: Sequence[int] | Array) -> int:
        """Exclude global rows from all later searches, see `Index.remove`."""
        with self.store.update():
            chosen = np.unique(as_rows("removing documents", rows, len(self)))
            split = placement(self.store).split(chosen)
            return sum(self.parts[number].remove(own) for number, _, own in split)

    def window_scores(self, queries: Representation, rows: Array) -> tuple[Any, Array, Array]:
        """Score the windows of documents, see `WindowedIndex.window_scores`."""
        known = rows >= 0  # and not a number that no document has
        known[known] = self._windows_of(rows[known])[1] > 0
        return super().window_scores(queries, np.where(known, rows, -1))

    @snapshot
    def stats(self) -> dict[str, Any]:
        """Return what `WindowedIndex.stats` returns, and the number of shards."""
        return super().stats() | shard_facts(self.parts, int(self.live.sum()))

    def _ends(self) -> Array:
        return self.inner.windows_of_all.ends

    def _owners(self) -> Array:
        return self.inner.windows_of_all.owners

    def _spans(self, windows: Array) -> Array:
        spans = np.empty((len(windows), 2), np.int64)
        for number, positions, own in self.inner.placement.split(windows):
            spans[positions] = self.parts[number]._spans(own)
        return spans
