"""The definition of pooled vocabulary weights of ragged sequences, with the backward written out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ACTIVATIONS",
    "POOLINGS",
    "activate",
    "pool_backward",
    "pool_forward",
    "slope",
    "splade_pool_reference",
]

ACTIVATIONS = ("log1p_relu", "log1p_log1p_relu", "relu")
POOLINGS = ("max", "sum")


def activate(logits: Tensor, activation: str) -> Tensor:
    """Apply the activation to logits, in place: relu, then log1p once, twice or not at all."""
    weights = logits.relu_()
    for _ in range(activation.count("log1p")):
        weights = weights.log1p_()
    return weights


def slope(weights: Tensor, activation: str) -> Tensor:
    """Compute the derivative of the activation from its value; it is 0 at 0, like the one of torch's relu."""
    inner = torch.zeros_like(weights)  # log of the product of all factors 1 + x under a logarithm
    x = weights
    for _ in range(activation.count("log1p")):
        inner = inner + x
        x = x.expm1()
    return torch.where(weights == 0, 0, (-inner).exp())


def pool_forward(
    hidden: Tensor, offsets: Tensor, weight: Tensor, bias: Tensor | None, activation: str, pooling: str
) -> tuple[Tensor, Tensor]:
    """Compute the maximum or the sum of the activated logits over the tokens of each sequence.

    A sequence without tokens has weights 0. NaN is larger than all numbers; among equal logits the first is
    the maximum.

    Args:
        hidden: ``(t, d)`` floating point.
        offsets: ``(n + 1,)``; sequence ``i`` is ``hidden[offsets[i]:offsets[i + 1]]``.
        weight: ``(v, d)``.
        bias: ``(v,)`` or None.
        activation: One of `ACTIVATIONS`.
        pooling: One of `POOLINGS`.

    Returns:
        The weights ``(n, v)`` in float32 (float64 for float64). And argmax: for maxima ``(n, v)`` int32, the
        row of ``hidden`` of each maximum, -1 without tokens; for sums an empty tensor ``(0, v)``.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    n, v = len(offsets) - 1, len(weight)
    out = torch.zeros(n, v, dtype=dtype)
    argmax = torch.full((n if pooling == "max" else 0, v), -1, dtype=torch.int32)
    for i, (start, stop) in enumerate(_sequences(offsets)):
        if start == stop:
            continue
        logits = _logits(hidden[start:stop], weight, bias)
        if pooling == "sum":
            out[i] = activate(logits, activation).sum(0)
            continue
        best = logits.argmax(0)
        out[i] = activate(logits.gather(0, best[None])[0], activation)
        argmax[i] = start + best
    return out, argmax


def pool_backward(
    grad: Tensor,
    hidden: Tensor,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    argmax: Tensor,
    activation: str,
    pooling: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of hidden, weight and bias from ``grad (n, v)`` and the results of the forward.

    A maximum is the activation of one logit, at token ``argmax``; a sum adds the activations of all tokens.
    """
    dtype = grad.dtype
    x, w = hidden.to(dtype), weight.to(dtype)
    d_hidden, d_weight, d_bias = torch.zeros_like(x), torch.zeros_like(w), torch.zeros_like(w[:, 0])
    for i, (start, stop) in enumerate(_sequences(offsets)):
        if start == stop:
            continue
        if pooling == "max":
            by_term = grad[i] * slope(weights[i].to(dtype), activation)
            tokens = argmax[i].long()
            d_hidden.index_add_(0, tokens, by_term[:, None] * w)
            d_weight += by_term[:, None] * x[tokens]
            d_bias += by_term
        else:
            logits = _logits(x[start:stop], w, None if bias is None else bias.to(dtype))
            by_logit = grad[i] * slope(activate(logits, activation), activation)
            d_hidden[start:stop] = by_logit @ w
            d_weight += by_logit.T @ x[start:stop]
            d_bias += by_logit.sum(0)
    bias_dtype = dtype if bias is None else bias.dtype
    return d_hidden.to(hidden.dtype), d_weight.to(weight.dtype), d_bias.to(bias_dtype)


def splade_pool_reference(
    hidden: Tensor,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "log1p_relu",
    pooling: str = "max",
) -> Tensor:
    """Compute `op.splade_pool` for any floating point dtype on the CPU, slowly."""
    arguments = (hidden, offsets, weight, bias, activation, pooling)
    return _Reference.apply(*arguments)  # type: ignore[no-untyped-call]


class _Reference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.arguments = arguments
        weights, argmax = pool_forward(*arguments)
        ctx.results = weights, argmax
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, offsets, weight, bias, *names = ctx.arguments
        weights, argmax = ctx.results
        d_hidden, d_weight, d_bias = pool_backward(
            grad, hidden, offsets, weight, bias, weights, argmax, *names
        )
        return d_hidden, None, d_weight, None if bias is None else d_bias, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(dtype) @ weight.to(dtype).T
    return logits if bias is None else logits + bias.to(dtype)


def _sequences(offsets: Tensor) -> Iterator[tuple[int, int]]:
    return pairwise(offsets.tolist())
