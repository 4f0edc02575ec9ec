"""What losses see: the scores of a batch, from any kind of model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """Scores of ``b`` queries for their own ``n`` documents, and for all ``d`` documents of the batch.

    Attributes:
        own: ``(b, n)`` float32, scores of the documents of each query, the relevant ones first; 0 where
            ``mask`` is False.
        mask: ``(b, n)`` bool, where there is a document; False for one without token vectors, which has no
            score.
        positives: ``(b,)`` int64, how many of the first documents are known to be relevant.
        targets: ``(b, n)`` float32 scores of the teacher, 0 where ``mask`` is False; None without a teacher.
        all: ``(b, d)`` float32, scores of every document of the batch (of all processes); None unless a loss
            needs them.
        columns: ``(b, n)`` int64, positions of the own documents in ``all`` and ``documents``; 0 where
            ``mask`` is False.
        relevant: ``(b, d)`` bool, which documents are known to be relevant to a query; None if ``all`` is
            None.
        queries: ``(b, dim)`` vectors of the queries; None for models with one vector per token.
        documents: ``(d, dim)`` vectors of the documents; None for models with one vector per token.
        guide: Function that returns the scores ``(b, d)`` of another model, its query vectors ``(b, dim)``
            and its document vectors ``(d, dim)``; None unless a loss names one.
    """

    own: Tensor
    mask: Tensor
    positives: Tensor
    targets: Tensor | None = None
    all: Tensor | None = None
    columns: Tensor | None = None
    relevant: Tensor | None = None
    queries: Tensor | None = None
    documents: Tensor | None = None
    guide: Callable[[], tuple[Tensor, Tensor, Tensor]] | None = None
