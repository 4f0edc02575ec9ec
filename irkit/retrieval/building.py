"""Build an index: start it or resume it, encode the documents, store them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from irkit.core.representation import Representation
from irkit.data import Document, Source, check_documents, read_documents
from irkit.data.parsing import DocumentsLike, parse_documents
from irkit.encoder_free import EncoderFreeModel, Vectors
from irkit.errors import BadValueError
from irkit.index import (
    AutoConfig,
    Documents,
    IndexConfig,
    StageProgress,
    Store,
    check_index,
    create_index,
    index_config,
)
from irkit.retrieval.collection import AnyModel, Collection, default_index, model_manifest

CHUNK = 1024  # documents encoded and stored together


def build_collection(
    model: AnyModel,
    documents: DocumentsLike,
    path: str | Path,
    index: str | Mapping[str, Any] | IndexConfig | None = None,
    chunk_size: int = CHUNK,
    overwrite: bool = False,
    progress: StageProgress | None = None,
) -> Collection:
    """Build an index, or finish a build that was killed, see `irkit.Retriever.build`.

    Raises:
        StorageError: Something else is at ``path``.
        BadValueError: A build of other documents is there and cannot be replaced.
        LockedError: Another process is writing there.
    """
    model, store, remaining = _begin(model, documents, path, index, overwrite, progress)
    try:
        collection = Collection(store, lambda: model)
        add_documents(collection, remaining, chunk_size, progress)
        store.publish()
    except BaseException:
        store.close()
        raise
    return collection


def check_readable(documents: DocumentsLike) -> None:
    """Read a source or a list once, so that a malformed document or a repeated id is an error at once.

    Raises:
        BadValueError: There is one; the message names file and line, or the position in the list.
    """
    if isinstance(documents, str | Path):
        source = read_documents(documents)
        if not source.once:
            check_documents(source)
    elif isinstance(documents, Sequence):
        check_documents(Source("documents", lambda: enumerate(parse_documents(documents), 1)))
    elif not isinstance(documents, Iterator | Source):  # reading a Source may use it up
        next(parse_documents(documents), None)


def add_documents(
    collection: Collection,
    documents: Iterable[Document],
    chunk_size: int = CHUNK,
    progress: StageProgress | None = None,
) -> None:
    """Encode documents, streamed, and store them by chunks; inside ``store.update()`` in one step."""
    model = collection.model
    for chunk, part in _encode(collection, documents, chunk_size, progress):
        with collection.store.update():
            collection.documents.add(chunk)
            if isinstance(model, EncoderFreeModel):
                model.keep(part.dim)
            collection.index.add(part)
    collection.index.finish(progress)


def _begin(
    model: AnyModel,
    documents: DocumentsLike,
    path: str | Path,
    index: str | Mapping[str, Any] | IndexConfig | None,
    overwrite: bool,
    progress: StageProgress | None,
) -> tuple[AnyModel, Store, Iterator[Document]]:
    """Start a build or reopen a killed one: its model, its files and the documents that are not in it yet."""
    # choose model and index, which may depend on the first documents
    stream = parse_documents(documents)
    if isinstance(model, Vectors):
        model, stream = model.fit(stream)
    config = default_index(model) if index is None else index_config(index)
    if isinstance(config, AutoConfig):
        first = list(islice(stream, config.documents))
        stream = chain(first, stream)
        is_lexical = isinstance(model, EncoderFreeModel) and model.kind == "sparse"
        config = default_index(model) if is_lexical else config.choose(model.kind, len(first))
    check_index(config, model.encode_representation([], "document"))

    # a killed build is resumed if its key is the same and its documents are the first of these
    manifest = model_manifest(model)
    key = {**manifest, "name": None, "index": config.model_dump(mode="json")}
    if isinstance(model, Vectors):
        key["first"] = model.first
    store = Store.build(path, key=key, overwrite=overwrite)
    try:
        create_index(store, config)
        with store.update():
            store.meta["model"] = manifest
            if isinstance(model, EncoderFreeModel):
                model.begin(store)
        if _starts_with(stream, Documents(store), progress):
            return model, store, stream
        if not overwrite or isinstance(documents, Iterator):
            raise BadValueError(
                f"building {path}: a build of other documents was begun there; to discard it, ask "
                "to overwrite, with documents that can be read again"
            )
    except BaseException:
        store.close()
        raise
    store.close()
    Store.build(path, overwrite=True).close()  # under another key: discards the killed build
    return _begin(model, documents, path, config, True, progress)


def _starts_with(stream: Iterator[Document], stored: Documents, progress: StageProgress | None) -> bool:
    """Return True if ``stream`` begins with the stored documents, and move it past them."""
    for start in range(0, len(stored), CHUNK):
        rows = np.arange(start, min(start + CHUNK, len(stored)))
        if stored.fetch(rows) != list(islice(stream, len(rows))):
            return False
    if progress is not None:
        progress("encoding", len(stored), None)
    return True


def _encode(
    collection: Collection, documents: Iterable[Document], chunk_size: int, progress: StageProgress | None
) -> Iterator[tuple[list[Document], Representation]]:
    waiting: deque[Document] = deque()  # read, but not encoded yet

    def contents() -> Iterator[Any]:
        for document in documents:
            waiting.append(document)
            yield collection.content(document)

    report = None if progress is None else lambda count: progress("encoding", count, None)
    options: dict[str, Any] = {"chunk_size": chunk_size, "progress": report}
    model = collection.model
    parts: Iterator[Representation]
    if isinstance(model, EncoderFreeModel):
        parts = model.stored(contents(), **options)
    else:
        parts = model.stream_representations(contents(), "document", **options)
    for part in parts:
        yield [waiting.popleft() for _ in range(len(part))], part
