"""Options of a search: which hits of a ranking are returned, with which fields of their documents.

A grouped search first ranks as many documents as hits are wanted, and then four times as many again and
again, until there are enough hits or no more documents. So a search of an exact index gives what a ranking of
all documents gives. In all it ranks fewer than six times the documents that one search of the right depth
would rank, and reads the metadata of each document once.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar, cast

import numpy as np

from irkit.arguments import brief, check_counts, check_options, is_count, is_finite, suggest
from irkit.data import Document
from irkit.errors import BadTypeError, BadValueError
from irkit.index import Documents
from irkit.index.filters import check_key

Array = np.ndarray[Any, Any]
Key = TypeVar("Key", bound=Hashable)

DEEPER = 4
"""Factor by which a grouped search that found too few hits increases the number of ranked documents."""

DEEP_HITS = 1 << 20
"""Hits of several queries that a grouped search finds together."""

_READ = 1024  # documents whose metadata is read at once
_FIELDS = ("id", "title", "text", "metadata")


class RankOptions(TypedDict, total=False):
    """Options of `Retriever.search` and `run`, and of `Hybrid`: which hits they return.

    There is one ranking, of all documents that the filter allows. ``threshold`` and ``group_by`` leave hits
    out of it, ``offset`` skips hits of the rest, and ``k`` hits follow.

    Attributes:
        offset: Number of hits to skip: ``search(q, 10, offset=20)`` returns ``search(q, 30)[20:]``. An
            approximate index may rank differently for another sum of ``offset`` and ``k``.
        threshold: Return only hits with this score or a higher one. Scores have the scale of the model or,
            in a `Hybrid`, of the fusion.
        group_by: Key of metadata, such as ``"source"``: return at most ``per_group`` hits of each value, the
            best ones. ``k`` counts hits, and the search goes as deep as ``k`` hits take, see
            `irkit.retrieval.selection`. Documents without the key, or with null, are a group each. A list or
            a dictionary is one value.
        per_group: Number of hits of each group; by default 1.
    """

    offset: int
    threshold: float | None
    group_by: str | None
    per_group: int


class SearchOptions(RankOptions, total=False):
    """Options of `Retriever.search` and `Hybrid.search`: `RankOptions`, and what hits hold.

    Attributes:
        fields: What is returned of each document besides its id: any of ``"title"``, ``"text"``,
            ``"metadata"`` and single keys such as ``"metadata.source"``. What is left out is empty in the
            hits. Texts are not read from disk for ``[]`` or ``["id"]``. By default everything is returned.
    """

    fields: str | Iterable[str] | None


def group_of(document: Document, key: str) -> Hashable:
    """Return a value that is equal for all documents of one group, those with one value of ``key``.

    Examples:
        >>> whole, real = Document("a", "", metadata={"page": 1}), Document("b", "", metadata={"page": 1.0})
        >>> group_of(whole, "page") == group_of(real, "page"), group_of(whole, "source")
        (True, ('a',))
    """
    value = document.metadata.get(key)
    if value is None:
        return (document.id,)
    if isinstance(value, bool | int | float | str):
        return isinstance(value, bool), value  # in Python, True == 1
    return "json", json.dumps(value, sort_keys=True)


class Groups(Generic[Key]):
    """The groups of rows, or of ids; reads the metadata of each document once."""

    def __init__(self, read: Callable[[list[Key]], Iterable[Document]], key: str) -> None:
        self._read, self._key, self._known, self._missing = read, key, dict[Key, Hashable](), 0

    def __call__(self, names: list[Key]) -> list[Hashable]:
        """Return the group of each row or id."""
        new = [name for name in names if name not in self._known]
        for start in range(0, len(new), _READ):
            part = new[start : start + _READ]
            for name, document in zip(part, self._read(part), strict=True):
                self._known[name] = group_of(document, self._key)
                self._missing += self._key not in document.metadata
        return [self._known[name] for name in names]

    @property
    def found_none(self) -> bool:
        """Whether there were documents, and none of them has the key."""
        return bool(self._known) and self._missing == len(self._known)


@dataclass(frozen=True, slots=True)
class Selection:
    """Checked options of a search; see `RankOptions`."""

    k: int
    offset: int = 0
    threshold: float = -math.inf
    group_by: str | None = None
    per_group: int = 1
    fields: frozenset[str] | None = None

    @property
    def stop(self) -> int:
        """Number of hits up to the last one to return, skipped ones included."""
        return self.offset + self.k

    def choose(self, scores: Array, names: Sequence[Key], groups: Groups[Key] | None) -> Array:
        """Return the positions, ascending, of the first ``stop`` hits; the caller skips the first ``offset``.

        Args:
            scores: ``(n,)``, best first; rows of -inf are left out.
            names: Row or id of each hit.
            groups: Returns groups of rows or ids; None does not group.
        """
        # in float64: a comparison in float32 would round the threshold
        positions = np.flatnonzero((scores > -np.inf) & (scores.astype(np.float64) >= self.threshold))
        if groups is not None:
            seen: Counter[Hashable] = Counter()
            chosen = []
            of_hits = groups([names[position] for position in positions.tolist()])
            for position, group in zip(positions.tolist(), of_hits, strict=True):
                seen[group] += 1
                if seen[group] <= self.per_group:
                    chosen.append(position)
            positions = np.array(chosen, np.int64)
        return positions[: self.stop]


def parse_selection(operation: str, k: int, options: RankOptions, known: type) -> Selection:
    """Check the options of a search.

    Args:
        operation: Name for messages.
        k: Maximum number of hits.
        options: As they were given.
        known: The class that lists what this search takes: `RankOptions` or `SearchOptions`.

    Raises:
        BadTypeError: An option is unknown, or a name is not a string.
        BadValueError: A number is out of range, or a field is unknown.
    """
    check_options(operation, options, known.__annotations__)
    check_counts(operation, k=k, per_group=options.get("per_group", 1))
    offset, threshold, key = options.get("offset", 0), options.get("threshold"), options.get("group_by")
    if not is_count(offset, 0):
        raise BadValueError(
            f"{operation}: offset is {brief(offset)}; expected a whole number of 0 or more: hits to skip"
        )
    if threshold is not None and not is_finite(threshold):
        raise BadValueError(
            f"{operation}: threshold is {brief(threshold)}; expected a finite number, the lowest score"
        )
    if key is not None and not isinstance(key, str):
        raise BadTypeError(f"{operation}: group_by is {brief(key)}; expected a key of metadata, a string")
    if key is None and "per_group" in options:
        raise BadValueError(
            f"{operation}: per_group without group_by; give a key of metadata, such as group_by='source'"
        )
    return Selection(
        int(k),
        int(offset),
        -math.inf if threshold is None else float(threshold),
        key,
        int(options.get("per_group", 1)),
        _parse_fields(operation, cast(SearchOptions, options).get("fields")),
    )


def _parse_fields(operation: str, fields: Any) -> frozenset[str] | None:
    if fields is None:
        return None
    names = [fields] if isinstance(fields, str) or not isinstance(fields, Iterable) else list(fields)
    for name in names:
        if not isinstance(name, str):
            raise BadTypeError(f"{operation}: fields has {brief(name)}; expected names in a list")
        if name not in _FIELDS and not (name.startswith("metadata.") and name != "metadata."):
            hint = suggest(name, _FIELDS, f"expected {', '.join(_FIELDS)} or a key such as metadata.source")
            raise BadValueError(f"{operation}: fields has {brief(name)}; {hint}")
    return frozenset(names)


def check_group_key(operation: str, collections: Iterable[Documents], key: str) -> None:
    """Raise BadValueError if no document has a key; reads all metadata, once per state of an index."""
    keys = {name for documents in collections for name in documents.metadata_keys()}
    check_key(key, sorted(keys), f"{operation}: group_by {brief(key)}")
