"""LLVM IR for the best hits of exact search, if many: a heap, the worst on top, in the memory of their rows.

A hit is one 64-bit key, the bits of its score, which is above 0, before the complement of its row: the higher
key is the better hit, and among equal scores it is the lower row.
"""

from __future__ import annotations

from .._jit import Values
from .cpu_frame import Frame
from .cpu_score import aim

__all__ = ["write_heap"]

_FEW = 32  # hits that are sooner kept in order
_LANES = 8  # keys compared at once
_ROWS = (1 << 32) - 1


def write_heap() -> str:
    """``push`` takes a hit, ``order`` turns the heap into rows and scores, best first."""
    return "\n".join([_sink(), _push(), _order()])


def _sink() -> str:
    """Put a key in the place of the lowest of ``%n``, and the heap in order."""
    x = Frame()
    at = x.op("alloca i64, align 8")
    x.store("i64", "0", at, align=8)

    def down() -> str:
        here = x.load("i64", at, align=8)
        left = x.add(x.mul(here, 2), 1)
        inside = x.cmp("slt", left, "%n")
        left = x.select(inside, left, 0)
        right = x.minimum(x.add(left, 1), x.sub("%n", 1))
        first, second = (x.load("i64", "%heap", x.mul(child, 8), 8) for child in (left, right))
        other = x.cmp("slt", second, first)
        lower = x.select(other, second, first)
        more = x.both(inside, x.cmp("slt", lower, "%key"))

        def move() -> None:
            x.store("i64", lower, "%heap", x.mul(here, 8), 8)
            x.store("i64", x.select(other, right, left), at, align=8)

        x.when(more, move)
        return more

    x.repeat(down)
    x.store("i64", "%key", "%heap", x.mul(x.load("i64", at, align=8), 8), 8)
    return x.function("define internal void @sink(ptr %heap, i64 %n, i64 %key)")


def _push() -> str:
    """Keep a hit if it is among the k best so far; few are kept in order by `insert`."""
    x = Frame()
    heap, hits, k, at = x.get("out_rows", "ptr"), x.get("hits"), x.get("k"), x.op("alloca i64, align 8")
    bits = x.op(f"zext i32 {x.op('bitcast float %score to i32')} to i64")
    key = x.op(f"or i64 {x.op(f'shl i64 {bits}, 32')}, {x.sub(_ROWS, '%row')}")

    def lowest() -> None:
        top = x.load("i64", heap, align=8)
        bits = x.op(f"trunc i64 {x.op(f'lshr i64 {top}, 32')} to i32")
        aim(x, x.op(f"bitcast i32 {bits} to float"))

    def grow() -> None:
        x.store("i64", hits, at, align=8)

        def up() -> str:
            here = x.load("i64", at, align=8)
            parent = x.op(f"lshr i64 {x.maximum(x.sub(here, 1), 0)}, 1")
            value = x.load("i64", heap, x.mul(parent, 8), 8)
            more = x.both(x.cmp("sgt", here, 0), x.cmp("sgt", value, key))

            def move() -> None:
                x.store("i64", value, heap, x.mul(here, 8), 8)
                x.store("i64", parent, at, align=8)

            x.when(more, move)
            return more

        x.repeat(up)
        x.store("i64", key, heap, x.mul(x.load("i64", at, align=8), 8), 8)
        number = x.add(hits, 1)
        x.set("hits", number)
        x.when(x.cmp("eq", number, k), lowest)

    def replace() -> None:
        x.do(f"call void @sink(ptr {heap}, i64 {k}, i64 {key})")
        lowest()

    full = x.cmp("sge", hits, k)
    few = x.cmp("sle", k, _FEW)
    x.when(few, lambda: x.do("call void @insert(ptr %f, i64 %row, float %score)"))
    good = x.either(x.flip(full), x.cmp("sgt", key, x.load("i64", heap, align=8)))
    good = x.both(good, x.flip(few))

    def look() -> Values:
        return (_is_there(x, heap, hits, key),)

    (there,) = x.when(x.both(good, x.cmp("ne", x.get("again"), 0)), look, ("false",), "i1")
    new = x.both(good, x.flip(there))
    x.when(x.both(new, x.flip(full)), grow)
    x.when(x.both(new, full), replace)
    return x.function("define internal void @push(ptr %f, i64 %row, float %score)")


def _is_there(x: Frame, heap: str, hits: str, key: str) -> str:
    """Whether a key is in the heap, an i1."""
    many, full = f"<{_LANES} x i64>", x.op(f"and i64 {hits}, {-_LANES}")
    keys = x.broadcast(_LANES, "i64", key)

    def group(i: str, state: Values) -> Values:
        equal = x.op(f"icmp eq {many} {x.load(many, heap, x.mul(i, 8), 8)}, {keys}")
        return (x.op(f"or <{_LANES} x i1> {state[0]}, {equal}"),)

    def single(i: str, state: Values) -> Values:
        return (x.either(state[0], x.cmp("eq", x.load("i64", heap, x.mul(i, 8), 8), key)),)

    (found,) = x.loop(0, full, _LANES, group, ("zeroinitializer",), f"<{_LANES} x i1>")
    found = x.op(f"icmp ne i8 {x.op(f'bitcast <{_LANES} x i1> {found} to i8')}, 0")
    return x.loop(full, hits, 1, single, (found,), "i1")[0]


def _order() -> str:
    """Sort the heap, if there is one, and take keys apart."""
    x = Frame()
    heap, scores = x.get("out_rows", "ptr"), x.get("out_scores", "ptr")
    hits = x.select(x.cmp("sle", x.get("k"), _FEW), 0, x.get("hits"))

    def lowest(i: str, _: Values) -> None:
        last = x.sub(x.sub(hits, 1), i)
        place = x.mul(last, 8)
        key, lowest = x.load("i64", heap, place, 8), x.load("i64", heap, align=8)
        x.store("i64", lowest, heap, place, 8)
        x.do(f"call void @sink(ptr {heap}, i64 {last}, i64 {key})")

    def apart(i: str, _: Values) -> None:
        place = x.mul(i, 8)
        key = x.load("i64", heap, place, 8)
        x.store("i64", x.sub(_ROWS, x.op(f"and i64 {key}, {_ROWS}")), heap, place, 8)
        bits = x.op(f"trunc i64 {x.op(f'lshr i64 {key}, 32')} to i32")
        x.store("i32", bits, scores, x.mul(i, 4), 4)

    x.loop(0, x.sub(hits, 1), 1, lowest)
    x.loop(0, hits, 1, apart)
    return x.function("define internal void @order(ptr %f)")
