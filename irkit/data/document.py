"""The items of a collection: `Document`, `Query` and relevance judgments."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from irkit.arguments import brief
from irkit.errors import BadTypeError, BadValueError

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
"""A value of a JSON file."""

Vector: TypeAlias = Mapping[str, float] | Sequence[float] | Sequence[Sequence[float]] | np.ndarray[Any, Any]
"""A representation computed elsewhere: weights by term, numbers, or a row of numbers per token."""

Qrels: TypeAlias = dict[str, dict[str, int]]
"""Relevance judgments: query id -> document id -> grade; a grade of 1 or more is relevant."""


@dataclass(frozen=True, slots=True)
class Document:
    """A unit of retrieval.

    Args:
        id: Unique in its collection, never empty.
        text: The body; may be empty.
        title: The title; may be empty.
        metadata: JSON values, for filters and for display.
        vector: Representation computed elsewhere, for `irkit.encoder_free.Vectors` or
            `irkit.encoder_free.Impacts`; other indexes ignore it. Numbers become an array of float32.
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, JSON] = field(default_factory=dict, hash=False)
    vector: Vector | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check(self.id, text=self.text, title=self.title)
        if not isinstance(self.metadata, Mapping):
            raise BadTypeError(f"metadata: expected keys and values, got {brief(self.metadata)}")
        object.__setattr__(self, "vector", as_vector(self.vector))

    @property
    def full_text(self) -> str:
        """Title and text joined by a space, as BEIR does."""
        return f"{self.title} {self.text}".strip()


@dataclass(frozen=True, slots=True)
class Query:
    """An information need.

    Args:
        id: Unique in its collection, never empty.
        text: The question or keywords; may be empty.
        vector: See `Document`.
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
            raise BadTypeError(f"{name}: expected a string, got {brief(value)} ({type(value).__name__})")
        try:
            value.isascii() or value.encode()
        except UnicodeEncodeError as error:  # otherwise tokenizers and files fail much later
            raise BadValueError(
                f"{name}: character {error.start} is an unpaired surrogate ({value[error.start]!a}), "
                "which no UTF-8 text can hold; repair or drop it"
            ) from error
    if not identifier:
        raise BadValueError("id: expected a name that is not empty")


def as_vector(vector: Any) -> Any:
    """Check a vector; convert numbers to an array of float32 ``(dim,)`` or ``(tokens, dim)``.

    An empty list has no tokens, and the shape ``(0,)``. Weights by term and None are returned as they are.

    Raises:
        BadTypeError: ``vector`` is neither weights by term nor numbers.
        BadValueError: The array has no axis or more than two, or a number is NaN or infinite.
    """
    if vector is None or isinstance(vector, Mapping):
        check_vector(vector)
        return vector
    if hasattr(vector, "detach"):  # a tensor
        vector = vector.detach().cpu().float()
    try:
        array = np.asarray(vector)
    except ValueError:  # rows of different lengths
        array = np.empty(0, object)
    if array.dtype.kind not in "fiu":
        raise BadTypeError(
            f"vector: expected weights by term, numbers, or rows of as many numbers, got {brief(vector)}"
        )
    with np.errstate(over="ignore"):  # infinite numbers are refused below
        numbers = array.astype(np.float32, copy=False)
    if numbers.shape == (0,):  # a document without tokens
        return numbers
    if numbers.ndim not in (1, 2) or not numbers.shape[-1]:
        raise BadValueError(
            f"vector: expected numbers (dim,), or of tokens (tokens, dim), got shape {numbers.shape}"
        )
    if not np.isfinite(numbers).all():
        position = tuple(map(int, np.argwhere(~np.isfinite(numbers))[0]))
        raise BadValueError(
            f"vector: the number at {', '.join(map(str, position))} is {numbers[position]} in float32; "
            "expected finite ones"
        )
    return numbers


def check_vector(vector: object) -> None:
    """Raise unless ``vector`` is None or maps terms, single lines of UTF-8, to finite numbers."""
    if vector is None:
        return
    if not isinstance(vector, Mapping):
        raise BadTypeError(f"vector: expected weights by term, got {brief(vector)}")
    for term, weight in vector.items():
        if not isinstance(term, str) or not isinstance(weight, int | float) or isinstance(weight, bool):
            raise BadTypeError(f"vector: expected a number for each term, got {brief(term)}: {brief(weight)}")
        if not abs(weight) <= sys.float_info.max:
            raise BadValueError(
                f"vector: the weight of {brief(term)} is {brief(weight)}; expected finite ones"
            )
        if "\n" in term or (not term.isascii() and any("\ud800" <= letter <= "\udfff" for letter in term)):
            raise BadValueError(f"vector: term {term!a:.60} has a line break or an unpaired surrogate")
