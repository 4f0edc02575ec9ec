"""What collections are made of: documents, queries and relevance judgments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from irkit.errors import BadTypeError, BadValueError

__all__ = ["JSON", "Document", "Qrels", "Query", "Vector", "check_vector"]

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
"""What a JSON file can hold."""

Vector: TypeAlias = Mapping[str, float]
"""Weights of terms, computed elsewhere."""

Qrels: TypeAlias = dict[str, dict[str, int]]
"""Relevance judgments: query id -> document id -> grade, where 1 and more is relevant."""


@dataclass(frozen=True, slots=True)
class Document:
    """One unit of retrieval.

    Args:
        id: Unique in its collection, never empty.
        text: The body; may be empty.
        title: Empty where there is none.
        metadata: Anything JSON can hold, for filters and for display.
        vector: Weights of terms, for `irkit.lexical.Impacts`; only an index of these keeps them.
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, JSON] = field(default_factory=dict, hash=False)
    vector: Vector | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check(self.id, text=self.text, title=self.title)
        check_vector(self.vector)

    @property
    def full_text(self) -> str:
        """Title and text joined by a space, as BEIR and its published scores do it."""
        return f"{self.title} {self.text}".strip()


@dataclass(frozen=True, slots=True)
class Query:
    """One information need.

    Args:
        id: Unique in its collection, never empty.
        text: What is asked; may be empty.
        vector: Weights of terms, for `irkit.lexical.Impacts`.
    """

    id: str
    text: str
    vector: Vector | None = field(default=None, hash=False, repr=False)

    def __post_init__(self) -> None:
        _check(self.id, text=self.text)
        check_vector(self.vector)


def _check(identifier: str, **texts: str) -> None:
    for name, value in (("id", identifier), *texts.items()):
        if not isinstance(value, str):
            raise BadTypeError(f"{name}: expected a string, got {value!r:.60} ({type(value).__name__})")
        try:
            value.isascii() or value.encode()
        except UnicodeEncodeError as error:  # tokenizers and files would stumble over it much later
            raise BadValueError(
                f"{name}: character {error.start} is an unpaired surrogate ({value[error.start]!a}), "
                "which no UTF-8 text can hold; repair or drop it"
            ) from error
    if not identifier:
        raise BadValueError("id: expected a name that is not empty")


def check_vector(vector: object) -> None:
    """Raise unless ``vector`` is None or has a finite number for each term, a line that UTF-8 can hold."""
    if vector is None:
        return
    if not isinstance(vector, Mapping):
        raise BadTypeError(f"vector: expected weights by term, got {vector!r:.60}")
    for term, weight in vector.items():
        if not isinstance(term, str) or not isinstance(weight, int | float) or isinstance(weight, bool):
            raise BadTypeError(f"vector: expected a number for each term, got {term!r:.60}: {weight!r:.60}")
        if not math.isfinite(weight):
            raise BadValueError(f"vector: the weight of {term!r:.60} is {weight}; expected finite ones")
        if "\n" in term or (not term.isascii() and any("\ud800" <= letter <= "\udfff" for letter in term)):
            raise BadValueError(f"vector: term {term!a:.60} has a line break or an unpaired surrogate")
