"""The machine code of the int8 linear map: 8-bit dot products with everything around them fused.

A block of rows of ``x`` is quantised into the cache and multiplied, panel by panel (64 output features),
in tiles of 6 rows x 64 features. The 24 accumulators of a tile stay in registers until they leave it
scaled, with bias and GELU applied. A CPU without the dot product instruction of AVX512-VNNI runs the same
code with plain multiplications: the same numbers, much slower.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .._jit import DOT4, Code, Values, array, number, splat

__all__ = ["BLOCK", "HEADER", "LANES", "PANEL", "TILE_ROWS", "write_ir"]

LANES = 16
TILE_ROWS = 6
TILE_VECTORS = 4  # 6 x 4 accumulators, 4 vectors of weights and one of x fit the 32 registers of AVX-512
PANEL = TILE_VECTORS * LANES
HEADER = 3 * 4 * PANEL  # bytes before a panel's weights: their sums (int32), scales and biases (float32)
BLOCK = 8 * TILE_ROWS  # rows quantised together, so that a panel is fetched once for 8 tiles

_INTS, _FLOATS = f"<{LANES} x i32>", f"<{LANES} x float>"
_BYTES, _MASK = f"<{LANES} x i8>", f"<{LANES} x i1>"
_NO_SPAN = 1e-30  # a row of a smaller span counts as zeros: the reciprocal could overflow
_ROUND = 1.5 * 2**23  # adding it rounds a float32 to an integer, found in the low bits of the sum
_ROUND_BITS = 0x4B400000
# Phi(x) - 1/2 = x P(x^2 - 9.5) for |x| <= 4.375, exactly 1/2 at the edge and beyond: the P of
# degree 8 of least maximum error in GELU, 2.7e-5.
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


def write_ir(gelu: bool, vnni: bool) -> str:
    """The LLVM module of ``int8_linear(x, packed, out, scratch, m, k, n)``.

    ``scratch`` holds for each row of a block its quantised values, in ``ceil(k / 16) * 16`` bytes, then all
    scales, then all zero points.
    """
    reduce, vector = "declare float @llvm.vector.reduce", f"v{LANES}f32"
    return "\n".join(
        [
            f"declare {_FLOATS} @llvm.fmuladd.{vector}({_FLOATS}, {_FLOATS}, {_FLOATS})",
            f"declare {_FLOATS} @llvm.masked.load.{vector}.p0(ptr, i32, {_MASK}, {_FLOATS})",
            f"declare void @llvm.masked.store.{vector}.p0({_FLOATS}, ptr, i32, {_MASK})",
            f"{reduce}.fmin.{vector}({_FLOATS})",
            f"{reduce}.fmax.{vector}({_FLOATS})",
            f"{reduce}.fadd.{vector}(float, {_FLOATS})",
            *([DOT4] if vnni else []),
            _quantize(),
            _tile(gelu, vnni),
            _linear(),
        ]
    )


def _linear() -> str:
    c = Code()
    width = c.op(f"and i64 {c.add('%k', LANES - 1)}, {-LANES}")
    panel_size = c.add(c.mul(c.op(f"and i64 {c.add('%k', 3)}, -4"), PANEL), HEADER)
    scales = c.at("%scratch", c.mul(width, BLOCK))
    zeros = c.at(scales, 4 * BLOCK)

    def block(start: str, _: Values) -> None:
        rows = c.minimum(c.op(f"sub i64 %m, {start}"), BLOCK)
        x = c.at("%x", c.mul(c.mul(start, "%k"), 4))
        out = c.at("%out", c.mul(c.mul(start, "%n"), 4))

        def quantize(row: str, _: Values) -> None:
            source, q = c.at(x, c.mul(c.mul(row, "%k"), 4)), c.at("%scratch", c.mul(row, width))
            scale, zero = (c.at(base, c.mul(row, 4)) for base in (scales, zeros))
            c.do(f"call void @quantize(ptr {source}, i64 %k, ptr {q}, ptr {scale}, ptr {zero})")

        def panel(column: str, _: Values) -> None:
            weights = c.at("%packed", c.mul(c.op(f"udiv i64 {column}, {PANEL}"), panel_size))
            columns = c.op(f"sub i64 %n, {column}")

            def tile(row: str, _: Values) -> None:
                q, count = c.at("%scratch", c.mul(row, width)), c.op(f"sub i64 {rows}, {row}")
                scale, zero = (c.at(base, c.mul(row, 4)) for base in (scales, zeros))
                target = c.at(out, c.mul(c.add(c.mul(row, "%n"), column), 4))
                c.do(
                    f"call void @tile(ptr {q}, i64 {width}, ptr {scale}, ptr {zero}, ptr {weights}, i64 %k, "
                    f"ptr {target}, i64 %n, i64 {count}, i64 {columns})"
                )

            c.loop(0, rows, TILE_ROWS, tile)

        c.loop(0, rows, 1, quantize)
        c.loop(0, "%n", PANEL, panel)

    c.loop(0, "%m", BLOCK, block)
    return c.function(
        "define void @int8_linear(ptr %x, ptr %packed, ptr %out, ptr %scratch, i64 %m, i64 %k, i64 %n)"
    )


def _quantize() -> str:
    """One row: ``q = min(round(x / scale) + zero, 255)``. NaN and infinity make the scale NaN."""
    c = Code()
    nothing, reduce = splat(LANES, "float", 0), "float @llvm.vector.reduce"

    def measure(_: str, vectors: list[str], state: Values) -> Values:
        low, high, invalid = state
        product = nothing
        for vector in vectors:
            low, high = _minimum(c, vector, low), _maximum(c, vector, high)
            product = _multiply_add(c, vector, nothing, product)  # 0, or NaN
        return low, high, _op(c, "fadd", _FLOATS, invalid, product)

    low, high, invalid = _scan(c, measure, (nothing,) * 3)
    smallest = c.op(f"call nnan {reduce}.fmin.v{LANES}f32({_FLOATS} {low})")
    largest = c.op(f"call nnan {reduce}.fmax.v{LANES}f32({_FLOATS} {high})")
    invalid = c.op(f"call reassoc {reduce}.fadd.v{LANES}f32(float 0.0, {_FLOATS} {invalid})")
    span = _op(c, "fadd", "float", _op(c, "fsub", "float", largest, smallest), invalid)
    some = c.op(f"fcmp ogt float {span}, {number(_NO_SPAN)}")
    inverse = c.op(f"select i1 {some}, float {_op(c, 'fdiv', 'float', number(255), span)}, float 0.0")
    point = _op(c, "fmul", "float", c.op(f"fneg float {smallest}"), inverse)
    bits = c.op(f"bitcast float {_op(c, 'fadd', 'float', point, number(_ROUND))} to i32")
    c.store("i32", _op(c, "sub", "i32", bits, str(_ROUND_BITS)), "%zero")
    c.store("float", _op(c, "fdiv", "float", span, number(255)), "%scale")
    factor = c.broadcast(LANES, "float", inverse)
    offset = c.broadcast(LANES, "i32", _op(c, "sub", "i32", bits, str(2 * _ROUND_BITS - 2**32)))

    def write(i: str, vectors: list[str], _: Values) -> None:
        for j, vector in enumerate(vectors):
            rounded = _op(
                c, "fadd", _FLOATS, _op(c, "fmul", _FLOATS, vector, factor), splat(LANES, "float", _ROUND)
            )
            level = _op(c, "add", _INTS, c.op(f"bitcast {_FLOATS} {rounded} to {_INTS}"), offset)
            above = c.op(f"icmp sgt {_INTS} {level}, {_ints(255)}")
            level = c.op(f"select {_MASK} {above}, {_INTS} {_ints(255)}, {_INTS} {level}")
            c.store(_BYTES, c.op(f"trunc {_INTS} {level} to {_BYTES}"), c.at("%q", i), LANES * j)

    _scan(c, write)
    return c.function("define internal void @quantize(ptr %x, i64 %k, ptr %q, ptr %scale, ptr %zero)")


def _scan(c: Code, body: Callable[[str, list[str], Values], Values | None], state: Values = ()) -> Values:
    """Run ``body(i, vectors, state)`` over the row ``%x (%k,)``: 4 vectors at a time, then one by one."""
    whole = c.op(f"and i64 %k, {-4 * LANES}")

    def four(i: str, state: Values) -> Values | None:
        place = c.at("%x", c.mul(i, 4))
        return body(i, [c.load(_FLOATS, place, 4 * LANES * j) for j in range(4)], state)

    def one(i: str, state: Values) -> Values | None:
        place, load = c.at("%x", c.mul(i, 4)), f"call {_FLOATS} @llvm.masked.load.v{LANES}f32.p0"
        mask = _below(c, 0, c.op(f"sub i64 %k, {i}"))
        return body(
            i, [c.op(f"{load}(ptr {place}, i32 4, {_MASK} {mask}, {_FLOATS} zeroinitializer)")], state
        )

    state = c.loop(0, whole, 4 * LANES, four, state, _FLOATS)
    return c.loop(whole, "%k", LANES, one, state, _FLOATS)


def _tile(gelu: bool, vnni: bool) -> str:
    """Multiply 6 rows of ``q`` and one panel, and write the ``rows`` and ``columns`` that exist."""
    c = Code()
    vectors = range(TILE_VECTORS)
    weights = c.at("%panel", HEADER)
    rows = [c.at("%q", c.mul("%width", row)) for row in range(TILE_ROWS)]

    def multiply(k: str, sums: Values) -> Values:
        place, result = c.at(weights, c.mul(k, PANEL)), []
        w = [c.load(_INTS, place, 4 * LANES * j) for j in vectors]
        for r, row in enumerate(rows):
            x = c.broadcast(LANES, "i32", c.load("i32", row, k))
            result += [c.dot4(sums[r * TILE_VECTORS + j], x, w[j], vnni) for j in vectors]
        return tuple(result)

    sums = c.loop(0, "%k", 4, multiply, (_ints(0),) * (TILE_ROWS * TILE_VECTORS), _INTS)

    w_sums = [c.load(_INTS, "%panel", 4 * LANES * j) for j in vectors]
    w_scales, biases = (
        [c.load(_FLOATS, "%panel", 4 * (at + LANES * j)) for j in vectors] for at in (PANEL, 2 * PANEL)
    )
    masks = [_below(c, LANES * j, "%columns") for j in vectors]

    def finish(row: int) -> None:
        scale = c.broadcast(LANES, "float", c.load("float", "%scales", 4 * row))
        zero = c.broadcast(LANES, "i32", c.load("i32", "%zeros", 4 * row))
        place = c.at("%out", c.mul("%n", 4 * row))
        for j in vectors:
            total = _op(c, "sub", _INTS, sums[row * TILE_VECTORS + j], _op(c, "mul", _INTS, zero, w_sums[j]))
            factor = _op(c, "fmul", _FLOATS, scale, w_scales[j])
            y = _multiply_add(c, c.op(f"sitofp {_INTS} {total} to {_FLOATS}"), factor, biases[j])
            y, target = _gelu(c, y) if gelu else y, c.at(place, 4 * LANES * j)
            store = f"call void @llvm.masked.store.v{LANES}f32.p0"
            c.do(f"{store}({_FLOATS} {y}, ptr {target}, i32 4, {_MASK} {masks[j]})")

    for row in range(TILE_ROWS):
        c.when(c.op(f"icmp sgt i64 %rows, {row}"), partial(finish, row))
    return c.function(
        "define internal void @tile(ptr %q, i64 %width, ptr %scales, ptr %zeros, ptr %panel, i64 %k, "
        "ptr %out, i64 %n, i64 %rows, i64 %columns)"
    )


def _gelu(c: Code, x: str) -> str:
    high, low, half = (splat(LANES, "float", value) for value in (_GELU_EDGE, -_GELU_EDGE, 0.5))
    inside = _maximum(c, _minimum(c, x, high), low)
    t = _multiply_add(c, inside, inside, splat(LANES, "float", -_GELU_CENTRE))
    p, *rest = (splat(LANES, "float", coefficient) for coefficient in reversed(_GELU))
    for coefficient in rest:
        p = _multiply_add(c, p, t, coefficient)
    return _op(c, "fmul", _FLOATS, x, _multiply_add(c, p, inside, half))


def _op(c: Code, name: str, kind: str, a: str, b: str) -> str:
    return c.op(f"{name} {kind} {a}, {b}")


def _multiply_add(c: Code, a: str, b: str, total: str) -> str:
    return c.op(f"call {_FLOATS} @llvm.fmuladd.v{LANES}f32({_FLOATS} {a}, {_FLOATS} {b}, {_FLOATS} {total})")


def _minimum(c: Code, a: str, b: str) -> str:  # b where a is NaN
    return c.op(f"select {_MASK} {c.op(f'fcmp olt {_FLOATS} {a}, {b}')}, {_FLOATS} {a}, {_FLOATS} {b}")


def _maximum(c: Code, a: str, b: str) -> str:  # b where a is NaN
    return c.op(f"select {_MASK} {c.op(f'fcmp ogt {_FLOATS} {a}, {b}')}, {_FLOATS} {a}, {_FLOATS} {b}")


def _below(c: Code, first: int, end: str) -> str:
    """Which of the numbers ``first``, ``first`` + 1, ..., one a lane, are below ``end``."""
    last = c.broadcast(LANES, "i32", c.op(f"trunc i64 {end} to i32"))
    return c.op(f"icmp slt {_INTS} {array(LANES, 'i32', range(first, first + LANES))}, {last}")


def _ints(value: int) -> str:
    return splat(LANES, "i32", value)
