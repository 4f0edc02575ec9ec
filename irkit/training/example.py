"""Training examples, a query with documents each, and the batches that the trainer gets."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from irkit.core.ragged import Ragged, to_device
from irkit.errors import BadValueError


class Movable:
    """Dataclass whose tensors move to another device together."""

    def to(self, device: torch.device | str) -> Self:
        """Return a copy on another device."""
        moved: dict[str, Any] = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Ragged):
                moved[field.name] = value.to(device)
            elif isinstance(value, Tensor):
                moved[field.name] = to_device(value, device)
        return replace(self, **moved)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class Example:
    """One query and the documents to rank for it.

    Args:
        query: Text of the query.
        documents: Texts of the documents, the relevant ones first.
        scores: Score of a teacher, or label, per document; None without scores.
        positives: How many of the first documents are known to be relevant.
        ids: Ids of the documents; empty if the texts identify them.
        relevant: Ids of all documents known to be relevant to the query, in this example or elsewhere.
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
class Batch(Movable):
    """``b`` queries and the ``d`` distinct documents of all of them.

    Attributes:
        queries: Ragged token ids, ``b`` rows.
        documents: Ragged token ids, ``d`` rows.
        own: ``(b, n)`` int64, the rows of ``documents`` that belong to each query, in the order of `Example`;
            -1 where a query has fewer than ``n`` documents.
        positives: ``(b,)`` int64, how many of the first ``own`` are known to be relevant.
        relevant: ``(b, d)`` bool, which documents of the batch are known to be relevant to a query.
        targets: ``(b, n)`` float32 scores of the teacher, NaN where ``own`` is -1; None without a teacher.
        texts: Texts of the queries and of the documents, for losses with a guide model; else None.
        keys: ``(d,)`` int64, one number per distinct document, the same in every process.
        names: ``(d,)`` int64, one number per document id.
        known: Ragged ``names`` of all documents known to be relevant to each query. They need not be in the
            batch: another process may have them. None, like ``names``, if only ``relevant`` is known.
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
