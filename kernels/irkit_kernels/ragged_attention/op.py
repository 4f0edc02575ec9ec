"""``irkit::ragged_attention``: attention within rows of different lengths on the CPU, with gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
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
_ROOM = 32  # numbers before and after the biases of a head, which a vector may reach
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
    *,
    causal: bool = False,
    bias: Tensor | None = None,
    rough: bool = False,
) -> Tensor:
    """Compute softmax attention of each row of queries to its row of keys.

    Scores are scaled by ``head_dim ** -0.5``. float32 and bfloat16 run in one call of compiled code on CPUs
    with AVX2, AVX-512 or NEON, for a ``head_dim`` divisible by 8 up to 256; anything else uses torch, row by
    row. Differentiable: the backward computes the weights again. One random number of torch's generator
    decides which weights are dropped, so nothing as large as the weights is stored.

    Args:
        query: ``(total_q, heads, head_dim)``; tokens and heads may have any stride.
        key: ``(total_k, key_heads, head_dim)``, likewise. Each of its heads serves ``heads / key_heads``
            neighbouring heads of queries.
        value: The shape of ``key``.
        query_offsets: ``(n + 1,)`` int32; row ``i`` is ``query[query_offsets[i]:query_offsets[i + 1]]``.
        key_offsets: ``(n + 1,)`` int32, likewise for ``key`` and ``value``.
        window: Largest distance at which tokens attend to each other; None is any. Rows of queries and keys
            must then be of equal length.
        dropout: Probability of dropping a weight, below 1; the others are multiplied by ``1 / (1 -
            dropout)``.
        causal: Whether a query sees no key after its own position; rows must then be of equal length.
        bias: ``(heads, 2 * n - 1)`` float32, added to the scores: query ``i`` and key ``j`` get number ``n -
            1 + j - i``. No row is longer than ``n``. It has no gradient. None adds no bias.
        rough: Whether float32 queries, keys, values and weights are rounded to bfloat16 where the CPU has
            AVX512-BF16, which multiplies these twice as fast; sums and the output stay float32. It has no
            effect with gradients and under torch.compile.

    Returns:
        ``(total_q, heads, head_dim)``, contiguous, in the dtype of ``query``; zeros in rows without keys.

    Raises:
        ValueError: Shapes, dtypes or offsets do not fit together.
    """
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        raise ValueError("ragged_attention: has no gradient of the bias; detach it, or use torch's attention")
    arguments = (query, key, value, query_offsets, key_offsets, window, causal, bias)
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if not _has_code(query):
        _check(*arguments, dropout)
        return _by_row(*arguments, dropout)
    table = None if bias is None else _table(bias, query.shape[2])
    arguments = (*arguments[:-1], table)
    seed = torch.randint(2**62, (1,), device="cpu") if dropout else None
    if differentiable or torch.compiler.is_compiling():
        out: Tensor = torch.ops.irkit.ragged_attention(*arguments, dropout, seed)[0]
        return out
    return _forward(*arguments, dropout, seed, with_stats=False, rough=rough)[0]


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    window: int | None,
    causal: bool,
    table: Tensor | None,
    dropout: float,
    seed: Tensor | None,
    *,
    with_stats: bool = True,
    rough: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the attention and what the backward needs.

    Returns:
        The output. And statistics ``(total_q, heads, 2)`` float32: the maximum score of each query and head,
        and 1 / the sum of its weights; empty without ``with_stats``.
    """
    _check(query, key, value, query_offsets, key_offsets, window, causal, table, dropout, _ROOM)
    kernel, scratch_size = _kernel(query.shape[2], query.dtype, dropout > 0, table is not None, rough)
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    out = torch.empty(query.shape, dtype=query.dtype, device="cpu")
    stats = torch.empty((*query.shape[:2], 2) if with_stats else 0, dtype=torch.float32, device="cpu")
    tensors = (out, stats, query, key, value, query_offsets, key_offsets, table)
    pointers = [0 if x is None else x.data_ptr() for x in tensors]
    numbers = _numbers(query, key, value, window, causal, table)
    run = partial(_call, kernel, pointers, scratch_size, numbers, dropout, seed)
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
    causal: bool,
    table: Tensor | None,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    kernel, scratch_size = _backward_kernel(query.shape[2], query.dtype, dropout > 0, table is not None)
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    grad = grad.contiguous()
    deltas = (grad.float() * out.float()).sum(-1)
    d_query = torch.zeros(query.shape, dtype=torch.float32, device="cpu")
    shape = key.shape[0], *query.shape[1:]  # gradients of each head of queries, summed up below
    d_key, d_value = (torch.empty(shape, dtype=torch.float32, device="cpu") for _ in range(2))
    tensors = (d_query, d_key, d_value, stats, deltas, grad, query, key, value, query_offsets, key_offsets)
    pointers = [*(x.data_ptr() for x in tensors), 0 if table is None else table.data_ptr()]
    numbers = _numbers(query, key, value, window, causal, table)
    run = partial(_call, kernel, pointers, scratch_size, numbers, dropout, seed)
    _share(run, query, key, query_offsets)
    if key.shape[1] != query.shape[1]:
        d_key, d_value = (torch.unflatten(x, 1, (key.shape[1], -1)).sum(2) for x in (d_key, d_value))
    return d_query.to(query.dtype), d_key.to(query.dtype), d_value.to(query.dtype)


def _numbers(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, causal: bool, table: Tensor | None
) -> list[int]:
    """Return the integer arguments of both kernels: strides in bytes, then those that `SIZES` lists."""
    strides = [query.element_size() * stride for x in (query, key, value) for stride in x.stride()[:2]]
    reach = FAR if window is None else min(window, FAR)
    heads, width = query.shape[1], 0 if table is None else table.shape[1]
    return [*strides, heads, heads // max(key.shape[1], 1), reach, 0 if causal else reach, width]


def _table(bias: Tensor, head_dim: int) -> Tensor:
    """Return biases for the kernel: in the unit of unscaled scores, with room for whole vectors of keys."""
    return F.pad(bias.float() * head_dim**0.5, (_ROOM, _ROOM))


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
def _kernel(
    head_dim: int, dtype: torch.dtype, dropout: bool, biased: bool, rough: bool
) -> tuple[Callable[..., None], int]:
    """Return the compiled forward and the size of its scratch memory in bytes."""
    plan = replace(plan_for(head_dim, dtype == torch.bfloat16, dropout, rough), biased=biased)
    return compile_plan(plan), scratch_layout(plan)[1]


@compiled_once
def _backward_kernel(
    head_dim: int, dtype: torch.dtype, dropout: bool, biased: bool
) -> tuple[Callable[..., None], int]:
    """Return the compiled backward, which multiplies in float32, and its scratch memory in bytes."""
    plan = replace(plan_for(head_dim, dtype == torch.bfloat16, dropout), dot=False, biased=biased)
    return compile_backward(plan), cpu_backward.scratch_layout(plan)[1]


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    window: int | None,
    causal: bool,
    bias: Tensor | None,
    dropout: float,
    margin: int = 0,
) -> None:
    # tensors
    fits = query.dim() == key.dim() == 3 and key.shape == value.shape and query.shape[2] == key.shape[2]
    if not fits or query.shape[1] % max(key.shape[1], 1):
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
        raise ValueError(
            "ragged_attention: expected (tokens, heads, head_dim) of equal heads, or of heads of keys that "
            f"divide those of queries, got {shapes}"
        )
    if not all(x.is_cpu for x in (query, key, value, query_offsets, key_offsets)):
        raise ValueError(
            f"ragged_attention: runs on the CPU, got a tensor on another device ({query.device})"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"ragged_attention: expected one dtype, got {query.dtype}, {key.dtype} and {value.dtype}"
        )
    # rows
    ends = _checked_ends(query, key, query_offsets, key_offsets)
    if len(ends[0]) != len(ends[1]):
        raise ValueError(
            f"ragged_attention: got {len(ends[0]) - 1} rows of queries but {len(ends[1]) - 1} of keys"
        )
    # options
    positioned = window is not None or causal
    if (window or 0) < 0 or (positioned and ends[0] != ends[1]):
        raise ValueError(
            "ragged_attention: a window must be >= 0, and with a window or causal rows of queries and keys "
            f"must be of equal length, got window={window}, causal={causal}"
        )
    if bias is not None:
        longest = max((b - a for part in ends for a, b in pairwise(part)), default=0)
        _check_bias(bias, (query.shape[1], longest), margin)
    if not 0 <= dropout < 1:
        raise ValueError(f"ragged_attention: dropout must be at least 0 and below 1, got {dropout}")


def _checked_ends(query: Tensor, key: Tensor, query_offsets: Tensor, key_offsets: Tensor) -> list[list[int]]:
    """Return both offsets as lists, or raise ValueError: wrong ones would let the code read outside."""
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
        if ends[-1][:1] != [0] or ends[-1][-1] != total or ends[-1] != sorted(ends[-1]):
            raise ValueError(
                f"ragged_attention: {name}_offsets must rise from 0 to {total}, got {ends[-1]!s:.200}"
            )
    return ends


def _check_bias(bias: Tensor, needed: tuple[int, int], margin: int) -> None:
    """Raise ValueError if a bias does not fit ``needed`` heads and length, with ``margin`` at both sides."""
    heads, longest = needed
    room = (bias.shape[1] + 1) // 2 - margin if bias.dim() == 2 and bias.shape[1] % 2 else -1
    if room < longest or bias.shape[0] != heads or not bias.is_cpu:
        raise ValueError(
            f"ragged_attention: expected a bias of shape ({heads}, {2 * longest - 1}), or wider by an even "
            f"number, got {(*bias.shape[:-1], bias.shape[-1] - 2 * margin)}"
        )


def _by_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    window: int | None,
    causal: bool,
    bias: Tensor | None,
    dropout: float,
) -> Tensor:
    """Compute the attention in torch, one row at a time."""
    heads = query.shape[1]
    key, value = (x.repeat_interleave(heads // max(x.shape[1], 1), dim=1) for x in (key, value))
    outputs, lengths = [query[:0]], [offsets.diff().tolist() for offsets in (query_offsets, key_offsets)]
    rows = (torch.split(query, lengths[0]), torch.split(key, lengths[1]), torch.split(value, lengths[1]))
    for part in zip(*rows, strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in part)
        if not k.shape[2]:
            outputs.append(torch.zeros_like(part[0]))
            continue
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        seen: Tensor | None = None
        if causal or (window is not None and k.shape[2] > window + 1):
            seen = distance.abs() <= (len(distance) if window is None else window)
            seen = seen & (distance >= 0) if causal else seen
        if bias is not None:
            added = bias[:, bias.shape[1] // 2 - distance].to(q.dtype)
            seen = added if seen is None else added.masked_fill(~seen, -torch.inf)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout)
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
_SETTINGS = "int? window, bool causal, Tensor? table, float dropout, Tensor? seed"
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
    *tensors, ctx.window, ctx.causal, table, ctx.dropout, seed = inputs
    ctx.save_for_backward(*output, *tensors, table, seed)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *tensors, table, seed = ctx.saved_tensors
    settings = ctx.window, ctx.causal, table, ctx.dropout, seed
    return (*torch.ops.irkit.ragged_attention_backward(grad, *tensors, *settings), *[None] * 7)


torch.library.register_autograd("irkit::ragged_attention", _gradients, setup_context=_save)
