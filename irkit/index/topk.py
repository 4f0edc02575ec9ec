"""The k best of what streams by, exactly: higher scores first, ties to the lower row."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["Hits", "TopK"]

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1  # rows are below 2^32 - 1
_NOTHING = -(1 << 63)


class Hits(NamedTuple):
    """What a search found, best first; ties go to the lower row.

    Attributes:
        rows: ``(n_q, k)`` int64; -1 where there are fewer than k hits.
        scores: ``(n_q, k)`` float32; -inf there.
    """

    rows: np.ndarray[Any, np.dtype[np.int64]]
    scores: np.ndarray[Any, np.dtype[np.float32]]


class TopK:
    """Collects the ``k`` best rows of each of ``n_q`` queries from blocks of scores.

    A hit is one 64-bit key, order-preserving bits of the score above the complement of the row, so that
    the k largest keys are the k best hits with ties settled. A score of -inf is no hit.

    Example:
        >>> best = TopK(1, 2)
        >>> best.push(torch.tensor([[1.0, 3.0, 3.0, 3.0]]), torch.arange(4))
        >>> best.hits().rows.tolist()
        [[1, 2]]
    """

    def __init__(self, n_q: int, k: int) -> None:
        self._keys = torch.full((n_q, k), _NOTHING)

    def push(self, scores: Tensor, rows: Tensor) -> None:
        """Consider ``scores (n_q, n)`` float32 of ``rows (n,)`` int64, all above the rows pushed before."""
        n_q, k = self._keys.shape
        width = scores.shape[1]
        if width > k:  # few can enter: find those by comparison alone, which is far cheaper than sorting
            least = self._keys.amin(1)
            if bool((least == _NOTHING).any()):
                inside = scores >= scores.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
            else:
                inside = scores > _score_of(least)[:, None]
            counts = inside.sum(1)
            places = torch.from_numpy(np.flatnonzero(inside.numpy()))
            query, column = places // width, places % width
            keys = torch.full((n_q, int(counts.max()) if n_q else 0), _NOTHING)
            first = torch.cumsum(counts, 0) - counts
            keys[query, torch.arange(len(places)) - first[query]] = _key(
                scores.reshape(-1)[places], rows[column]
            )
        else:
            keys = _key(scores, rows)
        self.push_keys(keys)

    def push_pairs(self, scores: Tensor, rows: Tensor) -> None:
        """Consider ``scores (n_q, n)`` of ``rows (n_q, n)``, each row at most once; row -1 is none."""
        self.push_keys(torch.where(rows < 0, _NOTHING, _key(scores, rows)))

    def push_keys(self, keys: Tensor) -> None:
        """Consider ``keys (n_q, n)`` of another collection."""
        if keys.shape[1]:
            both = torch.cat([self._keys, keys], 1)
            self._keys = both.topk(self._keys.shape[1], dim=1, sorted=False).values

    def hits(self) -> Hits:
        """What was found so far."""
        keys = self._keys.sort(1, descending=True).values
        scores = _score_of(keys)
        none = (keys == _NOTHING) | (scores == float("-inf"))
        rows = torch.where(none, -1, _ROW_MASK - (keys & _ROW_MASK))
        return Hits(rows.numpy(), scores.masked_fill(none, float("-inf")).numpy())


def _key(scores: Tensor, rows: Tensor) -> Tensor:
    bits = (scores + 0.0).contiguous().view(torch.int32)  # adding 0 makes -0.0, which would sort lower, 0.0
    return (_ordered(bits).long() << _ROW_BITS) | (_ROW_MASK - rows)


def _score_of(keys: Tensor) -> Tensor:
    return _ordered((keys >> _ROW_BITS).int()).view(torch.float32)


def _ordered(bits: Tensor) -> Tensor:
    """Bits of a float32 to an int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
