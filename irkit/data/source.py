"""The `Source`, a collection that each iteration reads again, and how its records become items."""

from __future__ import annotations

import json
import stat
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from irkit.arguments import brief, suggest
from irkit.data.collection_files import read_records
from irkit.data.document import Document, Query
from irkit.data.table_files import VECTORS, Fields
from irkit.errors import BadTypeError, BadValueError, StorageError
from irkit.utils.uris import describe_file, is_uri

T = TypeVar("T")
Record = dict[str, Any]

_STORED = json.JSONEncoder(allow_nan=False)  # as an index stores metadata

DOCUMENT_FIELDS = Fields(
    ids=("_id", "id", "docid", "doc_id", "document_id", "pid"),
    texts=("text", "contents", "content", "body", "document_text", "passage"),
    columns={2: ("id", "text"), 3: ("id", "title", "text"), 4: ("id", "url", "title", "text")},
)
QUERY_FIELDS = Fields(
    ids=("_id", "id", "qid", "query_id"),
    texts=("text", "query", "question", "contents"),
    columns={2: ("id", "text")},
)


def name_fields(
    operation: str,
    usual: Fields,
    id: str | None = None,
    text: str | Sequence[str] | None = None,
    title: str | None = None,
    metadata: Sequence[str] | None = None,
) -> Fields:
    """Return the keys of the parts of a record: those that are named, and the usual ones of other parts.

    Raises:
        BadTypeError: A name is not a string, or ``metadata`` is not a list of strings.
        BadValueError: A name is empty, or a list of texts is.
    """
    lists = {"text": [text] if isinstance(text, str) else text, "metadata": metadata}
    single = {name: None if value is None else [value] for name, value in {"id": id, "title": title}.items()}
    for part, names in (single | lists).items():
        is_list = isinstance(names, list | tuple)
        if names is not None and not (is_list and all(isinstance(name, str) for name in names)):
            expected = "a list of strings" if part == "metadata" else "a string"
            raise BadTypeError(f"{operation}: {part} is {brief(names)}; expected {expected}")
        if "" in (names or ()) or (part == "text" and names is not None and not names):
            raise BadValueError(f"{operation}: {part} has no name; expected that of a key or a column")
    ids, texts = [] if id is None else [id], lists["text"] or []
    titles = [] if title is None else [title]
    return usual._replace(
        ids=tuple(ids) or usual.ids,
        texts=tuple(texts) or usual.texts,
        titles=tuple(titles) or usual.titles,
        metadata=None if metadata is None else tuple(metadata),
        named=tuple(dict.fromkeys([*ids, *texts, *titles, *(metadata or ())])),
        joins=len(texts) > 1,
    )


class Source(Generic[T]):
    """Documents or queries that each iteration reads again, and that are never all in memory.

    Args:
        name: Name of the source, for messages.
        read: Start reading; yields pairs of a number (line or position, from 1) and an item.
        once: Whether the source can be read only once, such as standard input.

    Attributes:
        count: Number of items, once `check_documents` has found them all to be right; None before.
    """

    def __init__(self, name: str, read: Callable[[], Iterator[tuple[int, T]]], once: bool = False) -> None:
        self.name, self.once = name, once
        self.count: int | None = None
        self._read, self._used = read, False

    def numbered(self) -> Iterator[tuple[int, T]]:
        """Iterate over pairs of number and item.

        Raises:
            BadValueError: A record is malformed; the message names file and line.
            StorageError: The source cannot be read, or was read before and can be read only once.
        """
        if self.once and self._used:
            raise StorageError(f"reading {self.name}: it can be read only once; save it to a file")
        self._used = True
        return self._read()

    def __iter__(self) -> Iterator[T]:
        return (item for _, item in self.numbered())


def file_source(path: str, fields: Fields, build: Callable[[Record], T]) -> Source[T]:
    """Open a file, or standard input for ``-``, in a format of `irkit.data.collection_files`.

    Raises:
        StorageError: The file does not exist.
    """
    if is_uri(path):
        describe_file(path)  # raises if the file does not exist
        return Source(path, lambda: build_all(path, read_records(path, fields), build))
    try:
        once = path == "-" or not stat.S_ISREG(Path(path).stat().st_mode)  # pipes such as /dev/fd/63
    except OSError as error:
        raise StorageError(f"reading {path}: {error.strerror}") from error
    return Source(path, lambda: build_all(path, read_records(path, fields), build), once)


def build_all(
    name: str, records: Iterable[tuple[int, Record]], build: Callable[[Record], T]
) -> Iterator[tuple[int, T]]:
    """Build an item from every record.

    Raises:
        BadValueError: ``build`` refused a record; the message begins with file and line.
    """
    for number, record in records:
        try:
            item = build(record)
        except (BadValueError, BadTypeError) as error:
            raise BadValueError(f"{name}:{number}: {error}") from error
        yield number, item


def to_document(record: Record, fields: Fields = DOCUMENT_FIELDS) -> Document:
    """Make a document; keys other than id, text, title and metadata become metadata."""
    original = dict(record)
    identifier, vector = _pop(record, fields.ids, "id= (--id-column)"), _pop_vector(record)
    text = _pop_text(record, fields, vector)
    titles = [record.pop(name) for name in fields.titles if name in record]
    title = "" if not titles or titles[0] is None else titles[0]
    if fields.metadata is None:
        metadata = _mapping(record.pop("metadata", None))
        return Document(as_id(identifier), text, title, record | metadata, vector)
    inner = original.get("metadata")
    original = original | (inner if isinstance(inner, dict) else {})
    chosen = {name: original[name] for name in fields.metadata if name in original}
    return Document(as_id(identifier), text, title, chosen, vector)


def _mapping(metadata: Any) -> Record:
    if not isinstance(metadata, dict | None):
        raise BadValueError(f"metadata: expected keys and values, got {brief(metadata)}")
    return metadata or {}


def to_query(record: Record, fields: Fields = QUERY_FIELDS) -> Query:
    """Make a query from a record; keys that are not fields of a query are ignored."""
    identifier, vector = _pop(record, fields.ids, "id= (--id-column)"), _pop_vector(record)
    return Query(as_id(identifier), _pop_text(record, fields, vector), vector)


def _pop_vector(record: Record) -> Any:
    """Remove the vector of a record and return it: weights by term, or numbers. None if it has none.

    A key with the name of a vector that holds anything else stays, as metadata.
    """
    return next((record.pop(name) for name in VECTORS if _is_vector(record.get(name))), None)


def _is_vector(value: Any) -> bool:
    if isinstance(value, list | tuple) and not value:  # of a document without tokens
        return True
    for _ in range(2):  # a list of numbers or of rows
        if isinstance(value, list | tuple) and len(value):
            value = value[0]
            if type(value) in (int, float):
                return True
    return isinstance(value, Mapping) or hasattr(value, "shape")


def _pop_text(record: Record, fields: Fields, vector: Any) -> Any:
    """Remove and return the text; it may be missing if there is a vector."""
    if vector is not None and not any(name in record for name in fields.texts):
        return ""
    option = "text= (--text-column)"
    if not fields.joins:
        return _pop(record, fields.texts, option)
    parts = [_pop(record, (name,), option) for name in fields.texts]
    for name, part in zip(fields.texts, parts, strict=True):
        if not isinstance(part, str | None):
            raise BadTypeError(f"{name}: expected a string, got {brief(part)} ({type(part).__name__})")
    return " ".join(part for part in parts if part)


def _pop(record: Record, names: tuple[str, ...], option: str) -> Any:
    """Remove and return the value of the first of these keys; messages say that ``option`` names another."""
    for name in names:
        if name in record:
            return record.pop(name)
    if not names[1:]:
        others = f"other keys: {', '.join(map(str, record)) or 'none'}"
        raise BadValueError(f"missing key {names[0]!r}; {suggest(names[0], record, others)}")
    raise BadValueError(
        f"missing key {names[0]!r} (or {', '.join(names[1:])}); other keys: "
        f"{', '.join(map(str, record)) or 'none'}; another key is named by {option}"
    )


def as_id(identifier: Any) -> Any:
    """Convert an integer, but not a boolean, to a string; return other ids as they are."""
    return str(identifier) if type(identifier) is int or isinstance(identifier, np.integer) else identifier


def check_documents(
    documents: Iterable[Document] | Iterable[Query], progress: Callable[[int], object] | None = None
) -> int:
    """Read all documents once, so that one that cannot be indexed is an error before hours of encoding.

    Memory holds one 64-bit hash per document, not the ids.

    Args:
        documents: Documents, or queries, that can be iterated several times.
        progress: Called with 1 after each of them.

    Returns:
        The number of documents.

    Raises:
        BadValueError: A record is malformed, an id appears twice, or metadata has an infinite number or NaN;
            the message names file and lines.
        StorageError: The source cannot be read.

    Examples:
        >>> check_documents([Document("d1", "one"), Document("d2", "two")])
        2
    """
    name = getattr(documents, "name", "documents")
    if not isinstance(documents, Iterable):
        raise BadTypeError(f"checking {name}: got {brief(documents)}, expected documents")
    if getattr(documents, "once", False) or iter(documents) is documents:
        raise BadTypeError(f"checking {name}: it can be read only once; save it to a file or pass a list")

    def numbered() -> Iterator[tuple[int, Document | Query]]:
        return documents.numbered() if isinstance(documents, Source) else enumerate(documents, 1)

    hashes = array("q")
    for number, item in numbered():
        _check_storable(f"{name}:{number}", item)
        hashes.append(hash(item.id))
        if progress is not None:
            progress(1)
    ordered = np.sort(np.frombuffer(hashes, dtype=np.int64))
    repeated = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    first: dict[str, int] = {}
    for number, document in numbered() if repeated else ():  # different ids may have equal hashes
        if hash(document.id) in repeated:
            if document.id in first:
                raise BadValueError(
                    f"{name}:{number}: id {document.id!r} was used before, at {first[document.id]}; "
                    "ids must be unique"
                )
            first[document.id] = number
    if isinstance(documents, Source):
        documents.count = len(hashes)
    return len(hashes)


def _check_storable(where: str, item: object) -> None:
    if not isinstance(item, Document | Query):
        raise BadTypeError(f"{where}: got {brief(item)}, expected a Document")
    if isinstance(item, Document) and item.metadata:
        try:
            _STORED.encode(item.metadata)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadValueError(f"{where}: metadata that no index can store: {error}") from error
