"""Gradients of chosen inner products of two tables of vectors, which is what is left of a maximum of many."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from .._jit import Code, Values, compile_ir, cpu_features
from .._threads import share

__all__ = ["product_gradients", "vector_lanes"]

_MIN_ENTRIES = 1 << 14  # rows added worth a thread


def vector_lanes(features: frozenset[str]) -> int:
    """float32 numbers in a vector register of a CPU with these features."""
    if "avx512f" in features:
        return 16
    return 8 if {"avx2", "fma"} <= features else 4


def product_gradients(
    left: Tensor, right: Tensor, left_rows: Tensor, right_rows: Tensor, grads: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of both tables from those of products ``<left[left_rows[e]], right[right_rows[e]]>``.

    Products whose right row is negative are passed over. Sums are float32, in the order of the products:
    nothing is added atomically, and nothing depends on the number of threads. On the CPU threads take
    columns, on CUDA the products are sorted by the row that gets the gradient.

    Args:
        left: ``(l, d)`` floating point.
        right: ``(r, d)``.
        left_rows: ``(e,)`` int32, contiguous.
        right_rows: ``(e,)`` int32, contiguous.
        grads: ``(e,)`` float32, contiguous.
    """
    arguments = (left, right, left_rows, right_rows, grads)
    if left.is_cuda:
        from . import triton_kernel

        return triton_kernel.product_gradients(*arguments)
    if not cpu_features():
        return _plain(*arguments)
    entries, d, lanes = len(grads), left.shape[1], vector_lanes(cpu_features())
    tables = [x.float().contiguous() for x in (left, right)]
    outs, rows = [torch.zeros_like(table) for table in tables], (left_rows, right_rows)
    kernel = _compiled(lanes)

    def run(start: int, stop: int) -> None:
        for i in range(2):
            tensors = (outs[i], tables[1 - i], rows[i], rows[1 - i], grads)
            kernel(*(tensor.data_ptr() for tensor in tensors), entries, d, start, stop)

    share(run, d, min(torch.get_num_threads(), entries // _MIN_ENTRIES), parts=1, multiple=lanes)
    return outs[0].to(left.dtype), outs[1].to(right.dtype)


def _plain(
    left: Tensor, right: Tensor, left_rows: Tensor, right_rows: Tensor, grads: Tensor
) -> tuple[Tensor, Tensor]:
    outs = [torch.zeros_like(x, dtype=torch.float32) for x in (left, right)]
    for start in range(0, len(grads), 1024):
        part = slice(start, start + 1024)
        entries = (right_rows[part] >= 0).nonzero()[:, 0] + start
        i, j, by = left_rows[entries], right_rows[entries], grads[entries, None]
        outs[0].index_add_(0, i, by * right[j].float())
        outs[1].index_add_(0, j, by * left[i].float())
    return outs[0].to(left.dtype), outs[1].to(right.dtype)


@cache
def _compiled(lanes: int) -> Callable[..., None]:
    arguments = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 4
    return compile_ir(_write_add_rows(lanes), "add_rows", arguments)


def _write_add_rows(lanes: int) -> str:
    """The module of ``out[out_rows[i]] += weights[i] * table[table_rows[i]]``, in order, for some columns.

    Negative rows are passed over. ``out`` and ``table`` are float32 of width ``d``.
    """
    c, floats = Code(), f"<{lanes} x float>"
    whole = c.sub("%stop", c.op(f"srem i64 {c.sub('%stop', '%start')}, {lanes}"))

    def entry(i: str, _: Values) -> None:
        rows = [
            c.op(f"sext i32 {c.load('i32', name, c.mul(i, 4))} to i64")
            for name in ("%out_rows", "%table_rows")
        ]
        weight = c.load("float", "%weights", c.mul(i, 4))

        def add(width: int, column: str, _: Values) -> None:
            kind = floats if width > 1 else "float"
            factor = c.broadcast(lanes, "float", weight) if width > 1 else weight
            target, source = (
                c.at(pointer, c.mul(c.add(c.mul(row, "%d"), column), 4))
                for pointer, row in zip(("%out", "%table"), rows, strict=True)
            )
            product = c.op(f"fmul {kind} {factor}, {c.load(kind, source)}")
            c.store(kind, c.op(f"fadd {kind} {c.load(kind, target)}, {product}"), target)

        def row() -> None:
            c.loop("%start", whole, lanes, partial(add, lanes))
            c.loop(whole, "%stop", 1, partial(add, 1))

        c.when(c.op(f"icmp sge i64 {c.op('or i64 ' + ', '.join(rows))}, 0"), row)

    c.loop(0, "%n", 1, entry)
    return c.function(
        "define void @add_rows(ptr %out, ptr %table, ptr %out_rows, ptr %table_rows, ptr %weights, i64 %n, "
        "i64 %d, i64 %start, i64 %stop)"
    )
