"""One line of a training file: a query and its documents, by id or by text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from irkit.errors import BadTypeError, BadValueError
from irkit.files import replacing

__all__ = ["Record", "to_line", "write_examples"]


@dataclass(frozen=True, slots=True)
class Record:
    """A query with documents, whose texts are here or elsewhere.

    Args:
        query_id: Name of the query; may be empty if its text is here.
        query: Text of the query; None if it is looked up by id.
        document_ids: Names of the documents, the relevant ones first; may be empty if their texts are here.
        documents: Texts of the documents; None if they are looked up by id.
        scores: What a teacher gives each document; None if there are none.
        positives: How many of the first documents are known to be relevant.

    Raises:
        BadValueError: There are no documents, neither id nor text, or numbers that do not match.
        BadTypeError: An id or a text is no string.

    Examples:
        >>> Record("q1", document_ids=("d7", "d3"), scores=(0.9, 0.2)).positives
        1
    """

    query_id: str
    query: str | None = None
    document_ids: tuple[str, ...] = ()
    documents: tuple[str, ...] | None = None
    scores: tuple[float, ...] | None = None
    positives: int = 1

    def __post_init__(self) -> None:
        for each in (self.query_id, self.query or "", *self.document_ids, *(self.documents or ())):
            if not isinstance(each, str):
                raise BadTypeError(f"expected a string as id or text, got {each!r:.60}")
        if not self.query_id and self.query is None:
            raise BadValueError("the query has neither id nor text")
        n = len(self)
        if not n or "" in self.document_ids:
            raise BadValueError("a document has an empty id" if n else "there are no documents")
        if type(self.positives) is not int or not 0 <= self.positives <= n:
            raise BadValueError(f"{self.positives!r} of {n} documents are relevant; expected 0 to {n}")
        for name, values in (("ids", self.document_ids or None), ("scores", self.scores)):
            if values is not None and len(values) != n:
                raise BadValueError(f"{len(values)} {name} of {n} documents; expected one of each")
        _check_scores(self.scores or ())

    def __len__(self) -> int:
        return len(self.document_ids if self.documents is None else self.documents)


def _check_scores(scores: tuple[float, ...]) -> None:
    for score in scores:
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise BadValueError(f"expected finite numbers as scores, got {score!r:.60}")


def to_line(record: Record) -> str:
    r"""A record as one line of JSON with its line break, which `read_records` reads back exactly.

    Examples:
        >>> to_line(Record("q1", document_ids=("d1", "d2")))
        '{"query_id": "q1", "document_ids": ["d1", "d2"], "positives": 1}\n'
    """
    values = {
        "query_id": record.query_id or None,
        "query": record.query,
        "document_ids": record.document_ids or None,
        "documents": record.documents,
        "positives": record.positives,
        "scores": record.scores,
    }
    return json.dumps({name: v for name, v in values.items() if v is not None}, ensure_ascii=False) + "\n"


def write_examples(path: str | Path, records: Iterable[Record]) -> int:
    """Write records, one JSON object a line; the file appears whole or not at all.

    Returns:
        Their number.

    Raises:
        StorageError: The file cannot be written.
    """
    count = 0
    with replacing(path) as aside, aside.open("w", encoding="utf-8") as stream:
        for record in records:
            stream.write(to_line(record))
            count += 1
    return count
