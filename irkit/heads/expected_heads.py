"""Heads of one class: for code that needs more of a head than every head has."""

from __future__ import annotations

from irkit.errors import BadValueError
from irkit.heads.head import Head
from irkit.heads.multi_vector_head import MultiVectorHead
from irkit.heads.sparse_head import SparseHead


def as_sparse_head(head: Head, operation: str) -> SparseHead:
    """Return ``head`` itself, typed as a `SparseHead`.

    Raises:
        BadValueError: The head is of another class. The message begins with ``operation``.
    """
    if not isinstance(head, SparseHead):
        raise BadValueError(f"{operation}: the model makes {head.kind} vectors, expected a sparse one")
    return head


def as_multi_vector_head(head: Head, operation: str) -> MultiVectorHead:
    """Return ``head`` itself, typed as a `MultiVectorHead`.

    Raises:
        BadValueError: The head is of another class. The message begins with ``operation``.
    """
    if not isinstance(head, MultiVectorHead):
        raise BadValueError(f"{operation}: the model makes {head.kind} vectors, expected one per token")
    return head
