"""A tile of the CPU kernel: a few queries against a block of packed keys and values, in LLVM IR.

Scores and weights are laid out [group of keys][query][key of the group], a group being as many keys as a
vector has lanes: what the next step reads lies side by side. Between blocks of keys a query keeps its maximum
score, its sum of weights and its output before the division.

Source: Milakov and Gimelshein 2018 (Online normalizer calculation for softmax), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import e as euler
from math import log2

from .._jit import Code, Values, array, splat

__all__ = ["BLOCK", "FAR", "LOWEST", "Floats", "Plan", "tile"]

BLOCK = 512  # queries, and keys, worked on together: packed they fit the L2 cache
FAR = 2**30  # the window of attention without one
LOWEST = -1e38  # score of a hidden key; unlike minus infinity, the difference of two is 0 and not NaN
_LEAST = -125.0  # 2^x is this at least: no subnormal numbers
_ROUND = 1.5 * 2**23  # adding it rounds a float32 to an integer, found in the low bits of the sum
# Polynomials for 2^x on [-1/2, 1/2] of least relative error: 2e-7, and 8e-5 where weights become bfloat16.
_EXP2 = (1.00000007, 0.693146967, 0.240221197, 0.0555071327, 0.00967554133, 0.00132764722)
_EXP2_ROUGH = (0.999928074, 0.693260985, 0.242611122, 0.0551716691)


@dataclass(frozen=True)
class Plan:
    """What the code is written for.

    Attributes:
        head_dim: Width of a head, a multiple of 8.
        bfloat16: Inputs and output are bfloat16, else float32.
        dot: Multiply pairs of bfloat16 (AVX512-BF16, 16 lanes), else float32 numbers.
        lanes: float32 numbers in a vector register.
    """

    head_dim: int
    bfloat16: bool
    dot: bool
    lanes: int

    @property
    def words(self) -> int:
        """32-bit words of a packed query or key: float32 numbers, or pairs of bfloat16."""
        return self.head_dim // 2 if self.dot else self.head_dim

    @property
    def width(self) -> int:
        """``head_dim`` rounded up to whole vectors."""
        return -(-self.head_dim // self.lanes) * self.lanes

    @property
    def stored(self) -> int:
        """Bytes of a number in the inputs and the output."""
        return 2 if self.bfloat16 else 4

    @property
    def packed(self) -> int:
        """Bytes of a packed value, and of a weight."""
        return 2 if self.dot else 4

    @property
    def rows(self) -> int:
        """Queries of a full tile: with two vectors of keys they take half of the registers for sums."""
        return 8 if self.lanes == 16 else 4


class Floats:
    """Arithmetic on vectors of ``lanes`` float32."""

    def __init__(self, code: Code, lanes: int) -> None:
        self.code, self.lanes = code, lanes
        self.kind, self.integers = f"<{lanes} x float>", f"<{lanes} x i32>"

    def constant(self, value: float) -> str:
        """``value`` in every lane."""
        return splat(self.lanes, "float", value)

    def add(self, a: str, b: str) -> str:
        """``a + b``."""
        return self.code.op(f"fadd {self.kind} {a}, {b}")

    def sub(self, a: str, b: str) -> str:
        """``a - b``."""
        return self.code.op(f"fsub {self.kind} {a}, {b}")

    def mul(self, a: str, b: str) -> str:
        """``a * b``."""
        return self.code.op(f"fmul {self.kind} {a}, {b}")

    def mul_add(self, a: str, b: str, c: str) -> str:
        """``a * b + c``."""
        kind = self.kind
        return self.code.op(f"call {kind} @llvm.fmuladd.v{self.lanes}f32({kind} {a}, {kind} {b}, {kind} {c})")

    def maximum(self, a: str, b: str) -> str:
        """The higher of two numbers, ``b`` if one is NaN."""
        above = self.code.op(f"fcmp ogt {self.kind} {a}, {b}")
        return self.code.op(f"select <{self.lanes} x i1> {above}, {self.kind} {a}, {self.kind} {b}")

    def load(self, pointer: str, offset: str | int = 0) -> str:
        """Load from ``offset`` bytes after ``pointer``."""
        return self.code.load(self.kind, pointer, offset)

    def store(self, value: str, pointer: str, offset: str | int = 0) -> None:
        """Store to ``offset`` bytes after ``pointer``."""
        self.code.store(self.kind, value, pointer, offset)

    def spread(self, value: str, lanes: int) -> list[str]:
        """A vector of ``lanes`` for each lane of ``value``."""
        return [
            self.code.shuffle("float", self.lanes, value, "poison", [i] * lanes) for i in range(self.lanes)
        ]

    def exp2(self, x: str, polynomial: tuple[float, ...] = _EXP2) -> str:
        """2^x for x <= 0; NaN stays NaN."""
        code = self.code
        x = self.maximum(self.constant(_LEAST), x)
        shifted = self.add(x, self.constant(_ROUND))
        rest = self.sub(x, self.sub(shifted, self.constant(_ROUND)))
        result = self.constant(polynomial[-1])
        for factor in polynomial[-2::-1]:
            result = self.mul_add(result, rest, self.constant(factor))
        bits = code.op(f"bitcast {self.kind} {shifted} to {self.integers}")
        exponent = code.op(f"shl {self.integers} {bits}, {splat(self.lanes, 'i32', 23)}")
        bits = code.op(f"bitcast {self.kind} {result} to {self.integers}")
        bits = code.op(f"add {self.integers} {bits}, {exponent}")
        return code.op(f"bitcast {self.integers} {bits} to {self.kind}")


def tile(plan: Plan, rows: int) -> str:
    """The function for ``rows`` queries: the first sees keys ``%low`` to ``%high``, the next one key on."""
    code = Code()
    floats, each = Floats(code, plan.lanes), Floats(code, rows)
    first = code.mul(code.op(f"sdiv i64 {code.maximum('%low', 0)}, {plan.lanes}"), plan.lanes)
    stop = code.minimum("%count", code.add("%high", rows - 1))

    best = _all_scores(floats, plan, first, stop, rows)
    scale = plan.head_dim**-0.5 * log2(euler)  # weights are powers of 2
    old = each.load("%maxima")
    new = each.maximum(_reduce(code, plan.lanes, best, Floats.maximum), old)
    each.store(new, "%maxima")
    decay = each.exp2(each.mul(each.sub(old, new), each.constant(scale)))

    shifts = each.spread(new, plan.lanes)
    sums = code.loop(
        first,
        stop,
        plan.lanes,
        lambda at, sums: _weigh(floats, plan, at, sums, shifts, scale),
        (floats.constant(0),) * rows,
        floats.kind,
    )
    total = each.mul_add(each.load("%sums"), decay, _reduce(code, plan.lanes, sums, Floats.add))
    each.store(total, "%sums")

    decays = each.spread(decay, plan.lanes)
    pairs = plan.width // (2 * plan.lanes) * 2 * plan.lanes  # outputs two vectors at a time, then one
    code.loop(0, pairs, 2 * plan.lanes, lambda at, _: _mix(floats, plan, at, 2, decays, first, stop))
    if pairs < plan.width:
        _mix(floats, plan, pairs, 1, decays, first, stop)
    return code.function(
        f"define internal void @tile{rows}(ptr %queries, ptr %keys, ptr %values, ptr %scores, ptr %weights, "
        "ptr %maxima, ptr %sums, ptr %outputs, i64 %count, i64 %low, i64 %high)"
    )


def _all_scores(floats: Floats, plan: Plan, first: str, stop: str, rows: int) -> Values:
    """Score all groups of keys, two at a time; returns the maxima in each lane."""
    code, lanes = floats.code, plan.lanes
    best = code.loop(
        first,
        code.sub(stop, lanes),
        2 * lanes,
        lambda at, best: _scores(floats, plan, at, 2, best),
        (floats.constant(LOWEST),) * rows,
        floats.kind,
    )
    groups = code.op(f"sdiv i64 {code.add(code.sub(stop, first), lanes - 1)}, {lanes}")
    last = code.add(first, code.mul(code.add(groups, -1), lanes))
    odd = code.op(f"trunc i64 {groups} to i1")
    return code.when(odd, lambda: _scores(floats, plan, last, 1, best), best, floats.kind)


def _scores(floats: Floats, plan: Plan, first: str, groups: int, best: Values) -> Values:
    """Store the scores of ``groups`` groups of keys from ``first`` on; returns the new maxima."""
    code, lanes, rows = floats.code, plan.lanes, len(best)
    keys = code.at("%keys", code.mul(first, 4 * plan.words))

    def multiply(word: str, sums: Values) -> Values:
        at = code.at(keys, code.mul(word, 4 * lanes))
        columns = [code.load(floats.integers, at, 4 * lanes * plan.words * g) for g in range(groups)]
        query, result = code.at("%queries", code.mul(word, 4)), []
        for row in range(rows):
            number = code.broadcast(lanes, "i32", code.load("i32", query, 4 * plan.words * row))
            for g, column in enumerate(columns):
                result.append(_multiply_add(floats, plan, number, column, sums[row * groups + g]))
        return tuple(result)

    scores = code.loop(0, plan.words, 1, multiply, (floats.constant(0),) * (rows * groups), floats.kind)
    left = code.op(f"icmp slt i64 {first}, {code.add('%low', rows - 1)}")
    right = code.op(f"icmp sgt i64 {code.add(first, groups * lanes)}, {code.minimum('%high', '%count')}")
    edge = code.op(f"or i1 {left}, {right}")
    scores = code.when(edge, lambda: _hide(floats, first, groups, scores), scores, floats.kind)
    target, result = code.at("%scores", code.mul(first, 4 * rows)), list(best)
    for i, score in enumerate(scores):
        row, g = divmod(i, groups)
        floats.store(score, target, 4 * lanes * (g * rows + row))
        result[row] = floats.maximum(score, result[row])
    return tuple(result)


def _hide(floats: Floats, first: str, groups: int, scores: Values) -> Values:
    """The scores with the lowest one wherever the key is not there or out of the query's window."""
    code, lanes, integers, result = floats.code, floats.lanes, floats.integers, list(scores)

    def broadcast(value: str) -> str:
        return code.broadcast(lanes, "i32", code.op(f"trunc i64 {value} to i32"))

    count, low, span = (broadcast(x) for x in ("%count", "%low", code.sub("%high", "%low")))
    for g in range(groups):
        places = array(lanes, "i32", range(g * lanes, (g + 1) * lanes))
        key = code.op(f"add {integers} {broadcast(first)}, {places}")
        exists = code.op(f"icmp slt {integers} {key}, {count}")
        place = code.op(f"sub {integers} {key}, {low}")
        for i in range(g, len(scores), groups):
            near = code.op(f"sub {integers} {place}, {splat(lanes, 'i32', i // groups)}")
            near = code.op(f"icmp ult {integers} {near}, {span}")  # unsigned: neither below 0 nor too far
            seen = code.op(f"and <{lanes} x i1> {near}, {exists}")
            lowest = f"{floats.kind} {floats.constant(LOWEST)}"
            result[i] = code.op(f"select <{lanes} x i1> {seen}, {floats.kind} {scores[i]}, {lowest}")
    return tuple(result)


def _weigh(floats: Floats, plan: Plan, at: str, sums: Values, shifts: list[str], scale: float) -> Values:
    """Turn the scores of a group of keys into weights; returns the new sums in each lane."""
    code, lanes, rows, result = floats.code, plan.lanes, len(sums), []
    scores = code.at("%scores", code.mul(at, 4 * rows))
    weights = code.at("%weights", code.mul(at, plan.packed * rows))
    for row in range(rows):
        x = floats.sub(floats.load(scores, 4 * lanes * row), shifts[row])
        x = floats.mul(x, floats.constant(scale))
        weight = floats.exp2(x, _EXP2_ROUGH if plan.dot else _EXP2)
        result.append(floats.add(sums[row], weight))
        if plan.dot:
            half = code.op(f"fptrunc {floats.kind} {weight} to <{lanes} x bfloat>")
            code.store(f"<{lanes} x bfloat>", half, weights, 2 * lanes * row)
        else:
            floats.store(weight, weights, 4 * lanes * row)
    return tuple(result)


def _mix(
    floats: Floats, plan: Plan, column: str | int, vectors: int, decays: list[str], first: str, stop: str
) -> None:
    """Decay ``vectors`` vectors of the outputs from ``column`` on and add the weighted values."""
    code, lanes, rows, step = floats.code, plan.lanes, len(decays), 4 // plan.packed
    outputs = code.at("%outputs", code.mul(column, 4))
    values = code.at("%values", code.mul(column, 4))
    places = [4 * (plan.width * row + lanes * v) for row in range(rows) for v in range(vectors)]

    def group(start: str, sums: Values) -> Values:
        weights = code.at("%weights", code.mul(start, plan.packed * rows))
        source = code.at(values, code.mul(start, plan.packed * plan.width))

        def key(lane: str, sums: Values) -> Values:  # or a pair of keys
            at = code.at(source, code.mul(lane, plan.packed * plan.width))
            columns = [code.load(floats.integers, at, 4 * lanes * v) for v in range(vectors)]
            weight, result = code.at(weights, code.mul(lane, plan.packed)), []
            for row in range(rows):
                number = code.broadcast(lanes, "i32", code.load("i32", weight, plan.packed * lanes * row))
                for v, numbers in enumerate(columns):
                    result.append(_multiply_add(floats, plan, number, numbers, sums[row * vectors + v]))
            return tuple(result)

        return code.loop(0, code.minimum(lanes, code.sub(stop, start)), step, key, sums, floats.kind)

    # from 0 and not from the old outputs: fewer sums are rounded at full size
    sums = code.loop(first, stop, lanes, group, (floats.constant(0),) * len(places), floats.kind)
    for i, (place, total) in enumerate(zip(places, sums, strict=True)):
        old = floats.load(outputs, place)
        floats.store(floats.mul_add(old, decays[i // vectors], total), outputs, place)


def _multiply_add(floats: Floats, plan: Plan, a: str, b: str, total: str) -> str:
    """``total + a * b`` of vectors of packed words."""
    kind = f"<{2 * plan.lanes} x bfloat>" if plan.dot else floats.kind
    a, b = (floats.code.op(f"bitcast {floats.integers} {x} to {kind}") for x in (a, b))
    if not plan.dot:
        return floats.mul_add(a, b, total)
    call = f"call {floats.kind} @llvm.x86.avx512bf16.dpbf16ps.512"
    return floats.code.op(f"{call}({floats.kind} {total}, {kind} {a}, {kind} {b})")


def _reduce(code: Code, lanes: int, vectors: Values, combine: Callable[[Floats, str, str], str]) -> str:
    """Reduce each vector to one number, all of them together; the numbers side by side."""
    count, parts = len(vectors), list(vectors)
    while lanes * len(parts) > count:
        half = lanes * len(parts) // count // 2  # each vector has come down to twice this many lanes
        twins = list(zip(parts[::2], parts[1::2] or ["poison"], strict=True))
        low = [lane for lane in range(2 * lanes if len(parts) > 1 else lanes) if lane % (2 * half) < half]
        high = [lane + half for lane in low]
        parts = [
            combine(Floats(code, len(low)), *(code.shuffle("float", lanes, a, b, x) for x in (low, high)))
            for a, b in twins
        ]
        lanes = len(low)
    return parts[0]
