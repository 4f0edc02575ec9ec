"""LayerNorm or RMSNorm of every row, in one pass over memory, optionally of the sum of two tensors."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fits_row_norm", "row_norm"]


def fits_row_norm(x: Tensor) -> bool:
    """Return whether `row_norm` takes ``x``, ``(n, d)`` or ``(n, heads, d)``.

    It must be float32 on the CPU, with d > 0, and without gaps but from one n to the next.
    """
    return (
        x.is_cpu
        and x.dtype == torch.float32
        and x.dim() in (2, 3)
        and x.shape[-1] > 0
        and x.stride(-1) == 1
        and (x.dim() == 2 or x.stride(1) == x.shape[-1])
    )


def row_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    rms: bool = False,
    offset: float = 0.0,
    added: Tensor | None = None,
    keep_sum: bool = False,
) -> Tensor:
    """Normalise the last dimension of ``x``, or of ``x + added``, and multiply by weights.

    A row is divided by its root mean square, or, unless ``rms``, is moved to mean 0 and divided by its
    standard deviation (Ba et al. 2016, section 3; Zhang and Sennrich 2019, section 4). The call uses
    `torch.get_num_threads` threads and releases the interpreter lock.

    Args:
        x: ``(n, d)`` or ``(n, heads, d)``, as `fits_row_norm` wants it.
        weight: ``(d,)`` float32; None is 1.
        bias: ``(d,)`` float32; None is 0.
        eps: Added to the mean square or the variance.
        rms: Whether to divide by the root mean square.
        offset: Added to the weights.
        added: A tensor as ``x``, both without gaps. It is overwritten: by the result, which is returned, or
            by ``x + added`` if ``keep_sum``.
        keep_sum: Whether ``added`` becomes the sum.

    Returns:
        Of the shape of ``x``, contiguous; ``added`` itself unless it keeps the sum.

    Raises:
        RuntimeError: An input requires a gradient, which this kernel does not compute.
        TypeError: A tensor is not float32.
        ValueError: A tensor is not on the CPU, or shapes or strides do not fit.

    Examples:
        >>> row_norm(torch.tensor([[3.0, 4.0]]), eps=0.0, rms=True)
        tensor([[0.8485, 1.1314]])
    """
    from .cpu_rows import normalize

    tensors = [part for part in (x, weight, bias, added) if part is not None]
    if torch.is_grad_enabled() and any(part.requires_grad for part in tensors):
        raise RuntimeError("row_norm: has no gradient; call it under torch.no_grad() or inference_mode()")
    if any(part.dtype != torch.float32 for part in tensors):
        raise TypeError(f"row_norm: got {', '.join(str(part.dtype) for part in tensors)}; expected float32")
    if not all(part.is_cpu for part in tensors):
        raise ValueError("row_norm: runs on the CPU, got a tensor on another device")
    if not fits_row_norm(x):
        raise ValueError(
            f"row_norm: got x {tuple(x.shape)} with strides {x.stride()}, expected (n, d) or (n, heads, d), "
            "d > 0, without gaps between heads; call contiguous() first"
        )
    width = x.shape[-1]
    if any(part.shape != (width,) or not part.is_contiguous() for part in (weight, bias) if part is not None):
        raise ValueError(f"row_norm: weight and bias must be contiguous and have shape ({width},)")
    if added is not None and (added.shape != x.shape or not (x.is_contiguous() and added.is_contiguous())):
        raise ValueError("row_norm: x and added must be contiguous, of the same shape")
    if keep_sum and added is None:
        raise ValueError("row_norm: keep_sum needs added")
    out = torch.empty(x.shape) if added is None or keep_sum else added
    normalize(x, weight, bias, added, out, eps=eps, rms=rms, offset=offset)
    return out
