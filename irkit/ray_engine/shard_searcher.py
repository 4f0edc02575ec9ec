"""What an actor of Ray does in a search: it maps the files of shards, and searches them."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from irkit.core.representation import Representation, representation_from_arrays
from irkit.index import Index, Store, open_index
from irkit.index.array_files import Array
from irkit.index.several_index import index_parts
from irkit.index.windowed import index_of_rows
from irkit.shards import ShardedStore, open_parts, open_store

_STATES = 8  # of a shard that an actor can show


class ShardSearcher:
    """Searches one or several shards, all their representations; an actor of Ray has one.

    It can search all shards, too, for a share of the queries of a batch. It opens them when it first does.
    """

    def __init__(self, paths: Sequence[str], whole: str) -> None:
        """Open the shards at ``paths``; ``whole`` is the directory of the index."""
        self._parts, self._path = [_Part(path) for path in paths], whole
        self._settings: dict[str, bytes] = {}  # by representation
        self._whole: _Whole | None = None

    def search(self, settings: bytes, queries: bytes, parts: bytes) -> bytes:
        """Search all shards.

        Args:
            settings: Pickled ``(config, formula)`` of the search, see `irkit.index.StoredRows`.
            queries: Pickled name of the representation, see `irkit.index.several_index.index_parts`; function
                of a shard, queries as ``(kind, dim, arrays)``, and further arguments of the function, see
                `ShardedIndex.ask`.
            parts: Pickled list: for each shard the checksum of the manifest of one of its last states, and
                packed bits of the rows that may be results, or None for all.

        Returns:
            Pickled list: for each shard what the function returns, or None for a state that this actor cannot
            show.
        """
        name, work, content, arguments = pickle.loads(queries)
        if settings != self._settings.get(name):
            _set_up([part.indexes[name] for part in self._parts], settings)
            self._settings[name] = settings
        rows = representation_from_arrays(*content)
        asked = zip(self._parts, pickle.loads(parts), strict=True)
        found = [part.search(state, name, work, rows, mask, arguments) for part, (state, mask) in asked]
        return pickle.dumps(found, pickle.HIGHEST_PROTOCOL)

    def search_all(self, settings: bytes, view: bytes, queries: bytes) -> bytes | None:
        """Search all shards as one process does.

        Args:
            settings: As for `search`.
            view: Pickled result of `states_of` for the whole and its shards, and packed bits of the global
                rows that may be results, or None for all.
            queries: Pickled name of the representation, queries, and number of hits.

        Returns:
            Pickled global rows and scores; None for a state that this actor cannot show.
        """
        if self._whole is None:
            self._whole = _Whole(self._path)
        states, mask = pickle.loads(view)
        name, content, k = pickle.loads(queries)
        _set_up([self._whole.indexes[name]], settings)
        hits = self._whole.search(states, name, representation_from_arrays(*content), k, mask)
        return None if hits is None else pickle.dumps(hits, pickle.HIGHEST_PROTOCOL)


def _set_up(indexes: Sequence[Any], settings: bytes) -> None:
    """Give indexes the pickled ``(config, formula)`` of a search."""
    config, formula = pickle.loads(settings)
    for index in indexes:
        if index.formula != formula:
            index.formula = formula
        if index.config != config:
            index.config = config


def _indexes(index: Index) -> dict[str, Any]:
    """Return the index of the rows of each representation by name."""
    return {name: index_of_rows(part) for name, part in index_parts(index).items()}


def _bits(mask: bytes | None, count: int) -> Array | None:
    """Return packed bits as bool ``(count,)``."""
    return None if mask is None else np.unpackbits(np.frombuffer(mask, np.uint8), count=count).view(bool)


def states_of(stores: Iterable[Store]) -> list[int]:
    """Return the checksum of the manifest of each store, which tells its state."""
    return [zlib.crc32(store.state.saved) for store in stores]


class _Whole:
    """All shards, in their newest state."""

    def __init__(self, path: str) -> None:
        store = open_store(path, verify=False)
        assert isinstance(store, ShardedStore)
        self.store, self.indexes = store, _indexes(open_parts(store)[0])

    def search(
        self, states: Sequence[int], name: str, queries: Representation, k: int, mask: bytes | None
    ) -> tuple[Array, Array] | None:
        for is_new in (False, True):
            if is_new:
                self.store.refresh()
            with self.store.snapshot():
                if states_of([self.store, *self.store.parts]) == states:
                    index = self.indexes[name]
                    hits = index.search(queries, k, _bits(mask, len(index)))
                    return hits.rows, hits.scores
        return None


class _Part:
    """A shard that an actor searches, in its latest states."""

    def __init__(self, path: str) -> None:
        self.store = Store.open(path, verify=False)
        self.indexes = _indexes(open_index(self.store))
        newest = self.store.committed
        self._states: dict[int, Any] = {zlib.crc32(newest.saved): newest}

    def search(
        self,
        state: int,
        name: str,
        work: Callable[..., Any],
        queries: Representation,
        mask: bytes | None,
        arguments: Sequence[Any],
    ) -> Any:
        if state not in self._states:
            self.store.refresh()
            newest = self.store.committed
            self._states[zlib.crc32(newest.saved)] = newest
            while len(self._states) > _STATES:
                del self._states[next(iter(self._states))]
        if state not in self._states:
            return None
        index = self.indexes[name]
        with self.store.snapshot(self._states[state]):
            return work(index, queries, _bits(mask, len(index)), *arguments)
