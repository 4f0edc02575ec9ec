"""Exact search of dense vectors on a GPU, by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from irkit.index.array_files import Array
from irkit.index.topk import Hits, TopK

_WORK = 1 << 29  # bytes of scores, keys and their choice


class DenseSearch:
    """Keeps vectors on a device and scores all of them.

    A hit is one 64-bit key, as in `TopK`, so that ties go to the lower row; ``torch.topk`` alone leaves the
    order of ties open.
    """

    def __init__(self, values: Array, device: torch.device, scores: int) -> None:
        """Move vectors ``(n, dim)`` float32 to the device; a search makes ``scores`` at once."""
        self._values, self._scores = torch.from_numpy(values).to(device), scores

    @staticmethod
    def needed(values: Array) -> int:
        """Return the bytes of a device that the search of these vectors takes."""
        return values.nbytes + _WORK

    def __call__(self, queries: Tensor, k: int, keep: Array | None) -> Hits:
        """Return the ``k`` best rows of each query.

        Args:
            queries: ``(n_q, dim)`` float32 on the CPU.
            k: At most the number of rows where ``keep`` is true.
            keep: ``(n,)`` bool: rows that may be hits; None allows all.
        """
        device, n = self._values.device, len(self._values)
        queries = queries.detach().to(device)
        hidden = None if keep is None else torch.from_numpy(~keep).to(device)
        best = torch.empty(len(queries), 0, dtype=torch.int64, device=device)
        width = max(1, self._scores // len(queries))
        for start in range(0, n, width):
            scores = queries @ self._values[start : start + width].T
            if hidden is not None:
                scores.masked_fill_(hidden[start : start + width], -torch.inf)
            best = torch.cat([best, _keys(scores, start)], dim=1)
            best = best.topk(min(k, best.shape[1]), dim=1).values
        hits = TopK(len(queries), k)
        hits.push_keys(best.cpu().numpy())
        return hits.hits()


def _keys(scores: Tensor, first: int) -> Tensor:
    """Return the keys of `TopK` for ``scores (n_q, n)`` float32 of the rows from ``first`` on."""
    bits = (scores + 0).view(torch.int32)  # + 0 makes -0.0, which would sort lower, 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    rows = torch.arange(first, first + scores.shape[1], device=scores.device)
    return (ordered.long() << 32) | (0xFFFFFFFF - rows)
