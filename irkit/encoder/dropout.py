"""Dropout that draws fewer random bits than torch does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_DRAWS = 1 << 16  # numbers that a draw of dropout tells apart


class Dropout(nn.Dropout):
    """Drops out numbers as torch does, at a quarter of torch's cost on a CPU.

    On a CPU the probability is rounded to a multiple of 1/65536: random bits are drawn 64 at a time, and 16
    bits decide about each number.

    Examples:
        >>> Dropout(0.5).eval()(torch.ones(3))
        tensor([1., 1., 1.])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Set a share ``p`` of the numbers to zero, in training; multiply the others by ``1 / (1 - p)``."""
        if not self.training:
            return input
        if not 0 < self.p < 1 or not input.is_cpu or torch.compiler.is_compiling():
            return super().forward(input)
        return _Dropped.apply(input, self.p)  # type: ignore[no-any-return, no-untyped-call]


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        count = x.numel()
        draws = torch.empty(-(-count // 4), dtype=torch.int64, device="cpu").random_(-(2**63), None)
        bits = draws.view(torch.int16)[:count].view(x.shape)
        mask = bits >= round(p * _DRAWS) - _DRAWS // 2
        ctx.save_for_backward(mask)
        ctx.factor = 1 / (1 - p)
        return x * mask.to(x.dtype).mul_(ctx.factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return grad * mask.to(grad.dtype).mul_(ctx.factor), None
