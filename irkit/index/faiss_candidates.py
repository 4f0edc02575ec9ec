"""The candidates of a search with FAISS, which depend on scores by codes, never on FAISS's order of ties.

FAISS keeps any of the rows that tie at the end of its list, whichever it met first. So a search asks for one
row more than it takes, and leaves out those that tie with it. What is left is the same however rows are
divided among structures with the same codes. Where ties leave few, the search asks for more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from irkit.index.array_files import Array
from irkit.index.topk import Hits

_WIDER = 8  # times as many candidates are asked for where ties leave few
_WIDEST = 4096  # candidates from which on no more are asked for
_PAIRS = 1 << 21  # queries times candidates at once, where more are asked for


class Reach(NamedTuple):
    """How far a search of one or several structures looks.

    Attributes:
        width: Number of candidates.
        share: Share of the rows of structures that may be hits.
        covered: Number of rows of structures.
        filtered: Whether some rows may be no hits.
    """

    width: int
    share: float
    covered: int
    filtered: bool


def drop_ties(rows: Array, scores: Array, width: int, k: int) -> Array:
    """Set the rows to -1 that are not among the best ``width``, and those that tie with the next one.

    Args:
        rows: ``(n_q, n)`` int64; changed in place.
        scores: ``(n_q, n)`` float32 by codes, higher is better; -inf for none.
        width: Number of candidates.
        k: Number of hits.

    Returns:
        ``(n_q,)`` bool: whether ties have left few candidates.
    """
    if rows.shape[1] <= width:
        return np.zeros(len(rows), bool)
    place = rows.shape[1] - 1 - width
    next_one = np.partition(scores, place, axis=1)[:, place, None]
    kept = scores > next_one
    rows[~kept] = -1
    few: Array = (next_one[:, 0] > -np.inf) & (kept.sum(1) < max(k, width // 2))
    return few


def find_untied(find: Callable[[Array, Reach], tuple[Hits, Array]], values: Array, reach: Reach) -> Hits:
    """Search, and search again with more candidates for those queries that ties leave few.

    Args:
        find: Returns hits, and what `drop_ties` returns.
        values: ``(n_q, dim)`` queries.
        reach: How far to look.
    """
    hits, tied = find(values, reach)
    again = np.flatnonzero(tied)
    if len(again) and reach.width <= _WIDEST:
        wider = reach._replace(width=_WIDER * reach.width)
        size = max(1, _PAIRS // wider.width)
        for start in range(0, len(again), size):
            chosen = again[start : start + size]
            hits.rows[chosen], hits.scores[chosen] = find_untied(find, values[chosen], wider)
    return hits


def drop_repeats(rows: Array) -> None:
    """Set each row that a line of ``rows`` has already to -1, in place."""
    order = rows.argsort(1, kind="stable")
    ascending = np.take_along_axis(rows, order, axis=1)
    line, position = np.nonzero(ascending[:, 1:] == ascending[:, :-1])
    rows[line, order[line, position + 1]] = -1
