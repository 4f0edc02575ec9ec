"""What happens to representations after the head: truncation, normalisation, conversion to other types."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from irkit.arguments import brief, is_count
from irkit.core.representation import Dense, MultiVector, Representation, Sparse
from irkit.errors import BadValueError
from irkit.heads import Head
from irkit.model.encode_options import EncodeOptions
from irkit.model.similarity import unit_length

Embeddings = np.ndarray[Any, Any] | Tensor | list[Tensor] | list[np.ndarray[Any, Any]]


def postprocess(head: Head, rows: Representation, dim: int | None, unit: bool) -> Representation:
    """Truncate vectors to their first ``dim`` dimensions, and normalise them if ``unit`` is set.

    Token vectors of a head that makes vectors of length 1 are rescaled to their length before truncation,
    which is below 1 for those that token pooling has averaged.

    Args:
        head: Made the rows.
        rows: What it made.
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
    """Raise BadValueError unless vectors of ``width`` can be truncated to ``dim``."""
    if dim is not None and (not is_count(dim) or dim > width):
        raise BadValueError(
            f"{operation}: truncate_dim is {brief(dim)}; expected a whole number from 1 to {width}, the "
            "width of the vectors, or None for all of it"
        )


def convert(rows: Representation, options: EncodeOptions, single: bool, device: torch.device) -> Embeddings:
    """Return rows as the types that `Model.encode` documents.

    Args:
        rows: Rows on the CPU.
        options: Options of `Model.encode`.
        single: Whether there is one text, whose vector comes back without the list around it.
        device: Device of tensors.
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
    """Return a sparse tensor (COO) ``(n, dim)``."""
    positions = torch.stack([rows.terms.row_ids(), rows.terms.values.long()])
    options: dict[str, Any] = {"check_invariants": False, "device": positions.device}
    return torch.sparse_coo_tensor(positions, rows.weights, (len(rows), rows.dim), **options).coalesce()
