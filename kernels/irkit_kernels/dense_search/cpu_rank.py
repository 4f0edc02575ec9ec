"""LLVM IR that scores candidates again: by all bits of their codes, then by kept rows or by the exact query.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.
"""

from __future__ import annotations

from .._simd import dot_bytes, half_to_float
from .._typed import Array, Function, Record, Value, vector
from .cpu_collect import key_of
from .cpu_frame import BLOCK, CHUNK, FLOATS, FRAME, INTS, LANES, Plan

__all__ = ["list_of", "segment_of", "write_rank"]

_AHEAD = 6  # candidates whose rows are fetched ahead
_BYTES = {"int8": 1, "float16": 2, "float32": 4}
_FEW = 64  # lines of a row that are fetched ahead


def write_rank(plan: Plan) -> list[Function]:
    """Write ``rank_codes`` and ``rank_levels`` if there is something to do for them, and ``rank_rows``."""
    codes = [_rank_codes(plan)] if plan.nbits > 1 else []
    levels = [_rank_levels(plan)] if plan.nbits > 1 and plan.keep == "none" else []
    return [*codes, *levels, _rank_rows(plan)]


def segment_of(x: Function, f: Record, position: Value) -> Record:
    """Return the segment of a position: the last that begins at or before it."""
    with x.range(1, f.n_segments, number=0) as loop:
        loop.number = x.where(f.segments[loop.i].first <= position, loop.i, loop.number)
    segment: Record = f.segments[loop.number]
    return segment


def _rank_codes(plan: Plan) -> Function:
    """Replace the keys of the collection by keys of the scores from all bits of a code.

    The highest bit of a level is its sign bit. The scan has stored the sum of the signs, so this function
    only multiplies the query with the other bits.
    """
    x = Function("rank_codes", f=FRAME)
    (f,) = x.parameters
    others = plan.nbits - 1
    plane = plan.width // 8  # bytes
    most = (1 << others) - 1  # of the other bits
    sign_scale = f.level_scale * (2.0 ** (plan.nbits - 2))
    half_scale = f.byte_scale * 0.5
    query, items, last = f.bytes, f.items, f.count - 1

    def codes(i: Value) -> tuple[Record, Value, Array]:
        position = items[i].to("i64")
        segment = segment_of(x, f, position)
        row = position - segment.first
        return segment, row, segment.planes.at(row * (others * plane))

    with x.range(0, f.count) as loop:
        *_, ahead = codes(x.minimum(loop.i + _AHEAD, last))
        for line in range(0, others * plane, 64):
            x.prefetch(ahead.at(line))
        segment, row, bits = codes(loop.i)
        # product of the query with the other bits
        total = x.constant(INTS, 0)
        for chunk in range(0, plan.width, CHUNK):
            masks = [bits.at(bit * plane + chunk // 8).cast("u64", 1)[0] for bit in range(others)]
            levels = _joined(x, masks)
            words = query.at(chunk).cast("i32", 1).vectors(LANES)[0]
            total = dot_bytes(total, levels.cast(INTS), words, plan.vnni)
        # score by all bits
        product = x.intrinsic("vector.reduce.add", "i32", total).to("i64")
        rest = (product * 2 - f.byte_total * most).to("float") * half_scale
        signs = f.sums[loop.i] * sign_scale
        base, (factor, base_factor) = f.bases[loop.i], _factors(segment, row)
        score = (signs + rest) * factor + (base * base_factor + base)
        with x.when(segment.biases.exists(), score=score) as branch:
            branch.score = score + segment.biases[row]
        f.keys[loop.i] = key_of(branch.score)
    return x


def _joined(x: Function, masks: list[Value]) -> Value:
    """Return 64 levels: bit i of a level is its bit of mask i, ``u64``."""
    levels = x.constant(vector(CHUNK, "u8"), 0)
    for bit, mask in enumerate(masks):
        lanes = mask.cast(vector(CHUNK, "i1"))
        levels = levels | x.where(lanes, x.constant(levels.kind, 1 << bit), x.constant(levels.kind, 0))
    return levels


def _factors(segment: Record, row: Value) -> tuple[Value, Value]:
    """Return the factors of the levels and of the base of a row."""
    word = segment.level_factors[row]
    return (word & 0xFFFF0000).cast("float"), (word << 16).cast("float")


def _rank_levels(plan: Plan) -> Function:
    """Replace the keys of the collection by keys of the products with the decoded vectors.

    The query is in float32 here, so that scores are exact but for roundings.
    """
    x = Function("rank_levels", f=FRAME)
    (f,) = x.parameters
    others, plane = plan.nbits - 1, plan.width // 8
    middle = x.constant(FLOATS, 0.5 * ((1 << plan.nbits) - 1))
    values, parts = f.values, range(CHUNK // LANES)
    with x.range(0, f.count) as loop:
        position = f.items[loop.i].to("i64")
        segment = segment_of(x, f, position)
        row = position - segment.first

        # The product with the centroid of the row's list.
        number = list_of(x, f, segment, row)
        product = _product(x, f, plan, f.list_codes.at(number * plan.width))
        base = product * f.list_code_scales[number]

        # The product with the levels. The sign bits of 4 dimensions are half of a byte, see `cpu_scan`.
        lane = row & (BLOCK - 1)
        signs = segment.signs.at((row >> 5) * (4 * plan.width) + (lane & (LANES - 1)))
        shift = (lane >> 4 << 2).to("u64")
        planes = segment.planes.at(row * (others * plane))
        zero = x.constant(FLOATS, 0)
        with x.range(0, plan.width, CHUNK, sums=[zero] * len(parts)) as chunks:
            mask = x.constant("u64", 0)
            for j in range(CHUNK // 4):
                four = signs[chunks.i * 4 + LANES * j].to("u64") >> shift & 15
                mask = mask | four << 4 * j
            masks = [planes.at((chunks.i >> 3) + bit * plane).cast("u64", 1)[0] for bit in range(others)]
            levels, sums = _joined(x, [*masks, mask]), list(chunks.sums)
            for v in parts:
                here = x.shuffle(levels, None, range(LANES * v, LANES * (v + 1))).to("i32").to("float")
                sums[v] = x.fmuladd(here - middle, values.vectors(LANES)[chunks.i + LANES * v], sums[v])
            chunks.sums = sums
        total = _added(x, chunks.sums)
        factor, base_factor = _factors(segment, row)
        score = total * factor + (base * base_factor + base)
        with x.when(segment.biases.exists(), score=score) as branch:
            branch.score = score + segment.biases[row]
        f.keys[loop.i] = key_of(branch.score)
    return x


def list_of(x: Function, f: Record, segment: Record, row: Value) -> Value:
    """Return the number of the list that has a row: the last that begins at or before it."""
    offsets, last = segment.offsets, f.n_lists - 1
    with x.range(0, f.list_bits, number=0, jump=x.constant("i64", 1) << f.list_bits - 1) as loop:
        ahead = loop.number + loop.jump
        fine = (ahead <= last) & (offsets[x.minimum(ahead, last)] <= row)
        loop.number = x.where(fine, ahead, loop.number)
        loop.jump = loop.jump >> 1
    number: Value = loop.number
    return number


def _rank_rows(plan: Plan) -> Function:
    """Replace positions by row numbers, and, if vectors are kept, keys by keys of exact scores.

    Rows that do not exist, of a damaged file, leave the collection.
    """
    x = Function("rank_rows", f=FRAME)
    (f,) = x.parameters
    items, keys, biases, n_rows = f.items, f.keys, f.bases, f.n_rows
    size = _BYTES.get(plan.keep, 0)

    # Look all rows up first, so that the processor waits for many of them at a time.
    with x.range(0, f.count, number=0) as loop:
        position = items[loop.i].to("i64")
        segment = segment_of(x, f, position)
        offset = position - segment.first
        row = segment.rows[offset]
        key = keys[loop.i]
        if size:
            with x.when(segment.biases.exists(), bias=0.0) as branch:
                branch.bias = segment.biases[offset]
            biases[loop.number] = branch.bias
        items[loop.number] = row
        keys[loop.number] = key
        loop.number += (row.to("i64") < n_rows).to("i64")
    count = loop.number
    f.count = count
    if not size:
        return x

    stride = f.dim * size if plan.keep != "int8" else x.constant("i64", plan.width)

    def fetch(i: Value) -> None:
        """Fetch the row of a candidate."""
        start = f.kept.at(items[i].to("i64") * stride)
        with x.range(0, x.minimum(stride, 64 * _FEW), 64) as lines:
            x.prefetch(start.at(lines.i))

    with x.range(0, x.minimum(count, _AHEAD)) as loop:
        fetch(loop.i)
    with x.range(0, count) as loop:
        fetch(x.minimum(loop.i + _AHEAD, count - 1))
        row = items[loop.i].to("i64")
        scale = f.kept_scales[row] if plan.keep == "int8" else f.factor
        product = _product(x, f, plan, f.kept.at(row * stride))
        keys[loop.i] = key_of(product * scale + biases[loop.i])
    return x


def _product(x: Function, f: Record, plan: Plan, row: Array) -> Value:
    """Return the product of the query with a kept row."""
    # Rows of bytes are padded to whole chunks, other rows are not.
    int8 = plan.keep in ("int8", "none")  # with none it is a centroid
    if int8:
        query, numbers = f.values, row.cast("i8", 1)
        whole: Value | int = plan.width
    else:
        kind = {"float16": "u16", "float32": "float"}[plan.keep]
        query, numbers = f.query, row.cast(kind, 1)
        whole = f.dim & -CHUNK

    def widened(loaded: Value) -> Value:
        if int8:
            return loaded.to("i32").to("float")
        return loaded if plan.keep == "float32" else half_to_float(loaded.cast(vector(LANES, "half")))

    # whole chunks, in four sums
    zero = x.constant(FLOATS, 0)
    with x.range(0, whole, CHUNK, sums=[zero] * 4) as loop:
        sums = list(loop.sums)
        for v in range(4):
            column = loop.i + LANES * v
            number = widened(numbers.vectors(LANES)[column])
            sums[v] = x.fmuladd(number, query.vectors(LANES)[column], sums[v])
        loop.sums = sums
    if int8:
        return _added(x, loop.sums)

    # the columns that remain, under a mask
    total = (loop.sums[0] + loop.sums[1]) + (loop.sums[2] + loop.sums[3])
    with x.range(whole, f.dim, LANES, total=total) as loop:
        left = x.constants("i32", range(LANES)) < (f.dim - loop.i).to("i32").broadcast(LANES)
        number = widened(x.masked_load(numbers.at(loop.i), left, align=1))
        other = x.masked_load(query.at(loop.i), left, align=4)
        loop.total = x.fmuladd(number, other, loop.total)
    return _reduced(x, loop.total)


def _added(x: Function, sums: list[Value]) -> Value:
    """Return the sum of the lanes of four registers."""
    return _reduced(x, (sums[0] + sums[1]) + (sums[2] + sums[3]))


def _reduced(x: Function, total: Value) -> Value:
    return x.intrinsic("vector.reduce.fadd", "float", x.constant("float", 0), total, flags="reassoc")
