"""``irkit::splade_pool``: vocabulary weights of ragged sequences, dense with gradients, or sparse."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._products import product_gradients
from . import tiled
from .reference import ACTIVATIONS, POOLINGS, activate, slope

__all__ = ["splade_pool", "splade_pool_sparse"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def splade_pool(
    hidden: Tensor,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "log1p_relu",
    pooling: str = "max",
) -> Tensor:
    """Compute the weight of each term in each sequence: its activated logits, pooled over the tokens.

    The logits ``hidden @ weight.T + bias`` are never stored as a whole. Sums are float32 for every dtype. A
    sequence without tokens has weights 0. The gradient of a maximum flows through its token alone (the first
    of equal ones); no gradient flows through weights of 0. Results do not depend on the number of threads.
    The call uses `torch.get_num_threads` threads, or CUDA, and works under ``torch.compile`` and autocast.
    On CUDA offsets are not checked, because reading them would make the host wait.

    Args:
        hidden: ``(t, d)`` float32, bfloat16 or float16: the token vectors of all sequences, back to back.
        offsets: ``(n + 1,)`` int32; sequence ``i`` is ``hidden[offsets[i]:offsets[i + 1]]``.
        weight: ``(v, d)``, the decoder of a masked language model, in the dtype of hidden or in float32. A
            float32 matrix is rounded to the dtype of hidden; the backward rounds it again instead of storing
            it.
        bias: ``(v,)`` in the dtype of hidden or in float32.
        activation: log1p_relu, ``log(1 + relu(x))``; log1p_log1p_relu, the logarithm taken twice; or relu.
        pooling: max or sum.

    Returns:
        ``(n, v)`` float32, not negative.

    Raises:
        ValueError: Shapes, dtypes, devices or offsets do not fit together, or a name is unknown.

    Examples:
        >>> ends = torch.tensor([0, 2, 3], dtype=torch.int32)
        >>> hidden = torch.tensor([[1.0, 0.0], [3.0, -1.0], [0.0, 2.0]])
        >>> splade_pool(hidden, ends, torch.eye(2), activation="relu")
        tensor([[3., 0.],
                [0., 2.]])

    Source: Formal et al. 2021 (SPLADE v2), equation 6 for max, SPLADE equation 3 for sum.
    """
    arguments = _checked("splade_pool", hidden, offsets, weight, bias, activation, pooling)
    tensors = [tensor for tensor in arguments[:4] if tensor is not None]
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    with torch.autocast(hidden.device.type, enabled=False):  # `_checked` has applied autocast's dtype
        if differentiable or torch.compiler.is_compiling():
            weights: Tensor = torch.ops.irkit.splade_pool(*arguments)[0]
            return weights
        return _forward(*arguments, with_argmax=False)[0]


def splade_pool_sparse(
    hidden: Tensor,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "log1p_relu",
    pooling: str = "max",
    threshold: float = 0.0,
    top_k: int | None = None,
    excluded: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `splade_pool` as sparse rows, one tile of the vocabulary at a time; without gradient.

    Args:
        hidden: ``(t, d)``; for this and the next five arguments see `splade_pool`.
        offsets: ``(n + 1,)`` int32.
        weight: ``(v, d)``.
        bias: ``(v,)``.
        activation: See `splade_pool`.
        pooling: See `splade_pool`.
        threshold: Only weights above it are returned; not negative.
        top_k: Largest number of terms per sequence: those with the largest weights, the first among equal
            ones. None returns all.
        excluded: ``(m,)`` int64 terms that are never returned.

    Returns:
        The number of terms per sequence ``(n,)`` int64; the terms ``(nnz,)`` int64 of all sequences, back to
        back and ascending within a sequence; and their weights ``(nnz,)`` float32. NaN is the largest weight.

    Raises:
        ValueError: As for `splade_pool`, or threshold, top_k or excluded are out of range.

    Examples:
        >>> ends = torch.tensor([0, 2, 3], dtype=torch.int32)
        >>> hidden = torch.tensor([[1.0, 0.0], [3.0, -1.0], [0.0, 2.0]])
        >>> splade_pool_sparse(hidden, ends, torch.eye(2), activation="relu")
        (tensor([1, 1]), tensor([0, 1]), tensor([3., 2.]))
    """
    name = "splade_pool_sparse"
    arguments = _checked(name, hidden, offsets, weight, bias, activation, pooling)
    if not 0 <= threshold < math.inf:
        raise ValueError(f"{name}: threshold must be a finite number of at least 0, got {threshold}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"{name}: top_k must be at least 1, or None for all terms, got {top_k}")
    v = weight.shape[0]
    if excluded is None:
        excluded = torch.empty(0, dtype=torch.int64, device=hidden.device)
    elif excluded.dtype != torch.int64 or excluded.dim() != 1 or excluded.device != hidden.device:
        raise ValueError(
            f"{name}: excluded must be (m,) int64 on {hidden.device}, got {tuple(excluded.shape)} "
            f"{excluded.dtype} on {excluded.device}"
        )
    elif len(excluded) and not 0 <= int(excluded.min()) <= int(excluded.max()) < v:
        raise ValueError(
            f"{name}: excluded must hold terms from 0 to {v - 1}, got {excluded.tolist()!s:.200}"
        )
    hidden, offsets, weight, bias, *_ = arguments

    def weights_of(terms: slice) -> Tensor:
        part = None if bias is None else bias[terms]
        return _forward(hidden, offsets, weight[terms], part, activation, pooling, with_argmax=False)[0]

    n = len(offsets) - 1
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        return tiled.sparse_rows(weights_of, n, tiled.tiles_of(v, n), threshold, top_k, excluded)


def _forward(
    hidden: Tensor,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    pooling: str,
    *,
    with_argmax: bool = True,
) -> tuple[Tensor, Tensor]:
    weight = weight.to(hidden.dtype)
    arguments = (hidden, offsets, weight, bias, activation, pooling)
    if hidden.is_cuda:
        from . import triton_kernel

        return triton_kernel.forward(*arguments, with_argmax)
    _check_offsets("splade_pool", hidden, offsets)
    from . import cpu_kernel

    plan = cpu_kernel.plan_for(hidden.dtype)
    if plan is None or pooling == "sum":
        return tiled.forward(*arguments, with_argmax)
    best, argmax = cpu_kernel.maxima(hidden, offsets, weight, with_argmax, plan)
    # activations are increasing, so the activation of the maximum is the maximum of the activations
    return activate(best if bias is None else best.add_(bias), activation), argmax


def _backward(
    grad: Tensor,
    hidden: Tensor,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    argmax: Tensor,
    activation: str,
    pooling: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if pooling == "sum":
        return tiled.sum_backward(grad, hidden, offsets, weight, bias, activation)
    by_term = torch.where(weights == 0, 0, grad * slope(weights, activation))
    d_bias = by_term.sum(0).to(weight.dtype if bias is None else bias.dtype)
    if hidden.is_cuda:  # counting the terms that have a gradient would make the host wait for the device
        from .._products.triton_kernel import grid_gradients

        tokens = torch.where(by_term == 0, -1, argmax)
        d_weight, d_hidden = grid_gradients(weight, hidden, offsets, tokens, by_term.contiguous())
        return d_hidden, d_weight, d_bias
    terms, rows = by_term.T.nonzero(as_tuple=True)
    entries = argmax[rows, terms], terms.int(), by_term[rows, terms]
    d_hidden, d_weight = product_gradients(hidden, weight, *entries)
    return d_hidden, d_weight, d_bias


def _checked(
    name: str,
    hidden: Tensor,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    pooling: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, str, str]:
    """Check and return the arguments of the operator; under autocast ``hidden`` gets autocast's dtype."""
    # under autocast, hidden states get its dtype
    kind = hidden.device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
        weight = weight if weight.dtype == torch.float32 else weight.to(hidden.dtype)
    # shapes and dtypes of the tensors
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or 0 in weight.shape:
        raise ValueError(
            f"{name}: expected hidden (t, d) and weight (v, d) of one d, got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    dtypes = (hidden.dtype, torch.float32)
    if hidden.dtype not in _FLOATS or weight.dtype not in dtypes:
        raise ValueError(
            f"{name}: expected hidden and weight of one dtype among {_FLOATS}, or weight in float32, got "
            f"{hidden.dtype} and {weight.dtype}"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype not in dtypes):
        raise ValueError(
            f"{name}: bias must be ({weight.shape[0]},) {hidden.dtype} or float32, got {tuple(bias.shape)} "
            f"{bias.dtype}"
        )
    if offsets.dtype != torch.int32 or offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ValueError(
            f"{name}: offsets must be (n + 1,) int32, got {tuple(offsets.shape)} {offsets.dtype}"
        )
    # names, and one device
    if activation not in ACTIVATIONS or pooling not in POOLINGS:
        raise ValueError(
            f"{name}: expected an activation of {ACTIVATIONS} and a pooling of {POOLINGS}, got "
            f"{activation!r} and {pooling!r}"
        )
    devices = {x.device for x in (hidden, offsets, weight, bias) if x is not None}
    if len(devices) > 1 or kind not in ("cpu", "cuda"):
        raise ValueError(
            f"{name}: expected all tensors on one CPU or CUDA device, got {sorted(map(str, devices))}"
        )
    return hidden, offsets, weight, bias, activation, pooling


def _check_offsets(name: str, hidden: Tensor, offsets: Tensor) -> None:
    """Check the offsets, which the compiled code trusts: wrong ones would read outside of the tensors."""
    total = len(hidden)
    if int(offsets[0]) != 0 or int(offsets[-1]) != total or bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError(
            f"{name}: offsets must rise from 0 to {total}, the number of tokens, got "
            f"{offsets.tolist()!s:.200}"
        )


# Define the operators as torch.library.custom_op does, but without importing torch._dynamo, which takes 2 s.
_TENSORS = "Tensor hidden, Tensor offsets, Tensor weight, Tensor? bias"
torch.library.define("irkit::splade_pool", f"({_TENSORS}, str activation, str pooling) -> (Tensor, Tensor)")
torch.library.define(
    "irkit::splade_pool_backward",
    f"(Tensor grad, {_TENSORS}, Tensor weights, Tensor argmax, str activation, str pooling) "
    "-> (Tensor, Tensor, Tensor)",
)
for _device in ("cpu", "cuda"):
    torch.library.impl("irkit::splade_pool", _device, _forward)
    torch.library.impl("irkit::splade_pool_backward", _device, _backward)


@torch.library.register_fake("irkit::splade_pool")  # type: ignore[untyped-decorator]
def _(
    hidden: Tensor, offsets: Tensor, weight: Tensor, bias: Tensor | None, activation: str, pooling: str
) -> tuple[Tensor, Tensor]:
    n, v = offsets.shape[0] - 1, weight.shape[0]
    rows = n if pooling == "max" else 0  # of argmax
    return hidden.new_empty((n, v), dtype=torch.float32), hidden.new_empty((rows, v), dtype=torch.int32)


@torch.library.register_fake("irkit::splade_pool_backward")  # type: ignore[untyped-decorator]
def _(
    grad: Tensor, hidden: Tensor, offsets: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = weight.dtype if bias is None else bias.dtype
    d_bias = weight.new_empty(weight.shape[:1], dtype=dtype)
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape), d_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.activation, ctx.pooling = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    results = torch.ops.irkit.splade_pool_backward(grad, *saved, ctx.activation, ctx.pooling)
    return results[0], None, results[1], None if saved[3] is None else results[2], None, None


torch.library.register_autograd("irkit::splade_pool", _gradients, setup_context=_save)
