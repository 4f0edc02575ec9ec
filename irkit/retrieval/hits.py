"""Between rows of an index and what users see: ids, filters, and hits with their texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np

from irkit.arguments import brief
from irkit.data import JSON, Document
from irkit.errors import BadTypeError, BadValueError
from irkit.index import Documents, Hits

Filter: TypeAlias = Mapping[str, Any] | Iterable[str]
"""Conditions on metadata, where ``"_id"`` stands for the id; or ids."""
Rows: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Hit:
    """A result of a search: a document and its score; a higher score is better."""

    id: str
    score: float
    text: str
    title: str
    metadata: Mapping[str, JSON]

    @classmethod
    def of(cls, document: Document, score: float) -> Self:
        """Make a hit of a document."""
        return cls(document.id, score, document.text, document.title, document.metadata)


def find_rows(documents: Documents, ids: Sequence[str], operation: str, advice: str) -> Rows:
    """Return the rows ``(n,)`` of documents.

    Raises:
        BadValueError: The index has no document of an id; the message ends with ``advice``.
    """
    rows = documents.find(ids)
    missing = [name for name, row in zip(ids, rows.tolist(), strict=True) if row < 0]
    if missing:
        others = f", nor {len(missing) - 1} more of those given" if len(missing) > 1 else ""
        raise BadValueError(f"{operation}: the index has no document {missing[0]!r}{others}; {advice}")
    return rows


def allowed_rows(documents: Documents, filter: Filter) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return a mask ``(len(documents),)`` of the rows that a filter allows; unknown ids allow none.

    Raises:
        BadTypeError: The filter is neither conditions nor ids.
        BadValueError: A condition makes no sense.
    """
    if isinstance(filter, str) or not isinstance(filter, Iterable):
        raise BadTypeError(
            f"filter: got {brief(filter, 100)}, expected conditions in a dictionary or a list of ids"
        )
    conditions = dict(filter) if isinstance(filter, Mapping) else {"_id": list(filter)}
    ids = conditions.pop("_id", None)
    allowed = documents.filter(conditions)
    if ids is None:
        return allowed
    names = [ids] if isinstance(ids, str) else ids
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise BadTypeError(f"filter: ids are {brief(ids, 100)}, expected strings in a list")
    named = np.zeros(len(allowed) + 1, np.bool_)
    named[documents.find(names)] = True  # the row of an unknown id is -1, the extra element
    return allowed & named[:-1]


def parse_strings(operation: str, strings: str | Iterable[str]) -> list[str]:
    """Return one string or several as a list.

    Raises:
        BadTypeError: An item is not a string.
    """
    single = isinstance(strings, str | bytes | Mapping) or not isinstance(strings, Iterable)
    items: list[Any] = [strings] if single else list(strings)
    wrong = [item for item in items if not isinstance(item, str)]
    if wrong:
        raise BadTypeError(f"{operation}: got {brief(wrong[0], 100)}, expected a string or several")
    return items


def fetch_lists(documents: Documents, rows: Sequence[Rows]) -> list[list[Document]]:
    """Return the documents of several arrays of rows; each document is read once."""
    distinct = np.unique(np.concatenate([*rows, np.empty(0, np.int64)]))
    by_row = dict(zip(distinct.tolist(), documents.fetch(distinct), strict=True))
    return [[by_row[row] for row in line.tolist()] for line in rows]


def read_hits(documents: Documents, hits: Hits) -> list[list[Hit]]:
    """Return the hits of each query with their texts."""
    rows = [line[line >= 0] for line in hits.rows]
    return [
        [Hit.of(document, score) for document, score in zip(line, scores.tolist(), strict=False)]
        for line, scores in zip(fetch_lists(documents, rows), hits.scores, strict=True)
    ]
