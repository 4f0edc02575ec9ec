"""Create, open, check and compact the index in a store; classes are imported when they are needed."""

from __future__ import annotations

import importlib
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from irkit.core.representation import Representation, Several
from irkit.errors import BadValueError, ConfigError, StorageError
from irkit.index.array_files import corrupt
from irkit.index.bm25_index import begin_as
from irkit.index.documents import Documents
from irkit.index.index_base import Index, StageProgress
from irkit.index.index_kinds import INDEX_KINDS, SeveralConfig, index_config
from irkit.index.index_settings import AutoConfig, IndexConfig, WindowsConfig
from irkit.index.part_store import PartStore
from irkit.index.store import Store, check_store
from irkit.index.term_ids import Vocabulary
from irkit.index.windowed import WindowedIndex
from irkit.utils.atomic import explained
from irkit.utils.forking import one_thread_after_fork


def check_index(config: IndexConfig, representation: Representation) -> None:
    """Check that an index can hold such representations, before work is done for it.

    Args:
        config: The index that is to be built.
        representation: Example of the kind and dimensions to come; may be empty.

    Raises:
        ConfigError: It cannot be built, such as a factory string that FAISS does not know.
        BadValueError: It cannot hold representations of this kind.
    """
    if isinstance(config, SeveralConfig) and isinstance(representation, Several):
        rows = representation.parts
        parts = {name: _chosen(part, rows[name]) for name, part in config.indexes.items()}
        config = SeveralConfig(indexes=parts)
    config = _chosen(config, representation)
    with (
        explained("checking an index", "set TMPDIR to a folder that can be written"),
        tempfile.TemporaryDirectory() as folder,
        Store.build(folder) as store,
    ):
        create_index(store, config).add(representation)


def _chosen(config: IndexConfig, representation: Representation) -> Any:
    """Return a configuration, or what the kind "auto" chooses for many documents."""
    return config.choose(representation, config.documents) if isinstance(config, AutoConfig) else config


def create_index(
    store: Store,
    config: str | Mapping[str, Any] | IndexConfig = "flat",
    *,
    windows: WindowsConfig | None = None,
) -> Index:
    """Return an empty index in a store that is being built; for a resumed build, the index begun earlier.

    Args:
        store: From `Store.build`.
        config: A configuration or its short name, see `index_config`.
        windows: Makes a `WindowedIndex`, whose documents have any number of rows, or several of them.

    Raises:
        ConfigError: The index is unknown.
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
    inner = [*chosen.indexes.values()] if isinstance(chosen, SeveralConfig) else [chosen]
    if any(isinstance(config, AutoConfig) for config in inner):
        raise ConfigError(
            "index 'auto' depends on the documents, which `Retriever.build` counts; name an index here"
        )
    check_store("creating an index", store, "Store.build(path)")
    one_thread_after_fork()  # a build trains later
    saved = chosen.model_dump(mode="json")
    with store.update():
        new = _empty(saved, windows)
        begun = store.meta.setdefault("index", new)
        for name, part in saved["indexes"].items() if isinstance(chosen, SeveralConfig) else ():
            begun.setdefault("parts", {}).setdefault(name, _empty(part, windows))
        if begun["config"] != saved:
            raise BadValueError(
                f"index {store.path}: the build that is resumed is of {begun['config']}, not of {saved}; "
                "give them different keys"
            )
    return open_index(store)


def _empty(config: Mapping[str, Any], windows: WindowsConfig | None) -> dict[str, Any]:
    """Return what a manifest says of an index without rows."""
    new = {"config": config, "representation": None, "dim": 0, "rows": 0}
    return new if windows is None else new | {"windows": windows.model_dump(mode="json")}


def open_index(store: Store) -> Index:
    """Return the index of a store.

    Raises:
        StorageError: The store has no index.
        ConfigError: Its configuration is of another version of irkit.
    """
    check_store("opening an index", store, "Store.open(path)")
    if "index" not in store.meta:
        raise StorageError(f"index {store.path}: the directory has no index in it; build one first")
    try:
        config = index_config(store.meta["index"]["config"])
    except ConfigError as error:
        raise ConfigError(
            f"opening index {store.path}: {error}; open it with the version of irkit that wrote it, build it "
            "again with `irkit index`, or install the package that adds the kind"
        ) from error
    if isinstance(config, SeveralConfig):
        from irkit.index.several_index import SeveralIndex

        parts = {name: open_index(PartStore(store, name)) for name in sorted(config.indexes)}
        return SeveralIndex(store, config, parts)
    module, _, name = INDEX_KINDS[config.kind].index.partition(":")
    index: Index = getattr(importlib.import_module(module), name)(store, config)
    settings = store.meta["index"].get("windows")
    if not settings:
        return index
    windows = WindowsConfig.parse(settings, "windows")
    if windows.length is None or windows.stride is None:
        raise corrupt(store.path, "the length or the stride of its windows is missing")
    return WindowedIndex(store, index, windows)


def compact(path: str | Path, *, progress: StageProgress | None = None) -> None:
    """Rewrite an index without its removed rows, while readers continue to use it. Rows are renumbered.

    A killed compaction resumes after its last chunk, if the index has not been changed since.

    Args:
        path: Directory of the index.
        progress: Called with the stages of the work, see `StageProgress`.

    Raises:
        LockedError: Somebody else is writing to it.
        StorageError: It cannot be read or written; the index is unchanged.
    """
    old = Store.open(path)
    if "shards" in old.meta:
        raise StorageError(
            f"compacting {path}: it is an index of several shards; `irkit.shards.reshard` writes it anew "
            "without removed rows, also with as many shards as it has"
        )
    state = zlib.crc32((Path(path) / "irkit.json").read_bytes())
    with Store.build(path, key={"compact": state}, overwrite=True) as new:
        if old.refresh():
            raise StorageError(f"compacting {path}: it was changed meanwhile; run it again")
        source, texts = open_index(old), Documents(old)
        index, documents = create_index(new, source.config, windows=source.windows), Documents(new)
        with new.update():
            Vocabulary(new).copy(old)
            begin_as(new, old)
        rows = np.flatnonzero(source.live)
        size = max(1, new.limits.compact_bytes * max(1, len(source)) // max(1, source.stats()["bytes"]))
        # an index without rows still has a kind and dimensions: its copy adds none, once
        count = max(len(rows), 1) if source.representation else 0
        for start in range(len(index), count, size):
            chosen = rows[start : start + size]
            with new.update():
                index.copy(source, chosen)
                if len(texts):
                    documents.add(texts.fetch(chosen))
            if progress is not None:
                progress("compacting", len(chosen), len(rows))
        index.finish(progress)
        documents.finish()
        with new.update():
            new.meta.update({key: value for key, value in old.meta.items() if key != "index"})
            new.meta["dropped"] = old.meta.get("dropped", 0) + len(source) - len(rows)
        new.publish()
