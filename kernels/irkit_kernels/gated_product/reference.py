"""The definition of `gated_product` in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

__all__ = ["ACTIVATIONS", "gated_product_reference"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def gated_product_reference(x: Tensor, activation: str, gate_last: bool = False) -> Tensor:
    """See `gated_product`; any float."""
    first, second = x.chunk(2, dim=-1)
    act = ACTIVATIONS[activation]
    return act(second) * first if gate_last else act(first) * second
