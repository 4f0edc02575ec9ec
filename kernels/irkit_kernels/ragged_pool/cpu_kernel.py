"""Pooling on the CPU: compiled code, and plain torch for dtypes and machines without such code."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from .._jit import compile_ir, compiled_once, cpu_features
from .._threads import share, threads_for
from .cpu_tile import write_ir

__all__ = ["compiled", "has_code", "plain", "pool"]

_MIN_WORK = 1 << 20  # numbers written per thread, about 0.15 ms; fewer are not worth another thread


def has_code(dtype: torch.dtype) -> bool:
    """Return whether a dtype has compiled code; otherwise use `plain`."""
    return dtype in (torch.float32, torch.bfloat16) and bool(cpu_features())


def pool(
    values: Tensor, offsets: Tensor, pooled: Tensor, kernel: int, stride: int, rows: int, transposed: bool
) -> Tensor:
    """Compute `op.ragged_pool` or, ``transposed``, its gradient by compiled code; tensors are contiguous."""
    out = values.new_empty(rows, values.shape[1])
    function = compiled(values.dtype == torch.bfloat16, transposed)
    pointers = [x.data_ptr() for x in (out, values, offsets, pooled)]

    def run(start: int, stop: int) -> None:
        function(*pointers, len(offsets) - 1, values.shape[1], kernel, stride, start, stop)

    share(run, rows, threads_for(out.numel(), _MIN_WORK))
    return out


def plain(
    values: Tensor, offsets: Tensor, pooled: Tensor, kernel: int, stride: int, rows: int, transposed: bool
) -> Tensor:
    """Compute what `pool` computes in torch: all rows add their first summand, then their second, ..."""
    sequence = torch.repeat_interleave((offsets if transposed else pooled).diff(), output_size=rows)
    first_token, tokens = offsets[sequence], offsets.diff()[sequence]
    first_window, windows = pooled[sequence], pooled.diff()[sequence]
    local = torch.arange(rows, device="cpu") - (first_token if transposed else first_window)
    out = values.new_zeros(rows, values.shape[1], dtype=torch.promote_types(values.dtype, torch.float32))
    for j in range(-(-kernel // stride) if transposed else kernel):
        window = local // stride - j if transposed else local
        token = local if transposed else local * stride + j
        inside = (window >= 0) & (window < windows) & (token < (window * stride + kernel).clamp(max=tokens))
        source = (first_window + window if transposed else first_token + token)[inside]
        count = (tokens - window * stride).clamp(max=kernel)[inside]
        out[inside] += values[source].to(out.dtype) / count[:, None]
    return out.to(values.dtype)


@compiled_once
def compiled(bfloat16: bool, transposed: bool) -> Callable[..., None]:
    """Compile `cpu_tile.write_ir` for this CPU, and return the function."""
    arguments = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 6
    rounds = "avx512bf16" in cpu_features()
    return compile_ir(write_ir(bfloat16, transposed, rounds), "ragged_pool", arguments)
