"""The machine code of MaxSim on the CPU, in LLVM IR: tiles of document tokens x query tokens, and the loops.

A lane belongs to a query token. A tile broadcasts word after word of 8 document tokens against two vectors of
query tokens; its 16 sums, and then the running maxima, stay in registers: no similarity reaches memory, and
nothing is added across lanes. A word is 32 bits: a float32, 2 bfloat16 or 4 int8.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

from .._jit import DOT4, Code, Values, splat

__all__ = ["ARGUMENTS", "Plan", "write_maxsim"]

ARGUMENTS = (  # of the code, 64 bits each: addresses, then sizes
    *("rows", "queries", "shift", "query_scales", "query_offsets", "first"),
    *("documents", "document_scales", "document_offsets", "pairs", "argmax_offsets", "out", "argmax"),
    *("best", "place"),
    *("n_rows", "words", "n_q", "n_d", "start", "stop"),
)

_ROWS = (8, 4, 2, 1)  # document tokens of a tile; the last 7 of a document take smaller ones
_VECTORS = 2  # of query tokens: with 8 rows 16 sums, enough to hide the latency of a multiply-add
_AHEAD = 8  # document tokens from what is multiplied to what is fetched from memory
_INTERLEAVED = ((0, 4, 1, 5), (2, 6, 3, 7))  # of 2 vectors; done twice to 4, it transposes them
_SIGN = -0x7F7F7F80  # 0x80808080: makes 4 signed bytes unsigned, adding 128 to each


class Plan(NamedTuple):
    """What the code is written for.

    Attributes:
        kind: float32, bfloat16 (AVX512-BF16) or int8 (AVX512-VNNI).
        lanes: 32-bit numbers in a vector register; 16 but for float32.
        paired: Score a list of pairs, otherwise all queries against all documents.
    """

    kind: str
    lanes: int
    paired: bool

    @property
    def packed(self) -> int:
        """Numbers in a word."""
        return {"float32": 1, "bfloat16": 2, "int8": 4}[self.kind]

    @property
    def floats(self) -> str:
        """LLVM's type of a vector of float32."""
        return f"<{self.lanes} x float>"

    @property
    def ints(self) -> str:
        """LLVM's type of a vector of int32."""
        return f"<{self.lanes} x i32>"


def write_maxsim(plan: Plan) -> str:
    """The LLVM module of ``maxsim(frame)``, the frame being the `ARGUMENTS`."""
    floats, n = plan.floats, plan.lanes
    parts = [
        f"declare {floats} @llvm.fmuladd.v{n}f32({floats}, {floats}, {floats})",
        f"declare float @llvm.vector.reduce.fadd.v{n}f32(float, {floats})",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
        "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)",
    ]
    if plan.kind == "bfloat16":
        halves = f"<{2 * n} x bfloat>"
        parts.append(f"declare {floats} @llvm.x86.avx512bf16.dpbf16ps.512({floats}, {halves}, {halves})")
    if plan.kind == "int8":
        parts.append(DOT4)
    tiles = [_tile(plan, vectors, rows) for vectors in range(1, _VECTORS + 1) for rows in _ROWS]
    return "\n".join([*parts, *tiles, _sum(plan), _pack(plan), _main(plan)])


def _tile(plan: Plan, vectors: int, rows: int) -> str:
    """Update ``best`` and ``place`` of query tokens by document tokens, the first being ``%token``."""
    c, floats, lanes = Code(), plan.floats, plan.lanes
    size, row_size = 4 * lanes, c.mul("%words", 4)
    queries = [c.at("%queries", c.mul(c.mul("%words", size), v)) for v in range(vectors)]
    documents = [c.at("%documents", c.mul(row_size, row)) for row in range(rows)]
    ahead = c.at("%documents", c.mul(row_size, _AHEAD))

    def multiply(word: str, sums: Values) -> Values:
        query = [c.load(plan.ints, pointer, c.mul(word, size)) for pointer in queries]
        c.do(f"call void @llvm.prefetch.p0(ptr {c.at(ahead, c.mul(word, 4 * rows))}, i32 0, i32 3, i32 1)")
        result = []
        for row, pointer in enumerate(documents):
            document = c.broadcast(lanes, "i32", c.load("i32", pointer, c.mul(word, 4)))
            if plan.kind == "int8":
                document = c.op(f"xor {plan.ints} {document}, {splat(lanes, 'i32', _SIGN)}")
            result += [_dot(c, plan, sums[row * vectors + v], document, query[v]) for v in range(vectors)]
        return tuple(result)

    kind = plan.ints if plan.kind == "int8" else floats
    sums = c.loop(0, "%words", 1, multiply, ("zeroinitializer",) * (rows * vectors), kind)
    for v in range(vectors):
        best, place = c.load(floats, "%best", size * v), c.load(plan.ints, "%place", size * v)
        shift = c.load(plan.ints, "%shift", size * v) if plan.kind == "int8" else ""
        for row in range(rows):
            similarity = sums[row * vectors + v]
            if plan.kind == "int8":
                exact = c.op(f"sub {plan.ints} {similarity}, {shift}")
                scale = c.broadcast(lanes, "float", c.load("float", "%scales", 4 * row))
                similarity = c.op(f"sitofp {plan.ints} {exact} to {floats}")
                similarity = c.op(f"fmul {floats} {similarity}, {scale}")
            # the first of equals stays; NaN counts as highest, so that it is seen
            above = c.op(f"fcmp ugt {floats} {similarity}, {best}")
            number = c.op(f"fcmp ord {floats} {best}, {best}")
            take = c.op(f"and <{lanes} x i1> {above}, {number}")
            token = c.broadcast(lanes, "i32", c.op(f"add i32 %token, {row}"))
            best = c.op(f"select <{lanes} x i1> {take}, {floats} {similarity}, {floats} {best}")
            place = c.op(f"select <{lanes} x i1> {take}, {plan.ints} {token}, {plan.ints} {place}")
        c.store(floats, best, "%best", size * v)
        c.store(plan.ints, place, "%place", size * v)
    return c.function(
        f"define internal void @tile{vectors}x{rows}(ptr %queries, ptr %documents, i64 %words, i32 %token, "
        "ptr %best, ptr %place, ptr %shift, ptr %scales)"
    )


def _dot(c: Code, plan: Plan, total: str, document: str, query: str) -> str:
    ints, floats = plan.ints, plan.floats
    if plan.kind == "int8":  # the unsigned factor comes first
        return c.dot4(total, document, query)
    kind = floats if plan.kind == "float32" else f"<{2 * plan.lanes} x bfloat>"
    a, b = (f"{kind} {c.op(f'bitcast {ints} {x} to {kind}')}" for x in (document, query))
    if plan.kind == "float32":
        return c.op(f"call {floats} @llvm.fmuladd.v{plan.lanes}f32({a}, {b}, {floats} {total})")
    return c.op(f"call {floats} @llvm.x86.avx512bf16.dpbf16ps.512({floats} {total}, {a}, {b})")


def _sum(plan: Plan) -> str:
    """Store the sum of ``best`` from query token ``%start`` up to ``%stop``."""
    c, floats = Code(), plan.floats
    whole = c.sub("%stop", c.op(f"srem i64 {c.sub('%stop', '%start')}, {plan.lanes}"))
    (lanes,) = c.loop(
        "%start",
        whole,
        plan.lanes,
        lambda i, state: (c.op(f"fadd {floats} {state[0]}, {c.load(floats, '%best', c.mul(i, 4))}"),),
        ("zeroinitializer",),
        floats,
    )
    total = c.op(f"call reassoc float @llvm.vector.reduce.fadd.v{plan.lanes}f32(float 0.0, {floats} {lanes})")
    (total,) = c.loop(
        whole,
        "%stop",
        1,
        lambda i, state: (c.op(f"fadd float {state[0]}, {c.load('float', '%best', c.mul(i, 4))}"),),
        (total,),
        "float",
    )
    c.store("float", total, "%out")
    return c.function("define internal void @sum(ptr %best, i64 %start, i64 %stop, ptr %out)")


def _pack(plan: Plan) -> str:
    """Rows as ``[vector][word][lane]``; lanes beyond the last row repeat it, and nobody reads them."""
    c, lanes = Code(), plan.lanes
    last, row_size = c.sub("%n_rows", 1), c.mul("%words", 4)

    def four(row: str, _: Values) -> None:
        given = [c.minimum(c.add(row, i), last) for i in range(4)]
        sources = [c.at("%rows", c.mul(i, row_size)) for i in given]
        lane = c.op(f"srem i64 {row}, {lanes}")
        target = c.at("%queries", c.add(c.mul(c.sub(row, lane), row_size), c.mul(lane, 4)))

        def transpose(word: str, _: Values) -> None:
            x = [c.load("<4 x i32>", source, c.mul(word, 4)) for source in sources]
            for _turn in range(2):
                x = [c.shuffle("i32", 4, x[i], x[i + 2], order) for i in range(2) for order in _INTERLEAVED]
            for i, lanes_of_word in enumerate(x):
                c.store("<4 x i32>", lanes_of_word, target, c.mul(c.add(word, i), 4 * lanes))

        def move(word: str, _: Values) -> None:
            for i, source in enumerate(sources):
                place = c.add(c.mul(word, 4 * lanes), 4 * i)
                c.store("i32", c.load("i32", source, c.mul(word, 4)), target, place)

        whole = c.op("and i64 %words, -4")
        c.loop(0, whole, 4, transpose)
        c.loop(whole, "%words", 1, move)

    c.loop(0, c.op(f"and i64 {c.add('%n_rows', lanes - 1)}, {-lanes}"), 4, four)
    return c.function("define internal void @pack(ptr %rows, i64 %n_rows, i64 %words, ptr %queries)")


def _main(plan: Plan) -> str:
    """Jobs from number ``start`` up to ``stop``: pairs, or documents against all queries.

    ``queries`` is packed as ``[vector][word][lane]``: done first, from ``n_rows`` of ``rows``, unless that is
    null. ``shift`` and ``query_scales`` are in the order of its lanes. Queries lie back to back; if
    ``paired`` each begins a vector, number ``first`` of its row. ``argmax`` may be null; that of job ``i``
    begins at ``argmax_offsets[i]`` if ``paired``. ``best`` and ``place`` are scratch memory for the tokens of
    a job, in whole vectors.
    """
    c, lanes = Code(), plan.lanes
    for number, name in enumerate(ARGUMENTS):
        kind = "ptr" if number < ARGUMENTS.index("n_rows") else "i64"
        c.do(f"%{name} = load {kind}, ptr {c.at('%frame', 8 * number)}")

    def job(item: str, _: Values) -> None:
        document, first, last = item, "0", "%n_q"  # rows of queries
        if plan.paired:
            first, document = (c.load("i64", "%pairs", c.add(c.mul(item, 16), at)) for at in (0, 8))
            last = c.add(first, 1)
        begin, end = (_entry(c, "%document_offsets", c.add(document, i)) for i in range(2))
        token, last_token = (_entry(c, "%query_offsets", row) for row in (first, last))
        tokens, count = c.sub(last_token, token), c.sub(end, begin)
        lane = c.mul(_entry(c, "%first", first), lanes) if plan.paired else "0"

        def block(at: str, _: Values) -> None:
            many = c.op(f"icmp sgt i64 {c.sub(tokens, at)}, {lanes}")
            c.when(many, partial(_block, c, plan, 2, c.add(lane, at), at, begin, count))
            few = c.op(f"xor i1 {many}, true")
            c.when(few, partial(_block, c, plan, 1, c.add(lane, at), at, begin, count))

        def total(row: str, _: Values) -> None:
            start, stop = (c.sub(_entry(c, "%query_offsets", c.add(row, i)), token) for i in range(2))
            place = item if plan.paired else c.add(c.mul(row, "%n_d"), item)
            c.do(f"call void @sum(ptr %best, i64 {start}, i64 {stop}, ptr {c.at('%out', c.mul(place, 4))})")

        def keep() -> None:
            first = c.load("i64", "%argmax_offsets", c.mul(item, 8)) if plan.paired else c.mul(item, tokens)
            target = c.at("%argmax", c.mul(first, 4))
            size = c.mul(tokens, 4)
            c.do(f"call void @llvm.memcpy.p0.p0.i64(ptr {target}, ptr %place, i64 {size}, i1 false)")

        c.loop(0, tokens, _VECTORS * lanes, block)
        c.loop(first, last, 1, total)
        c.when(c.op("icmp ne ptr %argmax, null"), keep)

    pack = "call void @pack(ptr %rows, i64 %n_rows, i64 %words, ptr %queries)"
    c.when(c.op("icmp ne ptr %rows, null"), lambda: c.do(pack))
    c.loop("%start", "%stop", 1, job)
    return c.function("define void @maxsim(ptr %frame)")


def _block(c: Code, plan: Plan, vectors: int, lane: str, at: str, begin: str, count: str) -> None:
    """All tokens of a document against the query tokens of one or two vectors, which begin at ``lane``."""
    size = 4 * plan.lanes
    best, place, shift, query_scales = (
        c.at(pointer, c.mul(index, 4))
        for pointer, index in (("%best", at), ("%place", at), ("%shift", lane), ("%query_scales", lane))
    )
    queries = c.at("%queries", c.mul(c.mul(lane, "%words"), 4))
    some = c.op(f"icmp sgt i64 {count}, 0")
    token = c.op(f"select i1 {some}, i32 {c.op(f'trunc i64 {begin} to i32')}, i32 -1")
    for v in range(vectors):
        c.store(plan.floats, splat(plan.lanes, "float", -math.inf), best, size * v)
        c.store(plan.ints, c.broadcast(plan.lanes, "i32", token), place, size * v)

    def tile(rows: int, start: str, _: Values = ()) -> None:
        row = c.add(begin, start)
        documents = c.at("%documents", c.mul(c.mul(row, "%words"), 4))
        scales = c.at("%document_scales", c.mul(row, 4))
        token = c.op(f"trunc i64 {row} to i32")
        c.do(
            f"call void @tile{vectors}x{rows}(ptr {queries}, ptr {documents}, i64 %words, i32 {token}, "
            f"ptr {best}, ptr {place}, ptr {shift}, ptr {scales})"
        )

    c.loop(0, c.op(f"and i64 {count}, {-_ROWS[0]}"), _ROWS[0], partial(tile, _ROWS[0]))
    for rows in _ROWS[1:]:
        more = c.op(f"icmp ne i64 {c.op(f'and i64 {count}, {rows}')}, 0")
        c.when(more, partial(tile, rows, c.op(f"and i64 {count}, {-2 * rows}")))

    def scale() -> None:
        for v in range(vectors):
            factors = c.load(plan.floats, query_scales, size * v)
            value = c.op(f"fmul {plan.floats} {c.load(plan.floats, best, size * v)}, {factors}")
            c.store(plan.floats, value, best, size * v)

    if plan.kind == "int8":
        c.when(some, scale)


def _entry(c: Code, offsets: str, row: str) -> str:
    return c.op(f"sext i32 {c.load('i32', offsets, c.mul(row, 4))} to i64")
