"""What is trained on: a query with documents, and batches of them as the trainer gets them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from irkit.errors import BadValueError
from irkit.ragged import Ragged, to_device

__all__ = ["Batch", "Example"]


@dataclass(frozen=True, slots=True)
class Example:
    """One query with documents to be ranked for it.

    Args:
        query: Its text.
        documents: Their texts, the relevant ones first.
        scores: What a teacher gives each document, or a label of each; None if there are none.
        positives: How many of the first documents are known to be relevant.
        ids: Names of the documents; empty where texts are names enough.
        relevant: Names of all documents known to be relevant to the query, here or elsewhere.
    """

    query: str
    documents: tuple[str, ...]
    scores: tuple[float, ...] | None = None
    positives: int = 1
    ids: tuple[str, ...] = ()
    relevant: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        n = len(self.documents)
        if not n or not 0 <= self.positives <= n:
            raise BadValueError(f"Example: {self.positives} of {n} documents are relevant; expected 0 to {n}")
        for name, values in (("scores", self.scores), ("ids", self.ids or None)):
            if values is not None and len(values) != n:
                raise BadValueError(f"Example: {len(values)} {name} of {n} documents; expected one of each")


@dataclass(frozen=True)
class Batch:
    """``b`` queries, the ``d`` distinct documents of all of them, and how these belong together.

    Attributes:
        queries: Ragged ids, ``b`` rows.
        documents: Ragged ids, ``d`` rows.
        own: ``(b, n)`` int64 rows of ``documents`` that belong to each query, in the order of `Example`;
            -1 fills up where a query has fewer than ``n``.
        positives: ``(b,)`` int64, how many of the first ``own`` are known to be relevant.
        relevant: ``(b, d)`` bool, which documents of the batch are known to be relevant to a query.
        targets: ``(b, n)`` float32 scores of the teacher, NaN where ``own`` is -1; None if there are none.
        texts: Texts of the queries and of the documents, for losses with a model of their own; else None.
        keys: ``(d,)`` int64 that stand for the documents, equal in every process.
        names: ``(d,)`` int64 that stand for the ids of the documents.
        known: Ragged names of all documents known to be relevant to each query, also of those that are not
            in the batch: another process may have them. None, as ``names``, if only ``relevant`` is known.
    """

    queries: Ragged
    documents: Ragged
    own: Tensor
    positives: Tensor
    relevant: Tensor
    keys: Tensor
    targets: Tensor | None = None
    texts: tuple[list[str], list[str]] | None = None
    names: Tensor | None = None
    known: Ragged | None = None

    def __len__(self) -> int:
        return len(self.queries)

    def to(self, device: torch.device | str) -> Self:
        """On another device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device) if isinstance(value, Ragged) else to_device(value, device)
            for name, value in values.items()
            if isinstance(value, Tensor | Ragged)
        }
        return replace(self, **moved)
