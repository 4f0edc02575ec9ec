"""Build an index: start it or resume it, encode the documents, store them."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from irkit.arguments import brief, check_counts, check_flags, check_functions
from irkit.core.representation import Representation, Several
from irkit.data import Document, DocumentsLike, Source, check_documents, parse_documents, read_documents
from irkit.encoder_free import EncoderFreeModel, Vectors
from irkit.errors import ConfigError
from irkit.index import (
    AutoConfig,
    Documents,
    IndexConfig,
    SeveralConfig,
    SeveralIndex,
    StageProgress,
    Store,
    WindowedIndex,
    WindowsConfig,
    check_index,
    create_index,
    index_config,
)
from irkit.index.array_files import Array
from irkit.index.directory import check_target, directory_of
from irkit.index.documents import as_stored
from irkit.index.object_store import check_uri, upload_index
from irkit.model import Model
from irkit.retrieval.collection import (
    AnyModel,
    Collection,
    content_of,
    default_index,
    load_model,
    model_manifest,
)
from irkit.retrieval.windows import batch_documents, parse_windows, text_spans, window_texts
from irkit.shards import ShardedStore
from irkit.shards.sharded_store import OtherDocumentsError, other_documents
from irkit.utils.uris import is_uri

CHUNK = 1024  # documents encoded and stored together
Fill: TypeAlias = Callable[[Collection, Iterable[Document], int, StageProgress | None], None]
"""``fill(collection, documents, chunk_size, progress)``: `add_documents`, or another way to do the same."""


def build_collection(
    choice: AnyModel | str | Path,
    documents: DocumentsLike,
    path: str | Path,
    index: str | Mapping[str, Any] | IndexConfig | None,
    chunk_size: int,
    overwrite: bool,
    progress: StageProgress | None,
    shards: int | None = None,
    windows: Mapping[str, Any] | WindowsConfig | None = None,
    fill: Fill | None = None,
) -> Collection:
    """Build an index, or finish a build that was killed, see `irkit.Retriever.build`.

    ``fill`` is called with the documents that are not stored yet; the default is `add_documents`.

    Raises:
        StorageError: Something else is at ``path``.
        BadValueError: A document is malformed, or a killed build of other documents is there and cannot be
            replaced.
        LockedError: Another process is writing there.
    """
    check_counts("building an index", chunk_size=chunk_size)
    check_flags("building an index", overwrite=overwrite)
    check_functions("building an index", progress=progress)
    check_target(directory_of(path), overwrite)
    config = None if index is None else index_config(index)
    _check_readable(documents)
    model = load_model(choice)
    cut = parse_windows(windows, model)

    # choose model and index, which may depend on the first documents
    stream = parse_documents(documents)
    if isinstance(model, Vectors):
        model, stream = model.fit(stream)
    empty = model.encode_representation([], "document")
    config, stream = _choose_index(model, config, empty, stream)
    check_index(config, empty)

    # a killed build is resumed if its key is the same and its documents are the first of these
    manifest = model_manifest(model)
    key = _build_key(model, config, shards, cut)
    if shards is None:
        store = Store.build(path, key=key, overwrite=overwrite)
    else:
        store = ShardedStore.build(path, shards=shards, key=key, overwrite=overwrite)
    try:
        with store.update():
            for target in (store, *store.parts):
                create_index(target, config, windows=cut)
                target.meta["model"] = manifest
                if isinstance(model, EncoderFreeModel):
                    model.begin(target)
        collection = Collection(store, lambda: model)
        if not _starts_with(stream, collection.documents, progress):
            raise other_documents(store.path)
        (fill or add_documents)(collection, stream, chunk_size, progress)
        store.publish()
        return collection
    except BaseException as error:
        store.close()
        if not isinstance(error, OtherDocumentsError) or not overwrite or isinstance(documents, Iterator):
            raise
    Store.build(path, overwrite=True).close()  # under another key: discards the killed build
    return build_collection(model, documents, path, config, chunk_size, True, progress, shards, cut, fill)


def add_documents(
    collection: Collection,
    documents: Iterable[Document],
    chunk_size: int = CHUNK,
    progress: StageProgress | None = None,
) -> None:
    """Encode documents and store them, ``chunk_size`` at a time.

    Each chunk is committed. Inside ``with store.update():`` all chunks are one commit at its end.
    """
    model = collection.model
    if collection.index.windows is not None:
        _add_windows(collection, collection.index.windows, documents, chunk_size, progress)
        return
    waiting: deque[Document] = deque()  # read, but not encoded yet

    def contents() -> Iterator[Any]:
        for document in documents:
            waiting.append(document)
            yield collection.content(document)

    if isinstance(model, EncoderFreeModel):
        encode: Callable[..., Iterator[Representation]] = model.stored
    else:
        encode = partial(model.stream_representations, side="document")
    report = None if progress is None else lambda count: progress("encoding", count, None)
    for part in encode(contents(), chunk_size=chunk_size, progress=report):
        with collection.store.update():
            collection.documents.add([waiting.popleft() for _ in range(len(part))])
            if isinstance(model, EncoderFreeModel):
                model.keep(part.dim)
            collection.index.add(part)
    collection.index.finish(progress)
    collection.documents.finish()


def _add_windows(
    collection: Collection,
    windows: WindowsConfig,
    documents: Iterable[Document],
    chunk_size: int,
    progress: StageProgress | None,
) -> None:
    """Encode the windows of documents and store them, see `add_documents`; chunks count windows."""
    model, index = cast(Any, collection.model), cast(WindowedIndex | SeveralIndex, collection.index)
    for batch, spans in batch_documents(model, windows, documents, chunk_size):
        part = encode_windows(model, batch, spans)
        with collection.store.update():
            collection.documents.add(batch)
            index.add_windows(part, text_spans(batch, spans))
        if progress is not None:
            progress("encoding", len(batch), None)
    index.finish(progress)
    collection.documents.finish()


def encode_windows(model: Model, documents: list[Document], spans: list[Array]) -> Representation:
    """Encode the windows of documents, whose ``spans`` are places in the full texts, document by document.

    Raises:
        BadValueError: A document has a vector and no text.
    """
    for document in documents:
        content_of(model, document)  # refuses vectors without texts
    return model.encode_representation(window_texts(documents, spans), "document")


def _build_key(
    model: AnyModel, config: IndexConfig, shards: int | None, windows: WindowsConfig | None
) -> dict[str, Any]:
    """Return what a killed build must have in common with the one that resumes it, besides documents."""
    key: dict[str, Any] = {**model_manifest(model), "name": None, "index": config.model_dump(mode="json")}
    if isinstance(model, Vectors):
        key["first"] = model.first
    if shards is not None:
        key["shards"] = shards
    if windows is not None:
        key["windows"] = windows.model_dump(mode="json")
    return key


def _choose_index(
    model: AnyModel, config: IndexConfig | None, empty: Representation, stream: Iterator[Document]
) -> tuple[IndexConfig, Iterator[Document]]:
    """Choose the index to build; the kind ``"auto"`` reads the first documents to see how many there are.

    Args:
        model: Model of the index.
        config: Index that the caller chose; None for the default.
        empty: A representation of the model without rows.
        stream: Documents.

    Returns:
        The configuration of the index, and an iterator over all documents, including those that were read.
    """
    config = index_of(model, config)
    if isinstance(config, SeveralConfig) and isinstance(empty, Several):
        autos = [part.documents for part in config.indexes.values() if isinstance(part, AutoConfig)]
        first = list(islice(stream, max(autos, default=0)))
        indexes = {
            name: part.choose(empty.parts[name], len(first)) if isinstance(part, AutoConfig) else part
            for name, part in config.indexes.items()
        }
        return SeveralConfig(indexes=indexes), chain(first, stream)
    if not isinstance(config, AutoConfig):
        return config, stream
    first = list(islice(stream, config.documents))
    is_lexical = isinstance(model, EncoderFreeModel) and model.kind == "sparse"
    return default_index(model) if is_lexical else config.choose(empty, len(first)), chain(first, stream)


def index_of(model: AnyModel, config: IndexConfig | None) -> IndexConfig:
    """Return ``config``, or the default for a model; for a model of several heads an index of each.

    Raises:
        ConfigError: ``config`` names a head that the model does not have.
    """
    if not isinstance(model, Model) or model.kind != "several":
        return config or default_index(model)
    heads = model.heads
    chosen = config.indexes if isinstance(config, SeveralConfig) else {}
    if unknown := [name for name in chosen if name not in heads]:
        raise ConfigError(f"index: indexes of {brief(unknown)}; the model has the heads {', '.join(heads)}")
    single = None if isinstance(config, SeveralConfig) else config
    defaults = {name: single or default_index(head) for name, head in heads.items()}
    return SeveralConfig(indexes=defaults | chosen)


def _check_readable(documents: DocumentsLike) -> None:
    """Check documents that can be read again, so that nothing is encoded before a wrong one is found.

    Raises:
        BadValueError: A document is malformed, or an id comes twice. The message names file and line, or the
            position in the list.
    """
    if isinstance(documents, str | Path):
        documents = read_documents(documents)
    if isinstance(documents, Source):
        if not documents.once and documents.count is None:
            check_documents(documents)
    elif isinstance(documents, Sized) and not isinstance(documents, Iterator):
        check_documents(Source("documents", lambda: enumerate(parse_documents(documents), 1)))
    elif not isinstance(documents, Iterator):
        next(parse_documents(documents), None)


def _starts_with(stream: Iterator[Document], stored: Documents, progress: StageProgress | None) -> bool:
    """Return True if ``stream`` begins with the stored documents, and move it past them."""
    for start in range(0, len(stored), CHUNK):
        rows = np.arange(start, min(start + CHUNK, len(stored)))
        if stored.fetch(rows) != [*map(as_stored, islice(stream, len(rows)))]:
            return False
    if progress is not None:
        progress("encoding", len(stored), None)
    return True


def copy_index(store: Store, path: str | Path) -> None:
    """Copy the state of an index that a retriever shows, see `irkit.Retriever.save`."""
    if is_uri(path):
        check_uri(str(path), False)
        with tempfile.TemporaryDirectory(prefix="irkit-") as folder:
            copy_index(store, Path(folder) / "index")
            upload_index(Path(folder) / "index", str(path))
        return
    check_target(directory_of(path), False, "saving an index to")
    with Store.build(path) as copy:
        with copy.update():
            for name in Store.sizes(store):
                copy.append(name, store.read(name)[:0])
                for block in store.blocks(name):
                    copy.append(name, block)
            copy.meta.update(store.meta)
        for part in store.parts:
            copy_index(part, copy.path / part.path.name)
        copy.publish()
