"""The code of the int8 linear layer, in LLVM IR: 8-bit dot products fused with everything around them.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

A block of rows of ``x`` is quantised into the cache. It is multiplied, one panel of 64 output features after
the other, in tiles of 6 rows x 64 features. The 24 accumulators of a tile stay in registers; they are scaled,
bias and activation are applied, and only then are they stored. A gated layer has in each panel 32 features
that are activated and the 32 that multiply them, so only the 32 products are stored. A CPU without the dot
product instruction of AVX512-VNNI runs the same code with ordinary multiplications: the same numbers, much
slower. README.md has the maths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .._simd import dot_bytes
from .._typed import Array, Function, Value, module, vector

__all__ = [
    "ACTIVATIONS",
    "BLOCK",
    "HEADER",
    "LANES",
    "PANEL",
    "TILE_ROWS",
    "panel_columns",
    "write_ir",
]

LANES = 16
TILE_ROWS = 6
TILE_VECTORS = 4  # 6 x 4 accumulators, 4 vectors of weights and one of x fit the 32 registers of AVX-512
PANEL = TILE_VECTORS * LANES
HEADER = 3 * 4 * PANEL  # bytes before a panel's weights: their sums (int32), scales and biases (float32)
BLOCK = 8 * TILE_ROWS  # rows quantised together, so that a panel is fetched once for 8 tiles

_INTS, _FLOATS = vector(LANES, "i32"), vector(LANES, "float")
_NO_SPAN = 1e-30  # a row with a smaller span counts as zeros, because the reciprocal could overflow
_ROUND = 1.5 * 2**23  # adding it rounds a float32 to an integer, which is in the low bits of the sum
_ROUND_BITS = 0x4B400000  # the bits of _ROUND
# Phi(x) - 1/2 = x P(x^2 - 9.5) for |x| <= 4.375, exactly 1/2 at the edge and beyond. P is the polynomial of
# degree 8 with the smallest maximum error in GELU, 2.7e-5.
_GELU_EDGE, _GELU_CENTRE = 4.375, 9.5
_GELU = (
    1.618856368e-01,
    -8.337188622e-03,
    6.140283337e-04,
    -4.654408068e-05,
    3.239048329e-06,
    -2.000492436e-07,
    1.428165134e-08,
    -1.070439963e-09,
    3.900591874e-11,
)

_EXP_EDGE = 87.0  # beyond it exp overflows or vanishes in float32
# 2^x for |x| <= 1/2, with a relative error of at most 7.5e-08
_EXP2 = (
    1.000000072e00,
    6.931469670e-01,
    2.402211973e-01,
    5.550713317e-02,
    9.675541221e-03,
    1.327645784e-03,
)


def write_ir(activation: str, gated: bool, vnni: bool) -> str:
    """Return the LLVM IR module of ``int8_linear(x, packed, out, scratch, m, k, n)``.

    ``n`` counts the features of ``out``. ``scratch`` holds the quantised values of a block,
    ``ceil(k / 16) * 16`` bytes per row; then the scales of all rows, then their zero points.
    """
    return module(_quantize(), _tile("tile", activation, gated, vnni), _linear(panel_columns(gated)))


def write_feed_forward(activation: str, gated: bool, vnni: bool) -> str:
    """Return the LLVM IR module of ``feed_forward(x, up, down, out, scratch, m, k, h, n)``.

    The first layer has ``k`` features in and ``h`` out, with activation and gate, the second ``h`` and ``n``.
    ``scratch`` holds the hidden numbers of a block of rows, ``h`` float32 per row; then what `write_ir` says,
    for the longer of both inputs.
    """
    tiles = _tile("up", activation, gated, vnni), _tile("down", "none", False, vnni)
    return module(_quantize(), *tiles, _feed_forward(panel_columns(gated)))


def panel_columns(gated: bool) -> int:
    """Return how many features of the output a panel gives."""
    return PANEL // 2 if gated else PANEL


class _Block:
    """A block of rows whose quantised values are in the cache."""

    def __init__(self, f: Function, scratch: Array, width: Value) -> None:
        self.f, self.scratch, self.width = f, scratch, width
        self.scales = scratch.at(width * BLOCK).cast("float", 1)
        self.zeros = self.scales.at(BLOCK).cast("i32", 1)

    def quantize(self, x: Array, k: Value, rows: Value) -> None:
        """Quantise rows of ``k`` numbers."""
        with self.f.range(0, rows) as loop:
            row, q = x.at(loop.i * k), self.scratch.at(loop.i * self.width)
            self.f.call("quantize", row, k, q, self.scales.at(loop.i), self.zeros.at(loop.i))

    def multiply(
        self, tile: str, packed: Array, k: Value, out: Array, n: Value, rows: Value, step: int = PANEL
    ) -> None:
        """Multiply the rows with all panels, which give ``step`` features each, by a function `_tile`."""
        f, panel_size = self.f, ((k + 3) & -4) * PANEL + HEADER
        with f.range(0, n, step) as panels:
            weights = packed.at(panels.i.cast("u64") // step * panel_size)
            columns = n - panels.i
            with f.range(0, rows, TILE_ROWS) as tiles:
                q, tile_rows = self.scratch.at(tiles.i * self.width), rows - tiles.i
                scale, zero = self.scales.at(tiles.i), self.zeros.at(tiles.i)
                target = out.at(tiles.i * n + panels.i)
                f.call(tile, q, self.width, scale, zero, weights, k, target, n, tile_rows, columns)


def _linear(step: int) -> Function:
    """Quantise each block of rows, then multiply it with all panels, which give ``step`` features each."""
    pointers = {"x": "float*", "packed": "u8*", "out": "float*", "scratch": "u8*"}
    f = Function("int8_linear", public=True, align=1, **pointers, **dict.fromkeys("mkn", "i64"))
    x, packed, out, scratch, m, k, n = f.parameters
    block = _Block(f, scratch, _width(k))
    with f.range(0, m, BLOCK) as blocks:
        rows = f.minimum(m - blocks.i, BLOCK)
        block.quantize(x.at(blocks.i * k), k, rows)
        block.multiply("tile", packed, k, out.at(blocks.i * n), n, rows, step)
    return f


def _feed_forward(step: int) -> Function:
    """Pass each block of rows through both layers; the panels of the first give ``step`` features each."""
    pointers = {"x": "float*", "up": "u8*", "down": "u8*", "out": "float*", "scratch": "u8*"}
    f = Function("feed_forward", public=True, align=1, **pointers, **dict.fromkeys("mkhn", "i64"))
    x, up, down, out, scratch, m, k, h, n = f.parameters
    hidden = scratch.cast("float", 1)
    block = _Block(f, scratch.at(h * (4 * BLOCK)), f.maximum(_width(k), _width(h)))
    with f.range(0, m, BLOCK) as blocks:
        rows = f.minimum(m - blocks.i, BLOCK)
        block.quantize(x.at(blocks.i * k), k, rows)
        block.multiply("up", up, k, hidden, h, rows, step)
        block.quantize(hidden, h, rows)
        block.multiply("down", down, h, out.at(blocks.i * n), n, rows)
    return f


def _width(k: Value) -> Value:
    """Return the bytes of a quantised row of ``k`` numbers."""
    return (k + (LANES - 1)) & -LANES


def _quantize() -> Function:
    """Quantise a row: ``q = min(round(x / scale) + zero, 255)``. NaN or infinity make the scale NaN."""
    f = Function("quantize", align=1, x="float*", k="i64", q="u8*", scale="float*", zero="i32*")
    x, k, q, scale, zero = f.parameters

    # smallest and largest number; `invalid` becomes NaN if a number is NaN or infinite
    low = high = invalid = nothing = f.constant(_FLOATS, 0)
    whole = k & -4 * LANES
    for start, stop, vectors in ((0, whole, 4), (whole, k, 1)):
        with f.range(start, stop, vectors * LANES, low=low, high=high, invalid=invalid) as loop:
            product = nothing
            for numbers in _load_row(f, x, k, loop.i, vectors):
                loop.low, loop.high = f.minimum(numbers, loop.low), f.maximum(numbers, loop.high)
                product = f.fmuladd(numbers, nothing, product)  # 0, or NaN
            loop.invalid += product
        low, high, invalid = loop.low, loop.high, loop.invalid
    smallest = f.intrinsic("vector.reduce.fmin", "float", low, flags="nnan")
    largest = f.intrinsic("vector.reduce.fmax", "float", high, flags="nnan")
    zero_float = f.constant("float", 0)
    invalid = f.intrinsic("vector.reduce.fadd", "float", zero_float, invalid, flags="reassoc")

    # scale and zero point
    span = (largest - smallest) + invalid
    inverse = f.where(span > _NO_SPAN, 255.0 / span, 0.0)
    bits = (-smallest * inverse + _ROUND).cast("i32")
    zero[0] = bits - _ROUND_BITS
    scale[0] = span / 255.0
    factor = inverse.broadcast(LANES)
    offset = (bits - (2 * _ROUND_BITS - 2**32)).broadcast(LANES)

    # quantised numbers
    whole = k & -4 * LANES
    for start, stop, vectors in ((0, whole, 4), (whole, k, 1)):
        with f.range(start, stop, vectors * LANES) as loop:
            for j, numbers in enumerate(_load_row(f, x, k, loop.i, vectors)):
                level = (numbers * factor + _ROUND).cast(_INTS) + offset
                level = f.where(level > 255, 255, level)
                q.at(loop.i).vectors(LANES)[LANES * j] = level.to("u8")
    return f


def _load_row(f: Function, x: Array, k: Value, i: Value, vectors: int) -> list[Value]:
    """Load 4 vectors of the row from column ``i``, or one vector with zeros after the end of the row."""
    start = x.at(i)
    if vectors > 1:
        return [start.vectors(LANES)[LANES * j] for j in range(vectors)]
    return [f.masked_load(start, _columns_below(f, 0, k - i), align=4)]


def _tile(name: str, activation: str, gated: bool, vnni: bool) -> Function:
    """Multiply 6 rows of ``q`` with one panel, and store ``rows`` rows and ``columns`` columns.

    The remaining rows and columns of the tile lie beyond the end of ``out``.
    """
    pointers: dict[str, Any] = {"scales": "float*", "zeros": "i32*", "panel": "u8*"}
    numbers: dict[str, Any] = {"n": "i64", "rows": "i64", "columns": "i64"}
    f = Function(name, align=1, q="u8*", width="i64", **pointers, k="i64", out="float*", **numbers)
    q, width, scales, zeros, panel, k, out, n, rows, columns = f.parameters
    vectors = range(TILE_VECTORS)
    weights = panel.at(HEADER)
    q_rows = [q.at(width * row).cast("i32", 1, 1) for row in range(TILE_ROWS)]

    # fetch the cache lines of the output meanwhile
    for row in range(TILE_ROWS):
        target = out.cast("float", 1, 1).at(n * (4 * row))
        for column in range(0, panel_columns(gated), LANES):
            f.prefetch(target.at(4 * column), write=True)

    # sums of products, 4 along k in each step
    with f.range(0, k, 4, sums=[f.constant(_INTS, 0)] * (TILE_ROWS * TILE_VECTORS)) as loop:
        step_weights = weights.at(loop.i * PANEL).cast("i32", 1).vectors(LANES)
        w, sums = [step_weights[LANES * j] for j in vectors], []
        for r, q_row in enumerate(q_rows):
            u = q_row[loop.i].broadcast(LANES)
            sums += [dot_bytes(loop.sums[r * TILE_VECTORS + j], u, w[j], vnni) for j in vectors]
        loop.sums = sums

    # the header of the panel
    w_sums = [panel.cast("i32", 1).vectors(LANES)[LANES * j] for j in vectors]
    floats = panel.cast("float", 1).vectors(LANES)
    w_scales, biases = ([floats[start + LANES * j] for j in vectors] for start in (PANEL, 2 * PANEL))
    outputs = range(panel_columns(gated) // LANES)
    masks = [_columns_below(f, LANES * j, columns) for j in outputs]

    # zero points, scales, bias, activation and gate
    for row in range(TILE_ROWS):
        with f.when(rows > row):
            scale, zero = scales[row].broadcast(LANES), zeros[row].broadcast(LANES)
            target = out.cast("float", 1, 1).at(n * (4 * row)).cast("float", 1)

            def result(j: int, sums: list[Value], scale: Value = scale, zero: Value = zero) -> Value:
                total = sums[j] - zero * w_sums[j]
                factor = scale * w_scales[j]
                return f.fmuladd(total.to("float"), factor, biases[j])

            for j in outputs:
                sums = loop.sums[row * TILE_VECTORS :]
                y = ACTIVATIONS[activation](f, result(j, sums))
                y = y * result(j + len(outputs), sums) if gated else y
                f.masked_store(target.at(LANES * j), y, masks[j], align=4)
    return f


def _gelu(f: Function, x: Value) -> Value:
    """Compute GELU, ``x * Phi(x)``, with the polynomial ``_GELU`` for Phi."""

    def constant(value: float) -> Value:
        return f.constant(_FLOATS, value)

    inside = f.maximum(f.minimum(x, _GELU_EDGE), -_GELU_EDGE)
    t = f.fmuladd(inside, inside, constant(-_GELU_CENTRE))
    p, *rest = map(constant, reversed(_GELU))
    for coefficient in rest:
        p = f.fmuladd(p, t, coefficient)
    return x * f.fmuladd(p, inside, constant(0.5))


def _silu(f: Function, x: Value) -> Value:
    """Compute SiLU, ``x / (1 + exp(-x))``."""
    return _weighted(f, x, x)


def _gelu_tanh(f: Function, x: Value) -> Value:
    """Compute the GELU with tanh: ``x / (1 + exp(-2 z))`` of ``z = sqrt(2 / pi) (x + 0.044715 x^3)``."""
    twice = 2 * (2 / math.pi) ** 0.5
    cubic, linear = (f.constant(_FLOATS, twice * factor) for factor in (0.044715, 1))
    return _weighted(f, x, x * f.fmuladd(x * x, cubic, linear))


def _weighted(f: Function, x: Value, z: Value) -> Value:
    """Compute ``x / (1 + exp(-z))``; the exponential is ``2^whole * 2^part``, the latter a polynomial."""
    inside = f.maximum(f.minimum(z, _EXP_EDGE), -_EXP_EDGE)
    power = inside * -math.log2(math.e)
    rounded = power + _ROUND
    part = power - (rounded - _ROUND)
    p, *rest = (f.constant(_FLOATS, value) for value in reversed(_EXP2))
    for coefficient in rest:
        p = f.fmuladd(p, part, coefficient)
    whole = (rounded.cast(_INTS) - (_ROUND_BITS - 127)) << 23
    weighted = x / f.fmuladd(p, whole.cast(_FLOATS), f.constant(_FLOATS, 1))
    return f.where(z < -_EXP_EDGE, 0, weighted)


ACTIVATIONS: dict[str, Callable[[Function, Value], Value]] = {
    "none": lambda f, x: x,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
}


def _columns_below(f: Function, first: int, end: Value) -> Value:
    """Return which of the numbers ``first``, ``first`` + 1, ..., one per lane, are below ``end``."""
    last = end.to("i32").broadcast(LANES)
    return f.constants("i32", range(first, first + LANES)) < last
