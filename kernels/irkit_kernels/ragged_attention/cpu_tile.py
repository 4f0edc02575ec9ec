"""A tile of the CPU kernel: a few queries against a block of packed keys and values, in LLVM IR.

Scores and weights are laid out [group of keys][query][key of the group], a group being as many keys as a
vector has lanes: what the next step reads lies side by side. Between blocks of keys a query keeps its maximum
score, its sum of weights and its output before the division.

Source: Milakov and Gimelshein 2018 (Online normalizer calculation for softmax), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .._jit import Code, Values, array, splat
from .cpu_plan import EXP2, EXP2_ROUGH, LOWEST, Floats, Plan
from .reference import SCRAMBLE, STEP

__all__ = ["RANDOM", "by_columns", "kept", "products", "states", "tile", "visible", "weighted"]

RANDOM = ", i64 %key, i64 %number, i64 %heads, i64 %seed, i64 %threshold"  # what dropout is a function of


def tile(plan: Plan, rows: int) -> str:
    """The function for ``rows`` queries: the first sees keys ``%low`` to ``%high``, the next one key on."""
    code = Code()
    floats, each = Floats(code, plan.lanes), Floats(code, rows)
    first = code.mul(code.op(f"sdiv i64 {code.maximum('%low', 0)}, {plan.lanes}"), plan.lanes)
    stop = code.minimum("%count", code.add("%high", rows - 1))

    best = _all_scores(floats, plan, first, stop, rows)
    old = each.load("%maxima")
    new = each.maximum(_reduce(code, plan.lanes, best, Floats.maximum), old)
    each.store(new, "%maxima")
    decay = each.exp2(each.mul(each.sub(old, new), each.constant(plan.scale)))

    shifts = each.spread(new, plan.lanes)
    seeds = states(code, rows, plan.lanes) if plan.dropout else ()
    sums = code.loop(
        first,
        stop,
        plan.lanes,
        lambda at, sums: _weigh(floats, plan, at, sums, shifts, seeds),
        (floats.constant(0),) * rows,
        floats.kind,
    )
    total = each.mul_add(each.load("%sums"), decay, _reduce(code, plan.lanes, sums, Floats.add))
    each.store(total, "%sums")

    decays = each.spread(decay, plan.lanes)
    by_columns(code, plan, lambda at, vectors: _mix(floats, plan, at, vectors, decays, first, stop))
    random = RANDOM if plan.dropout else ""
    return code.function(
        f"define internal void @tile{rows}(ptr %queries, ptr %keys, ptr %values, ptr %scores, ptr %weights, "
        f"ptr %maxima, ptr %sums, ptr %outputs, i64 %count, i64 %low, i64 %high{random})"
    )


def by_columns(code: Code, plan: Plan, body: Callable[[str | int, int], None]) -> None:
    """``body(column, vectors)`` for all columns of a head: two vectors at a time, then one."""
    pairs = plan.width // (2 * plan.lanes) * 2 * plan.lanes
    code.loop(0, pairs, 2 * plan.lanes, lambda at, _: body(at, 2))
    if pairs < plan.width:
        body(pairs, 1)


def states(code: Code, rows: int, lanes: int) -> list[str]:
    """Random states of the queries of a tile, each in every lane; `reference.kept` is the definition."""
    kind = f"<{rows} x i32>"
    step, first, low = (
        code.broadcast(rows, "i32", code.op(f"trunc i64 {x} to i32")) for x in ("%heads", "%number", "%seed")
    )
    high = code.broadcast(rows, "i32", code.op(f"trunc i64 {code.op('lshr i64 %seed, 32')} to i32"))
    number = code.op(f"mul {kind} {step}, {array(rows, 'i32', range(rows))}")
    state = _scramble(code, rows, code.op(f"xor {kind} {code.op(f'add {kind} {number}, {first}')}, {low}"))
    state = _scramble(code, rows, code.op(f"xor {kind} {state}, {high}"))
    return [code.shuffle("i32", rows, state, "poison", [row] * lanes) for row in range(rows)]


def kept(code: Code, lanes: int, states: Sequence[str], key: str) -> list[str]:
    """For each query, which of its weights for ``lanes`` keys from ``key`` on are not dropped."""
    kind = f"<{lanes} x i32>"
    first, threshold = (
        code.broadcast(lanes, "i32", code.op(f"trunc i64 {x} to i32")) for x in (key, "%threshold")
    )
    place = code.op(f"add {kind} {first}, {array(lanes, 'i32', range(lanes))}")
    step = code.op(f"mul {kind} {place}, {splat(lanes, 'i32', STEP)}")
    bits = [_scramble(code, lanes, code.op(f"add {kind} {step}, {state}")) for state in states]
    return [code.op(f"icmp uge {kind} {x}, {threshold}") for x in bits]


def _scramble(code: Code, lanes: int, x: str) -> str:
    """`reference.scramble` of 32-bit integers."""
    kind = f"<{lanes} x i32>"
    for shift, factor in SCRAMBLE:
        shifted = code.op(f"lshr {kind} {x}, {splat(lanes, 'i32', shift)}")
        x = code.op(f"xor {kind} {x}, {shifted}")
        if factor != 1:
            x = code.op(f"mul {kind} {x}, {splat(lanes, 'i32', factor)}")
    return x


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
    scores = products(floats, plan, "%queries", "%keys", first, groups, rows)
    scores = visible(floats, first, groups, scores)
    target, result = code.at("%scores", code.mul(first, 4 * rows)), list(best)
    for i, score in enumerate(scores):
        row, g = divmod(i, groups)
        floats.store(score, target, 4 * lanes * (g * rows + row))
        result[row] = floats.maximum(score, result[row])
    return tuple(result)


def products(
    floats: Floats, plan: Plan, queries: str, keys: str, first: str, groups: int, rows: int
) -> Values:
    """Inner products of queries with ``groups`` groups of keys from ``first`` on: ``[query][group]``."""
    code, lanes = floats.code, plan.lanes
    keys = code.at(keys, code.mul(first, 4 * plan.words))

    def multiply(word: str, sums: Values) -> Values:
        at = code.at(keys, code.mul(word, 4 * lanes))
        columns = [code.load(floats.integers, at, 4 * lanes * plan.words * g) for g in range(groups)]
        query, result = code.at(queries, code.mul(word, 4)), []
        for row in range(rows):
            number = code.broadcast(lanes, "i32", code.load("i32", query, 4 * plan.words * row))
            for g, column in enumerate(columns):
                result.append(_multiply_add(floats, plan, number, column, sums[row * groups + g]))
        return tuple(result)

    return code.loop(0, plan.words, 1, multiply, (floats.constant(0),) * (rows * groups), floats.kind)


def visible(floats: Floats, first: str, groups: int, scores: Values) -> Values:
    """The scores ``[query][group]`` of groups of keys from ``first`` on, without hidden keys."""
    code, rows = floats.code, len(scores) // groups
    left = code.op(f"icmp slt i64 {first}, {code.add('%low', rows - 1)}")
    end = code.add(first, groups * floats.lanes)
    right = code.op(f"icmp sgt i64 {end}, {code.minimum('%high', '%count')}")
    edge = code.op(f"or i1 {left}, {right}")
    return code.when(edge, lambda: _hide(floats, first, groups, scores), scores, floats.kind)


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
            result[i] = floats.select(seen, scores[i], floats.constant(LOWEST))
    return tuple(result)


def _weigh(
    floats: Floats, plan: Plan, at: str, sums: Values, shifts: list[str], seeds: Sequence[str]
) -> Values:
    """Turn the scores of a group of keys into weights; returns the new sums in each lane."""
    code, lanes, rows, result = floats.code, plan.lanes, len(sums), []
    scores = code.at("%scores", code.mul(at, 4 * rows))
    weights = code.at("%weights", code.mul(at, plan.packed * rows))
    keep = kept(code, lanes, seeds, code.add("%key", at)) if plan.dropout else []
    for row in range(rows):
        x = floats.sub(floats.load(scores, 4 * lanes * row), shifts[row])
        x = floats.mul(x, floats.constant(plan.scale))
        weight = floats.exp2(x, EXP2_ROUGH if plan.dot else EXP2)
        result.append(floats.add(sums[row], weight))
        if plan.dropout:
            weight = floats.select(keep[row], weight, floats.constant(0))
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
    code, rows = floats.code, len(decays)
    outputs = code.at("%outputs", code.mul(column, 4))
    places = [4 * (plan.width * row + plan.lanes * v) for row in range(rows) for v in range(vectors)]
    # from 0 and not from the old outputs: fewer sums are rounded at full size
    values = code.at("%values", code.mul(column, 4))
    sums = weighted(floats, plan, "%weights", values, (rows, vectors), first, stop)
    for i, (place, total) in enumerate(zip(places, sums, strict=True)):
        old = floats.load(outputs, place)
        floats.store(floats.mul_add(old, decays[i // vectors], total), outputs, place)


def weighted(
    floats: Floats, plan: Plan, table: str, values: str, shape: tuple[int, int], first: str, stop: str
) -> Values:
    """Sums of packed values by the weights in ``table``, of ``shape`` queries and vectors."""
    code, lanes, step, (rows, vectors) = floats.code, plan.lanes, 4 // plan.packed, shape

    def group(start: str, sums: Values) -> Values:
        weights = code.at(table, code.mul(start, plan.packed * rows))
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

    return code.loop(first, stop, lanes, group, (floats.constant(0),) * (rows * vectors), floats.kind)


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
