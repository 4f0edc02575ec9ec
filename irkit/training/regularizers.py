"""Regularisers of sparse models: they keep the number of terms per text small, but above zero."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator
from torch import Tensor

from irkit.config import Config
from irkit.utils.kinds import KindOf, own_kinds
from irkit.utils.plugins import Registry

Schedule: TypeAlias = Literal["constant", "linear", "quadratic"]


class BaseRegularizer(Config):
    """A penalty on the weights of queries and documents.

    Attributes:
        kind: Name of the regulariser.
        query: Factor (lambda) of the queries; 0 leaves them alone.
        document: Factor of the documents.
        schedule: How both factors rise from 0: ``linear`` with the number of steps, or ``quadratic`` with its
            square.
        warmup: Share of all steps after which the factors have their full size.
    """

    kind: str
    query: float = Field(0.0, ge=0)
    document: float = Field(0.0, ge=0)
    schedule: Schedule = "quadratic"
    warmup: float = Field(1 / 3, gt=0, le=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.query and not self.document:
            raise ValueError("'query' and 'document' are both 0, which does nothing; set one, such as 1e-3")
        return self

    def __call__(self, queries: Tensor | None, documents: Tensor, progress: float) -> Tensor:
        """Return the penalty, a scalar, with factors and schedule.

        Args:
            queries: ``(b, V)`` weights; None if queries are not trained.
            documents: ``(d, V)`` weights.
            progress: Share of completed steps, 0 to 1.
        """
        total = documents.new_zeros(())
        if self.document:
            total = total + self.document * self.penalty(documents)
        if self.query and queries is not None:
            total = total + self.query * self.penalty(queries)
        return self.factor(progress) * total

    def factor(self, progress: float) -> float:
        """Return the multiplier of both factors at ``progress``."""
        exponent = {"constant": 0, "linear": 1, "quadratic": 2}[self.schedule]
        return float(min(1.0, progress / self.warmup) ** exponent)

    def penalty(self, weights: Tensor) -> Tensor:
        """Return the penalty of ``weights (n, V)``, a scalar."""
        raise NotImplementedError


class Flops(BaseRegularizer):
    """Sum over terms of the squared mean weight: an estimate of the operations per search.

    Attributes:
        threshold: Texts with this many terms or fewer are left alone (L0 mask).

    Source: Paria et al., arXiv 2004.05665; Formal et al., SPLADE, arXiv 2107.05720; Shen et al.,
        arXiv 2504.14839 (L0 mask).
    """

    kind: Literal["flops"] = "flops"
    threshold: int | None = Field(None, ge=1)

    def penalty(self, weights: Tensor) -> Tensor:
        """See `BaseRegularizer.penalty`."""
        weights = weights.abs()
        if self.threshold is not None:
            weights = weights * (weights.count_nonzero(1) > self.threshold)[:, None]
        return weights.mean(0).square().sum()


class L1(BaseRegularizer):
    """Mean over texts of the sum of their weights.

    Source: Lassance and Clinchant, An Efficiency Study for SPLADE Models, arXiv 2207.03834.
    """

    kind: Literal["l1"] = "l1"

    def penalty(self, weights: Tensor) -> Tensor:
        """See `BaseRegularizer.penalty`."""
        return weights.abs().sum(1).mean()


class AntiZero(BaseRegularizer):
    """1 over the square of the sum of all weights: keeps texts from losing all terms.

    Source: https://github.com/naver/splade (splade/hf/trainers.py), where both factors are 1.
    """

    kind: Literal["anti_zero"] = "anti_zero"
    schedule: Schedule = "constant"

    def penalty(self, weights: Tensor) -> Tensor:
        """See `BaseRegularizer.penalty`."""
        return 1 / weights.sum().square().clamp(min=1e-12)


class DFFlops(BaseRegularizer):
    """FLOPS with terms weighted by document frequency: shortens the long lists of an index.

    The weight of a term rises from 0 to 1 with the share of documents in the batch that have it.

    Attributes:
        alpha: Share of documents at which the weight of a term is 1/2.
        beta: How steeply the weight rises there.

    Source: Porco et al., arXiv 2505.15070. The paper estimates shares on a sample of the collection instead.
    """

    kind: Literal["df_flops"] = "df_flops"
    alpha: float = Field(0.1, gt=0, lt=1)
    beta: float = Field(10.0, gt=0)

    def penalty(self, weights: Tensor) -> Tensor:
        """See `BaseRegularizer.penalty`."""
        weights = weights.abs()
        share = (weights > 0).to(weights.dtype).mean(0)
        importance = 1 / (1 + (share ** (math.log(2) / math.log(self.alpha)) - 1) ** self.beta)
        return (importance * weights.mean(0)).square().sum()


REGULARIZERS: Registry[type[BaseRegularizer]] = Registry(
    "irkit.regularizers", BaseRegularizer, own_kinds(AntiZero, DFFlops, Flops, L1)
)
"""All regularisers by their kind; other packages add some by entry points of this group."""

Regularizer: TypeAlias = Annotated[BaseRegularizer, KindOf(REGULARIZERS)]
"""Field of a configuration that holds any regulariser of the table."""
