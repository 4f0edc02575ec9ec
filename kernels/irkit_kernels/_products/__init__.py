"""Gradients of selected inner products of two tables of vectors.

MaxSim and SPLADE's pooling are maxima of inner products. The gradient of a maximum flows through one product
alone, so their backward passes need only the products that were maxima: a list of pairs of rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from .._jit import compile_ir, compiled_once, cpu_features
from .._threads import share, threads_for
from .._typed import Function, module

__all__ = ["product_gradients", "vector_lanes", "write_add_rows"]

_MIN_ENTRIES = 1 << 14  # products per thread; fewer are not worth another thread


def vector_lanes(features: frozenset[str]) -> int:
    """Return how many float32 numbers a vector register holds, on a CPU with these features."""
    if "avx512f" in features:
        return 16
    return 8 if {"avx2", "fma"} <= features else 4


def product_gradients(
    left: Tensor, right: Tensor, left_rows: Tensor, right_rows: Tensor, grads: Tensor
) -> tuple[Tensor, Tensor]:
    """Differentiate products ``<left[left_rows[e]], right[right_rows[e]]>`` with respect to both tables.

    Sums are float32 and run in the order of the products, without atomic additions, so results do not depend
    on the number of threads. On the CPU each thread takes some columns. On CUDA the products are sorted by
    the row that receives the gradient.

    Args:
        left: ``(l, d)`` floating point.
        right: ``(r, d)``.
        left_rows: ``(e,)`` int32, contiguous.
        right_rows: ``(e,)`` int32, contiguous; products with a negative row are skipped.
        grads: ``(e,)`` float32, contiguous, the gradients of the products.

    Returns:
        The gradients of ``left`` and ``right``, in their dtypes.
    """
    arguments = (left, right, left_rows, right_rows, grads)
    if left.is_cuda:
        from . import triton_kernel

        return triton_kernel.product_gradients(*arguments)
    if not cpu_features():
        return _in_torch(*arguments)
    entries, d, lanes = len(grads), left.shape[1], vector_lanes(cpu_features())
    tables = [x.float().contiguous() for x in (left, right)]
    outs, rows = [torch.zeros_like(table) for table in tables], (left_rows, right_rows)
    kernel = _compiled(lanes)

    def run(start: int, stop: int) -> None:
        for i in range(2):
            tensors = (outs[i], tables[1 - i], rows[i], rows[1 - i], grads)
            kernel(*(tensor.data_ptr() for tensor in tensors), entries, d, start, stop)

    share(run, d, threads_for(entries, _MIN_ENTRIES), parts=1, multiple=lanes)
    return outs[0].to(left.dtype), outs[1].to(right.dtype)


def _in_torch(
    left: Tensor, right: Tensor, left_rows: Tensor, right_rows: Tensor, grads: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients in torch, for machines without llvmlite; 1024 products at a time save memory."""
    outs = [torch.zeros_like(x, dtype=torch.float32) for x in (left, right)]
    for start in range(0, len(grads), 1024):
        part = slice(start, start + 1024)
        entries = (right_rows[part] >= 0).nonzero()[:, 0] + start
        i, j, by = left_rows[entries], right_rows[entries], grads[entries, None]
        outs[0].index_add_(0, i, by * right[j].float())
        outs[1].index_add_(0, j, by * left[i].float())
    return outs[0].to(left.dtype), outs[1].to(right.dtype)


@compiled_once
def _compiled(lanes: int) -> Callable[..., None]:
    arguments = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 4
    return compile_ir(write_add_rows(lanes), "add_rows", arguments)


def write_add_rows(lanes: int) -> str:
    """Write the module of ``add_rows``: ``out[out_rows[i]] += weights[i] * table[table_rows[i]]``, in order.

    Only columns ``start`` to ``stop`` are added. Negative rows are skipped. ``out`` and ``table`` are float32
    of width ``d``.
    """
    pointers = {
        "out": "float*",
        "table": "float*",
        "out_rows": "i32*",
        "table_rows": "i32*",
        "weights": "float*",
    }
    numbers = dict.fromkeys(("n", "d", "start", "stop"), "i64")
    x = Function("add_rows", public=True, align=1, **pointers, **numbers)
    out, table, out_rows, table_rows, weights, n, d, start, stop = x.parameters
    whole = stop - (stop - start) % lanes

    with x.range(0, n) as products:
        out_row, table_row = (rows[products.i].to("i64") for rows in (out_rows, table_rows))
        weight = weights[products.i]
        with x.when((out_row | table_row) >= 0):
            # whole vectors of columns, then single columns
            for first, end, width in ((start, whole, lanes), (whole, stop, 1)):
                with x.range(first, end, width) as columns:
                    factor = weight.broadcast(width) if width > 1 else weight
                    target, source = out.at(out_row * d + columns.i), table.at(table_row * d + columns.i)
                    if width > 1:
                        target, source = target.vectors(width), source.vectors(width)
                    product = factor * source[0]
                    target[0] = target[0] + product
    return module(x)
