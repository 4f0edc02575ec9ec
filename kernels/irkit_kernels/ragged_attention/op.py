"""``irkit::ragged_attention``: attention within rows of different lengths, for inference on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from .._threads import share
from .cpu_kernel import FAR, compile_plan, plan_for, scratch_layout

__all__ = ["ragged_attention"]

_MIN_WORK = 1 << 23  # multiply-adds of the scores worth a thread: 0.4 ms in float32 with all the rest
_local = threading.local()


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    window: int | None = None,
) -> Tensor:
    """Softmax attention of each row of queries to its row of keys; scores are scaled by ``head_dim ** -0.5``.

    float32 and bfloat16 run in one call of the compiled kernel where the CPU has one (AVX2, AVX-512, NEON; a
    ``head_dim`` divisible by 8 up to 256); anything else goes to torch row by row. Has no gradient.

    Args:
        query: ``(total_q, heads, head_dim)``; tokens and heads may have any stride.
        key: ``(total_k, heads, head_dim)``, likewise.
        value: As ``key``.
        query_offsets: ``(n + 1,)`` int32; row ``i`` is ``query[query_offsets[i]:query_offsets[i + 1]]``.
        key_offsets: ``(n + 1,)`` int32, likewise for ``key`` and ``value``.
        window: Largest distance at which tokens attend to each other; None is any. Rows of queries and keys
            must then be of equal length.

    Returns:
        ``(total_q, heads, head_dim)``, contiguous, of the dtype of ``query``; zeros where there is no key.

    Raises:
        ValueError: Shapes, dtypes or offsets do not fit together, or a gradient is wanted.
    """
    arguments = (query, key, value, query_offsets, key_offsets, window)
    if torch.compiler.is_compiling():
        out: Tensor = _op(*arguments)
        return out
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise ValueError("ragged_attention: has no gradient; call it under torch.inference_mode()")
    return _attend(*arguments)  # the first call of a custom op imports the compiler of torch: a second


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    window: int | None = None,
) -> Tensor:
    _check(query, key, value, query_offsets, key_offsets, window)
    compiled = _kernel(query.shape[2], query.dtype)
    if compiled is None:
        return _by_row(query, key, value, query_offsets, key_offsets, window)
    kernel, scratch_size = compiled
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    out = torch.empty(query.shape, dtype=query.dtype)
    rows, heads, size = query_offsets.shape[0] - 1, query.shape[1], query.element_size()
    pointers = [x.data_ptr() for x in (out, query, key, value, query_offsets, key_offsets)]
    strides = [size * stride for x in (query, key, value) for stride in x.stride()[:2]]
    limit = FAR if window is None else min(window, FAR)

    work, items = query.numel() * key.shape[0] // max(rows, 1), rows * heads
    threads = min(torch.get_num_threads(), items, work // _MIN_WORK)

    def run(start: int, stop: int) -> None:
        kernel(*pointers, _scratch(scratch_size), *strides, heads, limit, start, stop)

    share(run, items, threads)
    return out


_op = torch.library.custom_op("irkit::ragged_attention", _attend, mutates_args=(), device_types="cpu")
_op.register_fake(lambda query, *_: query.new_empty(query.shape))


@cache
def _kernel(head_dim: int, dtype: torch.dtype) -> tuple[Callable[..., None], int] | None:
    """The compiled kernel and how much scratch memory it needs; None where torch has to do."""
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    plan = plan_for(head_dim, dtype == torch.bfloat16)
    return (compile_plan(plan), scratch_layout(plan)[1]) if plan else None


def _check(
    query: Tensor, key: Tensor, value: Tensor, query_offsets: Tensor, key_offsets: Tensor, window: int | None
) -> None:
    if query.dim() != 3 or key.shape != value.shape or query.shape[1:] != key.shape[1:]:
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
        raise ValueError(f"ragged_attention: expected (tokens, heads, head_dim) of equal heads, got {shapes}")
    if not all(x.is_cpu for x in (query, key, value, query_offsets, key_offsets)):
        raise ValueError(
            f"ragged_attention: runs on the CPU, got a tensor on another device ({query.device})"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"ragged_attention: expected one dtype, got {query.dtype}, {key.dtype} and {value.dtype}"
        )
    ends: list[list[int]] = []
    for name, offsets, total in (
        ("query", query_offsets, query.shape[0]),
        ("key", key_offsets, key.shape[0]),
    ):
        if offsets.dtype != torch.int32 or offsets.dim() != 1 or not offsets.is_contiguous():
            raise ValueError(
                f"ragged_attention: {name}_offsets must be a contiguous row of int32, got {offsets.dtype} "
                f"{tuple(offsets.shape)}"
            )
        ends.append(offsets.tolist())
        # The kernel trusts the offsets: wrong ones would read outside of the tensors.
        if ends[-1][:1] != [0] or ends[-1][-1] != total or ends[-1] != sorted(ends[-1]):
            raise ValueError(
                f"ragged_attention: {name}_offsets must rise from 0 to {total}, got {ends[-1]!s:.200}"
            )
    if len(ends[0]) != len(ends[1]):
        raise ValueError(
            f"ragged_attention: got {len(ends[0]) - 1} rows of queries but {len(ends[1]) - 1} of keys"
        )
    if window is not None and (window < 0 or ends[0] != ends[1]):
        raise ValueError(
            f"ragged_attention: a window must be >= 0 and needs rows of equal length, got window={window}"
        )


def _by_row(
    query: Tensor, key: Tensor, value: Tensor, query_offsets: Tensor, key_offsets: Tensor, window: int | None
) -> Tensor:
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    ends_q, ends_k = query_offsets.tolist(), key_offsets.tolist()
    for i in range(len(ends_q) - 1):
        queries, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        q, k, v = (x.transpose(0, 1)[None] for x in (query[queries], key[keys], value[keys]))
        if not q.shape[2] or not k.shape[2]:
            continue
        near = None
        if window is not None and k.shape[2] > window + 1:
            near = (torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])).abs() <= window
        out[queries] = F.scaled_dot_product_attention(q, k, v, attn_mask=near)[0].transpose(0, 1)
    return out


def _scratch(size: int) -> int:
    """Address of memory of this thread, which keeps the largest it ever asked for (at most 2 MB)."""
    memory: Tensor | None = getattr(_local, "memory", None)
    if memory is None or memory.shape[0] < size:
        _local.memory = memory = torch.empty(size, dtype=torch.uint8)
    return memory.data_ptr()
