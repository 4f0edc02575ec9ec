"""The machine code of the pooled maxima on the CPU, in LLVM IR: tiles of terms x tokens, and the loops.

A lane belongs to a token. A tile broadcasts word after word of 8 rows of the vocabulary matrix, straight from
where they lie, against two vectors of tokens; its 16 sums stay in registers until they are logits. The logits
of 8 terms for a block of tokens (16 KB at most) wait in the first-level cache for the maxima of the
sequences. A word is 32 bits: a float32 or 2 bfloat16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from .._jit import Code, Values, array, splat

__all__ = ["BLOCK", "ROWS", "Plan", "write_ir"]

BLOCK = 512  # tokens of a block, at most
ROWS = 8  # terms of a tile; the last 7 take smaller ones
_VECTORS = 2  # of tokens: with 8 rows 16 sums, enough to hide the latency of a multiply-add
_LAST = 2**31 - 1


@dataclass(frozen=True)
class Plan:
    """What the code is written for.

    Attributes:
        kind: float32 or bfloat16 (AVX512-BF16).
        lanes: Numbers of 32 bits in a vector register; 16 but for float32.
    """

    kind: str
    lanes: int

    @property
    def packed(self) -> int:
        """Numbers in a word."""
        return {"float32": 1, "bfloat16": 2}[self.kind]

    @property
    def floats(self) -> str:
        """LLVM's type of a vector of float32."""
        return f"<{self.lanes} x float>"

    @property
    def ints(self) -> str:
        """LLVM's type of a vector of int32."""
        return f"<{self.lanes} x i32>"


def write_ir(plan: Plan) -> str:
    """The LLVM module of ``splade_pool``, whose arguments are listed in `_main`."""
    floats, n = plan.floats, plan.lanes
    parts = [
        f"declare {floats} @llvm.fmuladd.v{n}f32({floats}, {floats}, {floats})",
        f"declare float @llvm.vector.reduce.fmax.v{n}f32({floats})",
        f"declare i1 @llvm.vector.reduce.or.v{n}i1(<{n} x i1>)",
        f"declare i32 @llvm.vector.reduce.smin.v{n}i32({plan.ints})",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
    ]
    if plan.kind == "bfloat16":
        halves = f"<{2 * n} x bfloat>"
        parts.append(f"declare {floats} @llvm.x86.avx512bf16.dpbf16ps.512({floats}, {halves}, {halves})")
    sizes = [ROWS >> i for i in range(ROWS.bit_length())]
    tiles = [_tile(plan, vectors, rows) for vectors in range(1, _VECTORS + 1) for rows in sizes]
    return "\n".join([*parts, *tiles, _maximum(plan), _main(plan)])


def _tile(plan: Plan, vectors: int, rows: int) -> str:
    """Logits of ``rows`` terms and ``vectors`` vectors of tokens; rows of ``logits`` are `BLOCK` long."""
    c, size = Code(), 4 * plan.lanes
    row_size = c.mul("%words", 4)
    tokens = [c.at("%tokens", c.mul(c.mul("%words", size), v)) for v in range(vectors)]
    terms = [c.at("%weight", c.mul(row_size, row)) for row in range(rows)]
    ahead = c.at("%weight", c.mul(row_size, rows))

    def multiply(word: str, sums: Values) -> Values:
        token = [c.load(plan.ints, pointer, c.mul(word, size)) for pointer in tokens]
        c.do(f"call void @llvm.prefetch.p0(ptr {c.at(ahead, c.mul(word, 4 * rows))}, i32 0, i32 3, i32 1)")
        result = []
        for row, pointer in enumerate(terms):
            term = c.broadcast(plan.lanes, "i32", c.load("i32", pointer, c.mul(word, 4)))
            result += [_dot(c, plan, sums[row * vectors + v], term, token[v]) for v in range(vectors)]
        return tuple(result)

    zeros = ("zeroinitializer",) * (rows * vectors)
    for i, logits in enumerate(c.loop(0, "%words", 1, multiply, zeros, plan.floats)):
        c.store(plan.floats, logits, "%logits", 4 * BLOCK * (i // vectors) + size * (i % vectors))
    return c.function(
        f"define internal void @tile{vectors}x{rows}(ptr %tokens, ptr %weight, i64 %words, ptr %logits)"
    )


def _dot(c: Code, plan: Plan, total: str, term: str, token: str) -> str:
    kind = plan.floats if plan.kind == "float32" else f"<{2 * plan.lanes} x bfloat>"
    a, b = (f"{kind} {c.op(f'bitcast {plan.ints} {x} to {kind}')}" for x in (term, token))
    if plan.kind == "float32":
        return c.op(f"call {plan.floats} @llvm.fmuladd.v{plan.lanes}f32({a}, {b}, {plan.floats} {total})")
    return c.op(f"call {plan.floats} @llvm.x86.avx512bf16.dpbf16ps.512({plan.floats} {total}, {a}, {b})")


def _maximum(plan: Plan) -> str:
    """Update ``best`` and, unless null, ``place`` by ``count`` > 0 logits, the first of token ``%token``."""
    c, floats, ints, lanes = Code(), plan.floats, plan.ints, plan.lanes
    mask, steps = f"<{lanes} x i1>", array(lanes, "i32", range(lanes))
    first = c.broadcast(lanes, "i32", "%token")

    def update(inside: str | None, i: str, state: Values) -> Values:
        best, place = state  # the places are carried as the bits of floats
        logits = c.load(floats, "%logits", c.mul(i, 4))
        take = _above(c, mask, floats, logits, best)
        if inside:
            take = c.op(f"and {mask} {take}, {inside}")
        offset = c.broadcast(lanes, "i32", c.op(f"trunc i64 {i} to i32"))
        token = c.op(f"add {ints} {c.op(f'add {ints} {first}, {offset}')}, {steps}")
        token = c.op(f"bitcast {ints} {token} to {floats}")
        return tuple(
            c.op(f"select {mask} {take}, {floats} {new}, {floats} {old}")
            for new, old in ((logits, best), (token, place))
        )

    start = (splat(lanes, "float", -math.inf), c.op(f"bitcast {ints} {first} to {floats}"))
    whole = c.op(f"and i64 %count, {-lanes}")
    state = c.loop(0, whole, lanes, partial(update, None), start, floats)
    left = c.broadcast(lanes, "i32", c.op(f"trunc i64 {c.sub('%count', whole)} to i32"))
    inside = c.op(f"icmp slt {ints} {steps}, {left}")
    some = c.op(f"icmp ne i64 {whole}, %count")
    best, place = c.when(some, partial(update, inside, whole, state), state, floats)
    high = c.op(f"call nnan float @llvm.vector.reduce.fmax.v{lanes}f32({floats} {best})")
    broken = c.op(f"fcmp uno {floats} {best}, {best}")
    broken = c.op(f"call i1 @llvm.vector.reduce.or.v{lanes}i1({mask} {broken})")
    high = c.op(f"select i1 {broken}, float 0x7FF8000000000000, float {high}")

    def keep() -> None:
        c.store("float", high, "%best")
        c.when(c.op("icmp ne ptr %place, null"), keep_place)

    def keep_place() -> None:
        equal = c.op(f"fcmp ueq {floats} {best}, {c.broadcast(lanes, 'float', high)}")
        places = c.op(f"bitcast {floats} {place} to {ints}")
        places = c.op(f"select {mask} {equal}, {ints} {places}, {ints} {splat(lanes, 'i32', _LAST)}")
        least = c.op(f"call i32 @llvm.vector.reduce.smin.v{lanes}i32({ints} {places})")
        c.store("i32", least, "%place")

    c.when(_above(c, "i1", "float", high, c.load("float", "%best")), keep)
    return c.function(
        "define internal void @maximum(ptr %logits, i64 %count, i32 %token, ptr %best, ptr %place)"
    )


def _above(c: Code, mask: str, kind: str, new: str, old: str) -> str:
    """Whether ``new`` is the maximum: the first of equals stays; NaN counts as highest, so it is seen."""
    above = c.op(f"fcmp ugt {kind} {new}, {old}")
    return c.op(f"and {mask} {above}, {c.op(f'fcmp ord {kind} {old}, {old}')}")


def _main(plan: Plan) -> str:
    """Maxima of terms ``%start`` up to ``%stop``: ``best`` and, unless null, ``place``, both ``(n, v)``.

    Tokens are packed as ``[vector][word][lane]``; block ``b`` holds ``block_size`` of them, a multiple of two
    vectors, and touches sequences ``spans[b, 0]`` up to ``spans[b, 1]``. ``weight`` begins with term
    ``%start``. ``logits`` is scratch memory of `ROWS` rows and a vector.
    """
    c, lanes = Code(), plan.lanes
    row_size, vector_size = c.mul("%words", 4), c.mul("%words", 4 * lanes)

    def block(number: str, _: Values) -> None:
        first = c.mul(number, "%block_size")
        count = c.minimum(c.sub("%tokens", first), "%block_size")
        begin, end = (c.load("i64", "%spans", c.add(c.mul(number, 16), at)) for at in (0, 8))
        packed = c.at("%packed", c.mul(c.op(f"sdiv i64 {first}, {lanes}"), vector_size))

        def terms(rows: int, term: str, _: Values = ()) -> None:
            weight = c.at("%weight", c.mul(c.sub(term, "%start"), row_size))

            def tile(vectors: int, at: str, _: Values = ()) -> None:
                place = c.at(packed, c.mul(c.op(f"sdiv i64 {at}, {lanes}"), vector_size))
                logits = c.at("%logits", c.mul(at, 4))
                c.do(f"call void @tile{vectors}x{rows}(ptr {place}, ptr {weight}, i64 %words, ptr {logits})")

            pairs = c.op(f"and i64 {c.add(count, lanes - 1)}, {-_VECTORS * lanes}")
            c.loop(0, pairs, _VECTORS * lanes, partial(tile, _VECTORS))
            c.when(c.op(f"icmp slt i64 {pairs}, {count}"), partial(tile, 1, pairs))
            c.loop(begin, end, 1, partial(sequence, rows, term))

        def sequence(rows: int, term: str, number: str, _: Values) -> None:
            start, stop = (
                c.op(f"sext i32 {c.load('i32', '%offsets', c.mul(c.add(number, i), 4))} to i64")
                for i in range(2)
            )
            start, stop = c.maximum(start, first), c.minimum(stop, c.add(first, count))
            length, token = c.sub(stop, start), c.op(f"trunc i64 {start} to i32")
            logits = c.at("%logits", c.mul(c.sub(start, first), 4))

            def maxima() -> None:
                for row in range(rows):
                    at = c.mul(c.add(c.add(c.mul(number, "%v"), term), row), 4)
                    place = c.op(f"select i1 %with_place, ptr {c.at('%place', at)}, ptr null")
                    c.do(
                        f"call void @maximum(ptr {c.at(logits, 4 * BLOCK * row)}, i64 {length}, i32 {token}, "
                        f"ptr {c.at('%best', at)}, ptr {place})"
                    )

            c.when(c.op(f"icmp sgt i64 {length}, 0"), maxima)

        count_of_terms = c.sub("%stop", "%start")
        whole = c.add("%start", c.op(f"and i64 {count_of_terms}, {-ROWS}"))
        c.loop("%start", whole, ROWS, partial(terms, ROWS))
        rest = ROWS // 2
        while rest:
            some = c.op(f"icmp ne i64 {c.op(f'and i64 {count_of_terms}, {rest}')}, 0")
            at = c.add("%start", c.op(f"and i64 {count_of_terms}, {-2 * rest}"))
            c.when(some, partial(terms, rest, at))
            rest //= 2

    blocks = c.op(f"sdiv i64 {c.sub(c.add('%tokens', '%block_size'), 1)}, %block_size")
    c.lines.append("  %with_place = icmp ne ptr %place, null")
    c.loop(0, blocks, 1, block)
    return c.function(
        "define void @splade_pool(ptr %packed, ptr %weight, ptr %offsets, ptr %spans, ptr %best, ptr %place, "
        "ptr %logits, i64 %words, i64 %tokens, i64 %block_size, i64 %v, i64 %start, i64 %stop)"
    )
