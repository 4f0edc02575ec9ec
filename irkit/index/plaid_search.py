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
    tensor_probe,
)
from irkit_kernels.residual_maxsim.reference import CEILING, FLOOR
from torch import Tensor

from irkit.index.files import Array
from irkit.ragged import Ragged

__all__ = ["CpuSearch", "Effort", "Structure", "TensorSearch", "select_tokens"]

_EXACT = 256  # documents decoded at a time
_OF_ROW, _OF_CENTROID = 16, 16  # bytes on a device for each query, and for each of its tokens, in between


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
    """Search with torch and Triton; everything is kept on the device.

    A block of queries waits for the device twice: for the number of documents that are found, and for the
    result. All else has sizes that are known before: where a query has fewer documents, the row ``n``, which
    has no tokens and scores -inf, stands for the rest.
    """

    def __init__(self, structure: Structure, device: torch.device) -> None:
        def moved(array: Array) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self._device, self._listed, self._rows = device, structure.listed, len(structure.filled)
        self._centroids, self._codebook = moved(structure.centroids), moved(structure.codebook)
        self._rounded = _rounded(self._centroids)
        self._reach = float(np.linalg.norm(structure.centroids, axis=1).max())
        self._tokens = TensorTokens(*map(moved, structure.tokens))
        self._means, self._scales = moved(structure.means), moved(structure.scales)
        self._offsets = moved(np.append(structure.offsets, structure.offsets[-1]))  # and of row n
        self._list_offsets, self._lists = moved(structure.list_offsets), moved(structure.lists)

    @staticmethod
    def needed(structure: Structure) -> int:
        """Bytes of the device that a search takes: of the index, and for 32 queries of 32 tokens."""
        arrays = [*structure.tokens, structure.means, structure.scales, structure.offsets, structure.lists]
        arrays += [structure.centroids, structure.centroids, structure.list_offsets]  # and rounded ones
        work = 32 * (_OF_ROW * len(structure.filled) + 32 * _OF_CENTROID * len(structure.centroids))
        return work + sum(array.nbytes for array in arrays)

    def __call__(self, queries: Ragged, effort: Effort, kept: Array) -> tuple[Array, Array]:
        """As `CpuSearch`."""
        n_q, n = len(queries), self._rows
        tokens, lengths = queries.values.detach(), queries.lengths.numpy()
        starts, numbers = queries.offsets.numpy()[:-1], np.arange(n_q).repeat(lengths)
        sums = self._moved(np.add.reduceat(tokens.numpy(), starts, axis=0))
        reach = self._reach * np.maximum.reduceat(tokens.norm(dim=1).numpy(), starts)
        values, offsets, wanted = (self._moved(x) for x in (tokens, queries.offsets, kept))
        # scores of all centroids, rounded as kernels of CPUs have them, so that ranks agree
        table, rounded = self._centroids @ values.T, self._rounded @ _rounded(values).T  # (K, total_q)
        chosen = wanted.expand(n_q, -1)
        if effort.nprobe:
            probes = np.array([effort.probes(m, len(self._centroids)) for m in lengths.tolist()])[numbers]
            found = self._probe(values, rounded, numbers, probes, effort.ranked, wanted)
            chosen = torch.where(found.sum(1, keepdim=True) >= effort.wanted, found, chosen)
        pairs = chosen.nonzero()  # waits, for their number
        if not len(pairs):
            return np.full((n_q, effort.wanted), -np.inf, np.float32), np.full((n_q, effort.wanted), -1)
        sizes = chosen.sum(1)
        if len(pairs) > effort.refined:
            # by centroids in 256 steps, the best of these by means, too
            levels = (rounded / self._moved(reach[numbers]) - FLOOR) * (255 / (CEILING - FLOOR))
            levels = levels.round_().clamp_(0, 255).to(torch.uint8)
            rough = tensor_interaction(levels, offsets, self._tokens.codes, self._offsets, pairs)
            scores, pairs, sizes = self._best(pairs, rough, sizes, min(effort.candidates, n))
            steps = self._moved(reach * ((CEILING - FLOOR) / 255))
            scores = scores.view(-1) * steps[pairs[:, 0]] + self._common(sums, pairs)
            _, pairs, sizes = self._best(pairs, scores, sizes, min(effort.refined, n))
        documents = (self._tokens, self._offsets, self._codebook)
        fine = tensor_maxsim(values, table, offsets, *documents, pairs)  # exact in float32
        scores, pairs, _ = self._best(pairs, fine + self._common(sums, pairs), sizes, effort.wanted, False)
        rows = pairs[:, 1].view(n_q, -1).masked_fill(scores == -torch.inf, -1)
        both = torch.stack([scores.double(), rows.double()]).cpu().numpy()  # waits, and holds both exactly
        return both[0].astype(np.float32), both[1].astype(np.int64)

    def _moved(self, given: Array | Tensor) -> Tensor:
        """On the device; the call does not wait for it."""
        if isinstance(given, np.ndarray):
            given = torch.from_numpy(given.astype(np.float32) if given.dtype == np.float64 else given)
        if self._device.type == "cpu":
            return given
        return given.pin_memory().to(self._device, non_blocking=True)

    def _common(self, sums: Tensor, pairs: Tensor) -> Tensor:
        """What the means of documents add to the scores of pairs: ``(p,)``."""
        query, row = pairs[:, 0], pairs[:, 1].clamp(max=self._rows - 1)
        return (self._means[row].float() * sums[query]).sum(1) * self._scales[row]

    def _probe(
        self, values: Tensor, table: Tensor, numbers: Array, probes: Array, ranked: int, wanted: Tensor
    ) -> Tensor:
        """``(n_q, n)`` bool: wanted documents that `probe` finds, and those in no list.

        Args:
            values: ``(total_q, dim)`` tokens of the queries.
            table: ``(K, total_q)``, their scores of the centroids.
            numbers: ``(total_q,)``, which query each belongs to.
            probes: ``(total_q,)``, how many centroids it visits.
            ranked: Documents that are enough.
            wanted: ``(n,)`` bool.
        """
        n, n_q, most = self._listed, int(numbers[-1]) + 1, int(probes.max())
        row = self._moved(numbers)
        best = table.topk(most, dim=0).indices  # (most, total_q)
        visits = torch.arange(most, device=self._device)[:, None] < self._moved(probes)
        best = best.where(visits & (values != 0).any(1), -1)
        visited = torch.stack([row.expand_as(best), best], dim=2).view(-1, 2)
        counts = tensor_probe(self._list_offsets, self._lists, visited, n_q, n)
        counts = counts.clamp_(max=255) * wanted[:n]
        found = counts > 0
        if n > ranked:
            found &= counts >= counts.topk(ranked, sorted=False).values.amin(1, keepdim=True)
        return torch.cat([found, wanted[n:].expand(n_q, -1)], dim=1)

    def _best(
        self, pairs: Tensor, scores: Tensor, sizes: Tensor, count: int, rising: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the ``count`` best of each query's ``pairs (p, 2)``, rising; ``sizes (n_q,)`` counts them.

        Returns:
            Scores ``(n_q, count)``, their pairs ``(n_q * count, 2)``, rising again or best first, and how
            many a query has of them: ``count``, row ``n`` among them where it had fewer.
        """
        n_q, at = len(sizes), torch.arange(count, device=self._device)
        order = scores.argsort(descending=True, stable=True)
        order = order[pairs[order, 0].argsort(stable=True)]
        place = order[((sizes.cumsum(0) - sizes)[:, None] + at).clamp(max=len(order) - 1)]
        there = at < sizes[:, None]
        rows = pairs[place, 1].where(there, self._rows)
        scores = scores[place].where(there, -torch.inf)
        if rising:
            rows, order = rows.sort(dim=1)
            scores = scores.gather(1, order)
        query = torch.arange(n_q, device=self._device)[:, None].expand_as(rows)
        return scores, torch.stack([query, rows], dim=2).view(-1, 2), torch.full_like(sizes, count)


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
