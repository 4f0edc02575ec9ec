"""Search all representations of an index that holds several, and fuse their hits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
import torch

from irkit.arguments import brief, is_finite
from irkit.core.representation import Representation, Several
from irkit.core.scoring import score
from irkit.errors import BadTypeError, BadValueError
from irkit.index import Hits, Index, SeveralIndex
from irkit.index.array_files import Array

Fuse: TypeAlias = Literal["rrf"] | Mapping[str, float]
"""How hits of several representations are fused: by their ranks, or by scores with a weight for each head."""

DEPTH = 100  # hits of each head that are fused, at least
_RRF = 60  # constant of reciprocal rank fusion, as in `irkit.fuse`


def check_fuse(operation: str, fuse: object, heads: Sequence[str] | None) -> None:
    """Check how hits are to be fused.

    Args:
        operation: Name for messages.
        fuse: ``"rrf"``, weights by head, or None for the default.
        heads: Names of the heads of the index; None if it has one representation.

    Raises:
        BadTypeError: ``fuse`` is neither ``"rrf"`` nor weights.
        BadValueError: The index has one representation, a head is unknown, or a weight is not above 0.
    """
    if fuse is None:
        return
    if heads is None:
        raise BadValueError(
            f"{operation}: fuse is {brief(fuse)}, but the index has one representation; leave it out"
        )
    if isinstance(fuse, str) and fuse == "rrf":
        return
    if not isinstance(fuse, Mapping):
        raise BadTypeError(
            f"{operation}: fuse is {brief(fuse)}; expected 'rrf' or weights by head, such as "
            f"{{{heads[0]!r}: 1.0}}"
        )
    unknown = [name for name in fuse if name not in heads]
    if unknown or not fuse:
        raise BadValueError(
            f"{operation}: fuse has weights of {brief(unknown or {})}; expected one or more of "
            f"{', '.join(heads)}"
        )
    wrong = {name: weight for name, weight in fuse.items() if not is_finite(weight) or weight <= 0}
    if wrong:
        raise BadValueError(f"{operation}: fuse has {brief(wrong)}; expected weights above 0")


def heads_of(index: Index) -> list[str] | None:
    """Return the names of the representations of an index of several; None for any other index."""
    return [*index.parts] if isinstance(index, SeveralIndex) else None


def search_several(
    index: SeveralIndex,
    queries: Several,
    depth: int,
    fuse: Fuse | None,
    search: Callable[[Index, Representation, int], Hits],
) -> Hits:
    """Return the best documents of each query by the fused hits of all parts.

    Each part gives its ``depth`` best documents, or 100 if that is more. ``"rrf"`` adds up
    ``1 / (60 + rank)``. With weights, every document that a part of these has found gets the weighted sum of
    its exact scores in all of these parts, also in those that have not found it.

    Args:
        index: Index of the documents.
        queries: ``n_q`` queries.
        depth: Number of hits.
        fuse: See `Fuse`; None is ``"rrf"``.
        search: Called with a part, its queries and a number of hits; returns the best documents of the part.

    Returns:
        Rows and scores, ``(n_q, depth)`` each; ties go to the lower row.
    """
    names = [*queries.parts] if fuse is None or isinstance(fuse, str) else [*fuse]
    deep = min(max(depth, DEPTH), max(1, len(index)))
    hits_by_head = {name: search(index.parts[name], queries.parts[name], deep) for name in names}
    rows = np.concatenate([hits.rows for hits in hits_by_head.values()], axis=1)
    if fuse is None or isinstance(fuse, str):
        ranked = 1 / (_RRF + 1 + np.arange(deep))
        points = np.concatenate(
            [np.where(hits.rows >= 0, ranked, 0.0) for hits in hits_by_head.values()], axis=1
        )
        return _best(rows, points, depth)
    candidates = _distinct(rows)
    total = np.zeros(candidates.shape)
    for name, weight in fuse.items():
        scores = index.parts[name].rescore(queries.parts[name], candidates).astype(np.float64)
        total += weight * np.where(np.isneginf(scores), 0.0, scores)  # a document without tokens adds nothing
    return _best(candidates, total, depth)


def score_several(index: SeveralIndex, queries: Several, rows: Array, weights: Fuse | None) -> Array:
    """Return exact scores of chosen documents: weighted sums of the scores of the parts.

    Args:
        index: Index of the documents.
        queries: ``n_q`` queries.
        rows: ``(n_q, k)``; -1 stands for no document.
        weights: Weights by part; None weighs all by 1.

    Returns:
        ``(n_q, k)`` float32; -inf where the row is -1.
    """
    total = np.zeros(rows.shape)
    for name, weight in head_weights(queries, weights).items():
        scores = index.parts[name].rescore(queries.parts[name], rows).astype(np.float64)
        total += weight * np.where(np.isneginf(scores), 0.0, scores)
    total[rows < 0] = -np.inf
    return total.astype(np.float32)


def compare_several(queries: Several, documents: Several, weights: Fuse | None) -> torch.Tensor:
    """Return the weighted sum ``(n_q, n_d)`` of the scores of all parts, see `irkit.score`."""
    total = torch.zeros(len(queries), len(documents), device="cpu")
    for name, weight in head_weights(queries, weights).items():
        scores = score(queries.parts[name], documents.parts[name])
        total += weight * scores.masked_fill(scores == -torch.inf, 0.0)
    return total


def head_weights(queries: Several, weights: Fuse | None) -> Mapping[str, float]:
    """Return the weights by head of a sum of scores: those given, or 1 for all."""
    return dict.fromkeys(queries.parts, 1.0) if weights is None or isinstance(weights, str) else weights


def _distinct(rows: Array) -> Array:
    """Return the distinct rows of each query, ascending, filled up with -1 at the end."""
    lines = [np.unique(line[line >= 0]) for line in rows]
    table = np.full((len(rows), max(map(len, lines), default=0)), -1, np.int64)
    for line, chosen in zip(table, lines, strict=True):
        line[: len(chosen)] = chosen
    return table


def _best(rows: Array, points: Array, depth: int) -> Hits:
    """Add up the points of each row of a query, and return the ``depth`` best rows."""
    best = Hits(np.full((len(rows), depth), -1), np.full((len(rows), depth), -np.inf, np.float32))
    for number, (line, values) in enumerate(zip(rows, points, strict=True)):
        distinct, inverse = np.unique(line[line >= 0], return_inverse=True)
        sums = np.bincount(inverse, values[line >= 0], len(distinct)).astype(np.float32)
        order = np.argsort(-sums, kind="stable")[:depth]
        best.rows[number, : len(order)], best.scores[number, : len(order)] = distinct[order], sums[order]
    return best
