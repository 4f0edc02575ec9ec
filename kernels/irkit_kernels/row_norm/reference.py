"""The definition of `row_norm` in plain torch, in float64."""

from __future__ import annotations

from torch import Tensor

__all__ = ["row_norm_reference"]


def row_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    rms: bool = False,
    offset: float = 0.0,
) -> Tensor:
    """See `row_norm`; the result is float64, and nothing is overwritten."""
    x = x.double()
    x = x if rms else x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * (weight.double() + offset)
    return y if bias is None else y + bias.double()
