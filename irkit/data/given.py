"""Collections as Python programs hand them over: documents, records, pairs or mere texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from irkit.arguments import shown
from irkit.data.document import Document, Query
from irkit.data.source import as_name, to_document
from irkit.errors import BadTypeError, BadValueError

__all__ = ["Collection", "Queries", "given_documents", "given_queries"]

Collection: TypeAlias = (
    str | Path | Mapping[str, Any] | Iterable[Document | Mapping[str, Any] | tuple[str, Any] | str]
)
"""A source; id -> text, vector or record; or an iterable of documents, records, texts, vectors or pairs."""

Queries: TypeAlias = str | Path | Mapping[str, Any] | Iterable[Query | tuple[str, Any]]
"""A source; id -> text or vector; or an iterable of queries, or of pairs of id and either."""


def given_documents(given: Collection, start: int = 0) -> Iterator[Document]:
    """Documents of whatever holds them.

    Args:
        given: A source (see `irkit.data`); id -> text, or id -> record as BEIR holds a corpus; or an
            iterable of `Document`, records such as ``{"_id": "1", "text": "..."}``, pairs of id and text,
            or texts, whose ids are their positions; vectors (lists of numbers, arrays) may stand for texts.
        start: Position of the first.

    Raises:
        BadTypeError: It is none of these.
        BadValueError: An item is malformed; the message says which.

    Examples:
        >>> [document.id for document in given_documents(["a text", ("x", "another")])]
        ['0', 'x']
    """
    from irkit.data import read_documents

    for position, item in enumerate(_items(given, read_documents), start):
        try:
            yield item if isinstance(item, Document) else _document(item, position)
        except (BadValueError, BadTypeError) as error:
            raise BadValueError(f"item {position - start} of the documents given: {error}") from error


def given_queries(given: Queries) -> Iterator[Query]:
    """Queries of whatever holds them: a source, id -> text, or an iterable of `Query` or of pairs.

    Raises:
        BadTypeError: It is none of these.

    Examples:
        >>> list(given_queries({"q1": "a question"}))
        [Query(id='q1', text='a question')]
    """
    from irkit.data import read_queries

    for item in _items(given, read_queries):
        if not isinstance(item, Query) and not (isinstance(item, tuple) and len(item) == 2):
            raise BadTypeError(f"queries: expected a Query or (id, text), got {shown(item)}")
        if isinstance(item, tuple):
            name, content = as_name(item[0]), item[1]
            item = Query(name, "", content) if _is_vector(content) else Query(name, content)
        yield item


def _items(given: Any, read: Callable[[str | Path], Iterable[Any]]) -> Iterable[Any]:
    if isinstance(given, str | Path):
        return read(given)
    if hasattr(given, "columns") and hasattr(given, "to_dict"):  # would iterate the names of its columns
        raise BadTypeError(
            f"got a {type(given).__name__}, expected its rows; give frame.to_dict('records'), or pairs as "
            "zip(frame.id, frame.text)"
        )
    if not isinstance(given, Iterable):
        raise BadTypeError(f"expected the name of a source or an iterable, got {shown(given)}")
    return given.items() if isinstance(given, Mapping) else given


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
        raise BadTypeError(f"expected a Document, a record, (id, text) or a text, got {shown(item)}")
    return to_document(dict(item))
