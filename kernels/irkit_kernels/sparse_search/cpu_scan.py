"""LLVM IR for the sums of a range of documents, 16 bits each: adding lists, counting, choosing."""

from __future__ import annotations

from .._jit import Values, splat
from .cpu_frame import LANES, RANGE, STEP, SUMS, Frame

__all__ = ["scaled", "write_add", "write_collect", "write_count", "write_scan"]

_GROUP = 16  # postings scaled at once
_WORD = f"i{LANES}"


def write_scan() -> str:
    """Add the postings of a list: ``factor * code / 256``, rounded up, to the sums of its documents."""
    x = Frame()
    sums, room = x.get("sums", "ptr"), x.op(f"alloca <{_GROUP} x i16>, align 32")
    vector = f"<{_GROUP} x i16>"
    factor = x.broadcast(_GROUP, "i16", x.op("trunc i64 %factor to i16"))
    rows, full = x.at("%list", "%count"), x.op(f"and i64 %count, {-_GROUP}")

    def add(row: str, value: str) -> None:
        place = x.at(sums, x.mul(x.op(f"zext i16 {row} to i64"), 2))
        x.store("i16", x.op(f"add i16 {x.load('i16', place, align=2)}, {value}"), place, align=2)

    def group(i: str, _: Values) -> None:
        codes = x.op(f"zext <{_GROUP} x i8> {x.load(f'<{_GROUP} x i8>', '%list', i)} to {vector}")
        x.store(vector, scaled(x, _GROUP, codes, factor), room, align=32)
        own = x.at(rows, x.mul(i, 2))
        for lane in range(_GROUP):
            add(x.load("i16", own, 2 * lane), x.load("i16", room, 2 * lane, 2))

    def single(i: str, _: Values) -> None:
        code = x.op(f"zext i8 {x.load('i8', '%list', i)} to i64")
        value = x.add(x.op(f"lshr i64 {x.mul(code, '%factor')}, 8"), 1)
        add(x.load("i16", rows, x.mul(i, 2)), x.op(f"trunc i64 {value} to i16"))

    x.loop(0, full, _GROUP, group)
    x.loop(full, "%count", 1, single)
    return x.function("define internal void @scan(ptr %f, ptr %list, i64 %count, i64 %factor)")


def write_add() -> str:
    """The same for a list kept as a vector: a code for each document, 0 where it has not the term."""
    x = Frame()
    sums = x.get("sums", "ptr")
    factor = x.broadcast(LANES, "i16", x.op("trunc i64 %factor to i16"))

    def turn(i: str, _: Values) -> None:
        for line in range(0, STEP, 64):
            x.prefetch(x.at("%list", x.add(i, 1024 + line)))
        for part in range(0, STEP, LANES):
            place = x.at(sums, x.mul(x.add(i, part), 2))
            codes = x.load(f"<{LANES} x i8>", "%list", x.add(i, part))
            codes = x.op(f"zext <{LANES} x i8> {codes} to {SUMS}")
            there = x.op(f"icmp ne {SUMS} {codes}, zeroinitializer")
            value = scaled(x, LANES, codes, factor)
            value = x.op(f"select <{LANES} x i1> {there}, {SUMS} {value}, {SUMS} zeroinitializer")
            x.store(SUMS, x.op(f"add {SUMS} {x.load(SUMS, place, align=64)}, {value}"), place, align=64)

    x.loop(0, x.get("length"), STEP, turn)
    return x.function("define internal void @add(ptr %f, ptr %list, i64 %factor)")


def scaled(x: Frame, lanes: int, codes: str, factor: str) -> str:
    """``codes * factor / 256`` of 16-bit numbers, rounded down, plus 1."""
    wide, narrow = f"<{lanes} x i32>", f"<{lanes} x i16>"
    codes = x.op(f"shl {narrow} {codes}, {splat(lanes, 'i16', 8)}")
    product = x.op(
        f"mul {wide} {x.op(f'zext {narrow} {codes} to {wide}')}, {x.op(f'zext {narrow} {factor} to {wide}')}"
    )
    high = x.op(f"lshr {wide} {product}, {splat(lanes, 'i32', 16)}")
    high = x.op(f"trunc {wide} {high} to {narrow}")
    return x.op(f"add {narrow} {high}, {splat(lanes, 'i16', 1)}")


def write_count() -> str:
    """The number of sums of at least ``low``."""
    x = Frame()
    sums = x.get("sums", "ptr")
    low = x.broadcast(LANES, "i16", x.op("trunc i64 %low to i16"))

    def turn(i: str, state: Values) -> Values:
        place, result = x.at(sums, x.mul(i, 2)), []
        for part, number in enumerate(state):
            values = x.load(SUMS, place, 2 * LANES * part, 64)
            mask = x.op(f"icmp uge {SUMS} {values}, {low}")
            result.append(x.op(f"sub {SUMS} {number}, {x.op(f'sext <{LANES} x i1> {mask} to {SUMS}')}"))
        return tuple(result)

    parts = x.loop(0, x.get("length"), STEP, turn, ("zeroinitializer",) * (STEP // LANES), SUMS)
    total = parts[0]
    for part in parts[1:]:
        total = x.op(f"add {SUMS} {total}, {part}")
    number = x.op(f"call i16 @llvm.vector.reduce.add.v{LANES}i16({SUMS} {total})")
    x.set("number", x.op(f"zext i16 {number} to i64"))
    return x.function("define internal void @count(ptr %f, i64 %low)")


def write_collect() -> str:
    """Documents of the range with ``low <= sum < high`` that may be found, into ``chosen``."""
    x = Frame()
    sums, keep = x.get("sums", "ptr"), x.get("keep", "ptr")
    filtered, n = x.op(f"icmp ne ptr {keep}, null"), x.get("n")
    low = x.broadcast(LANES, "i16", x.op("trunc i64 %low to i16"))
    top = x.broadcast(LANES, "i16", x.op(f"trunc i64 {x.sub('%high', 1)} to i16"))
    first = x.mul(x.get("range"), RANGE)
    chosen = x.get("chosen", "ptr")
    x.set("number", 0)

    def turn(i: str, _: Values) -> None:
        values = x.load(SUMS, sums, x.mul(i, 2), 64)
        inside = x.op(
            f"and <{LANES} x i1> {x.op(f'icmp uge {SUMS} {values}, {low}')}, "
            f"{x.op(f'icmp ule {SUMS} {values}, {top}')}"
        )
        mask = x.op(f"bitcast <{LANES} x i1> {inside} to {_WORD}")

        def some() -> None:
            def one() -> str:
                word = x.op(f"trunc i64 {x.get('place')} to i32")
                lane = x.op(f"zext i32 {x.op(f'call i32 @llvm.cttz.i32(i32 {word}, i1 true)')} to i64")
                document = x.add(x.add(first, i), lane)
                number = x.get("number")
                x.store("i32", x.op(f"trunc i64 {document} to i32"), chosen, x.mul(number, 4), 4)
                there = x.op(f"zext i1 {x.cmp('slt', document, n)} to i64")  # damaged lists may have others
                x.set("number", x.add(number, there))

                def check() -> None:
                    wanted = x.load("i8", x.at(keep, x.minimum(document, x.sub(n, 1))))
                    wanted = x.op(f"and i64 {there}, {x.op(f'zext i8 {wanted} to i64')}")
                    x.set("number", x.add(number, wanted))

                x.when(filtered, check)
                rest = x.op(f"and i32 {word}, {x.op(f'sub i32 {word}, 1')}")
                x.set("place", x.op(f"zext i32 {rest} to i64"))
                return x.op(f"icmp ne i32 {rest}, 0")

            x.set("place", x.op(f"zext i32 {mask} to i64"))
            x.repeat(one)

        x.when(x.op(f"icmp ne i32 {mask}, 0"), some)

    x.loop(0, x.get("length"), LANES, turn)
    return x.function("define internal void @collect(ptr %f, i64 %low, i64 %high)")
