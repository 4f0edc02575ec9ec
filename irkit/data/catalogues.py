"""Collections of catalogues: ``ir_datasets:ID`` and ``hf:NAME[:CONFIG][:SPLIT]`` of the Hugging Face hub."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from irkit.data.collection_files import collect_qrels
from irkit.data.document import Qrels
from irkit.data.source import Record, Source, T, build_all
from irkit.data.table_files import Fields
from irkit.errors import BadValueError, StorageError, require
from irkit.utils.uris import is_uri

_TIMEOUT = 10  # seconds to wait for the first answer of the hub
_BEIR_QRELS = ("query-id", "corpus-id", "score")


def is_catalogued(source: str) -> bool:
    """Return whether a source is ``ir_datasets:ID`` or ``hf:NAME``; ``hf://...`` is the URI of a file."""
    return source.startswith(("ir_datasets:", "hf:")) and not is_uri(source)


def remote_source(source: str, part: str, fields: Fields, build: Callable[[Record], T]) -> Source[T]:
    """Open ``ir_datasets:ID`` or ``hf:NAME[:CONFIG][:SPLIT]``.

    Args:
        source: Name of the source. An empty CONFIG is the default one: ``hf:NAME::train``.
        part: ``"docs"`` or ``"queries"`` of an ID of ir_datasets.
        fields: Keys of the id and of the text of a record.
        build: Makes an item of a record.

    Raises:
        MissingDependencyError: The package ir_datasets or datasets is not installed.
        BadValueError: The collection is unknown, or lacks this part.
        StorageError: Loading failed.
    """
    if source.startswith("hf:"):
        rows = load_hf(source)
        return Source(source, lambda: build_all(source, _numbered(source, lambda: map(_plain, rows)), build))
    read = getattr(_load_ir_datasets(source, part), f"{part}_iter")

    def record(item: Any) -> Record:  # a named tuple whose fields differ by collection
        values = _plain(item._asdict())
        if values.keys().isdisjoint(fields.texts):
            values |= {"text": item.default_text(), "title": ""}  # default_text includes the title
        return values

    return Source(source, lambda: build_all(source, _numbered(source, lambda: map(record, read())), build))


def read_remote_qrels(source: str) -> Qrels:
    """Read the judgments of ``ir_datasets:ID``, or of a hub dataset with the three columns of BEIR.

    Raises:
        MissingDependencyError: The package ir_datasets or datasets is not installed.
        BadValueError: The collection is unknown, or has no judgments.
        StorageError: Loading failed.
    """
    if source.startswith("hf:"):
        table = load_hf(source)
        if not set(_BEIR_QRELS) <= set(table.column_names):
            raise BadValueError(
                f"{source}: expected the columns {', '.join(_BEIR_QRELS)}; got {table.column_names}"
            )
        numbered = _numbered(source, lambda: ([row[name] for name in _BEIR_QRELS] for row in table))
    else:
        dataset = _load_ir_datasets(source, "qrels")
        numbered = _numbered(
            source, lambda: ([row.query_id, row.doc_id, row.relevance] for row in dataset.qrels_iter())
        )
    return collect_qrels(source, ((n, str(query), str(doc), grade) for n, (query, doc, grade) in numbered))


def remote_corpus(source: str) -> str:
    """Return the source that holds the documents: for ir_datasets, the collection above a set of queries.

    Raises:
        MissingDependencyError: The package ir_datasets is not installed.
    """
    if source.startswith("hf:"):
        return source
    library = require("ir_datasets", "data", "Reading ir_datasets collections")
    return f"ir_datasets:{library.docs_parent_id(source.removeprefix('ir_datasets:'))}"


def _load_ir_datasets(source: str, part: str) -> Any:
    library = require("ir_datasets", "data", "Reading ir_datasets collections")
    name = source.removeprefix("ir_datasets:")
    try:
        dataset = library.load(name)
    except KeyError as error:
        raise BadValueError(
            f"{source}: ir_datasets knows no {name!r}; see https://ir-datasets.com"
        ) from error
    if not getattr(dataset, f"has_{part}")():
        raise BadValueError(f"{source}: this collection has no {part}; see https://ir-datasets.com")
    return dataset


def load_hf(source: str, streaming: bool = False) -> Any:
    """Open ``hf:NAME[:CONFIG][:SPLIT]`` as a table of dicts, or as an iterable of dicts if streamed.

    Raises:
        MissingDependencyError: The package datasets is not installed.
        BadValueError: The name is malformed, or several splits are possible.
        StorageError: Loading failed.
    """
    library = require("datasets", "data", "Reading datasets of the Hugging Face hub")
    name, config, split, *rest = [*source.removeprefix("hf:").split(":"), "", ""]
    if any(rest) or not name:
        raise BadValueError(f"{source}: expected hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    with _offline_without_network(library, name):
        try:
            loaded = library.load_dataset(name, config or None, split=split or None, streaming=streaming)
        except (OSError, RuntimeError, ValueError, library.exceptions.DatasetsError) as error:
            raise StorageError(f"loading {source}: {error}") from error
    if split:
        return loaded
    if len(loaded) != 1:
        raise BadValueError(
            f"{source}: say which split, as in hf:{name}:{config}:SPLIT; it has {', '.join(loaded)}"
        )
    return next(iter(loaded.values()))


@contextlib.contextmanager
def _offline_without_network(library: Any, name: str) -> Iterator[None]:
    """Use only the cache inside the ``with`` block if the hub cannot be reached.

    The client of the hub has no setting for retries, which would take half a minute. So the client is
    switched to offline mode if one request fails. A dataset ``name`` that is a local path needs no hub.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE or Path(name).exists():
        yield
        return
    settings: tuple[Any, ...] = ()
    try:
        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT)
    except Exception:  # whatever the client raises without network, name server or proxy
        settings = (constants, library.config)
    for module in settings:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module in settings:
            module.HF_HUB_OFFLINE = False


def _numbered(source: str, read: Callable[[], Iterable[Any]]) -> Iterator[tuple[int, Any]]:
    try:
        yield from enumerate(read(), 1)
    except (OSError, RuntimeError) as error:  # the call, or the first item, starts a download
        raise StorageError(f"reading {source}: {error}") from error


def _plain(record: Mapping[str, Any]) -> Record:
    """Drop values that JSON cannot hold, such as images and dates."""
    return {
        name: value for name, value in record.items() if isinstance(value, str | int | float | list | dict)
    }
