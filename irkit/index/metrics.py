"""What a score of dense vectors is: an inner product, a cosine, or a squared distance times -1.

Cosines are inner products: an index of this metric stores normalised vectors, and normalises queries.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from irkit.core.representation import Dense, Representation

__all__ = ["Metric", "from_products", "unit"]

Metric: TypeAlias = Literal["inner_product", "cosine", "euclidean"]


def unit(representation: Representation) -> Representation:
    """Return dense vectors in float32 with length 1; zeros stay zeros, and other kinds as they are."""
    if not isinstance(representation, Dense):
        return representation
    values = representation.values.float()
    largest = values.abs().amax(-1, keepdim=True)
    values = values / largest.where(largest > 0, 1)  # so that no square overflows or vanishes
    lengths = values.norm(dim=-1, keepdim=True)
    return Dense(values / lengths.where(lengths > 0, 1))


def from_products(metric: Metric, products: Tensor, queries: Tensor, documents: Tensor) -> Tensor:
    """Return the scores that inner products stand for.

    Args:
        metric: How vectors are compared. Vectors have length 1 for cosines.
        products: ``(n_q, n)`` float32.
        queries: ``(n_q, dim)`` float32.
        documents: ``(n, dim)`` or, if each query has its own, ``(n_q, n, dim)`` float32.
    """
    if metric != "euclidean":
        return products
    return 2 * products - documents.square().sum(-1) - queries.square().sum(-1, keepdim=True)
