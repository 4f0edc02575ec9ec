"""A tile of attention on the CPU, in LLVM IR: a few queries against a block of packed keys and values.

Softmax is computed online: between blocks of keys each query keeps its maximum score, its sum of weights, and
its output before the division. A block with a larger maximum m' multiplies the sum and the output so far by
2^(m - m'), the *decay*. So no row of scores is ever stored as a whole.

Scores and weights are stored as [group of keys][query][key of the group]. A group has as many keys as a
vector has lanes, so that the next step reads neighbouring memory.

Source: Milakov and Gimelshein 2018 (Online normalizer calculation for softmax), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from .._simd import multiply_add_words
from .._typed import Array, Function, Value, vector
from .cpu_plan import EXP2, EXP2_ROUGH, LOWEST, Plan, exp2, spread
from .reference import SCRAMBLE, STEP

__all__ = ["RANDOM", "Tile", "tile"]

RANDOM = ("key", "number", "heads", "seed", "threshold")  # what decides which weights dropout takes


class Tile(Function):
    """A function for a tile of queries, with the steps that forward and backward share.

    The first query sees keys ``low`` to ``high``, the next query one key further, and so on. ``key`` is the
    number of the block's first key in its row; ``number`` is ``token * heads + head`` of the first query
    (`retained`). ``bias`` points to the bias of the first query and the first key of the block; the next
    number is the bias of the next key, the number before it the bias of the next query.

    Attributes:
        plan: The variant of the code.
        rows: Queries.
        arguments: The parameters, by name.
        floats: Kind of a vector of float32.
        ints: Kind of a vector of int32.
        first: The first key that a query sees, rounded down to a group.
        stop: The key after the last that a query sees.
    """

    def __init__(self, name: str, plan: Plan, rows: int, pointers: dict[str, Any]) -> None:
        names = ("count", "low", "high", *(RANDOM if plan.dropout else ()))
        numbers: dict[str, Any] = dict.fromkeys(names, "i64")
        pointers = pointers | ({"bias": "float*"} if plan.biased else {})
        super().__init__(name, align=1, **pointers, **numbers)
        self.plan, self.rows, self.lanes = plan, rows, plan.lanes
        self.arguments = a = SimpleNamespace(**dict(zip([*pointers, *numbers], self.parameters, strict=True)))
        self.floats, self.ints = vector(plan.lanes, "float"), vector(plan.lanes, "i32")
        self.first = self.maximum(a.low, 0) // self.lanes * self.lanes
        self.stop = self.minimum(a.count, a.high + (rows - 1))

    def columns(self) -> Iterator[tuple[Value | int, int]]:
        """Write a loop over the columns of a head: (column, 2) for pairs of vectors, then (column, 1)."""
        pairs = self.plan.width // (2 * self.lanes) * 2 * self.lanes
        with self.range(0, pairs, 2 * self.lanes) as loop:
            yield loop.i, 2
        if pairs < self.plan.width:
            yield pairs, 1

    def products(self, queries: Array, keys: Array, first: Value, groups: int) -> list[Value]:
        """Return inner products with ``groups`` groups of keys from ``first`` on, as ``[query][group]``."""
        words, lanes = self.plan.words, self.lanes
        group_words = keys.at(first * (4 * words)).cast("i32", 1)
        zeros = [self.constant(self.floats, 0)] * (self.rows * groups)
        with self.range(0, words, sums=zeros) as loop:
            key_words = group_words.at(loop.i * lanes)
            columns = [key_words.vectors(lanes)[lanes * words * g] for g in range(groups)]
            query_words = queries.cast("i32", 1).at(loop.i)
            numbers = (query_words[words * row].broadcast(lanes) for row in range(self.rows))
            loop.sums = [
                multiply_add_words(loop.sums[row * groups + g], number, column, bfloat16=self.plan.dot)
                for row, number in enumerate(numbers)
                for g, column in enumerate(columns)
            ]
        return list(loop.sums)

    def visible(self, first: Value, groups: int, scores: list[Value]) -> list[Value]:
        """Return scores ``[query][group]`` of groups of keys from ``first`` on, with their biases.

        Keys are hidden, with the score `LOWEST`, if they do not exist or are outside of the window of the
        query.
        """
        a, lanes = self.arguments, self.lanes
        if self.plan.biased:
            biases = a.bias.at(first).cast("float", 1).vectors(lanes)
            scores = [s + biases[i % groups * lanes - i // groups] for i, s in enumerate(scores)]
        left = first < a.low + (self.rows - 1)
        right = first + groups * lanes > self.minimum(a.high, a.count)
        with self.when(left | right, scores=scores) as edge:  # else all keys are visible to all queries
            count, low, span = (
                limit.to("i32").broadcast(lanes) for limit in (a.count, a.low, a.high - a.low)
            )
            result = list(scores)
            for g in range(groups):
                steps = self.constants("i32", range(g * lanes, (g + 1) * lanes))
                key = first.to("i32").broadcast(lanes) + steps
                exists, position = key < count, key - low
                for i in range(g, len(scores), groups):
                    # an unsigned comparison: neither before the window nor after it
                    near = (position - i // groups).compare("ult", span)
                    result[i] = self.where(near & exists, scores[i], self.constant(self.floats, LOWEST))
            edge.scores = result
        return list(edge.scores)

    def weighted(self, table: Array, values: Array, vectors: int) -> list[Value]:
        """Return sums of packed values, weighted by ``table``, as ``[query][vector]``."""
        plan, lanes = self.plan, self.lanes
        zeros = [self.constant(self.floats, 0)] * (self.rows * vectors)
        with self.range(self.first, self.stop, lanes, sums=zeros) as groups:
            group_weights = table.at(groups.i * (plan.packed * self.rows))
            group_values = values.at(groups.i * (plan.packed * plan.width))
            n = self.minimum(lanes, self.stop - groups.i)
            with self.range(0, n, 4 // plan.packed, sums=groups.sums) as keys:  # keys, or pairs of keys
                value_words = group_values.at(keys.i * (plan.packed * plan.width)).cast("i32", 1)
                columns = [value_words.vectors(lanes)[lanes * v] for v in range(vectors)]
                weights = group_weights.at(keys.i * plan.packed).cast("i32", 1, plan.packed * lanes)
                numbers = (weights[row].broadcast(lanes) for row in range(self.rows))
                keys.sums = [
                    multiply_add_words(keys.sums[row * vectors + v], number, column, bfloat16=plan.dot)
                    for row, number in enumerate(numbers)
                    for v, column in enumerate(columns)
                ]
            groups.sums = keys.sums
        return list(groups.sums)

    def random_states(self) -> list[Value]:
        """Return the random state of each query, in every lane; `reference.retained` is the definition."""
        a, rows = self.arguments, self.rows
        step, first, low = (number.to("i32").broadcast(rows) for number in (a.heads, a.number, a.seed))
        high = (a.seed >> 32).to("i32").broadcast(rows)
        numbers = step * self.constants("i32", range(rows)) + first
        return spread(self, _scramble(_scramble(numbers ^ low) ^ high), self.lanes)

    def retained(self, states: Sequence[Value], key: Value) -> list[Value]:
        """Return, for each query, which weights of a group of keys, from ``key`` on, are not dropped."""
        first, threshold = (
            number.to("i32").broadcast(self.lanes) for number in (key, self.arguments.threshold)
        )
        steps = (first + self.constants("i32", range(self.lanes))) * STEP
        return [_scramble(steps + state).compare("uge", threshold) for state in states]


def tile(plan: Plan, rows: int) -> Function:
    """Write the function ``tile{rows}`` of the forward, for ``rows`` queries."""
    pointers = dict.fromkeys(("queries", "keys", "values", "scores", "weights"), "u8*")
    pointers |= dict.fromkeys(("maxima", "sums", "outputs"), "float*")
    x = Tile(f"tile{rows}", plan, rows, pointers)
    a, lanes = x.arguments, plan.lanes
    maxima, sums = (array.vectors(rows) for array in (a.maxima, a.sums))

    # scores; the new maximum of each query, and the decay of what it has so far
    best = _all_scores(x)
    old = maxima[0]
    new = x.maximum(_reduce(x, best, x.maximum), old)
    maxima[0] = new
    decay = exp2(x, (old - new) * plan.scale)

    # weights and their sums
    shifts = spread(x, new, lanes)
    states = x.random_states() if plan.dropout else []
    with x.range(x.first, x.stop, lanes, sums=[x.constant(x.floats, 0)] * rows) as groups:
        groups.sums = _weigh(x, groups.i, groups.sums, shifts, states)
    sums[0] = x.fmuladd(sums[0], decay, _reduce(x, groups.sums, lambda p, q: p + q))

    # outputs: the decayed old ones plus the weighted values, which are summed up from 0 to round less
    decays = spread(x, decay, lanes)
    for column, vectors in x.columns():
        outputs = a.outputs.at(column)
        totals = x.weighted(a.weights, a.values.at(column * 4), vectors)
        for i, total in enumerate(totals):
            row, v = divmod(i, vectors)
            offset = plan.width * row + lanes * v
            output = outputs.vectors(lanes)[offset]
            outputs.vectors(lanes)[offset] = x.fmuladd(output, decays[row], total)
    return x


def _all_scores(x: Tile) -> list[Value]:
    """Store the scores of all groups of keys; return a vector per query, the maximum in each lane."""
    lanes = x.lanes
    lowest = [x.constant(x.floats, LOWEST)] * x.rows
    with x.range(x.first, x.stop - lanes, 2 * lanes, best=lowest) as pairs:
        pairs.best = _scores(x, pairs.i, 2, pairs.best)
    groups = (x.stop - x.first + (lanes - 1)) // lanes
    last = x.first + (groups - 1) * lanes
    with x.when(groups.to("i1"), best=pairs.best) as odd:  # the lowest bit
        odd.best = _scores(x, last, 1, odd.best)
    return list(odd.best)


def _scores(x: Tile, first: Value, groups: int, best: list[Value]) -> list[Value]:
    """Store the scores of ``groups`` groups of keys from ``first`` on.

    Returns:
        The maxima ``best``, a vector per query, updated by these scores.
    """
    a, lanes, best = x.arguments, x.lanes, list(best)
    scores = x.visible(first, groups, x.products(a.queries, a.keys, first, groups))
    target = a.scores.at(first * (4 * x.rows)).cast("float", 1)
    for i, score in enumerate(scores):
        row, g = divmod(i, groups)
        target.vectors(lanes)[lanes * (g * x.rows + row)] = score
        best[row] = x.maximum(score, best[row])
    return best


def _weigh(x: Tile, first: Value, sums: list[Value], shifts: list[Value], states: list[Value]) -> list[Value]:
    """Turn the scores of a group of keys into weights; return a vector per query: the sum of each lane."""
    plan, a, lanes, sums = x.plan, x.arguments, x.lanes, list(sums)
    scores = a.scores.at(first * (4 * x.rows)).cast("float", 1)
    weights = a.weights.at(first * (plan.packed * x.rows))
    retained = x.retained(states, a.key + first) if plan.dropout else []
    for row in range(x.rows):
        exponent = (scores.vectors(lanes)[lanes * row] - shifts[row]) * plan.scale
        weight = exp2(x, exponent, EXP2_ROUGH if plan.dot else EXP2)
        sums[row] = sums[row] + weight
        if plan.dropout:
            weight = x.where(retained[row], weight, 0.0)
        if plan.dot:
            weights.cast("bfloat", 1).vectors(lanes)[lanes * row] = weight.to("bfloat")
        else:
            weights.cast("float", 1).vectors(lanes)[lanes * row] = weight
    return sums


def _scramble(numbers: Value) -> Value:
    """Return `reference.scramble` of 32-bit integers."""
    for shift, factor in SCRAMBLE:
        numbers = numbers ^ (numbers >> shift)
        if factor != 1:
            numbers = numbers * factor
    return numbers


def _reduce(x: Function, vectors: list[Value], combine: Callable[[Value, Value], Any]) -> Value:
    """Reduce each vector to one number by ``combine``; return one vector of these numbers.

    All vectors are reduced together: each round halves the lanes per vector and joins two registers into one.
    """
    n, parts = len(vectors), list(vectors)
    missing: list[Any] = [None]  # the partner of the last one
    while (lanes := parts[0].lanes) * len(parts) > n:
        half = lanes * len(parts) // n // 2  # every vector has come down to twice this many lanes
        pairs = list(zip(parts[::2], parts[1::2] or missing, strict=True))
        low = [lane for lane in range(2 * lanes if len(parts) > 1 else lanes) if lane % (2 * half) < half]
        high = [lane + half for lane in low]
        parts = [combine(x.shuffle(a, b, low), x.shuffle(a, b, high)) for a, b in pairs]
    return parts[0]
