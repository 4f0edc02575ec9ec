"""Functions that lay keys and values out as the tiles read them, in LLVM IR."""

from __future__ import annotations

from .._jit import Code, Values, splat
from .cpu_plan import Plan

__all__ = ["load_words", "pack_keys", "pack_values", "prefetch"]


def pack_keys(plan: Plan) -> str:
    """Transpose keys to [group of keys][word][key of the group]; the last key fills up its group."""
    code, lanes, words = Code(), plan.lanes, plan.words
    last = code.add("%count", -1)

    def group(first: str, _: Values) -> None:
        places = [code.mul(code.minimum(code.add(first, lane), last), "%stride") for lane in range(lanes)]
        rows = [code.at("%keys", place) for place in places]
        for row in rows:
            prefetch(code, plan, row, "%ahead")
        target = code.at("%packed", code.mul(first, 4 * words))

        def square(word: str | int, count: int) -> None:
            columns = _transpose(code, lanes, [load_words(code, plan, row, word, count) for row in rows])
            place = code.at(target, code.mul(word, 4 * lanes))
            for i, column in enumerate(columns[:count]):
                code.store(f"<{lanes} x i32>", column, place, 4 * lanes * i)

        whole = words // lanes * lanes
        code.loop(0, whole, lanes, lambda word, _: square(word, lanes))
        if whole < words:
            square(whole, words - whole)

    code.loop(0, "%count", lanes, group)
    return code.function(
        "define internal void @pack_keys(ptr %packed, ptr %keys, i64 %stride, i64 %ahead, i64 %count)"
    )


def pack_values(plan: Plan) -> str:
    """Copy values to [key][column], or to [pair of keys][column][key of the pair] for `Plan.dot`."""
    code, lanes, keys = Code(), plan.lanes, 4 // plan.packed
    last = code.add("%count", -1)
    mixed = [lane // 2 + lanes * (lane % 2) for lane in range(2 * lanes)]

    def step(first: str, _: Values) -> None:
        places = [code.mul(code.minimum(code.add(first, i), last), "%stride") for i in range(keys)]
        rows = [code.at("%values", place) for place in places]
        for row in rows:
            prefetch(code, plan, row, "%ahead")
        target = code.at("%packed", code.mul(first, plan.packed * plan.width))
        for column in range(0, plan.head_dim, lanes):
            count = min(lanes, plan.head_dim - column)
            if plan.dot:
                halves = [code.load(f"<{count} x i16>", row, 2 * column) for row in rows]
                a, b = (_widen(code, "i16", half, count, lanes) for half in halves)
                code.store(
                    f"<{2 * lanes} x i16>", code.shuffle("i16", lanes, a, b, mixed), target, 4 * column
                )
            else:
                vector = load_words(code, plan, rows[0], column, count)
                code.store(f"<{lanes} x i32>", vector, target, 4 * column)

    code.loop(0, "%count", keys, step)
    return code.function(
        "define internal void @pack_values(ptr %packed, ptr %values, i64 %stride, i64 %ahead, i64 %count)"
    )


def prefetch(code: Code, plan: Plan, row: str, ahead: str | int, write: bool = False) -> None:
    """Fetch the part of a token that the next head needs: the stride between tokens defeats the hardware."""
    place = code.at(row, ahead)
    for line in range(0, plan.stored * plan.head_dim, 64):
        code.do(f"call void @llvm.prefetch.p0(ptr {code.at(place, line)}, i32 {int(write)}, i32 3, i32 1)")


def load_words(code: Code, plan: Plan, row: str, word: str | int, count: int) -> str:
    """``count`` packed words of a token from ``word`` on; zeros fill up the vector."""
    if plan.bfloat16 and not plan.dot:
        half = code.load(f"<{count} x i16>", row, code.mul(word, 2))
        wide = code.op(f"zext <{count} x i16> {half} to <{count} x i32>")
        value = code.op(f"shl <{count} x i32> {wide}, {splat(count, 'i32', 16)}")
    else:
        value = code.load(f"<{count} x i32>", row, code.mul(word, 4))
    return _widen(code, "i32", value, count, plan.lanes)


def _widen(code: Code, kind: str, vector: str, count: int, lanes: int) -> str:
    if count == lanes:
        return vector
    return code.shuffle(kind, count, vector, "zeroinitializer", [min(lane, count) for lane in range(lanes)])


def _transpose(code: Code, lanes: int, rows: list[str]) -> list[str]:
    """Transpose a square of 32-bit words by swapping its off-diagonal halves, then quarters, ..."""
    step = lanes // 2
    while step:
        low = [lane if not lane & step else lanes + lane - step for lane in range(lanes)]
        high = [lane + step if not lane & step else lanes + lane for lane in range(lanes)]
        for i in (i for i in range(lanes) if not i & step):
            a, b = rows[i], rows[i + step]
            rows[i], rows[i + step] = (code.shuffle("i32", lanes, a, b, order) for order in (low, high))
        step //= 2
    return rows
