"""The definition of pooling over windows of ragged sequences, with the backward written out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["pool_backward", "pool_forward", "ragged_pool_reference"]


def pool_forward(values: Tensor, offsets: Tensor, kernel: int, stride: int) -> Tensor:
    """Mean of each window of ``values (t, d)``, sums in float32 (of float64: float64)."""
    x = values.to(torch.promote_types(values.dtype, torch.float32))
    means = [x[start:stop].mean(0) for start, stop in _windows(offsets, kernel, stride)]
    return (torch.stack(means) if means else x[:0]).to(values.dtype)


def pool_backward(grad: Tensor, offsets: Tensor, kernel: int, stride: int) -> Tensor:
    """Gradient of the values ``(t, d)``: a window hands each of its tokens an equal part of its own."""
    g = grad.to(torch.promote_types(grad.dtype, torch.float32))
    result = g.new_zeros(int(offsets[-1]), g.shape[1])
    for row, (start, stop) in zip(g, _windows(offsets, kernel, stride), strict=True):
        result[start:stop] += row / (stop - start)
    return result.to(grad.dtype)


def ragged_pool_reference(values: Tensor, offsets: Tensor, kernel: int, stride: int) -> Tensor:
    """What `op.ragged_pool` computes, for any floating point dtype on the CPU."""
    return _Reference.apply(values, offsets, kernel, stride)  # type: ignore[no-any-return, no-untyped-call]


class _Reference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, *arguments: Any) -> Tensor:
        ctx.arguments = arguments
        return pool_forward(values, *arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return pool_backward(grad, *ctx.arguments), None, None, None


def _windows(offsets: Tensor, kernel: int, stride: int) -> Iterator[tuple[int, int]]:
    """First token and the one after the last of every window; the last may be cut by the end."""
    for first, end in pairwise(offsets.tolist()):
        for start in range(first, end, stride):
            yield start, min(start + kernel, end)
            if start + kernel >= end:
                break
