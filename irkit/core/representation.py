"""Representations of texts: one vector, one vector per token, weights of terms, or several of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from irkit.arguments import brief
from irkit.core.ragged import Ragged, as_tensor, to_device
from irkit.errors import BadTypeError, BadValueError

Rows = slice | Sequence[int] | Tensor | np.ndarray[Any, Any]
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, eq=False)
class Dense:
    """One vector per text.

    Attributes:
        values: ``(n, dim)`` floating point.
    """

    values: Tensor
    kind: ClassVar[str] = "dense"

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", as_tensor("Dense", self.values))
        if self.values.dim() != 2 or not self.values.is_floating_point():
            raise BadValueError(
                f"Dense: expected floating point values of shape (n, dim), got {tuple(self.values.shape)} "
                f"{self.values.dtype}; wrap one vector as vector[None, :]"
            )

    @property
    def dim(self) -> int:
        """Width of a vector."""
        return self.values.shape[1]

    def __len__(self) -> int:
        return self.values.shape[0]

    def __getitem__(self, rows: Rows) -> Dense:
        return Dense(self.values[to_device(rows, self.values.device) if isinstance(rows, Tensor) else rows])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Dense:
        """Return the vectors on a device and in a dtype; None keeps the present one."""
        return Dense(self.values.to(device=device, dtype=dtype))

    def arrays(self) -> Arrays:
        """Return the content as numpy arrays by name, for files: ``values (n, dim)`` float32."""
        return {"values": self.values.detach().to("cpu", torch.float32).numpy()}


@dataclass(frozen=True, eq=False)
class MultiVector:
    """One vector per token.

    Attributes:
        tokens: Ragged of ``(total, dim)`` floating point.
    """

    tokens: Ragged
    kind: ClassVar[str] = "multi_vector"

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Ragged):
            raise BadTypeError(f"MultiVector: expected a Ragged, got {type(self.tokens).__name__}")
        if self.tokens.values.dim() != 2 or not self.tokens.values.is_floating_point():
            raise BadValueError(
                f"MultiVector: expected floating point token vectors of shape (total, dim), "
                f"got {tuple(self.tokens.values.shape)} {self.tokens.values.dtype}"
            )

    @property
    def dim(self) -> int:
        """Width of a token vector."""
        return self.tokens.values.shape[1]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: Rows) -> MultiVector:
        return MultiVector(self.tokens[rows])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> MultiVector:
        """Return the vectors on a device and in a dtype; None keeps the present one."""
        return MultiVector(self.tokens.to(device, dtype))

    def arrays(self) -> Arrays:
        """Return the content as numpy arrays by name, for files.

        ``values (total, dim)`` float32, and ``lengths (n,)`` int64, the number of tokens per text.
        """
        values = self.tokens.values.detach().to("cpu", torch.float32).numpy()
        return {"values": values, "lengths": self.tokens.lengths.numpy()}


@dataclass(frozen=True, eq=False)
class Sparse:
    """Weights over a vocabulary, compressed by rows (CSR).

    Attributes:
        terms: Ragged of ``(nonzeros,)`` integers in ``[0, dim)``, distinct within a row.
        weights: ``(nonzeros,)`` floating point, the weight of each of ``terms.values``.
        dim: Size of the vocabulary.
    """

    terms: Ragged
    weights: Tensor
    dim: int
    kind: ClassVar[str] = "sparse"

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", as_tensor("Sparse: weights", self.weights))
        if not isinstance(self.terms, Ragged) or not isinstance(self.dim, int):
            raise BadTypeError(
                f"Sparse: got terms {type(self.terms).__name__} and dim {brief(self.dim)}, expected a Ragged "
                "and the size of the vocabulary"
            )
        terms = self.terms.values
        if (
            terms.dim() != 1
            or terms.is_floating_point()
            or self.weights.shape != terms.shape
            or not self.weights.is_floating_point()
        ):
            raise BadValueError(
                f"Sparse: expected integer terms (nonzeros,) and as many floating point weights, got terms "
                f"{tuple(terms.shape)} {terms.dtype}, {tuple(self.weights.shape)} {self.weights.dtype}"
            )
        low, high = (int(terms.min()), int(terms.max())) if terms.numel() else (0, 0)
        if low < 0 or high >= max(self.dim, 1):
            raise BadValueError(f"Sparse: terms must lie in [0, {self.dim}), got {low}..{high}")

    @classmethod
    def from_dense(cls, values: Tensor) -> Sparse:
        """Compress values ``(n, vocabulary)``: keep those that are not zero."""
        values = as_tensor("Sparse.from_dense", values)
        if values.dim() != 2:
            raise BadValueError(f"Sparse.from_dense: shape {tuple(values.shape)}, expected (n, vocabulary)")
        mask = values != 0
        terms = torch.arange(values.shape[1], device=values.device).expand_as(values)
        return cls(Ragged.from_padded(terms, mask), values[mask], values.shape[1])

    def to_dense(self) -> Tensor:
        """Return ``(n, vocabulary)``, with zeros for missing terms."""
        dense = self.weights.new_zeros(len(self), self.dim)
        dense[self.terms.row_ids(), self.terms.values.long()] = self.weights
        return dense

    def __len__(self) -> int:
        return len(self.terms)

    def __getitem__(self, rows: Rows) -> Sparse:
        positions = self.terms.with_values(torch.arange(len(self.weights), device=self.terms.device))[rows]
        terms = positions.with_values(self.terms.values[positions.values])
        return Sparse(terms, self.weights[positions.values], self.dim)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Sparse:
        """Return the rows on a device, with weights of a dtype; None keeps the present one."""
        weights = self.weights.to(device=device, dtype=dtype)
        return self if weights is self.weights else Sparse(self.terms.to(device), weights, self.dim)

    def arrays(self) -> Arrays:
        """Return the content as numpy arrays by name, for files.

        ``terms (total,)`` int32, ``weights (total,)`` float32, and ``lengths (n,)`` int64, the number of
        terms per row.
        """
        return {
            "terms": self.terms.values.to("cpu", torch.int32).numpy(),
            "weights": self.weights.detach().to("cpu", torch.float32).numpy(),
            "lengths": self.terms.lengths.numpy(),
        }


Representation = Dense | MultiVector | Sparse


@dataclass(frozen=True, eq=False)
class Several:
    """Several representations of the same texts, by name: what a model with several heads makes.

    It passes wherever rows of a `Representation` do, from the head of the model to the index, but it has no
    score of its own: scores of its parts are fused.

    Attributes:
        parts: Representations by name, with as many rows each; names and order do not change.
    """

    parts: Mapping[str, Representation]
    kind: ClassVar[str] = "several"

    def __post_init__(self) -> None:
        parts = self.parts
        is_valid = isinstance(parts, Mapping) and parts
        if not is_valid or not all(isinstance(part, Dense | MultiVector | Sparse) for part in parts.values()):
            raise BadTypeError(f"Several: got {brief(parts)}, expected Dense, MultiVector or Sparse by name")
        if len({len(part) for part in parts.values()}) > 1:
            lengths = {name: len(part) for name, part in parts.items()}
            raise BadValueError(f"Several: parts of {lengths} rows, expected as many in each")

    @property
    def dim(self) -> int:
        """Sum of the widths of all parts."""
        return sum(part.dim for part in self.parts.values())

    def __len__(self) -> int:
        return len(next(iter(self.parts.values())))

    def __getitem__(self, rows: Rows) -> Several:
        return Several({name: part[rows] for name, part in self.parts.items()})

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Several:
        """Return all parts on a device and in a dtype; None keeps the present one."""
        return Several({name: part.to(device, dtype) for name, part in self.parts.items()})

    def arrays(self) -> Arrays:
        """Return the arrays of all parts; each key is ``name.kind.dim.`` and the key of the part."""
        return {
            f"{name}.{part.kind}.{part.dim}.{key}": array
            for name, part in self.parts.items()
            for key, array in part.arrays().items()
        }


def concat(parts: Iterable[Representation]) -> Representation:
    """Return the rows of all parts, in order; at least one part, all of one kind and width."""
    items = list(parts)
    several: list[Any] = [item for item in items if isinstance(item, Several)]
    if several and len({tuple(item.parts) for item in several}) == 1 and len(several) == len(items):
        names = several[0].parts
        joined: Any = Several({name: concat(item.parts[name] for item in several) for name in names})
        return cast(Representation, joined)
    if not items or len({(item.kind, item.dim) for item in items}) != 1:
        raise BadValueError(
            "concat: expected one or more representations of one kind and width, got "
            f"{sorted({(item.kind, item.dim) for item in items})}"
        )
    first = items[0]
    if len(items) == 1:
        return first
    if isinstance(first, Dense):
        return Dense(torch.cat([item.values for item in items if isinstance(item, Dense)]))
    if isinstance(first, MultiVector):
        return MultiVector(Ragged.concat([item.tokens for item in items if isinstance(item, MultiVector)]))
    sparse = [item for item in items if isinstance(item, Sparse)]
    weights = torch.cat([item.weights for item in sparse])
    return Sparse(Ragged.concat([item.terms for item in sparse]), weights, first.dim)


def representation_from_arrays(kind: str, dim: int, arrays: Arrays) -> Representation:
    """Rebuild a representation from the result of its ``arrays()`` method.

    Args:
        kind: ``"dense"``, ``"multi_vector"``, ``"sparse"`` or ``"several"``.
        dim: Width of a vector, or size of the vocabulary; not used for several.
        arrays: The result of ``arrays()``; memory-mapped arrays are not copied.
    """
    if kind == "several":
        grouped: dict[tuple[str, str, int], Arrays] = {}
        for key, array in arrays.items():
            name, own, width, rest = key.split(".")
            grouped.setdefault((name, own, int(width)), {})[rest] = array
        by_head = {key[0]: representation_from_arrays(*key[1:], part) for key, part in grouped.items()}
        several: Any = Several(by_head)
        return cast(Representation, several)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if kind == "dense":
        return Dense(tensors["values"])
    if kind == "multi_vector":
        return MultiVector(Ragged(tensors["values"], tensors["lengths"]))
    if kind == "sparse":
        return Sparse(Ragged(tensors["terms"], tensors["lengths"]), tensors["weights"], dim)
    raise BadValueError(f"representation: unknown kind {kind!r}, expected dense, multi_vector or sparse")
