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
    *("totals", "pool", "pool_totals", "shares", "picks", "code_gains"),
    # variables
    *("missing", "picked", "limit", "pooled", "crowd", "count", "reached", "room"),
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
    """``gather``, ``part`` and ``trim``, and what they use."""
    declarations = [
        "@always = internal constant i8 1",
        "declare i64 @llvm.cttz.i64(i64, i1)",
        "declare i64 @llvm.ctpop.i64(i64)",
    ]
    return "\n".join([*declarations, _gather(), _number_of(), _reach(), _part(), _trim()])


def _gather() -> str:
    """Put the documents of a range whose totals reach the limit into the pool, and set all totals to 0."""
    x = PoolFrame()
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
    x = PoolFrame()
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
    x = PoolFrame()
    x.store(_TOTALS, "zeroinitializer", x.get("pool_totals", "ptr"), x.get("pooled"))
    low = x.get("limit")
    for bit in reversed(range(8)):
        tried = x.add(low, 1 << bit)
        x.do(f"call void @number_of(ptr %f, i64 {x.minimum(tried, TOP)})")
        fits = x.both(x.cmp("sle", tried, TOP), x.cmp("sge", x.get("count"), "%wanted"))
        low = x.select(fits, tried, low)
    x.do(f"call void @number_of(ptr %f, i64 {x.minimum(x.add(low, 1), TOP)})")
    x.set("reached", low)
    return x.function("define internal void @reach(ptr %f, i64 %wanted)")


def _part() -> str:
    """Choose the ``%wanted`` documents of the highest totals from the pool, the first of equals.

    Of the others those that reach the limit stay in it.
    """
    x = PoolFrame()
    pool, values, chosen = x.get("pool", "ptr"), x.get("pool_totals", "ptr"), x.get("chosen", "ptr")
    x.do("call void @reach(ptr %f, i64 %wanted)")
    pooled, limit, low = x.get("pooled"), x.get("limit"), x.get("reached")
    above = x.select(x.cmp("slt", low, TOP), x.get("count"), 0)

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
    x = PoolFrame()
    x.do(f"call void @reach(ptr %f, i64 {x.get('scored')})")
    x.set("limit", x.get("reached"))
    x.do("call void @part(ptr %f, i64 0)")
    x.set("crowd", x.add(x.get("pooled"), x.get("scored")))
    return x.function("define internal void @trim(ptr %f)")
