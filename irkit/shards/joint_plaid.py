"""Search of the shards of a plaid index, which chooses the candidates that one index would.

A search of `irkit.index.plaid_search` narrows the documents down in steps, and each step passes on a fixed
number of them. A shard on its own passes on that number of its own documents, so several shards look at more
documents than one index. Here the scores of a step come from the shards, and then the step cuts once, among
the documents of all shards. Between the steps documents are global rows in ascending order, so that ties are
as in one index. A score of a step does not depend on the documents beside it.

Shards that other processes search are asked once, see plaid_answers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from irkit_kernels import residual_maxsim as kernel

from irkit.core.representation import MultiVector, Representation
from irkit.index.array_files import Array
from irkit.index.layout import fitting
from irkit.index.plaid import Plaid
from irkit.index.plaid_search import CpuSearch, PlaidArrays, SearchBudget, best_scores, plan_search
from irkit.index.stored_rows import QUERY_BLOCK, search_in_blocks
from irkit.index.topk import Hits, TopK
from irkit.shards.placement import Placement, push_hits, wants_gpu
from irkit.shards.plaid_answers import Steps, added_hits, merge_steps, plaid_answer

_ASKED = 8  # blocks of queries that other processes are asked about at once, as each question takes a while


class Share(NamedTuple):
    """What a search reads of a shard with compressed rows.

    Attributes:
        number: Number of the shard.
        arrays: Its compressed rows.
        rows: ``(n,)`` global row of each.
        live: ``(n,)`` bool, True for rows that may be hits, with or without tokens.
    """

    number: int
    arrays: PlaidArrays
    rows: Array
    live: Array


class JointArrays:
    """The compressed rows of several shards, with the methods of `PlaidArrays` that `CpuSearch` calls.

    Rows are global ones. The filter ``allowed`` has the rows of the first shard, then the rows of the second,
    and so on.
    """

    def __init__(self, shares: Sequence[Share], where: Placement) -> None:
        """Join shards, whose centroids are the same."""
        self._shares, self._where = shares, where
        self._ends = np.cumsum([len(share.rows) for share in shares])[:-1]

    def candidates(
        self, table: kernel.QueryTable, budget: SearchBudget, nprobe: int, allowed: Array
    ) -> tuple[Array, Array | None]:
        """See `PlaidArrays.candidates`."""
        pairs = [*zip([share.arrays for share in self._shares], np.split(allowed, self._ends), strict=True)]
        rows: list[Array] = []
        if nprobe:
            found = [arrays.probed(table, nprobe, budget.ranked, mask) for arrays, mask in pairs]
            least = kernel.least_count(np.concatenate([counts for _, counts in found]), budget.ranked)
            rows = [
                arrays.with_unlisted(own[counts >= least], mask)
                for (arrays, mask), (own, counts) in zip(pairs, found, strict=True)
            ]
        if sum(map(len, rows)) < budget.exact:
            rows = [arrays.rows_of(mask) for arrays, mask in pairs]
        if (count := sum(map(len, rows))) <= budget.refined:
            return self._join(rows)[0], None
        rough = [arrays.rough(table, own) for (arrays, _), own in zip(pairs, rows, strict=True)]
        if count > budget.candidates:  # without those that are surely worse, and with all ties
            cut = np.partition(np.concatenate(rough), -budget.candidates)[-budget.candidates]
            above = [scores >= cut for scores in rough]
            rows, rough = (
                [one[mask] for one, mask in zip(parts, above, strict=True)] for parts in (rows, rough)
            )
        joined, order = self._join(rows)
        scores = np.concatenate(rough)[order]
        best = best_scores(scores, budget.candidates)
        return joined[best], scores[best]

    def common(self, query: Array, rows: Array) -> Array:
        """See `PlaidArrays.common`."""
        return self._each(rows, lambda arrays, own: arrays.common(query, own))

    def exact(self, query: Array, table: kernel.QueryTable, rows: Array) -> Array:
        """See `PlaidArrays.exact`."""
        return self._each(rows, lambda arrays, own: arrays.exact(query, table, own))

    def _join(self, row_lists: Sequence[Array]) -> tuple[Array, Array]:
        """Return rows of each shard as global rows, ascending, and the order that makes them so."""
        pairs = zip(self._shares, row_lists, strict=True)
        joined = np.concatenate([share.rows[own] for share, own in pairs])
        order = np.argsort(joined)
        return joined[order], order

    def _each(self, rows: Array, work: Callable[[PlaidArrays, Array], Array]) -> Array:
        """Return what ``work`` returns for the global ``rows (n,)`` of each shard, in their order."""
        result = np.empty(len(rows), np.float32)
        for arrays, positions, own in self._split(rows):
            result[positions] = work(arrays, own)
        return result

    def _split(self, rows: Array) -> Iterator[tuple[PlaidArrays, Array, Array]]:
        """Yield arrays, positions in ``rows (n,)`` and own rows of each shard that has some of them."""
        owners, own = self._where.shards[rows], self._where.rows[rows].astype(np.int32)
        for share in self._shares:
            positions = np.flatnonzero(owners == share.number)
            if len(positions):
                yield share.arrays, positions, own[positions]


def search_plaid(index: Any, queries: Representation, k: int, masks: Sequence[Array | None]) -> Hits | None:
    """Search the shards of a `ShardedIndex` as one index of all documents.

    Args:
        index: The index.
        queries: Queries.
        k: Maximum number of results.
        masks: For each shard which of its rows may be results, bool ``(n,)``; None for all.

    Returns:
        Global rows and scores. None where shards are searched one by one: in an index of another kind, on a
        GPU, and while no rows are compressed, because scores are exact then.
    """
    elsewhere = not index.searched_here
    if not isinstance(index.parts[0], Plaid) or (elsewhere and wants_gpu(index)):
        return None
    shares = _shares(index, masks)
    pairs = zip(index.parts, masks, strict=True)
    live_counts = [np.count_nonzero(part.live if mask is None else part.live & mask) for part, mask in pairs]
    k = min(k, int(sum(live_counts)))
    if not shares or not k:
        return None
    live = sum(int(np.count_nonzero(share.arrays.filled & share.live)) for share in shares)
    budget = _budget(index, k, shares)
    size = (_ASKED if elsewhere else 1) * QUERY_BLOCK["multi_vector"]

    def block(queries: Representation) -> Hits:
        assert isinstance(queries, MultiVector)
        best, answered, sent = TopK(len(queries), k), shares, None
        if elsewhere:
            found = index.ask(plaid_answer, queries, masks, k, budget, live)
            answered = [share for share in shares if found[share.number] is not None]
            sent = [found[share.number].steps for share in answered]
            added = [answer and answer.added for answer in found]
        else:
            added = [
                added_hits(part, queries, mask, k) for part, mask in zip(index.parts, masks, strict=True)
            ]
        for numbers, hits in zip(index.numbers, added, strict=True):
            if hits is not None:
                push_hits(best, numbers, hits)
        if answered:
            best.push_pairs(*_rank(index, queries, k, budget, answered, sent))
        return best.hits()

    with torch.no_grad():
        return search_in_blocks(block, queries.to("cpu", torch.float32), size)


def _shares(index: Any, masks: Sequence[Array | None]) -> list[Share] | None:
    """Return what each shard with compressed rows adds; None on a GPU."""
    shares: list[Share] = []
    for number, (part, numbers, mask) in enumerate(zip(index.parts, index.numbers, masks, strict=True)):
        if part.covered:
            arrays, search = part.loaded()
            if not isinstance(search, CpuSearch):
                return None
            keep, rows = part._keep(mask), numbers[: part.covered]
            live = np.ones(len(rows), bool) if keep is None else keep[: len(rows)]
            shares.append(Share(number, arrays, rows, live))
    return shares


def _rank(
    index: Any,
    queries: MultiVector,
    k: int,
    budget: SearchBudget,
    shares: Sequence[Share],
    sent: Sequence[Steps] | None,
) -> tuple[Array, Array]:
    """Return the scores and global rows ``(n_q, budget.exact)`` of the best compressed rows.

    Args:
        index: The index.
        queries: Queries, with or without tokens.
        k: Hits.
        budget: The budget of one index.
        shares: Of the shards that are searched.
        sent: What these shards sent; None if this process computes all.
    """
    empty = queries.tokens.lengths.numpy() == 0
    at = np.flatnonzero(~empty)
    scores = np.full((len(queries), budget.exact), -np.inf, np.float32)
    rows = np.full(scores.shape, -1)
    if sent is not None and len(at):
        scores[at], rows[at], lacking = merge_steps(sent, [share.rows for share in shares], budget)
        at = at[lacking]
    if len(at):
        allowed = np.concatenate([share.arrays.filled & share.live for share in shares])
        packed = index.parts[shares[0].number].loaded()[1].packed
        search = CpuSearch(JointArrays(shares, index.placement), packed)
        with fitting(index.store.path):
            scores[at], rows[at] = search(queries.tokens[torch.from_numpy(at)], budget, allowed)
    if index.config.keep_tokens and not empty.all():
        scores[~empty] = index._score_rows(MultiVector(queries.tokens[~empty]), rows[~empty])
    if empty.any():  # a query without tokens scores 0 with everything
        first = np.sort(np.concatenate([share.rows[share.live] for share in shares]))[:k]
        scores[empty, : len(first)], rows[empty, : len(first)] = 0, first
    return scores, rows


def _budget(index: Any, k: int, shares: Sequence[Share]) -> SearchBudget:
    """Return the budget of one index, in which rows with lists come first."""
    allowed = [share.arrays.filled & share.live for share in shares]
    listed = [mask[: share.arrays.listed] for mask, share in zip(allowed, shares, strict=True)]
    others = [mask[share.arrays.listed :] for mask, share in zip(allowed, shares, strict=True)]
    order = np.concatenate(listed + others)
    return plan_search(index.config, index.store.limits, k, order, sum(map(len, listed)))
