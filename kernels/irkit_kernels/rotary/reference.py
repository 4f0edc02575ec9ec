"""The definition of `rotary` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotary_reference"]


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `rotary`; any width of heads that is even, and any type."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
