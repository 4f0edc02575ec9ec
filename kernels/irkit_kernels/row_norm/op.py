"""LayerNorm or RMSNorm of every row, in one pass over memory, optionally of the sum of two tensors."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fits_row_norm", "row_norm"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # on CUDA
_WIDEST = 16_384  # numbers of a row on CUDA, which its program holds in registers


def fits_row_norm(x: Tensor) -> bool:
    """Return whether `row_norm` takes ``x``, ``(n, d)`` or ``(n, heads, d)``.

    It must be float32 on the CPU, or float32, bfloat16 or float16 and at most 16,384 wide on CUDA, with d > 0
    and without gaps but from one n to the next.
    """
    able = x.dtype == torch.float32 if x.is_cpu else x.is_cuda and x.dtype in _FLOATS
    return (
        able
        and (x.is_cpu or x.shape[-1] <= _WIDEST)
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
    standard deviation (Ba et al. 2016, section 3; Zhang and Sennrich 2019, section 4). The call uses CUDA, or
    `torch.get_num_threads` threads and releases the interpreter lock. Sums are float32. ``x + added`` is
    rounded to the dtype of both before its norm is taken.

    Args:
        x: ``(n, d)`` or ``(n, heads, d)``, as `fits_row_norm` wants it.
        weight: ``(d,)`` float32, on CUDA also half precision; None is 1.
        bias: ``(d,)``, likewise; None is 0.
        eps: Added to the mean square or the variance.
        rms: Whether to divide by the root mean square.
        offset: Added to the weights.
        added: A tensor of the shape and dtype of ``x``, both without gaps. It is overwritten: by the result,
            which is returned, or by ``x + added`` if ``keep_sum``.
        keep_sum: Whether ``added`` becomes the sum.

    Returns:
        Of the shape of ``x``, contiguous; ``added`` itself unless it keeps the sum.

    Raises:
        RuntimeError: An input requires a gradient, which this kernel does not compute.
        TypeError: A tensor is not float32, or on CUDA not a float, or ``added`` is of another dtype.
        ValueError: Tensors are on other devices, or shapes or strides do not fit.

    Examples:
        >>> row_norm(torch.tensor([[3.0, 4.0]]), eps=0.0, rms=True)
        tensor([[0.8485, 1.1314]])
    """
    tensors = [part for part in (x, weight, bias, added) if part is not None]
    if torch.is_grad_enabled() and any(part.requires_grad for part in tensors):
        raise RuntimeError("row_norm: has no gradient; call it under torch.no_grad() or inference_mode()")
    kinds = (torch.float32,) if x.is_cpu else _FLOATS
    if any(part.dtype not in kinds for part in tensors) or (added is not None and added.dtype != x.dtype):
        raise TypeError(
            f"row_norm: got {', '.join(str(part.dtype) for part in tensors)}; expected float32, or on CUDA "
            "floats, with x and added of one dtype"
        )
    devices = {part.device for part in tensors}
    if len(devices) > 1 or not (x.is_cpu or x.is_cuda):
        raise ValueError(
            f"row_norm: runs on one CPU or CUDA device, got tensors on {sorted(map(str, devices))}"
        )
    if not fits_row_norm(x):
        raise ValueError(
            f"row_norm: got x {tuple(x.shape)} with strides {x.stride()}, expected (n, d) or (n, heads, d), "
            "0 < d (<= 16384 on CUDA), without gaps between heads; call contiguous() first"
        )
    width = x.shape[-1]
    if any(part.shape != (width,) or not part.is_contiguous() for part in (weight, bias) if part is not None):
        raise ValueError(f"row_norm: weight and bias must be contiguous and have shape ({width},)")
    if added is not None and (added.shape != x.shape or not (x.is_contiguous() and added.is_contiguous())):
        raise ValueError("row_norm: x and added must be contiguous, of the same shape")
    if keep_sum and added is None:
        raise ValueError("row_norm: keep_sum needs added")
    if x.is_cuda:
        from .triton_kernel import normalize
    else:
        from .cpu_rows import normalize
    out = x.new_empty(x.shape) if added is None or keep_sum else added
    normalize(x, weight, bias, added, out, eps=eps, rms=rms, offset=offset)
    return out
