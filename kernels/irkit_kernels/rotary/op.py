"""Rotate the halves of every head by the angles of its token, in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fits_rotary", "rotary"]

_LANES = 16


def fits_rotary(x: Tensor) -> bool:
    """Return whether `rotary` takes ``x (n, heads, d)``.

    It must be float32 on the CPU, with d a multiple of 32, and without gaps but from one n to the next.
    """
    return (
        x.is_cpu
        and x.dtype == torch.float32
        and x.dim() == 3
        and x.shape[-1] % (2 * _LANES) == 0
        and x.stride(2) == 1
        and x.stride(1) == x.shape[2]
    )


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate number i and number ``i + d / 2`` of every head as a pair (Su et al. 2021, section 3.4.2).

    The call uses `torch.get_num_threads` threads and releases the interpreter lock.

    Args:
        x: ``(n, heads, d)``, as `fits_rotary` wants it.
        cos: ``(n, 1, d / 2)`` float32, contiguous: cosines of the angles.
        sin: As ``cos``: their sines.

    Returns:
        ``(n, heads, d)``, contiguous.

    Raises:
        RuntimeError: ``x`` requires a gradient, which this kernel does not compute.
        TypeError: A tensor is not float32.
        ValueError: A tensor is not on the CPU, or shapes or strides do not fit.

    Examples:
        >>> x = torch.eye(32)[:1, None]
        >>> quarter = torch.full((1, 1, 16), torch.pi / 2)
        >>> int(rotary(x, quarter.cos(), quarter.sin()).argmax())
        16
    """
    from .cpu_rotate import rotate

    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError("rotary: has no gradient; call it under torch.no_grad() or inference_mode()")
    if any(part.dtype != torch.float32 for part in (x, cos, sin)):
        raise TypeError(f"rotary: got {x.dtype}, {cos.dtype} and {sin.dtype}; expected float32")
    if not fits_rotary(x):
        raise ValueError(
            f"rotary: got x {tuple(x.shape)} with strides {x.stride()} on {x.device}, expected (n, heads, d) "
            f"on the CPU, d a multiple of {2 * _LANES}, without gaps between heads; call contiguous() first"
        )
    angles = len(x), 1, x.shape[2] // 2
    if not all(part.is_cpu and part.shape == angles and part.is_contiguous() for part in (cos, sin)):
        raise ValueError(f"rotary: cos and sin must be contiguous on the CPU and have shape {angles}")
    out = torch.empty(x.shape)
    rotate(x, cos, sin, out)
    return out
