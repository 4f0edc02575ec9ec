"""What an actor of Ray does in a search: it maps the files of shards, and searches them."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from irkit.core.representation import Representation, representation_from_arrays
from irkit.index import Store, open_index
from irkit.index.several_index import index_parts
from irkit.index.windowed import index_of_rows

_STATES = 8  # of a shard that an actor can show


class ShardSearcher:
    """Searches one or several shards, all their representations; an actor of Ray has one."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._parts = [_Part(path) for path in paths]
        self._settings: dict[str, bytes] = {}  # by representation

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
            config, formula = pickle.loads(settings)
            for index in [part.indexes[name] for part in self._parts]:
                if index.formula != formula:
                    index.formula = formula
                if index.config != config:
                    index.config = config
            self._settings[name] = settings
        rows = representation_from_arrays(*content)
        asked = zip(self._parts, pickle.loads(parts), strict=True)
        found = [part.search(state, name, work, rows, mask, arguments) for part, (state, mask) in asked]
        return pickle.dumps(found, pickle.HIGHEST_PROTOCOL)


class _Part:
    """A shard that an actor searches, in its latest states."""

    def __init__(self, path: str) -> None:
        self.store = Store.open(path, verify=False)
        parts = index_parts(open_index(self.store))
        self.indexes: dict[str, Any] = {name: index_of_rows(part) for name, part in parts.items()}
        self._states: dict[int, Any] = {}

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
            bits = None if mask is None else np.frombuffer(mask, np.uint8)
            allowed = None if bits is None else np.unpackbits(bits, count=len(index)).view(bool)
            return work(index, queries, allowed, *arguments)
