"""LLVM IR for scores of documents from their rows, and for keeping the best."""

from __future__ import annotations

from .._jit import Values
from .cpu_frame import Frame, size_of

__all__ = ["row_scaled", "write_insert", "write_score", "write_verify"]

_FETCHED = 8  # documents fetched in advance


def write_score(terms: str, weights: str) -> str:
    """The score of a document, added up element by element as `irkit.score` does."""
    x = Frame("table", "terms", "weights")
    start, stop = x.item("offsets", "%document", "i64"), x.item("offsets", x.add("%document", 1), "i64")

    def elements(i: str, state: Values, number: int) -> Values:
        for j in range(number):
            at = x.add(i, j)
            looked = x.item("table", x.item("terms", at, terms), "float")
            value = row_scaled(x, weights, _weight(x, weights, at))
            state = (x.op(f"call float @llvm.fma.f32(float {value}, float {looked}, float {state[0]})"),)
        return state

    full = x.add(start, x.op(f"and i64 {x.sub(stop, start)}, -8"))
    state = x.loop(start, full, 8, lambda i, s: elements(i, s, 8), ("0.0",), "float")
    (score,) = x.loop(full, stop, 1, lambda i, s: elements(i, s, 1), state, "float")
    x.store("float", score, "%out", align=4)
    return x.function("define internal void @score(ptr %f, i64 %document, ptr %out)")


def _weight(x: Frame, weights: str, index: str) -> str:
    value = x.load(weights, x.place("weights", index, weights), align=size_of(weights))
    if weights == "float":
        return value
    return x.op(f"{'fpext' if weights == 'half' else 'uitofp'} {weights} {value} to float")


def row_scaled(x: Frame, weights: str, value: str) -> str:
    """``value`` times the scale of ``%document``, where weights have one."""
    if weights in ("float", "half"):
        return value
    return x.floats("fmul", value, x.item("row_scales", "%document", "float"))


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

        def aim() -> None:  # what bounds must reach; rounding errors are allowed for
            theta = x.load("float", scores, x.mul(x.sub(k, 1), 4), 4)
            x.set("theta", theta, "float")
            bound = x.floats(
                "fmul", x.floats("fmul", theta, x.get("margin", "float")), x.get("unit", "float")
            )
            x.set("least", x.sub(x.whole(bound), x.add(x.op(f"lshr i64 {x.get('m')}, 7"), 2)))

        x.when(x.cmp("eq", number, k), aim)

    x.when(x.both(x.cmp("slt", at, k), x.flip(there)), put)
    return x.function("define internal void @insert(ptr %f, i64 %row, float %score)")


def write_verify(terms: str, weights: str) -> str:
    """Score the chosen documents."""
    x = Frame("offsets", "terms", "weights")
    chosen, number = x.get("chosen", "ptr"), x.get("number")
    out = x.op("alloca float, align 4")

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

    def one(i: str, _: Values) -> None:
        following = x.add(i, _FETCHED)
        x.when(x.cmp("slt", following, number), lambda: approach(following))
        this = document(i)
        x.do(f"call void @score(ptr %f, i64 {this}, ptr {out})")
        score = x.load("float", out, align=4)
        good = x.cmp("oge", score, x.get("theta", "float"), "float")
        x.when(
            x.both(good, x.cmp("ogt", score, "0.0", "float")),
            lambda: x.do(f"call void @insert(ptr %f, i64 {this}, float {score})"),
        )

    x.loop(0, number, 1, one)
    return x.function("define internal void @verify(ptr %f)")
