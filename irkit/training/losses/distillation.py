"""Follow a teacher: its distribution, its margins, its scores, or its vectors."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from irkit.errors import BadValueError
from irkit.training.losses.base import BaseLoss, Normalization, TargetLoss, given, normalize
from irkit.training.scores import Scores

__all__ = ["CosineSimilarity", "EmbeddingDistillation", "KLDivergence", "MarginMSE", "ScoreMSE"]


class _Distillation(TargetLoss):
    normalize_scores: Normalization = "none"

    def scores(self, scores: Scores) -> Tensor:
        """The model's own scores ``(b, n)``, normalised; 0 where there is no document."""
        return normalize(scores.own, scores.mask, self.normalize_scores)


class KLDivergence(_Distillation):
    """KL divergence of the model's distribution over a query's documents from the teacher's.

    Attributes:
        temperature: Scores are divided by it, and the loss is multiplied by its square, so that the gradient
            keeps its size.
        teacher_temperature: Targets are divided by it; by default as ``temperature``.
        normalize_scores: Of the scores of each query, before anything else; PyLate's is ``"minmax"``.
        normalize_targets: Of the targets likewise.

    Source: TITE (section 3.4); Santhanam et al., ColBERTv2, arXiv 2112.01488; Hinton et al., arXiv 1503.02531
        (temperature).
    """

    kind: Literal["kl"] = "kl"
    temperature: float = Field(1.0, gt=0)
    teacher_temperature: float | None = Field(None, gt=0)

    def __call__(self, scores: Scores) -> Tensor:
        """See `BaseLoss`."""
        gone = ~scores.mask
        lowest = torch.finfo(scores.own.dtype).min
        student = self.scores(scores) / self.temperature
        teacher = self.targets(scores) / (self.teacher_temperature or self.temperature)
        student = student.masked_fill(gone, lowest).log_softmax(1)
        teacher = teacher.masked_fill(gone, lowest).log_softmax(1)
        terms = (teacher.exp() * (teacher - student)).masked_fill(gone, 0)
        return terms.sum(1).mean() * self.temperature**2


class MarginMSE(_Distillation):
    """Mean squared difference between the model's and the teacher's margins of pairs of documents.

    Attributes:
        pairs: ``"all"`` pairs of a query's documents, or the ``"first"`` document with each other one; which
            is the same for two documents.
        normalize_scores: Of the scores of each query, before anything else.
        normalize_targets: Of the targets likewise.

    Source: Hofstätter et al., arXiv 2010.02666; all pairs: TITE (section 3.4).
    """

    kind: Literal["margin_mse"] = "margin_mse"
    pairs: Literal["all", "first"] = "all"

    def __call__(self, scores: Scores) -> Tensor:
        """See `BaseLoss`."""
        # (y_i - y_j) - (r_i - r_j) = e_i - e_j
        error = self.targets(scores) - self.scores(scores)
        count = scores.mask.sum(1)
        others = (count - 1).clamp(min=1)
        if self.pairs == "first":
            return ((error - error[:, :1]).square().masked_fill(~scores.mask, 0).sum(1) / others).mean()
        # the mean over pairs of (e_i - e_j)^2 is twice the unbiased variance
        mean = (error.sum(1) / count.clamp(min=1))[:, None]
        return (2 * (error - mean).square().masked_fill(~scores.mask, 0).sum(1) / others).mean()


class ScoreMSE(_Distillation):
    """Mean squared difference between scores and targets.

    Attributes:
        normalize_scores: Of the scores of each query, before anything else.
        normalize_targets: Of the targets likewise.
    """

    kind: Literal["score_mse"] = "score_mse"

    def __call__(self, scores: Scores) -> Tensor:
        """See `BaseLoss`."""
        error = (self.scores(scores) - self.targets(scores)).square()
        return (error.sum(1) / scores.mask.sum(1).clamp(min=1)).mean()


class CosineSimilarity(TargetLoss):
    """Mean squared difference between targets and the cosines of vectors, whatever the model's similarity is.

    Attributes:
        normalize_targets: Of the targets of each query, before anything else.

    Source: Reimers and Gurevych, Sentence-BERT, arXiv 1908.10084.
    """

    kind: Literal["cosine"] = "cosine"

    @property
    def needs(self) -> frozenset[str]:
        """See `BaseLoss.needs`."""
        return frozenset({"in_batch", "targets", "vectors"})  # of "in_batch" the columns

    def __call__(self, scores: Scores) -> Tensor:
        """See `BaseLoss`."""
        queries, documents = (
            given(scores.queries, self, "queries"),
            given(scores.documents, self, "documents"),
        )
        own = documents[given(scores.columns, self, "columns")]  # (b, n, dim)
        cosines = F.cosine_similarity(queries[:, None], own, dim=-1)
        error = (cosines - self.targets(scores)).square().masked_fill(~scores.mask, 0)
        return (error.sum(1) / scores.mask.sum(1).clamp(min=1)).mean()


class EmbeddingDistillation(BaseLoss):
    """Distance of vectors from those of another model: the mean over queries and that over documents, halved.

    Attributes:
        guide: Name of that model; its vectors must be as wide.
        distance: ``"mse"``, the mean over dimensions of the squared difference, or ``"cosine"``, 1 - cosine.

    Source: Reimers and Gurevych, arXiv 2004.09813 (MSE); Kim et al., EmbedDistill, arXiv 2301.12005.
    """

    kind: Literal["embedding"] = "embedding"
    guide: str
    distance: Literal["mse", "cosine"] = "mse"

    @property
    def needs(self) -> frozenset[str]:
        """See `BaseLoss.needs`."""
        return frozenset({"vectors", "guide"})

    def __call__(self, scores: Scores) -> Tensor:
        """See `BaseLoss`.

        Raises:
            BadValueError: The guide's vectors have another width.
        """
        _, *theirs = given(scores.guide, self, "guide")()
        ours = given(scores.queries, self, "queries"), given(scores.documents, self, "documents")
        if ours[0].shape[1] != theirs[0].shape[1]:
            raise BadValueError(
                f"loss {self.kind!r}: vectors of {self.guide} have {theirs[0].shape[1]} dimensions, ours "
                f"{ours[0].shape[1]}; choose a guide as wide as the model, and no matryoshka"
            )
        if self.distance == "mse":
            means = [F.mse_loss(mine, other) for mine, other in zip(ours, theirs, strict=True)]
        else:
            means = [
                (1 - F.cosine_similarity(*both, dim=-1)).mean() for both in zip(ours, theirs, strict=True)
            ]
        return (means[0] + means[1]) / 2
