"""CPU code that replaces the kernels of a simulated CUDA device, see `recording`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["flash_backward", "flash_forward", "operators", "stand_ins"]


def operators() -> dict[str, Callable[..., Any]]:
    """Return the functions that irkit registers for CUDA, by the names of the operators."""
    from .maxsim import op as maxsim
    from .ragged_pool import op as ragged_pool
    from .splade_pool import op as splade_pool

    return {
        "ragged_pool": ragged_pool._pool,
        "maxsim": maxsim._forward,
        "maxsim_backward": maxsim._backward,
        "splade_pool": splade_pool._forward,
        "splade_pool_backward": splade_pool._backward,
    }


def stand_ins() -> dict[str, tuple[Any, str, Callable[..., None]]]:
    """Return the replacements of all Triton kernels.

    Returns:
        Name -> the module that launches the kernel, the kernel's name in this module, and a function on CPU
        tensors that replaces the kernel.
    """
    from ._products import triton_kernel as products
    from .gated_product import triton_kernel as gated_product
    from .maxsim import triton_gradients
    from .maxsim import triton_kernel as maxsim
    from .ragged_pool import triton_kernel as ragged_pool
    from .residual_maxsim import triton_kernel as residual_maxsim
    from .rotary import triton_kernel as rotary
    from .row_norm import triton_kernel as row_norm
    from .splade_pool import triton_kernel as splade_pool

    return {
        "ragged_pool": (ragged_pool, "fill", _ragged_pool),
        "maxsim": (maxsim, "score", _maxsim),
        "maxsim_query_gradients": (triton_gradients, "query_gradients", _query_gradients),
        "maxsim_document_gradients": (triton_gradients, "document_gradients", _document_gradients),
        "splade_pool": (splade_pool, "pool", _splade_pool),
        "products": (products, "gather_sum", _gather_sum),
        "residual_maxsim": (residual_maxsim, "score", _residual_maxsim),
        "residual_probe": (residual_maxsim, "visit", _residual_probe),
        "gated_product": (gated_product, "gate", _gated_product),
        "rotary": (rotary, "rotate_heads", _rotary),
        "row_norm": (row_norm, "normalize_rows", _row_norm),
    }


def _ragged_pool(
    values: Tensor, offsets: Tensor, pooled: Tensor, out: Tensor, rows: int, *_: Any, **options: Any
) -> None:
    from .ragged_pool.cpu_kernel import plain

    window = options["KERNEL"], options["STRIDE"]
    out.copy_(plain(values, offsets, pooled, *window, rows, options["TRANSPOSED"]))


def _maxsim(*tensors: Any, **options: Any) -> None:
    from .maxsim.reference import Tokens, maxsim_forward

    q, q_scales, q_offsets, d, d_scales, d_offsets, pairs, _, out, argmax, *_ = tensors
    scales = (q_scales, d_scales) if options["QUANTIZED"] else (None, None)
    queries, documents = Tokens(q, q_offsets, scales[0]).floats(), Tokens(d, d_offsets, scales[1]).floats()
    scores, positions = maxsim_forward(queries, documents, pairs if options["PAIRED"] else None)
    out.copy_(scores)
    if options["WITH_ARGMAX"]:
        argmax.copy_(positions)


def _query_gradients(*tensors: Any, **_: Any) -> None:
    out, query_of, grad, offsets, documents, argmax, n_q, *_ = tensors
    query_of.copy_(torch.repeat_interleave(torch.arange(n_q), offsets.diff()))
    weights = grad.T[:, query_of] * (argmax >= 0)
    out.copy_((weights[..., None] * documents[argmax].float()).sum(0) if len(documents) else torch.zeros(()))


def _document_gradients(*tensors: Any, **_: Any) -> None:
    out, query_of, grad, queries, _, argmax, *_ = tensors
    document, token = (argmax >= 0).nonzero(as_tuple=True)
    products = grad[query_of[token].long(), document][:, None] * queries[token].float()
    out.copy_(torch.zeros(out.shape).index_add_(0, argmax[document, token].long(), products))


def _gather_sum(*tensors: Any, **options: Any) -> None:
    out, table, order, ranges, indices, weights, count, width = tensors
    order, indices, weights, kind = (
        order.flatten(),
        indices.flatten().long(),
        weights.flatten(),
        options["KIND"],
    )
    for row in range(len(out)):
        if kind == 1:
            entries = torch.arange(count) * width + row
        else:
            positions = torch.arange(*ranges[row].tolist())
            entries = order[positions] + (positions // width * width if kind == 2 else 0)
        entries = entries[indices[entries] >= 0]
        index = entries % width if kind == 2 else indices[entries]
        out[row] = (weights[entries, None] * table[index].float()).sum(0)


def _splade_pool(*tensors: Any, **options: Any) -> None:
    from .splade_pool.tiled import forward

    hidden, offsets, weight, bias, out, argmax, *_ = tensors
    activation = ("relu", "log1p_relu", "log1p_log1p_relu")[options["LOGS"]]
    rest = bias if options["WITH_BIAS"] else None, activation, "sum" if options["SUM"] else "max"
    weights, positions = forward(hidden, offsets, weight, *rest)
    out.copy_(weights)
    if options["WITH_ARGMAX"]:
        argmax.copy_(positions)


def _gated_product(x: Tensor, out: Tensor, **options: Any) -> None:
    from .gated_product.reference import gated_product_reference

    out.copy_(gated_product_reference(x.float(), options["ACTIVATION"], options["GATE_LAST"]))


def _rotary(
    x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, tokens: int, stride: int, heads: int, **options: Any
) -> None:
    from .rotary.reference import rotary_reference

    out.copy_(rotary_reference(x.float(), cos, sin, options["INTERLEAVED"]))


def _row_norm(*arguments: Any, **options: Any) -> None:
    from .row_norm.reference import row_norm_reference

    x, weight, bias, added, out, _, _, _, eps, offset = arguments
    if options["WITH_ADDED"]:
        x = x + added
        if options["KEEP_SUM"]:
            added.copy_(x)
    parts = weight if options["WITH_WEIGHT"] else None, bias if options["WITH_BIAS"] else None
    out.copy_(row_norm_reference(x, *parts, eps=eps, rms=options["RMS"], offset=offset))


def _residual_maxsim(*tensors: Any, **options: Any) -> None:
    from .residual_maxsim import TensorTokens, tensor_interaction, tensor_maxsim

    table, queries, q_offsets, codes, coefficients, packed, d_offsets, codebook, pairs, out, *_ = tensors
    if options["NBITS"]:
        parts = TensorTokens(codes, coefficients, packed)
        out.copy_(tensor_maxsim(queries, table, q_offsets, parts, d_offsets, codebook, pairs))
    else:
        out.copy_(tensor_interaction(table, q_offsets, codes, d_offsets, pairs))


def _residual_probe(
    list_offsets: Tensor, lists: Tensor, visits: Tensor, counts: Tensor, *_: Any, **__: Any
) -> None:
    from .residual_maxsim import tensor_probe

    counts.copy_(tensor_probe(list_offsets, lists, visits, *counts.shape))


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Compute ``aten::_flash_attention_forward`` of ragged rows, with the checks of the CUDA kernel."""
    for tensor in (query, key, value):
        if tensor.dtype not in (torch.float16, torch.bfloat16) or tensor.stride(-1) != 1:
            raise RuntimeError(f"flash attention: got {tensor.dtype} with strides {tensor.stride()}")
        if tensor.shape[-1] % 8 or tensor.shape[-1] > 256:
            raise RuntimeError(f"flash attention: heads of width {tensor.shape[-1]}")
    for offsets, longest in ((query_offsets, max_q), (key_offsets, max_k)):
        if offsets.dtype != torch.int32 or len(offsets) < 2 or int(offsets.diff().max()) > longest:
            raise RuntimeError(f"flash attention: offsets {offsets}, the longest {longest}")
    if is_causal or return_debug_mask:
        raise RuntimeError("flash attention: not what the encoder asks for")
    seed = torch.randint(2**31, (2,)) if dropout_p else torch.zeros(2, dtype=torch.int64)
    out = torch.zeros_like(query)
    for queries, keys, weights, scales in _attention(
        query, key, query_offsets, key_offsets, dropout_p, seed, **options
    ):
        out[queries] = torch.einsum("hqk,khd->qhd", weights * scales, value[keys].float()).to(out.dtype)
    unused = query.new_empty(0)
    return out, query.new_zeros(query.shape[1], len(query), dtype=torch.float32), seed, unused, unused


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    seed: Tensor,
    unused: Tensor,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Compute ``aten::_flash_attention_backward`` of ragged rows."""
    d_query, d_key, d_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5
    for queries, keys, weights, scales in _attention(
        query, key, query_offsets, key_offsets, dropout_p, seed, **options
    ):
        upstream = grad[queries].float()
        d_weights = torch.einsum("qhd,khd->hqk", upstream, value[keys].float()) * scales
        d_scores = scale * weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
        d_query[queries] = torch.einsum("hqk,khd->qhd", d_scores, key[keys].float()).to(grad.dtype)
        d_key[keys] = torch.einsum("hqk,qhd->khd", d_scores, query[queries].float()).to(grad.dtype)
        d_value[keys] = torch.einsum("hqk,qhd->khd", weights * scales, upstream).to(grad.dtype)
    return d_query, d_key, d_value


def _attention(
    query: Tensor,
    key: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    dropout_p: float,
    seed: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yield, per row, its queries, its keys, the attention weights and the factors of dropout.

    Weights and factors are ``(heads, q, k)``; a factor is 0 or ``1 / (1 - dropout_p)``. Windows are measured
    from the diagonal that ends in the last query and the last key.
    """
    draws, ends = torch.Generator().manual_seed(int(seed[0])), (query_offsets.tolist(), key_offsets.tolist())
    for q, q_end, k, k_end in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
        queries, keys = slice(q, q_end), slice(k, k_end)
        scores = torch.einsum("qhd,khd->hqk", query[queries].float(), key[keys].float())
        distance = torch.arange(k_end - k) - torch.arange(q_end - q)[:, None] - (k_end - k - q_end + q)
        left, right = (None if size in (None, -1) else size for size in (window_size_left, window_size_right))
        far = torch.zeros_like(distance, dtype=torch.bool)
        far |= distance < -left if left is not None else False
        far |= distance > right if right is not None else False
        weights = (scores * (scale or query.shape[-1] ** -0.5)).masked_fill(far, -torch.inf).softmax(-1)
        retained = torch.rand(weights.shape, generator=draws) >= dropout_p
        yield queries, keys, weights.nan_to_num(0), retained.float() / (1 - dropout_p)
