"""The definition of `rotary` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotary_reference"]


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """See `rotary`; any width of heads that is even, and any type."""
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    parts = [a * cos - b * sin, b * cos + a * sin]
    return torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
