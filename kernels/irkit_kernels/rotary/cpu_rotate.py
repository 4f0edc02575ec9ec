"""The code of `rotary` in LLVM IR, and its distribution among threads.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._jit import compile_ir, compiled_once
from .._threads import share, threads_for
from .._typed import Function, module

__all__ = ["rotate", "write_rotate"]

LANES = 16
_MIN_WORK = 1 << 17  # numbers per thread, about 0.05 ms


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Run the kernel on tensors that `rotary` has checked."""
    (n, heads, width), stride = x.shape, x.stride(0)
    kernel = _compiled()

    def run(start: int, stop: int) -> None:
        angles = 2 * width * start  # bytes of width / 2 numbers per token
        tables = cos.data_ptr() + angles, sin.data_ptr() + angles
        rows, result = x.data_ptr() + 4 * stride * start, out.data_ptr() + 4 * heads * width * start
        kernel(rows, *tables, result, stop - start, heads, stride, width // 2)

    share(run, n, threads_for(x.numel(), _MIN_WORK), parts=1)


@compiled_once
def _compiled() -> Callable[..., None]:
    numbers: list[Any] = [ctypes.c_int64] * 4
    return compile_ir(write_rotate(), "rotary", [ctypes.c_void_p] * 4 + numbers)


def write_rotate() -> str:
    """Return the module of ``rotary(x, cos, sin, out, n, heads, stride, half)``."""
    arrays: dict[str, Any] = dict.fromkeys(("x", "cos", "sin", "out"), "float*")
    sizes: dict[str, Any] = dict.fromkeys(("n", "heads", "stride", "half"), "i64")
    f = Function("rotary", public=True, **arrays, **sizes)
    x, cos, sin, out, n, heads, stride, half = f.parameters
    with f.range(0, n) as tokens, f.range(0, half, LANES) as pairs:
        # the angles of 16 pairs, for all heads
        angle = tokens.i * half + pairs.i
        c, s = (table.at(angle).vectors(LANES)[0] for table in (cos, sin))
        with f.range(0, heads) as each:
            first = each.i * (half * 2) + pairs.i
            source, target = x.at(tokens.i * stride + first), out.at(tokens.i * heads * (half * 2) + first)
            a, b = source.vectors(LANES)[0], source.at(half).vectors(LANES)[0]
            target.vectors(LANES)[0] = a * c - b * s
            target.at(half).vectors(LANES)[0] = b * c + a * s
    return module(f)
