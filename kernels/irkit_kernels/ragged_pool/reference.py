"""The definition of mean pooling over windows of ragged sequences, with the backward written out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["pool_backward", "pool_forward", "ragged_pool_reference"]


def pool_forward(values: Tensor, offsets: Tensor, kernel: int, stride: int) -> Tensor:
    """Compute the mean of each window of ``values (t, d)``; sums are float32 (float64 for float64)."""
    x = values.to(torch.promote_types(values.dtype, torch.float32))
    means = [x[start:stop].mean(0) for start, stop in _windows(offsets, kernel, stride)]
    return (torch.stack(means) if means else x[:0]).to(values.dtype)


def pool_backward(grad: Tensor, offsets: Tensor, kernel: int, stride: int) -> Tensor:
    """Compute the gradient of the values ``(t, d)``: each window adds an equal share to its tokens."""
    g = grad.to(torch.promote_types(grad.dtype, torch.float32))
    result = g.new_zeros(int(offsets[-1]), g.shape[1])
    for row, (start, stop) in zip(g, _windows(offsets, kernel, stride), strict=True):
        result[start:stop] += row / (stop - start)
    return result.to(grad.dtype)


def ragged_pool_reference(values: Tensor, offsets: Tensor, kernel: int, stride: int) -> Tensor:
    """Compute `op.ragged_pool` for any floating point dtype on the CPU, slowly."""
    return _Reference.apply(values, offsets, kernel, stride)  # type: ignore[no-untyped-call]


class _Reference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, *arguments: Any) -> Tensor:
        ctx.arguments = arguments
        return pool_forward(values, *arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return pool_backward(grad, *ctx.arguments), None, None, None


def _windows(offsets: Tensor, kernel: int, stride: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of every window; the end of the sequence may cut the last one."""
    for first, end in pairwise(offsets.tolist()):
        for start in range(first, end, stride):
            yield start, min(start + kernel, end)
            if start + kernel >= end:
                break
