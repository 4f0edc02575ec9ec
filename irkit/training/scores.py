"""What losses see: scores of a batch, whatever kind of model gave them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Scores"]


@dataclass(frozen=True)
class Scores:
    """Scores of ``b`` queries against their own ``n`` documents, and against all ``d`` of the batch.

    Attributes:
        own: ``(b, n)`` float32, each query against its own documents, the relevant ones first; what ``mask``
            leaves out is 0.
        mask: ``(b, n)`` bool, where there is a document.
        positives: ``(b,)`` int64, how many of the first ones are known to be relevant.
        targets: ``(b, n)`` float32 of the teacher, 0 where ``mask`` is False; None if there are none.
        all: ``(b, d)`` float32, each query against every document of the batch (of all processes); None
            unless a loss needs them.
        columns: ``(b, n)`` int64, where in ``all`` and ``documents`` the own documents stand; 0 where
            ``mask`` is False.
        relevant: ``(b, d)`` bool, which documents are known to be relevant to a query; None as ``all``.
        queries: ``(b, dim)`` vectors, or None of models that make a vector a token.
        documents: ``(d, dim)`` likewise.
        guide: Gives ``(b, d)`` scores and the vectors ``(b, dim)`` and ``(d, dim)`` of another model; None
            unless a loss names one.
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
