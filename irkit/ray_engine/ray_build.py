"""Build an index in shards on Ray: actors encode, and an actor for each shard stores.

The documents are read by a task, and encoded in chunks by actors, see `irkit.ray_engine.ray_stream`. This
process takes the encoded chunks in order, numbers their terms, and hands each shard its portion. The builder
of a shard (shard_builder.py) commits what it gets. So the shards have exactly the files that
`irkit.Retriever.build` gives them, and a build of either kind resumes one of the other kind.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from irkit.arguments import check_counts
from irkit.core.representation import Representation
from irkit.data import Document, DocumentsLike, Source, parse_documents, read_documents
from irkit.encoder_free import EncoderFreeModel
from irkit.errors import BadTypeError, BadValueError, LockedError, StorageError
from irkit.index import IndexConfig, StageProgress, Store, WindowsConfig
from irkit.index.array_files import Array
from irkit.index.layout import element_positions
from irkit.index.several_index import index_parts
from irkit.index.windowed import index_of_rows
from irkit.model import Model
from irkit.ray_engine.ray_start import start_ray
from irkit.ray_engine.ray_stream import stream
from irkit.ray_engine.shard_builder import Portion, ShardBuilder, pack
from irkit.retrieval.building import CHUNK, build_collection, encode_windows
from irkit.retrieval.collection import AnyModel, Collection, content_of, load_model
from irkit.retrieval.retriever import Retriever
from irkit.retrieval.windows import batch_documents, text_spans
from irkit.shards import ShardedIndex, ShardedStore
from irkit.shards.placement import global_rows, shard_of
from irkit.shards.sharded_index import note_rows
from irkit.shards.sharded_store import VOCABULARY
from irkit.utils.uris import is_uri

_WAITING = 8  # unsent portions per shard before the sender waits
_PATIENCE, _PAUSE = 30.0, 0.5  # seconds until the processes of a killed build have ended


def build_shards(
    model: AnyModel | str | Path,
    documents: DocumentsLike,
    path: str | Path,
    *,
    shards: int,
    address: str | None = None,
    index: str | Mapping[str, Any] | IndexConfig | None = None,
    chunk_size: int = CHUNK,
    overwrite: bool = False,
    windows: Mapping[str, Any] | WindowsConfig | None = None,
    progress: StageProgress | None = None,
) -> Retriever:
    """Encode documents and index them on Ray, with the files that `irkit.Retriever.build` would write.

    If processes or nodes die, Ray starts others. If this process was killed, the same call resumes the build:
    what every shard has stored is not encoded again.

    Args:
        model: See `irkit.Retriever.build`, also for the arguments without a description of their own. An
            actor on each CPU of the cluster holds a copy of the model; if the model is on a GPU, an actor on
            each GPU.
        documents: Documents that can be read again, on any node: from a file under the same path, a hub, or
            a list.
        path: Directory that every node has under the same path.
        shards: Number of directories among which documents are divided.
        address: Address of a cluster, such as ``"ray://host:10001"``; by default Ray is started here,
            unless this process is connected to one.
        index: Kind of index.
        chunk_size: Number of documents encoded and stored together.
        overwrite: Replace an existing index, once the new one is complete.
        windows: Encode documents of any length in windows. ``chunk_size`` is a number of windows then.
        progress: Called with the stages of the work.

    Raises:
        MissingDependencyError: Ray is not installed.
        BadTypeError: The documents can be read only once.
        StorageError: A node does not have the directory. For other errors see `irkit.Retriever.build`.

    Examples:
        >>> build_shards("bm25", "corpus.jsonl", "words", shards=16)  # doctest: +SKIP
    """
    check_counts("building on Ray", shards=shards, chunk_size=chunk_size)
    named = read_documents(documents) if isinstance(documents, str | Path) else documents
    if isinstance(named, Iterator) or (isinstance(named, Source) and named.once):
        raise BadTypeError(
            "building on Ray: the documents can be read only once; give the name of a file, or a list"
        )
    if is_uri(path):
        raise BadValueError(
            f"building on Ray: {path} is no directory; build in one that every node has, and Retriever.save "
            "copies the index there"
        )
    ray = start_ray(address)
    model = load_model(model)
    options = index, chunk_size, overwrite, progress, shards, windows
    fill = partial(_fill, ray, documents)
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return Retriever(build_collection(model, documents, path, *options, fill=fill))
        except LockedError:  # by actors of a killed build, which Ray is about to end
            if time.monotonic() > end:
                raise
            time.sleep(_PAUSE)


class _Chunk(NamedTuple):
    """Documents as an actor has encoded them.

    Attributes:
        counts: ``(shards,)`` documents of each shard.
        terms: Their terms by number, for models whose terms grow.
        contents: What `pack` made for each shard.
    """

    counts: Array
    terms: list[str]
    contents: list[bytes]


def _fill(
    ray: Any,
    source: DocumentsLike,
    collection: Collection,
    documents: Iterable[Document],
    chunk_size: int,
    progress: StageProgress | None,
) -> None:
    """Do the work of `irkit.retrieval.building.add_documents` on Ray."""
    store, model = collection.store, collection.model
    assert isinstance(store, ShardedStore)
    start, shards = len(collection.documents), len(store.parts)
    limits = store.parts[0].limits
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": "SPREAD"}
    begin = ray.remote(ShardBuilder).options(**options).remote
    builders = [begin(part.path.absolute(), limits) for part in store.parts]
    windows = collection.index.windows
    if windows is None:
        work: Any = partial(_read_chunks, source, start, chunk_size), partial(_encoder, model, shards)
    else:
        assert isinstance(model, Model)  # others cut no texts
        work = (
            partial(_read_windows, source, start, chunk_size, model, windows),
            partial(_window_encoder, model, shards),
        )
    try:
        chunks = stream(
            ray,
            *work,
            gpu=not isinstance(model, EncoderFreeModel) and model.device.type == "cuda",
        )
        _store_chunks(ray, collection, builders, chunks, start, progress)
        for name, part in index_parts(collection.index).items():
            finishing = cast(ShardedIndex, index_of_rows(part)).share(progress)
            _wait(ray, [builder.finish.remote(name, finishing) for builder in builders], store.path)
            store.refresh_parts()
        _wait(ray, [builder.finish_documents.remote() for builder in builders], store.path)
        store.refresh_parts()
    finally:
        for builder in builders:
            ray.kill(builder)
        end = time.monotonic() + _PATIENCE
        for builder in builders:  # wait until it has ended, because the build may be discarded now
            with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                while time.monotonic() < end:
                    ray.get(builder.__ray_ready__.options(max_task_retries=0).remote(), timeout=_PATIENCE)


def _store_chunks(
    ray: Any,
    collection: Collection,
    builders: list[Any],
    chunks: Iterator[_Chunk],
    start: int,
    progress: StageProgress | None,
) -> None:
    """Send every shard its portion of each chunk; then commit the counts of all shards to the store."""
    store, model = collection.store, collection.model
    assert isinstance(store, ShardedStore)
    # where each shard resumes: its documents, and the terms that it lacks
    queues = [_Queue(ray, builder, store.path) for builder in builders]
    counts = np.array([np.searchsorted(global_rows(part), start) for part in store.parts])
    has_terms = isinstance(model, EncoderFreeModel) and model.kind == "sparse"
    unsent = [_missing_terms(store, part) for part in store.parts]
    total = store.rows(VOCABULARY)
    dim = known = len(model.vocabulary) if has_terms and total else 0
    # number new terms, and send each shard its part of the chunk
    for change, chunk in enumerate(chunks, store.last_change() + 1):
        stop = start + int(chunk.counts.sum())
        numbers, new = None, b""
        if has_terms:
            assert isinstance(model, EncoderFreeModel)
            numbers = np.array(model.learn(chunk.terms), np.int64)
            fresh = [
                term for term, number in zip(chunk.terms, numbers.tolist(), strict=True) if number >= known
            ]
            new = "".join(f"{term}\n" for term in fresh).encode()
            known += len(fresh)
            dim = max(1, known)
        for shard, (queue, content) in enumerate(zip(queues, chunk.contents, strict=True)):
            offset, before = unsent[shard]
            terms = (offset, before + new) if has_terms else None
            portion = Portion(content, int(counts[shard]), start, stop, change, terms, numbers, dim)
            queue.put(portion)
            unsent[shard] = total + len(new), b""
        total, counts = total + len(new), counts + chunk.counts
        if progress is not None:
            progress("encoding", stop - start, None)
        start = stop
    # commit the counts of all shards
    for queue in queues:
        queue.drain()
    store.refresh_parts()
    with Store.update(store):
        if has_terms:
            assert isinstance(model, EncoderFreeModel)
            model.keep(known)
        note_rows(store, start)
        store.meta["documents"] = start
        store.meta["changes"] = store.last_change()
    store.refresh_parts()


def _missing_terms(store: Store, part: Store) -> tuple[int, bytes]:
    """Return the terms that the common store has and a shard lacks after a crash: offset and bytes."""
    have = part.rows(VOCABULARY)
    return have, store.read(VOCABULARY)[have:].tobytes() if store.rows(VOCABULARY) > have else b""


class _Queue:
    """The portions that one builder works on, and the portions that wait for its next call."""

    def __init__(self, ray: Any, builder: Any, path: Path) -> None:
        self._ray, self._builder, self._path = ray, builder, path
        self._waiting: deque[Portion] = deque()
        self._call: Any = None

    def put(self, portion: Portion) -> None:
        """Add a portion; send it if the builder is idle, and wait if too many portions are unsent."""
        self._waiting.append(portion)
        self._send(0 if len(self._waiting) < _WAITING else None)

    def drain(self) -> None:
        """Wait until the builder has stored all portions."""
        while self._waiting or self._call is not None:
            self._send(None)

    def _send(self, timeout: float | None) -> None:
        """Send all waiting portions in one call once the last call has ended; give up after ``timeout`` s."""
        if self._call is not None:
            if not self._ray.wait([self._call], timeout=timeout)[0]:
                return
            _wait(self._ray, [self._call], self._path)
            self._call = None
        if self._waiting:
            self._call = self._builder.add.remote(list(self._waiting))
            self._waiting.clear()


def _wait(ray: Any, calls: list[Any], path: Path) -> None:
    """Wait for calls of builders; raise their errors."""
    try:
        ray.get(calls)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.ActorDiedError as error:
        raise StorageError(
            f"building {path} on Ray: a shard cannot be opened there ({' '.join(str(error).split()):.300}); "
            "every node needs the directory under this path"
        ) from error


# ---- in other processes ----


def _read_chunks(source: DocumentsLike, start: int, chunk_size: int, skip: int) -> Iterator[list[Document]]:
    """Yield chunks of documents, from document ``start`` on, without the first ``skip`` chunks."""
    documents = islice(parse_documents(source), start + skip * chunk_size, None)
    while chunk := list(islice(documents, chunk_size)):
        yield chunk


def _read_windows(
    source: DocumentsLike, start: int, chunk_size: int, model: Model, windows: WindowsConfig, skip: int
) -> Iterator[tuple[list[Document], list[Array]]]:
    """Yield documents and their windows as `_read_chunks` does, ``chunk_size`` windows or more in a chunk."""
    documents = islice(parse_documents(source), start, None)
    yield from islice(batch_documents(model, windows, documents, chunk_size), skip, None)


def _encoder(model: AnyModel, shards: int) -> Callable[[list[Document]], _Chunk]:
    def encode(documents: list[Document]) -> _Chunk:
        items, terms = [content_of(model, item) for item in documents], list[str]()
        if isinstance(model, EncoderFreeModel):
            rows, terms = model.stored_apart(items)
        else:
            [rows] = model.stream_representations(items, "document", chunk_size=len(items))
        return _divide(documents, rows, None, terms, shards)

    return encode


def _window_encoder(model: Model, shards: int) -> Callable[[tuple[list[Document], list[Array]]], _Chunk]:
    def encode(chunk: tuple[list[Document], list[Array]]) -> _Chunk:
        documents, spans = chunk
        return _divide(
            documents, encode_windows(model, documents, spans), text_spans(documents, spans), [], shards
        )

    return encode


def _divide(
    documents: list[Document], rows: Representation, spans: list[Array] | None, terms: list[str], shards: int
) -> _Chunk:
    """Divide a chunk among shards, with a row for each document, or for each of its windows ``spans``."""
    counts = np.array([1 if spans is None else len(spans[number]) for number in range(len(documents))])
    ends, owners = np.cumsum(counts), shard_of([item.id for item in documents], shards)
    parts = [np.flatnonzero(owners == shard) for shard in range(shards)]
    contents = [
        pack(
            [documents[number] for number in part.tolist()],
            part,
            rows[element_positions(ends[part], counts[part])],
            None if spans is None else [spans[number] for number in part.tolist()],
        )
        for part in parts
    ]
    return _Chunk(np.array([len(part) for part in parts]), terms, contents)
