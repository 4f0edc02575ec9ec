"""Search of sparse vectors as plainly as it can be compiled: term at a time, with a sum for each document."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

__all__ = ["scan", "transpose"]

Array = np.ndarray[Any, Any]


@numba.njit(cache=True)
def transpose(offsets: Array, terms: Array, weights: Array, dim: int) -> tuple[Array, Array, Array]:
    """Sort by terms: return ``(dim + 1,)`` where each begins, rows (int64) and weights of its documents."""
    starts = np.zeros(dim + 1, np.int64)
    for term in terms:
        starts[term + 1] += 1
    starts = np.cumsum(starts)
    free = starts[:-1].copy()
    rows, impacts = np.empty(len(terms), np.int64), np.empty(len(terms), np.float32)
    for row in range(len(offsets) - 1):
        for place in range(offsets[row], offsets[row + 1]):
            at = free[terms[place]]
            free[terms[place]] += 1
            rows[at], impacts[at] = row, weights[place]
    return starts, rows, impacts


@numba.njit(fastmath=True, cache=True)
def scan(
    starts: Array,
    rows: Array,
    impacts: Array,
    offsets: Array,
    terms: Array,
    weights: Array,
    sums: Array,
    best: Array,
    scores: Array,
) -> None:
    """Put the best rows of each query and their scores into ``(n_q, k)`` each, adding up in ``sums (n,)``."""
    for query in range(len(best)):
        sums[:] = 0
        for place in range(offsets[query], offsets[query + 1]):
            weight = weights[place]
            for at in range(starts[terms[place]], starts[terms[place] + 1]):
                sums[rows[at]] += weight * impacts[at]
        scores[query] = -np.inf
        _take(sums, best[query], scores[query])


@numba.njit(fastmath=True, cache=True)
def _take(sums: Array, best: Array, highest: Array) -> None:
    """Return the rows of the highest sums; 64 rows are skipped if their maximum is too low."""
    for start in range(0, len(sums), 64):
        most = sums[start]
        for row in range(start + 1, min(len(sums), start + 64)):
            most = max(most, sums[row])
        if most <= highest[-1]:
            continue
        for row in range(start, min(len(sums), start + 64)):
            score, place = sums[row], len(best) - 1
            if score > highest[-1]:
                while place > 0 and highest[place - 1] < score:
                    highest[place], best[place] = highest[place - 1], best[place - 1]
                    place -= 1
                highest[place], best[place] = score, row
