"""Exact search of few documents: all scores, term by term, then the best of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._jit import Values, array, splat
from .cpu_frame import Frame, constant

__all__ = ["MOST_DOCUMENTS", "MOST_HITS", "build_few", "write_few"]

MOST_DOCUMENTS = 4096  # the sums fill half of the first cache
MOST_HITS = 128  # each is compared with all others
_LANES, _STEP = 16, 64  # sums in a register, sums looked at in a turn
_GROUP = 4  # postings added in a turn
_DENSE = 8  # a list of more than one in so many documents is a vector
_SUMS, _BITS = f"<{_LANES} x float>", f"<{_LANES} x i32>"
_KEYS = 8  # hits compared at once
_KEY = f"<{_KEYS} x i64>"
_ROWS = (1 << 32) - 1
_ALL = (1 << 31) - 1  # above the bits of any score
_NOTHING = -0x800000  # the bits of -inf
_CLOSE = 1 << 22  # between the bits of the best score and those of the k-th, at first

Array = NDArray[Any]
Forward = tuple[Array, Array, Array, Array | None]


def build_few(forward: Forward, dim: int) -> tuple[Array, Array, Array] | None:
    """The documents of each term with their weights as they are.

    Args:
        forward: ``offsets (n + 1)``, ``terms``, ``weights`` and ``scales (n,)`` or None of the documents.
        dim: Size of the vocabulary.

    Returns:
        ``lists (dim + 1, 2)`` int32: place and number of postings, those that fill a turn up included (-1: a
        vector, a weight for each document); rows uint16 and weights float32 of postings. None if terms of a
        document are not in order, in which scores are added up.
    """
    offsets, terms, values, scales = forward
    n, lengths = len(offsets) - 1, np.diff(offsets)
    documents = np.repeat(np.arange(n), lengths)
    if (np.diff(documents * dim + terms) <= 0).any():
        return None
    values = np.asarray(values, np.float32)
    if scales is not None:
        values = values * np.repeat(scales, lengths)
    counts = np.bincount(terms, minlength=dim + 1)
    dense = counts > n // _DENSE
    sizes = np.where(dense, n + -n % _STEP, counts + -counts % _GROUP)
    by_size = np.argsort(~dense, kind="stable")  # vectors first, in whole lines of the cache
    places = np.empty(dim + 1, np.int64)
    places[by_size] = np.cumsum(sizes[by_size]) - sizes[by_size]
    order = np.argsort(terms, kind="stable")
    number = np.repeat(np.arange(dim + 1), counts)
    rank = np.arange(len(terms)) - np.repeat(np.cumsum(counts) - counts, counts)
    at = places[number] + np.where(dense[number], documents[order], rank)
    rows = (np.arange(sizes.sum()) % max(1, n)).astype(np.uint16)  # a weight of 0 adds nothing to any
    weights = np.zeros(len(rows), np.float32)
    rows[at], weights[at] = documents[order], values[order]
    return np.stack([places, np.where(dense, -1, sizes)], 1).astype(np.int32), rows, weights


def write_few() -> str:
    """The module of ``few(frame)``, for queries of any number, with ``n`` and ``k`` at most so many.

    ``refused`` is not 0 where a query has weights that are negative or not finite, or terms not in rising
    order: nothing is found for it then. Documents that score 0 fill up the hits of a query that is given as
    the caller has it (``given_kind``), and else -1 and -inf.
    """
    declarations = [
        "declare float @llvm.fma.f32(float, float, float)",
        f"declare {_SUMS} @llvm.fma.v{_LANES}f32({_SUMS}, {_SUMS}, {_SUMS})",
        f"declare i32 @llvm.vector.reduce.add.v{_LANES}i32({_BITS})",
        f"declare i32 @llvm.vector.reduce.smax.v{_LANES}i32({_BITS})",
        f"declare {_BITS} @llvm.smax.v{_LANES}i32({_BITS}, {_BITS})",
        "declare i64 @llvm.cttz.i64(i64, i1)",
        "declare i64 @llvm.ctpop.i64(i64)",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
    ]
    return "\n".join([*declarations, _add(), _choose(), _one(), _main()])


def _main() -> str:
    """The query that is given, or else all of them, each given in turn."""
    x = Frame()
    given = x.cmp("ne", x.get("given_kind"), 0)
    places = {name: x.get(name, "ptr") for name in ("rows", "scores", "q_offsets", "q_terms", "q_weights")}
    x.set("out_rows", places["rows"], "ptr")
    x.set("out_scores", places["scores"], "ptr")

    def query(i: str, refused: Values) -> Values:
        start, stop = (x.load("i64", places["q_offsets"], x.mul(x.add(i, j), 8), 8) for j in range(2))
        x.set("given", x.sub(stop, start))
        x.set("given_terms", x.at(places["q_terms"], x.mul(start, 4)), "ptr")
        x.set("given_weights", x.at(places["q_weights"], x.mul(start, 4)), "ptr")
        first = x.mul(i, x.get("k"))
        x.set("out_rows", x.at(places["rows"], x.mul(first, 8)), "ptr")
        x.set("out_scores", x.at(places["scores"], x.mul(first, 4)), "ptr")
        x.do("call void @one(ptr %f, i1 false)")
        return (x.op(f"or i64 {refused[0]}, {x.get('refused')}"),)

    def queries() -> None:
        x.set("given_kind", 1)
        x.set("refused", *x.loop(0, x.get("n_q"), 1, query, ("0",), "i64"))
        x.set("given_kind", 0)

    x.when(given, lambda: x.do("call void @one(ptr %f, i1 true)"))
    x.when(x.flip(given), queries)
    return x.function("define void @few(ptr %f)")


def _one() -> str:
    """The query that is given; ``%zeros``: documents that score 0 are hits."""
    x = Frame()
    x.set("refused", _check(x))

    def search() -> None:
        x.do("call void @add(ptr %f)")
        x.do("call void @choose(ptr %f, i1 %zeros)")

    x.when(x.cmp("eq", x.get("refused"), 0), search)
    return x.function("define internal void @one(ptr %f, i1 %zeros)")


def _term(x: Frame, j: str) -> tuple[str, str, str]:
    """A term of the query, its weight, the place of its list's record; unknown ones have an empty list."""
    place = x.at(x.get("given_terms", "ptr"), x.mul(x.mul(j, 4), x.get("given_kind")))
    number = x.op(f"zext i32 {x.load('i32', place, align=4)} to i64")  # the lower half of 64 bits is first
    weight = x.load("float", x.get("given_weights", "ptr"), x.mul(j, 4), 4)
    return number, weight, x.at(x.get("few_lists", "ptr"), x.mul(x.minimum(number, x.get("dim")), 8))


def _check(x: Frame) -> str:
    """Fetch the lists; returns an i64, not 0 if the query is not as it should be."""

    def one(j: str, state: Values) -> Values:
        number, weight, record = _term(x, j)
        first = x.op(f"sext i32 {x.load('i32', record, 0, 4)} to i64")
        x.prefetch(x.at(x.get("few_rows", "ptr"), x.mul(first, 2)))
        x.prefetch(x.at(x.get("few_weights", "ptr"), x.mul(first, 4)))
        finite = x.cmp("olt", weight, constant(float("inf")), "float")
        fine = x.both(x.both(finite, x.cmp("oge", weight, "0.0", "float")), x.cmp("sgt", number, state[0]))
        return number, x.op(f"or i64 {state[1]}, {x.op(f'zext i1 {x.flip(fine)} to i64')}")

    return x.loop(0, x.get("given"), 1, one, ("-1", "0"), "i64")[1]


def _add() -> str:
    """The scores of all documents; -1 behind the last, to the end of a turn."""
    x = Frame()
    sums, n = x.get("sums", "ptr"), x.get("n")
    rows, weights = x.get("few_rows", "ptr"), x.get("few_weights", "ptr")
    last = _lanes(x, n)
    lanes = array(_LANES, "i32", range(_LANES))

    def clear(i: str, _: Values) -> None:
        number = x.op(f"add {_BITS} {lanes}, {_lanes(x, i)}")
        there = x.op(f"icmp slt {_BITS} {number}, {last}")
        start = x.op(
            f"select <{_LANES} x i1> {there}, {_SUMS} zeroinitializer, {_SUMS} {splat(_LANES, 'float', -1)}"
        )
        x.store(_SUMS, start, sums, x.mul(i, 4), 64)

    length = x.op(f"and i64 {x.add(n, _STEP - 1)}, {-_STEP}")
    x.set("length", length)
    x.loop(0, length, _LANES, clear)

    def term(j: str, _: Values) -> None:
        _number, weight, record = _term(x, j)
        first, count = (x.op(f"sext i32 {x.load('i32', record, part, 4)} to i64") for part in (0, 4))
        own_rows, own = x.at(rows, x.mul(first, 2)), x.at(weights, x.mul(first, 4))

        def group(i: str, _: Values) -> None:
            for place in (x.add(i, number) for number in range(_GROUP)):
                row = x.op(f"zext i16 {x.load('i16', own_rows, x.mul(place, 2), 2)} to i64")
                value, at = x.load("float", own, x.mul(place, 4), 4), x.at(sums, x.mul(row, 4))
                total = f"float {value}, float {weight}, float {x.load('float', at, align=4)}"
                x.store("float", x.op(f"call float @llvm.fma.f32({total})"), at, align=4)

        def vector() -> None:
            many = x.broadcast(_LANES, "float", weight)

            def turn(i: str, _: Values) -> None:
                value, total = (x.load(_SUMS, place, x.mul(i, 4), 4) for place in (own, sums))
                total = f"{_SUMS} {value}, {_SUMS} {many}, {_SUMS} {total}"
                x.store(_SUMS, x.op(f"call {_SUMS} @llvm.fma.v{_LANES}f32({total})"), sums, x.mul(i, 4), 64)

            x.loop(0, length, _LANES, turn)

        x.loop(0, count, _GROUP, group)
        x.when(x.cmp("slt", count, 0), vector)

    x.loop(0, x.get("given"), 1, term)
    return x.function("define internal void @add(ptr %f)")


def _choose() -> str:
    """The k best: find a score that hardly more documents reach, and sort those.

    Scores are not negative, and compared as whole numbers. A hit is one 64-bit key, as in a heap.
    """
    x = Frame()
    most = x.add(x.add(x.get("k"), x.op(f"lshr i64 {x.get('k')}, 2")), 4)
    _narrow(x, most)
    _take(x, x.cmp("sgt", x.get("number"), most))
    _sort(x)
    few = x.cmp("slt", x.get("number"), x.get("k"))  # damaged weights may be negative, or no numbers
    x.set("refused", x.op(f"zext i1 {few} to i64"))
    return x.function("define internal void @choose(ptr %f, i1 %zeros)")


def _turn(x: Frame, i: str) -> list[str]:
    """The scores of a turn, as whole numbers."""
    sums = x.get("sums", "ptr")
    return [x.load(_BITS, sums, x.mul(x.add(i, part), 4), 64) for part in range(0, _STEP, _LANES)]


def _lanes(x: Frame, value: str) -> str:
    """An i64 in all lanes of 32 bits."""
    return x.broadcast(_LANES, "i32", x.op(f"trunc i64 {value} to i32"))


def _narrow(x: Frame, most: str) -> None:
    """Halve what lies between ``low``, which k or more reach, and ``top``, until few do or nothing does."""
    length, k, start = x.get("length"), x.get("k"), ("zeroinitializer",) * (_STEP // _LANES)
    greater = f"call {_BITS} @llvm.smax.v{_LANES}i32"

    def higher(i: str, state: Values) -> Values:
        pairs = zip(state, _turn(x, i), strict=True)
        return tuple(x.op(f"{greater}({_BITS} {a}, {_BITS} {b})") for a, b in pairs)

    highest, *others = x.loop(0, length, _STEP, higher, start, _BITS)
    for other in others:
        highest = x.op(f"{greater}({_BITS} {highest}, {_BITS} {other})")
    highest = x.op(f"call i32 @llvm.vector.reduce.smax.v{_LANES}i32({_BITS} {highest})")
    top = x.add(x.op(f"zext i32 {highest} to i64"), 1)
    for name, value in (("low", "0"), ("top", top), ("number", x.get("n")), ("want", str(_CLOSE))):
        x.set(name, value)

    def halve() -> str:
        low, top, step = x.get("low"), x.get("top"), x.get("want")
        x.set("want", x.mul(step, 2))
        middle = x.op(f"lshr i64 {x.add(low, top)}, 1")
        middle = x.select(x.cmp("eq", low, 0), x.maximum(x.sub(top, step), 1), middle)
        least = _lanes(x, middle)

        def count(i: str, state: Values) -> Values:
            masks = [x.op(f"icmp sge {_BITS} {values}, {least}") for values in _turn(x, i)]
            ones = [x.op(f"sext <{_LANES} x i1> {mask} to {_BITS}") for mask in masks]
            return tuple(x.op(f"sub {_BITS} {a}, {b}") for a, b in zip(state, ones, strict=True))

        total, *others = x.loop(0, length, _STEP, count, start, _BITS)
        for other in others:
            total = x.op(f"add {_BITS} {total}, {other}")
        total = x.op(f"call i32 @llvm.vector.reduce.add.v{_LANES}i32({_BITS} {total})")
        number = x.op(f"zext i32 {total} to i64")
        reached = x.cmp("sge", number, k)
        x.set("low", x.select(reached, middle, low))
        x.set("top", x.select(reached, top, middle))
        x.set("number", x.select(reached, number, x.get("number")))
        apart = x.cmp("sgt", x.sub(x.get("top"), x.get("low")), 1)
        return x.both(apart, x.cmp("sgt", x.get("number"), most))

    x.repeat(halve)


def _take(x: Frame, many: str) -> None:
    """Keys of the documents that reach ``low``; if ``many`` have this score, the first after all others."""
    sums, keys, low, top = x.get("sums", "ptr"), x.get("chosen", "ptr"), x.get("low"), x.get("top")
    x.set("number", 0)

    def part(p: str, _: Values) -> None:
        rest = x.cmp("eq", p, 1)
        least = _lanes(x, x.select(x.both(many, x.flip(rest)), top, low))
        limit = _lanes(x, x.select(rest, top, _ALL))

        def look(i: str, _: Values) -> None:
            values = x.load(_BITS, sums, x.mul(i, 4), 64)
            reached = x.op(f"icmp sge {_BITS} {values}, {least}")
            inside = x.op(f"and <{_LANES} x i1> {reached}, {x.op(f'icmp slt {_BITS} {values}, {limit}')}")
            mask = x.op(f"bitcast <{_LANES} x i1> {inside} to i{_LANES}")
            x.set("place", x.op(f"zext i{_LANES} {mask} to i64"))

            def one() -> str:
                word, number = x.get("place"), x.get("number")
                row = x.add(i, x.op(f"call i64 @llvm.cttz.i64(i64 {word}, i1 true)"))
                bits = x.op(f"zext i32 {x.load('i32', sums, x.mul(row, 4), 4)} to i64")
                key = x.op(f"or i64 {x.op(f'shl i64 {bits}, 32')}, {x.sub(_ROWS, row)}")
                x.store("i64", key, keys, x.mul(number, 8), 8)
                x.set("number", x.add(number, 1))
                x.set("place", x.op(f"and i64 {word}, {x.sub(word, 1)}"))
                return x.cmp("ne", x.get("place"), 0)

            wanted = x.either(x.flip(rest), x.cmp("slt", x.get("number"), x.get("k")))
            x.when(x.both(wanted, x.cmp("ne", x.get("place"), 0)), lambda: x.repeat(one))

        x.loop(0, x.get("length"), _LANES, look)

    x.loop(0, x.select(many, 2, 1), 1, part)


def _sort(x: Frame) -> None:
    """Put each hit behind all of higher keys."""
    keys, number = x.get("chosen", "ptr"), x.get("number")
    x.store(_KEY, splat(_KEYS, "i64", -1), keys, x.mul(number, 8), 8)

    def one(i: str, _: Values) -> None:
        key = x.load("i64", keys, x.mul(i, 8), 8)
        own = x.broadcast(_KEYS, "i64", key)

        def better(j: str, state: Values) -> Values:
            mask = x.op(f"icmp sgt {_KEY} {x.load(_KEY, keys, x.mul(j, 8), 8)}, {own}")
            ones = x.op(f"zext i{_KEYS} {x.op(f'bitcast <{_KEYS} x i1> {mask} to i{_KEYS}')} to i64")
            return (x.add(state[0], x.op(f"call i64 @llvm.ctpop.i64(i64 {ones})")),)

        (place,) = x.loop(0, number, _KEYS, better, ("0",), "i64")

        def put() -> None:
            hit = x.either("%zeros", x.cmp("sgt", key, _ROWS))  # above: the bits of the score
            row = x.sub(_ROWS, x.op(f"and i64 {key}, {_ROWS}"))
            x.store("i64", x.select(hit, row, -1), x.place("out_rows", place, "i64"), align=8)
            bits = x.op(f"trunc i64 {x.op(f'lshr i64 {key}, 32')} to i32")
            bits = x.select(hit, bits, _NOTHING, "i32")
            x.store("i32", bits, x.place("out_scores", place, "float"), align=4)

        x.when(x.cmp("slt", place, x.get("k")), put)

    x.loop(0, number, 1, one)
