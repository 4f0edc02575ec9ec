"""Search of coded lists on a GPU by torch: all lists of a block of queries at once.

Each search takes the steps of the kernel ``dense_search``, without its roundings to 8 bits:

1. Score the centroids of all lists, and choose the best lists of each query.
2. Gather the rows of these lists, and score them by their signs. A table of each query has, for every byte of
   signs, the sum of its eight products, so a score is a sum of as many numbers as there are bytes.
3. Rank the best of them by the stored vectors, or by the vectors that codes stand for.

The host waits for the device twice per block: for the number of rows in the lists, and for the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from irkit_kernels.dense_search import Effort
from irkit_kernels.dense_search.codes import two_floats, unpack_signs
from torch import Tensor

from irkit.core.ragged import to_device
from irkit.index.array_files import Array
from irkit.index.topk import Hits, TopK, tensor_keys

__all__ = ["DeviceLists", "needed_bytes"]

_BITS = 8  # of a byte


def needed_bytes(segments: Sequence[Mapping[str, Array]], kept: Mapping[str, Array], numbers: int) -> int:
    """Return the bytes of a device that the arrays take, and the work of a block of ``numbers`` numbers."""
    arrays = [array for segment in segments for array in segment.values()]
    return sum(array.nbytes for array in [*arrays, *kept.values()]) + 32 * numbers


class DeviceLists:
    """Keeps lists, codes and vectors on a device, and searches them there.

    Args:
        centroids: ``(lists, width)`` float32, rotated.
        biases: ``(lists,)`` float32, what ranks lists beside the product of a unit query with the centroid.
        matrix: ``(dim, width)`` float32, which rotates queries.
        segments: As a `Searcher` takes them.
        kept: "kept" and "kept_scales" as a `Searcher` takes them; empty ranks by codes.
        euclidean: Scores are squared distances times -1.
        device: Where all of it is moved to.
    """

    def __init__(
        self,
        centroids: Tensor,
        biases: Array,
        matrix: Tensor,
        segments: Sequence[Mapping[str, Array]],
        kept: Mapping[str, Array],
        euclidean: bool,
        device: torch.device,
    ) -> None:
        def moved(array: Array) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        def joined(name: str) -> Array:
            return np.concatenate([segment[name] for segment in segments])

        self._device, self._euclidean = device, euclidean
        self._centroids, self._matrix = centroids.to(device), matrix.to(device)
        self._biases, self._bits = moved(biases), torch.arange(_BITS, device=device)
        # lists by segment: where they start among the rows of all segments, and their sizes
        counts = [len(segment["rows"]) for segment in segments]
        ends = np.cumsum([0, *counts])
        offsets = np.stack(
            [segment["offsets"] + end for segment, end in zip(segments, ends, strict=False)], 1
        )
        sizes = np.diff(offsets, axis=0)  # (lists, segments)
        self._starts, self._sizes = moved(offsets[:-1]), moved(sizes)
        self._most = np.sort(sizes.sum(1))[::-1].cumsum()
        lists = [np.repeat(np.arange(len(sizes)), sizes[:, number]) for number in range(len(segments))]
        self._lists = moved(np.concatenate(lists).astype(np.int32))
        self._rows = moved(joined("rows").astype(np.int64))
        signs = [unpack_signs(segment["signs"], n) for segment, n in zip(segments, counts, strict=True)]
        self._signs = moved(np.concatenate(signs))
        self._factors = [moved(part) for part in two_floats(joined("factors"))]
        self._row_biases = moved(joined("biases")) if euclidean else None
        self._kept = {name: moved(array) for name, array in kept.items()}
        if not kept:
            self._planes = moved(joined("planes"))
            self._level_factors = [moved(part) for part in two_floats(joined("level_factors"))]

    def queries_at_once(self, effort: Effort, numbers: int) -> int:
        """Return how many queries make at most so many numbers at once, but at least one."""
        rows = int(self._most[min(effort.probes, len(self._most)) - 1])
        return max(1, numbers // max(1, rows * self._signs.shape[1]))

    def __call__(self, queries: Tensor, k: int, effort: Effort, keep: Array | None) -> Hits:
        """Return the ``k`` best rows of each query that the lists find.

        Args:
            queries: ``(n_q, dim)`` float32 on the CPU.
            k: Hits.
            effort: How much is read; ``groups`` and ``refined`` are not used.
            keep: ``(n,)`` bool: rows that may be hits; None allows all.
        """
        n_q, own = len(queries), to_device(queries.detach(), self._device)
        factor = 2 if self._euclidean else 1
        values = factor * own @ self._matrix
        # 1. lists
        products = values @ self._centroids.T
        lengths = 1 if self._euclidean else own.norm(dim=1, keepdim=True)
        probes = min(effort.probes, products.shape[1])
        lists = (products + self._biases * lengths).topk(probes, dim=1).indices
        # 2. rows of the lists, one after the other, query by query
        sizes, starts = (part[lists].view(-1) for part in (self._sizes, self._starts))
        ends = sizes.cumsum(0)
        total = int(ends[-1])  # waits
        every = torch.arange(len(sizes), device=self._device)
        part = torch.repeat_interleave(every, sizes, output_size=total)
        number = torch.arange(total, device=self._device)
        position = number - (ends - sizes)[part] + starts[part]
        query = part // (len(sizes) // n_q)
        bases = products[query, self._lists[position]]
        scores = self._rough(values, query, position, bases)
        if keep is not None:
            allowed = to_device(torch.from_numpy(keep), self._device)
            scores = scores.masked_fill(~allowed[self._rows[position]], -torch.inf)
        width = int(self._most[probes - 1])
        column = number - (ends - sizes).view(n_q, -1)[:, 0][query]
        table = scores.new_full((n_q, width), -torch.inf)
        places = position.new_zeros((n_q, width))
        table[query, column], places[query, column] = scores, position
        best = table.topk(min(effort.candidates, width), dim=1)
        chosen = places.gather(1, best.indices)
        # 3. vectors
        final = self._fine(factor * own, values, chosen)
        if self._row_biases is not None:
            final = final + self._row_biases[chosen] - own.square().sum(1, keepdim=True)
        keys = tensor_keys(final.where(best.values > -torch.inf, -torch.inf), self._rows[chosen])
        hits = TopK(n_q, k)
        hits.push_keys(keys.topk(min(k, keys.shape[1]), dim=1).values.cpu().numpy())
        return hits.hits()

    def _rough(self, values: Tensor, query: Tensor, position: Tensor, bases: Tensor) -> Tensor:
        """Return the scores by signs ``(p,)`` of pairs of a query and a position.

        Args:
            values: ``(n_q, width)`` rotated queries.
            query: ``(p,)``.
            position: ``(p,)`` among the rows of all segments.
            bases: ``(p,)`` products with the centroids of their lists.
        """
        every = torch.arange(1 << _BITS, device=self._device)
        signs = (((every[:, None] >> self._bits) & 1) * 2 - 1).float()  # (256, 8)
        table = values.view(len(values), -1, _BITS) @ signs.T  # (n_q, bytes, 256)
        byte = torch.arange(table.shape[1], device=self._device)
        cell = (query[:, None] * len(byte) + byte) * len(every) + self._signs[position]
        factor, base_factor = (part[position] for part in self._factors)
        scores = table.view(-1)[cell].sum(1) * factor + bases * base_factor + bases
        return scores if self._row_biases is None else scores + self._row_biases[position]

    def _fine(self, queries: Tensor, values: Tensor, chosen: Tensor) -> Tensor:
        """Return products ``(n_q, c)`` of queries, or rotated ``values``, with the vectors at positions."""
        if not self._kept:
            return (self._decoded(chosen) @ values[:, :, None])[..., 0]
        vectors = self._kept["kept"][self._rows[chosen]]
        if "kept_scales" not in self._kept:
            return (vectors.float() @ queries[:, :, None])[..., 0]
        return (vectors.float() @ values[:, :, None])[..., 0] * self._kept["kept_scales"][self._rows[chosen]]

    def _decoded(self, chosen: Tensor) -> Tensor:
        """Return the rotated vectors ``(..., width)`` that codes stand for, see `dense_search.decode`."""
        signs, planes = self._signs[chosen], self._planes[chosen]
        others = planes.shape[-1] // signs.shape[-1]
        levels = self._unpacked(signs) << others
        for bit, plane in enumerate(planes.chunk(others, dim=-1)):
            levels = levels + (self._unpacked(plane) << bit)
        factor, base_factor = (part[chosen][..., None] for part in self._level_factors)
        steps = levels.float() - 0.5 * ((2 << others) - 1)
        return steps * factor + self._centroids[self._lists[chosen]] * (1 + base_factor)

    def _unpacked(self, packed: Tensor) -> Tensor:
        """Return the bits ``(..., 8 * bytes)`` of ``packed (..., bytes)``, the lowest bit first."""
        return ((packed[..., None].int() >> self._bits) & 1).flatten(-2)
