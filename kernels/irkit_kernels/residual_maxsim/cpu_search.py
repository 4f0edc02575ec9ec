"""The machine code that scores, in LLVM IR: centroids, documents roughly, documents."""

from __future__ import annotations

from .._jit import Values, splat
from .cpu_tile import FLOATS, GROUP, INTS, LANES, LOWEST, TABLE, TILE, Header, Plan, Writer, module

__all__ = ["write_interaction", "write_maxsim", "write_table"]


def write_table(plan: Plan) -> str:
    """The module of ``query_table``: scores of all centroids, the same as bytes, and maxima of groups."""
    c, lanes = Writer(plan), plan.lanes
    lowest = (splat(LANES, "float", LOWEST),) * plan.vectors

    def byte(score: str, factor: str, offset: str) -> str:
        level = c.maximum(c.fma(score, factor, offset), splat(LANES, "float", 0))
        level = c.op(f"fptosi {FLOATS} {level} to {INTS}")
        level = c.op(f"call {INTS} @llvm.umin.v16i32({INTS} {level}, {INTS} {splat(LANES, 'i32', 255)})")
        return c.op(f"trunc {INTS} {level} to <16 x i8>")

    def block(index: str, _: Values) -> None:
        part = c.block(index)
        bias = c.words(part.header, Header.BIAS, INTS)
        factor, offset = (c.words(part.header, row) for row in (Header.FACTOR, Header.OFFSET))

        def tile(row: str, best: Values) -> Values:
            new, place = list(best), c.mul(row, lanes)
            sums = c.dots(c.at("%centroids", c.mul(row, plan.dim)), plan.dim, part.query, bias)
            scales = c.at("%scales", c.mul(row, 4))
            scores, levels = c.at(part.scores, c.mul(place, 4)), c.at(part.bytes, place)
            for r in range(TILE):
                scale = c.broadcast(LANES, "float", c.load("float", scales, 4 * r))
                for v in c.each:
                    score = c.floats("fmul", c.op(f"sitofp {INTS} {sums[r][v]} to {FLOATS}"), scale)
                    c.store(FLOATS, score, scores, 4 * (r * lanes + LANES * v))
                    c.store("<16 x i8>", byte(score, factor[v], offset[v]), levels, r * lanes + LANES * v)
                    new[v] = c.maximum(score, new[v])
            return tuple(new)

        def group(first: str, _: Values) -> None:
            best = c.loop(first, c.add(first, GROUP), TILE, tile, lowest, FLOATS)
            place = c.at(part.maxima, c.mul(c.op(f"udiv i64 {first}, {GROUP}"), 4 * lanes))
            c.store_words(best, place)

        c.loop(0, "%rows", GROUP, group)

    c.loop(0, "%blocks", 1, block)
    head = f"define void @query_table({TABLE}, ptr %centroids, ptr %scales, i64 %rows, i64 %blocks)"
    return module(plan, f"declare {INTS} @llvm.umin.v16i32({INTS}, {INTS})", c.function(head))


def write_interaction(plan: Plan, code: str) -> str:
    """The module of ``interaction``: sums of byte maxima of documents with codes of LLVM type ``code``."""
    c, lanes, size = Writer(plan), plan.lanes, _size(code)
    kind, wide = f"<{lanes} x i8>", f"<{lanes} x i32>"

    def document(i: str, _: Values) -> None:
        start, stop = c.tokens(i)
        whole = c.sub(stop, c.op(f"and i64 {c.sub(stop, start)}, {TILE - 1}"))

        def block(index: str, total: Values) -> Values:
            levels = c.block(index).bytes

            def tokens(t: str, best: str, count: int) -> Values:
                codes = c.at("%codes", c.mul(t, size))
                for k in range(count):
                    row = c.load(kind, levels, c.mul(c.centroid(code, codes, k * size), lanes))
                    best = c.op(f"call {kind} @llvm.umax.v{lanes}i8({kind} {best}, {kind} {row})")
                return (best,)

            best: Values = (splat(lanes, "i8", 0),)
            best = c.loop(start, whole, TILE, lambda t, state: tokens(t, state[0], TILE), best, kind)
            best = c.loop(whole, stop, 1, lambda t, state: tokens(t, state[0], 1), best, kind)
            each = c.op(f"zext {kind} {best[0]} to {wide}")
            return (c.op(f"add i32 {total[0]}, {c.op(f'call i32 {add}({wide} {each})')}"),)

        (total,) = c.loop(0, "%blocks", 1, block, ("0",), "i32")
        c.store("i32", total, "%out", c.mul(i, 4))

    add = f"@llvm.vector.reduce.add.v{lanes}i32"
    c.loop(0, "%items", 1, document)
    body = c.function(
        f"define void @interaction({TABLE}, ptr %codes, ptr %offsets, ptr %documents, ptr %out, i64 %items, "
        "i64 %last, i64 %rows, i64 %blocks)"
    )
    maximum = f"declare {kind} @llvm.umax.v{lanes}i8({kind}, {kind})"
    return module(plan, maximum, f"declare i32 {add}({wide})", body)


def write_maxsim(plan: Plan, code: str, nbits: int, width: int) -> str:
    """The module of ``residual_maxsim`` for tokens of ``width`` packed bytes and codes of type ``code``.

    Scratch memory holds the unpacked tokens of a tile, then the best scores of a document's tokens so far.
    """
    c, lanes, stride = Writer(plan), plan.lanes, plan.stride(nbits, width)
    best_at, table, size = c.at("%scratch", TILE * stride), c.lookup_table(nbits), _size(code)

    def tile(t: str, last: str) -> None:
        tokens = [c.minimum(c.add(t, r), last) for r in range(TILE)]  # the last token fills up its tile
        for r, token in enumerate(tokens):
            packed = c.at("%packed", c.mul(token, width))
            c.unpack(packed, c.at("%scratch", r * stride), nbits, width, table)
        a, b = ([c.half(c.at("%coefficients", c.mul(x, 4)), at) for x in tokens] for at in (0, 2))
        rows = [c.mul(c.centroid(code, c.at("%codes", c.mul(x, size))), 4 * lanes) for x in tokens]

        def block(index: str, _: Values) -> None:
            part, place = c.block(index), c.at(best_at, c.mul(index, 4 * lanes))
            sums = c.dots("%scratch", stride, part.query, c.words(part.header, Header.BIAS, INTS))
            best = c.words(place, 0)
            for r in range(TILE):
                score = c.words(c.at(part.scores, rows[r]), 0)
                for v in c.each:
                    rest = c.floats("fmul", c.op(f"sitofp {INTS} {sums[r][v]} to {FLOATS}"), b[r])
                    best[v] = c.maximum(c.fma(score[v], a[r], rest), best[v])
            c.store_words(best, place)

        c.loop(0, "%blocks", 1, block)

    def add(index: str, total: Values) -> Values:
        best, (result,) = c.words(c.at(best_at, c.mul(index, 4 * lanes)), 0), total
        for v, scale in enumerate(c.words(c.block(index).header, Header.SCALE)):
            result = c.fma(best[v], scale, result)
        return (result,)

    def document(i: str, _: Values) -> None:
        start, stop = c.tokens(i)
        following, _end = c.tokens(c.minimum(c.add(i, 1), c.sub("%items", 1)))
        for name, bytes_ in (("packed", width), ("codes", size), ("coefficients", 4)):
            _prefetch(c, c.at(f"%{name}", c.mul(following, bytes_)), 4 * TILE * bytes_)
        lowest, last = splat(LANES, "float", LOWEST), c.sub(stop, 1)
        clear = c.mul("%blocks", 4 * lanes)
        c.loop(0, clear, 4 * LANES, lambda at, _: c.store(FLOATS, lowest, best_at, at))
        c.loop(start, stop, TILE, lambda t, _: tile(t, last))
        (sums,) = c.loop(0, "%blocks", 1, add, (splat(LANES, "float", 0),), FLOATS)
        some, nothing = c.op(f"icmp slt i64 {start}, {stop}"), "0xFFF0000000000000"  # minus infinity
        c.store(
            "float", c.op(f"select i1 {some}, float {c.total(sums)}, float {nothing}"), "%out", c.mul(i, 4)
        )

    c.loop(0, "%items", 1, document)
    body = c.function(
        f"define void @residual_maxsim({TABLE}, ptr %codes, ptr %coefficients, ptr %packed, ptr %offsets, "
        "ptr %levels, ptr %documents, ptr %out, ptr %scratch, i64 %items, i64 %last, i64 %rows, i64 %blocks)"
    )
    return module(plan, body)


def _prefetch(c: Writer, pointer: str, size: int) -> None:
    """Fetch the beginning of what the next document reads; the processor foresees the rest."""
    for line in range(0, size, 64):
        c.do(f"call void @llvm.prefetch.p0(ptr {c.at(pointer, line)}, i32 0, i32 2, i32 1)")


def _size(code: str) -> int:
    return int(code.removeprefix("i")) // 8
