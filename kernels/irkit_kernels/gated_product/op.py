"""Activate one half of every row and multiply it by the other half, in one pass over memory on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import ACTIVATIONS

__all__ = ["fits_gated_product", "gated_product"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def fits_gated_product(x: Tensor, activation: str) -> bool:
    """Return whether `gated_product` takes ``x (n, 2 d)``, which must be contiguous floats on CUDA."""
    return (
        x.is_cuda
        and x.dtype in _FLOATS
        and x.dim() == 2
        and x.shape[1] > 0
        and x.shape[1] % 2 == 0
        and x.is_contiguous()
        and activation in ACTIVATIONS
    )


def gated_product(x: Tensor, activation: str, gate_last: bool = False) -> Tensor:
    """Multiply the activated first half of each row by its second half (Shazeer 2020, equations 5 and 6).

    It is computed in float32 and rounded once.

    Args:
        x: ``(n, 2 d)``, as `fits_gated_product` wants it.
        activation: gelu, gelu_tanh, relu or silu.
        gate_last: Whether the second half is activated instead of the first.

    Returns:
        ``(n, d)``, in the dtype of ``x``.

    Raises:
        RuntimeError: ``x`` requires a gradient, which this kernel does not compute.
        ValueError: `fits_gated_product` is false.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError("gated_product: has no gradient; call it under torch.no_grad()")
    if not fits_gated_product(x, activation):
        raise ValueError(
            f"gated_product: got {x.dtype} {tuple(x.shape)} with strides {x.stride()} on {x.device} and "
            f"activation {activation!r}; expected contiguous floats (n, 2 d) on CUDA and one of "
            f"{', '.join(ACTIVATIONS)}"
        )
    from . import triton_kernel

    out = x.new_empty(len(x), x.shape[1] // 2)
    triton_kernel.multiply(x, out, activation, gate_last)
    return out
