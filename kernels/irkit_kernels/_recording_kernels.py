"""What stands in for the Triton kernels of a device that is not there, see `recording`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["operators", "stand_ins"]


def operators() -> dict[str, Callable[..., Any]]:
    """What is registered for CUDA, by the names of the operators."""
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
    """For each kernel the module that launches it, its name there, and what runs on CPU tensors instead."""
    from ._products import triton_kernel as products
    from .maxsim import triton_kernel as maxsim
    from .ragged_pool import triton_kernel as ragged_pool
    from .residual_maxsim import triton_kernel as residual_maxsim
    from .splade_pool import triton_kernel as splade_pool

    return {
        "ragged_pool": (ragged_pool, "fill", _ragged_pool),
        "maxsim": (maxsim, "score", _maxsim),
        "splade_pool": (splade_pool, "pool", _splade_pool),
        "products": (products, "gather_sum", _gather_sum),
        "residual_maxsim": (residual_maxsim, "score", _residual_maxsim),
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
    scores, places = maxsim_forward(queries, documents, pairs if options["PAIRED"] else None)
    out.copy_(scores)
    if options["WITH_ARGMAX"]:
        argmax.copy_(places)


def _gather_sum(
    out: Tensor, table: Tensor, order: Tensor, starts: Tensor, indices: Tensor, weights: Tensor, **_: Any
) -> None:
    for row, (start, stop) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        entries = order[start:stop]
        entries = entries[indices[entries] >= 0]
        out[row] = (weights[entries, None] * table[indices[entries].long()].float()).sum(0)


def _splade_pool(*tensors: Any, **options: Any) -> None:
    from .splade_pool.tiled import forward

    hidden, offsets, weight, bias, out, argmax, *_ = tensors
    activation = ("relu", "log1p_relu", "log1p_log1p_relu")[options["LOGS"]]
    rest = bias if options["WITH_BIAS"] else None, activation, "sum" if options["SUM"] else "max"
    weights, places = forward(hidden, offsets, weight, *rest)
    out.copy_(weights)
    if options["WITH_ARGMAX"]:
        argmax.copy_(places)


def _residual_maxsim(*tensors: Any, **options: Any) -> None:
    from .residual_maxsim.tensor_op import tensor_interaction, tensor_maxsim

    table, queries, q_offsets, codes, coefficients, packed, d_offsets, codebook, pairs, out, *_ = tensors
    if options["NBITS"]:
        parts = (codes, coefficients, packed)
        out.copy_(tensor_maxsim(queries, table, q_offsets, parts, d_offsets, codebook, pairs))
    else:
        out.copy_(tensor_interaction(table, q_offsets, codes, d_offsets, pairs))
