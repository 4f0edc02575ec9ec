"""Search of shards as one index, where structures of FAISS with the same codes choose candidates.

One index asks its structure for the best rows by their codes, and ranks these by exact scores. Here every
shard does so with the lists, the width and the filter's share of one index. The best by codes of all shards
go on, without those that tie at the end, as in one index (see `irkit.index.faiss_candidates`). Structures
that are graphs walk over the rows of a shard alone, so these are searched by each shard on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from irkit_kernels.dense_scan import products

from irkit.core.representation import Dense, Representation
from irkit.index import FaissConfig
from irkit.index.array_files import Array
from irkit.index.faiss_candidates import Reach, drop_ties, find_untied
from irkit.index.stored_rows import search_in_blocks
from irkit.index.topk import Hits, TopK
from irkit.shards.joint_lists import count_kept, scan_shards
from irkit.shards.placement import ordered_hits, push_hits


class StructureAnswer(NamedTuple):
    """What a shard finds of some queries.

    Attributes:
        rows: ``(n_q, n)`` candidates; -1 for none.
        found: ``(n_q, n)`` float32, their scores by codes; see `irkit.index.faiss.Faiss.nearest`.
        width: Number of candidates of one index.
        scores: ``(n_q, n)`` float32, exact scores; None if they were not computed.
        added: Hits among the rows that are not in the structure; None if they were not asked for.
    """

    rows: Array
    found: Array
    width: int
    scores: Array | None
    added: Hits | None


def search_structures(
    index: Any, queries: Representation, k: int, masks: Sequence[Array | None]
) -> Hits | None:
    """Search the shards of a `ShardedIndex` as one index of all documents.

    Args:
        index: The index.
        queries: Queries.
        k: Maximum number of results.
        masks: For each shard which of its rows may be results, bool ``(n,)``; None for all.

    Returns:
        Global rows and scores. None if the index has no structures, or others than such as are searched
        together.
    """
    if not isinstance(index.config, FaissConfig) or index.config.is_graph:
        return None
    parts: list[Any] = index.parts
    first, covered = max(parts, key=lambda part: part.covered), sum(part.covered for part in parts)
    # the budget of one index
    keeps = [part._keep(mask) for part, mask in zip(parts, masks, strict=True)]
    live = sum(count_kept(keep, part.covered) for part, keep in zip(parts, keeps, strict=True))
    k = min(k, sum(count_kept(keep, len(part)) for part, keep in zip(parts, keeps, strict=True)))
    if not covered or not k or first.on_gpu:
        return None
    queries = queries.to("cpu", torch.float32)
    if first._few(live, covered, k):
        return scan_shards(index, queries, masks, k)
    n, is_filtered = sum(map(len, parts)), any(keep is not None for keep in keeps)
    reach = first.reach(k, live, covered, is_filtered)

    def block(queries: Representation) -> Hits:
        answers: list[StructureAnswer | None] = []

        def find(values: Array, wanted: Reach) -> tuple[Hits, Array]:
            asked = k if wanted is reach and covered < n else 0
            own, rank = Dense(torch.from_numpy(values)), not index.searched_here
            found = index.ask(structure_answer, own, masks, wanted, asked, rank)
            if wanted is reach:
                answers.extend(found)
            return _rank(index, values, found, k)

        hits = find_untied(find, np.ascontiguousarray(queries.arrays()["values"]), reach)
        best = TopK(len(queries), k)
        best.push_pairs(hits.scores, hits.rows)
        for numbers, answer in zip(index.numbers, answers, strict=True):
            if answer is not None and answer.added is not None:
                push_hits(best, numbers, answer.added)
        hits = best.hits()
        short = np.flatnonzero(hits.rows[:, -1] < 0)  # structures did not find enough
        if len(short) and all(answer is not None for answer in answers):
            hits.rows[short], hits.scores[short] = scan_shards(index, queries[short], masks, k)
        return hits

    with torch.no_grad():
        return search_in_blocks(block, queries, index.store.limits.faiss_queries)


def structure_answer(
    part: Any, queries: Dense, mask: Array | None, reach: Reach, k: int, rank: bool
) -> StructureAnswer:
    """Return what a shard finds of queries.

    Args:
        part: Index of the shard.
        queries: Queries.
        mask: Which rows may be results.
        reach: How far one index looks.
        k: Number of hits among the rows that are not in the structure, or 0.
        rank: Compute the exact scores of candidates, too.
    """
    keep, covered, values = part._keep(mask), part.covered, queries.arrays()["values"]
    added = None
    if k and covered < len(part):

        def scan(width: int) -> Hits:
            best = TopK(len(queries), width)
            part._scan(queries, best, covered, keep)
            return best.hits()

        added = ordered_hits(part.store, len(part), k, scan)
    if not covered:
        none = np.empty((len(queries), 0), np.float32)
        return StructureAnswer(none.astype(np.int64), none, 0, none, added)
    if reach.filtered and keep is None:  # rows of another shard are hidden
        keep = np.ones(len(part), bool)
    rows, found, width = part.nearest(values, reach, keep)
    scores = products(part.store.read("values.bin"), values, rows) if rank else None
    return StructureAnswer(rows, found, width, scores, added)


def _rank(index: Any, values: Array, answers: Sequence[StructureAnswer | None], k: int) -> tuple[Hits, Array]:
    """Return the best of the candidates that one index would have, and what `drop_ties` returns."""
    best = TopK(len(values), k)
    shards = [
        (part.store, numbers, answer)
        for part, numbers, answer in zip(index.parts, index.numbers, answers, strict=True)
        if answer is not None and answer.rows.size
    ]
    if not shards:
        return best.hits(), np.zeros(len(values), bool)
    # the cut of one index
    found = np.concatenate([answer.found for _, _, answer in shards], 1)
    rows = np.concatenate([answer.rows for _, _, answer in shards], 1)
    tied = drop_ties(rows, found, shards[0][2].width, k)
    # scores, and numbers of rows in the whole
    start = 0
    for store, numbers, answer in shards:
        stop = start + answer.rows.shape[1]
        own, scores = np.ascontiguousarray(rows[:, start:stop]), answer.scores
        if scores is None:
            scores = products(store.read("values.bin"), values, own)
        best.push_pairs(scores, np.where(own < 0, -1, numbers[own]))
        start = stop
    return best.hits(), tied
