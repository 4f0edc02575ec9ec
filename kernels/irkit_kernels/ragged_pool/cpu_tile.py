"""The code of mean pooling on the CPU, in LLVM IR: weighted sums of rows, 64 columns at a time.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

Forward, a row of the output is a window and sums its tokens. Transposed, a row is a token and sums the
windows it lies in. In both directions a summand has the weight 1 / (tokens of its window). Only the last
window of a sequence may have fewer than ``kernel`` tokens.
"""

from __future__ import annotations

from .._simd import load_floats, store_floats
from .._typed import Array, Function, Value, module, vector

__all__ = ["write_ir"]

_LANES = 16  # per vector; LLVM splits vectors on CPUs with smaller registers
_VECTORS = 4  # summed at the same time: enough to hide the latency of a multiply-add


def write_ir(bfloat16: bool, transposed: bool, rounds: bool) -> str:
    """Return the LLVM IR module of ``ragged_pool``, which fills rows ``start`` to ``stop`` of the output.

    Args:
        bfloat16: Values and output are bfloat16, else float32.
        transposed: Compute the gradient instead of the forward.
        rounds: The CPU has an instruction that rounds to bfloat16.
    """
    kind = "u16*" if bfloat16 else "float*"
    numbers = dict.fromkeys(("n", "d", "kernel", "stride", "start", "stop"), "i64")
    x = Function(
        "ragged_pool", public=True, align=1, out=kind, values=kind, offsets="i32*", pooled="i32*", **numbers
    )
    out, values, offsets, pooled, n, d, kernel, stride, start, stop = x.parameters
    full_weight = _reciprocal(kernel)

    with x.range(0, n) as sequences:
        first_token, tokens = _span(offsets, sequences.i)
        first_window, windows = _span(pooled, sequences.i)
        last = windows - 1
        last_weight = _reciprocal(tokens - last * stride)
        first, count = (first_token, tokens) if transposed else (first_window, windows)
        first_source = first_window if transposed else first_token

        with x.range(x.maximum(start, first), x.minimum(stop, first + count)) as rows:
            # the range of the row's summands: windows that contain the token, or tokens of the window
            row = rows.i - first
            if transposed:
                begin = x.maximum((row - kernel + stride) // stride, 0)
                end = x.minimum(row // stride + 1, windows)
            else:
                begin = row * stride
                end = x.minimum(begin + kernel, tokens)

            # four vectors of columns at a time, then single vectors, then single columns
            blocks, whole = (d & -step for step in (_VECTORS * _LANES, _LANES))
            for low, high, vectors, lanes in (
                (0, blocks, _VECTORS, _LANES),
                (blocks, whole, 1, _LANES),
                (whole, d, 1, 1),
            ):
                with x.range(low, high, vectors * lanes) as columns:
                    zeros = [x.constant(vector(lanes, "float"), 0)] * vectors
                    with x.range(begin, end, sums=zeros) as summands:
                        is_last = (summands.i if transposed else row) == last
                        weight = x.where(is_last, last_weight, full_weight).broadcast(lanes)
                        source = values.at((first_source + summands.i) * d + columns.i)
                        loaded = [load_floats(source.at(v * lanes), lanes) for v in range(vectors)]
                        summands.sums = [
                            x.fmuladd(number, weight, total)
                            for number, total in zip(loaded, summands.sums, strict=True)
                        ]
                    target = out.at(rows.i * d + columns.i)
                    for v, total in enumerate(summands.sums):
                        store_floats(target.at(v * lanes), total, rounds)
    return module(x)


def _span(offsets: Array, i: Value) -> tuple[Value, Value]:
    """Return the start of row ``i``, and its length."""
    start, stop = (offsets[i + k].to("i64") for k in (0, 1))
    return start, stop - start


def _reciprocal(integer: Value) -> Value:
    return 1.0 / integer.to("float")
