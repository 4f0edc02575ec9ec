"""Parse documents and queries in any form that the Python API takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from irkit.arguments import brief
from irkit.data.document import Document, Query
from irkit.data.source import as_id, to_document
from irkit.errors import BadTypeError, BadValueError

DocumentsLike: TypeAlias = (
    str | Path | Mapping[str, Any] | Iterable[Document | Mapping[str, Any] | tuple[str, Any] | str]
)
"""A source; id -> text, vector or record; or an iterable of documents, records, texts, vectors or pairs."""

QueriesLike: TypeAlias = str | Path | Mapping[str, Any] | Iterable[Query | tuple[str, Any]]
"""A source; id -> text or vector; or an iterable of queries, or of pairs of id and either."""


def parse_documents(documents: DocumentsLike, start: int = 0) -> Iterator[Document]:
    """Yield documents from any form.

    Args:
        documents: A source (see `irkit.data`); id -> text, or id -> record, as BEIR holds a corpus; or an
            iterable of `Document`, records such as ``{"_id": "1", "text": "..."}``, pairs of id and text, or
            texts, whose ids are their positions. Vectors (lists of numbers, arrays) may replace texts.
        start: Position of the first document.

    Raises:
        BadTypeError: ``documents`` has another form.
        BadValueError: An item is malformed; the message says which.

    Examples:
        >>> [document.id for document in parse_documents(["a text", ("x", "another")])]
        ['0', 'x']
    """
    from irkit.data import read_documents

    for position, item in enumerate(_items(documents, read_documents), start):
        try:
            yield item if isinstance(item, Document) else _document(item, position)
        except (BadValueError, BadTypeError) as error:
            raise BadValueError(f"item {position - start} of the documents given: {error}") from error


def parse_queries(queries: QueriesLike) -> Iterator[Query]:
    """Yield queries from a source, id -> text, or an iterable of `Query` or of pairs.

    Raises:
        BadTypeError: ``queries`` has another form.

    Examples:
        >>> list(parse_queries({"q1": "a question"}))
        [Query(id='q1', text='a question')]
    """
    from irkit.data import read_queries

    for item in _items(queries, read_queries):
        if not isinstance(item, Query) and not (isinstance(item, tuple) and len(item) == 2):
            raise BadTypeError(f"queries: expected a Query or (id, text), got {brief(item)}")
        if isinstance(item, tuple):
            name, content = as_id(item[0]), item[1]
            item = Query(name, "", content) if _is_vector(content) else Query(name, content)
        yield item


def _items(collection: Any, read: Callable[[str | Path], Iterable[Any]]) -> Iterable[Any]:
    if isinstance(collection, str | Path):
        return read(collection)
    if hasattr(collection, "columns") and hasattr(collection, "to_dict"):  # iterating yields column names
        raise BadTypeError(
            f"got a {type(collection).__name__}, expected its rows; give frame.to_dict('records'), or pairs "
            "as zip(frame.id, frame.text)"
        )
    if not isinstance(collection, Iterable):
        raise BadTypeError(f"expected the name of a source or an iterable, got {brief(collection)}")
    return collection.items() if isinstance(collection, Mapping) else collection


def _is_vector(content: Any) -> bool:
    return isinstance(content, Mapping | list | tuple) or hasattr(content, "shape")


def _document(item: Any, position: int) -> Document:
    if isinstance(item, str):
        return Document(str(position), item)
    if isinstance(item, list) or hasattr(item, "shape"):
        return Document(str(position), "", vector=item)
    if isinstance(item, tuple) and len(item) == 2:
        name, content = item
        if not isinstance(content, Mapping):
            content = {"vector" if _is_vector(content) else "text": content}
        item = {**content, "_id": name}
    if not isinstance(item, Mapping):
        raise BadTypeError(f"expected a Document, a record, (id, text) or a text, got {brief(item)}")
    return to_document(dict(item))
