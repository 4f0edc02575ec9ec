"""Sparse representations for people to read: terms by weight, and the number of terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from irkit.arguments import brief
from irkit.core.ragged import Ragged
from irkit.core.representation import Sparse
from irkit.errors import BadTypeError, BadValueError


def as_sparse(operation: str, vectors: Any) -> Sparse:
    """Return the rows of a tensor ``(n, dim)``, sparse or not, without zeros; ``(dim,)`` is one row.

    Raises:
        BadTypeError: ``vectors`` is not a tensor.
        BadValueError: The tensor has another shape.
    """
    if isinstance(vectors, Sparse):
        return vectors
    if isinstance(vectors, np.ndarray):
        vectors = torch.from_numpy(vectors)
    if not isinstance(vectors, Tensor):
        raise BadTypeError(f"{operation}: got {brief(vectors)}, expected Sparse or a tensor (n, dim)")
    if vectors.dim() not in (1, 2):
        raise BadValueError(f"{operation}: got a tensor of shape {tuple(vectors.shape)}, expected (n, dim)")
    rows = vectors[None] if vectors.dim() == 1 else vectors
    if rows.layout == torch.strided:
        return Sparse.from_dense(rows.float())
    rows = (rows if rows.layout == torch.sparse_coo else rows.to_sparse()).coalesce()
    (numbers, terms), weights = rows.indices(), rows.values().float()
    nonzero = weights != 0
    lengths = torch.bincount(numbers[nonzero], minlength=rows.shape[0])
    return Sparse(Ragged(terms[nonzero], lengths), weights[nonzero], rows.shape[1])


def decode(rows: Sparse, vocabulary: Sequence[str], k: int | None = None) -> list[list[tuple[str, float]]]:
    """Return terms and weights of each row, the heaviest first, equal weights in the order of the vocabulary.

    Args:
        rows: ``n`` rows.
        vocabulary: The string of each term.
        k: Largest number of terms per row; None is all.

    Raises:
        BadValueError: ``k`` is below 1, or the vocabulary has another size.

    Examples:
        >>> rows = Sparse(Ragged.from_rows([[0, 2]]), torch.tensor([0.5, 2.0]), 3)
        >>> decode(rows, ["cat", "dog", "pet"])
        [[('pet', 2.0), ('cat', 0.5)]]
    """
    if k is not None and (not isinstance(k, int | np.integer) or k < 1):
        raise BadValueError(f"decode: k is {k!r}, expected at least 1, or None for all terms")
    if len(vocabulary) != rows.dim:
        raise BadValueError(f"decode: a vocabulary of {len(vocabulary)} for rows over {rows.dim} terms")
    weights = torch.split(rows.weights, rows.terms.lengths.tolist())
    decoded = []
    for terms, row in zip(rows.terms, weights, strict=True):
        by_term = terms.argsort()
        best = by_term[row[by_term].argsort(descending=True, stable=True)][:k]
        decoded.append([(vocabulary[term], row[i].item()) for i, term in zip(best, terms[best], strict=True)])
    return decoded


def sparsity(rows: Sparse) -> dict[str, float]:
    """Return the average number of terms per row, and the share of the vocabulary without a weight.

    Returns:
        ``active_dims`` and ``sparsity_ratio``, as in sentence-transformers; 0 and 1 without rows.
    """
    active = len(rows.weights) / max(1, len(rows))
    return {"active_dims": active, "sparsity_ratio": 1.0 - active / max(1, rows.dim)}
