"""The search of one dense query with the least overhead."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias, cast

import torch

from irkit.core.representation import Dense, Representation
from irkit.index.array_files import Array
from irkit.index.index_base import Index
from irkit.index.metrics import LARGEST_SQUARE
from irkit.index.topk import Hits

Single: TypeAlias = Callable[[Array], tuple[Array, Array]]
"""Finds rows and scores ``(1, k)`` of a query ``(dim,)`` float32."""


def search_alone(
    index: Index, queries: Representation, k: int, prepare: Callable[[int], Single | None]
) -> Hits | None:
    """Search for one query by a function that is prepared once for each thread and ``k``.

    Checks and conversions take longer than the search of one query, so only those are done that this query
    needs. Call this inside a snapshot of the store.

    Args:
        index: Index of dense vectors.
        queries: What was given to a search.
        k: What was given to a search.
        prepare: Returns the function for ``k``, or None if this state of the index needs the general search.

    Returns:
        The hits; None if there are several queries, or anything about this one has to be looked at, such as
        its dtype or fewer than ``k`` hits.
    """
    if not isinstance(queries, Dense) or type(k) is not int:
        return None
    own = index.store.derived("own", threading.local)
    last_k, config, shape, find = getattr(own, "last", (0, None, None, None))
    if last_k != k or config is not index.config:
        shape, find = (1, index.dim), prepare(k)
        own.last = k, index.config, shape, find
    values = queries.values
    if find is None or values.shape != shape or values.dtype is not torch.float32:
        return None
    try:
        query = cast(Dense, index._compared(queries)).values.numpy()[0]
    except (RuntimeError, TypeError):  # it has gradients, or is on another device
        return None
    square = query.dot(query)  # takes a third of the time of a sum
    if square <= LARGEST_SQUARE:  # and no number is NaN
        rows, scores = find(query)
        if rows[0, -1] >= 0:
            return Hits(rows, scores)
    return None
