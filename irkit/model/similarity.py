"""The similarities that models are compared by; a higher number is nearer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from irkit.arguments import brief
from irkit.core.ragged import Ragged
from irkit.core.representation import MultiVector, Sparse
from irkit.core.scoring import score, score_pairs
from irkit.errors import BadTypeError, BadValueError
from irkit.formats import SIMILARITIES
from irkit.model.terms import as_sparse

Vectors = Tensor | np.ndarray[Any, Any] | Sequence[Any] | MultiVector | Sparse

_MATRIX: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": lambda a, b: F.normalize(a, dim=1) @ F.normalize(b, dim=1).T,
    "dot": lambda a, b: a @ b.T,
    "euclidean": lambda a, b: -torch.cdist(a, b),
    "manhattan": lambda a, b: -torch.cdist(a, b, p=1),
}
_PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": lambda a, b: (F.normalize(a, dim=1) * F.normalize(b, dim=1)).sum(1),
    "dot": lambda a, b: (a * b).sum(1),
    "euclidean": lambda a, b: -torch.linalg.vector_norm(a - b, dim=1),
    "manhattan": lambda a, b: -(a - b).abs().sum(1),
}
_INNER = ("dot", "cosine")  # computed without zeros where vectors are sparse


def compare(name: str, a: Vectors, b: Vectors) -> Tensor:
    """Return the similarity of each vector of ``a (n, dim)`` to each of ``b (m, dim)``: ``(n, m)``.

    For token vectors ``a`` and ``b`` hold an array ``(tokens, dim)`` per text, or are MultiVector.

    Raises:
        BadValueError: The widths differ.
    """
    left, right = _comparable(name, a, b)
    if isinstance(left, Tensor):
        return _MATRIX[name](left, right)
    if isinstance(left, MultiVector) and not (len(left) and len(right)):
        return torch.zeros(len(left), len(right), device="cpu")
    return score(left, right)


def compare_pairs(name: str, a: Vectors, b: Vectors) -> Tensor:
    """Return the similarity of vector ``i`` of ``a`` to vector ``i`` of ``b``, both ``(n, dim)``: ``(n,)``.

    Raises:
        BadValueError: The shapes differ.
    """
    left, right = _comparable(name, a, b)
    if not isinstance(left, Tensor):
        return score_pairs(left, right)
    if len(left) != len(right):
        raise BadValueError(
            f"similarity_pairwise: got {len(left)} and {len(right)} vectors, expected as many"
        )
    return _PAIRS[name](left, right)


def _comparable(name: str, a: Vectors, b: Vectors) -> tuple[Any, Any]:
    """Return both sides as token vectors, sparse rows or tensors ``(n, dim)``, whatever ``name`` compares."""
    if name in SIMILARITIES["multi_vector"]:
        queries, documents = _texts(a), _texts(b)
        return averaged(queries) if name == "meanmaxsim" else queries, documents
    a, b = (_stacked(vectors) for vectors in (a, b))
    if name in _INNER and (_is_sparse(a) or _is_sparse(b)):
        return _sparse(a, name == "cosine"), _sparse(b, name == "cosine")
    left, right = _rows(a), _rows(b)
    if left.shape[1] != right.shape[1]:
        raise BadValueError(f"similarity: vectors have widths {left.shape[1]} and {right.shape[1]}")
    return left, right


def averaged(queries: MultiVector) -> MultiVector:
    """Divide token vectors of queries by their number, so that MaxSim is a mean of similarities."""
    rows = queries.tokens
    counts = rows.lengths.to(rows.device)[rows.row_ids()]
    return MultiVector(rows.with_values(rows.values / counts[:, None]))


def unit_length(rows: Sparse) -> Sparse:
    """Scale the weights of each text to length 1; a text without weights stays without."""
    squares = rows.weights.new_zeros(len(rows)).index_add(0, rows.terms.row_ids(), rows.weights**2)
    norms = squares.sqrt().clamp(min=1e-12)
    return Sparse(rows.terms, rows.weights / norms[rows.terms.row_ids()], rows.dim)


def _stacked(vectors: Vectors) -> Vectors:
    """Return a list of tensors as one tensor, and anything else as it is."""
    if isinstance(vectors, Sequence) and len(vectors) and isinstance(vectors[0], Tensor):
        return torch.stack(list(vectors))
    return vectors


def _is_sparse(vectors: Vectors) -> bool:
    return isinstance(vectors, Sparse) or (isinstance(vectors, Tensor) and vectors.is_sparse)


def _sparse(vectors: Vectors, unit: bool) -> Sparse:
    is_tensor = isinstance(vectors, Sparse | Tensor)
    rows = as_sparse("similarity", vectors) if is_tensor else Sparse.from_dense(_rows(vectors))
    return unit_length(rows) if unit else rows


def _texts(vectors: Vectors) -> MultiVector:
    """Return the token vectors of several texts; one array of two dimensions is one text."""
    if isinstance(vectors, MultiVector):
        return vectors
    if isinstance(vectors, Sparse):
        raise BadTypeError("similarity: got sparse vectors, expected an array (tokens, dim) a text")
    if isinstance(vectors, Tensor | np.ndarray) and vectors.ndim == 2:
        vectors = [vectors]
    none = torch.zeros(0, 1, device="cpu")
    try:
        rows = Ragged.from_rows(list(vectors)) if len(vectors) else Ragged(none, none[:, 0])
    except (TypeError, RuntimeError) as error:
        raise BadTypeError(
            f"similarity: got {brief(vectors)}, expected an array (tokens, dim) a text"
        ) from error
    if rows.values.dim() != 2:
        raise BadValueError(
            f"similarity: expected an array (tokens, dim) a text, got values {tuple(rows.values.shape)}"
        )
    return MultiVector(rows.with_values(rows.values.float()))


def _rows(vectors: Vectors) -> Tensor:
    """Convert vectors to a dense float32 tensor ``(n, dim)``; one vector becomes a row."""
    if isinstance(vectors, Sparse):
        return vectors.to_dense().float()
    if isinstance(vectors, Tensor) and vectors.is_sparse:
        vectors = vectors.to_dense()
    try:
        array = np.asarray(vectors) if isinstance(vectors, Sequence) else vectors
        tensor = torch.as_tensor(array, device=getattr(array, "device", "cpu")).float()
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadTypeError(f"similarity: got {brief(vectors)}, expected vectors (n, dim)") from error
    if tensor.dim() not in (1, 2):
        raise BadValueError(f"similarity: expected vectors (n, dim), got shape {tuple(tensor.shape)}")
    return tensor if tensor.dim() == 2 else tensor.view(min(1, len(tensor)), -1 if len(tensor) else 0)
