"""What all losses share: their configuration, normalisation of scores, and sums over documents."""

from __future__ import annotations

from typing import Literal, Self, TypeAlias, TypeVar

import torch
from pydantic import Field, ValidationInfo, field_validator, model_validator
from torch import Tensor
from torch.nn import functional as F

from irkit.config import Config
from irkit.errors import BadValueError
from irkit.training.scores import Scores

T = TypeVar("T")
Normalization: TypeAlias = Literal["none", "minmax", "zscore"]


class BaseLoss(Config):
    """A loss is a configuration. Called with the scores of a batch, it returns the mean over the queries.

    A query with nothing to compare counts 0, and the loss divides by the number of all queries. So the mean
    over processes is the loss of one process with all queries.

    Attributes:
        kind: Name of the loss.
        weight: Factor of the loss in the sum of all losses; the caller applies it.
        scored_only: For losses that need targets: the caller skips batches without targets instead of
            refusing them, which allows mixtures of data with and without the scores of a teacher.
    """

    kind: str
    weight: float = Field(1.0, gt=0)
    scored_only: bool = False

    @model_validator(mode="after")
    def _check_scored_only(self) -> Self:
        if self.scored_only and "targets" not in self.needs:
            raise ValueError("'scored_only' is for losses that need the scores of a teacher; leave it out")
        return self

    @property
    def needs(self) -> frozenset[str]:
        """What the loss reads of `Scores` beyond ``own`` and ``mask``.

        * ``"targets"``: the scores of a teacher;
        * ``"positives"``: at least one positive per query;
        * ``"in_batch"``: ``all``, ``columns`` and ``relevant``;
        * ``"queries"``: the rows are the queries of all processes;
        * ``"vectors"``: ``queries`` and ``documents``;
        * ``"guide"``: the model that the field ``guide`` names.
        """
        return frozenset()

    def __call__(self, scores: Scores) -> Tensor:
        """Return the loss of a batch, a scalar, without the factor `weight`."""
        raise NotImplementedError


class TemperedLoss(BaseLoss):
    """A loss on scores that are divided by a temperature.

    Attributes:
        temperature: Divisor of the scores.
    """

    temperature: float = Field(1.0, gt=0)


class TargetLoss(BaseLoss):
    """A loss that compares scores with a teacher's scores, or with labels.

    Attributes:
        normalize_targets: Normalisation of the targets of each query, before anything else.
    """

    normalize_targets: Normalization = "none"

    @property
    def needs(self) -> frozenset[str]:
        """See `BaseLoss.needs`."""
        return frozenset({"targets"})

    def targets(self, scores: Scores) -> Tensor:
        """Return the normalised targets ``(b, n)``, 0 at padding."""
        return normalize(required(scores.targets, self, "targets"), scores.mask, self.normalize_targets)


class Matryoshka(Config):
    """Sum of all losses over vectors that are cut to each of several widths.

    Attributes:
        dims: Widths, including the full width if it is to be trained.
        weights: Factor of the losses at each width; 1 by default.

    Source: Kusupati et al., Matryoshka Representation Learning, arXiv 2205.13147.
    """

    dims: tuple[int, ...] = Field(min_length=1)
    weights: tuple[float, ...] = Field((), validate_default=True)

    @field_validator("dims")
    @classmethod
    def _check_dims(cls, dims: tuple[int, ...]) -> tuple[int, ...]:
        if min(dims) < 1 or len(set(dims)) < len(dims):
            raise ValueError("dims must be different widths from 1 upwards")
        return dims

    @field_validator("weights")
    @classmethod
    def _check_weights(cls, weights: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        dims = info.data.get("dims", ())
        weights = weights or (1.0,) * len(dims)
        if len(weights) != len(dims) or min(weights, default=1) <= 0:
            raise ValueError(f"weights must be positive, one for each of the {len(dims)} dims")
        return weights


def required(value: T | None, loss: BaseLoss, name: str) -> T:
    """Return a field of `Scores` that a loss needs.

    Raises:
        BadValueError: The field is None.
    """
    if value is None:
        raise BadValueError(f"loss {loss.kind!r}: the scores have no {name}, which it needs; see `needs`")
    return value


def known_positives(scores: Scores) -> Tensor:
    """Return which documents ``(b, n)`` are known to be relevant: the first ``positives`` of each query."""
    order = torch.arange(scores.mask.shape[1], device=scores.mask.device)
    return scores.mask & (order < scores.positives[:, None])


def normalize(scores: Tensor, mask: Tensor, how: Normalization) -> Tensor:
    """Rescale the scores of each query. Equal scores become 0 and have no gradient.

    Args:
        scores: ``(b, n)`` float.
        mask: ``(b, n)`` bool, where there is a document; elsewhere the result is 0.
        how: ``"minmax"`` rescales to [0, 1], ``"zscore"`` to mean 0 and standard deviation 1, ``"none"`` not
            at all.

    Examples:
        >>> normalize(torch.tensor([[1.0, 3.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool), "minmax").tolist()
        [[0.0, 1.0, 0.5]]

    Source: min-max: PyLate's Distillation.
    """
    if how == "none":
        return scores.masked_fill(~mask, 0)
    if how == "minmax":
        low = scores.masked_fill(~mask, torch.inf).amin(1, keepdim=True)
        shifted, spread = scores - low, scores.masked_fill(~mask, -torch.inf).amax(1, keepdim=True) - low
    else:
        count = mask.sum(1, keepdim=True).clamp(min=1)
        mean = scores.masked_fill(~mask, 0).sum(1, keepdim=True) / count
        shifted = (scores - mean).masked_fill(~mask, 0)
        # clamped because the root has no derivative at 0
        spread = (shifted.square().sum(1, keepdim=True) / count).clamp(min=1e-20).sqrt()
    # scores that differ only by rounding count as equal: rescaling would blow the noise up
    equal = spread <= 1e-6 * scores.abs().masked_fill(~mask, 0).amax(1, keepdim=True).clamp(min=1e-6)
    return (shifted / spread.masked_fill(equal, 1)).masked_fill(equal | ~mask, 0)


def contrast(scores: Tensor, positive: Tensor, others: Tensor, negative: Tensor) -> Tensor:
    """Contrast each positive with all negatives, and average over the positives.

    The loss of a positive with score s is ``-log(exp(s) / (exp(s) + sum of exp of negatives))``: positives do
    not compete with each other.

    Args:
        scores: ``(b, n)`` float.
        positive: ``(b, n)`` bool, which of ``scores`` belong to positives.
        others: ``(b, m)`` float; may be ``scores`` again.
        negative: ``(b, m)`` bool, which of ``others`` belong to negatives.

    Returns:
        ``(b,)``; 0 without positives or without negatives.
    """
    lowest = torch.finfo(others.dtype).min  # -inf would make NaN gradients where no negative is left
    against = others.masked_fill(~negative, lowest).logsumexp(1, keepdim=True)
    terms = F.softplus(against - scores)
    return terms.masked_fill(~positive, 0).sum(1) / positive.sum(1).clamp(min=1)


def logistic(scores: Tensor, pairs: Tensor) -> Tensor:
    """Compute the loss of ranking document j before document i, ``log(1 + exp(s_j - s_i))``, for ``pairs``.

    Args:
        scores: ``(b, n)`` float.
        pairs: ``(b, n, n)`` bool, pairs at ``[:, i, j]``.

    Returns:
        ``(b, n, n)``; 0 where a pair is masked.
    """
    # masked twice: a document without tokens scores -inf, and -inf minus -inf is NaN
    ahead = (scores[:, None, :] - scores[:, :, None]).masked_fill(~pairs, 0)
    return F.softplus(ahead).masked_fill(~pairs, 0)


def mean_of_pairs(scores: Tensor, pairs: Tensor) -> Tensor:
    """Return the mean of `logistic` over the pairs of each query: ``(b,)``, 0 without pairs."""
    return logistic(scores, pairs).sum((1, 2)) / pairs.sum((1, 2)).clamp(min=1)
