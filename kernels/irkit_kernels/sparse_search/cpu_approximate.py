"""The machine code of approximate search, in LLVM IR: the best postings of some terms choose documents.

It uses the frame of exact search, which `FIELDS` makes longer, and scores documents by its code.
"""

from __future__ import annotations

from collections.abc import Callable

from .._jit import Values, array, splat
from . import cpu_frame
from .cpu_frame import constant, size_of
from .cpu_score import row_scaled, write_insert, write_score

__all__ = ["FIELDS", "TOTALS", "write_approximate"]

TOTALS = 1 << 15  # documents of a range: their totals, of a byte each, stay in the first cache
_LANES, _GROUP = 64, 8  # totals looked at, postings added at once
_TOTALS, _TOP = f"<{_LANES} x i8>", 255
_CODES = 255
_SAMPLE = 4096  # documents that are the first range
_FIRST = 16  # documents scored to see what others must reach
_MOST = 64  # lists that are read at most: what each adds is rounded up to a whole of ``_TOP``
_STREAM = 1024  # bytes of a list that are fetched ahead
_FETCHED = 8  # documents that are fetched ahead
_ELEMENTS, _FLOATS = 16, "<16 x float>"  # of a document, multiplied at once
_PICK = 24  # bytes: place in a list, its end and share that is read

FIELDS = (
    *cpu_frame.FIELDS,
    # the index, how much of it is read, scratch memory
    *("best_offsets", "best", "best_scales", "best_missed"),
    *("cut", "scored", "doubt"),
    *("totals", "pool", "pool_totals", "shares", "picks", "code_gains"),
    # variables
    *("missing", "picked", "limit", "pooled", "crowd", "count", "reached", "room", "visited"),
)


def write_approximate(terms: str, weights: str) -> str:
    """The module of ``approximate(frame, first query, last query)``.

    Args:
        terms: LLVM type of the terms of a row, as for exact search.
        weights: Of its weights.
    """
    x = _Frame()
    x.loop("%first", "%last", 1, lambda i, _: x.do(f"call void @search(ptr %f, i64 {i})"))
    main = x.function("define void @approximate(ptr %f, i64 %first, i64 %last)")
    declarations = [
        "@always = internal constant i8 1",
        "declare float @llvm.fma.f32(float, float, float)",
        "declare void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
        "declare float @llvm.maxnum.f32(float, float)",
        "declare i64 @llvm.cttz.i64(i64, i1)",
        "declare i64 @llvm.ctpop.i64(i64)",
        f"declare {_FLOATS} @llvm.fma.v{_ELEMENTS}f32({_FLOATS}, {_FLOATS}, {_FLOATS})",
        f"declare float @llvm.vector.reduce.fadd.v{_ELEMENTS}f32(float, {_FLOATS})",
        f"declare {_FLOATS} @llvm.masked.gather.v{_ELEMENTS}f32.v{_ELEMENTS}p0(<{_ELEMENTS} x ptr>, i32, "
        f"<{_ELEMENTS} x i1>, {_FLOATS})",
        *(
            f"declare <{_ELEMENTS} x {kind}> @llvm.masked.load.{_suffix(kind)}.p0(ptr, i32, "
            f"<{_ELEMENTS} x i1>, <{_ELEMENTS} x {kind}>)"
            for kind in dict.fromkeys((terms, weights))
        ),
    ]
    parts = [
        write_score(terms, weights),
        write_insert(),
        _accumulate(),
        _collect(),
        _number_of(),
        _reach(),
        _part(),
        _trim(),
        _near(terms, weights),
        _examine(terms, weights),
        _settle(),
        _pick(),
        _search(),
        main,
    ]
    return "\n".join([*declarations, *parts])


class _Frame(cpu_frame.Frame):
    def get(self, name: str, kind: str = "i64") -> str:
        return self.load(kind, "%f", 8 * FIELDS.index(name), 8)

    def set(self, name: str, value: str | int, kind: str = "i64") -> None:
        self.store(kind, str(value), "%f", 8 * FIELDS.index(name), 8)

    def advance(self, start: str, step: int, go: Callable[[str], str], body: Callable[[str], None]) -> str:
        """``i = start; while go(i): body(i); i += step``; returns the last ``i``."""
        before, head, inside, after = self._block, self._name(), self._name(), self._name()
        index, follow = f"%{self._name()}", f"%{self._name()}"
        self.do(f"br label %{head}")
        self._begin(head)
        phi = len(self.lines)
        self.do(f"br i1 {go(index)}, label %{inside}, label %{after}")
        self._begin(inside)
        body(index)
        self.do(f"{follow} = add nsw i64 {index}, {step}")
        self.do(f"br label %{head}")
        self.lines.insert(phi, f"  {index} = phi i64 [{start}, %{before}], [{follow}, %{self._block}]")
        self._begin(after)
        return index


def _accumulate() -> str:
    """Add what postings bring to the totals of their documents, up to row ``%stop`` of a list."""
    x = _Frame()
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


def _collect() -> str:
    """Put the documents of a range whose totals reach the limit into the pool, and set all totals to 0."""
    x = _Frame()
    totals, keep = x.get("totals", "ptr"), x.get("keep", "ptr")
    pool, values = x.get("pool", "ptr"), x.get("pool_totals", "ptr")
    filtered = x.op(f"icmp ne ptr {keep}, null")
    limit = x.broadcast(_LANES, "i8", x.op(f"trunc i64 {x.get('limit')} to i8"))

    def turn(i: str, _: Values) -> None:
        here = x.at(totals, i)
        found = x.load(_TOTALS, here, align=64)
        word = x.op(f"bitcast <{_LANES} x i1> {x.op(f'icmp uge {_TOTALS} {found}, {limit}')} to i64")

        def some() -> None:
            def one(_: str, state: Values) -> Values:
                left, pooled = state
                lane = x.op(f"call i64 @llvm.cttz.i64(i64 {left}, i1 true)")
                row = x.add(x.add("%start", i), lane)
                byte = x.load("i8", x.op(f"select i1 {filtered}, ptr {x.at(keep, row)}, ptr @always"))
                x.store("i32", x.op(f"trunc i64 {row} to i32"), pool, x.mul(pooled, 4), 4)
                x.store("i8", x.load("i8", here, lane), values, pooled)
                kept = x.op(f"zext i1 {x.op(f'icmp ne i8 {byte}, 0')} to i64")
                return x.op(f"and i64 {left}, {x.sub(left, 1)}"), x.add(pooled, kept)

            count = x.op(f"call i64 @llvm.ctpop.i64(i64 {word})")
            _, pooled = x.loop(0, count, 1, one, (word, x.get("pooled")), "i64")
            x.set("pooled", pooled)

        x.when(x.cmp("ne", word, 0), some)
        x.store(_TOTALS, "zeroinitializer", here, align=64)

    x.loop(0, x.sub("%stop", "%start"), _LANES, turn)
    return x.function("define internal void @gather(ptr %f, i64 %start, i64 %stop)")


def _number_of() -> str:
    """How many documents of the pool have a total of at least ``low``."""
    x = _Frame()
    values = x.get("pool_totals", "ptr")
    low = x.broadcast(_LANES, "i8", x.op("trunc i64 %low to i8"))

    def turn(i: str, state: Values) -> Values:
        mask = x.op(f"icmp uge {_TOTALS} {x.load(_TOTALS, values, i)}, {low}")
        word = x.op(f"bitcast <{_LANES} x i1> {mask} to i64")
        return (x.add(state[0], x.op(f"call i64 @llvm.ctpop.i64(i64 {word})")),)

    (count,) = x.loop(0, x.get("pooled"), _LANES, turn, ("0",), "i64")
    x.set("count", count)
    return x.function("define internal void @number_of(ptr %f, i64 %low)")


def _reach() -> str:
    """Find the highest total, from the limit on, that ``%wanted`` documents of the pool have."""
    x = _Frame()
    x.store(_TOTALS, "zeroinitializer", x.get("pool_totals", "ptr"), x.get("pooled"))
    low = x.get("limit")
    for bit in reversed(range(8)):
        tried = x.add(low, 1 << bit)
        x.do(f"call void @number_of(ptr %f, i64 {x.minimum(tried, _TOP)})")
        fits = x.both(x.cmp("sle", tried, _TOP), x.cmp("sge", x.get("count"), "%wanted"))
        low = x.select(fits, tried, low)
    x.do(f"call void @number_of(ptr %f, i64 {x.minimum(x.add(low, 1), _TOP)})")
    x.set("reached", low)
    return x.function("define internal void @reach(ptr %f, i64 %wanted)")


def _part() -> str:
    """Choose the ``%wanted`` documents of the highest totals from the pool, the first of equals.

    Of the others those that reach the limit stay in it.
    """
    x = _Frame()
    pool, values, chosen = x.get("pool", "ptr"), x.get("pool_totals", "ptr"), x.get("chosen", "ptr")
    x.do("call void @reach(ptr %f, i64 %wanted)")
    pooled, limit, low = x.get("pooled"), x.get("limit"), x.get("reached")
    above = x.select(x.cmp("slt", low, _TOP), x.get("count"), 0)

    def one(i: str, state: Values) -> Values:
        number, rest, ties = state
        value = x.op(f"zext i8 {x.load('i8', values, i)} to i64")
        row = x.load("i32", pool, x.mul(i, 4), 4)
        tie = x.both(x.cmp("eq", value, low), x.cmp("sgt", ties, 0))
        pick = x.either(x.cmp("sgt", value, low), tie)
        stay = x.both(x.flip(pick), x.cmp("sge", value, limit))
        x.store("i32", row, chosen, x.mul(number, 4), 4)
        x.store("i32", row, pool, x.mul(rest, 4), 4)
        x.store("i8", x.op(f"trunc i64 {value} to i8"), values, rest)
        more, left, used = (x.op(f"zext i1 {test} to i64") for test in (pick, stay, tie))
        return x.add(number, more), x.add(rest, left), x.sub(ties, used)

    number, rest, _ = x.loop(0, pooled, 1, one, ("0", "0", x.sub("%wanted", above)), "i64")
    x.set("number", number)
    x.set("pooled", rest)
    return x.function("define internal void @part(ptr %f, i64 %wanted)")


def _trim() -> str:
    """Keep about as many documents in the pool as may be scored."""
    x = _Frame()
    x.do(f"call void @reach(ptr %f, i64 {x.get('scored')})")
    x.set("limit", x.get("reached"))
    x.do("call void @part(ptr %f, i64 0)")
    x.set("crowd", x.add(x.get("pooled"), x.get("scored")))
    return x.function("define internal void @trim(ptr %f)")


def _near(terms: str, weights: str) -> str:
    """About the score of a document, 16 elements at once: not rounded as defined."""
    x = _Frame("table", "terms", "weights")
    start, stop = x.item("offsets", "%document", "i64"), x.item("offsets", x.add("%document", 1), "i64")
    lanes = array(_ELEMENTS, "i64", range(_ELEMENTS))

    def some(i: str, state: Values) -> Values:
        left = x.broadcast(_ELEMENTS, "i64", x.sub(stop, i))
        mask = x.op(f"icmp slt <{_ELEMENTS} x i64> {lanes}, {left}")

        def read(name: str, kind: str) -> str:
            vector = f"<{_ELEMENTS} x {kind}>"
            return x.op(
                f"call {vector} @llvm.masked.load.{_suffix(kind)}.p0(ptr {x.place(name, i, kind)}, i32 1, "
                f"<{_ELEMENTS} x i1> {mask}, {vector} zeroinitializer)"
            )

        places = read("terms", terms)
        if terms == "i16":
            places = x.op(f"zext <{_ELEMENTS} x i16> {places} to <{_ELEMENTS} x i32>")
        places = x.op(f"getelementptr float, ptr {x.get('table', 'ptr')}, <{_ELEMENTS} x i32> {places}")
        looked = x.op(
            f"call {_FLOATS} @llvm.masked.gather.v{_ELEMENTS}f32.v{_ELEMENTS}p0("
            f"<{_ELEMENTS} x ptr> {places}, i32 4, <{_ELEMENTS} x i1> {mask}, {_FLOATS} zeroinitializer)"
        )
        values = read("weights", weights)
        if weights != "float":
            action = "fpext" if weights == "half" else "uitofp"
            values = x.op(f"{action} <{_ELEMENTS} x {weights}> {values} to {_FLOATS}")
        fma = f"@llvm.fma.v{_ELEMENTS}f32({_FLOATS} {values}, {_FLOATS} {looked}, {_FLOATS} {state[0]})"
        return (x.op(f"call {_FLOATS} {fma}"),)

    (sums,) = x.loop(start, stop, _ELEMENTS, some, ("zeroinitializer",), _FLOATS)
    score = x.op(f"call reassoc float @llvm.vector.reduce.fadd.v{_ELEMENTS}f32(float 0.0, {_FLOATS} {sums})")
    x.store("float", row_scaled(x, weights, score), "%out", align=4)
    return x.function("define internal void @near(ptr %f, i64 %document, ptr %out)")


def _suffix(kind: str) -> str:
    return f"v{_ELEMENTS}{ {'float': 'f32', 'half': 'f16'}.get(kind, kind) }"


def _examine(terms: str, weights: str) -> str:
    """Score the chosen documents; those that seem good enough as exact search does."""
    x = _Frame("offsets", "terms", "weights")
    chosen, number = x.get("chosen", "ptr"), x.get("number")
    out = x.op("alloca float, align 4")

    def document(at: str) -> str:
        return x.op(f"zext i32 {x.load('i32', chosen, x.mul(at, 4), 4)} to i64")

    def fetch(i: str) -> None:
        ahead = document(i)
        start, stop = x.item("offsets", ahead, "i64"), x.item("offsets", x.add(ahead, 1), "i64")
        for name, kind in (("terms", terms), ("weights", weights)):
            x.loop(
                start, stop, 64 // size_of(kind), lambda p, _, n=name, k=kind: x.prefetch(x.place(n, p, k))
            )
            x.prefetch(x.place(name, x.maximum(x.sub(stop, 1), start), kind))

    x.loop(0, number, 1, lambda i, _: x.prefetch(x.place("offsets", document(i), "i64")))
    x.loop(0, x.minimum(number, _FETCHED), 1, lambda i, _: fetch(i))

    def one(i: str, _: Values) -> None:
        following = x.add(i, _FETCHED)
        x.when(x.cmp("slt", following, number), lambda: fetch(following))
        this = document(i)
        x.do(f"call void @near(ptr %f, i64 {this}, ptr {out})")
        theta = x.get("theta", "float")
        enough = x.floats("fmul", theta, x.get("margin", "float"))

        def exact() -> None:
            x.do(f"call void @score(ptr %f, i64 {this}, ptr {out})")
            score = x.load("float", out, align=4)
            good = x.both(x.cmp("oge", score, theta, "float"), x.cmp("ogt", score, "0.0", "float"))
            x.when(good, lambda: x.do(f"call void @insert(ptr %f, i64 {this}, float {score})"))

        x.when(x.cmp("oge", x.load("float", out, align=4), enough, "float"), exact)

    x.loop(0, number, 1, one)
    return x.function("define internal void @examine(ptr %f)")


def _settle() -> str:
    """Score the ``%wanted`` most promising documents, and say what total others must reach."""
    x = _Frame()
    x.do("call void @part(ptr %f, i64 %wanted)")
    x.do("call void @examine(ptr %f)")
    x.set("visited", x.add(x.get("visited"), x.get("number")))
    doubted = x.floats("fmul", x.get("missing", "float"), x.get("doubt", "float"))
    least = x.floats("fmul", x.floats("fsub", x.get("theta", "float"), doubted), x.get("room", "float"))
    least = x.minimum(x.maximum(x.whole(least), 1), _TOP)
    x.set("limit", x.maximum(x.get("limit"), x.select(x.cmp("eq", x.get("hits"), x.get("k")), least, 1)))
    return x.function("define internal void @settle(ptr %f, i64 %wanted)")


def _pick() -> str:
    """Find the lists of the terms that may add most; what all others may add is missing."""
    x = _Frame()
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
    # the sum of all that is added to a total, each rounded up, must fit into it
    highest = x.floats("fmul", picked, constant(_CODES))
    highest = x.op(f"call float @llvm.maxnum.f32(float {highest}, float {constant(1e-30)})")
    x.set("room", x.floats("fdiv", x.real(x.sub(_TOP, cut)), highest), "float")
    kind = f"<{_GROUP} x i32>"

    def scale(c: str, _: Values) -> None:
        place = x.at(picks, x.mul(c, _PICK))
        factor = x.floats("fmul", x.load("float", place, 16, 4), x.get("room", "float"))
        factor = x.minimum(x.whole(x.floats("fmul", factor, constant(65536))), 65535)
        factor = x.broadcast(_GROUP, "i32", x.op(f"trunc i64 {factor} to i32"))
        for first in range(0, _CODES + 1, _GROUP):  # what each code brings, rounded up
            value = x.op(f"mul {kind} {array(_GROUP, 'i32', range(first, first + _GROUP))}, {factor}")
            value = x.op(f"add {kind} {value}, {splat(_GROUP, 'i32', (1 << 16) - 1)}")
            value = x.op(f"lshr {kind} {value}, {splat(_GROUP, 'i32', 16)}")
            value = x.op(f"trunc {kind} {value} to <{_GROUP} x i8>")
            x.store(f"<{_GROUP} x i8>", value, x.get("code_gains", "ptr"), x.add(x.mul(c, _CODES + 1), first))

    x.loop(0, cut, 1, scale)
    return x.function("define internal void @pick(ptr %f, i64 %query)")


def _search() -> str:
    """Search for one query, range by range of the documents."""
    x = _Frame()
    start, stop = x.item("q_offsets", "%query", "i64"), x.item("q_offsets", x.add("%query", 1), "i64")
    m, k = x.sub(stop, start), x.get("k")
    x.set("m", m)
    cut = x.minimum(x.minimum(m, x.get("cut")), _MOST)
    x.set("picked", cut)
    for name in ("hits", "least", "pooled"):
        x.set(name, 0)
    x.set("crowd", x.mul(x.get("scored"), 2))
    for name in ("theta", "unit"):
        x.set(name, "0.0", "float")
    x.set("limit", 1)
    x.set("out_rows", x.place("rows", x.mul("%query", k), "i64"), "ptr")
    x.set("out_scores", x.place("scores", x.mul("%query", k), "float"), "ptr")
    margin = x.floats("fmul", x.real(x.add(m, 8)), constant(2**-22))
    x.set("margin", x.floats("fsub", constant(1), margin), "float")
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
        crowded = x.cmp("sgt", x.get("pooled"), x.get("crowd"))
        x.when(crowded, lambda: x.do("call void @trim(ptr %f)"))

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
    return x.function("define internal void @search(ptr %f, i64 %query)")
