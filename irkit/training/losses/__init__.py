"""Losses: each is a configuration that is called with `Scores` and returns a scalar.

Read in this order::

    contrastive.py   contrast with negatives of the batch or of the query: InfoNCE, n-way and pairwise
    distillation.py  follow a teacher: KL divergence, margins, scores, vectors
    ranking.py       learn graded targets: RankNet, softmax, LambdaRank, ApproxNDCG
    loss.py          what all share; Matryoshka trains vectors that are cut to several widths by any of them

The table `LOSSES` decides which losses a recipe can name. Another package adds a loss by an entry point in
its ``pyproject.toml``; its name is the ``kind`` of the loss::

    [project.entry-points."irkit.losses"]
    my_loss = "my_package.losses:MyLoss"
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from irkit.training.losses.contrastive import CrossEntropy, InfoNCE, PairwiseCrossEntropy
from irkit.training.losses.distillation import (
    CosineSimilarity,
    EmbeddingDistillation,
    KLDivergence,
    MarginMSE,
    ScoreMSE,
)
from irkit.training.losses.loss import BaseLoss, Matryoshka
from irkit.training.losses.ranking import ApproxNDCG, LambdaRank, ListwiseSoftmax, RankNet
from irkit.utils.kinds import KindOf, own_kinds
from irkit.utils.plugins import Registry

__all__ = [
    "LOSSES",
    "ApproxNDCG",
    "BaseLoss",
    "CosineSimilarity",
    "CrossEntropy",
    "EmbeddingDistillation",
    "InfoNCE",
    "KLDivergence",
    "LambdaRank",
    "ListwiseSoftmax",
    "Loss",
    "MarginMSE",
    "Matryoshka",
    "PairwiseCrossEntropy",
    "RankNet",
    "ScoreMSE",
]

LOSSES: Registry[type[BaseLoss]] = Registry(
    "irkit.losses",
    BaseLoss,
    own_kinds(
        InfoNCE,
        CrossEntropy,
        PairwiseCrossEntropy,
        KLDivergence,
        MarginMSE,
        ScoreMSE,
        CosineSimilarity,
        EmbeddingDistillation,
        RankNet,
        ListwiseSoftmax,
        LambdaRank,
        ApproxNDCG,
    ),
)
"""All losses by their kind."""

Loss: TypeAlias = Annotated[BaseLoss, KindOf(LOSSES)]
"""Field of a configuration that holds any loss of the table."""
