"""LLVM IR that bounds the products of queries with all rows, and keeps the rows that may be among the best.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.
"""

from __future__ import annotations

from typing import NamedTuple

from .._simd import dot_bytes, store_lanes
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
    scratch="u8*",  # (width, 16)
)


def write_scan(vnni: bool) -> str:
    """Write ``scan``, which scores rows ``start`` to ``stop`` for all queries of a frame.

    Args:
        vnni: Multiply bytes with AVX512-VNNI.
    """
    x = Function("scan", public=True, f=FRAME)
    (f,) = x.parameters
    last = f.n - LANES
    many = 8 if vnni else 2  # queries whose sums the registers hold
    with x.range(f.start, f.stop, LANES) as rows:
        # the last rows overlap those before, so that nothing beyond the arrays is read
        first = x.minimum(rows.i, last)
        numbers = x.constants("i64", range(LANES)) + first.broadcast(LANES)
        inside = (numbers >= rows.i.broadcast(LANES)) & (numbers < f.stop.broadcast(LANES))
        with x.when(f.allowed.exists(), inside=inside) as branch:
            branch.inside = branch.inside & (f.allowed.vectors(LANES)[first] != 0)
        active = branch.inside
        here = f.codes.at(first * f.width)
        size = f.width * LANES
        with x.when((active.cast("u16") == 0) | (f.n_q < many)):
            _fetch(x, here, x.constant("i64", 0), size)
        with x.when(active.cast("u16") != 0):
            floats = [array.vectors(LANES)[first] for array in (f.scales, f.margins, f.norms)]
            block = _Rows(first.to("u32"), active, *floats)
            together = f.n_q & -many
            with x.when(together > 0):
                _transpose(x, f, here)
            with x.range(0, together, many) as group:
                # each group fetches a part, because few reads can be under way at a time
                _fetch(x, here, *(size * at // together & -64 for at in (group.i, group.i + many)))
                queries = [f.queries[group.i + number] for number in range(many)]
                for q, products in zip(queries, _products_of_many(x, f, queries, vnni), strict=True):
                    _judge(x, f, q, products, block)
            with x.range(together, f.n_q) as each:
                q = f.queries[each.i]
                _judge(x, f, q, _products(x, f, q, first, vnni), block)
    return module(_shrink(), _keep(), x)


def _fetch(x: Function, codes: Array, start: Value, stop: Value) -> None:
    """Fetch what is ahead of the bytes ``start`` to ``stop`` of codes into the second-level cache."""
    with x.range(start, stop, 64) as lines:
        x.prefetch(codes.at(lines.i + _AHEAD), locality=2)


class _Rows(NamedTuple):
    """16 rows: the number of the first, which of them may be found, and what their bounds are made of."""

    number: Value
    active: Value
    scales: Value
    margins: Value
    norms: Value


def _judge(x: Function, f: Record, q: Record, products: Value, rows: _Rows) -> None:
    """Keep the rows that may be among the best of a query, by the products of its bytes with their codes."""
    products = products - q.total.to("i32").broadcast(LANES)
    score = products.to("float") * (rows.scales * q.scale.broadcast(LANES))
    bound = rows.margins * q.length.broadcast(LANES)
    bound = x.fmuladd(rows.norms, q.error.broadcast(LANES), bound)
    most = score + bound
    # bounds include a millionth of the lengths, so that no score below overflows
    large = bound.compare("uge", x.constant(_FLOATS, _LARGEST)) & rows.active
    mask = most.compare("uge", q.threshold.broadcast(LANES)) & rows.active  # NaN may be among the best
    with x.when((mask | large).cast("u16") != 0):
        with x.when(large.cast("u16") != 0):
            q.overflow = 1
        with x.when((mask.cast("u16") != 0) & (q.overflow == 0)):
            x.call("keep", f, q, most, score - bound, rows.number, mask.cast("u16"))


def _transpose(x: Function, f: Record, codes: Array) -> None:
    """Write words 0 of 16 rows of codes to the scratch memory, then words 1 of them, and so on.

    Squares of 16 rows and 16 words are transposed as a square of squares is: the two off its diagonal change
    places, for squares of 8, 4, 2 words and of one.
    """
    scratch = f.scratch
    with x.range(0, f.width, CHUNK) as loop:
        rows = [_words(codes.at(row * f.width), loop.i) for row in range(LANES)]
        for size in (8, 4, 2, 1):
            low = [lane + (LANES - size if lane & size else 0) for lane in range(LANES)]
            high = [lane + (LANES if lane & size else size) for lane in range(LANES)]
            for upper in (number for number in range(LANES) if not number & size):
                a, b = rows[upper], rows[upper + size]
                rows[upper], rows[upper + size] = x.shuffle(a, b, low), x.shuffle(a, b, high)
        words = scratch.at(loop.i * LANES).cast("i32", 1)
        for number, row in enumerate(rows):
            words.vectors(LANES)[LANES * number] = row


def _products_of_many(x: Function, f: Record, queries: list[Record], vnni: bool) -> list[Value]:
    """Return for each query the products of its bytes with the 16 rows in the scratch memory.

    A word of the rows is read once for all queries, and the products need no sums across lanes. Each query
    has a sum of even words and one of odd words, because an addition waits for the one before it.
    """
    scratch, starts, n_q = f.scratch, [q.bytes for q in queries], len(queries)
    with x.range(0, f.width, CHUNK, sums=[x.constant(_INTS, 0)] * (2 * n_q)) as loop:
        words = [start.at(loop.i).cast("i32", 1) for start in starts]
        rows = scratch.at(loop.i * LANES).cast("i32", 1).vectors(LANES)
        for number in range(0, CHUNK // 4, 2):
            pair = rows[LANES * number], rows[LANES * (number + 1)]
            loop.sums = [
                dot_bytes(total, pair[at // n_q], words[at % n_q][number + at // n_q].broadcast(LANES), vnni)
                for at, total in enumerate(loop.sums)
            ]
    return [even + odd for even, odd in zip(loop.sums[:n_q], loop.sums[n_q:], strict=True)]


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
    count = q.count
    bits = least.cast(_INTS)
    key = bits ^ (bits.shift_signed(31) & 0x7FFFFFFF)  # an integer of the same order
    rows = x.constants("u32", range(LANES)) + first.broadcast(LANES)
    store_lanes(x, ((q.rows, rows), (q.most, most), (q.least, key)), count, mask)
    q.count = count + mask.count_ones().to("i64")
    with x.when(q.count + LANES > f.room):
        x.call("shrink", f, q)
    return x


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
        bits, arrays = mask.cast("u16"), (q.rows, q.most, least)
        parts = [array.vectors(LANES)[loop.i] for array in arrays]
        store_lanes(x, zip(arrays, parts, strict=True), loop.number, bits)
        loop.number += bits.count_ones().to("i64")
    q.count = loop.number
    q.overflow = (loop.number * 2 > f.room).to("i64")  # shrinking again and again would take long
    return x
