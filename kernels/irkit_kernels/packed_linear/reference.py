"""The definition of the packed linear layer in plain torch: slow, with exact sums in int8."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["ACTIVATIONS", "bfloat16_reference", "int8_reference", "quantize_rows", "quantize_weight"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of ``weight (n, k)`` to ``scale * q`` with q in -127..127.

    Returns:
        ``q (n, k)`` int8 and ``scale (n,)`` float32.
    """
    scale = weight.float().abs().amax(1) / 127
    q = weight.float() / torch.where(scale > 0, scale, 1)[:, None]
    return q.round().clamp(-127, 127).to(torch.int8), scale


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round each row of ``x (m, k)`` to ``scale * (q - zero)`` with q in 0..255; 0 stays 0 exactly.

    Returns:
        ``q (m, k)`` uint8; ``scale (m,)`` float32, NaN if the row or its span is not finite; and ``zero
        (m,)`` int32.
    """
    low, high = x.amin(1).clamp(max=0), x.amax(1).clamp(min=0)
    span = torch.where(x.isfinite().all(1), high - low, torch.nan)
    inverse = torch.where(span > 1e-30, torch.full_like(span, 255) / span, 0)  # 255 / span rounds twice
    zero = (-low * inverse).nan_to_num().round()
    q = (x * inverse[:, None]).nan_to_num().round() + zero[:, None]
    scale = torch.where(span.isfinite(), span / 255, torch.nan)
    return q.clamp(0, 255).to(torch.uint8), scale, zero.int()


def int8_reference(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
) -> Tensor:
    """Compute ``activation(x' @ (scale * weight).T + bias)`` in float64, x' being x after `quantize_rows`.

    Args:
        x: ``(m, k)`` float32.
        weight: ``(n, k)`` int8.
        scale: ``(n,)`` float32.
        bias: ``(n,)``.
        activation: none, gelu (the exact one, with erf), gelu_tanh or silu.
        gated: Whether the second half of the features multiplies the first, which is activated.

    Returns:
        ``(m, n)`` float64, or ``(m, n / 2)`` if gated.
        The sums over k are exact, because they are sums of integers below 2^53.
    """
    q, row_scale, zero = quantize_rows(x)
    sums = (q.double() - zero.double()[:, None]) @ weight.double().T
    return _finish(sums * row_scale.double()[:, None] * scale.double(), bias, activation, gated)


def bfloat16_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none", gated: bool = False
) -> Tensor:
    """Compute the same with ``x`` and ``weight`` rounded to bfloat16; the result is float64, too."""
    sums = x.bfloat16().double() @ weight.bfloat16().double().T
    return _finish(sums, bias, activation, gated)


def _finish(y: Tensor, bias: Tensor | None, activation: str, gated: bool) -> Tensor:
    y = y if bias is None else y + bias.double()
    y, gate = y.chunk(2, 1) if gated else (y, None)
    y = ACTIVATIONS[activation](y)
    return y if gate is None else y * gate
