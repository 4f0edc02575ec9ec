"""The search of a `Plaid` index: by CPU kernels query by query, or by tensors on a GPU, a block at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from irkit_kernels._threads import share
from irkit_kernels.maxsim import maxsim
from irkit_kernels.residual_maxsim import (
    TensorTokens,
    Tokens,
    decode,
    interaction,
    pack_centroids,
    probe,
    query_table,
    residual_maxsim,
    tensor_interaction,
    tensor_maxsim,
)
from irkit_kernels.residual_maxsim.reference import CEILING, FLOOR
from torch import Tensor

from irkit.index.files import Array
from irkit.ragged import Ragged

__all__ = ["CpuSearch", "Effort", "Structure", "TensorSearch", "select_tokens"]

_EXACT = 256  # documents decoded at a time


@dataclass(frozen=True)
class Structure:
    """What a search reads: of all compressed rows, and mapped, but for the centroids.

    Attributes:
        centroids: ``(K, dim)`` float32.
        codebook: ``(2**(8 - nbits), 2**nbits)`` int8.
        tokens: Of all documents, less their documents' means.
        means: ``(n, dim)`` int8, what the tokens of a document have in common beyond their centroids.
        scales: ``(n,)`` float32, of the means.
        offsets: ``(n + 1,)`` int64: where the tokens of each document start.
        list_offsets: ``(K + 1,)`` int64: where the list of each centroid starts.
        lists: int32 documents, mapped only where these are many.
        listed: How many documents are in lists.
        filled: ``(n,)`` bool: those that have tokens.
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
        """What their means add to the scores of documents ``rows (n,)`` for a query ``(m, dim)``."""
        added: Array = self.means.take(rows, 0).astype(np.float32) @ query.sum(0) * self.scales.take(rows)
        return added


class Effort(NamedTuple):
    """How far a search goes.

    Attributes:
        nprobe: Centroids visited for each token of a query, at least; 0 goes to no lists, but ranks all
            documents.
        visited: Centroids visited for a query, at least: one of few tokens visits more for each.
        ranked: Documents that are scored by their centroids alone: those that have most of the visited ones.
        candidates: Documents whose means are scored, the best of these.
        refined: Documents whose residuals are scored.
        wanted: Documents that are scored exactly.
    """

    nprobe: int
    visited: int
    ranked: int
    candidates: int
    refined: int
    wanted: int

    def probes(self, tokens: int, centroids: int) -> int:
        """Centroids visited for each of a query's ``tokens``."""
        return min(centroids, max(self.nprobe, -(-self.visited // max(1, tokens))))


class CpuSearch:
    """Search with kernels for CPUs; queries are shared among threads."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._packed = pack_centroids(structure.centroids)

    def __call__(self, queries: Ragged, effort: Effort, kept: Array) -> tuple[Array, Array]:
        """The best rows of each query, and their exact scores.

        Args:
            queries: ``n_q`` of ``(m, dim)`` float32, each with tokens.
            effort: How far to go.
            kept: ``(n,)`` bool: documents to be found; they have tokens.

        Returns:
            Scores and rows, ``(n_q, effort.wanted)`` float32 and int64; -inf and -1 where there are no more.
        """
        rows = np.full((len(queries), effort.wanted), -1)
        scores = np.full(rows.shape, -np.inf, np.float32)
        values, offsets = queries.values.detach().numpy(), queries.offsets.tolist()

        def rank(start: int, stop: int) -> None:
            for number in range(start, stop):
                query = values[offsets[number] : offsets[number + 1]]
                found, added = self._candidates(query, effort, kept)
                rows[number, : len(found)] = found
                scores[number, : len(found)] = self._exact(query, found) + added

        share(rank, len(queries), torch.get_num_threads())
        return scores, rows

    def _candidates(self, query: Array, effort: Effort, kept: Array) -> tuple[Array, Array]:
        """The best rows of one query ``(m, dim)``, by scores in whole numbers, and what their means add.

        They are ``wanted``, if there are so many.
        """
        structure, table, rows = self._structure, query_table(query, self._packed), np.empty(0, np.int32)
        if effort.nprobe:
            n, nprobe = structure.listed, effort.probes(len(query), len(structure.centroids))
            rows = probe(table, nprobe, structure.list_offsets, structure.lists, kept[:n], effort.ranked)
            if n < len(kept):
                rows = np.concatenate([rows, np.flatnonzero(kept[n:]).astype(np.int32) + np.int32(n)])
        if len(rows) < effort.wanted:
            rows = np.flatnonzero(kept).astype(np.int32)
        if len(rows) > effort.refined:
            rough = interaction(table, structure.tokens.codes, structure.offsets, rows)
            best = _best(rough, effort.candidates)
            rows, rough = rows[best], rough[best]
            added = structure.common(query, rows)
            best = _best(rough * table.step + added, effort.refined)
            rows, added = rows[best], added[best]
        else:
            added = structure.common(query, rows)
        fine = residual_maxsim(table, structure.tokens, structure.offsets, structure.codebook, rows)
        best = _best(fine + added, effort.wanted)
        return rows[best], added[best]

    def _exact(self, query: Array, rows: Array) -> Array:
        """MaxSim of a query ``(m, dim)`` and documents ``rows (n,)``, less their means: ``(n,)``."""
        scores, offsets = np.empty(len(rows), np.float32), self._structure.offsets
        asked = torch.from_numpy(query), torch.from_numpy(np.array([0, len(query)], np.int32))
        for start in range(0, len(rows), _EXACT):
            some = rows[start : start + _EXACT]
            lengths = offsets[some + 1] - offsets[some]
            ends = np.zeros(len(some) + 1, np.int64)
            np.cumsum(lengths, out=ends[1:])
            places = np.repeat(offsets[some] - ends[:-1], lengths) + np.arange(ends[-1])
            tokens = select_tokens(self._structure.tokens, places)
            values = decode(tokens, self._structure.centroids, self._structure.codebook)
            there = torch.from_numpy(values), torch.from_numpy(ends.astype(np.int32))
            scores[start : start + _EXACT] = maxsim(*asked, *there)[0].numpy()
        return scores


class TensorSearch:
    """Search with torch and Triton; everything is kept on the device."""

    def __init__(self, structure: Structure, device: torch.device) -> None:
        def moved(array: Array) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self._device, self._listed = device, structure.listed
        self._centroids, self._codebook = moved(structure.centroids), moved(structure.codebook)
        self._rounded, self._reach = _rounded(self._centroids), self._centroids.norm(dim=1).amax()
        self._tokens = TensorTokens(*map(moved, structure.tokens))
        self._means, self._scales = moved(structure.means), moved(structure.scales)
        self._offsets, self._list_offsets = moved(structure.offsets), moved(structure.list_offsets)
        self._lists = moved(structure.lists).long()

    def __call__(self, queries: Ragged, effort: Effort, kept: Array) -> tuple[Array, Array]:
        """As `CpuSearch`."""
        queries, wanted = queries.to(self._device), torch.from_numpy(kept).to(self._device)
        table = self._centroids @ queries.values.T  # (K, total_q)
        rounded = self._rounded @ _rounded(queries.values).T  # as kernels have it, so that ranks agree
        chosen = wanted.expand(len(queries), -1)
        if effort.nprobe:
            found = self._probe(queries, rounded, effort, wanted)
            enough = found.sum(1, keepdim=True) >= effort.wanted
            chosen = torch.where(enough, found, chosen)
        pairs = chosen.nonzero()
        sums = torch.stack([query.sum(0) for query in queries])
        if int(chosen.sum(1).max()) > effort.refined:
            reach = self._reach * torch.stack([query.norm(dim=1).amax() for query in queries])
            bytes_ = (rounded / reach[queries.row_ids()] - FLOOR) * (255 / (CEILING - FLOOR))
            bytes_ = bytes_.round().clamp(0, 255)
            rough = tensor_interaction(bytes_, queries.offsets, self._tokens.codes, self._offsets, pairs)
            pairs, rough = _flat(*_best_of_pairs(pairs, rough, len(queries), effort.candidates))
            rough = rough * (reach * (CEILING - FLOOR) / 255)[pairs[:, 0]] + self._common(sums, pairs)
            pairs, _ = _flat(*_best_of_pairs(pairs, rough, len(queries), effort.refined))
        documents = (self._tokens, self._offsets, self._codebook)
        fine = tensor_maxsim(queries.values, table, queries.offsets, *documents, pairs)  # exact in float32
        fine = fine + self._common(sums, pairs)
        scores, rows = _best_of_pairs(pairs, fine, len(queries), effort.wanted)
        return scores.cpu().numpy(), rows.cpu().numpy()

    def _common(self, sums: Tensor, pairs: Tensor) -> Tensor:
        """What the means of documents add to the scores of pairs: ``(p,)``."""
        query, row = pairs.T
        return (self._means[row].float() * sums[query]).sum(1) * self._scales[row]

    def _probe(self, queries: Ragged, table: Tensor, effort: Effort, wanted: Tensor) -> Tensor:
        """``(n_q, n)`` bool: wanted documents that `probe` finds, and those in no list."""
        n, device, row = self._listed, self._device, queries.row_ids()
        nprobe = [effort.probes(m, len(self._centroids)) for m in queries.lengths.tolist()]
        best = table.topk(max(nprobe), dim=0).indices  # (most, total_q)
        used = torch.arange(len(best), device=device)[:, None] < torch.tensor(nprobe, device=device)[row]
        used &= (queries.values != 0).any(1)
        near = torch.zeros(len(queries), len(self._centroids), dtype=torch.int32, device=device)
        places = (row * len(self._centroids) + best)[used]
        near.view(-1).scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        query, centroid = near.nonzero(as_tuple=True)
        starts, sizes = self._list_offsets[centroid], self._list_offsets.diff()[centroid]
        places = torch.arange(int(sizes.sum()), device=device)
        places += torch.repeat_interleave(starts - sizes.cumsum(0) + sizes, sizes)
        places = self._lists[places] + torch.repeat_interleave(query * n, sizes)
        counts = torch.zeros(len(queries), n, dtype=torch.int32, device=device)
        counts.view(-1).scatter_add_(0, places, torch.repeat_interleave(near[query, centroid], sizes))
        counts = counts.clamp(max=255) * wanted[:n]
        found = counts > 0
        if n > effort.ranked:
            found &= counts >= counts.topk(effort.ranked, sorted=False).values.amin(1, keepdim=True)
        return torch.cat([found, wanted[n:].expand(len(queries), -1)], dim=1)


def select_tokens(tokens: Tokens, at: Array | slice) -> Tokens:
    """The tokens at some places."""
    if isinstance(at, slice):
        return Tokens(tokens.codes[at], tokens.coefficients[at], tokens.packed[at])
    return Tokens(tokens.codes.take(at), tokens.coefficients.take(at, 0), tokens.packed.take(at, 0))


def _best(scores: Array, count: int) -> Array:
    """Where the ``count`` highest scores are, in order; of equals the first."""
    if len(scores) <= count:
        return np.arange(len(scores))
    cut = np.partition(scores, -count)[-count]
    best = np.flatnonzero(scores >= cut)
    if len(best) > count:
        best = np.delete(best, np.flatnonzero(scores[best] == cut)[count - len(best) :])
    return best


def _rounded(values: Tensor) -> Tensor:
    """Rows ``(n, dim)`` rounded to 8 bits each."""
    scales = values.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return (values / scales).round() * scales


def _best_of_pairs(pairs: Tensor, scores: Tensor, n_q: int, count: int) -> tuple[Tensor, Tensor]:
    """Of ``pairs (p, 2)``, rising, the ``count`` best of each query: scores and rows ``(n_q, count)``."""
    query, sizes = pairs[:, 0], torch.bincount(pairs[:, 0], minlength=n_q)
    place = torch.arange(len(pairs), device=pairs.device) - (sizes.cumsum(0) - sizes)[query]
    width = max(count, int(sizes.max()))
    padded = scores.new_full((n_q, width), -torch.inf)
    rows = pairs.new_full((n_q, width), -1)
    padded[query, place], rows[query, place] = scores, pairs[:, 1]
    order = padded.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return padded.gather(1, order), rows.gather(1, order)


def _flat(scores: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs of query and row that ``rows (n_q, count)`` has, rising, and their scores."""
    rows, order = rows.sort(dim=1)
    query, place = (rows >= 0).nonzero(as_tuple=True)
    return torch.stack([query, rows[query, place]], dim=1), scores.gather(1, order)[query, place]
