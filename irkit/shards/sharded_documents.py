"""Ids, texts and metadata of an index in several shards, by global row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from irkit.data.document import Document
from irkit.errors import BadTypeError
from irkit.index import Documents
from irkit.index.array_files import Array
from irkit.index.documents import as_stored, removal_list
from irkit.index.facets import Counts
from irkit.index.index_base import live_rows, row_list
from irkit.index.state import snapshot
from irkit.shards.placement import SEQUENCE, check_count, global_rows, placement, row_count, shard_of
from irkit.shards.sharded_store import ShardedStore, other_documents


class ShardedDocuments(Documents):
    """Documents of all shards, with the interface of `Documents`.

    Whoever repeats an addition that was interrupted adds what is missing: a document that the interrupted
    change has stored, and that is given with the same text and metadata, is skipped.

    Attributes:
        parts: Documents of the shards.
        routes: Positions of the documents of the last `add` that each shard has stored.
    """

    store: ShardedStore

    def __init__(self, store: ShardedStore) -> None:
        super().__init__(store)
        self.parts = [Documents(part) for part in store.parts]
        self.routes: list[Array] = []

    def __len__(self) -> int:
        """Number of global rows ever assigned, removed ones included."""
        announced: int = self.store.meta.get("documents", 0)
        if self.store.building:
            return announced
        check_count(self.store, announced)
        return max(announced, row_count(self.store))

    def add(self, documents: Iterable[Document]) -> range:
        """Add documents, all at once, each to its shard; see `Documents.add`.

        Raises:
            OtherDocumentsError: A killed build, which this call would resume, was one of other documents.
        """
        items = list(documents)
        with self.store.update():
            start, ids = len(self), [item.id for item in items]
            owners = shard_of(ids, len(self.parts))
            stored = self._stored_before(items, owners)
            self._refuse_duplicates([name for name, known in zip(ids, stored, strict=True) if not known])
            self.routes = []
            for number, part in enumerate(self.parts):
                positions = np.flatnonzero((owners == number) & ~stored)
                self.routes.append(positions)
                add_numbered(part, [items[position] for position in positions.tolist()], start + positions)
            self.store.meta["documents"] = start + len(items)
            return range(start, start + len(items))

    def finish(self) -> None:
        """Sort ids and metadata of each shard, see `Documents.finish`."""
        with self.store.update():
            for part in self.parts:
                part.finish()

    @snapshot
    def find(self, ids: Sequence[str]) -> Array:
        """Return the global rows ``(n,)`` of documents by id; -1 for an id that is unknown or removed.

        Inside an update, also return the row of an id that an interrupted change has removed, so that the
        change can be repeated.
        """
        return self._find(ids, self.store.updating)

    def _find(self, ids: Sequence[str], removed: bool = False) -> Array:
        """Return global rows; with ``removed`` also rows that an interrupted change has removed."""
        result = np.full(len(ids), -1, np.int64)
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence) or not _all_strings(ids):
            self.parts[0].find(ids)  # raises
            raise BadTypeError("documents: ids are not strings in a list")
        owners = shard_of(ids, len(self.parts))
        for number, part in enumerate(self.parts):
            positions = np.flatnonzero(owners == number)
            if len(positions):
                names = [ids[position] for position in positions.tolist()]
                rows = part.find(names)
                if removed:
                    rows = np.maximum(rows, self._removed_before(part, names))
                known = rows >= 0
                result[positions[known]] = global_rows(part.store)[rows[known]]
        return result

    @snapshot
    def taken(self, documents: Sequence[Document]) -> list[str]:
        """Return the ids of those documents that `add` refuses; those that it skips are left out."""
        items = list(documents)
        stored = self._stored_before(items, shard_of([item.id for item in items], len(self.parts)))
        return super().taken([item for item, known in zip(items, stored, strict=True) if not known])

    @snapshot
    def ids(self, rows: Array) -> list[str]:
        """Return the ids of global ``rows (n,)``."""
        return self._collect(rows, lambda part, own: part.ids(own))

    @snapshot
    def fetch(self, rows: Array) -> list[Document]:
        """Return the documents of global ``rows (n,)``, removed ones included."""
        return self._collect(rows, lambda part, own: part.fetch(own))

    @snapshot
    def metadata_keys(self) -> list[str]:
        """Return the keys of the metadata of all documents, removed ones included, in order."""
        return sorted({key for part in self.parts for key in part.metadata_keys()})

    def _collect(self, rows: Array, read: Any) -> list[Any]:
        """Return what ``read`` returns of each row, in order of ``rows``."""
        chosen = row_list("documents", rows, row_count(self.store))
        result: list[Any] = [None] * len(chosen)
        for number, positions, own in placement(self.store).split(chosen):
            for position, item in zip(positions.tolist(), read(self.parts[number], own), strict=True):
                result[position] = item
        return result

    def _live(self) -> Array:
        live = np.zeros(len(self), np.bool_)
        for part in self.store.parts:
            rows = global_rows(part)
            inside = rows < len(live)  # a resumed build may have more
            live[rows[inside]] = live_rows(part, len(rows), removal_list(part))[inside]
        return live

    def _matching(self, where: Mapping[str, Any]) -> Array:
        matching = np.zeros(len(self), np.bool_)
        for part in self.parts:
            matching[global_rows(part.store)] = part._matching(where)
        return matching

    def _types(self, key: str) -> set[int]:
        return {kind for part in self.parts for kind in part._types(key)}

    def _first_row(self, key: str, kind: int) -> int:
        return min(
            int(global_rows(part.store)[part._first_row(key, kind)])
            for part in self.parts
            if kind in part._types(key)
        )

    def _example(self, key: str, kind: int) -> Any:
        part = next(part for part in self.parts if kind in part._types(key))
        return part._example(key, kind)

    def _count_values(self, key: str, counted: Array, k: int | None, numbers: Array | None = None) -> Counts:
        totals: Counts = {}
        for part in self.parts:
            rows = global_rows(part.store)
            for value, (count, first) in part._count_values(key, counted[rows], None, rows).items():
                total = totals.setdefault(value, [0, first])
                total[0], total[1] = total[0] + count, min(total[1], first)
        return totals

    # ---- what an interrupted change has left ----

    def _stored_before(self, items: list[Document], owners: Array) -> Array:
        """Return ``(n,)`` bool: documents that an interrupted change has stored with the same content."""
        stored = np.zeros(len(items), np.bool_)
        for number, part in enumerate(self.parts):
            before = self.store.ahead(part.store)
            if before is None:
                continue
            positions = np.flatnonzero(owners == number)
            rows = part.find([items[position].id for position in positions.tolist()])
            new = rows >= before[0]
            known = part.fetch(rows[new])
            for position, document in zip(positions[new].tolist(), known, strict=True):
                stored[position] = document == as_stored(items[position])
            if self.store.building:  # a resumed build has the same documents in the same places
                places = global_rows(part.store)[before[0] :] - len(self)
                if not np.array_equal(places[places < len(items)], positions[stored[positions]]):
                    raise other_documents(self.store.path)
        return stored

    def _removed_before(self, part: Documents, names: list[str]) -> Array:
        """Return the rows of ids that an interrupted change has removed; -1 for other ids."""
        rows, before = np.full(len(names), -1, np.int64), self.store.ahead(part.store)
        name = removal_list(part.store)
        if before is not None and part.store.rows(name) > before[1]:
            gone = part.store.read(name)[before[1] :]
            known = dict(zip(part.ids(gone), gone.tolist(), strict=True))
            rows[:] = [known.get(name, -1) for name in names]
        return rows


def add_numbered(part: Documents, documents: list[Document], numbers: Array) -> None:
    """Add documents to a shard, and their numbers ``(n,)`` in the whole, inside ``update``."""
    if documents or not part.store.rows(SEQUENCE):
        part.add(documents)
        part.store.append(SEQUENCE, numbers)


def _all_strings(ids: Sequence[Any]) -> bool:
    return all(isinstance(name, str) for name in ids)
