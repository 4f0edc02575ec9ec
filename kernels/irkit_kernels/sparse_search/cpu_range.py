"""LLVM IR for a range of documents: its lists, bounds of what is left, documents that are still possible."""

from __future__ import annotations

from .._jit import Values
from .cpu_frame import RANGE, STEP, Frame, constant

__all__ = ["DENSE_COST", "LINES", "SLOT", "write_range", "write_refine", "write_sift"]

SLOT = 16  # bytes of what a query keeps of a list
_MANY = 30000  # terms of a query that sums have room for
# in postings, whose time is the unit: between two looks at the sums; a score; a vector of so many documents
_CHECK, _SCORE, DENSE_COST = 4096, 300, 10
_GO, _FEW, _END = 0, 1, 2  # after a list: go on, few documents are possible, it was the last
_EARLY = 0.12  # of the bound left: time to score some documents
_AHEAD, LINES = 2, 12  # lists, and lines of the cache, fetched in advance


def write_sift() -> str:
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
    place = x.at(slots, x.mul(i, SLOT))
    count = x.op(f"sext i32 {x.load('i32', place, 8, 4)} to i64")
    return x.at(x.get("postings", "ptr"), x.load("i64", place, 0, 8)), count, x.cmp("slt", count, 0)


def _share(x: Frame, slots: str, i: str) -> tuple[str, str]:
    """What a code of the list of a slot adds to a sum, as a float32 and as 256ths, rounded up."""
    share = x.load("float", slots, x.add(x.mul(i, SLOT), 12), 4)
    share = x.floats("fmul", share, x.get("unit", "float"))
    return share, x.ceiling(x.floats("fmul", share, constant(256)))


def write_range() -> str:
    """Search a range: lists in order until what is left could only lift few documents high enough."""
    x = Frame()
    x.set("range", "%range")
    x.set("again", 0)
    documents = x.minimum(x.sub(x.get("n"), x.mul("%range", RANGE)), RANGE)
    length = x.op(f"and i64 {x.add(documents, STEP - 1)}, {-STEP}")
    x.set("length", length)
    sums = x.get("sums", "ptr")
    x.loop(0, x.mul(length, 2), 64, lambda i, _: x.store("<16 x i32>", "zeroinitializer", sums, i, 64))
    many = x.cmp("sgt", x.get("m"), _MANY)  # no sum could tell: score all documents
    x.when(many, lambda: x.loop(0, documents, 1, lambda i, _: x.store("i16", "1", sums, x.mul(i, 2), 2)))
    number = x.item("slot_counts", "%range", "i32")
    slots = x.at(x.get("slots", "ptr"), x.mul(x.mul("%range", x.get("m")), SLOT))
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
        bytes_ahead = x.minimum(x.mul(length_ahead, 3), 64 * LINES)
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
                x.set("again", 1)  # what is found now may have been found before
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


def write_refine() -> str:
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
