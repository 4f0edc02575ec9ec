"""Functions of vectors: similarity, truncation, conversion to other types, and terms of sparse vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from irkit.arguments import brief, is_count
from irkit.core.ragged import Ragged
from irkit.core.representation import Dense, MultiVector, Representation, Sparse
from irkit.core.scoring import score, score_pairs
from irkit.errors import BadTypeError, BadValueError
from irkit.formats import SIMILARITIES
from irkit.heads import Head

Embeddings = np.ndarray[Any, Any] | Tensor | list[Tensor] | list[np.ndarray[Any, Any]]
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

    Args:
        name: Similarity, one of ``irkit.formats.parts.SIMILARITIES``. Distances (euclidean, manhattan) are
            returned with a negative sign.
        a: Vectors. For maxsim and meanmaxsim an array ``(tokens, dim)`` per text, or a MultiVector.
        b: Vectors of the same kind.

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

    For the arguments see `compare`.

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
    """Convert both sides to the type that the similarity ``name`` compares.

    The result is two `MultiVector`, two `Sparse` or two float32 tensors ``(n, dim)``. For meanmaxsim the
    vectors of ``a`` are `averaged`; for cosine, sparse rows get length 1.
    """
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
    """Divide the token vectors of each query by their number, so that MaxSim is a mean, not a sum."""
    rows = queries.tokens
    counts = rows.lengths.to(rows.device)[rows.row_ids()]
    return MultiVector(rows.with_values(rows.values / counts[:, None]))


def unit_length(rows: Sparse) -> Sparse:
    """Scale the weights of each text so that their vector has length 1; a text without weights keeps none."""
    squares = rows.weights.new_zeros(len(rows)).index_add(0, rows.terms.row_ids(), rows.weights**2)
    norms = squares.sqrt().clamp(min=1e-12)
    return Sparse(rows.terms, rows.weights / norms[rows.terms.row_ids()], rows.dim)


def _stacked(vectors: Vectors) -> Vectors:
    """Stack a list of tensors to one tensor; return anything else unchanged."""
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
    """Convert ``vectors`` to float32 token vectors of several texts; one array ``(tokens, dim)`` is one text.

    Raises:
        BadTypeError: The vectors are sparse, or no arrays.
        BadValueError: An array has another number of dimensions.
    """
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


# ---- what `Model.encode` returns -----------------------------------------------------------------


def postprocess(head: Head, rows: Representation, dim: int | None, unit: bool) -> Representation:
    """Truncate vectors to their first ``dim`` dimensions, and normalise them if ``unit`` is set.

    Token vectors of a head that normalises (``head.unit``) are scaled after truncation to the length that
    they had before truncation.

    Args:
        head: The head that made ``rows``.
        rows: Representations to change.
        dim: Number of leading dimensions to keep; None is all. Sparse weights are never truncated.
        unit: Whether vectors get length 1.

    Raises:
        BadValueError: ``dim`` is below 1 or above the width of the vectors.
    """
    check_dim("encode", dim, head.dim)
    if isinstance(rows, Dense):
        values = rows.values[:, :dim].contiguous()
        return Dense(F.normalize(values, dim=1) if unit else values)
    if isinstance(rows, Sparse):
        return unit_length(rows) if unit else rows
    if not unit and (dim or head.dim) >= head.dim:
        return rows
    values = rows.tokens.values[:, :dim].contiguous()
    if unit or head.unit:
        lengths = 1.0 if unit else rows.tokens.values.norm(dim=1, keepdim=True)
        values = F.normalize(values, dim=1) * lengths
    return MultiVector(rows.tokens.with_values(values))


def check_dim(operation: str, dim: int | None, width: int) -> None:
    """Raise BadValueError unless ``dim`` is None or a whole number from 1 to ``width``.

    The message begins with ``operation``.
    """
    if dim is not None and (not is_count(dim) or dim > width):
        raise BadValueError(
            f"{operation}: truncate_dim is {brief(dim)}; expected a whole number from 1 to {width}, the "
            "width of the vectors, or None for all of it"
        )


def convert(
    rows: Representation, options: Mapping[str, object], single: bool, device: torch.device
) -> Embeddings:
    """Convert rows to what `Model.encode` returns: arrays or tensors, as the options say.

    Args:
        rows: Rows on the CPU.
        options: Options of `Model.encode`.
        single: Whether the caller gave one text instead of several. The result is then one vector (one array
            for a multi-vector model), without the dimension or list of texts.
        device: Device of returned tensors, except those in a list of dense ones, which stay on the CPU.
    """
    as_tensor, as_numpy = options.get("convert_to_tensor"), options.get("convert_to_numpy", True)
    if isinstance(rows, MultiVector):
        tensors = [row.clone() for row in rows.tokens]  # each of which may outlive the others
        if as_tensor:
            tensors = [row.to(device) for row in tensors]
        arrays = tensors if as_tensor or not as_numpy else [row.numpy() for row in tensors]
        return arrays[0] if single else arrays
    if isinstance(rows, Sparse):
        tensor = _coo(rows) if options.get("convert_to_sparse_tensor", True) else rows.to_dense()
        tensor = tensor.to(device)
        if single:
            return tensor[0]
        return tensor if options.get("convert_to_tensor", True) else list(tensor)
    values = rows.values[0] if single else rows.values
    if as_tensor:
        return values.to(device)
    if as_numpy:
        return values.numpy()
    return values if single else list(values)


def _coo(rows: Sparse) -> Tensor:
    """Convert rows to a sparse tensor (COO) ``(n, dim)``."""
    positions = torch.stack([rows.terms.row_ids(), rows.terms.values.long()])
    options: dict[str, Any] = {"check_invariants": False, "device": positions.device}
    return torch.sparse_coo_tensor(positions, rows.weights, (len(rows), rows.dim), **options).coalesce()


# ---- sparse vectors for people to read -----------------------------------------------------------


def as_sparse(operation: str, vectors: Any) -> Sparse:
    """Convert a tensor ``(n, dim)``, sparse or dense, to `Sparse`, without zeros; ``(dim,)`` is one row.

    A `Sparse` is returned unchanged. Messages begin with ``operation``.

    Raises:
        BadTypeError: ``vectors`` is neither a tensor nor `Sparse`.
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
        vocabulary: The string of each dimension, in order.
        k: Largest number of terms per row; None is all.

    Raises:
        BadValueError: ``k`` is below 1, or the vocabulary has another size than ``rows.dim``.

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
    """Measure how sparse rows are.

    Returns:
        ``active_dims``, the mean number of terms per row, and ``sparsity_ratio``, the mean share of the
        vocabulary without a weight (0 to 1). Without rows they are 0 and 1.
    """
    active = len(rows.weights) / max(1, len(rows))
    return {"active_dims": active, "sparsity_ratio": 1.0 - active / max(1, rows.dim)}
