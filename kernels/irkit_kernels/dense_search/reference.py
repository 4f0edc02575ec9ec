"""The definition in torch: scores of lists, of signs, of codes and of kept rows, and what each step keeps.

Products of integers are exact, and float32 numbers are multiplied and added in the order of the machine code.
So both choose the same lists and candidates. Scores by kept rows are products in float64 here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .codes import codes_at, decode, two_floats, unpack_signs
from .cpu_prepare import HIGHEST_SUM
from .lists import group_lists, list_biases, quantized
from .op import Effort
from .rotation import Rotation, rotate

__all__ = ["reference"]

Array = NDArray[Any]


def reference(
    centroids: Array,
    rotation: Rotation,
    segments: Sequence[Mapping[str, Array]],
    n_rows: int,
    query: Array,
    k: int,
    effort: Effort,
    *,
    metric: str = "inner_product",
    kept: Array | None = None,
    kept_scales: Array | None = None,
    margins: Array | None = None,
    keep: Array | None = None,
) -> tuple[Array, Array]:
    """Find the best rows of one query; for the arguments see `Searcher` and its ``find``.

    Returns:
        Rows int64 and scores float64, up to ``k``, best first, ties to the lower row.
    """
    euclidean = metric == "euclidean"
    values = rotate(torch.from_numpy(query)[None] * (2 if euclidean else 1), rotation)[0]
    a, b, c, d = values.abs().view(-1, 4).T
    query_bytes, byte_scale = _rounded(values, values.abs().max(), 127)
    levels, level_scale = _rounded(values, ((a + b) + (c + d)).max(), HIGHEST_SUM)

    # Choose groups, then the lists of the best centroids in them, all as bytes.
    groups = group_lists(centroids, euclidean, margins)
    factor = 1.0 if euclidean else _length(query)

    def products(means: Array) -> Tensor:
        codes, scales = quantized(rotate(torch.from_numpy(means), rotation).numpy())
        return (torch.from_numpy(codes).long() @ query_bytes).float() * (
            torch.from_numpy(scales) * byte_scale
        )

    group_scores: Tensor = products(groups.centroids) + torch.from_numpy(groups.biases) * factor
    best, _ = group_scores.argsort(descending=True, stable=True)[: effort.groups].sort()
    lists = torch.from_numpy(np.concatenate([groups.members[number] for number in best.tolist()]))
    biases = torch.from_numpy(list_biases(centroids, euclidean, margins)) * factor
    list_scores = products(centroids) + biases
    lists = lists[list_scores[lists].argsort(descending=True, stable=True)[: effort.probes]]

    # Score the rows of these lists by their signs, and choose candidates.
    probed = [
        _Rows(segment, slice(*segment["offsets"][number : number + 2]), list_scores[number] - biases[number])
        for number in lists.tolist()
        for segment in segments
    ]
    bits = torch.cat([part.bits for part in probed])
    sums = (2 * bits.long() @ levels - levels.sum()).float()
    bases, row_biases, factors, base_factors = (
        torch.cat([getattr(part, name) for part in probed])
        for name in ("bases", "biases", "factors", "base_factors")
    )
    scores = sums * factors * level_scale + ((bases * base_factors + bases) + row_biases)
    rows = torch.cat([part.rows for part in probed])
    allowed = torch.ones(n_rows, dtype=torch.bool) if keep is None else torch.from_numpy(keep)
    scores = torch.where(allowed[rows], scores, -torch.inf)
    chosen = scores.argsort(descending=True, stable=True)[: effort.candidates]

    # Score them by all bits.
    nbits = probed[0].nbits
    if nbits > 1:
        rest = torch.cat([part.rest for part in probed])[chosen].long() @ query_bytes
        rest = (2 * rest - ((1 << nbits - 1) - 1) * query_bytes.sum()).float() * (byte_scale * 0.5)
        signs = sums[chosen] * (level_scale * 2.0 ** (nbits - 2))
        factor, base_factor = torch.cat([part.level_factors for part in probed])[chosen].T
        own = bases[chosen]
        better = (signs + rest) * factor + (own * base_factor + own) + row_biases[chosen]
        scores[chosen] = torch.where(scores[chosen].isfinite(), better, -torch.inf)
        chosen = chosen[scores[chosen].argsort(descending=True, stable=True)[: effort.refined]]

    # Score them by the kept rows, or by the vectors that codes of more than a bit stand for.
    chosen = chosen[scores[chosen].isfinite()]
    finals = scores[chosen].double()
    if kept is None and nbits > 1:
        codes, own_scales = quantized(rotate(torch.from_numpy(centroids), rotation).numpy())
        table = torch.from_numpy(codes * own_scales[:, None])
        vectors = torch.cat([decode(part.codes, table) for part in probed])[chosen]
        finals = vectors.double() @ values.double() + row_biases[chosen].double()
    if kept is not None:
        mine = torch.from_numpy(kept[rows[chosen].numpy()].astype(np.float64))
        scale = 1 if kept_scales is None else torch.from_numpy(kept_scales)[rows[chosen]].double()
        other = values if kept.dtype == np.int8 else torch.from_numpy(query) * (2 if euclidean else 1)
        finals = mine @ other.double() * scale
        if euclidean:
            finals += row_biases[chosen].double()
    length = float(np.square(query, dtype=np.float64).sum())
    if euclidean:
        finals = finals - length
    order = np.lexsort((rows[chosen].numpy(), -finals.numpy()))[:k]
    return rows[chosen].numpy()[order].astype(np.int64), finals.numpy()[order]


class _Rows:
    """The rows of a list in a segment."""

    def __init__(self, segment: Mapping[str, Array], span: slice, base: Tensor) -> None:
        n = len(segment["rows"])
        signs = unpack_signs(segment["signs"], n)[span]
        self.rows = torch.from_numpy(segment["rows"][span].astype(np.int64))
        self.bits = torch.from_numpy(np.unpackbits(signs, axis=1, bitorder="little"))
        words = segment["factors"][span]
        self.factors, self.base_factors = map(torch.from_numpy, two_floats(words))
        self.biases = torch.from_numpy(segment.get("biases", np.zeros(n, np.float32))[span])
        self.bases, self.nbits = base.expand(len(self.rows)), 1
        if "planes" in segment:
            width = self.bits.shape[1]
            self.nbits = 1 + 8 * segment["planes"].shape[1] // width
            planes = np.unpackbits(segment["planes"][span], axis=1, bitorder="little")
            planes = planes.reshape(len(planes), self.nbits - 1, width)
            rest = (planes << np.arange(self.nbits - 1)[:, None]).sum(1, dtype=np.int64)
            self.rest = torch.from_numpy(rest)
            self.level_factors = torch.from_numpy(np.stack(two_floats(segment["level_factors"][span]), 1))
            self.codes = codes_at(segment, np.arange(span.start, span.stop))


def _length(query: Array) -> float:
    """Return the length of a query, as the machine code adds it up."""
    numbers = np.zeros(-(-len(query) // 16) * 16, np.float32)
    numbers[: len(query)] = query * query
    sums = numbers[:16].copy()
    for start in range(16, len(numbers), 16):
        sums += numbers[start : start + 16]
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return float(np.sqrt(sums[0]))


def _rounded(values: Tensor, most: Tensor, highest: int) -> tuple[Tensor, Tensor]:
    """Multiply numbers so that ``most`` becomes ``highest``, and round them; return their scale, too."""
    limit = torch.full_like(most, highest)
    factor = limit / most if most > 1e-30 else torch.zeros_like(most)  # highest / most would round twice
    return (values * factor).round().long(), most / highest
