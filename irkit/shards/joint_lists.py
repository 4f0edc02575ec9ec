"""Search of shards as one index, where an index ranks a fixed number of candidates: `dense` and `muvera`.

An index chooses a fixed number of candidates among the rows of the lists that it reads, by their codes, and
scores these. All shards read the same lists and have the same codes. Documents are on shards by chance, so
each chooses its share of that number and what chance may add (`irkit.shards.placement.most_of`). The best of
the candidates of all go on, as in one index. The worst candidate of a shard tells whether the shard left
one out that counts. For the queries of which one did, a few in a thousand, every shard chooses as many
candidates as one index.

Where shards are searched by other processes, each scores its own candidates meanwhile. A score that it did
not compute is computed here. `flat` with tokens in 8 bits has candidates, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from irkit_kernels.dense_search import Candidates, Effort

from irkit.core.representation import MultiVector, Representation
from irkit.index.array_files import Array
from irkit.index.coded_lists import QUERIES, CodedLists
from irkit.index.flat import FlatInt8
from irkit.index.stored_rows import QUERY_BLOCK, StoredRows, search_in_blocks
from irkit.index.topk import Hits, TopK
from irkit.shards.placement import in_order, most_of, ordered_hits, push_hits, wants_gpu


class ListAnswer(NamedTuple):
    """What a shard finds of some queries.

    Attributes:
        found: Candidates, by rows of the shard; None if it has no rows in lists.
        floors: ``(n_q,)`` rows whose rough score is at most this may be left out.
        scores: Exact scores of candidates; NaN where they were not computed.
        added: Hits among the rows that are not in lists; None if there are no such rows.
    """

    found: Candidates | None
    floors: Array
    scores: Array
    added: Hits | None


def search_lists(index: Any, queries: Representation, k: int, masks: Sequence[Array | None]) -> Hits | None:
    """Search the shards of a `ShardedIndex` as one index of all documents.

    Args:
        index: The index.
        queries: Queries.
        k: Maximum number of results.
        masks: For each shard which of its rows may be results, bool ``(n,)``; None for all.

    Returns:
        Global rows and scores. None if the index has no lists, as scores are exact then, and on a GPU.
    """
    parts: list[Any] = index.parts
    if not isinstance(parts[0], CodedLists) or wants_gpu(index):
        return None
    queries = parts[0]._compared(queries.to("cpu", torch.float32))
    # the budget of one index
    keeps = [part._keep(mask) for part, mask in zip(parts, masks, strict=True)]
    covered = sum(part.coded for part in parts)
    counted = sum(count_kept(keep, part.coded) for part, keep in zip(parts, keeps, strict=True))
    k = min(k, sum(count_kept(keep, len(part)) for part, keep in zip(parts, keeps, strict=True)))
    if not covered or not k:
        return None
    if parts[0]._few(counted, covered, k):
        with torch.no_grad():
            return scan_shards(index, queries, masks, k)
    effort = next(part for part in parts if part.coded)._effort(k, counted, covered)
    most = min(effort.candidates, covered)
    effort = effort._replace(candidates=most, refined=min(effort.refined, most))

    def block(queries: Representation) -> Hits:
        answers = index.ask(list_answer, queries, masks, k, effort, counted, not index.searched_here)
        hits, lacking = _merge(index, queries, masks, k, effort, answers)
        if len(lacking):
            some, shards = queries[lacking], zip(parts, masks, answers, strict=True)
            whole = [answer and list_answer(part, some, mask, k, effort) for part, mask, answer in shards]
            (hits.rows[lacking], hits.scores[lacking]), _ = _merge(index, some, masks, k, effort, whole)
        short = np.flatnonzero(hits.rows[:, -1] < 0)  # lists did not have enough
        if len(short) and all(answer is not None for answer in answers):
            hits.rows[short], hits.scores[short] = scan_shards(index, queries[short], masks, k)
        return hits

    # candidates of all shards are in memory at once
    size = index.store.limits.scan_numbers // (len(parts) * effort.candidates)
    with torch.no_grad():
        return search_in_blocks(block, queries, max(1, min(QUERIES, size)))


def count_kept(keep: Array | None, n: int) -> int:
    """Return how many of the first ``n`` rows may be hits."""
    return n if keep is None else int(np.count_nonzero(keep[:n]))


def scan_shards(index: Any, queries: Representation, masks: Sequence[Array | None], k: int) -> Hits:
    """Return the best of all rows of all shards."""
    best = TopK(len(queries), k)
    for numbers, hits in zip(index.numbers, index.ask(scan_shard, queries, masks, k), strict=True):
        if hits is not None:
            push_hits(best, numbers, hits)
    return best.hits()


def search_bytes(index: Any, queries: Representation, k: int, masks: Sequence[Array | None]) -> Hits | None:
    """Search the shards of `flat` with tokens in 8 bits as `search_lists` does; None for other indexes.

    Scores in 8 bits choose the documents that are scored exactly, among those of all shards.
    """
    if not isinstance(index.parts[0], FlatInt8) or not isinstance(queries, MultiVector):
        return None
    pairs = zip(index.parts, masks, strict=True)
    live = sum(np.count_nonzero(part.live if mask is None else part.live & mask) for part, mask in pairs)
    k = min(k, int(live))
    if not k:
        return None

    def block(queries: Representation) -> Hits:
        best = TopK(len(queries), k)
        rows = scan_shards(index, queries, masks, index.parts[0].examined(k)).rows
        best.push_pairs(index._score_rows(queries, rows), rows)
        return best.hits()

    with torch.no_grad():
        return search_in_blocks(block, queries.to("cpu", torch.float32), QUERY_BLOCK["multi_vector"])


def scan_shard(part: StoredRows, queries: Representation, mask: Array | None, k: int) -> Hits:
    """Return the best of all rows of a shard."""
    keep = part._keep(mask)
    return ordered_hits(part.store, len(part), k, lambda width: part._scan_all(queries, width, keep))


def list_answer(
    part: CodedLists,
    queries: Representation,
    mask: Array | None,
    k: int,
    effort: Effort,
    counted: int = 0,
    rank: bool = False,
) -> ListAnswer:
    """Return what a shard finds of queries.

    Args:
        part: The shard.
        queries: Queries.
        mask: Which rows may be results.
        k: Number of hits among the rows that are not in lists.
        effort: Of one index.
        counted: Rows in lists of all shards that may be results, of which the shard has a share; 0 to choose
            as many candidates as one index.
        rank: Compute the exact scores of the best candidates, too.
    """
    keep, covered, store = part._keep(mask), part.coded, part.store

    def scan(width: int) -> Hits:
        best = TopK(len(queries), width)
        part._scan(queries, best, covered, keep)
        return best.hits()

    added = ordered_hits(store, len(part), k, scan) if covered < len(part) else None
    floors = np.full(len(queries), -np.inf, np.float32)
    if not covered:
        return ListAnswer(None, floors, np.empty((len(queries), 0), np.float32), added)
    share = count_kept(keep, covered) / counted if counted else 1
    own = effort._replace(
        candidates=most_of(effort.candidates, share), refined=most_of(effort.refined, share)
    )
    found = part.candidates(queries, own, keep)
    while found.rows.shape[1] < covered and not in_order(store):  # rows that are left out may be lower ones
        best = -np.sort(-found.rough, axis=1)
        if not ((best[:, own.candidates - 1] == best[:, -1]) & (best[:, -1] > -np.inf)).any():
            break
        wide = own._replace(candidates=2 * found.rows.shape[1])
        found = part.candidates(queries, wide, keep)
    if own.candidates < min(effort.candidates, covered):  # or nothing is left out
        full = (found.rows >= 0).all(1)
        floors[full] = found.rough[full].min(1)
    scores = np.full(found.rows.shape, np.nan, np.float32)
    if rank:
        query, column = np.nonzero(_best(found.rough, found.fine, found.ranks, found.rows, own))
        scores[query, column] = part.candidate_scores(queries, found, query, column)
    return ListAnswer(found, floors, scores, added)


def _merge(
    index: Any,
    queries: Representation,
    masks: Sequence[Array | None],
    k: int,
    effort: Effort,
    answers: Sequence[ListAnswer | None],
) -> tuple[Hits, Array]:
    """Return the best of what shards found, and the numbers of the queries that `_push_best` returns."""
    best = TopK(len(queries), k)
    lacking = _push_best(index, queries, effort, answers, best)
    if isinstance(queries, MultiVector):
        _push_first(index, queries, masks, best)
    for numbers, answer in zip(index.numbers, answers, strict=True):
        if answer is not None and answer.added is not None:
            push_hits(best, numbers, answer.added)
    return best.hits(), lacking


def _push_best(
    index: Any, queries: Representation, effort: Effort, answers: Sequence[ListAnswer | None], best: TopK
) -> Array:
    """Push the exact scores of the candidates that one index would choose.

    Returns:
        ``(n,)`` numbers of the queries of which a shard left out a candidate; none of theirs are pushed.
    """
    chosen = [
        (number, answer, answer.found, numbers)
        for number, (answer, numbers) in enumerate(zip(answers, index.numbers, strict=True))
        if answer is not None and answer.found is not None
    ]
    if not chosen:
        return np.empty(0, np.int64)
    rows = np.concatenate(
        [np.where(found.rows < 0, -1, numbers[found.rows]) for _, _, found, numbers in chosen], 1
    )
    rough, fine, ranks = (
        np.concatenate([getattr(found, name) for _, _, found, _ in chosen], 1)
        for name in ("rough", "fine", "ranks")
    )
    scores = np.concatenate([answer.scores for _, answer, _, _ in chosen], 1)
    rough[rows < 0] = -np.inf
    # the cuts of one index
    kept = _best(rough, fine, ranks, rows, effort)
    floors = np.max([answer.floors for _, answer, _, _ in chosen], axis=0)
    last = np.full(len(queries), -np.inf)
    if rough.shape[1] >= effort.candidates:
        last = np.partition(rough, -effort.candidates, axis=1)[:, -effort.candidates]
    lacking = (floors > -np.inf) & (last <= floors)
    kept[lacking] = False
    if isinstance(queries, MultiVector):
        empty = (queries.tokens.lengths == 0).numpy()
        kept[empty] = lacking[empty] = False
    # scores that shards did not compute
    missing, start = kept & np.isnan(scores), 0
    for number, _, found, _ in chosen:
        part, span = index.parts[number], slice(start, start + found.rows.shape[1])
        query, column = np.nonzero(missing[:, span])
        if len(query):
            scores[query, start + column] = part.candidate_scores(queries, found, query, column)
        start = span.stop
    best.push_pairs(scores, np.where(kept, rows, -1))
    return np.flatnonzero(lacking)


def _push_first(index: Any, queries: MultiVector, masks: Sequence[Array | None], best: TopK) -> None:
    """Push the first rows in lists for queries without tokens, which score 0 with everything."""
    empty = (queries.tokens.lengths == 0).numpy()
    if empty.any():
        shards = zip(index.parts, index.numbers, masks, strict=True)
        rows = [
            numbers[: part.coded][(part.live if mask is None else part.live & mask)[: part.coded]]
            for part, numbers, mask in shards
        ]
        first = np.sort(np.concatenate(rows))[: best.k]
        best.push_pairs(np.zeros((len(queries), len(first)), np.float32), np.where(empty[:, None], first, -1))


def _best(rough: Array, fine: Array, ranks: Array, rows: Array, effort: Effort) -> Array:
    """Return ``(n_q, n)`` bool: the candidates that an index scores exactly."""
    kept = _cut(rough, ranks, rows, effort.candidates)
    if effort.refined < effort.candidates:
        kept = _cut(np.where(kept, fine, -np.inf), ranks, rows, effort.refined)
    return kept


def _cut(scores: Array, ranks: Array, rows: Array, count: int) -> Array:
    """Return ``(n_q, n)`` bool: the ``count`` best above -inf; of equal ones those that are scanned first."""
    kept = scores > -np.inf
    if scores.shape[1] <= count:
        return kept
    limit = np.partition(scores, -count, axis=1)[:, -count, None]
    kept &= scores >= limit
    over = kept.sum(1) - count
    for query in np.flatnonzero(over > 0):
        tied = np.flatnonzero(kept[query] & (scores[query] == limit[query]))
        order = np.lexsort((rows[query, tied], ranks[query, tied]))
        kept[query, tied[order[len(tied) - over[query] :]]] = False
    return kept
