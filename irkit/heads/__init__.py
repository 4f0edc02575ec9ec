"""Heads: hidden states of tokens in, one `Representation` of each text out."""

from irkit.heads.base import Head, Normalize, Side
from irkit.heads.multi_vector import MultiVectorConfig, MultiVectorHead, QueryExpansion, TokenPooling
from irkit.heads.pooled import PooledHead
from irkit.heads.projection import Projection, ProjectionConfig
from irkit.heads.sparse import SparseConfig, SparseHead

__all__ = [
    "Head",
    "MultiVectorConfig",
    "MultiVectorHead",
    "Normalize",
    "PooledHead",
    "Projection",
    "ProjectionConfig",
    "QueryExpansion",
    "Side",
    "SparseConfig",
    "SparseHead",
    "TokenPooling",
]
