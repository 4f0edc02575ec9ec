"""A loss: each positive must score higher than each negative of its query by a margin."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from irkit.training.losses import BaseLoss
from irkit.training.losses.loss import known_positives
from irkit.training.scores import Scores

__all__ = ["Hinge"]


class Hinge(BaseLoss):
    """Mean of ``max(0, margin - (positive - negative))`` over the pairs of each query.

    Attributes:
        margin: Difference of scores from which a pair costs nothing.
    """

    kind: Literal["hinge"] = "hinge"
    margin: float = Field(0.2, gt=0)

    @property
    def needs(self) -> frozenset[str]:
        """See `BaseLoss.needs`."""
        return frozenset({"positives"})

    def __call__(self, scores: Scores) -> Tensor:
        """Return the loss of a batch."""
        positive = known_positives(scores)
        negative = scores.mask & ~positive
        pairs = positive[:, :, None] & negative[:, None, :]
        costs = (self.margin - scores.own[:, :, None] + scores.own[:, None, :]).clamp(min=0)
        means = (costs * pairs).sum((1, 2)) / pairs.sum((1, 2)).clamp(min=1)
        return means.mean()
