"""``irkit::ragged_pool``: mean pooling over windows of ragged sequences, and the transpose of that map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import cpu_kernel

__all__ = ["pooled_lengths", "ragged_pool"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def pooled_lengths(lengths: Tensor, kernel: int, stride: int) -> Tensor:
    """Return the number of windows per sequence: ``ceil(max(0, length - kernel) / stride) + 1``.

    An empty sequence has no windows.

    Args:
        lengths: ``(n,)`` integers of any dtype, the number of tokens per sequence.
        kernel: Tokens per window.
        stride: Tokens from the start of a window to the start of the next.

    Returns:
        ``(n,)`` of the same dtype on the same device.

    Raises:
        ValueError: Not 1 <= stride <= kernel.

    Examples:
        >>> pooled_lengths(torch.tensor([0, 1, 2, 3, 7]), kernel=2, stride=2).tolist()
        [0, 1, 1, 2, 4]

    Source: Schlatt et al. 2025 (TITE), section 3.1.
    """
    _check_window("pooled_lengths", kernel, stride)
    steps = (lengths - kernel).clamp(min=0).add_(stride - 1).div_(stride, rounding_mode="floor")
    return steps.add_(lengths > 0)


def ragged_pool(
    values: Tensor,
    offsets: Tensor,
    kernel: int,
    stride: int,
    *,
    pooled_offsets: Tensor | None = None,
    total: int | None = None,
) -> Tensor:
    """Compute the mean of each window of ``kernel`` tokens, one window every ``stride`` tokens.

    If the end of the sequence cuts a window, the result is the mean of the tokens that exist. Sums are
    float32 for every dtype but float64. Gradients, of any order, are as exact and as deterministic as the
    result. The call uses `torch.get_num_threads` threads, or CUDA. On CUDA offsets are not checked, because
    reading them would make the host wait.

    Args:
        values: ``(t, d)`` floating point: the tokens of all sequences, back to back.
        offsets: ``(n + 1,)`` int32; sequence ``i`` is ``values[offsets[i]:offsets[i + 1]]``.
        kernel: Tokens per window.
        stride: Tokens from the start of a window to the start of the next; at most ``kernel``, so that every
            token is in a window.
        pooled_offsets: ``(n + 1,)`` int32, the offsets of the result; None computes them.
        total: Rows of the result, ``pooled_offsets[-1]``. None reads the number from ``pooled_offsets``; then
            the host waits for CUDA, and ``torch.compile`` fails.

    Returns:
        ``(total, d)`` of the same dtype; sequence ``i`` has ``pooled_lengths`` rows.

    Raises:
        ValueError: Shapes, dtypes, devices or offsets do not fit together, or not 1 <= stride <= kernel.

    Examples:
        >>> values = torch.tensor([[2.0], [4.0], [9.0], [5.0]])
        >>> ragged_pool(values, torch.tensor([0, 3, 4], dtype=torch.int32), kernel=2, stride=2).tolist()
        [[3.0], [9.0], [5.0]]

    Source: Schlatt et al. 2025 (TITE), section 3.1.
    """
    _check_window("ragged_pool", kernel, stride)
    if values.dim() != 2 or values.dtype not in _FLOATS:
        raise ValueError(
            f"ragged_pool: values must be (t, d) of a dtype among {_FLOATS}, got {tuple(values.shape)} "
            f"{values.dtype}"
        )
    _check_offsets("offsets", offsets, values)
    if pooled_offsets is None:
        lengths = pooled_lengths(offsets.diff(), kernel, stride)
        pooled_offsets = torch.cat([offsets[:1], lengths.cumsum(0, dtype=torch.int32)])
    _check_offsets("pooled_offsets", pooled_offsets, values)
    if total is None:
        total = int(pooled_offsets[-1])
    arguments = (values, offsets, pooled_offsets, kernel, stride, total, False)
    if (values.requires_grad and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        out: Tensor = torch.ops.irkit.ragged_pool(*arguments)
        return out
    return _pool(*arguments)


def _pool(
    values: Tensor, offsets: Tensor, pooled: Tensor, kernel: int, stride: int, rows: int, transposed: bool
) -> Tensor:
    """Compute the mean of each window of tokens; if ``transposed``, the gradient of the tokens.

    Args:
        values: ``(t, d)`` tokens; if ``transposed``, the gradients of the windows.
        offsets: ``(n + 1,)`` int32, offsets of the tokens.
        pooled: ``(n + 1,)`` int32, offsets of the windows.
        kernel: Tokens per window.
        stride: Tokens from the start of a window to the start of the next.
        rows: Rows of the result.
        transposed: Whether to compute the gradient.

    Returns:
        ``(rows, d)``: a row per window; if ``transposed``, a row per token.
    """
    values, offsets, pooled = values.contiguous(), offsets.contiguous(), pooled.contiguous()
    if values.is_cuda:
        from . import triton_kernel

        return triton_kernel.pool(values, offsets, pooled, kernel, stride, rows, transposed)
    _check_rows(values, offsets, pooled, kernel, stride, rows, transposed)
    pool = cpu_kernel.pool if cpu_kernel.has_code(values.dtype) else cpu_kernel.plain
    return pool(values, offsets, pooled, kernel, stride, rows, transposed)


def _check_window(name: str, kernel: int, stride: int) -> None:
    if not 1 <= stride <= kernel:
        raise ValueError(f"{name}: expected 1 <= stride <= kernel, got kernel={kernel} and stride={stride}")


def _check_offsets(name: str, offsets: Tensor, values: Tensor) -> None:
    if offsets.dtype != torch.int32 or offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ValueError(
            f"ragged_pool: {name} must be (n + 1,) int32, got {tuple(offsets.shape)} {offsets.dtype}"
        )
    if offsets.device != values.device or values.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"ragged_pool: expected all tensors on one CPU or CUDA device, got values on {values.device} and "
            f"{name} on {offsets.device}"
        )


def _check_rows(
    values: Tensor, offsets: Tensor, pooled: Tensor, kernel: int, stride: int, rows: int, transposed: bool
) -> None:
    """Check the offsets, which the compiled code trusts: wrong ones would read outside of the tensors."""
    tokens, windows = (rows, len(values)) if transposed else (len(values), rows)
    ends, pooled_ends = (
        offsets.numpy(),
        pooled.numpy(),
    )  # numpy takes a fraction of torch's time per operation
    lengths = ends[1:] - ends[:-1]
    if ends[0] != 0 or ends[-1] != tokens or (lengths < 0).any():
        raise ValueError(
            f"ragged_pool: offsets must rise from 0 to {tokens}, the number of tokens, got "
            f"{offsets.tolist()!s:.200}"
        )
    counts = (np.maximum(lengths - kernel, 0) + stride - 1) // stride + (lengths > 0)
    fits = len(ends) == len(pooled_ends) and pooled_ends[0] == 0 and pooled_ends[-1] == windows
    if not fits or (pooled_ends[1:] - pooled_ends[:-1] != counts).any():
        raise ValueError(
            f"ragged_pool: pooled_offsets and total={windows} must be those of windows of {kernel} every "
            f"{stride} tokens, got {pooled.tolist()!s:.200}"
        )


# Define the operator as torch.library.custom_op does, but without importing torch._dynamo, which takes 2 s.
torch.library.define(
    "irkit::ragged_pool",
    "(Tensor values, Tensor offsets, Tensor pooled, int kernel, int stride, SymInt rows, bool transposed) "
    "-> Tensor",
)
for _device in ("cpu", "cuda"):
    torch.library.impl("irkit::ragged_pool", _device, _pool)


@torch.library.register_fake("irkit::ragged_pool")  # type: ignore[untyped-decorator]
def _(
    values: Tensor, offsets: Tensor, pooled: Tensor, kernel: int, stride: int, rows: int, transposed: bool
) -> Tensor:
    return values.new_empty((rows, values.shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, offsets, pooled, *ctx.numbers, _, ctx.transposed = inputs
    ctx.save_for_backward(offsets, pooled)
    ctx.rows = values.shape[0]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    direct = type(grad) is Tensor and not torch.is_grad_enabled()  # skips the dispatcher, which takes 40 us
    pool: Callable[..., Tensor] = _pool if direct else torch.ops.irkit.ragged_pool
    result = pool(grad, *ctx.saved_tensors, *ctx.numbers, ctx.rows, not ctx.transposed)
    return (result, *[None] * 6)


torch.library.register_autograd("irkit::ragged_pool", _gradients, setup_context=_save)
