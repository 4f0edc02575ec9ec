"""LLVM IR that prepares a query: rotates it, and rounds it to bytes and to a table of sums.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

The rotation is three rounds of random signs, Hadamard transforms of 64 dimensions each, and a random order.
It spreads what a few dimensions hold over all of them. Signs of residuals then tell as much about any query
(Gao and Long 2024, RaBitQ), and bytes have no outliers.

Lists are scored with the query as bytes. Signs are scored with smaller integers, so that the sum of any 4 of
them is below 64: `_fill_table` computes, for 4 dimensions at a time, the sums of all 16 subsets.
"""

from __future__ import annotations

from .._typed import Array, Function, Value
from .cpu_frame import BYTES, CHUNK, FLOATS, FRAME, INTS, LANES, Plan

__all__ = ["HIGHEST_SUM", "ROUNDS", "hadamard", "look_up", "write_prepare"]

ROUNDS = 3
HIGHEST_SUM = 61  # of 4 numbers before they are rounded, which can add 2; 4 such sums fit a byte
_ROUND = 1.5 * 2**23  # adding it rounds a float32 to an integer, which is in the low bits of the sum
_ROUND_BITS = 0x4B400000
_TINY = 1e-30  # queries of smaller numbers count as zeros


def write_prepare(plan: Plan) -> list[Function]:
    """Write ``prepare(f, query)``."""
    return [_rotate(plan), _round(plan), _fill_table(plan), _prepare(plan)]


def _prepare(plan: Plan) -> Function:
    """Prepare query ``%query``, and set what is added to its scores at the end."""
    x = Function("prepare", f=FRAME, query="i64")
    f, query = x.parameters
    query_values, dim, values = f.queries.at(query * f.dim), f.dim, f.values
    f.query = query_values
    zero = x.constant(FLOATS, 0)
    f.factor = x.where(f.euclidean != 0, 2.0, x.constant("float", 1.0))
    factor = f.factor.broadcast(LANES)
    with x.range(0, plan.width, LANES, square=zero) as loop:
        left = (dim - loop.i).to("i32").broadcast(LANES)
        here = x.masked_load(query_values.at(loop.i), x.constants("i32", range(LANES)) < left, align=4)
        loop.square = loop.square + here * here
        values.vectors(LANES)[loop.i] = here * factor
    square = _total(x, loop.square)
    length = x.intrinsic("sqrt", "float", square)
    f.bias_factor = x.where(f.euclidean != 0, 1.0, length)
    f.result_bias = x.where(f.euclidean != 0, 0.0 - square, 0.0)
    x.call("rotate", f)
    x.call("round", f)
    x.call("fill_table", f)
    return x


def _total(x: Function, numbers: Value) -> Value:
    """Return the sum of the lanes, in an order that does not depend on the CPU."""
    lanes = numbers.lanes
    while lanes > 1:
        lanes //= 2
        halves = [x.shuffle(numbers, None, range(start, start + lanes)) for start in (0, lanes)]
        numbers = halves[0] + halves[1]
    return x.value("float", f"extractelement {numbers.typed}, i64 0")


def _rotate(plan: Plan) -> Function:
    """Rotate the values."""
    x = Function("rotate", f=FRAME)
    (f,) = x.parameters
    values, other = f.values, f.values.at(plan.width)
    with x.range(0, ROUNDS) as rounds:
        signs = f.rotation_signs.at(rounds.i * plan.width)
        order = f.rotation_order.at(rounds.i * plan.width)
        with x.range(0, plan.width, CHUNK) as chunks:
            parts = []
            for j in range(0, CHUNK, LANES):
                column = chunks.i + j
                parts.append(values.vectors(LANES)[column] * signs.vectors(LANES)[column])
            for j, part in enumerate(hadamard(x, parts)):
                other.vectors(LANES)[chunks.i + LANES * j] = part
        last = plan.width - 1
        with x.range(0, plan.width, 4) as loop:
            for j in range(4):
                source = x.minimum(order[loop.i + j].to("i64"), last)
                values[loop.i + j] = other[source]
    return x


def hadamard(x: Function, parts: list[Value]) -> list[Value]:
    """Transform 64 numbers: replace pairs, at growing distances, by their sums and differences."""
    for distance in (1, 2, 4, 8):
        minus = x.constants("float", [-1.0 if lane & distance else 1.0 for lane in range(LANES)])
        lanes = [lane ^ distance for lane in range(LANES)]
        parts = [x.shuffle(part, None, lanes) + part * minus for part in parts]
    for step in (1, 2):
        sums: list[Value] = [parts[0]] * len(parts)
        for i in range(len(parts)):
            if not i & step:
                sums[i], sums[i | step] = parts[i] + parts[i | step], parts[i] - parts[i | step]
        parts = sums
    return parts


def _rounded(numbers: Value) -> Value:
    """Round float32 numbers below 2**22 to the nearest integers, ties to even."""
    return (numbers + _ROUND).cast(INTS) - _ROUND_BITS


def _round(plan: Plan) -> Function:
    """Round the values to bytes, and to small integers."""
    x = Function("round", f=FRAME)
    (f,) = x.parameters
    values, zero = f.values, x.constant(FLOATS, 0)
    swaps = [[lane ^ distance for lane in range(LANES)] for distance in (1, 2)]
    with x.range(0, plan.width, LANES, most=zero, sum=zero) as loop:
        size = x.intrinsic("fabs", FLOATS, values.vectors(LANES)[loop.i])
        loop.most = x.maximum(size, loop.most)
        for swap in swaps:
            size = size + x.shuffle(size, None, swap)
        loop.sum = x.maximum(size, loop.sum)
    most, most_sum = (x.intrinsic("vector.reduce.fmax", "float", v) for v in (loop.most, loop.sum))
    f.byte_scale = most / 127.0
    f.level_scale = most_sum / float(HIGHEST_SUM)
    byte_factor = x.where(most > _TINY, 127.0 / most, 0.0).broadcast(LANES)
    level_factor = x.where(most_sum > _TINY, float(HIGHEST_SUM) / most_sum, 0.0).broadcast(LANES)
    nothing = x.constant(INTS, 0)
    with x.range(0, plan.width, LANES, bytes=nothing, levels=nothing) as loop:
        here = values.vectors(LANES)[loop.i]
        byte, level = _rounded(here * byte_factor), _rounded(here * level_factor)
        loop.bytes += byte
        loop.levels += level
        f.bytes.vectors(LANES)[loop.i] = byte.to("u8")
        f.levels.vectors(LANES)[loop.i] = level
    f.byte_total = x.intrinsic("vector.reduce.add", "i32", loop.bytes).to("i64")
    f.level_total = x.intrinsic("vector.reduce.add", "i32", loop.levels).to("i64")
    return x


def _fill_table(plan: Plan) -> Function:
    """Fill the table: for each 4 levels the sums of all subsets, plus what makes the lowest sum 0.

    ``below`` is the sum of these amounts.
    """
    x = Function("fill_table", f=FRAME)
    (f,) = x.parameters
    members = [
        x.constants("i32", [-1 if subset >> i & 1 else 0 for subset in range(LANES)]) for i in range(4)
    ]
    with x.range(0, plan.width, 4, below=x.constant("i32", 0)) as loop:
        levels = [f.levels[loop.i + i] for i in range(4)]
        below = x.constant("i32", 0)
        for level in levels:
            below = below - x.minimum(level, 0)
        sums = below.broadcast(LANES)
        for level, member in zip(levels, members, strict=True):
            sums = sums + (level.broadcast(LANES) & member)
        f.table.vectors(LANES)[loop.i * 4] = sums.to("u8")
        loop.below += below
    f.below = loop.below.to("i64")
    return x


def look_up(x: Function, plan: Plan, table: Value, indices: Value, scratch: Array) -> Value:
    """Look up 64 bytes: each group of 16 reads its own 16 bytes of the table.

    Args:
        x: The function.
        plan: Says which instruction to use.
        table: 64 bytes.
        indices: 64 bytes below 16.
        scratch: 128 bytes of memory, used without such an instruction.
    """
    name, size = plan.shuffle
    if size == 64:
        return x.call(name, table, indices, kind=BYTES)
    if size:
        parts = []
        for start in range(0, 64, size):
            lanes = range(start, start + size)
            part = x.shuffle(table, None, lanes), x.shuffle(indices, None, lanes)
            parts.append(x.call(name, *part, kind=part[0].kind))
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [x.shuffle(a, b, range(2 * a.lanes)) for a, b in pairs]
        return parts[0]
    scratch.vectors(64)[0] = table
    target = scratch.at(64)
    target.vectors(64)[0] = indices
    for i in range(64):
        target[i] = scratch[target[i].to("i64") + i // 16 * 16]
    return target.vectors(64)[0]
