"""Documents of an index as users name them: rows of ids, rows that a filter allows, hits with their texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np

from irkit.arguments import shown
from irkit.data import JSON, Document
from irkit.errors import BadTypeError, BadValueError
from irkit.index import Documents, Hits

__all__ = ["Filter", "Hit", "Rows", "allowed_rows", "find_rows", "given_strings", "read_hits"]

Filter: TypeAlias = Mapping[str, Any] | Iterable[str]
"""Conditions on metadata, where ``"_id"`` stands for the id; or ids."""
Rows: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that a search found; a higher score is better."""

    id: str
    score: float
    text: str
    title: str
    metadata: Mapping[str, JSON]

    @classmethod
    def of(cls, document: Document, score: float) -> Self:
        """A hit of a document."""
        return cls(document.id, score, document.text, document.title, document.metadata)


def find_rows(documents: Documents, ids: Sequence[str], operation: str, advice: str) -> Rows:
    """Rows ``(n,)`` of documents by id.

    Raises:
        BadValueError: There is no document of one of the ids; the message ends with ``advice``.
    """
    rows = documents.find(ids)
    missing = [name for name, row in zip(ids, rows.tolist(), strict=True) if row < 0]
    if missing:
        others = f", nor {len(missing) - 1} more of those given" if len(missing) > 1 else ""
        raise BadValueError(f"{operation}: the index has no document {missing[0]!r}{others}; {advice}")
    return rows


def allowed_rows(documents: Documents, filter: Filter) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows a filter allows, ``(len(documents),)``; ids that are not there allow none.

    Raises:
        BadTypeError: It is neither conditions nor ids.
        BadValueError: A condition makes no sense.
    """
    if isinstance(filter, str) or not isinstance(filter, Iterable):
        raise BadTypeError(
            f"filter: got {shown(filter, 100)}, expected conditions in a dictionary or a list of ids"
        )
    conditions = dict(filter) if isinstance(filter, Mapping) else {"_id": list(filter)}
    ids = conditions.pop("_id", None)
    allowed = documents.filter(conditions)
    if ids is None:
        return allowed
    names = [ids] if isinstance(ids, str) else ids
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise BadTypeError(f"filter: ids are {shown(ids, 100)}, expected strings in a list")
    chosen = np.zeros(len(allowed) + 1, np.bool_)
    chosen[documents.find(names)] = True  # unknown ones are -1: the place after the last row
    return allowed & chosen[:-1]


def given_strings(operation: str, given: str | Iterable[str]) -> list[str]:
    """A string or several, in a list.

    Raises:
        BadTypeError: It is neither.
    """
    single = isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable)
    items: list[Any] = [given] if single else list(given)
    wrong = [item for item in items if not isinstance(item, str)]
    if wrong:
        raise BadTypeError(f"{operation}: got {shown(wrong[0], 100)}, expected a string or several")
    return items


def read_hits(documents: Documents, found: Hits) -> list[list[Hit]]:
    """The hits of each query with their texts; each document is read once."""
    rows = np.unique(found.rows[found.rows >= 0])
    known = dict(zip(rows.tolist(), documents.fetch(rows), strict=True))
    return [
        [Hit.of(known[row], score) for row, score in zip(*line, strict=True) if row >= 0]
        for line in zip(found.rows.tolist(), found.scores.tolist(), strict=True)
    ]
