"""The machine code of exact search, in LLVM IR: bounds of all documents of a range, then scores of few.

A frame is a table of 64-bit words, `FIELDS`: addresses of arrays, sizes and variables. Functions get its
address.
"""

from __future__ import annotations

from functools import partial

from .._jit import Values
from .cpu_frame import LANES, SUMS, Frame, constant, size_of
from .cpu_heap import write_heap
from .cpu_range import LINES, SLOT, write_range, write_refine, write_sift
from .cpu_scan import write_add, write_collect, write_count, write_scan
from .cpu_score import MARKED, mark, write_insert, write_pair, write_verify

__all__ = ["write_exact", "write_main"]

_RECORD = 20  # bytes of a row of ``lists``
_HIGHEST = 65200  # that a sum may reach
_LITTLE = 4096  # documents: fewer are not worth sorting the lists


def write_exact(terms: str, weights: str, wide: bool = False) -> str:
    """The module of ``exact(frame)``.

    Args:
        terms: LLVM type of the terms of a row, ``i16`` or ``i32``.
        weights: Of its weights, ``float``, ``half``, or ``i16`` or ``i8``, which a row's scale multiplies.
        wide: Whether the processor has AVX512-BW.
    """
    parts = [write_scan(), write_add(), write_count(), write_collect(), write_pair(terms, weights, wide)]
    parts += [
        write_insert(),
        write_heap(),
        write_verify(terms, weights),
        write_sift(),
        write_range(),
        write_refine(),
        _sort(),
        _gather(),
        _query(),
    ]
    parts.append(write_main("exact"))
    declarations = [
        f"declare i16 @llvm.vector.reduce.add.v{LANES}i16({SUMS})",
        "declare float @llvm.fma.f32(float, float, float)",
        "declare i32 @llvm.cttz.i32(i32, i1)",
        "declare float @llvm.ceil.f32(float)",
        "declare void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
        *(MARKED if wide else ()),
    ]
    return "\n".join(declarations + parts)


def write_main(name: str) -> str:
    """``name(frame)``, which calls ``query`` for each of ``n_q`` queries.

    A single query may be given as the caller has it, with terms of 32 (``given_kind`` 1) or 64 bits (2). It
    is copied without terms of weight 0; ``refused`` is not 0 if fewer than k documents are found for it, or a
    weight is negative or not finite, with which nothing is searched.
    """
    x = Frame()
    terms, weights = x.get("q_terms", "ptr"), x.get("q_weights", "ptr")

    def take(kind: str) -> None:
        def one(j: str, state: Values) -> Values:
            place = x.at(x.get("given_terms", "ptr"), x.mul(j, size_of(kind)))
            weight = x.load("float", x.get("given_weights", "ptr"), x.mul(j, 4), 4)
            at = x.mul(state[0], 4)
            x.store("i32", x.load("i32", place, align=4), terms, at, 4)  # the lower half of 64 bits is first
            x.store("float", weight, weights, at, 4)
            finite = x.cmp("olt", weight, constant(float("inf")), "float")
            bad = x.flip(x.both(x.cmp("oge", weight, "0.0", "float"), finite))
            more = x.cmp("one", weight, "0.0", "float")
            return tuple(
                x.add(s, x.op(f"zext i1 {i} to i64")) for s, i in zip(state, (more, bad), strict=True)
            )

        number, refused = x.loop(0, x.get("given"), 1, one, ("0", "0"), "i64")
        x.set("refused", refused)
        offsets = x.get("q_offsets", "ptr")
        x.store("i64", "0", offsets, align=8)
        x.store("i64", x.select(x.cmp("eq", refused, 0), number, 0), offsets, 8, 8)

    for number, kind in ((1, "i32"), (2, "i64")):
        x.when(x.cmp("eq", x.get("given_kind"), number), partial(take, kind))
    x.loop(0, x.get("n_q"), 1, lambda i, _: x.do(f"call void @query(ptr %f, i64 {i})"))
    missing = x.op(f"zext i1 {x.cmp('slt', x.get('hits'), x.get('k'))} to i64")
    x.set("refused", x.op(f"or i64 {x.get('refused')}, {missing}"))
    return x.function(f"define void @{name}(ptr %f)")


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
    x.store("<16 x i32>", "zeroinitializer", x.get("marks", "ptr"), align=64)

    def approach(j: str, _: Values) -> None:
        first = x.item("list_offsets", x.item("own_terms", j, "i32"), "i64")
        record = x.place("lists", x.mul(first, _RECORD), "i8")
        for line in range(LINES):
            x.prefetch(x.at(record, 64 * line))

    x.loop(0, m, 1, approach)

    def term(j: str, _: Values) -> None:
        number, weight = x.item("own_terms", j, "i32"), x.item("own_weights", j, "float")
        x.store("float", weight, x.place("table", number, "float"), align=4)
        mark(x, number)

        def entry(e: str, _: Values) -> None:
            record = x.place("lists", x.mul(e, _RECORD), "i8")
            this = x.op(f"zext i32 {x.load('i32', record, 8, 4)} to i64")
            share = x.floats("fmul", weight, x.load("float", record, 16, 4))
            place = x.at(counts, x.mul(this, 4))
            count = x.load("i32", place, align=4)
            slot = x.at(slots, x.mul(x.add(x.mul(this, m), x.op(f"zext i32 {count} to i64")), SLOT))
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
    x.do("call void @order(ptr %f)")

    def forget(j: str, _: Values) -> None:
        x.store("float", "0.0", x.place("table", x.item("own_terms", j, "i32"), "float"), align=4)

    x.loop(0, m, 1, forget)
    return x.function("define internal void @query(ptr %f, i64 %query)")
