"""The functions that pack keys and values in the order that the tiles read, in LLVM IR."""

from __future__ import annotations

from typing import Any

from .._typed import Array, Function, Value, vector
from .cpu_plan import Plan

__all__ = ["load_words", "pack_keys", "pack_values", "prefetch"]


def pack_keys(plan: Plan) -> Function:
    """Transpose keys to [group of keys][word][key of the group]; the last key fills up its group."""
    x, packed, keys, stride, ahead, count = _pack_function("pack_keys", "keys")
    lanes, words, last = plan.lanes, plan.words, count - 1

    with x.range(0, count, lanes) as groups:
        rows = [keys.at(x.minimum(groups.i + lane, last) * stride) for lane in range(lanes)]
        for row in rows:
            prefetch(x, plan, row, ahead)
        target = packed.at(groups.i * (4 * words)).cast("i32", 1)

        def square(word: Value | int, n: int) -> None:
            columns = _transpose(x, lanes, [load_words(x, plan, row, word, n) for row in rows])
            square_words = target.at(word * lanes).vectors(lanes)
            for i, column in enumerate(columns[:n]):
                square_words[lanes * i] = column

        whole = words // lanes * lanes
        with x.range(0, whole, lanes) as loop:
            square(loop.i, lanes)
        if whole < words:
            square(whole, words - whole)
    return x


def pack_values(plan: Plan) -> Function:
    """Copy values to [key][column], or to [pair of keys][column][key of the pair] for `Plan.dot`."""
    x, packed, values, stride, ahead, count = _pack_function("pack_values", "values")
    lanes, keys, last = plan.lanes, 4 // plan.packed, count - 1
    interleaved = [lane // 2 + lanes * (lane % 2) for lane in range(2 * lanes)]

    with x.range(0, count, keys) as loop:
        rows = [values.at(x.minimum(loop.i + k, last) * stride) for k in range(keys)]
        for row in rows:
            prefetch(x, plan, row, ahead)
        target = packed.at(loop.i * (plan.packed * plan.width))
        for column in range(0, plan.head_dim, lanes):
            n, output = min(lanes, plan.head_dim - column), target.at(4 * column)
            if plan.dot:
                pair = (_halves(plan, row, column, n) for row in rows)
                a, b = (_widen(x, half, lanes) for half in pair)
                output.cast("i16", 1).vectors(2 * lanes)[0] = x.shuffle(a, b, interleaved)
            else:
                numbers = load_words(x, plan, rows[0], column, n)
                output.cast("i32", 1).vectors(lanes)[0] = numbers
    return x


def _pack_function(name: str, source: str) -> tuple[Any, ...]:
    parameters: dict[str, Any] = {
        "packed": "u8*",
        source: "u8*",
        "stride": "i64",
        "ahead": "i64",
        "count": "i64",
    }
    x = Function(name, align=1, **parameters)
    return x, *x.parameters


def prefetch(x: Function, plan: Plan, row: Array, ahead: Value | int, write: bool = False) -> None:
    """Prefetch the numbers of a token ``ahead`` bytes further: the stride defeats the hardware prefetcher."""
    numbers = row.at(ahead)
    for line in range(0, plan.stored * plan.head_dim, 64):
        x.prefetch(numbers.at(line), write=write)


def load_words(x: Function, plan: Plan, row: Array, word: Value | int, n: int) -> Value:
    """Load ``n`` packed words of a token from ``word`` on; zeros fill up the vector."""
    if plan.bfloat16 and not plan.dot:
        words = row.cast("u16", 1).vectors(n)[word].to("i32") << 16
    elif plan.rounds:
        words = _rounded(row, 2 * word, 2 * n).cast(vector(n, "i32"))
    else:
        words = row.cast("i32", 1).vectors(n)[word]
    return _widen(x, words, plan.lanes)


def _halves(plan: Plan, row: Array, column: int, n: int) -> Value:
    """Load ``n`` numbers of a token as the bits of bfloat16."""
    if plan.rounds:
        return _rounded(row, column, n).cast(vector(n, "i16"))
    return row.cast("i16", 1).vectors(n)[column]


def _rounded(row: Array, column: Value | int, n: int) -> Value:
    """Load ``n`` float32 numbers of a token, rounded to bfloat16."""
    return row.cast("float", 1).vectors(n)[column].to("bfloat")


def _widen(x: Function, numbers: Value, lanes: int) -> Value:
    """Append zeros to a vector."""
    n = numbers.lanes
    return numbers if n == lanes else x.shuffle(numbers, 0, [min(lane, n) for lane in range(lanes)])


def _transpose(x: Function, lanes: int, rows: list[Value]) -> list[Value]:
    """Transpose a square of 32-bit words by swapping its off-diagonal halves, then quarters, ..."""
    step = lanes // 2
    while step:
        low = [lane if not lane & step else lanes + lane - step for lane in range(lanes)]
        high = [lane + step if not lane & step else lanes + lane for lane in range(lanes)]
        for i in (i for i in range(lanes) if not i & step):
            a, b = rows[i], rows[i + step]
            rows[i], rows[i + step] = (x.shuffle(a, b, order) for order in (low, high))
        step //= 2
    return rows
