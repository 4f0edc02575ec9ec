"""What collections are made of: documents, queries and relevance judgments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from irkit.errors import BadTypeError, BadValueError

__all__ = ["JSON", "Document", "Qrels", "Query"]

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
"""What a JSON file can hold."""

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
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, JSON] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check(self.id, text=self.text, title=self.title)

    @property
    def full_text(self) -> str:
        """Title and text joined by a space, as BEIR and its published scores do it."""
        return f"{self.title} {self.text}".strip()


@dataclass(frozen=True, slots=True)
class Query:
    """One information need: an ``id``, unique in its collection, and a ``text``."""

    id: str
    text: str

    def __post_init__(self) -> None:
        _check(self.id, text=self.text)


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
