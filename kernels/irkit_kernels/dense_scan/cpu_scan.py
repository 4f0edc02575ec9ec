"""LLVM IR that bounds the products of queries with all rows, and keeps the rows that may be among the best.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.
"""

from __future__ import annotations

from .._simd import dot_bytes
from .._typed import Array, Function, Record, Struct, Value, module, vector

__all__ = ["FRAME", "LANES", "QUERY", "write_scan"]

LANES = 16  # rows that are scored together
CHUNK = 64  # bytes of a row that are multiplied together
_INTS, _FLOATS = vector(LANES, "i32"), vector(LANES, "float")
_AHEAD = 1 << 16  # bytes from what is multiplied to what is fetched into the second-level cache
_LOWEST = -(2**31)
_LARGEST = 1e30  # bound of what is computed with float32

QUERY = Struct(
    8,
    bytes="u8*",  # (width,) signed
    total="i64",  # what the offset 128 of the codes adds to each product
    scale="float",
    length="float",  # factor of the margins
    error="float",  # factor of the norms
    # The rows that may be among the best, in the order of their numbers.
    threshold="float",  # rows whose score is at most less are not
    overflow="i64",  # 1 if there was no room for all of them, or numbers are too large
    count="i64",
    rows="u32*",
    most="float*",  # what the score of the row is at most
    least="i32*",  # the key of what it is at least
)

FRAME = Struct(
    8,
    width="i64",
    codes="u8*",  # (n, width)
    scales="float*",
    margins="float*",
    norms="float*",
    allowed="u8*",  # null, or a byte for each row that is 0 if it must not be found
    n="i64",
    start="i64",
    stop="i64",
    n_q="i64",
    queries=[QUERY],
    k="i64",
    room="i64",  # rows that a query can keep
)


def write_scan(vnni: bool) -> str:
    """Write ``scan``, which scores rows ``start`` to ``stop`` for all queries of a frame.

    Args:
        vnni: Multiply bytes with AVX512-VNNI.
    """
    x = Function("scan", public=True, f=FRAME)
    (f,) = x.parameters
    last = f.n - LANES
    with x.range(f.start, f.stop, LANES) as rows:
        # the last rows overlap those before, so that nothing beyond the arrays is read
        first = x.minimum(rows.i, last)
        numbers = x.constants("i64", range(LANES)) + first.broadcast(LANES)
        inside = (numbers >= rows.i.broadcast(LANES)) & (numbers < f.stop.broadcast(LANES))
        with x.when(f.allowed.exists(), inside=inside) as branch:
            branch.inside = branch.inside & (f.allowed.vectors(LANES)[first] != 0)
        active = branch.inside
        here = f.codes.at(first * f.width)
        with x.range(0, f.width * LANES, 64) as lines:
            x.prefetch(here.at(lines.i + _AHEAD), locality=2)
        with x.when(active.cast("u16") != 0), x.range(0, f.n_q) as each:
            q = f.queries[each.i]
            products = _products(x, f, q, first, vnni) - q.total.to("i32").broadcast(LANES)
            scale = f.scales.vectors(LANES)[first] * q.scale.broadcast(LANES)
            score = products.to("float") * scale
            bound = f.margins.vectors(LANES)[first] * q.length.broadcast(LANES)
            bound = x.fmuladd(f.norms.vectors(LANES)[first], q.error.broadcast(LANES), bound)
            most = score + bound
            # bounds include a millionth of the lengths, so that no score below overflows
            large = bound.compare("uge", x.constant(_FLOATS, _LARGEST)) & active
            with x.when(large.cast("u16") != 0):
                q.overflow = 1
            mask = most.compare("uge", q.threshold.broadcast(LANES)) & active  # NaN may be among the best
            with x.when((mask.cast("u16") != 0) & (q.overflow == 0)):
                x.call("keep", f, q, most, score - bound, first.to("u32"), mask.cast("u16"))
    return module(_shrink(), _keep(), x)


def _products(x: Function, f: Record, q: Record, first: Value, vnni: bool) -> Value:
    """Return the products of a query's bytes with 16 rows of codes."""
    starts = [f.codes.at((first + row) * f.width) for row in range(LANES)]
    with x.range(0, f.width, CHUNK, sums=[x.constant(_INTS, 0)] * LANES) as loop:
        words = _words(q.bytes, loop.i)
        loop.sums = [
            dot_bytes(total, _words(start, loop.i), words, vnni)
            for total, start in zip(loop.sums, starts, strict=True)
        ]
    return _row_sums(x, loop.sums)


def _words(array: Array, index: Value) -> Value:
    words: Value = array.at(index).cast("i32", 1).vectors(LANES)[0]
    return words


def _row_sums(x: Function, sums: list[Value]) -> Value:
    """Return the sum of the lanes of each of 16 vectors.

    Four times, neighbours are interleaved and added: numbers, pairs of numbers, then quarters of vectors.
    """
    numbers = [
        [4 * (lane // 4) + 2 * high + lane % 4 // 2 + 16 * (lane % 2) for lane in range(16)]
        for high in (0, 1)
    ]
    pairs = [
        [4 * (lane // 4) + 2 * high + lane % 2 + 16 * (lane % 4 // 2) for lane in range(16)]
        for high in (0, 1)
    ]
    quarters = [
        [4 * (2 * (lane // 4 % 2) + high) + lane % 4 + 16 * (lane // 8) for lane in range(16)]
        for high in (0, 1)
    ]
    for low, high in (numbers, pairs, quarters, quarters):
        sums = [
            x.shuffle(a, b, low) + x.shuffle(a, b, high) for a, b in zip(sums[::2], sums[1::2], strict=True)
        ]
    return sums[0]


def _keep() -> Function:
    """Append the rows of the lanes whose bit in the mask is set; call ``shrink`` before arrays are full."""
    x = Function("keep", f=FRAME, q=QUERY, most=_FLOATS, least=_FLOATS, first="u32", mask="u16")
    f, q, most, least, first, mask = x.parameters
    count, lanes = q.count, mask.cast(vector(LANES, "i1"))
    bits = least.cast(_INTS)
    key = bits ^ (bits.shift_signed(31) & 0x7FFFFFFF)  # an integer of the same order
    rows = x.constants("u32", range(LANES)) + first.broadcast(LANES)
    for array, value in ((q.rows, rows), (q.most, most), (q.least, key)):
        array.vectors(LANES)[count] = _compressed(x, value, lanes)
    q.count = count + mask.count_ones().to("i64")
    with x.when(q.count + LANES > f.room):
        x.call("shrink", f, q)
    return x


def _compressed(x: Function, value: Value, mask: Value) -> Value:
    """Move the lanes whose bit in the mask is set to the front, in order."""
    return x.intrinsic("experimental.vector.compress", value.kind, value, mask, value)


def _shrink() -> Function:
    """Raise the threshold to the k-th of the least scores, and drop the rows that cannot reach it."""
    x = Function("shrink", f=FRAME, q=QUERY)
    f, q = x.parameters
    count, k, least = q.count, f.k, q.least
    least.vectors(LANES)[count] = x.constant(_INTS, _LOWEST)

    # Set the bits of the highest key that k rows reach, from the highest bit on.
    with x.range(0, 32, low=x.constant("i64", _LOWEST)) as loop:
        middle = loop.low + (x.constant("i64", 2**31) >> loop.i)
        level = middle.to("i32").broadcast(LANES)
        with x.range(0, count, LANES, found=x.constant(_INTS, 0)) as keys:
            keys.found -= (least.vectors(LANES)[keys.i] >= level).mask("i32")
        enough = x.intrinsic("vector.reduce.add", "i32", keys.found).to("i64") >= k
        loop.low = x.where(enough, middle, loop.low)
    key = loop.low.to("i32")
    reached = (key ^ (key.shift_signed(31) & 0x7FFFFFFF)).cast("float")
    q.threshold = x.maximum(reached, q.threshold)
    threshold = q.threshold.broadcast(LANES)

    with x.range(0, count, LANES, number=0) as loop:
        inside = x.constants("i64", range(LANES)) < (count - loop.i).broadcast(LANES)
        mask = q.most.vectors(LANES)[loop.i].compare("uge", threshold) & inside
        parts = [array.vectors(LANES)[loop.i] for array in (q.rows, q.most, least)]
        for array, part in zip((q.rows, q.most, least), parts, strict=True):
            array.vectors(LANES)[loop.number] = _compressed(x, part, mask)
        loop.number += mask.cast("u16").count_ones().to("i64")
    q.count = loop.number
    q.overflow = (loop.number * 2 > f.room).to("i64")  # shrinking again and again would take long
    return x
