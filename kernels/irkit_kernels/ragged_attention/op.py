"""``irkit::ragged_attention``: attention within rows of different lengths on the CPU, with gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._jit import compiled_once
from .._threads import share, threads_for
from . import cpu_backward
from .cpu_backward import compile_backward
from .cpu_kernel import FAR, MAX_HEAD_DIM, compile_plan, plan_for, scratch_layout, supported

__all__ = ["ragged_attention"]

_MIN_WORK = 1 << 23  # multiply-adds of the scores per thread, 0.4 ms in float32 with all other steps
_local = threading.local()
supported()  # reads the features of the CPU now: torch.compile could not trace it


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute softmax attention of each row of queries to its row of keys.

    Scores are scaled by ``head_dim ** -0.5``. float32 and bfloat16 run in one call of compiled code on CPUs
    with AVX2, AVX-512 or NEON, for a ``head_dim`` divisible by 8 up to 256; anything else uses torch, row by
    row. Differentiable: the backward computes the weights again. One random number of torch's generator
    decides which weights are dropped, so nothing as large as the weights is stored.

    Args:
        query: ``(total_q, heads, head_dim)``; tokens and heads may have any stride.
        key: ``(total_k, heads, head_dim)``, likewise.
        value: The shape of ``key``.
        query_offsets: ``(n + 1,)`` int32; row ``i`` is ``query[query_offsets[i]:query_offsets[i + 1]]``.
        key_offsets: ``(n + 1,)`` int32, likewise for ``key`` and ``value``.
        window: Largest distance at which tokens attend to each other; None is any. Rows of queries and keys
            must then be of equal length.
        dropout: Probability of dropping a weight, below 1; the others are multiplied by ``1 / (1 -
            dropout)``.

    Returns:
        ``(total_q, heads, head_dim)``, contiguous, in the dtype of ``query``; zeros in rows without keys.

    Raises:
        ValueError: Shapes, dtypes or offsets do not fit together.
    """
    arguments = (query, key, value, query_offsets, key_offsets, window)
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if not _has_code(query):
        _check(*arguments, dropout)
        return _by_row(*arguments, dropout)
    seed = torch.randint(2**62, (1,), device="cpu") if dropout else None
    if differentiable or torch.compiler.is_compiling():
        out: Tensor = torch.ops.irkit.ragged_attention(*arguments, dropout, seed)[0]
        return out
    return _forward(*arguments, dropout, seed, with_stats=False)[0]


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    window: int | None,
    dropout: float,
    seed: Tensor | None,
    *,
    with_stats: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute the attention and what the backward needs.

    Returns:
        The output. And statistics ``(total_q, heads, 2)`` float32: the maximum score of each query and head,
        and 1 / the sum of its weights; empty without ``with_stats``.
    """
    _check(query, key, value, query_offsets, key_offsets, window, dropout)
    kernel, scratch_size = _kernel(query.shape[2], query.dtype, dropout > 0)
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    out = torch.empty(query.shape, dtype=query.dtype, device="cpu")
    stats = torch.empty((*query.shape[:2], 2) if with_stats else 0, dtype=torch.float32, device="cpu")
    tensors = (out, stats, query, key, value, query_offsets, key_offsets)
    pointers = [x.data_ptr() for x in tensors]
    run = partial(_call, kernel, pointers, scratch_size, _numbers(query, key, value, window), dropout, seed)
    _share(run, query, key, query_offsets)
    return out, stats


def _backward(
    grad: Tensor,
    out: Tensor,
    stats: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    window: int | None,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    kernel, scratch_size = _backward_kernel(query.shape[2], query.dtype, dropout > 0)
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    grad = grad.contiguous()
    deltas = (grad.float() * out.float()).sum(-1)
    d_query = torch.zeros(query.shape, dtype=torch.float32, device="cpu")
    d_key, d_value = (torch.empty(key.shape, dtype=torch.float32, device="cpu") for _ in range(2))
    tensors = (d_query, d_key, d_value, stats, deltas, grad, query, key, value, query_offsets, key_offsets)
    pointers = [x.data_ptr() for x in tensors]
    run = partial(_call, kernel, pointers, scratch_size, _numbers(query, key, value, window), dropout, seed)
    _share(run, query, key, query_offsets)
    return d_query.to(query.dtype), d_key.to(query.dtype), d_value.to(query.dtype)


def _numbers(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> list[int]:
    """Return the integer arguments of both kernels: strides in bytes, number of heads, window."""
    strides = [query.element_size() * stride for x in (query, key, value) for stride in x.stride()[:2]]
    return [*strides, query.shape[1], FAR if window is None else min(window, FAR)]


def _call(
    kernel: Callable[..., None],
    pointers: list[int],
    scratch_size: int,
    numbers: list[int],
    dropout: float,
    seed: Tensor | None,
    start: int,
    stop: int,
) -> None:
    """Call a kernel for the pairs of row and head ``start`` to ``stop``."""
    random = int(seed) if seed is not None else 0, round(dropout * 2**32), 1 / (1 - dropout)
    kernel(*pointers, _scratch(scratch_size), *numbers, start, stop, *random)


def _share(run: Callable[[int, int], None], query: Tensor, key: Tensor, query_offsets: Tensor) -> None:
    """Distribute pairs of row and head among threads."""
    rows = query_offsets.shape[0] - 1
    work, items = query.numel() * key.shape[0] // max(rows, 1), rows * query.shape[1]
    share(run, items, min(items, threads_for(work, _MIN_WORK)))


def _has_code(query: Tensor) -> bool:
    """Return whether the dtype and head size have compiled code on this CPU; otherwise torch is used."""
    size, dtypes = query.shape[-1], (torch.float32, torch.bfloat16)
    return supported() and query.dtype in dtypes and size % 8 == 0 and 0 < size <= MAX_HEAD_DIM


@compiled_once
def _kernel(head_dim: int, dtype: torch.dtype, dropout: bool) -> tuple[Callable[..., None], int]:
    """Return the compiled forward and the size of its scratch memory in bytes."""
    plan = plan_for(head_dim, dtype == torch.bfloat16, dropout)
    return compile_plan(plan), scratch_layout(plan)[1]


@compiled_once
def _backward_kernel(head_dim: int, dtype: torch.dtype, dropout: bool) -> tuple[Callable[..., None], int]:
    """Return the compiled backward, which multiplies in float32, and its scratch memory in bytes."""
    plan = replace(plan_for(head_dim, dtype == torch.bfloat16, dropout), dot=False)
    return compile_backward(plan), cpu_backward.scratch_layout(plan)[1]


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    window: int | None,
    dropout: float,
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
        # The compiled code trusts the offsets: wrong ones would read outside of the tensors.
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
    if not 0 <= dropout < 1:
        raise ValueError(f"ragged_attention: dropout must be at least 0 and below 1, got {dropout}")


def _by_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    window: int | None,
    dropout: float,
) -> Tensor:
    """Compute the attention in torch, one row at a time."""
    outputs, lengths = [query[:0]], [offsets.diff().tolist() for offsets in (query_offsets, key_offsets)]
    rows = (torch.split(query, lengths[0]), torch.split(key, lengths[1]), torch.split(value, lengths[1]))
    for part in zip(*rows, strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in part)
        if not k.shape[2]:
            outputs.append(torch.zeros_like(part[0]))
            continue
        near = None
        if window is not None and k.shape[2] > window + 1:
            near = (torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])).abs() <= window
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=near, dropout_p=dropout)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _scratch(size: int) -> int:
    """Return the address of this thread's scratch memory, which grows to the largest size so far (< 2 MB)."""
    memory: Tensor | None = getattr(_local, "memory", None)
    if memory is None or memory.shape[0] < size:
        _local.memory = memory = torch.empty(size, dtype=torch.uint8, device="cpu")
    return memory.data_ptr()


# Define the operators as torch.library.custom_op does, but without importing torch._dynamo, which takes 2 s.
_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor query_offsets, Tensor key_offsets"
_SETTINGS = "int? window, float dropout, Tensor? seed"
torch.library.define("irkit::ragged_attention", f"({_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor)")
torch.library.define(
    "irkit::ragged_attention_backward",
    f"(Tensor grad, Tensor out, Tensor stats, {_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor, Tensor)",
)
torch.library.impl("irkit::ragged_attention", "cpu", _forward)
torch.library.impl("irkit::ragged_attention_backward", "cpu", _backward)


@torch.library.register_fake("irkit::ragged_attention")  # type: ignore[untyped-decorator]
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty((*query.shape[:2], 2), dtype=torch.float32)


@torch.library.register_fake("irkit::ragged_attention_backward")  # type: ignore[untyped-decorator]
def _(grad: Tensor, out: Tensor, stats: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in tensors[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.dropout, seed = inputs
    ctx.save_for_backward(*output, *tensors, seed)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *tensors, seed = ctx.saved_tensors
    results = torch.ops.irkit.ragged_attention_backward(grad, *tensors, ctx.window, ctx.dropout, seed)
    return (*results, *[None] * 5)


torch.library.register_autograd("irkit::ragged_attention", _gradients, setup_context=_save)
