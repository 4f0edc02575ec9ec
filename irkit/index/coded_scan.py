"""Exact search of dense vectors that have codes beside them: a scan of the codes, then of what they leave.

`flat` finds all hits so, and a graph of FAISS those of a search for many hits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from irkit_kernels.dense_scan import Codes, encode, find_candidates
from torch import Tensor

from irkit.core.representation import Dense, Representation
from irkit.index.array_files import Array
from irkit.index.flat_dense import CODES
from irkit.index.store import Store
from irkit.index.stored_rows import search_in_blocks
from irkit.index.topk import Hits, TopK, query_table

_QUERIES = 64  # whose codes are scanned at once


def has_codes(store: Store) -> bool:
    """Return whether the rows of a store have codes."""
    return store.rows("codes.bin") > 0


def append_codes(store: Store, values: Tensor) -> None:
    """Append the codes of vectors ``(n, dim)`` float32 to those of a store."""
    for name, array in zip(CODES, encode(values), strict=True):
        store.append(f"{name}.bin", array.numpy())


def scan_pays(store: Store, n: int, k: int, keep: Array | None, share: int) -> bool:
    """Return whether a scan of the codes is faster than one of the vectors.

    Args:
        store: The store, for its limits.
        n: Number of rows.
        k: Number of hits.
        keep: ``(n,)`` bool: rows that may be hits; None allows all.
        share: How many rows a scan of the vectors scores in the time of one row that the codes leave.
    """
    live = n if keep is None else int(np.count_nonzero(keep))
    return live >= max(store.limits.flat_scan, k * share, n // store.limits.flat_share)


def search_codes(
    store: Store,
    queries: Representation,
    k: int,
    keep: Array | None,
    most: int,
    score: Callable[[Dense, Array], Array],
    otherwise: Callable[[Dense], Hits],
) -> Hits:
    """Score the rows that the codes leave.

    Args:
        store: The store, which has codes.
        queries: ``n_q`` dense queries.
        k: Number of hits; so many rows may be hits.
        keep: ``(n,)`` bool: rows that may be hits; None allows all.
        most: Number of rows that the codes may leave.
        score: Returns the exact scores ``(n_q, width)`` of the rows that are chosen for each query; -1 is
            none.
        otherwise: Searches for those queries of which the codes leave more.
    """
    read = store.read
    codes = store.derived("codes", lambda: Codes(*(torch.from_numpy(read(f"{name}.bin")) for name in CODES)))

    def search(block: Representation) -> Hits:
        queries = cast(Dense, block)
        found = find_candidates(codes, queries.values, k, keep)
        left = [number for number, rows in enumerate(found) if rows is None or len(rows) > most]
        for number in left:
            found[number] = np.empty(0, np.int64)
        rows = cast(list[Array], found)
        owners = np.repeat(np.arange(len(rows)), [*map(len, rows)])
        chosen = query_table(owners, np.concatenate(rows), len(rows), -1)
        best = TopK(len(rows), k)
        # as many columns at a time as memory allows
        size = max(1, store.limits.scan_scores // len(rows))
        for start in range(0, chosen.shape[1], size):
            part = np.ascontiguousarray(chosen[:, start : start + size])
            best.push_pairs(score(queries, part), part)
        hits = best.hits()
        if left:
            hits.rows[left], hits.scores[left] = otherwise(queries[left])
        return hits

    return search_in_blocks(search, queries, _QUERIES)
