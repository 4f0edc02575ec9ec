"""The definition in numpy: all scores, and the documents that a query finds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["reference"]

Array = NDArray[Any]


def reference(
    forward: tuple[Array, Array, Array, Array | None],
    queries: tuple[Array, Array, Array],
    k: int,
    keep: Array | None = None,
) -> tuple[Array, Array]:
    """Return what exact search finds, by scoring all documents in float64.

    Args:
        forward: ``offsets (n + 1,)``, ``terms``, ``weights`` and ``scales (n,)`` or None of the documents.
        queries: ``offsets (n_q + 1,)``, ``terms`` and ``weights`` of the queries.
        k: Hits per query.
        keep: ``(n,)`` bool, documents that may be found.

    Returns:
        Rows int64 and scores float64 ``(n_q, k)``, best first, ties to the lower row, -1 and -inf where
        no more documents score above 0.
    """
    offsets, terms, weights, scales = forward
    n, documents = len(offsets) - 1, np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    values = weights.astype(np.float64)
    if scales is not None:
        values *= scales[documents]
    starts, query_terms, query_weights = queries
    rows, scores = np.full((len(starts) - 1, k), -1), np.full((len(starts) - 1, k), -np.inf)
    dim = int(max(terms.max(initial=0), query_terms.max(initial=0))) + 1
    for query in range(len(starts) - 1):
        span, table = slice(starts[query], starts[query + 1]), np.zeros(dim)
        table[query_terms[span]] = query_weights[span]
        all_scores = np.bincount(documents, values * table[terms], n)
        allowed = np.flatnonzero((all_scores > 0) & (True if keep is None else keep))
        best = allowed[np.argsort(-all_scores[allowed], kind="stable")][:k]
        rows[query, : len(best)], scores[query, : len(best)] = best, all_scores[best]
    return rows, scores
