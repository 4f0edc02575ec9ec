"""What a score of dense vectors is: an inner product, a cosine, or a squared distance times -1.

Cosines are inner products: an index of this metric stores normalised vectors, and normalises queries.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import torch

from irkit.core.representation import Dense, Representation
from irkit.index.array_files import Array

__all__ = ["LARGEST_SQUARE", "Metric", "from_products", "squares_of", "unit"]

Metric: TypeAlias = Literal["inner_product", "cosine", "euclidean"]

LARGEST_SQUARE = 8.1e37
"""Squared length of vectors whose squared distances float32 holds: it ends at 4 times as much."""


def unit(representation: Representation) -> Representation:
    """Return dense vectors in float32 with length 1; zeros stay zeros, and other kinds as they are."""
    if not isinstance(representation, Dense):
        return representation
    values = representation.values.double()  # whose squares neither overflow nor vanish
    lengths = values.norm(dim=-1, keepdim=True)
    return Dense((values / lengths.where(lengths > 0, 1)).float())


def from_products(metric: Metric, products: Array, query_squares: Array, squares: Array) -> Array:
    """Return the scores that inner products stand for.

    Args:
        metric: How vectors are compared. Vectors have length 1 for cosines.
        products: ``(n_q, n)`` float32.
        query_squares: ``(n_q,)`` float32, from `squares_of`.
        squares: ``(n,)`` or, if each query has its own documents, ``(n_q, n)`` float32.
    """
    if metric != "euclidean":
        return products
    with np.errstate(all="ignore"):  # numbers that float32 does not hold become infinite
        scores: Array = 2 * products - squares - query_squares[:, None]
    return scores


def squares_of(metric: Metric, values: Array) -> Array:
    """Return ``(n,)`` float32, the squared lengths of ``values (n, dim)`` if the metric needs them, or zeros.

    Each is rounded as if it was alone.
    """
    if metric != "euclidean":
        return np.zeros(len(values), np.float32)
    squares: Array = torch.from_numpy(values).square().sum(-1).numpy()
    return squares
