"""The machine code of exact search, in LLVM IR: bounds of all documents of a range, then scores of few.

A frame is a table of 64-bit words, `FIELDS`: addresses of arrays, sizes and variables. Functions get its
address.
"""

from __future__ import annotations

from .._jit import Values
from .cpu_frame import LANES, RANGE, STEP, SUMS, Frame, constant
from .cpu_scan import write_add, write_collect, write_count, write_scan
from .cpu_score import write_insert, write_pair, write_verify

__all__ = ["DENSE_COST", "write_exact"]

_RECORD, _SLOT = 20, 16  # bytes of a row of ``lists``, and of what a query keeps of it
_HIGHEST, _MANY = 65200, 30000  # what a sum may reach, terms of a query for which that is enough
# in postings, whose time is the unit: between two looks at the sums; a score; a vector of so many documents
_CHECK, _SCORE, DENSE_COST = 4096, 300, 10
_GO, _FEW, _END = 0, 1, 2  # after a list: go on, few documents are possible, it was the last
_LITTLE = 4096  # documents: fewer are not worth sorting the lists
_EARLY = 0.12  # of the bound left: time to score some documents
_AHEAD, _LINES = 2, 12  # lists, and lines of the cache, fetched in advance


def write_exact(terms: str, weights: str) -> str:
    """The module of ``exact(frame, first query, last query)``.

    Args:
        terms: LLVM type of the terms of a row, ``i16`` or ``i32``.
        weights: Of its weights, ``float``, ``half``, or ``i16`` or ``i8``, which a row's scale multiplies.
    """
    parts = [write_scan(), write_add(), write_count(), write_collect(), write_pair(terms, weights)]
    parts += [
        write_insert(),
        write_verify(terms, weights),
        _sift(),
        _range(),
        _refine(),
        _sort(),
        _gather(),
        _query(),
    ]
    x = Frame()
    x.loop("%first", "%last", 1, lambda i, _: x.do(f"call void @query(ptr %f, i64 {i})"))
    parts.append(x.function("define void @exact(ptr %f, i64 %first, i64 %last)"))
    declarations = [
        f"declare i16 @llvm.vector.reduce.add.v{LANES}i16({SUMS})",
        "declare float @llvm.fma.f32(float, float, float)",
        "declare i32 @llvm.cttz.i32(i32, i1)",
        "declare float @llvm.ceil.f32(float)",
        "declare void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
    ]
    return "\n".join(declarations + parts)


def _sift() -> str:
    """Score the documents of the range that may be among the best, those of the highest sums first.

    With ``%complete`` until no other can be, else only until k are found.
    """
    x = Frame()
    k = x.get("k")
    x.set("high", 65536)
    x.set("above", 0)
    x.set("want", x.add(x.sub(k, x.get("hits")), 1))

    def turn() -> str:
        high = x.get("high")
        x.set("low", x.maximum(x.sub(x.get("least"), x.rest()), 1))

        def look() -> None:  # for the highest sum that enough reach, by bisection
            wanted, surplus = x.add(x.get("above"), x.get("want")), x.get("want")
            x.set("low", 1)
            x.set("top", high)

            def halve() -> str:
                low, top = x.get("low"), x.get("top")
                middle = x.maximum(x.op(f"lshr i64 {x.add(low, top)}, 1"), 1)
                x.do(f"call void @count(ptr %f, i64 {middle})")
                reached = x.cmp("sge", x.get("number"), wanted)
                x.set("low", x.select(reached, middle, low))
                x.set("top", x.select(reached, top, middle))
                few = x.cmp("sle", x.get("number"), x.add(wanted, x.op(f"lshr i64 {surplus}, 2")))
                fine = x.both(reached, few)
                return x.both(x.cmp("sgt", x.sub(x.get("top"), x.get("low")), 1), x.flip(fine))

            x.repeat(halve)
            x.set("want", x.mul(surplus, 2))

        x.when(x.cmp("slt", x.get("hits"), k), look)
        low = x.get("low")
        some = x.cmp("slt", low, high)

        def work() -> None:
            x.do(f"call void @collect(ptr %f, i64 {low}, i64 {high})")
            x.do("call void @verify(ptr %f)")
            x.do(f"call void @count(ptr %f, i64 {low})")
            x.set("above", x.get("number"))
            x.set("high", low)

        x.when(some, work)
        enough = x.both(x.cmp("eq", x.get("hits"), k), x.flip("%complete"))
        return x.both(x.both(some, x.cmp("sgt", low, 1)), x.flip(enough))

    x.repeat(turn)
    return x.function("define internal void @sift(ptr %f, i1 %complete)")


def _slot(x: Frame, slots: str, i: str) -> tuple[str, str, str]:
    """The list of a slot, its number of postings, whether it is a vector."""
    place = x.at(slots, x.mul(i, _SLOT))
    count = x.op(f"sext i32 {x.load('i32', place, 8, 4)} to i64")
    return x.at(x.get("postings", "ptr"), x.load("i64", place, 0, 8)), count, x.cmp("slt", count, 0)


def _share(x: Frame, slots: str, i: str) -> tuple[str, str]:
    """What a code of the list of a slot adds to a sum, as a float32 and as 256ths, rounded up."""
    share = x.load("float", slots, x.add(x.mul(i, _SLOT), 12), 4)
    share = x.floats("fmul", share, x.get("unit", "float"))
    return share, x.ceiling(x.floats("fmul", share, constant(256)))


def _range() -> str:
    """Search a range: lists in order until what is left could only lift few documents high enough."""
    x = Frame()
    x.set("range", "%range")
    documents = x.minimum(x.sub(x.get("n"), x.mul("%range", RANGE)), RANGE)
    length = x.op(f"and i64 {x.add(documents, STEP - 1)}, {-STEP}")
    x.set("length", length)
    sums = x.get("sums", "ptr")
    x.loop(0, x.mul(length, 2), 64, lambda i, _: x.store("<16 x i32>", "zeroinitializer", sums, i, 64))
    many = x.cmp("sgt", x.get("m"), _MANY)  # no sum could tell: score all documents
    x.when(many, lambda: x.loop(0, documents, 1, lambda i, _: x.store("i16", "1", sums, x.mul(i, 2), 2)))
    number = x.item("slot_counts", "%range", "i32")
    slots = x.at(x.get("slots", "ptr"), x.mul(x.mul("%range", x.get("m")), _SLOT))
    full = x.floats("fmul", x.item("bounds", "%range", "float"), x.get("unit", "float"))
    x.set("rest", full, "float")
    x.set("since", 0)
    dense_cost = x.op(f"udiv i64 {length}, {DENSE_COST}")

    def cost(i: str, total: Values) -> Values:
        _, count, dense = _slot(x, slots, i)
        return (x.add(total[0], x.select(dense, dense_cost, count)),)

    (left,) = x.loop(0, number, 1, cost, ("0",), "i64")
    x.set("left", left)
    at, state, early = (x.op(f"alloca {kind}, align 8") for kind in ("i64", "i64", "float"))
    x.store("i64", "0", at, align=8)
    x.store("float", x.floats("fmul", full, constant(_EARLY)), early, align=4)

    def step() -> str:
        i = x.load("i64", at, align=8)
        ahead, length_ahead, _ = _slot(x, slots, x.minimum(x.add(i, _AHEAD), x.sub(number, 1)))
        bytes_ahead = x.minimum(x.mul(length_ahead, 3), 64 * _LINES)
        x.loop(0, bytes_ahead, 64, lambda b, _: x.prefetch(x.at(ahead, b)))
        share, factor = _share(x, slots, i)
        own, count, dense = _slot(x, slots, i)
        x.when(dense, lambda: x.do(f"call void @add(ptr %f, ptr {own}, i64 {factor})"))
        x.when(x.flip(dense), lambda: x.do(f"call void @scan(ptr %f, ptr {own}, i64 {count}, i64 {factor})"))
        spent = x.select(dense, dense_cost, count)
        rest = x.floats("fsub", x.get("rest", "float"), x.floats("fmul", share, constant(255)))
        x.set("rest", rest, "float")
        x.set("left", x.sub(x.get("left"), spent))
        x.set("since", x.add(x.get("since"), spent))
        following = x.add(i, 1)
        x.store("i64", following, at, align=8)
        x.store("i64", x.select(x.cmp("slt", following, number), _GO, _END), state, align=8)

        def look() -> None:
            missing = x.cmp("slt", x.get("hits"), x.get("k"))
            ready = x.both(missing, x.cmp("ole", rest, x.load("float", early, align=4), "float"))

            def begin() -> None:
                x.do("call void @sift(ptr %f, i1 false)")
                x.store("float", constant(-1), early, align=4)  # once a range

            x.when(ready, begin)
            low = x.sub(x.get("least"), x.rest())
            possible = x.both(x.cmp("eq", x.get("hits"), x.get("k")), x.cmp("sgt", low, 0))

            def compare() -> None:
                x.set("since", 0)
                x.do(f"call void @count(ptr %f, i64 {low})")
                cheap = x.cmp("sle", x.mul(x.get("number"), _SCORE), x.get("left"))
                x.store("i64", x.select(cheap, _FEW, _GO), state, align=8)

            x.when(possible, compare)

        due = x.both(x.cmp("sge", x.get("since"), _CHECK), x.cmp("slt", following, number))
        x.when(due, look)
        return x.cmp("eq", x.load("i64", state, align=8), _GO)

    x.store("i64", str(_END), state, align=8)
    x.when(x.flip(many), lambda: x.repeat(step))
    few = x.cmp("eq", x.load("i64", state, align=8), _FEW)

    def finish() -> None:
        x.do(f"call void @collect(ptr %f, i64 {x.sub(x.get('least'), x.rest())}, i64 65536)")
        x.do(f"call void @refine(ptr %f, ptr {slots}, i64 {x.load('i64', at, align=8)}, i64 {number})")
        x.do("call void @verify(ptr %f)")

    x.when(few, finish)
    x.when(x.flip(few), lambda: x.do("call void @sift(ptr %f, i1 true)"))
    return x.function("define internal void @range(ptr %f, i64 %range)")


def _refine() -> str:
    """Look the chosen documents up in the vectors that are left, and keep those that are still possible."""
    x = Frame()
    chosen, number, sums = x.get("chosen", "ptr"), x.get("number"), x.get("sums", "ptr")
    first = x.mul(x.get("range"), RANGE)

    def sum_of(c: str) -> tuple[str, str]:
        document = x.op(f"zext i32 {x.load('i32', chosen, x.mul(c, 4), 4)} to i64")
        local = x.sub(document, first)
        return local, x.at(sums, x.mul(local, 2))

    def look_up(i: str, _: Values) -> None:
        codes, _count, dense = _slot(x, "%slots", i)

        def vector() -> None:
            share, factor = _share(x, "%slots", i)

            def one(c: str, _: Values) -> None:
                local, place = sum_of(c)
                code = x.op(f"zext i8 {x.load('i8', codes, local)} to i64")
                there = x.op(f"zext i1 {x.cmp('ne', code, 0)} to i64")
                value = x.add(x.op(f"lshr i64 {x.mul(code, factor)}, 8"), there)
                value = x.op(f"trunc i64 {value} to i16")
                x.store("i16", x.op(f"add i16 {x.load('i16', place, align=2)}, {value}"), place, align=2)

            x.loop(0, number, 1, one)
            left = x.floats("fsub", x.get("rest", "float"), x.floats("fmul", share, constant(255)))
            x.set("rest", left, "float")

        x.when(dense, vector)

    x.loop("%start", "%stop", 1, look_up)
    low = x.sub(x.get("least"), x.rest())

    def keep(c: str, state: Values) -> Values:
        local, place = sum_of(c)
        possible = x.cmp("sge", x.op(f"zext i16 {x.load('i16', place, align=2)} to i64"), low)
        document = x.op(f"trunc i64 {x.add(first, local)} to i32")
        x.store("i32", document, chosen, x.mul(state[0], 4), 4)
        return (x.add(state[0], x.op(f"zext i1 {possible} to i64")),)

    (kept,) = x.loop(0, number, 1, keep, ("0",), "i64")
    x.set("number", kept)
    return x.function("define internal void @refine(ptr %f, ptr %slots, i64 %start, i64 %stop)")


def _sort() -> str:
    """Copy the known terms of a query, those first that bring most for what they cost."""
    own = {"own_terms": "i32", "own_weights": "float", "own_gains": "float"}
    x = Frame("q_terms", "q_weights", "gains", "table", "list_offsets", *own)
    start, stop = x.item("q_offsets", "%query", "i64"), x.item("q_offsets", x.add("%query", 1), "i64")
    dim, at = x.get("dim"), x.op("alloca i64, align 8")
    little = x.cmp("slt", x.get("n"), _LITTLE)

    def term(j: str, state: Values) -> Values:
        number, weight = x.item("q_terms", j, "i32"), x.item("q_weights", j, "float")
        known = x.cmp("slt", number, dim)

        def insert() -> None:
            x.prefetch(x.place("table", number, "float"))
            x.prefetch(x.place("list_offsets", number, "i64"))
            gain = x.floats("fmul", weight, x.item("gains", number, "float"))
            gain = x.select(little, constant(0), gain, "float")
            x.store("i64", state[0], at, align=8)

            def move() -> str:
                here = x.load("i64", at, align=8)
                before = x.maximum(x.sub(here, 1), 0)
                less = x.cmp("olt", x.item("own_gains", before, "float"), gain, "float")
                ahead = x.both(x.cmp("sgt", here, 0), less)

                def shift() -> None:
                    for name, kind in own.items():
                        value = x.load(kind, x.place(name, before, kind), align=4)
                        x.store(kind, value, x.place(name, here, kind), align=4)
                    x.store("i64", before, at, align=8)

                x.when(ahead, shift)
                return ahead

            x.repeat(move)
            here = x.load("i64", at, align=8)
            values = (x.op(f"trunc i64 {number} to i32"), weight, gain)
            for (name, kind), value in zip(own.items(), values, strict=True):
                x.store(kind, value, x.place(name, here, kind), align=4)

        x.when(known, insert)
        return (x.add(state[0], x.op(f"zext i1 {known} to i64")),)

    (number,) = x.loop(start, stop, 1, term, ("0",), "i64")
    x.set("m", number)
    return x.function("define internal void @sort(ptr %f, i64 %query)")


def _gather() -> str:
    """The lists of a query by range, and the bounds of the ranges; its weights into the table of terms."""
    x = Frame("own_terms", "own_weights", "table", "list_offsets", "lists")
    m, n_ranges = x.get("m"), x.get("n_ranges")
    bounds, counts, slots = (x.get(name, "ptr") for name in ("bounds", "slot_counts", "slots"))

    def clear(i: str, _: Values) -> None:
        x.store("i32", "0", bounds, x.mul(i, 4), 4)
        x.store("i32", "0", counts, x.mul(i, 4), 4)

    x.loop(0, n_ranges, 1, clear)

    def approach(j: str, _: Values) -> None:
        first = x.item("list_offsets", x.item("own_terms", j, "i32"), "i64")
        record = x.place("lists", x.mul(first, _RECORD), "i8")
        for line in range(_LINES):
            x.prefetch(x.at(record, 64 * line))

    x.loop(0, m, 1, approach)

    def term(j: str, _: Values) -> None:
        number, weight = x.item("own_terms", j, "i32"), x.item("own_weights", j, "float")
        x.store("float", weight, x.place("table", number, "float"), align=4)

        def entry(e: str, _: Values) -> None:
            record = x.place("lists", x.mul(e, _RECORD), "i8")
            this = x.op(f"zext i32 {x.load('i32', record, 8, 4)} to i64")
            share = x.floats("fmul", weight, x.load("float", record, 16, 4))
            place = x.at(counts, x.mul(this, 4))
            count = x.load("i32", place, align=4)
            slot = x.at(slots, x.mul(x.add(x.mul(this, m), x.op(f"zext i32 {count} to i64")), _SLOT))
            x.store("i64", x.load("i64", record, 0, 4), slot, align=8)
            x.store("i32", x.load("i32", record, 12, 4), slot, 8, 4)
            x.store("float", share, slot, 12, 4)
            x.store("i32", x.op(f"add i32 {count}, 1"), place, align=4)
            place = x.at(bounds, x.mul(this, 4))
            bound = x.floats("fadd", x.load("float", place, align=4), x.floats("fmul", share, constant(255)))
            x.store("float", bound, place, align=4)

        start, stop = (x.item("list_offsets", x.add(number, i), "i64") for i in range(2))
        x.loop(start, stop, 1, entry)

    x.loop(0, m, 1, term)
    return x.function("define internal void @gather(ptr %f)")


def _query() -> str:
    """Search for a query, in the range of the highest bound first."""
    x = Frame("own_terms", "table")
    x.do("call void @sort(ptr %f, i64 %query)")
    m, k, n_ranges = x.get("m"), x.get("k"), x.get("n_ranges")
    x.set("hits", 0)
    x.set("theta", "0.0", "float")
    x.set("least", 0)
    rows, scores = x.place("rows", x.mul("%query", k), "i64"), x.place("scores", x.mul("%query", k), "float")
    x.set("out_rows", rows, "ptr")
    x.set("out_scores", scores, "ptr")

    def nothing(i: str, _: Values) -> None:
        x.store("i64", "-1", rows, x.mul(i, 8), 8)
        x.store("float", constant(float("-inf")), scores, x.mul(i, 4), 4)

    x.loop(0, k, 1, nothing)
    x.do("call void @gather(ptr %f)")
    bounds = x.get("bounds", "ptr")
    best = x.op("alloca i64, align 8")
    x.store("i64", "0", best, align=8)

    def higher(i: str, state: Values) -> Values:
        value = x.load("float", bounds, x.mul(i, 4), 4)
        above = x.cmp("ogt", value, state[0], "float")
        x.when(above, lambda: x.store("i64", i, best, align=8))
        return (x.select(above, value, state[0], "float"),)

    (highest,) = x.loop(0, n_ranges, 1, higher, ("0.0",), "float")

    def search() -> None:
        # a list adds 2 more by rounding; a factor has 16 bits, too
        room = x.real(x.maximum(x.sub(_HIGHEST, x.mul(m, 2)), 1))
        x.set("unit", x.floats("fdiv", room, highest), "float")
        error = x.floats("fmul", x.real(x.add(m, 8)), constant(2**-22))  # of sums in float32, at most
        x.set("margin", x.floats("fsub", constant(1), error), "float")
        first = x.load("i64", best, align=8)

        def visit(i: str, _: Values) -> None:
            before = x.select(x.cmp("sle", i, first), x.sub(i, 1), i)
            this = x.select(x.cmp("eq", i, 0), first, before)
            bound = x.floats("fmul", x.load("float", bounds, x.mul(this, 4), 4), x.get("unit", "float"))
            hope = x.cmp("sge", x.ceiling(bound), x.get("least"))
            lists_there = x.cmp("sgt", x.item("slot_counts", this, "i32"), 0)
            x.when(x.both(hope, lists_there), lambda: x.do(f"call void @range(ptr %f, i64 {this})"))

        x.loop(0, n_ranges, 1, visit)

    x.when(x.cmp("ogt", highest, "0.0", "float"), search)

    def forget(j: str, _: Values) -> None:
        x.store("float", "0.0", x.place("table", x.item("own_terms", j, "i32"), "float"), align=4)

    x.loop(0, m, 1, forget)
    return x.function("define internal void @query(ptr %f, i64 %query)")
