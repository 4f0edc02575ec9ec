"""Learning to rank from graded targets: pairs in the order of a teacher, and measures of whole rankings."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from irkit.training.losses.loss import TargetLoss, TemperedLoss, logistic, mean_of_pairs, required
from irkit.training.scores import Scores


class RankNet(TemperedLoss):
    """Logistic loss of the pairs of documents that the teacher scores differently.

    Attributes:
        temperature: Divisor of the scores.

    Source: Burges et al., Learning to Rank using Gradient Descent, ICML 2005.
    """

    kind: Literal["ranknet"] = "ranknet"

    @property
    def needs(self) -> frozenset[str]:
        """See `BaseLoss.needs`."""
        return frozenset({"targets"})

    def __call__(self, scores: Scores) -> Tensor:
        """See `BaseLoss`."""
        pairs = _ordered(required(scores.targets, self, "targets"), scores.mask)
        return mean_of_pairs(scores.own / self.temperature, pairs).mean()


class ListwiseSoftmax(TargetLoss, TemperedLoss):
    """Cross-entropy of the model's distribution over the documents of a query, weighted by the targets.

    Attributes:
        temperature: Divisor of the scores.
        normalize_targets: Normalisation of the targets of each query; targets below 0 then count 0.

    Source: Zhuang et al., RankT5, arXiv 2210.10634 (section 4).
    """

    kind: Literal["softmax"] = "softmax"

    def __call__(self, scores: Scores) -> Tensor:
        """See `BaseLoss`."""
        lowest = torch.finfo(scores.own.dtype).min
        student = (scores.own / self.temperature).masked_fill(~scores.mask, lowest).log_softmax(1)
        return -(self.targets(scores).clamp(min=0) * student.masked_fill(~scores.mask, 0)).sum(1).mean()


class LambdaRank(TargetLoss, TemperedLoss):
    """RankNet, summed, with each pair weighted by the change of nDCG if the two traded places.

    Attributes:
        temperature: Divisor of the scores.
        k: Cut-off of nDCG: a pair counts only if the model ranks one of the two among the best ``k``. The
            change of its nDCG is computed without the cut-off, as by sentence-transformers.
        normalize_targets: Normalisation of the targets of each query, before anything else. Gains are
            ``2^target - 1`` and need targets from 0 upwards: rescale the scores of a teacher by ``"minmax"``.

    Source: Burges, From RankNet to LambdaRank to LambdaMART, MSR-TR-2010-82; Wang et al., The LambdaLoss
        Framework, CIKM 2018.
    """

    kind: Literal["lambdarank"] = "lambdarank"
    k: int | None = Field(None, ge=1)

    def __call__(self, scores: Scores) -> Tensor:
        """See `BaseLoss`."""
        targets, own = self.targets(scores), scores.own / self.temperature
        with torch.no_grad():
            gains = _gains(targets, scores.mask, self.k)
            # the earlier document wins a tie, as in every search
            order = own.masked_fill(~scores.mask, -torch.inf).argsort(stable=True, dim=1, descending=True)
            ranks = order.argsort(1) + 1
            discounts = 1 / (ranks + 1).to(own.dtype).log2()
            weights = (discounts[:, :, None] - discounts[:, None, :]).abs()
            weights *= (gains[:, :, None] - gains[:, None, :]).abs()
            pairs = _ordered(targets, scores.mask)
            if self.k is not None:
                top = ranks <= self.k
                pairs &= top[:, :, None] | top[:, None, :]
        return (weights * logistic(own, pairs)).sum((1, 2)).mean()


class ApproxNDCG(TargetLoss, TemperedLoss):
    """1 - nDCG, with ranks approximated by sums of sigmoids of score differences.

    Attributes:
        temperature: Temperature of the sigmoids: smaller is closer to nDCG, but fewer pairs have a gradient.
        normalize_targets: See `LambdaRank`.

    Source: Qin et al., A General Approximation Framework for Direct Optimization of IR Measures, 2010.
    """

    kind: Literal["approx_ndcg"] = "approx_ndcg"

    def __call__(self, scores: Scores) -> Tensor:
        """See `BaseLoss`."""
        own = scores.own / self.temperature
        before = torch.sigmoid(own[:, None, :] - own[:, :, None])  # [:, i, j]: j is before i
        others = scores.mask[:, None, :] & ~torch.eye(own.shape[1], dtype=torch.bool, device=own.device)
        ranks = 1 + before.masked_fill(~others, 0).sum(2)
        gains = _gains(self.targets(scores), scores.mask, None)
        return (1 - (gains / (ranks + 1).log2()).sum(1)).mean()


def _ordered(targets: Tensor, mask: Tensor) -> Tensor:
    """Return ``(b, n, n)`` bool: i and j are documents, and i has the higher target."""
    return (targets[:, :, None] > targets[:, None, :]) & mask[:, :, None] & mask[:, None, :]


def _gains(targets: Tensor, mask: Tensor, k: int | None) -> Tensor:
    """Return the gains ``2^target - 1`` over the DCG of the ideal ranking; 0 where no target is above 0."""
    targets = targets.clamp(min=0).masked_fill(~mask, 0)
    highest = targets.amax(1, keepdim=True)
    gains = (targets - highest).exp2() - (-highest).exp2()  # over 2^highest, which may overflow
    ideal = gains.sort(1, descending=True).values[:, :k]
    discounts = 1 / torch.arange(2, ideal.shape[1] + 2, dtype=gains.dtype, device=gains.device).log2()
    return gains / (ideal * discounts).sum(1, keepdim=True).clamp(min=1e-12)
