"""Contrast positives with the negatives of the whole batch, or of the query."""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from irkit.training.losses.loss import TemperedLoss, contrast, known_positives, mean_of_pairs, required
from irkit.training.scores import Scores


class InfoNCE(TemperedLoss):
    """Contrast each positive with the other documents of its query and the documents of all other queries.

    A document that is known to be relevant to a query is never its negative.

    Attributes:
        temperature: Divisor of the scores: 1 for inner products and MaxSim, about 0.05 for cosines.
        threshold: If set, the positive is the document with the highest target, and the other documents of
            the query are negatives only if their target is lower by more than the threshold.
        symmetric: Average with the loss of the other direction: the first document of each query is
            contrasted with all queries.
        guide: Name of a model. Negatives that it scores above the positive count as false and are left out.
        margin: Negatives are also left out up to this far below the guide's score of the (lowest) positive.
        margin_strategy: ``"relative"`` reads ``margin`` as a share of that score.

    Source: TITE (section 3.4: threshold); Henderson et al., arXiv 1705.00652 (in-batch negatives);
        Solatorio, GISTEmbed, arXiv 2402.16829 (guide); NV-Retriever, arXiv 2407.15831 (margins).
    """

    kind: Literal["infonce"] = "infonce"
    threshold: float | None = Field(None, ge=0)
    symmetric: bool = False
    guide: str | None = None
    margin: float = 0.0
    margin_strategy: Literal["absolute", "relative"] = "absolute"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.symmetric and (self.guide or self.threshold is not None):
            raise ValueError("'symmetric' goes with neither 'guide' nor 'threshold'; list two losses instead")
        if self.margin and not self.guide:
            raise ValueError("'margin' is one to the scores of a 'guide'; name one")
        return self

    @property
    def needs(self) -> frozenset[str]:
        """See `BaseLoss.needs`."""
        source = "positives" if self.threshold is None else "targets"
        optional = {"guide"} if self.guide else {"queries"} if self.symmetric else set()
        return frozenset({"in_batch", source} | optional)

    def __call__(self, scores: Scores) -> Tensor:
        """See `BaseLoss`."""
        own, everything = scores.own / self.temperature, required(scores.all, self, "all") / self.temperature
        relevant = required(scores.relevant, self, "relevant")
        columns = required(scores.columns, self, "columns")
        positive, negative = self._roles(scores)
        # own documents may be neither positive nor negative; others are negatives unless known to be relevant
        allowed = _placed(negative, columns, scores.mask, relevant.shape[1]) & ~relevant
        if self.guide:
            allowed &= ~self._false_negatives(scores, columns, positive)
        loss = contrast(own, positive, everything, allowed)
        if self.symmetric:
            # (b, b): row i has all queries for the first document of query i
            queries = everything[:, columns[:, 0]].T
            others = ~relevant[:, columns[:, 0]].T & ~torch.eye(len(own), dtype=torch.bool, device=own.device)
            loss = (loss + contrast(own[:, :1], positive[:, :1], queries, others)) / 2
        return loss.mean()

    def _roles(self, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return two ``(b, n)`` bool: which own documents are positives, and which are negatives."""
        if self.threshold is None:
            positive = known_positives(scores)
            return positive, scores.mask & ~positive
        targets = required(scores.targets, self, "targets").masked_fill(~scores.mask, -torch.inf)
        best, where = targets.max(1, keepdim=True)
        positive = F.one_hot(where[:, 0], targets.shape[1]).bool() & scores.mask
        return positive, scores.mask & (best - targets > self.threshold)

    def _false_negatives(self, scores: Scores, columns: Tensor, positive: Tensor) -> Tensor:
        """Return ``(b, d)`` bool: which documents of the batch the guide scores above the positives."""
        guided = required(scores.guide, self, "guide")()[0]
        anchor = guided.gather(1, columns).masked_fill(~positive, torch.inf).amin(1, keepdim=True)
        margin = self.margin * anchor.abs() if self.margin_strategy == "relative" else self.margin
        return guided > anchor - margin


class _PositiveLoss(TemperedLoss):
    @property
    def needs(self) -> frozenset[str]:
        """See `BaseLoss.needs`."""
        return frozenset({"positives"})


class CrossEntropy(_PositiveLoss):
    """n-way cross-entropy: contrast each positive with the negatives of its query.

    Attributes:
        temperature: Divisor of the scores.

    Source: Santhanam et al., ColBERTv2, arXiv 2112.01488.
    """

    kind: Literal["cross_entropy"] = "cross_entropy"

    def __call__(self, scores: Scores) -> Tensor:
        """See `BaseLoss`."""
        own, positive = scores.own / self.temperature, known_positives(scores)
        return contrast(own, positive, own, scores.mask & ~positive).mean()


class PairwiseCrossEntropy(_PositiveLoss):
    """Cross-entropy of each pair of a positive and a negative of the same query.

    Attributes:
        temperature: Divisor of the scores.

    Source: Khattab and Zaharia, ColBERT, arXiv 2004.12832.
    """

    kind: Literal["pairwise"] = "pairwise"

    def __call__(self, scores: Scores) -> Tensor:
        """See `BaseLoss`."""
        own, positive = scores.own / self.temperature, known_positives(scores)
        pairs = positive[:, :, None] & (scores.mask & ~positive)[:, None, :]
        return mean_of_pairs(own, pairs).mean()


def _placed(values: Tensor, columns: Tensor, mask: Tensor, width: int) -> Tensor:
    """Scatter the columns of a bool matrix to other columns of a wider one.

    Args:
        values: ``(b, n)`` bool.
        columns: ``(b, n)`` int64, the new column of each value.
        mask: ``(b, n)`` bool, which values are scattered.
        width: Number of columns of the result.

    Returns:
        ``(b, width)`` bool; True where nothing was scattered.
    """
    placed = torch.ones(len(values), width + 1, dtype=torch.bool, device=values.device)
    placed.scatter_(1, columns.masked_fill(~mask, width), values)
    return placed[:, :width]  # the last column collects the masked values
