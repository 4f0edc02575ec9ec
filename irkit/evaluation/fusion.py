"""Fuse several runs into one, by the ranks or by the scores of their documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from irkit.arguments import brief, check_counts, is_finite
from irkit.errors import BadTypeError, BadValueError
from irkit.evaluation.measures import as_run
from irkit.evaluation.run import Run

Method: TypeAlias = Literal["rrf", "minmax", "zscore", "sum"]
"""The formula for the points of a document, see `fuse`."""

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


def fuse(
    runs: Iterable[Run | Mapping[str, Mapping[str, float]] | str | Path],
    method: Method = "rrf",
    k: int = 1000,
    *,
    weights: Sequence[float] | None = None,
    depth: int | None = None,
    rrf_k: float = 60,
) -> Run:
    """Rank the documents of several runs by the sum of the points that each run gives them.

    ============  =================================================  ==========================
    ``method``    points of a document                               points if a run lacks it
    ============  =================================================  ==========================
    ``"rrf"``     1 / (``rrf_k`` + rank), ranks from 1               0
    ``"minmax"``  score, from 0 (the lowest of the query in the      0
                  run) to 1 (the highest); 1 where all are equal
    ``"zscore"``  score, standardised over the query's results in    points of the run's lowest
                  that run; 0 where all are equal                    document
    ``"sum"``     the score itself (CombSUM), for runs whose         0
                  scores share a scale
    ============  =================================================  ==========================

    A run that lacks a query, or has no results for it, gives no points. Ties keep the order in which
    documents come: first the documents of the first run by rank, then those that the second run adds. Sums
    do not depend on the order of the runs.

    Args:
        runs: Two or more runs, dictionaries (query id -> document id -> score) or files.
        method: Formula for the points.
        k: Maximum number of results per query.
        weights: Factor for the points of each run, 0 or more; by default 1. A run of weight 0 is left out.
        depth: Number of results per query that count in each run; by default all.
        rrf_k: Constant of ``"rrf"``, above 0; a higher constant gives the first ranks less weight.

    Returns:
        A run with the queries of all runs, in the order of the first run, then of the others.

    Raises:
        BadValueError: There are fewer than two runs, an option makes no sense, or sums are too large for a
            float.
        BadTypeError: ``runs`` is not a list of runs.
        StorageError: A file cannot be read.

    Examples:
        >>> words, vectors = {"q": {"d1": 9.0, "d2": 7.0}}, {"q": {"d2": 0.8, "d3": 0.5}}
        >>> [(doc, round(score, 4)) for doc, score in fuse([words, vectors])["q"]]
        [('d2', 0.0325), ('d1', 0.0164), ('d3', 0.0161)]

    Source: Cormack, Clarke & Büttcher 2009, Reciprocal Rank Fusion (``"rrf"``, with 60); Fox & Shaw 1994,
    Combination of Multiple Searches (``"sum"``).
    """
    if isinstance(runs, str | Path | Mapping | Run) or not isinstance(runs, Iterable):
        raise BadTypeError(f"fuse: got {brief(runs)}, expected two or more runs in a list")
    items = list(runs)
    if len(items) < 2:
        raise BadValueError(f"fuse: expected two or more runs, got {len(items)}")
    if not isinstance(method, str) or method not in get_args(Method):
        raise BadValueError(f"fuse: unknown method {brief(method)}; expected {', '.join(get_args(Method))}")
    check_counts("fuse", k=k, depth=1 if depth is None else depth)
    if not is_finite(rrf_k) or rrf_k <= 0:
        raise BadValueError(f"fuse: rrf_k is {brief(rrf_k)}; expected a number above 0")
    factors = _check_weights(weights, len(items))
    weighted = [(run, weight) for run, weight in zip(map(as_run, items), factors, strict=True) if weight]

    def ranking(query: str) -> tuple[str, list[str], Array]:
        results = [(weight, *run.columns(query)) for run, weight in weighted if query in run]
        results = [(weight, docs[:depth], scores[:depth]) for weight, docs, scores in results if docs]
        ids = list(dict.fromkeys(chain.from_iterable(docs for _, docs, _ in results)))
        columns = dict(zip(ids, range(len(ids)), strict=True))
        points = np.empty((len(results), len(ids)))
        for row, (weight, docs, scores) in zip(points, results, strict=True):
            values, others = _points(method, scores, rrf_k)
            row[:] = weight * others
            row[[columns[doc] for doc in docs]] = weight * values
        points.sort(axis=0)  # add the smallest first: then sums do not depend on the order of the runs
        sums = points.sum(axis=0)
        best = np.argsort(-sums, kind="stable")[:k]
        return query, [ids[column] for column in best.tolist()], sums[best]

    return Run(map(ranking, dict.fromkeys(query for run, _ in weighted for query in run.query_ids)))


def _points(method: Method, scores: Array, rrf_k: float) -> tuple[Array, float]:
    """Return the points of the documents of one ranking.

    Args:
        method: See `fuse`.
        scores: ``(n,)`` scores of the ranking, the highest first.
        rrf_k: See `fuse`.

    Returns:
        The points ``(n,)`` of the documents of the ranking, and the points of any document that is not in the
        ranking.
    """
    if method == "rrf":
        return 1 / (rrf_k + np.arange(1, len(scores) + 1)), 0.0
    if method == "sum":
        return scores, 0.0
    spread = scores[0] - scores[-1]
    if method == "minmax":  # the only result of a query gets 1, not the 0 of documents that the run lacks
        return (scores - scores[-1]) / spread if spread else np.ones_like(scores), 0.0
    if not spread:
        return np.zeros_like(scores), 0.0
    values = (scores - scores[-1]) / spread  # to 0 ... 1 first: squares of other scores may be 0 or infinite
    values = (values - values.mean()) / values.std()
    return values, float(values[-1])


def _check_weights(weights: Sequence[float] | None, runs: int) -> Sequence[float]:
    if weights is None:
        return [1.0] * runs
    if isinstance(weights, str) or not isinstance(weights, Iterable):
        raise BadTypeError(
            f"fuse: weights are {brief(weights)}; expected a list of numbers, one for each run"
        )
    values = list(weights)
    if len(values) != runs:
        raise BadValueError(f"fuse: expected a weight for each of {runs} runs, got {len(values)}")
    if not all(is_finite(value) and value >= 0 for value in values) or not any(values):
        raise BadValueError(
            f"fuse: weights are {brief(values)}; expected numbers of 0 or more, one of them above 0 at least"
        )
    return values
