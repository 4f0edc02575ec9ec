"""The options of `Model.encode`: checks of their values, and what they make of a representation."""

from __future__ import annotations

import difflib
from typing import Any, TypedDict, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from irkit.arguments import brief, check_flags, is_count
from irkit.core.representation import Dense, MultiVector, Representation, Sparse
from irkit.errors import BadTypeError, BadValueError
from irkit.heads import Head
from irkit.model.hardware import Device
from irkit.model.similarity import unit_length

Embeddings = np.ndarray[Any, Any] | Tensor | list[Tensor] | list[np.ndarray[Any, Any]]

_NOT_SPARSE = ("convert_to_numpy", "normalize_embeddings", "truncate_dim")
_ONLY_SPARSE = ("max_active_dims", "convert_to_sparse_tensor")


class EncodeOptions(TypedDict, total=False):
    """The options of `Model.encode`, with the names of sentence-transformers.

    Attributes:
        prompt_name: Name of the prompt of the model that is written before each text.
        prompt: Text written before each text; goes before ``prompt_name``.
        batch_size: Most texts encoded at once; by default only their tokens count (``tokens_per_step``).
        show_progress_bar: Show a bar on a terminal or in a notebook.
        convert_to_numpy: False, without ``convert_to_tensor``, returns a list of tensors.
        convert_to_tensor: Return a tensor on the device of the model instead of an array.
        normalize_embeddings: Scale vectors to length 1.
        truncate_dim: Keep this many leading dimensions.
        max_active_dims: Sparse models only: keep this many weights per text, whatever the model says.
        convert_to_sparse_tensor: Sparse models only: False returns dense tensors.
        device: Move the model there first; or several, each of which gets a process of its own.
    """

    prompt_name: str | None
    prompt: str | None
    batch_size: int | None
    show_progress_bar: bool | None
    convert_to_numpy: bool
    convert_to_tensor: bool
    normalize_embeddings: bool
    truncate_dim: int | None
    max_active_dims: int | None
    convert_to_sparse_tensor: bool
    device: Device | None


_KINDS = get_type_hints(EncodeOptions)
_FLAGS = [name for name, kind in _KINDS.items() if bool in (kind, *get_args(kind))]


def check_options(options: EncodeOptions, kind: str) -> None:
    """Check whether a model of a kind can encode with these options.

    Raises:
        BadTypeError: There is no such option, or a prompt is not a string.
        BadValueError: An option does nothing for this kind of model, or a batch would have no text.
    """
    for name in options.keys() - _KINDS.keys():
        near = difflib.get_close_matches(name, _KINDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_KINDS)}"
        raise BadTypeError(f"encode: no option is named {name!r}; {hint}")
    check_flags("encode", **{name: options.get(name) for name in _FLAGS if options.get(name) is not None})
    for name in _NOT_SPARSE if kind == "sparse" else _ONLY_SPARSE:
        if options.get(name) is not None and options.get(name) is not False:
            raise BadValueError(f"encode: {name} does nothing for a {kind} model; leave it out")
    size = options.get("batch_size")
    if size is not None and not is_count(size):
        raise BadValueError(f"encode: batch_size is {brief(size)}, expected a whole number of 1 or more")
    if not isinstance(options.get("prompt"), str | None):
        raise BadTypeError(f"encode: prompt is {brief(options.get('prompt'))}, expected a string")


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
