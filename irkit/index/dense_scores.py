"""Exact scores of dense vectors, which do not depend on the vectors that are scored beside them.

A product of matrices rounds by their shapes, so the last bits of a score differ between a block of 100 rows
and one of 1,000, and between one query and many. Such a product is fast, though. So it only chooses the rows
that may be among the best, by a bound of its rounding; the kernel ``dense_scan`` then scores these few, with
additions in an order that depends on the number of dimensions alone.
"""

from __future__ import annotations

import numpy as np
import torch
from irkit_kernels.dense_scan import matmul_error, products

from irkit.core.representation import Dense
from irkit.core.scoring import score
from irkit.index.array_files import Array
from irkit.index.metrics import Metric, from_products, squares_of
from irkit.index.topk import TopK, query_table

__all__ = ["longest_of", "pair_scores", "push_rows"]

_FEW = 4096  # pairs that are scored without a choice


def pair_scores(
    metric: Metric, queries: Array, values: Array, chosen: Array, squares: Array | None = None
) -> Array:
    """Return the scores of the rows that are chosen for each query.

    Args:
        metric: How vectors are compared. Vectors have length 1 for cosines.
        queries: ``(n_q, dim)`` float32.
        values: ``(n, dim)`` float32, at least one; also float16, or bfloat16 as uint16, if the metric is not
            euclidean.
        chosen: ``(n_q, width)`` int64 rows; -1 for none.
        squares: What `squares_of` returns for the rows, if it is known.

    Returns:
        ``(n_q, width)`` float32; -inf where no row is chosen.
    """
    found = products(np.ascontiguousarray(values), np.ascontiguousarray(queries), chosen)
    squares = squares_of(metric, values) if squares is None else squares
    return from_products(metric, found, squares_of(metric, queries), squares[chosen])


def push_rows(
    best: TopK,
    metric: Metric,
    queries: Array,
    values: Array,
    rows: Array,
    keep: Array | None,
    longest: float,
) -> None:
    """Push exact scores of the rows that may be among the best.

    Args:
        best: Hits so far.
        metric: See `pair_scores`.
        queries: ``(n_q, dim)`` float32.
        values: ``(n, dim)`` float32.
        rows: ``(n,)`` their numbers, above those that were pushed before.
        keep: ``(n,)`` bool, True for rows that may be hits; None for all.
        longest: Upper bound of the length of a row.
    """
    squares = squares_of(metric, values)
    if len(values) <= max(2 * best.k, _FEW // max(1, len(queries))):
        every = np.arange(len(values)) if keep is None else np.flatnonzero(keep)
        chosen = np.tile(every, (len(queries), 1))
    else:
        chosen = _near(best, metric, queries, values, squares, keep, longest)
    if chosen.size:
        best.push_pairs(
            pair_scores(metric, queries, values, chosen, squares), np.where(chosen < 0, -1, rows[chosen])
        )


def _near(
    best: TopK,
    metric: Metric,
    queries: Array,
    values: Array,
    squares: Array,
    keep: Array | None,
    longest: float,
) -> Array:
    """Return ``(n_q, width)`` positions of the rows that may be among the best, -1 for none."""
    near = score(Dense(torch.from_numpy(queries)), Dense(torch.from_numpy(values))).numpy()
    scores = from_products(metric, near, squares_of(metric, queries), squares)
    if keep is not None:
        scores[:, ~keep] = -np.inf
    # how far two ways to add up a product may be from each other; written so that NaN leaves a row in
    with np.errstate(all="ignore"):
        lengths = np.linalg.norm(queries.astype(np.float64), axis=1)
        error = matmul_error(queries.shape[1]) * lengths * longest + 1e-30
        if metric == "euclidean":
            error = 2 * error + 2.0**-21 * (lengths + longest) ** 2
        limit = best.least()
        positions = _reaching(scores, limit - error)
        if len(positions) > 2 * best.k * len(queries):  # few queries have hits yet
            at = scores.shape[1] - best.k
            limit = np.maximum(limit, np.partition(scores, at, axis=1)[:, at] - error)
            positions = _reaching(scores, limit - error)
    query, column = np.divmod(positions, scores.shape[1])
    if keep is not None:
        query, column = query[keep[column]], column[keep[column]]
    return query_table(query, column, len(queries), -1)


def _reaching(scores: Array, limit: Array) -> Array:
    """Return where ``scores (n_q, n)`` float32 are not below the ``limit (n_q,)`` of each query."""
    least = np.nextafter(limit.astype(np.float32), np.float32(-np.inf))
    return np.flatnonzero(~(scores < least[:, None]))


def longest_of(values: Array) -> float:
    """Return an upper bound of the length of ``values (n, dim)`` float32, which may be infinity."""
    lengths = torch.linalg.vector_norm(torch.from_numpy(values), dim=1)
    return float(lengths.max()) * (1 + (values.shape[1] + 8) * 2.0**-23) + 1e-17 if len(values) else 0.0
