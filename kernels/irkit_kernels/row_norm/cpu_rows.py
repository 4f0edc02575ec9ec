"""The code of `row_norm` in LLVM IR, and its distribution among threads.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

A row is read from memory once. While its sum or squares are added up it comes into the first-level cache,
from where it is read again for the deviations and for the result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._jit import compile_ir, compiled_once
from .._threads import share, threads_for
from .._typed import Array, Function, Value, module, vector

__all__ = ["norm_of_rows", "normalize", "write_norm"]

LANES = 16
UNROLLED = 4  # vectors of a step: as many sums hide the latency of additions
_FLOATS = vector(LANES, "float")
_MIN_WORK = 1 << 17  # numbers per thread, about 0.05 ms


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    added: Tensor | None,
    out: Tensor,
    *,
    eps: float,
    rms: bool,
    offset: float,
) -> None:
    """Run the kernel; see `row_norm` for the tensors, which it has checked."""
    heads = x.shape[1] if x.dim() == 3 else 1
    width, stride = x.shape[-1], x.stride(0)
    kernel = _compiled(rms, added is not None, weight is not None, bias is not None)
    fixed = [0 if part is None else part.data_ptr() for part in (weight, bias)]

    def run(start: int, stop: int) -> None:
        own = 4 * start * heads * width
        sums = 0 if added is None else added.data_ptr() + own
        rows = x.data_ptr() + 4 * start * stride, sums, *fixed, out.data_ptr() + own
        kernel(*rows, stop - start, heads, stride, width, eps, offset)

    share(run, len(x), threads_for(x.numel(), _MIN_WORK), parts=1)


@compiled_once
def _compiled(rms: bool, add: bool, weight: bool, bias: bool) -> Callable[..., None]:
    numbers: list[Any] = [ctypes.c_int64] * 4 + [ctypes.c_float] * 2
    return compile_ir(write_norm(rms, add, weight, bias), "row_norm", [ctypes.c_void_p] * 5 + numbers)


def write_norm(rms: bool, add: bool, weight: bool, bias: bool) -> str:
    """Return the module of ``row_norm``."""
    return module(norm_of_rows(rms, add, weight, bias))


def norm_of_rows(rms: bool, add: bool, weight: bool, bias: bool) -> Function:
    """Return the function ``row_norm``, whose parameters are below."""
    arrays: dict[str, Any] = dict.fromkeys(("x", "added", "weights", "biases", "out"), "float*")
    sizes: dict[str, Any] = dict.fromkeys(("n", "heads", "stride", "width"), "i64")
    f = Function("row_norm", public=True, **arrays, **sizes, eps="float", offset="float")
    x, added, weights, biases, out, n, heads, stride, width, eps, offset = f.parameters
    count = f.where(width > 0, width, 1).to("float")
    with f.range(0, n) as rows, f.range(0, heads) as each:
        row = x.at(rows.i * stride + each.i * width)
        at = (rows.i * heads + each.i) * width
        # the sum of the numbers, or of their squares; x + added is stored
        source = added.at(at) if add else row

        def first(part: Array, i: Value, mask: Value | None, row: Array = row, add: bool = add) -> Value:
            y = _load(f, row, i, mask)
            if add:
                y = y + _load(f, part, i, mask)
                _store(f, part, i, y, mask)
            return y * y if rms else y

        total = _reduce(f, width, lambda i, mask: first(source, i, mask))
        if rms:
            mean, spread = None, total / count
        else:
            mean = (total / count).broadcast(LANES)

            def squared(i: Value, mask: Value | None, mean: Value = mean) -> Value:
                y = _load(f, source, i, mask) - mean
                y = y if mask is None else f.where(mask, y, 0)
                return y * y

            spread = _reduce(f, width, squared) / count
        # the result
        factor = (1.0 / f.intrinsic("sqrt", "float", spread + eps)).broadcast(LANES)
        for start, stop, step, vectors in _steps(width):
            with f.range(start, stop, step) as loop:
                for j in range(vectors):
                    i, mask = loop.i + LANES * j, None if vectors > 1 else _below(f, width - loop.i)
                    y = _load(f, source, i, mask)
                    y = (y if mean is None else y - mean) * factor
                    if weight:
                        y = y * (_load(f, weights, i, mask) + offset.broadcast(LANES))
                    if bias:
                        y = y + _load(f, biases, i, mask)
                    _store(f, out.at(at), i, y, mask)
    return f


def _reduce(f: Function, width: Value, term: Callable[[Value, Value | None], Value]) -> Value:
    """Add up what ``term`` returns for every vector of a row; lanes after the end must be 0."""
    sums = [f.constant(_FLOATS, 0)] * UNROLLED
    for start, stop, step, vectors in _steps(width):
        with f.range(start, stop, step, sums=sums) as loop:
            mask = None if vectors > 1 else _below(f, width - loop.i)
            new = [loop.sums[j] + term(loop.i + LANES * j, mask) for j in range(vectors)]
            loop.sums = new + loop.sums[vectors:]
        sums = loop.sums
    whole = (sums[0] + sums[1]) + (sums[2] + sums[3])
    return f.intrinsic("vector.reduce.fadd", "float", f.constant("float", 0), whole, flags="reassoc")


def _steps(width: Value) -> tuple[tuple[Any, Any, int, int], ...]:
    """Return start, stop, step and vectors of two loops: whole steps, then single vectors with a mask."""
    whole = width & -LANES * UNROLLED
    return (0, whole, LANES * UNROLLED, UNROLLED), (whole, width, LANES, 1)


def _load(f: Function, array: Array, i: Value, mask: Value | None) -> Value:
    start = array.at(i)
    return start.vectors(LANES)[0] if mask is None else f.masked_load(start, mask, align=4)


def _store(f: Function, array: Array, i: Value, value: Value, mask: Value | None) -> None:
    if mask is None:
        array.at(i).vectors(LANES)[0] = value
    else:
        f.masked_store(array.at(i), value, mask, align=4)


def _below(f: Function, end: Value) -> Value:
    """Return which lanes are below ``end``."""
    return f.constants("i32", range(LANES)) < end.to("i32").broadcast(LANES)
