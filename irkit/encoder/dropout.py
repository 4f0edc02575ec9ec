"""Dropout at a quarter of the cost of torch's on a CPU: 16 random bits per number, drawn 64 at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_VALUES = 1 << 16


class Dropout(nn.Dropout):
    """Dropout as in torch; on a CPU the probability is rounded to a 65536th.

    Examples:
        >>> Dropout(0.5).eval()(torch.ones(3))
        tensor([1., 1., 1.])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Zero some of the numbers in training; the others grow by ``1 / (1 - p)``."""
        if not self.training or not 0 < self.p < 1 or input.device.type != "cpu":
            return super().forward(input)
        if torch.compiler.is_compiling():
            return super().forward(input)
        return _Dropped.apply(input, self.p)  # type: ignore[no-any-return, no-untyped-call]


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        count = x.numel()
        draws = torch.empty(-(-count // 4), dtype=torch.int64, device="cpu").random_(-(2**63), None)
        bits = draws.view(torch.int16)[:count].view(x.shape)
        mask = bits >= round(p * _VALUES) - _VALUES // 2
        ctx.save_for_backward(mask)
        ctx.factor = 1 / (1 - p)
        return x * mask.to(x.dtype).mul_(ctx.factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return grad * mask.to(grad.dtype).mul_(ctx.factor), None
