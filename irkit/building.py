"""Documents on their way into the index of a `irkit.Retriever`: builds begun or gone on with, encoding."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from irkit.data import Document, Source, check_documents, read_documents
from irkit.data.given import Collection, given_documents
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
from irkit.lexical import LexicalModel, Vectors
from irkit.model_choice import AnyModel, default_index, describe_model
from irkit.representation import Representation

if TYPE_CHECKING:
    from irkit.retriever import Retriever

__all__ = ["CHUNK", "add_documents", "begin_build", "check_given"]

CHUNK = 1024  # documents encoded and stored together


def begin_build(
    model: AnyModel,
    documents: Collection,
    path: str | Path,
    index: str | Mapping[str, Any] | IndexConfig | None = None,
    overwrite: bool = False,
    progress: StageProgress | None = None,
) -> tuple[AnyModel, Store, Iterator[Document]]:
    """See `Retriever.build`: the model, the files of an index, new or begun, and the documents not in it yet.

    Raises:
        StorageError: There is something else at ``path``.
        BadValueError: A build of other documents is there, and cannot be replaced.
        LockedError: Another process is writing there.
    """
    stream = given_documents(documents)
    if isinstance(model, Vectors):
        model, stream = model.fit(stream)
    config = default_index(model) if index is None else index_config(index)
    about = describe_model(model)
    if isinstance(config, AutoConfig):
        first = list(islice(stream, config.documents))
        stream = chain(first, stream)
        lexical = isinstance(model, LexicalModel) and model.kind == "sparse"
        config = default_index(model) if lexical else config.choose(model.kind, len(first))
    check_index(config, model.represent([], "document"))
    key = {**about, "name": None, "index": config.model_dump(mode="json")}
    if isinstance(model, Vectors):
        key["first"] = model.first
    store = Store.build(path, key=key, overwrite=overwrite)
    try:
        create_index(store, config)
        with store.update():
            store.meta["model"] = about
            if isinstance(model, LexicalModel):
                model.begin(store)
        if _resumes(Documents(store), stream, progress):
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
    Store.build(path, overwrite=True).close()  # another key: what was begun is discarded
    return begin_build(model, documents, path, config, True, progress)


def check_given(documents: Collection) -> None:
    """Read a source or a list once, so that a malformed document or an id that comes twice is told at once.

    Raises:
        BadValueError: There is one; the message names file and line, or the place in the list.
    """
    if isinstance(documents, str | Path):
        source = read_documents(documents)
        if not source.once:
            check_documents(source)
    elif isinstance(documents, Sequence):
        check_documents(Source("documents", lambda: enumerate(given_documents(documents), 1)))
    elif not isinstance(documents, Iterator | Source):  # a source may be one that can be read only once
        next(given_documents(documents), None)  # what is no collection is refused


def _resumes(stored: Documents, stream: Iterator[Document], progress: StageProgress | None) -> bool:
    """Whether ``stream`` starts with what is stored, all of which it is moved past."""
    for start in range(0, len(stored), CHUNK):
        rows = np.arange(start, min(start + CHUNK, len(stored)))
        if stored.fetch(rows) != list(islice(stream, len(rows))):
            return False
    if progress is not None:
        progress("encoding", len(stored), None)
    return True


def add_documents(
    retriever: Retriever,
    documents: Iterable[Document],
    chunk_size: int = CHUNK,
    progress: StageProgress | None = None,
) -> None:
    """Encode documents, streamed, and store them by chunks; inside ``store.update()`` in one step."""
    for chunk, part in _encode(retriever, documents, chunk_size, progress):
        with retriever.store.update():
            retriever.documents.add(chunk)
            if isinstance(retriever.model, LexicalModel):
                retriever.model.keep(part.dim)
            retriever.index.add(part)
    retriever.index.finish(progress)


def _encode(
    retriever: Retriever, documents: Iterable[Document], chunk_size: int, progress: StageProgress | None
) -> Iterator[tuple[list[Document], Representation]]:
    waiting: deque[Document] = deque()

    def contents() -> Iterator[Any]:
        for document in documents:
            waiting.append(document)
            yield retriever.content(document)

    told = None if progress is None else lambda count: progress("encoding", count, None)
    options: dict[str, Any] = {"chunk_size": chunk_size, "progress": told}
    stream: Iterator[Representation]
    if isinstance(retriever.model, LexicalModel):
        stream = retriever.model.stored(contents(), **options)
    else:
        stream = retriever.model.represent_stream(contents(), "document", **options)
    for part in stream:
        yield [waiting.popleft() for _ in range(len(part))], part
