"""Sparse vectors (SPLADE) from token vectors and a vocabulary matrix; see README.md."""

from .op import splade_pool, splade_pool_sparse
from .reference import ACTIVATIONS, POOLINGS, splade_pool_reference

__all__ = ["ACTIVATIONS", "POOLINGS", "splade_pool", "splade_pool_reference", "splade_pool_sparse"]
