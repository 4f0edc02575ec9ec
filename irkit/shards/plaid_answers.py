"""What shards of a plaid index send that other processes search, and the search of one index from it.

A shard is asked once about some queries. Documents are on shards by chance, so a shard has about its share of
the documents that a step of one index passes on (the steps are in `irkit.index.plaid_search`). Each shard
takes all steps with its share and what chance may add to it (`plaid_answer`), and sends the scores of the
documents that it passed on. `merge_steps` takes the steps once more, among the documents of all shards. It
tells from what shards sent whether one of them left out a document that counts. Queries of which one did, a
few of a hundred with a filter and fewer without, are searched by the process that asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from irkit_kernels import residual_maxsim as kernel

from irkit.core.representation import MultiVector, Representation
from irkit.index.array_files import Array
from irkit.index.layout import fitting
from irkit.index.plaid import Plaid
from irkit.index.plaid_search import CpuSearch, PlaidArrays, SearchBudget, best_scores
from irkit.index.topk import Hits, TopK
from irkit.shards.placement import chance, most_of, ordered_hits

_LEVELS = 255  # most visited lists that a document is counted in, see `kernel.probe`
_NONE = np.iinfo(np.int32).min  # below all scores
_MOST = np.iinfo(np.int32).max


class Steps(NamedTuple):
    """What the steps of a search pass on of a shard, for ``n_q`` queries with tokens.

    Attributes:
        lengths: ``(n_q,)`` number of rows of each query.
        rows: ``(n,)`` int32 rows of the shard that its steps passed on, query by query.
        counts: ``(n,)`` uint8, in how many visited lists each is; 255 for rows without lists.
        rough: ``(n,)`` int32 scores by centroids.
        means: ``(n,)`` float64 scores by centroids and means.
        scores: ``(n,)`` float32 scores by residuals; NaN where they were not computed.
        least: ``(n_q,)`` rows that are in fewer visited lists are left out.
        floors: ``(n_q,)`` rows with a rough score of at most this may be left out, too.
        visited: ``(n_q, 255)`` int32 number of rows in at least 1, 2, … visited lists, from ``least`` on.
    """

    lengths: Array
    rows: Array
    counts: Array
    rough: Array
    means: Array
    scores: Array
    least: Array
    floors: Array
    visited: Array


class PlaidAnswer(NamedTuple):
    """What a shard that another process searches finds of some queries.

    Attributes:
        steps: Of the compressed rows; None if there are none, or no query has tokens.
        added: Hits among the rows that are not compressed; None if there are no such rows.
    """

    steps: Steps | None
    added: Hits | None


def plaid_answer(
    part: Plaid, queries: Representation, mask: Array | None, k: int, budget: SearchBudget, live: int
) -> PlaidAnswer:
    """Return what a shard finds of queries.

    Args:
        part: The shard.
        queries: Queries, with or without tokens.
        mask: Which rows may be results.
        k: Hits.
        budget: The budget of one index of all shards.
        live: Compressed rows of all shards that may be results.
    """
    assert isinstance(queries, MultiVector)
    added = added_hits(part, queries, mask, k)
    has_tokens = queries.tokens.lengths > 0
    filled = queries.tokens if has_tokens.all() else queries.tokens[has_tokens]
    if not part.covered or not len(filled):
        return PlaidAnswer(None, added)
    arrays, search = part.loaded()
    assert isinstance(search, CpuSearch)  # actors have no GPU
    keep = part._keep(mask)
    allowed = arrays.filled if keep is None else arrays.filled & keep[: part.covered]
    share = int(np.count_nonzero(allowed)) / max(1, live)
    with fitting(part.store.path), torch.no_grad():
        found = [_steps(arrays, search, tokens.numpy(), budget, share, allowed) for tokens in filled]
    rows, counts, rough, means, scores, least, floors, visited = zip(*found, strict=True)
    steps = Steps(
        np.array([*map(len, rows)]),
        np.concatenate(rows),
        np.concatenate(counts),
        np.concatenate(rough),
        np.concatenate(means),
        np.concatenate(scores),
        np.array(least),
        np.array(floors),
        np.array(visited),
    )
    return PlaidAnswer(steps, added)


def _steps(
    arrays: PlaidArrays, search: CpuSearch, query: Array, budget: SearchBudget, share: float, allowed: Array
) -> tuple[Any, ...]:
    """Take the steps of a search of a query ``(m, dim)`` with a share of the budget of one index.

    Returns:
        What `Steps` has of the query, without its length.
    """
    table = kernel.query_table(query, search.packed)
    # 1. probe
    if budget.nprobe:
        visits = arrays.counts(table, budget.probes(len(query), search.packed.count), allowed)
        fewest = math.floor(budget.ranked * share - chance(budget.ranked, share))
        least = kernel.least_count(visits, most_of(budget.ranked, share))
        surely = kernel.least_count(visits, max(1, fewest))
        listed = kernel.collect(visits, least)
        rows = arrays.with_unlisted(listed, allowed)
        counts = np.append(visits[listed], np.full(len(rows) - len(listed), _LEVELS, np.uint8))
        visited = np.bincount(visits[listed], minlength=_LEVELS + 1)[:0:-1].cumsum()[::-1].astype(np.int32)
    else:
        rows, least, surely = arrays.rows_of(allowed), 1, 1
        counts, visited = np.full(len(rows), _LEVELS, np.uint8), np.zeros(_LEVELS, np.int32)
    # 2. centroids
    rough, floor = arrays.rough(table, rows), _NONE
    passed = most_of(budget.candidates, share)
    if least == surely and passed < len(rows):  # or else rows may not be ranked at all
        best = best_scores(rough, passed)
        rows, counts, rough = rows[best], counts[best], rough[best]
        floor = rough.min()
    # 3. means
    added = arrays.common(query, rows)
    means = rough * table.step + added
    # 4. residuals
    scores = np.full(len(rows), np.nan, np.float32)
    best = best_scores(means, most_of(budget.refined, share))
    scores[best] = arrays.exact(query, table, rows[best]) + added[best]
    return rows, counts, rough, means, scores, least, floor, visited


def merge_steps(
    sent: Sequence[Steps], numbers: Sequence[Array], budget: SearchBudget
) -> tuple[Array, Array, Array]:
    """Take the steps of one index with the scores that shards sent.

    Args:
        sent: What shards sent.
        numbers: For each of them the global row of each of its compressed rows.
        budget: The budget of one index.

    Returns:
        Scores and global rows of the best, ``(n_q, budget.exact)`` for ``n_q`` queries with tokens; and
        ``(n_q,)`` bool, True for queries of which a shard left out a document, or a score, that counts.
    """
    lengths = np.array([steps.lengths for steps in sent])  # (shards, n_q)
    n_q = lengths.shape[1]
    # all rows, query by query, ascending
    owners = np.concatenate([np.repeat(np.arange(n_q), own) for own in lengths])
    rows = np.concatenate([own[steps.rows] for own, steps in zip(numbers, sent, strict=True)])
    order = np.lexsort((rows, owners))
    rows = rows[order]
    counts, rough, means, exact = (
        np.concatenate([getattr(steps, name) for steps in sent])[order]
        for name in ("counts", "rough", "means", "scores")
    )
    # what each shard may have left out
    floors = np.max([steps.floors for steps in sent], axis=0)
    visited = np.sum([steps.visited for steps in sent], axis=0)
    least = np.maximum(1, (visited >= budget.ranked).sum(1))
    lacking = least < np.max([steps.least for steps in sent], axis=0)
    scores = np.full((n_q, budget.exact), -np.inf, np.float32)
    found = np.full(scores.shape, -1)
    ends = lengths.sum(0).cumsum()
    for query in np.flatnonzero(~lacking):
        start = ends[query] - lengths[:, query].sum()
        at = start + np.flatnonzero(counts[start : ends[query]] >= least[query])
        few = len(at) < (budget.exact if budget.nprobe else 0)  # then one index ranks all
        short = len(at) < budget.candidates and floors[query] > _NONE
        at = at[best_scores(rough[at], budget.candidates)]
        if few or short or rough[at].min(initial=_MOST) <= floors[query]:
            lacking[query] = True
            continue
        at = at[best_scores(means[at], budget.refined)]
        if np.isnan(exact[at]).any():
            lacking[query] = True
            continue
        at = at[best_scores(exact[at], budget.exact)]
        scores[query, : len(at)], found[query, : len(at)] = exact[at], rows[at]
    return scores, found, lacking


def added_hits(part: Any, queries: MultiVector, mask: Array | None, k: int) -> Hits | None:
    """Return the best of the rows that are not compressed; None if there are no such rows."""
    if part.covered == len(part):
        return None

    def scan(width: int) -> Hits:
        best = TopK(len(queries), width)
        part._scan(queries, best, part.covered, part._keep(mask))
        return best.hits()

    return ordered_hits(part.store, len(part), k, scan)
