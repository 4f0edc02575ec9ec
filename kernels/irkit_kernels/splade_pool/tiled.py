"""Pooling in plain torch, one tile of the vocabulary at a time.

Used for sums and their gradients, on machines without llvmlite, and to make sparse rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from .reference import activate, slope

__all__ = ["forward", "sparse_rows", "sum_backward", "tiles_of"]

_TILE = 1 << 22  # numbers per tile


def forward(
    hidden: Tensor,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    pooling: str,
    with_argmax: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute weights ``(n, v)`` and argmax like `reference.pool_forward`."""
    n, v = len(offsets) - 1, len(weight)
    with_argmax = with_argmax and pooling == "max"
    out = hidden.new_zeros(n, v, dtype=torch.float32)
    argmax = torch.full((n if with_argmax else 0, v), -1, dtype=torch.int32, device=hidden.device)
    ends, hidden = offsets.tolist(), hidden.float()
    for terms in tiles_of(v, len(hidden)):
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
    """Compute the gradients of hidden, weight and bias from the gradients of sums; recomputes logits."""
    dtype = hidden.dtype if hidden.is_cuda else torch.float32  # a GPU adds products in float32 in any case
    x, lengths = hidden.to(dtype), offsets.diff()
    rows = torch.repeat_interleave(
        torch.arange(len(lengths), device=hidden.device), lengths, output_size=len(x)
    )
    d_hidden, d_weight = torch.zeros_like(x, dtype=torch.float32), torch.empty_like(weight)
    d_bias = torch.empty_like(weight[:, 0] if bias is None else bias)
    for terms in tiles_of(len(weight), len(x)):
        w = weight[terms].to(hidden.dtype).to(dtype)
        logits = _product(x, w.T)
        if bias is not None:
            logits += bias[terms]
        by_logit = slope(activate(logits, activation), activation).mul_(grad[rows, terms])
        d_bias[terms] = by_logit.sum(0)
        d_hidden += _product(by_logit.to(dtype), w)
        d_weight[terms] = _product(by_logit.to(dtype).T, x)
    return d_hidden.to(hidden.dtype), d_weight, d_bias


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices; return float32: a logit rounded before the bias is added could change its sign."""
    return a @ b if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)


def sparse_rows(
    weights_of: Callable[[slice], Tensor],
    n: int,
    tiles: Iterable[slice],
    threshold: float,
    top_k: int | None,
    excluded: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Select the terms above the threshold, at most ``top_k`` per row.

    Args:
        weights_of: Returns the weights ``(n, terms)`` of a range of terms.
        n: Rows.
        tiles: Ranges of all terms, in order, see `tiles_of`.
        threshold: See `op.splade_pool_sparse`.
        top_k: See `op.splade_pool_sparse`.
        excluded: Terms that are left out.

    Returns:
        The number of terms per row ``(n,)``; the terms ``(nnz,)``, ascending within a row; and their weights.
    """
    parts = []  # (rows, terms, weights), each in the order of the rows
    best = terms_of_best = None
    for terms in tiles:
        weights = weights_of(terms)
        excluded_here = excluded[(excluded >= terms.start) & (excluded < terms.stop)] - terms.start
        weights.index_fill_(1, excluded_here, 0)
        if top_k is None:
            parts.append(_above(weights, threshold, terms.start))
            continue
        # keep the best of this tile and of all tiles before
        numbers = torch.arange(terms.start, terms.stop, device=weights.device).expand_as(weights)
        if best is not None and terms_of_best is not None:
            weights, numbers = torch.cat([best, weights], 1), torch.cat([terms_of_best, numbers], 1)
        best, terms_of_best = _largest(weights, numbers, top_k)
    if best is not None and terms_of_best is not None:
        rows, columns, weights = _above(best, threshold, 0)
        parts.append((rows, terms_of_best[rows, columns], weights))
    # join the parts, row by row
    rows, row_terms, weights = (torch.cat(part) for part in zip(*parts, strict=True))
    if len(parts) > 1:
        rows, order = rows.sort(stable=True)
        row_terms, weights = row_terms[order], weights[order]
    return rows.bincount(minlength=n), row_terms, weights


def _above(weights: Tensor, threshold: float, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, terms (counted from ``first``) and values of the weights above the threshold, or NaN."""
    rows, columns = (~(weights <= threshold)).nonzero(as_tuple=True)
    return rows, columns + first, weights[rows, columns]


def _largest(weights: Tensor, numbers: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest weights of each row in their old order; among equal ones the first."""
    n, size = weights.shape
    if size <= k:
        return weights, numbers
    keys = weights.nan_to_num(nan=torch.inf, posinf=torch.inf)
    least = keys.topk(k, 1).values[:, -1:]
    selected = keys >= least
    if int(selected.sum()) > n * k:  # several equal the k-th largest: select the first of them
        above, equal = keys > least, keys == least
        selected = above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True)))
    return weights[selected].view(n, k), numbers[selected].view(n, k)


def tiles_of(v: int, numbers: int) -> Iterator[slice]:
    """Yield successive ranges that cover ``v`` terms.

    Args:
        v: Number of terms.
        numbers: Numbers stored per term; a range has at most `_TILE` numbers in all, but never fewer than 64
            terms except at the end.
    """
    step = max(64, _TILE // max(1, numbers))
    for start in range(0, v, step):
        yield slice(start, min(start + step, v))
