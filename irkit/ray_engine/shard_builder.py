"""Build a shard: encoded documents are stored as they come, and each only once, whatever dies meanwhile.

Portions come as pickles of actors; unpickling them trusts the actors of this cluster as Ray does.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from irkit.core.representation import Representation, Sparse, representation_from_arrays
from irkit.data import Document
from irkit.encoder_free import renumbered
from irkit.errors import LockedError
from irkit.index import Documents, Limits, Store, open_index
from irkit.index.array_files import Array
from irkit.index.documents import as_stored, removal_list
from irkit.index.several_index import index_parts
from irkit.index.windowed import index_of_rows
from irkit.shards.codecs import Work, finish_part
from irkit.shards.placement import SEQUENCE
from irkit.shards.sharded_documents import add_numbered
from irkit.shards.sharded_index import add_rows
from irkit.shards.sharded_store import BUILT, VOCABULARY, other_documents

_PATIENCE = 30.0  # seconds to wait for the builder of a build whose driver has just been killed
_PAUSE = 0.1


@dataclass(frozen=True)
class Portion:
    """What a shard gets of a chunk of documents.

    Attributes:
        content: What `pack` returned.
        before: Documents of the shard that come before the chunk.
        start: Documents of the whole that come before the chunk.
        stop: Documents of the whole up to the end of the chunk.
        change: Number of the change of the whole that adds the chunk.
        terms: ``(offset, bytes)``: terms from an offset of the vocabulary of the whole on; None for models
            whose terms do not grow.
        numbers: ``(n,)`` numbers of the terms of the chunk in the whole.
        dim: Number of terms of the whole after the chunk.
    """

    content: bytes
    before: int
    start: int
    stop: int
    change: int
    terms: tuple[int, bytes] | None = None
    numbers: Array | None = None
    dim: int = 0


def pack(
    documents: list[Document], positions: Array, rows: Representation, spans: list[Array] | None
) -> bytes:
    """Write what a shard gets of a chunk as bytes.

    Args:
        documents: Documents of the shard.
        positions: Their positions ``(n,)`` in the chunk.
        rows: A row for each document, or for each of its windows.
        spans: For documents in windows, see `irkit.index.WindowedIndex.add_windows`.
    """
    records = [(item.id, item.text, item.title, item.metadata) for item in documents]
    content = records, positions, (rows.kind, rows.dim, rows.arrays()), spans
    return pickle.dumps(content, pickle.HIGHEST_PROTOCOL)


class ShardBuilder:
    """Builds a shard; an actor of Ray has one.

    Each call commits. A call that comes again, because its actor died, stores only what is missing.
    """

    def __init__(self, path: Path, limits: Limits) -> None:
        """Open the shard, which `irkit.shards.ShardedStore.build` has begun."""
        self.store = Store.open(path, verify=False)
        self.store.limits = limits
        self.index, self.documents = open_index(self.store), Documents(self.store)

    def add(self, portions: list[Portion]) -> int:
        """Store portions in one commit; return the number of documents of the whole index up to their end."""
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                with self.store.update():
                    for portion in portions:
                        self._add(portion)
                return portions[-1].stop
            except LockedError:
                if time.monotonic() > end:
                    raise
                time.sleep(_PAUSE)

    def _add(self, portion: Portion) -> None:
        records, positions, stored, spans = pickle.loads(portion.content)
        documents, rows = [Document(*record) for record in records], representation_from_arrays(*stored)
        # what is there already
        have = self.store.rows(SEQUENCE)
        skipped = min(len(documents), max(0, have - portion.before))
        numbers, known = portion.start + positions, np.arange(portion.before, portion.before + skipped)
        if have < portion.before or (
            skipped
            and (
                not np.array_equal(self.store.read(SEQUENCE)[known], numbers[:skipped])
                or self.documents.fetch(known) != [*map(as_stored, documents[:skipped])]
            )
        ):
            raise other_documents(self.store.path.parent)
        # what is new
        new = b""
        if portion.terms is not None:
            offset, text = portion.terms
            new = text[max(0, self.store.rows(VOCABULARY) - offset) :]
            assert isinstance(rows, Sparse)
            assert portion.numbers is not None
            rows = renumbered(rows, portion.numbers, portion.dim)
        if skipped < len(documents) or len(new) or not have or rows.dim > self.index.dim:
            counts = [have, self.store.rows(removal_list(self.store))]
            add_numbered(self.documents, documents[skipped:], numbers[skipped:])
            first = skipped if spans is None else sum(map(len, spans[:skipped]))  # row of the first new one
            add_rows(self.index, rows[first:], new, None if spans is None else spans[skipped:])
            self.store.meta.update({"change": portion.change, "before": counts})
        self.store.meta[BUILT] = max(portion.stop, self.store.meta.get(BUILT, 0))

    def finish(self, name: str, work: Work) -> None:
        """Build the structure of one of `index_parts`, see `irkit.shards.codecs.finish_part`."""
        self.store.refresh()
        finish_part(index_of_rows(index_parts(self.index)[name]), work)

    def finish_documents(self) -> None:
        """Sort ids and metadata, after all structures were built."""
        self.store.refresh()
        self.documents.finish()
        with self.store.update():
            self.store.meta.pop(BUILT, None)
