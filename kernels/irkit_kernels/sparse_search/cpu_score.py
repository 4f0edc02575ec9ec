"""LLVM IR for scores of documents from their rows, and for keeping the best."""

from __future__ import annotations

from functools import partial

from .._jit import Values, splat
from .cpu_frame import Frame, size_of

__all__ = ["MARKED", "aim", "mark", "row_scaled", "write_insert", "write_pair", "write_score", "write_verify"]

_PAIR = "define internal void @pair(ptr %f, i64 %document, i64 %other, ptr %out)"
_MARKS = 512  # bits of a register, one for all terms of the same remainder
_PERMUTE = {"i16": "@llvm.x86.avx512.permvar.hi.512", "i32": "@llvm.x86.avx512.permvar.si.512"}
MARKED = (
    *(
        f"declare <{lanes} x {kind}> {_PERMUTE[kind]}(<{lanes} x {kind}>, <{lanes} x {kind}>)\n"
        f"declare <{lanes} x {kind}> @llvm.masked.load.v{lanes}{kind}.p0"
        f"(ptr, i32, <{lanes} x i1>, <{lanes} x {kind}>)"
        for lanes, kind in ((32, "i16"), (16, "i32"))
    ),
    "declare i32 @llvm.ctpop.i32(i32)",
)
_FETCHED = 8  # documents fetched in advance


def write_score(terms: str, weights: str) -> str:
    """The score of a document, added up element by element as `irkit.score` does."""
    x = Frame("table", "terms", "weights")
    (row,) = rows = [_Row(x, terms, weights, "%document")]
    full = x.add(row.start, x.op(f"and i64 {x.sub(row.stop, row.start)}, -8"))
    state = x.loop(
        row.start, full, 8, lambda i, s: _elements(rows, x.sub(i, row.start), 8, s), ("0.0",), "float"
    )
    x.store("float", row.finish(full, state[0]), "%out", align=4)
    return x.function("define internal void @score(ptr %f, i64 %document, ptr %out)")


def write_pair(terms: str, weights: str, wide: bool = False) -> str:
    """The scores of two documents: either waits for the sum before, so that two take hardly more time.

    A ``wide`` processor finds the terms of the query in a row, which are few, before it adds anything.
    """
    x = Frame("table", "terms", "weights")
    rows = [_Row(x, terms, weights, name) for name in ("%document", "%other")]
    if wide:
        left = x.op("alloca i32, align 4")
        marks = x.load("<16 x i32>", x.get("marks", "ptr"), align=64)
        for place, row in enumerate(rows):
            x.store("float", row.marked(marks, left), "%out", 4 * place, 4)
        return x.function(_PAIR)
    shorter = x.minimum(*(x.sub(row.stop, row.start) for row in rows))
    full = x.op(f"and i64 {shorter}, -4")
    state = x.loop(0, full, 4, lambda i, s: _elements(rows, i, 4, s), ("0.0", "0.0"), "float")
    for place, (row, total) in enumerate(zip(rows, state, strict=True)):
        x.store("float", row.finish(x.add(row.start, full), total), "%out", 4 * place, 4)
    return x.function(_PAIR)


class _Row:
    """The elements of a document."""

    def __init__(self, x: Frame, terms: str, weights: str, document: str) -> None:
        self.x, self.terms, self.weights = x, terms, weights
        self.start = x.item("offsets", document, "i64")
        self.stop = x.item("offsets", x.add(document, 1), "i64")
        self.scale = None if weights in ("float", "half") else x.item("row_scales", document, "float")
        self.dim = x.get("dim") if terms == "i32" else None  # what 16 bits hold is in the table

    def plus(self, at: str, total: str) -> str:
        """``total`` and the product of element ``at``."""
        x, kind = self.x, self.weights
        term = x.item("terms", at, self.terms)
        looked = x.item("table", x.minimum(term, self.dim) if self.dim else term, "float")
        value = x.load(kind, x.place("weights", at, kind), align=size_of(kind))
        if kind != "float":
            value = x.op(f"{'fpext' if kind == 'half' else 'uitofp'} {kind} {value} to float")
        if self.scale:
            value = x.floats("fmul", value, self.scale)
        return x.op(f"call float @llvm.fma.f32(float {value}, float {looked}, float {total})")

    def finish(self, at: str, total: str) -> str:
        """``total`` and the products of the elements from ``at`` on."""
        (score,) = self.x.loop(at, self.stop, 1, lambda i, s: (self.plus(i, s[0]),), (total,), "float")
        return score

    def marked(self, marks: str, left: str) -> str:
        """The score: products of other terms than those marked are 0, and change no sum."""
        x, kind, bits = self.x, self.terms, 8 * size_of(self.terms)
        lanes = _MARKS // bits  # words of the marks, and terms looked at in a turn
        terms, word = f"<{lanes} x {kind}>", f"i{lanes}"
        if kind == "i16":
            marks = x.op(f"bitcast <16 x i32> {marks} to {terms}")

        def look(i: str, state: Values) -> Values:
            number = x.minimum(x.sub(self.stop, i), lanes)
            ones = x.op(f"lshr {word} -1, {x.op(f'trunc i64 {x.sub(lanes, number)} to {word}')}")
            there = x.op(f"bitcast {word} {ones} to <{lanes} x i1>")
            own = f"ptr {x.place('terms', i, kind)}, i32 {bits // 8}, <{lanes} x i1> {there}"
            given = x.op(f"call {terms} @llvm.masked.load.v{lanes}{kind}.p0({own}, {terms} zeroinitializer)")
            place = x.op(f"lshr {terms} {given}, {splat(lanes, kind, bits.bit_length() - 1)}")
            found = x.op(f"call {terms} {_PERMUTE[kind]}({terms} {marks}, {terms} {place})")
            shift = x.op(f"and {terms} {given}, {splat(lanes, kind, bits - 1)}")
            found = x.op(f"and {terms} {found}, {x.op(f'shl {terms} {splat(lanes, kind, 1)}, {shift}')}")
            marked = x.op(f"and <{lanes} x i1> {there}, {x.op(f'icmp ne {terms} {found}, zeroinitializer')}")
            mask = x.op(f"bitcast <{lanes} x i1> {marked} to {word}")
            x.store("i32", mask if lanes == 32 else x.op(f"zext {word} {mask} to i32"), left, align=4)
            count = x.op(f"call i32 @llvm.ctpop.i32(i32 {x.load('i32', left, align=4)})")

            def add(_: str, total: Values) -> Values:
                rest = x.load("i32", left, align=4)
                lane = x.op(f"zext i32 {x.op(f'call i32 @llvm.cttz.i32(i32 {rest}, i1 true)')} to i64")
                x.store("i32", x.op(f"and i32 {rest}, {x.op(f'sub i32 {rest}, 1')}"), left, align=4)
                return (self.plus(x.add(i, lane), total[0]),)

            return x.loop(0, x.op(f"zext i32 {count} to i64"), 1, add, state, "float")

        (score,) = x.loop(self.start, self.stop, lanes, look, ("0.0",), "float")
        return score


def mark(x: Frame, term: str) -> None:
    """Set the bit of a term of the query."""
    bit = x.op(f"and i64 {term}, {_MARKS - 1}")
    place = x.at(x.get("marks", "ptr"), x.op(f"lshr i64 {bit}, 3"))
    low = x.op(f"and i64 {bit}, 7")
    one = x.op(f"shl i8 1, {x.op(f'trunc i64 {low} to i8')}")
    x.store("i8", x.op(f"or i8 {x.load('i8', place)}, {one}"), place)


def _elements(rows: list[_Row], first: str, number: int, totals: Values) -> Values:
    """Totals of some documents and the products of their elements ``first`` to ``first + number``."""
    for j in range(number):
        places = [row.x.add(row.start, row.x.add(first, j)) for row in rows]
        totals = tuple(row.plus(at, total) for row, at, total in zip(rows, places, totals, strict=True))
    return totals


def row_scaled(x: Frame, weights: str, value: str) -> str:
    """``value`` times the scale of ``%document``, where weights have one."""
    if weights in ("float", "half"):
        return value
    return x.floats("fmul", value, x.item("row_scales", "%document", "float"))


def aim(x: Frame, theta: str) -> None:
    """Set the k-th best score, and what bounds must reach; rounding errors are allowed for."""
    x.set("theta", theta, "float")
    bound = x.floats("fmul", x.floats("fmul", theta, x.get("margin", "float")), x.get("unit", "float"))
    x.set("least", x.sub(x.whole(bound), x.add(x.op(f"lshr i64 {x.get('m')}, 7"), 2)))


def write_insert() -> str:
    """Put a hit where it belongs among those found, unless it is there or not good enough."""
    x = Frame()
    low, high = x.op("alloca i64, align 8"), x.op("alloca i64, align 8")
    hits, k = x.get("hits"), x.get("k")
    rows, scores = x.get("out_rows", "ptr"), x.get("out_scores", "ptr")

    def better(than: str) -> str:
        """Whether the new hit comes before hit ``than``."""
        old, row = x.load("float", scores, x.mul(than, 4), 4), x.load("i64", rows, x.mul(than, 8), 8)
        tie = x.both(x.cmp("oeq", old, "%score", "float"), x.cmp("sgt", row, "%row"))
        return x.either(x.cmp("olt", old, "%score", "float"), tie)

    x.store("i64", "0", low, align=8)
    x.store("i64", hits, high, align=8)

    def halve() -> str:
        middle = x.op(f"lshr i64 {x.add(x.load('i64', low, align=8), x.load('i64', high, align=8))}, 1")
        before = x.both(x.cmp("slt", middle, hits), better(x.minimum(middle, x.sub(k, 1))))
        stay = x.either(before, x.cmp("sge", middle, hits))
        x.store("i64", x.select(stay, middle, x.load("i64", high, align=8)), high, align=8)
        x.store("i64", x.select(stay, x.load("i64", low, align=8), x.add(middle, 1)), low, align=8)
        return x.cmp("slt", x.load("i64", low, align=8), x.load("i64", high, align=8))

    x.repeat(halve)
    at = x.load("i64", low, align=8)
    same = x.cmp("eq", x.load("i64", rows, x.mul(x.maximum(x.sub(at, 1), 0), 8), 8), "%row")
    there = x.both(x.cmp("sgt", at, 0), same)

    def put() -> None:
        moved = x.sub(x.minimum(hits, x.sub(k, 1)), at)
        for array, size in ((rows, 8), (scores, 4)):
            place, bytes_ = x.at(array, x.mul(at, size)), x.mul(moved, size)
            move = f"ptr {x.at(place, size)}, ptr {place}, i64 {bytes_}, i1 false"
            x.do(f"call void @llvm.memmove.p0.p0.i64({move})")
        x.store("i64", "%row", rows, x.mul(at, 8), 8)
        x.store("float", "%score", scores, x.mul(at, 4), 4)
        number = x.minimum(x.add(hits, 1), k)
        x.set("hits", number)

        last = x.mul(x.sub(k, 1), 4)
        x.when(x.cmp("eq", number, k), lambda: aim(x, x.load("float", scores, last, 4)))

    x.when(x.both(x.cmp("slt", at, k), x.flip(there)), put)
    return x.function("define internal void @insert(ptr %f, i64 %row, float %score)")


def write_verify(terms: str, weights: str) -> str:
    """Score the chosen documents."""
    x = Frame("offsets", "terms", "weights")
    chosen, number = x.get("chosen", "ptr"), x.get("number")
    out = x.op("alloca [2 x float], align 4")

    def document(at: str) -> str:
        return x.op(f"zext i32 {x.load('i32', chosen, x.mul(at, 4), 4)} to i64")

    def approach(i: str) -> None:
        ahead = document(i)
        start, stop = x.item("offsets", ahead, "i64"), x.item("offsets", x.add(ahead, 1), "i64")

        def terms_line(p: str, _: Values) -> None:
            x.prefetch(x.place("terms", p, terms))

        def weights_line(p: str, _: Values) -> None:
            x.prefetch(x.place("weights", p, weights))

        x.loop(start, stop, 64 // size_of(terms), terms_line)
        x.loop(start, stop, 64 // size_of(weights), weights_line)

    x.loop(0, number, 1, lambda i, _: x.prefetch(x.place("offsets", document(i), "i64")))
    x.loop(0, x.minimum(number, _FETCHED), 1, lambda i, _: approach(i))

    def consider(at: str, document: str, place: int) -> None:
        score = x.load("float", out, 4 * place, 4)
        good = x.both(x.cmp("slt", at, number), x.cmp("oge", score, x.get("theta", "float"), "float"))
        x.when(
            x.both(good, x.cmp("ogt", score, "0.0", "float")),
            lambda: x.do(f"call void @push(ptr %f, i64 {document}, float {score})"),
        )

    def two(i: str, _: Values) -> None:
        for j in range(2):
            following = x.add(i, _FETCHED + j)
            x.when(x.cmp("slt", following, number), partial(approach, following))
        pair = [document(i), document(x.minimum(x.add(i, 1), x.sub(number, 1)))]  # the last one twice
        x.do(f"call void @pair(ptr %f, i64 {pair[0]}, i64 {pair[1]}, ptr {out})")
        for place, this in enumerate(pair):
            consider(x.add(i, place), this, place)

    x.loop(0, number, 2, two)
    return x.function("define internal void @verify(ptr %f)")
