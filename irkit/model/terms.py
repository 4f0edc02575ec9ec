"""Sparse representations as people read them: terms by weight, and how many there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from irkit.arguments import shown
from irkit.errors import BadTypeError, BadValueError
from irkit.ragged import Ragged
from irkit.representation import Sparse

__all__ = ["as_sparse", "decode", "sparsity"]


def as_sparse(operation: str, given: Any) -> Sparse:
    """What is not zero in the rows of a tensor ``(n, dim)``, sparse or not; ``(dim,)`` is one row.

    Raises:
        BadTypeError: It is no tensor.
        BadValueError: It has another shape.
    """
    if isinstance(given, Sparse):
        return given
    if isinstance(given, np.ndarray):
        given = torch.from_numpy(given)
    if not isinstance(given, Tensor):
        raise BadTypeError(f"{operation}: got {shown(given)}, expected Sparse or a tensor (n, dim)")
    if given.dim() not in (1, 2):
        raise BadValueError(f"{operation}: got a tensor of shape {tuple(given.shape)}, expected (n, dim)")
    rows = given[None] if given.dim() == 1 else given
    if rows.layout == torch.strided:
        return Sparse.from_dense(rows.float())
    rows = (rows if rows.layout == torch.sparse_coo else rows.to_sparse()).coalesce()
    (places, terms), weights = rows.indices(), rows.values().float()
    kept = weights != 0
    lengths = torch.bincount(places[kept], minlength=rows.shape[0])
    return Sparse(Ragged(terms[kept], lengths), weights[kept], rows.shape[1])


def decode(rows: Sparse, vocabulary: Sequence[str], k: int | None = None) -> list[list[tuple[str, float]]]:
    """Terms and weights of each row, the heaviest first, equals in the order of the vocabulary.

    Args:
        rows: ``n`` rows.
        vocabulary: A string a term.
        k: Terms of a row, at most; None is all.

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
    """How many terms a row has on average, and which share of the vocabulary it leaves out.

    Returns:
        ``active_dims`` and ``sparsity_ratio``, as in sentence-transformers; 0 and 1 without rows.
    """
    active = len(rows.weights) / max(1, len(rows))
    return {"active_dims": active, "sparsity_ratio": 1.0 - active / max(1, rows.dim)}
