"""Losses: each is a configuration that is called with `Scores` and gives a scalar.

contrastive.py   with negatives of the batch or of the query itself: InfoNCE, n-way and pairwise cross-entropy
distillation.py  after a teacher: KL divergence, margins, scores, vectors
ranking.py       by graded targets: RankNet, softmax, LambdaRank, ApproxNDCG
matryoshka.py    all of them on vectors cut to several widths
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from irkit.training.losses.base import BaseLoss
from irkit.training.losses.contrastive import CrossEntropy, InfoNCE, PairwiseCrossEntropy
from irkit.training.losses.distillation import (
    CosineSimilarity,
    EmbeddingDistillation,
    KLDivergence,
    MarginMSE,
    ScoreMSE,
)
from irkit.training.losses.matryoshka import Matryoshka
from irkit.training.losses.ranking import ApproxNDCG, LambdaRank, ListwiseSoftmax, RankNet

__all__ = [
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

Loss: TypeAlias = Annotated[
    ApproxNDCG
    | CosineSimilarity
    | CrossEntropy
    | EmbeddingDistillation
    | InfoNCE
    | KLDivergence
    | LambdaRank
    | ListwiseSoftmax
    | MarginMSE
    | PairwiseCrossEntropy
    | RankNet
    | ScoreMSE,
    Field(discriminator="kind"),
]
