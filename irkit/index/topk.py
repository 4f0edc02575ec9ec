"""The k best of a stream of scores, exactly: higher scores first, ties to the lower row."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1  # rows are below 2^32 - 1
_NOTHING = (-0x800000 ^ 0x7FFFFFFF) << _ROW_BITS  # a score of -inf, below every score of a row


class Hits(NamedTuple):
    """Hits of queries, best first; ties go to the lower row.

    Attributes:
        rows: ``(n_q, k)`` int64; -1 after the last hit, if there are fewer than k.
        scores: ``(n_q, k)`` float32; -inf after the last hit.
    """

    rows: np.ndarray[Any, np.dtype[np.int64]]
    scores: np.ndarray[Any, np.dtype[np.float32]]


class TopK:
    """Collects the ``k`` best rows of each of ``n_q`` queries from blocks of scores.

    A hit is one 64-bit key: bits of the score that sort as the score does, then the complement of the row. So
    the k largest keys are the k best hits, ties included. Scores of -inf are skipped.

    Attributes:
        k: Number of hits wanted for each query.

    Examples:
        >>> best = TopK(1, 2)
        >>> best.push(np.float32([[1, 3, 3, 3]]), np.arange(4))
        >>> best.hits().rows.tolist()
        [[1, 2]]
    """

    def __init__(self, n_q: int, k: int) -> None:
        self.k = k
        self._keys = np.empty((n_q, 0), np.int64)  # k or fewer per query, in any order

    def push(self, scores: Array, rows: Array) -> None:
        """Consider ``scores (n_q, n)`` float32 of ``rows (n,)``, all above the rows pushed before."""
        n_q, width = scores.shape
        if width <= max(self.k, 64):
            self.push_keys(_key(scores, rows))
            return
        # few scores can enter: comparing finds them, far cheaper than sorting all of them
        if self._keys.shape[1] < self.k:
            limit = np.partition(scores, width - self.k, axis=1)[:, width - self.k, None]
            positions = np.flatnonzero(scores >= limit)
        else:
            positions = np.flatnonzero(scores > self.least()[:, None])
        query, column = np.divmod(positions, width)
        keys = _key(scores.reshape(-1)[positions], rows[column])
        self.push_keys(query_table(query, keys, n_q, _NOTHING))

    def push_pairs(self, scores: Array, rows: Array) -> None:
        """Consider ``scores (n_q, n)`` of ``rows (n_q, n)``, each row at most once; row -1 is skipped."""
        self.push_keys(np.where(rows < 0, _NOTHING, _key(scores, rows)))

    def least(self) -> Array:
        """Return ``(n_q,)`` the score of the last hit so far; -inf for a query with fewer than ``k``."""
        if self._keys.shape[1] < self.k:
            return np.full(len(self._keys), -np.inf, np.float32)
        return _score_of(self._keys.min(1))

    def hits(self) -> Hits:
        """Return the hits so far."""
        keys = np.sort(self._keys, axis=1)[:, ::-1]
        rows = np.full((len(keys), self.k), -1)
        scores = np.full(rows.shape, -np.inf, np.float32)
        best = _score_of(keys)
        width = keys.shape[1]
        rows[:, :width] = np.where(best == -np.inf, -1, _ROW_MASK - (keys & _ROW_MASK))
        scores[:, :width] = best
        return Hits(rows, scores)

    def push_keys(self, keys: Array) -> None:
        """Consider hits as ``keys (n_q, n)`` int64, each row at most once."""
        keys = np.concatenate([self._keys, keys], 1)
        surplus = keys.shape[1] - self.k
        if surplus > 0:
            keys = np.partition(keys, surplus, axis=1)[:, surplus:]
        self._keys = keys


def tensor_keys(scores: Tensor, rows: Tensor) -> Tensor:
    """Return the keys of `TopK` for ``scores`` float32 of ``rows`` int64, on their device."""
    bits = (scores + 0).view(torch.int32)  # + 0 makes -0.0, which would sort lower, 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << _ROW_BITS) | (_ROW_MASK - rows)


def query_table(query: Array, values: Array, n_q: int, nothing: int) -> Array:
    """Return ``(n_q, most)`` the ``values (n,)`` of each query, in order, and then ``nothing``.

    Args:
        query: ``(n,)`` ascending, the query of each value.
        values: ``(n,)``.
        n_q: Number of queries.
        nothing: What fills up the rows of queries that have fewer values.
    """
    counts = np.bincount(query, minlength=n_q)
    table = np.full((n_q, counts.max(initial=0)), nothing, values.dtype)
    table[np.arange(table.shape[1]) < counts[:, None]] = values
    return table


def _key(scores: Array, rows: Array) -> Array:
    bits = _ordered((scores + np.float32(0)).view(np.int32))  # + 0 makes -0.0, which would sort lower, 0.0
    keys: Array = (bits.astype(np.int64) << _ROW_BITS) | (_ROW_MASK - rows)
    return keys


def _score_of(keys: Array) -> Array:
    return _ordered((keys >> _ROW_BITS).astype(np.int32)).view(np.float32)


def _ordered(bits: Array) -> Array:
    """Turn the bits of a float32 into an int32 of the same order, and back."""
    ordered: Array = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
    return ordered
