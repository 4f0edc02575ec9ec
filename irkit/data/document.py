"""What collections are made of: documents, queries and relevance judgments."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from irkit.arguments import shown
from irkit.errors import BadTypeError, BadValueError

__all__ = ["JSON", "Document", "Qrels", "Query", "Vector", "as_vector", "check_vector"]

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
"""What a JSON file can hold."""

Vector: TypeAlias = Mapping[str, float] | Sequence[float] | Sequence[Sequence[float]] | np.ndarray[Any, Any]
"""Computed elsewhere: weights by term; numbers; or a row of numbers for each token."""

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
        vector: Computed elsewhere, for `irkit.lexical.Vectors` and `irkit.lexical.Impacts`; only an index of
            these keeps it. Numbers become an array of float32.
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, JSON] = field(default_factory=dict, hash=False)
    vector: Vector | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check(self.id, text=self.text, title=self.title)
        if not isinstance(self.metadata, Mapping):
            raise BadTypeError(f"metadata: expected keys and values, got {shown(self.metadata)}")
        object.__setattr__(self, "vector", as_vector(self.vector))

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
        vector: As of a `Document`.
    """

    id: str
    text: str
    vector: Vector | None = field(default=None, hash=False, repr=False)

    def __post_init__(self) -> None:
        _check(self.id, text=self.text)
        object.__setattr__(self, "vector", as_vector(self.vector))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Query) or (self.id, self.text) != (other.id, other.text):
            return False
        first, second = self.vector, other.vector
        if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
            return np.array_equal(first, second)
        return type(first) is type(second) and first == second


def _check(identifier: str, **texts: str) -> None:
    for name, value in (("id", identifier), *texts.items()):
        if not isinstance(value, str):
            raise BadTypeError(f"{name}: expected a string, got {shown(value)} ({type(value).__name__})")
        try:
            value.isascii() or value.encode()
        except UnicodeEncodeError as error:  # tokenizers and files would stumble over it much later
            raise BadValueError(
                f"{name}: character {error.start} is an unpaired surrogate ({value[error.start]!a}), "
                "which no UTF-8 text can hold; repair or drop it"
            ) from error
    if not identifier:
        raise BadValueError("id: expected a name that is not empty")


def as_vector(vector: Any) -> Any:
    """Weights by term as they are, numbers as an array of float32, ``(dim,)`` or ``(tokens, dim)``; or None.

    Raises:
        BadTypeError: It is something else.
        BadValueError: There are more axes, or none, or a number is NaN or infinite.
    """
    if vector is None or isinstance(vector, Mapping):
        check_vector(vector)
        return vector
    if hasattr(vector, "detach"):  # of torch
        vector = vector.detach().cpu().float()
    try:
        given = np.asarray(vector)
    except ValueError:  # rows of different lengths
        given = np.empty(0, object)
    if given.dtype.kind not in "fiu":
        raise BadTypeError(
            f"vector: expected weights by term, numbers, or rows of as many numbers, got {shown(vector)}"
        )
    with np.errstate(over="ignore"):  # what float32 cannot hold is told below
        numbers = given.astype(np.float32, copy=False)
    if numbers.ndim not in (1, 2) or not numbers.shape[-1]:
        raise BadValueError(
            f"vector: expected numbers (dim,), or of tokens (tokens, dim), got shape {numbers.shape}"
        )
    if not np.isfinite(numbers).all():
        place = tuple(map(int, np.argwhere(~np.isfinite(numbers))[0]))
        raise BadValueError(
            f"vector: the number at {', '.join(map(str, place))} is {numbers[place]} in float32; expected "
            "finite ones"
        )
    return numbers


def check_vector(vector: object) -> None:
    """Raise unless ``vector`` is None or has a finite number for each term, a line that UTF-8 can hold."""
    if vector is None:
        return
    if not isinstance(vector, Mapping):
        raise BadTypeError(f"vector: expected weights by term, got {shown(vector)}")
    for term, weight in vector.items():
        if not isinstance(term, str) or not isinstance(weight, int | float) or isinstance(weight, bool):
            raise BadTypeError(f"vector: expected a number for each term, got {shown(term)}: {shown(weight)}")
        if not abs(weight) <= sys.float_info.max:
            raise BadValueError(
                f"vector: the weight of {shown(term)} is {shown(weight)}; expected finite ones"
            )
        if "\n" in term or (not term.isascii() and any("\ud800" <= letter <= "\udfff" for letter in term)):
            raise BadValueError(f"vector: term {term!a:.60} has a line break or an unpaired surrogate")
