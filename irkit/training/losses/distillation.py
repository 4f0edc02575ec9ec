"""Learn from a teacher: its distribution, its margins, its scores, or its vectors."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from irkit.errors import BadValueError
from irkit.training.losses.loss import BaseLoss, Normalization, TargetLoss, TemperedLoss, normalize, required
from irkit.training.scores import Scores


class _Distillation(TargetLoss):
    normalize_scores: Normalization = "none"

    def scores(self, scores: Scores) -> Tensor:
        """Return the normalised scores of the model ``(b, n)``, 0 at padding."""
        return normalize(scores.own, scores.mask, self.normalize_scores)


class KLDivergence(_Distillation, TemperedLoss):
    """KL divergence of the model's distribution over a query's documents from the teacher's.

    Attributes:
        temperature: Divisor of the scores. The loss is multiplied by the square of the temperature, so that
            the gradient keeps its size.
        teacher_temperature: Divisor of the targets; ``temperature`` by default.
        normalize_scores: Normalisation of the model's scores of each query, before anything else; PyLate uses
            ``"minmax"``.
        normalize_targets: Normalisation of the targets of each query, before anything else.

    Source: TITE (section 3.4); Santhanam et al., ColBERTv2, arXiv 2112.01488; Hinton et al., arXiv 1503.02531
        (temperature).
    """

    kind: Literal["kl"] = "kl"
    teacher_temperature: float | None = Field(None, gt=0)

    def __call__(self, scores: Scores) -> Tensor:
        """See `BaseLoss`."""
        missing = ~scores.mask
        lowest = torch.finfo(scores.own.dtype).min
        student = self.scores(scores) / self.temperature
        teacher = self.targets(scores) / (self.teacher_temperature or self.temperature)
        student = student.masked_fill(missing, lowest).log_softmax(1)
        teacher = teacher.masked_fill(missing, lowest).log_softmax(1)
        terms = (teacher.exp() * (teacher - student)).masked_fill(missing, 0)
        return terms.sum(1).mean() * self.temperature**2


class MarginMSE(_Distillation):
    """Mean squared difference between the model's and the teacher's margins of pairs of documents.

    Attributes:
        pairs: ``"all"`` pairs of a query's documents, or pairs of the ``"first"`` document with each other
            one. For two documents both are the same.
        normalize_scores: Normalisation of the scores of each query, before anything else.
        normalize_targets: Normalisation of the targets of each query, before anything else.

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
            pairs = scores.mask & scores.mask[:, :1]
            return ((error - error[:, :1]).square().masked_fill(~pairs, 0).sum(1) / others).mean()
        # the mean over pairs of (e_i - e_j)^2 is twice the unbiased variance
        mean = (error.sum(1) / count.clamp(min=1))[:, None]
        return (2 * (error - mean).square().masked_fill(~scores.mask, 0).sum(1) / others).mean()


class ScoreMSE(_Distillation):
    """Mean squared difference between scores and targets.

    Attributes:
        normalize_scores: Normalisation of the scores of each query, before anything else.
        normalize_targets: Normalisation of the targets of each query, before anything else.
    """

    kind: Literal["score_mse"] = "score_mse"

    def __call__(self, scores: Scores) -> Tensor:
        """See `BaseLoss`."""
        error = (self.scores(scores) - self.targets(scores)).square()
        return (error.sum(1) / scores.mask.sum(1).clamp(min=1)).mean()


class CosineSimilarity(TargetLoss):
    """Mean squared difference between targets and cosines of vectors, for models of any similarity.

    Attributes:
        normalize_targets: Normalisation of the targets of each query, before anything else.

    Source: Reimers and Gurevych, Sentence-BERT, arXiv 1908.10084.
    """

    kind: Literal["cosine"] = "cosine"

    @property
    def needs(self) -> frozenset[str]:
        """See `BaseLoss.needs`."""
        return frozenset({"in_batch", "targets", "vectors"})  # "in_batch" for the columns

    def __call__(self, scores: Scores) -> Tensor:
        """See `BaseLoss`."""
        queries = required(scores.queries, self, "queries")
        documents = required(scores.documents, self, "documents")
        own = documents[required(scores.columns, self, "columns")]  # (b, n, dim)
        cosines = F.cosine_similarity(queries[:, None], own, dim=-1)
        error = (cosines - self.targets(scores)).square().masked_fill(~scores.mask, 0)
        return (error.sum(1) / scores.mask.sum(1).clamp(min=1)).mean()


class EmbeddingDistillation(BaseLoss):
    """Distance of vectors from another model's vectors, averaged over queries, over documents, and over both.

    Attributes:
        guide: Name of the other model; its vectors must have the same width.
        distance: ``"mse"``: the mean over dimensions of the squared difference; ``"cosine"``: 1 - cosine.

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
            BadValueError: The vectors of the guide have another width.
        """
        _, *theirs = required(scores.guide, self, "guide")()
        ours = required(scores.queries, self, "queries"), required(scores.documents, self, "documents")
        if ours[0].shape[1] != theirs[0].shape[1]:
            raise BadValueError(
                f"loss {self.kind!r}: vectors of {self.guide} have {theirs[0].shape[1]} dimensions, ours "
                f"{ours[0].shape[1]}; choose a guide as wide as the model, and no matryoshka"
            )
        means = [
            F.mse_loss(*pair) if self.distance == "mse" else (1 - F.cosine_similarity(*pair, dim=-1)).mean()
            for pair in zip(ours, theirs, strict=True)
        ]
        return (means[0] + means[1]) / 2
