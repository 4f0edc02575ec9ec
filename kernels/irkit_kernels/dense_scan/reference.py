"""The definition of codes and bounds, in torch; the machine code keeps the same rows or fewer.

A row d is stored as bytes c with a scale s, and a query q is rounded to bytes u with a scale t. With
d' = s (c - 128), e = d - d' and f = q - t u,

    q . d  =  t u . d'  +  f . d'  +  q . e,

and by Cauchy and Schwarz the last two are at most |f| |d'| + |q| |e|. So three numbers per row, the scale s,
the margin |e| and the norm |d'|, tell how far the score of the bytes may be from the true one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["CHUNK", "Codes", "Rounded", "candidates", "encode", "round_queries"]

CHUNK = 64  # codes are padded to whole chunks
_ROWS = 2048  # encoded together: so many stay in the cache
_TINY = 1e-17  # numbers whose squares float32 cannot hold have lengths below this


class Codes(NamedTuple):
    """Rows in 8 bits per dimension.

    Attributes:
        codes: ``(n, width)`` uint8; 128 stands for 0, and pads.
        scales: ``(n,)`` float32.
        margins: ``(n,)`` float32, upper bounds of the length of a row less its decoded row: ``|e|``.
        norms: ``(n,)`` float32, upper bounds of the length of the decoded row: ``|d'|``.
    """

    codes: Tensor
    scales: Tensor
    margins: Tensor
    norms: Tensor


class Rounded(NamedTuple):
    """Queries in 8 bits per dimension.

    Attributes:
        bytes: ``(n_q, width)`` int8.
        scales: ``(n_q,)`` float32.
        lengths: ``(n_q,)`` float32, which the margins of rows are multiplied with: ``|q|`` and rounding.
        errors: ``(n_q,)`` float32, which the norms of rows are multiplied with: ``|f|`` and rounding.
    """

    bytes: Tensor
    scales: Tensor
    lengths: Tensor
    errors: Tensor


def encode(values: Tensor) -> Codes:
    """Return the codes of rows ``(n, dim)`` float32."""
    starts = range(0, max(1, len(values)), _ROWS)
    parts = [_encode(values[start : start + _ROWS]) for start in starts]
    return Codes(*(torch.cat(arrays) for arrays in zip(*parts, strict=True)))


def _encode(values: Tensor) -> tuple[Tensor, ...]:
    numbers, scales = _round(values)
    padding = -values.shape[1] % CHUNK
    codes = torch.nn.functional.pad((numbers + 128).to(torch.uint8), (0, padding), value=128)
    meant = numbers.mul_(scales[:, None])
    # float32 rounds what is computed here, and squares of small numbers to 0
    slack = 1 + (values.shape[1] + 8) * 2.0**-23
    norms = meant.norm(dim=1) * slack + _TINY
    margins = (values - meant).norm(dim=1) * slack + norms * 2.0**-23 + _TINY
    return codes, scales, margins, norms


def round_queries(queries: Tensor) -> Rounded:
    """Return queries ``(n_q, dim)`` float32 in 8 bits.

    ``lengths`` and ``errors`` also cover the rounding of float32: a sum of ``dim`` products is off by at most
    ``dim 2^-24 |q| |d|``, in the search as well as in the exact scores that it is compared with.
    """
    numbers, scales = _round(queries)
    slack = (queries.shape[1] + 8) * 2.0**-23
    lengths = queries.double().norm(dim=1)
    errors = (queries.double() - (numbers * scales[:, None]).double()).norm(dim=1)
    padded = torch.nn.functional.pad(numbers.to(torch.int8), (0, -queries.shape[1] % CHUNK))
    most = lengths * (1 + slack) + _TINY
    return Rounded(padded.contiguous(), scales, most.float(), (errors + slack * lengths).float())


def candidates(codes: Codes, queries: Tensor, k: int, keep: Tensor | None = None) -> list[Tensor]:
    """Return, for each query, the rows that may be among the best ``k`` by their bounds, ascending.

    Args:
        codes: Codes of ``n`` rows.
        queries: ``(n_q, dim)`` float32.
        k: At least 1, at most the number of rows that may be found.
        keep: ``(n,)`` bool: rows that may be found; None means all.
    """
    rounded = round_queries(queries)
    products = rounded.bytes.double() @ (codes.codes.double() - 128).T
    scores = products * rounded.scales.double()[:, None] * codes.scales.double()
    bounds = rounded.lengths[:, None] * codes.margins + rounded.errors[:, None] * codes.norms
    least, most = scores - bounds, scores + bounds
    if keep is not None:
        least[:, ~keep], most[:, ~keep] = -torch.inf, -torch.inf
    threshold = least.topk(k, dim=1).values[:, -1:]
    return [row.nonzero()[:, 0] for row in most >= threshold]


def _round(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers from -127 to 127, as float32, and the scales of rows."""
    scales = values.abs().amax(1) / 127 if values.shape[1] else values.new_zeros(len(values))
    scales = torch.where(scales > 0, scales, 1)
    return (values / scales[:, None]).round().clamp(-127, 127), scales
