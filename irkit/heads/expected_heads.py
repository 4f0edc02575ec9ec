"""Heads of one class: for code that needs more of a head than every head has."""

from __future__ import annotations

from typing import TypeVar

from irkit.errors import BadValueError
from irkit.heads.head import Head
from irkit.heads.multi_vector_head import MultiVectorHead
from irkit.heads.sparse_head import SparseHead

_Expected = TypeVar("_Expected", bound=Head)


def as_sparse_head(head: Head, operation: str) -> SparseHead:
    """Return ``head`` itself, typed as a `SparseHead`.

    Raises:
        BadValueError: The head is of another class. The message begins with ``operation``.
    """
    return _expect(SparseHead, "a sparse one", head, operation)


def as_multi_vector_head(head: Head, operation: str) -> MultiVectorHead:
    """Return ``head`` itself, typed as a `MultiVectorHead`; raise as `as_sparse_head`."""
    return _expect(MultiVectorHead, "one per token", head, operation)


def _expect(kind: type[_Expected], vectors: str, head: Head, operation: str) -> _Expected:
    if not isinstance(head, kind):
        raise BadValueError(f"{operation}: the model makes {head.kind} vectors, expected {vectors}")
    return head
