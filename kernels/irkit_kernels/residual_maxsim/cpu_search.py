"""The machine code that scores, in LLVM IR: centroids, documents roughly, documents."""

from __future__ import annotations

from .._jit import Values, splat
from .cpu_tile import FLOATS, GROUP, INTS, LANES, LOWEST, TABLE, TILE, Header, Plan, Writer, module, size_of

__all__ = ["write_interaction", "write_maxsim", "write_table"]

_AHEAD = 4 * TILE  # tokens: the processor does not foresee where documents begin
_NEXT = 4  # documents ahead, of which `interaction` fetches so many bytes of codes, once it knows where:
_CODES = 256


def write_table(plan: Plan) -> str:
    """The module of ``query_table``: scores of all centroids, the same as bytes, and maxima of groups."""
    c, lanes = Writer(plan), plan.lanes
    lowest = (splat(LANES, "float", LOWEST),) * plan.vectors

    def byte(score: str, factor: str, offset: str) -> str:
        level = c.fmax(c.fma(score, factor, offset), splat(LANES, "float", 0))
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
                    new[v] = c.fmax(score, new[v])
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
    c, lanes, size = Writer(plan), plan.lanes, size_of(code)
    kind, wide = f"<{lanes} x i8>", f"<{lanes} x i32>"

    def document(i: str, _: Values) -> None:
        start, stop = c.tokens(i)
        final = c.sub("%items", 1)
        c.prefetch(c.tokens_at(c.minimum(c.add(i, 4 * _NEXT), final)), 16)
        following, _end = c.tokens(c.minimum(c.add(i, _NEXT), final))
        c.prefetch(c.at("%codes", c.mul(following, size)), _CODES)
        tail, last = c.maximum(start, c.sub(stop, TILE)), c.sub(stop, 1)  # a maximum may see tokens twice

        def block(index: str, total: Values) -> Values:
            levels = c.block(index).bytes

            def tile(tokens: list[str], best: Values) -> Values:
                for token in tokens:
                    row = c.mul(c.centroid(code, "%codes", c.mul(token, size)), lanes)
                    row = c.load(kind, levels, row)
                    best = (c.op(f"call {kind} @llvm.umax.v{lanes}i8({kind} {best[0]}, {kind} {row})"),)
                return best

            def whole(t: str, best: Values) -> Values:
                return tile([c.add(t, r) for r in range(TILE)], best)

            def rest(t: str, best: Values) -> Values:
                return tile([c.minimum(c.add(t, r), last) for r in range(TILE)], best)

            best: Values = (splat(lanes, "i8", 0),)
            best = c.loop(start, tail, TILE, whole, best, kind)
            best = c.loop(tail, stop, TILE, rest, best, kind)
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
    """The module of ``residual_maxsim`` for tokens of ``width`` packed bytes and codes of type ``code``."""
    maxsim = _MaxSim(plan, code, nbits, width)
    maxsim.loop(0, "%items", 1, maxsim.document)
    body = maxsim.function(
        f"define void @residual_maxsim({TABLE}, ptr %codes, ptr %coefficients, ptr %packed, ptr %offsets, "
        "ptr %levels, ptr %documents, ptr %out, ptr %scratch, i64 %items, i64 %last, i64 %rows, i64 %blocks)"
    )
    return module(plan, body)


class _MaxSim(Writer):
    """Scratch memory holds the unpacked tokens of a tile, then the best scores of the document so far."""

    def __init__(self, plan: Plan, code: str, nbits: int, width: int) -> None:
        super().__init__(plan)
        self.code, self.nbits, self.width = code, nbits, width
        self.row, self.stride = 4 * plan.lanes, plan.stride(nbits, width)
        self.best = self.at("%scratch", TILE * self.stride)
        self.levels = self.lookup_table()

    def document(self, i: str, _: Values) -> None:
        start, stop = self.tokens(i)
        following, _end = self.tokens(self.minimum(self.add(i, 1), self.sub("%items", 1)))
        for name, size in (("packed", self.width), ("codes", size_of(self.code)), ("coefficients", 4)):
            self.prefetch(self.at(f"%{name}", self.mul(following, size)), _AHEAD * size)
        lowest, last = splat(LANES, "float", LOWEST), self.sub(stop, 1)
        clear = self.mul("%blocks", self.row)
        self.loop(0, clear, 4 * LANES, lambda at, _: self.store(FLOATS, lowest, self.best, at))
        self.loop(start, stop, TILE, lambda t, _: self._tile(t, last))
        (sums,) = self.loop(0, "%blocks", 1, self._add, (splat(LANES, "float", 0),), FLOATS)
        some, nothing = self.op(f"icmp slt i64 {start}, {stop}"), "0xFFF0000000000000"  # minus infinity
        score = self.op(f"select i1 {some}, float {self.total(sums)}, float {nothing}")
        self.store("float", score, "%out", self.mul(i, 4))

    def _tile(self, t: str, last: str) -> None:
        ahead = self.minimum(self.add(t, _AHEAD), last)
        self.prefetch(self.at("%packed", self.mul(ahead, self.width)), TILE * self.width)
        for r in range(TILE):
            token = self.minimum(self.add(t, TILE + r), last)
            self.prefetch(self.at("%scores", self._row_of(token)), self.row)
        tokens = [self.minimum(self.add(t, r), last) for r in range(TILE)]  # the last one fills up its tile
        for r, token in enumerate(tokens):
            packed = self.at("%packed", self.mul(token, self.width))
            self.unpack(packed, self.at("%scratch", r * self.stride), self.nbits, self.width, self.levels)
        a, b = ([self.half(self.at("%coefficients", self.mul(x, 4)), at) for x in tokens] for at in (0, 2))
        rows = [self._row_of(token) for token in tokens]

        def block(index: str, _: Values) -> None:
            part, place = self.block(index), self.at(self.best, self.mul(index, self.row))
            bias, best = self.words(part.header, Header.BIAS, INTS), self.words(place, 0)
            sums = self.dots("%scratch", self.stride, part.query, bias)
            for r in range(TILE):
                for v, score in enumerate(self.words(self.at(part.scores, rows[r]), 0)):
                    rest = self.floats("fmul", self.op(f"sitofp {INTS} {sums[r][v]} to {FLOATS}"), b[r])
                    best[v] = self.fmax(self.fma(score, a[r], rest), best[v])
            self.store_words(best, place)

        self.loop(0, "%blocks", 1, block)

    def _add(self, index: str, total: Values) -> Values:
        best, (result,) = self.words(self.at(self.best, self.mul(index, self.row)), 0), total
        for v, scale in enumerate(self.words(self.block(index).header, Header.SCALE)):
            result = self.fma(best[v], scale, result)
        return (result,)

    def _row_of(self, token: str) -> str:
        """Where a token's centroid is in a block of the table, in bytes."""
        code = self.at("%codes", self.mul(token, size_of(self.code)))
        return self.mul(self.centroid(self.code, code), self.row)
