"""The search of a plaid index, and its form for CPU kernels, query by query.

A search narrows the documents down, from cheap scores to exact ones, by a `SearchBudget`:

1. **Probe.** Score all centroids with the tokens of the query, and visit the lists of the nearest ones.
   The documents that occur in the largest number of visited lists go on (``ranked``). A small index skips
   this step.
2. **Centroids.** Score these documents by their centroids alone, from a table of the query with 8 bits per
   centroid; the best go on (``candidates``).
3. **Means.** Add what the mean residual of each document adds to its score; the best go on (``refined``).
4. **Residuals.** Score with the residuals in whole numbers; the best go on (``exact``).
5. **Exact.** Decode the tokens of these and compute MaxSim in float32. With ``keep_tokens``, the index scores
   the original tokens instead.

A mean is common to all tokens of a document, so it adds the same amount for every token of the query that
finds its best match there: the sum of the query's tokens times the mean.

Source: Santhanam et al., PLAID, arXiv 2205.09707, section 4: stages 1 to 4 there are steps 1, 2, 4 and 5
here. The paper prunes centroids by a threshold between 1 and 2; here, documents are ranked by how many lists
have them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from irkit_kernels._threads import share
from irkit_kernels.maxsim import maxsim
from irkit_kernels.residual_maxsim import (
    Tokens,
    decode,
    interaction,
    pack_centroids,
    probe,
    query_table,
    residual_maxsim,
)

from irkit.core.ragged import Ragged
from irkit.index.array_files import Array
from irkit.index.index_settings import PlaidConfig
from irkit.index.layout import element_positions
from irkit.index.limits import Limits

_DECODED = 256  # documents decoded at once
_RANKED = 4  # documents of visited lists that are ranked by their centroids, per candidate


@dataclass(frozen=True)
class PlaidArrays:
    """What a search reads of the compressed rows; all but the centroids is mapped from files.

    Attributes:
        centroids: ``(K, dim)`` float32.
        codebook: ``(2**(8 - nbits), 2**nbits)`` int8.
        tokens: The compressed tokens of all documents, without the means of the documents.
        means: ``(n, dim)`` int8: the mean residual of each document.
        scales: ``(n,)`` float32: factors of the means.
        offsets: ``(n + 1,)`` int64: where the tokens of each document start.
        list_offsets: ``(K + 1,)`` int64: where the list of each centroid starts.
        lists: int32 documents; copied where the file has two bytes per document.
        listed: Number of documents in lists.
        filled: ``(n,)`` bool: documents that have tokens.
    """

    centroids: Array
    codebook: Array
    tokens: Tokens
    means: Array
    scales: Array
    offsets: Array
    list_offsets: Array
    lists: Array
    listed: int
    filled: Array = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "filled", np.diff(self.offsets) > 0)

    def common(self, query: Array, rows: Array) -> Array:
        """Return the share of the score that the mean residual of each document contributes.

        Args:
            query: ``(m, dim)`` tokens.
            rows: ``(n,)`` documents.
        """
        added: Array = self.means.take(rows, 0).astype(np.float32) @ query.sum(0) * self.scales.take(rows)
        return added


class SearchBudget(NamedTuple):
    """How many documents each step of a search passes on.

    Attributes:
        nprobe: Centroids visited per token of a query, at least. 0 visits no lists and ranks all documents.
        visited: Centroids visited per query, at least: a query of few tokens visits more for each.
        ranked: Documents that are scored by their centroids: they occur in the most visited lists.
        candidates: Documents whose means are scored, too.
        refined: Documents whose residuals are scored.
        exact: Documents that are scored exactly.
    """

    nprobe: int
    visited: int
    ranked: int
    candidates: int
    refined: int
    exact: int

    def probes(self, tokens: int, centroids: int) -> int:
        """Return how many centroids each of a query's ``tokens`` visits."""
        return min(centroids, max(self.nprobe, -(-self.visited // max(1, tokens))))


def plan_search(config: PlaidConfig, limits: Limits, k: int, allowed: Array, listed: int) -> SearchBudget:
    """Return the budget of a search for ``k`` hits.

    Args:
        config: Its settings.
        limits: Sizes that decide whether lists are visited.
        k: Hits.
        allowed: ``(n,)`` bool: documents that may be hits.
        listed: How many documents have lists.
    """
    exact = k * (2 if config.keep_tokens else 1) + limits.plaid_margin
    candidates = max(2 * exact, config.candidates or max(limits.plaid_candidates, 8 * exact))
    ranked, refined = _RANKED * candidates, max(2 * exact, candidates // 8)
    if not listed or int(np.count_nonzero(allowed)) <= max(limits.plaid_scan, 2 * candidates):
        return SearchBudget(0, 0, ranked, candidates, refined, exact)
    # more lists make up for the documents that a filter hides
    share = max(np.count_nonzero(allowed[:listed]) / listed, 1 / 64)
    nprobe, visited = (config.nprobe, 0) if config.nprobe else (1, max(limits.plaid_visited, 2 * exact))
    return SearchBudget(
        math.ceil(nprobe / share), math.ceil(visited / share), ranked, candidates, refined, exact
    )


class CpuSearch:
    """Search with kernels for CPUs; threads share the queries."""

    def __init__(self, arrays: PlaidArrays) -> None:
        self._arrays = arrays
        self._packed = pack_centroids(arrays.centroids)

    def __call__(self, queries: Ragged, budget: SearchBudget, allowed: Array) -> tuple[Array, Array]:
        """Return the best rows of each query, and their exact scores.

        Args:
            queries: ``n_q`` queries ``(m, dim)`` float32, each with tokens.
            budget: How far to go.
            allowed: ``(n,)`` bool: documents that may be hits; they have tokens.

        Returns:
            Scores and rows, ``(n_q, budget.exact)`` float32 and int64; -inf and -1 where there are no more.
        """
        rows = np.full((len(queries), budget.exact), -1)
        scores = np.full(rows.shape, -np.inf, np.float32)
        values, offsets = queries.values.detach().numpy(), queries.offsets.tolist()

        def rank(start: int, stop: int) -> None:
            for number in range(start, stop):
                query = values[offsets[number] : offsets[number + 1]]
                best, added = self._choose(query, budget, allowed)
                rows[number, : len(best)] = best
                scores[number, : len(best)] = self._exact(query, best) + added

        share(rank, len(queries), torch.get_num_threads())
        return scores, rows

    def _choose(self, query: Array, budget: SearchBudget, allowed: Array) -> tuple[Array, Array]:
        """Return the best rows of one query ``(m, dim)``, and what their means add to the scores.

        There are ``budget.exact`` of them, if so many are allowed.
        """
        arrays, table, rows = self._arrays, query_table(query, self._packed), np.empty(0, np.int32)
        if budget.nprobe:  # 1. probe; rows without lists are all ranked
            n, nprobe = arrays.listed, budget.probes(len(query), len(arrays.centroids))
            rows = probe(table, nprobe, arrays.list_offsets, arrays.lists, allowed[:n], budget.ranked)
            if n < len(allowed):
                rows = np.concatenate([rows, np.flatnonzero(allowed[n:]).astype(np.int32) + np.int32(n)])
        if len(rows) < budget.exact:
            rows = np.flatnonzero(allowed).astype(np.int32)
        if len(rows) > budget.refined:
            rough = interaction(table, arrays.tokens.codes, arrays.offsets, rows)  # 2. centroids
            best = _best(rough, budget.candidates)
            rows, rough = rows[best], rough[best]
            added = arrays.common(query, rows)  # 3. means
            best = _best(rough * table.step + added, budget.refined)
            rows, added = rows[best], added[best]
        else:
            added = arrays.common(query, rows)
        # 4. residuals
        fine = residual_maxsim(table, arrays.tokens, arrays.offsets, arrays.codebook, rows)
        best = _best(fine + added, budget.exact)
        return rows[best], added[best]

    def _exact(self, query: Array, rows: Array) -> Array:
        """Return MaxSim ``(n,)`` of a query ``(m, dim)`` and documents ``rows (n,)``, without their means."""
        arrays, scores = self._arrays, np.empty(len(rows), np.float32)
        left = torch.from_numpy(query), torch.from_numpy(np.array([0, len(query)], np.int32))
        for start in range(0, len(rows), _DECODED):
            block = rows[start : start + _DECODED]
            ends = arrays.offsets[block + 1]
            lengths = ends - arrays.offsets[block]
            tokens = select_tokens(arrays.tokens, element_positions(ends, lengths))
            values = decode(tokens, arrays.centroids, arrays.codebook)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            right = torch.from_numpy(values), torch.from_numpy(offsets)
            scores[start : start + _DECODED] = maxsim(*left, *right)[0].numpy()
        return scores


def select_tokens(tokens: Tokens, at: Array | slice) -> Tokens:
    """Return the tokens at some places; a slice is not copied."""
    parts: list[Array] = [part[at] if isinstance(at, slice) else part.take(at, 0) for part in tokens]
    return Tokens(*parts)


def _best(scores: Array, count: int) -> Array:
    """Return where the ``count`` highest scores are, in order; the first ones of equal scores."""
    if len(scores) <= count:
        return np.arange(len(scores))
    cut = np.partition(scores, -count)[-count]
    best = np.flatnonzero(scores >= cut)
    if len(best) > count:
        best = np.delete(best, np.flatnonzero(scores[best] == cut)[count - len(best) :])
    return best
