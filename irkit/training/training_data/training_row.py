"""A row of training data: a query and its documents, by id or by text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from irkit.errors import BadTypeError, BadValueError
from irkit.utils.atomic import replacing


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A query with documents, which the row has as texts or names by id.

    Args:
        query_id: Id of the query; may be empty if the row has its text.
        query: Text of the query; None to look it up by id.
        document_ids: Ids of the documents, the relevant ones first; may be empty if the row has their texts.
        documents: Texts of the documents; None to look them up by id.
        scores: Score of a teacher for each document; None if there are no scores.
        positives: How many of the first documents are known to be relevant.

    Raises:
        BadValueError: The row has no documents, the query has neither id nor text, or numbers do not match.
        BadTypeError: An id or a text is not a string.

    Examples:
        >>> TrainingRow("q1", document_ids=("d7", "d3"), scores=(0.9, 0.2)).positives
        1
    """

    query_id: str
    query: str | None = None
    document_ids: tuple[str, ...] = ()
    documents: tuple[str, ...] | None = None
    scores: tuple[float, ...] | None = None
    positives: int = 1

    def __post_init__(self) -> None:
        for text in (self.query_id, self.query or "", *self.document_ids, *(self.documents or ())):
            if not isinstance(text, str):
                raise BadTypeError(f"expected a string as id or text, got {text!r:.60}")
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
        for score in self.scores or ():
            if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
                raise BadValueError(f"expected finite numbers as scores, got {score!r:.60}")

    @property
    def names(self) -> tuple[str, ...]:
        """Ids of the documents, or their texts if there are no ids."""
        return self.document_ids or self.documents or ()

    def __len__(self) -> int:
        return len(self.document_ids if self.documents is None else self.documents)


def to_line(row: TrainingRow) -> str:
    r"""Return a row as one line of JSON with its line break, which `read_training_rows` reads back exactly.

    Examples:
        >>> to_line(TrainingRow("q1", document_ids=("d1", "d2")))
        '{"query_id": "q1", "document_ids": ["d1", "d2"], "positives": 1}\n'
    """
    values = {
        "query_id": row.query_id or None,
        "query": row.query,
        "document_ids": row.document_ids or None,
        "documents": row.documents,
        "positives": row.positives,
        "scores": row.scores,
    }
    return json.dumps({name: v for name, v in values.items() if v is not None}, ensure_ascii=False) + "\n"


def write_examples(path: str | Path, rows: Iterable[TrainingRow]) -> int:
    """Write rows, one JSON object per line; the file appears whole or not at all.

    Returns:
        The number of rows.

    Raises:
        StorageError: The file cannot be written.
    """
    count = 0
    with replacing(path) as aside, aside.open("w", encoding="utf-8") as stream:
        for count, row in enumerate(rows, 1):  # noqa: B007
            stream.write(to_line(row))
    return count
