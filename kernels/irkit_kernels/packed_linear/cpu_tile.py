"""The code of the packed linear layer, in LLVM IR: dot products fused with everything around them.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

A block of rows of ``x`` is rounded into the cache, to 8 bits or to bfloat16. It is multiplied, one panel of
64 output features after the other, in tiles of 6 rows x 64 features. Rows and weights are read as words of 4
bytes: 4 or 2 numbers along ``k``. The 24 accumulators of a tile stay in registers; bias and activation are
applied, and only then are they stored. A gated layer has in each panel 32 features that are activated and the
32 that multiply them, so only the 32 products are stored. A CPU without the dot product instruction, of
AVX512-VNNI or AVX512-BF16, runs the same code with ordinary multiplications, much slower. README.md has the
maths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .._jit import cpu_features
from .._simd import dot_bytes, load_floats, multiply_add_words, store_floats
from .._typed import Array, Function, Value, module
from ..row_norm.cpu_rows import norm_of_rows
from .cpu_activations import ACTIVATIONS, FLOATS, INTS, LANES, ROUND, ROUND_BITS

__all__ = [
    "ACTIVATIONS",
    "BLOCK",
    "LANES",
    "PANEL",
    "TILE_ROWS",
    "Kind",
    "Plan",
    "header",
    "panel_columns",
    "per_word",
    "write_feed_forward",
    "write_linear",
]

Kind = Literal["int8", "bfloat16"]

TILE_ROWS = 6
TILE_VECTORS = 4  # 6 x 4 accumulators, 4 vectors of weights and one of x fit the 32 registers of AVX-512
PANEL = TILE_VECTORS * LANES
BLOCK = 8 * TILE_ROWS  # rows rounded together, so that a panel is fetched once for 8 tiles

_NORM = dict.fromkeys(("added", "scale", "shift"), "float*")
_NO_SPAN = 1e-30  # a row with a smaller span counts as zeros, because the reciprocal could overflow


@dataclass(frozen=True)
class Plan:
    """A variant of the code.

    Attributes:
        kind: What rows and weights are rounded to.
        activation: One of `ACTIVATIONS`.
        gated: Whether the second half of the features multiplies the first.
        native: Use the CPU's dot product instruction.
        reads_half: ``x`` is bfloat16, else float32.
        writes_half: ``out`` is bfloat16, else float32; ``n`` is a multiple of `panel_columns` then.
        normed: ``added`` is added to the result, and the rows are normalised by LayerNorm.
    """

    kind: Kind
    activation: str
    gated: bool
    native: bool
    reads_half: bool = False
    writes_half: bool = False
    normed: bool = False


def per_word(kind: Kind) -> int:
    """Return the numbers in a word of 4 bytes."""
    return 4 if kind == "int8" else 2


def header(kind: Kind) -> int:
    """Return the words before the weights of a panel.

    They are biases in float32; before these, in int8, sums of weights in int32 and scales in float32.
    """
    return (3 if kind == "int8" else 1) * PANEL


def panel_columns(gated: bool) -> int:
    """Return how many features of the output a panel gives."""
    return PANEL // 2 if gated else PANEL


def write_linear(plan: Plan) -> str:
    """Return the LLVM IR module of ``linear(x, packed, out, scratch, added, scale, shift, m, k, n, eps)``.

    ``n`` counts the features of ``out``. ``scratch`` holds the rounded values of a block, whole vectors of 16
    words per row; in int8 then the scales of all rows, then their zero points. ``added``, ``scale`` and
    ``shift`` are for `Plan.normed`.
    """
    return module(_round(plan), _tile("tile", plan), *_norm(plan), _linear(plan))


def write_feed_forward(plan: Plan) -> str:
    """Return the LLVM IR module of ``feed_forward``, see `_feed_forward` for its parameters.

    The first layer has ``k`` features in and ``h`` out, with activation and gate, the second ``h`` and ``n``.
    ``scratch`` holds the hidden numbers of a block of rows, ``h`` float32 per row; then what `write_linear`
    says, for the longer of both inputs.
    """
    tiles = _tile("up", plan), _tile("down", Plan(plan.kind, "none", False, plan.native))
    return module(_round(plan), *tiles, *_norm(plan), _feed_forward(plan))


def _norm(plan: Plan) -> tuple[Function, ...]:
    return (norm_of_rows(rms=False, add=True, weight=True, bias=True),) if plan.normed else ()


class _Block:
    """Writes the steps of a block of rows, whose rounded values stay in the cache.

    Args:
        f: The function.
        kind: What rows are rounded to.
        scratch: Scratch memory, see `write_linear`.
        longest: Numbers in a row, at most.
    """

    def __init__(self, f: Function, kind: Kind, scratch: Array, longest: Value) -> None:
        self.f, self.kind, self.scratch, self.unit = f, kind, scratch, per_word(kind)
        self.width = (self.words(longest) + (LANES - 1) & -LANES) * 4
        self.scales = scratch.at(self.width * BLOCK).cast("float", 1)
        self.zeros = self.scales.at(BLOCK).cast("i32", 1)

    def words(self, k: Value) -> Value:
        """Return the words of ``k`` numbers."""
        return ((k + (self.unit - 1)).cast("u64") // self.unit).cast("i64")

    def round(self, x: Array, k: Value, rows: Value) -> None:
        """Round rows of ``k`` numbers."""
        with self.f.range(0, rows) as loop:
            row, q = x.at(loop.i * k), self.scratch.at(loop.i * self.width)
            scale = [self.scales.at(loop.i), self.zeros.at(loop.i)] if self.kind == "int8" else []
            self.f.call("round", row, k, q, *scale)

    def multiply(
        self, tile: str, packed: Array, k: Value, out: Array, n: Value, rows: Value, step: int = PANEL
    ) -> None:
        """Multiply the rows with all panels, which give ``step`` features each, by a function `_tile`."""
        f, words = self.f, self.words(k)
        panel_size = (words * PANEL + header(self.kind)) * 4
        with f.range(0, n, step) as panels:
            weights = packed.at(panels.i.cast("u64") // step * panel_size)
            columns = n - panels.i
            with f.range(0, rows, TILE_ROWS) as tiles:
                q, tile_rows = self.scratch.at(tiles.i * self.width), rows - tiles.i
                scale, zero = self.scales.at(tiles.i), self.zeros.at(tiles.i)
                target = out.at(tiles.i * n + panels.i)
                f.call(tile, q, self.width, scale, zero, weights, words, target, n, tile_rows, columns)


def _linear(plan: Plan) -> Function:
    """Round each block of rows, then multiply it with all panels."""
    x_kind, out_kind = ("u16*" if half else "float*" for half in (plan.reads_half, plan.writes_half))
    pointers = {"x": x_kind, "packed": "u8*", "out": out_kind, "scratch": "u8*"}
    f = Function(
        "linear", public=True, align=1, **pointers, **_NORM, **dict.fromkeys("mkn", "i64"), eps="float"
    )
    x, packed, out, scratch, *norm, m, k, n, eps = f.parameters
    block = _Block(f, plan.kind, scratch, k)
    with f.range(0, m, BLOCK) as blocks:
        rows = f.minimum(m - blocks.i, BLOCK)
        block.round(x.at(blocks.i * k), k, rows)
        block.multiply("tile", packed, k, out.at(blocks.i * n), n, rows, panel_columns(plan.gated))
        if plan.normed:
            _add_norm(f, blocks.i, rows, out, norm, n, eps)
    return f


def _feed_forward(plan: Plan) -> Function:
    """Pass each block of rows through both layers."""
    pointers = {"x": "float*", "up": "u8*", "down": "u8*", "out": "float*", "scratch": "u8*"}
    numbers = dict.fromkeys("mkhn", "i64")
    f = Function("feed_forward", public=True, align=1, **pointers, **_NORM, **numbers, eps="float")
    x, up, down, out, scratch, *norm, m, k, h, n, eps = f.parameters
    hidden = scratch.cast("float", 1)
    block = _Block(f, plan.kind, scratch.at(h * (4 * BLOCK)), f.maximum(k, h))
    with f.range(0, m, BLOCK) as blocks:
        rows = f.minimum(m - blocks.i, BLOCK)
        block.round(x.at(blocks.i * k), k, rows)
        block.multiply("up", up, k, hidden, h, rows, panel_columns(plan.gated))
        block.round(hidden, h, rows)
        block.multiply("down", down, h, out.at(blocks.i * n), n, rows)
        if plan.normed:
            _add_norm(f, blocks.i, rows, out, norm, n, eps)
    return f


def _add_norm(
    f: Function, first: Value, rows: Value, out: Array, norm: Sequence[Array], n: Value, eps: Value
) -> None:
    """Replace rows of ``out``, from the first on, by the norm of their sums with the rows of ``added``."""
    added, scale, shift = norm
    target = out.at(first * n)
    f.call(
        "row_norm",
        added.at(first * n),
        target,
        scale,
        shift,
        target,
        rows,
        1,
        n,
        n,
        eps,
        f.constant("float", 0),
    )


def _round(plan: Plan) -> Function:
    """Return the function ``round`` of a row."""
    x = "u16*" if plan.reads_half else "float*"
    return _quantize(x) if plan.kind == "int8" else _halve(x, plan.native)


def _halve(x_kind: str, rounds: bool) -> Function:
    """Round a row to bfloat16; zeros fill up its last vector."""
    f = Function("round", align=1, x=x_kind, k="i64", q="u8*")
    x, k, q = f.parameters
    whole = k & -4 * LANES
    for start, stop, vectors in ((0, whole, 4), (whole, k, 1)):
        with f.range(start, stop, vectors * LANES) as loop:
            for j, numbers in enumerate(_load_row(f, x, k, loop.i, vectors)):
                store_floats(q.at(2 * (loop.i + LANES * j)).cast("u16", 1), numbers, rounds)
    return f


def _quantize(x_kind: str) -> Function:
    """Quantise a row: ``q = min(round(x / scale) + zero, 255)``. NaN or infinity make the scale NaN."""
    f = Function("round", align=1, x=x_kind, k="i64", q="u8*", scale="float*", zero="i32*")
    x, k, q, scale, zero = f.parameters

    # smallest and largest number; `invalid` becomes NaN if a number is NaN or infinite
    low = high = invalid = nothing = f.constant(FLOATS, 0)
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
    bits = (-smallest * inverse + ROUND).cast("i32")
    zero[0] = bits - ROUND_BITS
    scale[0] = span / 255.0
    factor = inverse.broadcast(LANES)
    offset = (bits - (2 * ROUND_BITS - 2**32)).broadcast(LANES)

    # quantised numbers
    whole = k & -4 * LANES
    for start, stop, vectors in ((0, whole, 4), (whole, k, 1)):
        with f.range(start, stop, vectors * LANES) as loop:
            for j, numbers in enumerate(_load_row(f, x, k, loop.i, vectors)):
                level = (numbers * factor + ROUND).cast(INTS) + offset
                level = f.where(level > 255, 255, level)
                q.at(loop.i).vectors(LANES)[LANES * j] = level.to("u8")
    return f


def _load_row(f: Function, x: Array, k: Value, i: Value, vectors: int) -> list[Value]:
    """Load 4 vectors of the row from column ``i``, or one vector with zeros after the end of the row."""
    start = x.at(i)
    if vectors > 1:
        return [load_floats(start.at(LANES * j), LANES) for j in range(vectors)]
    mask = _columns_below(f, 0, k - i)
    if x.kind == "float":
        return [f.masked_load(start, mask, align=4)]
    return [(f.masked_load(start, mask, align=2).to("i32") << 16).cast(FLOATS)]


def _tile(name: str, plan: Plan) -> Function:
    """Multiply 6 rounded rows with one panel, and store ``rows`` rows and ``columns`` columns.

    The remaining rows and columns of the tile lie beyond the end of ``out``.
    """
    pointers: dict[str, Any] = {"scales": "float*", "zeros": "i32*", "panel": "u8*"}
    numbers: dict[str, Any] = {"n": "i64", "rows": "i64", "columns": "i64"}
    written = ("u16", 2) if plan.writes_half else ("float", 4)
    pointers |= {"words": "i64", "out": f"{written[0]}*"}
    f = Function(name, align=1, q="u8*", width="i64", **pointers, **numbers)
    q, width, scales, zeros, panel, words, out, n, rows, columns = f.parameters
    vectors, outputs = range(TILE_VECTORS), range(panel_columns(plan.gated) // LANES)
    weights = panel.cast("i32", 1).at(header(plan.kind))
    q_rows = [q.at(width * row).cast("i32", 1) for row in range(TILE_ROWS)]

    # fetch the cache lines of the output meanwhile
    bytes_of_out = out.cast("u8", 1)
    targets = [bytes_of_out.at(n * (written[1] * row)).cast(written[0], 1) for row in range(TILE_ROWS)]
    for target in targets:
        for j in outputs:
            f.prefetch(target.at(LANES * j), write=True)

    # sums of products, a word along k in each step
    nothing = f.constant(INTS if plan.kind == "int8" else FLOATS, 0)
    with f.range(0, words, sums=[nothing] * (TILE_ROWS * TILE_VECTORS)) as loop:
        step_weights = weights.at(loop.i * PANEL).vectors(LANES)
        w, sums = [step_weights[LANES * j] for j in vectors], []
        for r, q_row in enumerate(q_rows):
            u = q_row[loop.i].broadcast(LANES)
            sums += [_dot(plan, loop.sums[r * TILE_VECTORS + j], u, w[j]) for j in vectors]
        loop.sums = sums

    # zero points and scales, bias, activation and gate
    masks = [_columns_below(f, LANES * j, columns) for j in outputs]
    finish = _finishing(f, plan, panel)
    for row, target in enumerate(targets):
        with f.when(rows > row):
            results = finish(loop.sums[row * TILE_VECTORS :][:TILE_VECTORS], scales.at(row), zeros.at(row))
            for j in outputs:
                y = ACTIVATIONS[plan.activation](f, results[j])
                y = y * results[j + len(outputs)] if plan.gated else y
                if plan.writes_half:
                    store_floats(target.at(LANES * j), y, rounds="avx512bf16" in cpu_features())
                else:
                    f.masked_store(target.at(LANES * j), y, masks[j], align=4)
    return f


def _finishing(f: Function, plan: Plan, panel: Array) -> Callable[[list[Value], Array, Array], list[Value]]:
    """Read the header of a panel; return what makes results of the sums, scale and zero point of a row."""
    vectors = range(TILE_VECTORS)
    floats = panel.cast("float", 1).vectors(LANES)
    biases = [floats[header(plan.kind) - PANEL + LANES * j] for j in vectors]
    if plan.kind == "bfloat16":
        return lambda sums, scale, zero: [sums[j] + biases[j] for j in vectors]
    w_sums = [panel.cast("i32", 1).vectors(LANES)[LANES * j] for j in vectors]
    w_scales = [floats[PANEL + LANES * j] for j in vectors]

    def finish(sums: list[Value], scale: Array, zero: Array) -> list[Value]:
        row_scale, row_zero = scale[0].broadcast(LANES), zero[0].broadcast(LANES)
        totals = [sums[j] - row_zero * w_sums[j] for j in vectors]
        return [f.fmuladd(totals[j].to("float"), row_scale * w_scales[j], biases[j]) for j in vectors]

    return finish


def _dot(plan: Plan, total: Value, a: Value, b: Value) -> Value:
    """Return ``total`` plus the dot product of the numbers in each word of ``a`` and ``b``."""
    if plan.kind == "int8":
        return dot_bytes(total, a, b, plan.native)
    if plan.native:
        return multiply_add_words(total, a, b, bfloat16=True)
    high = [(word & -0x10000).cast(FLOATS) for word in (a, b)]
    for factors in ([(word << 16).cast(FLOATS) for word in (a, b)], high):
        total = total.code.intrinsic("fmuladd", FLOATS, *factors, total)
    return total


def _columns_below(f: Function, first: int, end: Value) -> Value:
    """Return which of the numbers ``first``, ``first`` + 1, ..., one per lane, are below ``end``."""
    last = end.to("i32").broadcast(LANES)
    return f.constants("i32", range(first, first + LANES)) < last
