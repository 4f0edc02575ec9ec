"""The machine code of approximate search, in LLVM IR: the best postings of the heaviest terms choose documents.

The frame of exact search, longer by `FIELDS`; chosen documents are scored by its code.
"""

from __future__ import annotations

from .._jit import Values, splat
from . import cpu_exact
from .cpu_exact import _Frame as _ExactFrame
from .cpu_exact import _number, write_exact

__all__ = ["FIELDS", "write"]

_LANES, _GROUP = 64, 16  # totals looked at, postings added at once
_TOP = 255  # of a total
_STREAM = 512  # bytes of a list that are fetched ahead
_FIRST = 32  # documents scored before others are doubted
_TOTALS, _WORD = f"<{_LANES} x i8>", f"i{_LANES}"

FIELDS = (
    *cpu_exact.FIELDS,
    # the index, how much of it is read, scratch memory
    *("best_offsets", "best", "best_scales"),
    *("depth", "cut", "doubt", "scored"),
    *("totals", "values", "shares", "picks"),
    # variables
    *("limit", "wanted", "pick", "missing", "visited"),
)


def write(terms: str, weights: str) -> str:
    """The module of ``exact`` and ``approximate``, both ``(frame, first query, last query)``.

    Args:
        terms: LLVM type of the terms of a row, as for exact search.
        weights: Of its weights.
    """
    x = _Frame()
    x.loop("%first", "%last", 1, lambda i, _: x.do(f"call void @hasten(ptr %f, i64 {i})"))
    entry = x.function("define void @approximate(ptr %f, i64 %first, i64 %last)")
    declarations = "@always = internal constant i8 1\ndeclare float @llvm.maxnum.f32(float, float)\ndeclare i64 @llvm.cttz.i64(i64, i1)\ndeclare i64 @llvm.ctpop.i64(i64)"
    return "\n".join([write_exact(terms, weights), declarations, _accumulate(), _number_of(), _raise(), _choose(), _hasten(), entry])


class _Frame(_ExactFrame):
    def get(self, name: str, kind: str = "i64") -> str:
        return self.load(kind, "%f", 8 * FIELDS.index(name), 8)

    def set(self, name: str, value: str | int, kind: str = "i64") -> None:
        self.store(kind, str(value), "%f", 8 * FIELDS.index(name), 8)


def _accumulate() -> str:
    """Add ``factor * code / 65536``, rounded, to the totals of the rows of some postings."""
    x = _Frame()
    totals, postings = x.get("totals", "ptr"), x.get("best", "ptr")
    kind = f"<{_GROUP} x i32>"
    rows_room, room = x.op(f"alloca {kind}, align 64"), x.op(f"alloca {kind}, align 64")
    factors = x.broadcast(_GROUP, "i32", x.op("trunc i64 %factor to i32"))

    def group(i: str, _: Values) -> None:
        here = x.at(postings, x.mul(i, 4))
        x.prefetch(x.at(here, _STREAM))
        words = x.load(kind, here, align=4)
        value = x.op(f"and {kind} {words}, {splat(_GROUP, 'i32', 255)}")
        value = x.op(f"mul {kind} {value}, {factors}")
        value = x.op(f"add {kind} {value}, {splat(_GROUP, 'i32', 1 << 15)}")
        x.store(kind, value, room, align=64)
        x.store(kind, x.op(f"lshr {kind} {words}, {splat(_GROUP, 'i32', 8)}"), rows_room, align=64)
        for lane in range(_GROUP):
            place = x.at(totals, x.op(f"zext i32 {x.load('i32', rows_room, 4 * lane, 4)} to i64"))
            total = x.op(f"add i8 {x.load('i8', place)}, {x.load('i8', room, 4 * lane + 2)}")  # its third byte
            x.store("i8", total, place)

    def single(i: str, _: Values) -> None:
        word = x.op(f"zext i32 {x.load('i32', postings, x.mul(i, 4), 4)} to i64")
        value = x.add(x.mul(x.op(f"and i64 {word}, 255"), "%factor"), 1 << 15)
        place = x.at(totals, x.op(f"lshr i64 {word}, 8"))
        value = x.op(f"trunc i64 {x.op(f'lshr i64 {value}, 16')} to i8")
        x.store("i8", x.op(f"add i8 {x.load('i8', place)}, {value}"), place)

    full = x.add("%start", x.op(f"and i64 {x.sub('%stop', '%start')}, {-_GROUP}"))
    x.loop("%start", full, _GROUP, group)
    x.loop(full, "%stop", 1, single)
    return x.function("define internal void @accumulate(ptr %f, i64 %start, i64 %stop, i64 %factor)")


def _number_of() -> str:
    """How many of the chosen have a total of at least ``low``."""
    x = _Frame()
    values = x.get("values", "ptr")
    low = x.broadcast(_LANES, "i8", x.op("trunc i64 %low to i8"))

    def turn(i: str, state: Values) -> Values:
        mask = x.op(f"icmp uge {_TOTALS} {x.load(_TOTALS, values, i)}, {low}")
        word = x.op(f"bitcast <{_LANES} x i1> {mask} to {_WORD}")
        return (x.add(state[0], x.op(f"call i64 @llvm.ctpop.i64(i64 {word})")),)

    (count,) = x.loop(0, x.get("number"), _LANES, turn, ("0",), "i64")
    x.set("pick", count)
    return x.function("define internal void @number_of(ptr %f, i64 %low)")


def _raise() -> str:
    """Keep the ``wanted`` highest of the chosen, the first of equals; later ones must be higher."""
    x = _Frame()
    wanted, number = x.get("wanted"), x.get("number")
    values, chosen = x.get("values", "ptr"), x.get("chosen", "ptr")
    x.store(_TOTALS, "zeroinitializer", values, number)

    def count(low: str) -> str:
        x.do(f"call void @number_of(ptr %f, i64 {low})")
        return x.get("pick")

    low = x.get("limit")
    # the highest total that enough have: from the limit upwards, bit by bit
    for bit in reversed(range(8)):
        tried = x.add(low, 1 << bit)
        tried = x.select(x.cmp("sle", tried, _TOP), tried, low)
        low = x.select(x.cmp("sge", count(tried), wanted), tried, low)
    following = x.add(low, 1)
    above = x.select(x.cmp("sle", following, _TOP), count(x.minimum(following, _TOP)), 0)

    def one(i: str, state: Values) -> Values:
        kept, ties = state
        value = x.op(f"zext i8 {x.load('i8', values, i)} to i64")
        row = x.load("i32", chosen, x.mul(i, 4), 4)
        tie = x.both(x.cmp("eq", value, low), x.cmp("sgt", ties, 0))
        keep = x.op(f"zext i1 {x.either(x.cmp('sgt', value, low), tie)} to i64")
        x.store("i32", row, chosen, x.mul(kept, 4), 4)
        x.store("i8", x.op(f"trunc i64 {value} to i8"), values, kept)
        return x.add(kept, keep), x.sub(ties, x.op(f"zext i1 {tie} to i64"))

    kept, _ = x.loop(0, number, 1, one, ("0", x.sub(wanted, above)), "i64")
    x.set("number", kept)
    x.set("limit", following)
    return x.function("define internal void @raise(ptr %f)")


def _choose() -> str:
    """Choose the ``wanted`` documents of the highest totals of at least ``limit``, in order of their rows.

    With ``%clear`` all totals are set to 0, else those of the chosen.
    """
    x = _Frame()
    totals, keep, chosen = x.get("totals", "ptr"), x.get("keep", "ptr"), x.get("chosen", "ptr")
    values, full = x.get("values", "ptr"), x.mul(x.get("wanted"), 4)
    filtered = x.op(f"icmp ne ptr {keep}, null")
    x.set("number", 0)

    def turn(i: str, _: Values) -> None:
        here = x.at(totals, i)
        limit = x.broadcast(_LANES, "i8", x.op(f"trunc i64 {x.get('limit')} to i8"))
        found = x.load(_TOTALS, here, align=64)
        mask = x.op(f"bitcast <{_LANES} x i1> {x.op(f'icmp uge {_TOTALS} {found}, {limit}')} to {_WORD}")

        def some() -> None:
            def one(_: str, state: Values) -> Values:
                word, number = state
                row = x.add(i, x.op(f"call i64 @llvm.cttz.i64(i64 {word}, i1 true)"))
                byte = x.load("i8", x.op(f"select i1 {filtered}, ptr {x.at(keep, row)}, ptr @always"))
                x.store("i32", x.op(f"trunc i64 {row} to i32"), chosen, x.mul(number, 4), 4)
                x.store("i8", x.load("i8", totals, row), values, number)
                kept = x.op(f"zext i1 {x.op(f'icmp ne i8 {byte}, 0')} to i64")
                return x.op(f"and i64 {word}, {x.sub(word, 1)}"), x.add(number, kept)

            count = x.op(f"call i64 @llvm.ctpop.i64(i64 {mask})")
            _, number = x.loop(0, count, 1, one, (mask, x.get("number")), "i64")
            x.set("number", number)
            x.when(x.cmp("sge", number, full), lambda: x.do("call void @raise(ptr %f)"))

        x.when(x.op(f"icmp ne i64 {mask}, 0"), some)
        x.when("%clear", lambda: x.store(_TOTALS, "zeroinitializer", here, align=64))

    x.loop(0, x.get("n"), _LANES, turn)
    x.when(x.cmp("sgt", x.get("number"), x.get("wanted")), lambda: x.do("call void @raise(ptr %f)"))

    def forget(i: str, _: Values) -> None:
        row = x.op(f"zext i32 {x.load('i32', chosen, x.mul(i, 4), 4)} to i64")
        x.store("i8", "0", totals, row)

    x.when(x.flip("%clear"), lambda: x.loop(0, x.get("number"), 1, forget))
    return x.function("define internal void @choose(ptr %f, i1 %clear)")


def _hasten() -> str:
    """Search for one query: lists of its heaviest terms, then the scores of the documents these choose."""
    x = _Frame()
    start, stop = x.item("q_offsets", "%query", "i64"), x.item("q_offsets", x.add("%query", 1), "i64")
    m, k = x.sub(stop, start), x.get("k")
    cut = x.minimum(m, x.get("cut"))
    x.set("hits", 0)
    x.set("theta", "0.0", "float")
    x.set("unit", "0.0", "float")
    x.set("least", 0)
    x.set("out_rows", x.place("rows", x.mul("%query", k), "i64"), "ptr")
    x.set("out_scores", x.place("scores", x.mul("%query", k), "float"), "ptr")
    x.set("margin", x.floats("fsub", _number(1), x.floats("fmul", x.real(x.add(m, 8)), _number(2**-22))), "float")

    def term(j: str, _: Values) -> None:
        number, weight = x.item("q_terms", j, "i32"), x.item("q_weights", j, "float")
        x.store("float", weight, x.place("table", number, "float"), align=4)
        share = x.floats("fmul", weight, x.item("best_scales", number, "float"))
        x.store("float", share, x.place("shares", x.sub(j, start), "float"), align=4)

    x.loop(start, stop, 1, term)

    def pick(c: str, state: Values) -> Values:  # the next heaviest
        x.set("pick", 0)

        def higher(j: str, best: Values) -> Values:
            share = x.item("shares", j, "float")
            above = x.cmp("ogt", share, best[0], "float")
            x.set("pick", x.select(above, j, x.get("pick")))
            return (x.select(above, share, best[0], "float"),)

        (share,) = x.loop(0, m, 1, higher, (_number(-1),), "float")
        x.store("float", _number(-1), x.place("shares", x.get("pick"), "float"), align=4)
        place = x.place("picks", c, "i64")
        x.store("i32", x.op(f"trunc i64 {x.item('q_terms', x.add(start, x.get('pick')), 'i32')} to i32"), place)
        x.store("float", share, place, 4)
        return (x.floats("fadd", state[0], share),)

    (total,) = x.loop(0, cut, 1, pick, ("0.0",), "float")
    (left,) = x.loop(0, m, 1, lambda j, s: (x.floats("fadd", s[0], x.op(
        f"call float @llvm.maxnum.f32(float {x.item('shares', j, 'float')}, float 0.0)")),), ("0.0",), "float")
    x.set("missing", x.floats("fmul", left, _number(255)), "float")

    def search() -> None:
        room = x.floats("fdiv", x.real(x.sub(_TOP, x.op(f"lshr i64 {cut}, 1"))), x.floats("fmul", total, _number(255)))

        def add(c: str, _: Values) -> None:
            place = x.place("picks", c, "i64")
            number = x.op(f"zext i32 {x.load('i32', place)} to i64")
            follow = x.op(f"zext i32 {x.load('i32', x.place('picks', x.minimum(x.add(c, 1), x.sub(cut, 1)), 'i64'))} to i64")
            ahead = x.item("best_offsets", follow, "i64")
            for line in range(0, _STREAM, 64):
                x.prefetch(x.at(x.place("best", ahead, "i32"), line))
            factor = x.floats("fmul", x.floats("fmul", x.load("float", place, 4), room), _number(65536))
            factor = x.minimum(x.whole(factor), 65535)
            first = x.item("best_offsets", number, "i64")
            stop, cut_off = x.item("best_offsets", x.add(number, 1), "i64"), x.add(first, x.get("depth"))
            end = x.minimum(stop, cut_off)

            def deeper() -> None:  # the rest of the list may add this much
                next_ = x.floats("fmul", x.load("float", place, 4), x.real(x.op(f"and i64 {x.item('best', end, 'i32')}, 255")))
                x.set("missing", x.floats("fadd", x.get("missing", "float"), next_), "float")

            x.when(x.cmp("slt", end, stop), deeper)
            x.do(f"call void @accumulate(ptr %f, i64 {first}, i64 {end}, i64 {factor})")

        x.loop(0, cut, 1, add)
        x.set("limit", 1)
        x.set("wanted", x.maximum(x.mul(k, 2), _FIRST))
        x.do("call void @choose(ptr %f, i1 false)")
        x.do("call void @verify(ptr %f)")
        least = x.floats("fsub", x.get("theta", "float"), x.floats("fmul", x.get("missing", "float"), x.get("doubt", "float")))
        enough = x.cmp("eq", x.get("hits"), k)
        x.set("limit", x.select(enough, x.maximum(x.whole(x.floats("fmul", least, room)), 1), 1))
        x.set("wanted", x.get("scored"))
        x.do("call void @choose(ptr %f, i1 true)")
        x.do("call void @verify(ptr %f)")
        x.set("visited", x.add(x.get("visited"), x.get("number")))

    x.when(x.cmp("ogt", total, "0.0", "float"), search)

    def forget(j: str, _: Values) -> None:
        x.store("float", "0.0", x.place("table", x.item("q_terms", j, "i32"), "float"), align=4)

    x.loop(start, stop, 1, forget)
    return x.function("define internal void @hasten(ptr %f, i64 %query)")
