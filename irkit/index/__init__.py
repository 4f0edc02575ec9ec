"""Indexes: exact and approximate search over representations that are kept in one directory.

The directory of an index::

    irkit.json             the manifest: arrays by name (file, dtype, rows, crc32), free values, its own crc32
    irkit.building.json    the manifest of a build that is not finished; renamed to irkit.json at its end
    irkit.lock             locked by the process that writes
    values.g1.bin ...      the arrays: plain little-endian rows one after the other, only ever appended to
    documents.g4.jsonl     the documents as they came, one JSON object a line (BEIR's corpus.jsonl)
    removed.g8.bin         rows that were removed
    faiss.g9.index         what FAISS built, as FAISS writes it
    codes.g9.bin ...       plaid: centroid, factors and residual of each token; mean of each document
    lists.g9.bin ...       plaid: the documents of each centroid
    segment_a.g9.bin ...   inverted: the lists of some rows
    vocabulary.g2.txt      terms that grow with the documents, a line each: those of BM25 and of impacts
    frequencies.g9.bin     BM25: the number of documents that have each term

A file that the manifest does not name, and bytes after those it names, do not exist for a reader; the
next writer removes them. ``g1`` numbers files in order of creation: a rewritten array is a new file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

from irkit.arguments import shown
from irkit.errors import BadTypeError, BadValueError, ConfigError, StorageError
from irkit.files import explained
from irkit.forking import one_thread_after_fork
from irkit.index.base import Index, StageProgress
from irkit.index.compaction import compact
from irkit.index.config import (
    AutoConfig,
    FaissConfig,
    FlatConfig,
    IndexConfig,
    InvertedConfig,
    MuveraConfig,
    PlaidConfig,
    index_config,
)
from irkit.index.documents import Documents
from irkit.index.flat import Flat
from irkit.index.store import Store
from irkit.index.topk import Hits
from irkit.representation import Representation

__all__ = [
    "AutoConfig",
    "Documents",
    "FaissConfig",
    "Flat",
    "FlatConfig",
    "Hits",
    "Index",
    "IndexConfig",
    "InvertedConfig",
    "MuveraConfig",
    "PlaidConfig",
    "StageProgress",
    "Store",
    "check_index",
    "compact",
    "create_index",
    "index_config",
    "open_index",
]


def check_index(config: IndexConfig, representation: Representation) -> None:
    """Refuse an index that cannot hold such representations, before work is done for it.

    Args:
        config: What is to be built.
        representation: Of the kind and width to come; may be empty.

    Raises:
        ConfigError: It cannot be built, such as a factory string that FAISS does not know.
        BadValueError: It is for representations of another kind.
    """
    if isinstance(config, AutoConfig):
        config = config.choose(representation.kind, config.documents)
    with (
        explained("checking an index", "set TMPDIR to a folder that can be written"),
        tempfile.TemporaryDirectory() as folder,
        Store.build(folder) as store,
    ):
        create_index(store, config).add(representation)


def create_index(store: Store, config: str | Mapping[str, Any] | IndexConfig = "flat") -> Index:
    """An empty index in a store that is being built, or the one that a resumed build has begun.

    Args:
        store: From `Store.build`.
        config: A configuration or its short name, see `index_config`.

    Raises:
        ConfigError: There is no such index.
        BadValueError: The resumed build is of another index.

    Examples:
        >>> import tempfile, torch
        >>> from irkit import Dense
        >>> with Store.build(tempfile.mkdtemp()) as store:
        ...     index = create_index(store, "flat")
        ...     rows = index.add(Dense(torch.eye(3)))
        ...     index.finish()
        ...     store.publish()
        >>> index.search(Dense(torch.eye(3)[:1]), k=1).rows.tolist()
        [[0]]
    """
    chosen = index_config(config)
    if isinstance(chosen, AutoConfig):
        raise ConfigError(
            "index 'auto' depends on the documents, which `Retriever.build` counts; name an index here"
        )
    if not isinstance(store, Store):
        raise BadTypeError(
            f"creating an index: got {shown(store)}; expected a Store, such as Store.build(path)"
        )
    one_thread_after_fork()  # a build goes on to train
    saved = chosen.model_dump(mode="json")
    with store.update():
        begun = store.meta.setdefault("index", {"config": saved, "representation": None, "dim": 0, "rows": 0})
        if begun["config"] != saved:
            raise BadValueError(
                f"index {store.path}: the build that is resumed is of {begun['config']}, not of {saved}; "
                "give them different keys"
            )
    return open_index(store)


def open_index(store: Store) -> Index:
    """The index of a store.

    Raises:
        StorageError: There is none in it.
        ConfigError: Its configuration is of another version of irkit.
    """
    if not isinstance(store, Store):
        raise BadTypeError(
            f"opening an index: got {shown(store)}; expected a Store, such as Store.open(path)"
        )
    if "index" not in store.meta:
        raise StorageError(f"index {store.path}: the directory has no index in it; build one first")
    try:
        config = index_config(store.meta["index"]["config"])
    except ConfigError as error:
        raise ConfigError(
            f"opening index {store.path}: {error}; the version of irkit that wrote it opens it"
        ) from error
    if isinstance(config, FaissConfig):
        from irkit.index.faiss import Faiss  # imports FAISS: a second, where it is not needed

        return Faiss(store, config)
    if isinstance(config, PlaidConfig):
        from irkit.index.plaid import Plaid

        return Plaid(store, config)
    if isinstance(config, MuveraConfig):
        from irkit.index.muvera import Muvera

        return Muvera(store, config)
    if isinstance(config, InvertedConfig):
        from irkit.index.inverted import Inverted

        return Inverted(store, config)
    if isinstance(config, FlatConfig) and config.dtype == "int8":
        from irkit.index.flat_int8 import FlatInt8

        return FlatInt8(store, config)
    return Flat(store, config)
