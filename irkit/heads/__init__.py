"""Heads: hidden states of tokens in, one `Representation` of each text out."""

from irkit.heads.pooled import Normalize, PooledHead
from irkit.heads.projection import Projection

__all__ = ["Normalize", "PooledHead", "Projection"]
