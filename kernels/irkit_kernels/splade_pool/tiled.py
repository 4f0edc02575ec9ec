"""Pooling tile by tile of the vocabulary in plain torch: sums, and what has no faster code; sparse rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from .reference import activate, slope

__all__ = ["forward", "sparse_rows", "sum_backward"]

_TILE = 1 << 22  # numbers in a tile


def forward(
    hidden: Tensor,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    pooling: str,
    with_argmax: bool = True,
) -> tuple[Tensor, Tensor]:
    """Weights ``(n, v)`` and argmax as `reference.pool_forward`."""
    n, v = len(offsets) - 1, len(weight)
    with_argmax = with_argmax and pooling == "max"
    out = hidden.new_zeros(n, v, dtype=torch.float32)
    argmax = torch.full((n if with_argmax else 0, v), -1, dtype=torch.int32, device=hidden.device)
    ends, hidden = offsets.tolist(), hidden.float()
    for terms in _tiles(v, len(hidden)):
        logits = F.linear(hidden, weight[terms].float(), None if bias is None else bias[terms].float())
        if pooling == "sum":
            activate(logits, activation)
        for i, (start, stop) in enumerate(pairwise(ends)):
            if start == stop:
                continue
            part = logits[start:stop]
            if pooling == "sum":
                torch.sum(part, 0, out=out[i, terms])
            elif with_argmax:
                best = part.argmax(0)
                argmax[i, terms] = start + best
                out[i, terms] = part.gather(0, best[None])[0]
            else:
                torch.amax(part, 0, out=out[i, terms])
    return (out if pooling == "sum" else activate(out, activation)), argmax


def sum_backward(
    grad: Tensor, hidden: Tensor, offsets: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias from that of sums ``(n, v)``; logits are computed anew."""
    dtype = hidden.dtype if hidden.is_cuda else torch.float32  # products on a GPU are added in float32 anyway
    x, lengths = hidden.to(dtype), offsets.diff()
    rows = torch.repeat_interleave(
        torch.arange(len(lengths), device=hidden.device), lengths, output_size=len(x)
    )
    d_hidden, d_weight = torch.zeros_like(x, dtype=torch.float32), torch.empty_like(weight)
    d_bias = torch.empty_like(weight[:, 0] if bias is None else bias)
    for terms in _tiles(len(weight), len(x)):
        w = weight[terms].to(hidden.dtype).to(dtype)
        logits = F.linear(x, w).float()
        if bias is not None:
            logits += bias[terms]
        by_logit = slope(activate(logits, activation), activation).mul_(grad[rows, terms])
        d_bias[terms] = by_logit.sum(0)
        d_hidden += by_logit.to(dtype) @ w
        d_weight[terms] = by_logit.to(dtype).T @ x
    return d_hidden.to(hidden.dtype), d_weight, d_bias


def sparse_rows(
    weights_of: Callable[[slice], Tensor],
    n: int,
    v: int,
    threshold: float,
    top_k: int | None,
    excluded: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Terms above the threshold, at most ``top_k`` of a row, from ``weights_of(terms) (n, terms)``.

    Returns:
        Terms of each row ``(n,)``, terms ``(nnz,)``, ascending within a row, and their weights.
    """
    kept = []  # parts of (row, term, weight), each in the order of the rows
    best = terms_of_best = None
    for terms in _tiles(v, n):
        weights = weights_of(terms)
        here = excluded[(excluded >= terms.start) & (excluded < terms.stop)] - terms.start
        weights.index_fill_(1, here, 0)
        if top_k is None:
            kept.append(_above(weights, threshold, terms.start))
            continue
        numbers = torch.arange(terms.start, terms.stop, device=weights.device).expand_as(weights)
        if best is not None and terms_of_best is not None:
            weights, numbers = torch.cat([best, weights], 1), torch.cat([terms_of_best, numbers], 1)
        best, terms_of_best = _largest(weights, numbers, top_k)
    if best is not None and terms_of_best is not None:
        rows, places, weights = _above(best, threshold, 0)
        kept.append((rows, terms_of_best[rows, places], weights))
    rows, found, weights = (torch.cat(part) for part in zip(*kept, strict=True))
    if len(kept) > 1:
        rows, order = rows.sort(stable=True)
        found, weights = found[order], weights[order]
    return rows.bincount(minlength=n), found, weights


def _above(weights: Tensor, threshold: float, first: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, places = (~(weights <= threshold)).nonzero(as_tuple=True)
    return rows, places + first, weights[rows, places]


def _largest(weights: Tensor, numbers: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row in their old order; of equals the first."""
    n, size = weights.shape
    if size <= k:
        return weights, numbers
    keys = weights.nan_to_num(nan=torch.inf, posinf=torch.inf)
    least = keys.topk(k, 1).values[:, -1:]
    take = keys >= least
    if int(take.sum()) > n * k:  # of equals the first
        above, equal = keys > least, keys == least
        take = above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True)))
    return weights[take].view(n, k), numbers[take].view(n, k)


def _tiles(v: int, numbers: int) -> Iterator[slice]:
    """Ranges of terms, so that a tile of ``numbers`` a term is no larger than `_TILE`, or has 64 terms."""
    step = max(64, _TILE // max(1, numbers))
    for start in range(0, v, step):
        yield slice(start, min(start + step, v))
