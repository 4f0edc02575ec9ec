"""The search of a plaid index: by CPU kernels, query by query, or by tensors on a GPU, many queries at once.

A search narrows the documents down, from cheap scores to exact ones, by a `SearchBudget`:

1. **Probe.** Score all centroids with the tokens of the query, and visit the lists of the nearest ones.
   The documents that occur in the largest number of visited lists go on (``ranked``). A small index skips
   this step.
2. **Centroids.** Score these documents by their centroids alone, from a table of the query with 8 bits per
   centroid; the best go on (``candidates``).
3. **Means.** Add what the mean residual of each document adds to its score; the best go on (``refined``).
4. **Residuals.** Score with the residuals; the best are returned (``exact``). Whole numbers tell which tokens
   may be a maximum, and only these are decoded, so scores are those of the decoded tokens in float32. With
   ``keep_tokens``, the index scores the best by the original tokens afterwards.

A mean is common to all tokens of a document, so it adds the same amount for every token of the query that
finds its best match there: the sum of the query's tokens times the mean.

Source: Santhanam et al., PLAID, arXiv 2205.09707, section 4: stages 1 and 2 there are steps 1 and 2 here, and
stages 3 and 4 are step 4. The paper prunes centroids by a threshold between 1 and 2; here, documents are
ranked by how many lists have them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from irkit_kernels import residual_maxsim as kernel
from irkit_kernels._threads import share
from irkit_kernels.dense_scan import products
from irkit_kernels.residual_maxsim import Tokens
from irkit_kernels.residual_maxsim.reference import CEILING, FLOOR
from torch import Tensor

from irkit.core.ragged import Ragged
from irkit.index.array_files import Array
from irkit.index.index_settings import PlaidConfig
from irkit.index.limits import Limits

_PER_ROW, _PER_CENTROID = 16, 16  # bytes on a GPU for each query, and for each of its tokens
_MANY_HIDDEN = 0.6  # share of the documents that a filter leaves when it hides many
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

    # the steps of `CpuSearch`

    def rows_of(self, allowed: Array) -> Array:
        """Return the documents where ``allowed (n,)`` is True, ascending."""
        return np.flatnonzero(allowed).astype(np.int32)

    def candidates(
        self, table: kernel.QueryTable, budget: SearchBudget, nprobe: int, allowed: Array
    ) -> tuple[Array, Array | None]:
        """Return the rows that the first two steps of a search pass on, ascending, and their `rough` scores.

        The scores are None if so few rows are left that none are ranked. There are at least ``budget.exact``
        rows, if so many are allowed. Of no lists, with ``nprobe`` 0, all allowed rows are ranked.
        """
        rows = np.empty(0, np.int32)
        if nprobe:
            rows = self.with_unlisted(self.probed(table, nprobe, budget.ranked, allowed)[0], allowed)
        if len(rows) < budget.exact:
            rows = self.rows_of(allowed)
        if len(rows) <= budget.refined:
            return rows, None
        rough = self.rough(table, rows)
        best = best_scores(rough, budget.candidates)
        return rows[best], rough[best]

    def with_unlisted(self, rows: Array, allowed: Array) -> Array:
        """Append to documents with lists those without that are allowed."""
        n = self.listed
        if n == len(allowed):
            return rows
        return np.concatenate([rows, np.flatnonzero(allowed[n:]).astype(np.int32) + np.int32(n)])

    def probed(
        self, table: kernel.QueryTable, nprobe: int, ranked: int, allowed: Array
    ) -> tuple[Array, Array]:
        """Return the documents that occur in the most visited lists, ascending, and in how many."""
        counts = self.counts(table, nprobe, allowed)
        rows = kernel.collect(counts, kernel.least_count(counts, ranked))
        return rows, counts[rows]

    def counts(self, table: kernel.QueryTable, nprobe: int, allowed: Array) -> Array:
        """Return in how many visited lists each document with lists is, ``(listed,)`` uint8."""
        return kernel.probe_counts(table, nprobe, self.list_offsets, self.lists, allowed[: self.listed])

    def rough(self, table: kernel.QueryTable, rows: Array) -> Array:
        """Return the scores of ``rows (n,)`` by their centroids, in steps of the table."""
        return kernel.interaction(table, self.tokens.codes, self.offsets, rows)

    def common(self, query: Array, rows: Array) -> Array:
        """Return what the mean residual of each of ``rows (n,)`` adds to its score of ``query (m, dim)``."""
        means = self.means.take(rows, 0).astype(np.float32)
        added = products(means, query.sum(0)[None], np.arange(len(rows))[None])[0]  # rounded as if alone
        scaled: Array = added * self.scales.take(rows)
        return scaled

    def exact(self, query: Array, table: kernel.QueryTable, rows: Array) -> Array:
        """Return the float32 scores of ``rows (n,)`` for ``query (m, dim)``, without means."""
        documents = self.tokens, self.offsets, self.codebook, rows
        return kernel.exact_maxsim(query, table, self.centroids, *documents)


class SearchBudget(NamedTuple):
    """How many documents each step of a search passes on.

    Attributes:
        nprobe: Centroids visited per query token, at least. 0 visits no lists and ranks all documents.
        visited: Centroids visited per query, at least: a query of few tokens visits more per token.
        ranked: Documents per query that are scored by their centroids: those that occur in the largest
            number of visited lists.
        candidates: Documents per query whose means are scored, too.
        refined: Documents per query whose residuals are scored.
        exact: Documents per query that are returned.
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
    ranked, refined, live = _RANKED * candidates, max(2 * exact, candidates // 8), np.count_nonzero(allowed)
    if live <= _MANY_HIDDEN * len(allowed):  # maybe those nearest to a query; centroids tell others less well
        refined = min(candidates, 2 * refined)
    if not listed or live <= max(limits.plaid_scan, 2 * candidates):
        return SearchBudget(0, 0, ranked, candidates, refined, exact)
    # more lists make up for the documents that a filter hides
    share = max(np.count_nonzero(allowed[:listed]) / listed, 1 / 64)
    nprobe, visited = (config.nprobe, 0) if config.nprobe else (1, max(limits.plaid_visited, 2 * exact))
    return SearchBudget(
        math.ceil(nprobe / share), math.ceil(visited / share), ranked, candidates, refined, exact
    )


def pack(centroids: Array, before: kernel.PackedCentroids | None) -> kernel.PackedCentroids:
    """Pack centroids for `CpuSearch`, unless they are those that were packed for an earlier state."""
    if before is not None and before.count == len(centroids):
        return before
    return kernel.pack_centroids(centroids)


class CpuSearch:
    """Search with kernels for CPUs; threads share the queries."""

    def __init__(self, arrays: Any, packed: kernel.PackedCentroids) -> None:
        """Use ``arrays``: `PlaidArrays`, or an object with the same methods that joins several shards."""
        self._arrays, self.packed = arrays, packed

    def __call__(self, queries: Ragged, budget: SearchBudget, allowed: Array) -> tuple[Array, Array]:
        """Return the best rows of each query, and their exact scores.

        Args:
            queries: ``n_q`` queries ``(m, dim)`` float32, each with tokens.
            budget: How many documents each step passes on.
            allowed: ``(n,)`` bool: documents that may be hits; they have tokens.

        Returns:
            Scores and rows, ``(n_q, budget.exact)`` float32 and int64; -inf and -1 fill the rest if fewer
            were found.
        """
        rows = np.full((len(queries), budget.exact), -1)
        scores = np.full(rows.shape, -np.inf, np.float32)
        values, offsets = queries.values.detach().numpy(), queries.offsets.tolist()
        arrays = self._arrays

        def rank(start: int, stop: int) -> None:
            for number in range(start, stop):
                query = values[offsets[number] : offsets[number + 1]]
                table = kernel.query_table(query, self.packed)
                nprobe = budget.probes(len(query), self.packed.count) if budget.nprobe else 0
                found, rough = arrays.candidates(table, budget, nprobe, allowed)  # 1. probe, 2. centroids
                added = arrays.common(query, found)  # 3. means
                if rough is not None:
                    best = best_scores(rough * table.step + added, budget.refined)
                    found, added = found[best], added[best]
                found_scores = arrays.exact(query, table, found) + added  # 4. residuals
                del table  # so that the next one takes this memory, which is in the cache
                best = best_scores(found_scores, budget.exact)
                rows[number, : len(best)], scores[number, : len(best)] = found[best], found_scores[best]

        share(rank, len(queries), torch.get_num_threads())
        return scores, rows


class TensorSearch:
    """Search with torch and Triton; everything stays on the device.

    It takes the steps of `CpuSearch` for all pairs of a query and a document of the block at once. The host
    waits for the device twice per block: for the number of pairs after the probe, and for the result. All
    other sizes are known beforehand: a query with fewer documents than the budget is filled up with the row
    ``n``, which has no tokens and scores -inf.
    """

    def __init__(self, arrays: PlaidArrays, device: torch.device) -> None:
        def moved(array: Array) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self._device, self._listed, self._rows = device, arrays.listed, len(arrays.filled)
        self._centroids, self._codebook = moved(arrays.centroids), moved(arrays.codebook)
        self._rounded = _rounded(self._centroids)
        self._reach = float(np.linalg.norm(arrays.centroids, axis=1).max())
        self._tokens = kernel.TensorTokens(*map(moved, arrays.tokens))
        self._means, self._scales = moved(arrays.means), moved(arrays.scales)
        self._offsets = moved(np.append(arrays.offsets, arrays.offsets[-1]))  # and of row n
        self._list_offsets, self._lists = moved(arrays.list_offsets), moved(arrays.lists)

    @staticmethod
    def needed(arrays: PlaidArrays) -> int:
        """Return the bytes that a search takes on a device, with work for 32 queries of 32 tokens."""
        loaded = [*arrays.tokens, arrays.means, arrays.scales, arrays.offsets, arrays.lists]
        loaded += [arrays.centroids, arrays.centroids, arrays.list_offsets]  # centroids twice: rounded, too
        work = 32 * (_PER_ROW * len(arrays.filled) + 32 * _PER_CENTROID * len(arrays.centroids))
        return work + sum(array.nbytes for array in loaded)

    def __call__(self, queries: Ragged, budget: SearchBudget, allowed: Array) -> tuple[Array, Array]:
        """Return what `CpuSearch` returns."""
        n_q, n = len(queries), self._rows
        tokens, lengths = queries.values.detach(), queries.lengths.numpy()
        starts, numbers = queries.offsets.numpy()[:-1], np.arange(n_q).repeat(lengths)
        sums = self._moved(np.add.reduceat(tokens.numpy(), starts, axis=0))
        reach = self._reach * np.maximum.reduceat(tokens.norm(dim=1).numpy(), starts)
        values, offsets, live = (self._moved(x) for x in (tokens, queries.offsets, allowed))
        # scores of all centroids; rounded as CPU kernels round them, so that ranks agree
        table, rounded = self._centroids @ values.T, self._rounded @ _rounded(values).T  # (K, total_q)
        chosen = live.expand(n_q, -1)
        if budget.nprobe:
            probes = np.array([budget.probes(m, len(self._centroids)) for m in lengths.tolist()])[numbers]
            hits = self._probe(values, rounded, numbers, probes, budget.ranked, live)
            chosen = torch.where(hits.sum(1, keepdim=True) >= budget.exact, hits, chosen)
        pairs = chosen.nonzero()  # (p, 2): queries and rows; waits for their number
        if not len(pairs):
            return np.full((n_q, budget.exact), -np.inf, np.float32), np.full((n_q, budget.exact), -1)
        sizes = chosen.sum(1)
        if len(pairs) > budget.refined:
            # rank by centroids, in 256 levels
            levels = (rounded / self._moved(reach[numbers]) - FLOOR) * (255 / (CEILING - FLOOR))
            levels = levels.round_().clamp_(0, 255).to(torch.uint8)
            rough = kernel.tensor_interaction(levels, offsets, self._tokens.codes, self._offsets, pairs)
            scores, pairs, sizes = self._best(pairs, rough, sizes, min(budget.candidates, n))
            # rank the best of these by means, too
            steps = self._moved(reach * ((CEILING - FLOOR) / 255))
            scores = scores.view(-1) * steps[pairs[:, 0]] + self._common(sums, pairs)
            _, pairs, sizes = self._best(pairs, scores, sizes, min(budget.refined, n))
        # rank by residuals; these scores are exact in float32
        documents = (self._tokens, self._offsets, self._codebook)
        fine = kernel.tensor_maxsim(values, table, offsets, *documents, pairs)
        scores, pairs, _ = self._best(pairs, fine + self._common(sums, pairs), sizes, budget.exact, False)
        rows = pairs[:, 1].view(n_q, -1).masked_fill(scores == -torch.inf, -1)
        both = torch.stack([scores.double(), rows.double()]).cpu().numpy()  # waits, and holds both exactly
        return both[0].astype(np.float32), both[1].astype(np.int64)

    def _moved(self, values: Array | Tensor) -> Tensor:
        """Start to copy ``values`` to the search device; return the tensor without waiting for the copy."""
        if isinstance(values, np.ndarray):
            values = torch.from_numpy(values.astype(np.float32) if values.dtype == np.float64 else values)
        if self._device.type == "cpu":
            return values
        return values.pin_memory().to(self._device, non_blocking=True)

    def _common(self, sums: Tensor, pairs: Tensor) -> Tensor:
        """Return what the means of documents add to the scores of pairs: ``(p,)``."""
        query, row = pairs[:, 0], pairs[:, 1].clamp(max=self._rows - 1)
        return (self._means[row].float() * sums[query]).sum(1) * self._scales[row]

    def _probe(
        self, values: Tensor, table: Tensor, numbers: Array, probes: Array, ranked: int, live: Tensor
    ) -> Tensor:
        """Choose candidates: the documents that occur in the most visited lists, and those without lists.

        Args:
            values: ``(total_q, dim)`` tokens of the queries.
            table: ``(K, total_q)`` scores of the centroids.
            numbers: ``(total_q,)`` query of each token.
            probes: ``(total_q,)`` centroids that each token visits.
            ranked: Number of candidates with lists to aim at; ties at the border are all included.
            live: ``(n,)`` bool: documents that may be hits.

        Returns:
            ``(n_q, n)`` bool, True for candidates.
        """
        n, n_q, most = self._listed, int(numbers[-1]) + 1, int(probes.max())
        row = self._moved(numbers)
        best = table.topk(most, dim=0).indices  # (most, total_q)
        visits = torch.arange(most, device=self._device)[:, None] < self._moved(probes)
        best = best.where(visits & (values != 0).any(1), -1)
        visited = torch.stack([row.expand_as(best), best], dim=2).view(-1, 2)
        counts = kernel.tensor_probe(self._list_offsets, self._lists, visited, n_q, n)
        counts = counts.clamp_(max=255) * live[:n]
        hits = counts > 0
        if n > ranked:
            hits &= counts >= counts.topk(ranked, sorted=False).values.amin(1, keepdim=True)
        return torch.cat([hits, live[n:].expand(n_q, -1)], dim=1)

    def _best(
        self, pairs: Tensor, scores: Tensor, sizes: Tensor, count: int, ascending: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the ``count`` best of each query's ``pairs (p, 2)``.

        Args:
            pairs: Queries and rows, ascending.
            scores: ``(p,)``.
            sizes: ``(n_q,)`` pairs of each query.
            count: Pairs per query to choose; the row ``n`` fills up a query that has fewer.
            ascending: Return them ascending again, instead of best first.

        Returns:
            Scores ``(n_q, count)``, pairs ``(n_q * count, 2)``, and pairs of each query: ``count``.
        """
        n_q, rank = len(sizes), torch.arange(count, device=self._device)
        # all pairs, best first within each query; then the first ones of each query
        order = scores.argsort(descending=True, stable=True)
        order = order[pairs[order, 0].argsort(stable=True)]
        position = order[((sizes.cumsum(0) - sizes)[:, None] + rank).clamp(max=len(order) - 1)]
        there = rank < sizes[:, None]
        rows = pairs[position, 1].where(there, self._rows)
        scores = scores[position].where(there, -torch.inf)
        if ascending:
            rows, order = rows.sort(dim=1)
            scores = scores.gather(1, order)
        query = torch.arange(n_q, device=self._device)[:, None].expand_as(rows)
        return scores, torch.stack([query, rows], dim=2).view(-1, 2), torch.full_like(sizes, count)


def select_tokens(tokens: Tokens, at: Array | slice) -> Tokens:
    """Return the tokens at some positions; a slice is not copied."""
    parts: list[Array] = [part[at] if isinstance(at, slice) else part.take(at, 0) for part in tokens]
    return Tokens(*parts)


def best_scores(scores: Array, count: int) -> Array:
    """Return where the ``count`` highest scores are, in order; the first ones of equal scores."""
    if len(scores) <= count:
        return np.arange(len(scores))
    cut = np.partition(scores, -count)[-count]
    best = np.flatnonzero(scores >= cut)
    if len(best) > count:
        best = np.delete(best, np.flatnonzero(scores[best] == cut)[count - len(best) :])
    return best


def _rounded(values: Tensor) -> Tensor:
    """Round rows ``(n, dim)`` to 8 bits per number."""
    scales = values.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return (values / scales).round() * scales
