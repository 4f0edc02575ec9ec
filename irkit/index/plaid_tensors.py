"""Search a plaid index by tensors on a GPU, many queries at a time."""

from __future__ import annotations

import numpy as np
import torch
from irkit_kernels.residual_maxsim import (
    TensorTokens,
    tensor_interaction,
    tensor_maxsim,
    tensor_probe,
)
from irkit_kernels.residual_maxsim.reference import CEILING, FLOOR
from torch import Tensor

from irkit.core.ragged import Ragged
from irkit.index.array_files import Array
from irkit.index.plaid_search import PlaidArrays, SearchBudget

_PER_ROW, _PER_CENTROID = 16, 16  # bytes on a device for each query, and for each of its tokens


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
        self._tokens = TensorTokens(*map(moved, arrays.tokens))
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
            rough = tensor_interaction(levels, offsets, self._tokens.codes, self._offsets, pairs)
            scores, pairs, sizes = self._best(pairs, rough, sizes, min(budget.candidates, n))
            # rank the best of these by means, too
            steps = self._moved(reach * ((CEILING - FLOOR) / 255))
            scores = scores.view(-1) * steps[pairs[:, 0]] + self._common(sums, pairs)
            _, pairs, sizes = self._best(pairs, scores, sizes, min(budget.refined, n))
        # rank by residuals; these scores are exact in float32
        documents = (self._tokens, self._offsets, self._codebook)
        fine = tensor_maxsim(values, table, offsets, *documents, pairs)
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
        """Return ``(n_q, n)`` bool: documents that most visited lists have, and documents without lists.

        Args:
            values: ``(total_q, dim)`` tokens of the queries.
            table: ``(K, total_q)`` scores of the centroids.
            numbers: ``(total_q,)`` query of each token.
            probes: ``(total_q,)`` centroids that each token visits.
            ranked: Number of documents that are enough.
            live: ``(n,)`` bool: documents that may be hits.
        """
        n, n_q, most = self._listed, int(numbers[-1]) + 1, int(probes.max())
        row = self._moved(numbers)
        best = table.topk(most, dim=0).indices  # (most, total_q)
        visits = torch.arange(most, device=self._device)[:, None] < self._moved(probes)
        best = best.where(visits & (values != 0).any(1), -1)
        visited = torch.stack([row.expand_as(best), best], dim=2).view(-1, 2)
        counts = tensor_probe(self._list_offsets, self._lists, visited, n_q, n)
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


def _rounded(values: Tensor) -> Tensor:
    """Round rows ``(n, dim)`` to 8 bits per number."""
    scales = values.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return (values / scales).round() * scales
