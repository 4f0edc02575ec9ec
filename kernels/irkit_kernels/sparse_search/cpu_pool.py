"""LLVM IR for the pool of approximate search: the documents whose totals are high enough to be scored."""

from __future__ import annotations

from collections.abc import Callable

from .._jit import Values
from . import cpu_frame

__all__ = ["FIELDS", "TOP", "PoolFrame", "write_pool"]

_LANES = 64  # totals looked at
_TOTALS, TOP = f"<{_LANES} x i8>", 255

FIELDS = (
    *cpu_frame.FIELDS,
    # the index, how much of it is read, scratch memory
    *("best_offsets", "best", "best_scales", "best_missed"),
    *("cut", "scored", "doubt"),
    *("totals", "pool", "pool_totals", "counts", "shares", "picks", "code_gains"),
    # variables
    *("missing", "picked", "limit", "pooled", "reached", "room"),
)


class PoolFrame(cpu_frame.Frame):
    """The frame of exact search, longer by what approximate search needs."""

    def get(self, name: str, kind: str = "i64") -> str:
        """The value of a field."""
        return self.load(kind, "%f", 8 * FIELDS.index(name), 8)

    def set(self, name: str, value: str | int, kind: str = "i64") -> None:
        """Change a field."""
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


def write_pool() -> str:
    """``gather``, ``reach``, ``part`` and ``lift``."""
    declarations = [
        "@always = internal constant i8 1",
        "declare i64 @llvm.cttz.i64(i64, i1)",
        "declare i64 @llvm.ctpop.i64(i64)",
    ]
    return "\n".join([*declarations, _gather(), _reach(), _part(), _lift()])


def _each(
    x: PoolFrame, totals: str, limit: str, body: Callable[[str, Values], Values], state: Values
) -> Values:
    """``state = body(place, state)`` for the places among 64 totals of those that reach the limit."""
    found = x.load(_TOTALS, totals)
    word = x.op(f"bitcast <{_LANES} x i1> {x.op(f'icmp uge {_TOTALS} {found}, {limit}')} to i64")

    def one(_: str, now: Values) -> Values:
        lane = x.op(f"call i64 @llvm.cttz.i64(i64 {now[0]}, i1 true)")
        return x.op(f"and i64 {now[0]}, {x.sub(now[0], 1)}"), *body(lane, now[1:])

    def some() -> Values:
        return x.loop(0, x.op(f"call i64 @llvm.ctpop.i64(i64 {word})"), 1, one, (word, *state), "i64")[1:]

    return x.when(x.cmp("ne", word, 0), some, state, "i64")


def _gather() -> str:
    """Put the documents of a range whose totals reach the limit into the pool, and set all totals to 0."""
    x = PoolFrame()
    totals, keep, counts = x.get("totals", "ptr"), x.get("keep", "ptr"), x.get("counts", "ptr")
    pool, values = x.get("pool", "ptr"), x.get("pool_totals", "ptr")
    filtered, n = x.op(f"icmp ne ptr {keep}, null"), x.get("n")
    limit = x.broadcast(_LANES, "i8", x.op(f"trunc i64 {x.get('limit')} to i8"))

    def turn(i: str, state: Values) -> Values:
        here = x.at(totals, i)

        def one(lane: str, now: Values) -> Values:
            row, value = x.add(x.add("%start", i), lane), x.load("i8", here, lane)
            there = x.cmp("slt", row, n)  # damaged lists may have others
            place = x.select(x.both(filtered, there), x.at(keep, row), "@always", "ptr")
            byte = x.load("i8", place)
            x.store("i32", x.op(f"trunc i64 {row} to i32"), pool, x.mul(now[0], 4), 4)
            x.store("i8", value, values, now[0])
            kept = x.op(f"zext i1 {x.both(there, x.cmp('ne', byte, 0, 'i8'))} to i64")
            count = x.mul(x.op(f"zext i8 {value} to i64"), 8)
            x.store("i64", x.add(x.load("i64", counts, count, 8), kept), counts, count, 8)
            return (x.add(now[0], kept),)

        after = _each(x, here, limit, one, state)
        x.store(_TOTALS, "zeroinitializer", here, align=64)
        return after

    before = x.get("pooled")
    (pooled,) = x.loop(0, x.sub("%stop", "%start"), _LANES, turn, (before,), "i64")
    x.set("pooled", pooled)
    x.set("high", x.add(x.get("high"), x.sub(pooled, before)))
    return x.function("define internal void @gather(ptr %f, i64 %start, i64 %stop)")


def _reach() -> str:
    """Find the highest total from the limit on that ``%wanted`` documents of the pool have, or ``%least``."""
    x = PoolFrame()
    counts = x.get("counts", "ptr")
    x.set("above", x.get("high"))

    def fewer(total: str) -> str:
        return x.sub(x.get("above"), x.load("i64", counts, x.mul(total, 8), 8))

    def go(total: str) -> str:
        enough = x.either(x.cmp("slt", total, "%least"), x.cmp("sge", fewer(total), "%wanted"))
        return x.both(enough, x.cmp("slt", total, TOP))

    x.set("reached", x.advance(x.get("limit"), 1, go, lambda total: x.set("above", fewer(total))))
    return x.function("define internal void @reach(ptr %f, i64 %wanted, i64 %least)")


def _lift() -> str:
    """Raise the limit to ``%least``, or to what as many documents reach as may be scored."""
    x = PoolFrame()
    x.do(f"call void @reach(ptr %f, i64 {x.get('scored')}, i64 %least)")
    x.set("limit", x.get("reached"))
    x.set("high", x.get("above"))
    return x.function("define internal void @lift(ptr %f, i64 %least)")


def _part() -> str:
    """Choose the ``%wanted`` documents of the highest totals from the pool, the first of equals.

    Of the others those that reach the limit stay in it.
    """
    x = PoolFrame()
    pool, values, chosen = x.get("pool", "ptr"), x.get("pool_totals", "ptr"), x.get("chosen", "ptr")
    counts, pooled = x.get("counts", "ptr"), x.get("pooled")
    x.store(_TOTALS, "zeroinitializer", values, pooled)
    x.do("call void @reach(ptr %f, i64 %wanted, i64 0)")
    low = x.get("reached")
    ties = x.load("i64", counts, x.mul(low, 8), 8)
    above = x.sub(x.get("above"), ties)
    limit = x.broadcast(_LANES, "i8", x.op(f"trunc i64 {x.get('limit')} to i8"))

    def turn(i: str, state: Values) -> Values:
        def one(lane: str, now: Values) -> Values:
            number, rest, left = now
            place = x.add(i, lane)
            value, row = x.load("i8", values, place), x.load("i32", pool, x.mul(place, 4), 4)
            total = x.op(f"zext i8 {value} to i64")
            tie = x.both(x.cmp("eq", total, low), x.cmp("sgt", left, 0))
            pick = x.op(f"zext i1 {x.either(x.cmp('sgt', total, low), tie)} to i64")
            x.store("i32", row, chosen, x.mul(number, 4), 4)
            x.store("i32", row, pool, x.mul(rest, 4), 4)
            x.store("i8", value, values, rest)
            used = x.op(f"zext i1 {tie} to i64")
            return x.add(number, pick), x.add(rest, x.sub(1, pick)), x.sub(left, used)

        return _each(x, x.at(values, i), limit, one, state)

    state = "0", "0", x.sub("%wanted", above)
    number, rest, _ = x.loop(0, pooled, _LANES, turn, state, "i64")
    x.loop(x.add(low, 1), TOP + 1, 1, lambda i, _: x.store("i64", "0", counts, x.mul(i, 8), 8))
    x.store("i64", x.sub(ties, x.sub(number, above)), counts, x.mul(low, 8), 8)
    x.set("number", number)
    x.set("pooled", rest)
    x.set("high", rest)
    return x.function("define internal void @part(ptr %f, i64 %wanted)")
