"""Open the index and the documents of a store, which may be in several shards."""

from __future__ import annotations

from collections.abc import Callable

from irkit.index import Documents, Index, SeveralConfig, SeveralIndex, Store, index_config, open_index
from irkit.index.part_store import PartStore
from irkit.shards.sharded_documents import ShardedDocuments
from irkit.shards.sharded_index import ShardedIndex
from irkit.shards.sharded_store import ShardedStore
from irkit.shards.sharded_windows import ShardedWindows


def open_parts(store: Store) -> tuple[Index, Documents]:
    """Return the index and the documents of a store, which may be in several shards."""
    if isinstance(store, ShardedStore):
        documents = ShardedDocuments(store)
        return open_sharded(store, documents), documents
    return open_index(store), Documents(store)


def open_sharded(
    store: ShardedStore,
    documents: ShardedDocuments,
    make: Callable[[Store, ShardedDocuments], ShardedIndex] = ShardedIndex,
) -> Index:
    """Return the index of a store: a `ShardedIndex`, or a `SeveralIndex` of one for each representation.

    If documents are in windows, it is a `ShardedWindows` over a `ShardedIndex`.

    Args:
        store: The store.
        documents: Its documents.
        make: Makes the `ShardedIndex` of a store, or of the `PartStore` of a representation.
    """

    def open_rows(store: Store) -> Index:
        index = make(store, documents)
        return index if index.cut is None else ShardedWindows(index, documents)

    config = index_config(store.meta["index"]["config"])
    if not isinstance(config, SeveralConfig):
        return open_rows(store)
    parts = {name: open_rows(PartStore(store, name)) for name in sorted(config.indexes)}
    return SeveralIndex(store, config, {**parts})
