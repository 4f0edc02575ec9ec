"""The machine code of approximate search, in LLVM IR: the best postings of some terms choose documents.

It uses the frame of exact search, made longer, and scores documents by its code.
"""

from __future__ import annotations

from .._jit import Values, array, splat
from .cpu_exact import write_main
from .cpu_examine import write_examine
from .cpu_frame import constant
from .cpu_pool import TOP, PoolFrame, write_pool
from .cpu_score import write_insert, write_score

__all__ = ["TOTALS", "write_approximate"]

TOTALS = 1 << 15  # documents of a range: their totals, of a byte each, stay in the first cache
_GROUP = 8  # postings added at once
_CODES = 255
_SAMPLE = 4096  # documents that are the first range
_FIRST = 16  # documents scored to see what others must reach
_MOST = 64  # lists that are read at most: what each adds is rounded up to a whole of ``TOP``
_STREAM = 1024  # bytes of a list that are fetched ahead
_PICK = 24  # bytes: a list's place, its end, and share of a code


def write_approximate(terms: str, weights: str) -> str:
    """The module of ``approximate(frame)``.

    Args:
        terms: LLVM type of the terms of a row, as for exact search.
        weights: Of its weights.
    """
    declarations = [
        "declare float @llvm.fma.f32(float, float, float)",
        "declare void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
        "declare float @llvm.maxnum.f32(float, float)",
    ]
    scores = [write_score(terms, weights), write_insert(), write_examine(terms, weights)]
    parts = [*scores, write_pool(), _accumulate(), _settle(), _pick(), _query(), write_main("approximate")]
    return "\n".join([*declarations, *parts])


def _accumulate() -> str:
    """Add what postings bring to the totals of their documents, up to row ``%stop`` of a list."""
    x = PoolFrame()
    best, totals = x.get("best", "ptr"), x.get("totals", "ptr")
    base, limit = x.at(totals, x.sub(0, "%start")), x.op("shl i64 %stop, 8")
    place, end = x.load("i64", "%pick", 0, 8), x.load("i64", "%pick", 8, 8)

    def word_at(i: str) -> str:
        return x.op(f"zext i32 {x.load('i32', best, x.mul(i, 4), 4)} to i64")

    def before(i: str) -> str:  # whether posting i is one of them
        inside = x.cmp("slt", i, end)
        return x.both(inside, x.cmp("ult", word_at(x.select(inside, i, place)), limit))

    def add(i: str, number: int) -> None:
        if number > 1:
            x.prefetch(x.at(best, x.add(x.mul(i, 4), _STREAM)))
        for j in range(number):
            word = word_at(x.add(i, j))
            value = x.load("i8", x.at("%gains", x.op(f"and i64 {word}, {_CODES}")))
            total = x.at(base, x.op(f"lshr i64 {word}, 8"))
            x.store("i8", x.op(f"add i8 {x.load('i8', total)}, {value}"), total)

    many = x.advance(place, _GROUP, lambda i: before(x.add(i, _GROUP - 1)), lambda i: add(i, _GROUP))
    x.store("i64", x.advance(many, 1, before, lambda i: add(i, 1)), "%pick", align=8)
    return x.function(
        "define internal void @accumulate(ptr %f, ptr %pick, ptr %gains, i64 %start, i64 %stop)"
    )


def _settle() -> str:
    """Score the ``%wanted`` most promising documents, and say what total others must reach."""
    x = PoolFrame()
    x.do("call void @part(ptr %f, i64 %wanted)")
    x.do("call void @examine(ptr %f)")
    doubted = x.floats("fmul", x.get("missing", "float"), x.get("doubt", "float"))
    least = x.floats("fmul", x.floats("fsub", x.get("theta", "float"), doubted), x.get("room", "float"))
    least = x.minimum(x.maximum(x.whole(least), 1), TOP)
    x.do(f"call void @lift(ptr %f, i64 {x.select(x.cmp('eq', x.get('hits'), x.get('k')), least, 1)})")
    return x.function("define internal void @settle(ptr %f, i64 %wanted)")


def _pick() -> str:
    """Find the lists of the terms that may add most; what all others may add is missing."""
    x = PoolFrame()
    start, m, cut = x.item("q_offsets", "%query", "i64"), x.get("m"), x.get("picked")
    picks, dim = x.get("picks", "ptr"), x.get("dim")
    best = x.op("alloca i64, align 8")

    def term(j: str, state: Values) -> Values:
        number, weight = (
            x.item("q_terms", x.add(start, j), "i32"),
            x.item("q_weights", x.add(start, j), "float"),
        )
        known = x.cmp("ult", number, dim)
        x.when(known, lambda: x.store("float", weight, x.place("table", number, "float"), align=4))
        scale = x.item("best_scales", x.select(known, number, 0), "float")
        share = x.select(known, x.floats("fmul", weight, scale), "0.0", "float")
        x.store("float", share, x.place("shares", j, "float"), align=4)
        return (x.floats("fadd", state[0], share),)

    (total,) = x.loop(0, m, 1, term, ("0.0",), "float")

    def pick(c: str, state: Values) -> Values:
        x.store("i64", "0", best, align=8)

        def higher(j: str, highest: Values) -> Values:
            share = x.item("shares", j, "float")
            above = x.cmp("ogt", share, highest[0], "float")
            x.store("i64", x.select(above, j, x.load("i64", best, align=8)), best, align=8)
            return (x.select(above, share, highest[0], "float"),)

        (share,) = x.loop(0, m, 1, higher, (constant(-1),), "float")
        j = x.load("i64", best, align=8)
        x.store("float", constant(-1), x.place("shares", j, "float"), align=4)
        number = x.minimum(x.item("q_terms", x.add(start, j), "i32"), x.sub(dim, 1))
        place, first = x.at(picks, x.mul(c, _PICK)), x.item("best_offsets", number, "i64")
        for line in range(0, _STREAM, 64):
            x.prefetch(x.at(x.place("best", first, "i32"), line))
        x.store("i64", first, place, align=8)
        x.store("i64", x.item("best_offsets", x.add(number, 1), "i64"), place, 8, 8)
        x.store("float", share, place, 16, 4)
        missed = x.floats(
            "fmul", x.item("q_weights", x.add(start, j), "float"), x.item("best_missed", number, "float")
        )
        return x.floats("fadd", state[0], share), x.floats("fadd", state[1], missed)

    picked, missed = x.loop(0, cut, 1, pick, ("0.0", "0.0"), "float")
    left = x.floats("fmul", x.floats("fsub", total, picked), constant(_CODES))
    x.set("missing", x.floats("fadd", missed, left), "float")
    # A document of all lists is thought to have all that is missing, one of some lists that share of it.
    # The sum of all that is added to a total, each rounded up, must fit into it.
    missing = x.get("missing", "float")
    highest = x.floats("fadd", x.floats("fmul", picked, constant(_CODES)), missing)
    highest = x.op(f"call float @llvm.maxnum.f32(float {highest}, float {constant(1e-30)})")
    room = x.floats("fdiv", x.real(x.sub(TOP, cut)), highest)
    x.set("room", room, "float")
    bonus = x.floats("fdiv", x.floats("fmul", missing, room), x.real(x.maximum(cut, 1)))
    bonus = x.add(x.whole(x.floats("fmul", bonus, constant(65536))), 65535)
    bonus = x.broadcast(_GROUP, "i32", x.op(f"trunc i64 {bonus} to i32"))
    kind = f"<{_GROUP} x i32>"

    def scale(c: str, _: Values) -> None:
        place = x.at(picks, x.mul(c, _PICK))
        factor = x.floats("fmul", x.load("float", place, 16, 4), x.get("room", "float"))
        factor = x.minimum(x.whole(x.floats("fmul", factor, constant(65536))), 65535)
        factor = x.broadcast(_GROUP, "i32", x.op(f"trunc i64 {factor} to i32"))
        for first in range(0, _CODES + 1, _GROUP):  # what each code brings, rounded up
            value = x.op(f"mul {kind} {array(_GROUP, 'i32', range(first, first + _GROUP))}, {factor}")
            value = x.op(f"add {kind} {value}, {bonus}")
            value = x.op(f"lshr {kind} {value}, {splat(_GROUP, 'i32', 16)}")
            value = x.op(f"trunc {kind} {value} to <{_GROUP} x i8>")
            x.store(f"<{_GROUP} x i8>", value, x.get("code_gains", "ptr"), x.add(x.mul(c, _CODES + 1), first))

    x.loop(0, cut, 1, scale)
    return x.function("define internal void @pick(ptr %f, i64 %query)")


def _query() -> str:
    """Search for one query, range by range of the documents."""
    x = PoolFrame()
    start, stop = x.item("q_offsets", "%query", "i64"), x.item("q_offsets", x.add("%query", 1), "i64")
    m, k = x.sub(stop, start), x.get("k")
    x.set("m", m)
    cut = x.minimum(x.minimum(m, x.get("cut")), _MOST)
    x.set("picked", cut)
    for name in ("hits", "least", "pooled", "high"):
        x.set(name, 0)
    for name in ("theta", "unit"):
        x.set(name, "0.0", "float")
    x.set("limit", 1)
    x.set("out_rows", x.place("rows", x.mul("%query", k), "i64"), "ptr")
    x.set("out_scores", x.place("scores", x.mul("%query", k), "float"), "ptr")
    margin = x.floats("fmul", x.real(x.add(m, 8)), constant(2**-22))
    x.set("margin", x.floats("fsub", constant(1), margin), "float")
    x.loop(0, TOP + 1, 1, lambda i, _: x.store("i64", "0", x.get("counts", "ptr"), x.mul(i, 8), 8))
    x.do("call void @pick(ptr %f, i64 %query)")
    picks, n = x.get("picks", "ptr"), x.get("n")
    first = x.add(k, x.maximum(x.op(f"lshr i64 {k}, 1"), _FIRST - 10))

    def range_(start: str, stop: str) -> None:
        def add(c: str, _: Values) -> None:
            place = x.at(picks, x.mul(c, _PICK))
            gains = x.at(x.get("code_gains", "ptr"), x.mul(c, _CODES + 1))
            some = x.cmp("slt", x.load("i64", place, 0, 8), x.load("i64", place, 8, 8))
            x.when(
                some,
                lambda: x.do(
                    f"call void @accumulate(ptr %f, ptr {place}, ptr {gains}, i64 {start}, i64 {stop})"
                ),
            )

        x.loop(0, cut, 1, add)
        x.do(f"call void @gather(ptr %f, i64 {start}, i64 {stop})")
        x.do("call void @lift(ptr %f, i64 0)")

    sample = x.minimum(n, _SAMPLE)  # so few that all of them may wait
    range_("0", sample)
    x.do(f"call void @settle(ptr %f, i64 {first})")
    x.loop(sample, n, TOTALS, lambda start, _: range_(start, x.minimum(x.add(start, TOTALS), n)))
    x.do(f"call void @settle(ptr %f, i64 {first})")
    x.do(f"call void @settle(ptr %f, i64 {x.get('scored')})")

    def nothing(i: str, _: Values) -> None:
        x.store("i64", "-1", x.get("out_rows", "ptr"), x.mul(i, 8), 8)
        x.store("float", constant(float("-inf")), x.get("out_scores", "ptr"), x.mul(i, 4), 4)

    x.loop(x.get("hits"), k, 1, nothing)

    def forget(j: str, _: Values) -> None:
        number = x.minimum(x.item("q_terms", j, "i32"), x.sub(x.get("dim"), 1))
        x.store("float", "0.0", x.place("table", number, "float"), align=4)

    x.loop(start, stop, 1, forget)
    return x.function("define internal void @query(ptr %f, i64 %query)")
