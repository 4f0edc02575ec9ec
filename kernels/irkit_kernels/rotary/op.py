"""Rotate the halves of every head by the angles of its token, in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fits_rotary", "rotary"]

_LANES = 16
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # on CUDA


def fits_rotary(x: Tensor, interleaved: bool = False) -> bool:
    """Return whether `rotary` takes ``x (n, heads, d)``.

    It must be float32 on the CPU, with d a multiple of 32 and pairs half a head apart; or float32, bfloat16
    or float16 on CUDA, with d even. There may be gaps from one n to the next, but no others.
    """
    if x.is_cpu:
        able = x.dtype == torch.float32 and not interleaved and x.shape[-1] % (2 * _LANES) == 0
    else:
        able = x.is_cuda and x.dtype in _FLOATS and x.shape[-1] % 2 == 0
    return able and x.dim() == 3 and x.shape[-1] > 0 and x.stride(2) == 1 and x.stride(1) == x.shape[2]


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate number i and number ``i + d / 2`` of every head as a pair (Su et al. 2021, section 3.4.2).

    The call uses CUDA, or `torch.get_num_threads` threads and releases the interpreter lock. It computes in
    float32.

    Args:
        x: ``(n, heads, d)``, as `fits_rotary` wants it.
        cos: ``(n, 1, d / 2)`` float32, contiguous: cosines of the angles.
        sin: As ``cos``: their sines.
        interleaved: Whether a pair is two neighbouring numbers, which only CUDA offers.

    Returns:
        ``(n, heads, d)``, contiguous, in the dtype of ``x``.

    Raises:
        RuntimeError: ``x`` requires a gradient, which this kernel does not compute.
        TypeError: ``x`` on the CPU, ``cos`` or ``sin`` is not float32, or ``x`` on CUDA is not a float.
        ValueError: Tensors are on other devices, or shapes, strides or pairs do not fit.

    Examples:
        >>> x = torch.eye(32)[:1, None]
        >>> quarter = torch.full((1, 1, 16), torch.pi / 2)
        >>> int(rotary(x, quarter.cos(), quarter.sin()).argmax())
        16
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError("rotary: has no gradient; call it under torch.no_grad() or inference_mode()")
    kinds = _FLOATS if x.is_cuda else (torch.float32,)
    if x.dtype not in kinds or any(part.dtype != torch.float32 for part in (cos, sin)):
        raise TypeError(
            f"rotary: got {x.dtype}, {cos.dtype} and {sin.dtype}; expected float32, x on CUDA any float"
        )
    if not fits_rotary(x, interleaved):
        raise ValueError(
            f"rotary: got x {tuple(x.shape)} with strides {x.stride()} on {x.device}; expected "
            "(n, heads, d) without gaps between heads (call contiguous() first), on the CPU d a multiple of "
            f"{2 * _LANES} and pairs half a head apart, on CUDA d even"
        )
    angles = len(x), 1, x.shape[2] // 2
    for part in (cos, sin):
        if part.device != x.device or part.shape != angles or not part.is_contiguous():
            raise ValueError(
                f"rotary: cos and sin must be contiguous on {x.device} and have shape {angles}, got "
                f"{tuple(part.shape)} on {part.device}"
            )
    out = x.new_empty(x.shape)
    if x.is_cuda:
        from . import triton_kernel

        triton_kernel.rotate(x, cos, sin, out, interleaved)
    else:
        from .cpu_rotate import rotate

        rotate(x, cos, sin, out)
    return out
