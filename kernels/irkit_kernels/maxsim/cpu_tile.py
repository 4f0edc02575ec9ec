"""The code of MaxSim on the CPU, in LLVM IR: tiles of document tokens x query tokens, and the loops.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

Each query token has one lane. A tile broadcasts 4 or 8 document tokens, word by word, and multiplies them
with two vectors of query tokens. Its 8 or 16 sums, and then the running maxima, stay in registers, so the
similarities are never stored and nothing is added across lanes. A word has 32 bits: a float32, 2 bfloat16 or
4 int8.

Documents that are stored in fewer bits than the queries are converted to float32 part by part, once for all
queries, so that the numbers are multiplied while they are in the cache.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

from .._simd import dot_bytes, multiply_add_words
from .._typed import Function, Struct, Value, module, vector

__all__ = ["FRAME", "PART", "Plan", "write_maxsim"]

FRAME = Struct(  # the arguments of the code, 64 bits each: addresses, then sizes
    8,
    **dict.fromkeys(("rows", "queries"), "u8*"),
    **{"shift": "i32*", "query_scales": "float*", "query_offsets": "i32*", "first": "i32*"},
    **{"documents": "u8*", "document_scales": "float*", "document_offsets": "i32*"},
    **{"pairs": "i64*", "argmax_offsets": "i64*", "out": "float*", "argmax": "i32*"},
    **{"best": "float*", "best_token": "i32*"},
    **dict.fromkeys(("n_rows", "words", "n_q", "n_d", "start", "stop"), "i64"),
    converted="float*",
)

_VECTORS = 2  # of query tokens
_AHEAD = 8  # document tokens between those being multiplied and those being prefetched
PART = 32  # document tokens that are converted together, at most
_INTERLEAVED = ((0, 4, 1, 5), (2, 6, 3, 7))  # lanes of 2 vectors; two rounds of it transpose 4 vectors
_SIGN = -0x7F7F7F80  # 0x80808080: makes 4 signed bytes unsigned, adding 128 to each
_STORED = {"float16": ("half", 2), "int8": ("i8", 1)}  # kinds of numbers that are converted, and their bytes


class Plan(NamedTuple):
    """The variant of the code.

    Attributes:
        kind: float32, bfloat16 (AVX512-BF16) or int8 (AVX512-VNNI).
        lanes: 32-bit numbers per vector register; 16 for bfloat16 and int8.
        paired: Score a list of pairs, otherwise all queries against all documents.
        stored: For float32: how documents are stored, float16 or int8 with scales; empty if as they are.
    """

    kind: str
    lanes: int
    paired: bool
    stored: str = ""

    @property
    def packed(self) -> int:
        """Numbers per word."""
        return {"float32": 1, "bfloat16": 2, "int8": 4}[self.kind]

    @property
    def rows(self) -> int:
        """Document tokens per tile; the last ones of a document take smaller tiles.

        Two sums per row hide the latency of multiply-adds and fit into half of the vector registers:
        AVX2 has 16, AVX-512 and NEON have 32.
        """
        return 4 if self.lanes == 8 else 8

    @property
    def floats(self) -> str:
        """Kind of a vector of float32."""
        return vector(self.lanes, "float")

    @property
    def ints(self) -> str:
        """Kind of a vector of int32."""
        return vector(self.lanes, "i32")


def write_maxsim(plan: Plan) -> str:
    """Return the LLVM IR module of ``maxsim(frame)``; the frame holds the arguments, see `FRAME`."""
    sizes = [plan.rows >> i for i in range(plan.rows.bit_length())]
    tiles = [_tile(plan, vectors, rows) for vectors in range(1, _VECTORS + 1) for rows in sizes]
    return module(*tiles, _sum(plan), _pack(plan), *([_convert(plan)] if plan.stored else []), _main(plan))


def _convert(plan: Plan) -> Function:
    """Convert ``count`` rows of ``words`` numbers to float32, times a scale each if they are int8."""
    kind, _ = _STORED[plan.stored]
    sides: dict[str, Any] = {"source": f"{kind}*", "scales": "float*", "target": "float*"}
    x = Function("convert", align=1, **sides, count="i64", words="i64")
    source, scales, target, count, words = x.parameters
    whole = words - words % plan.lanes
    with x.range(0, count) as rows:
        numbers, results = source.at(rows.i * words), target.at(rows.i * words)
        scale = scales[rows.i] if kind == "i8" else None

        def converted(number: Value) -> Value:
            if scale is None:
                return number.to("float")
            factor = scale.broadcast(plan.lanes) if number.lanes else scale
            return number.to("i32").to("float") * factor

        with x.range(0, whole, plan.lanes) as loop:
            results.vectors(plan.lanes)[loop.i] = converted(numbers.vectors(plan.lanes)[loop.i])
        with x.range(whole, words) as rest:
            results[rest.i] = converted(numbers[rest.i])
    return x


def _tile(plan: Plan, vectors: int, rows: int) -> Function:
    """Update ``best`` and ``best_token`` for vectors of query tokens by ``rows`` document tokens.

    The row of the first document token is ``token``. Meanwhile the tokens of the next tile are fetched, from
    ``ahead``: as many at once as a tile has would wait for each other.
    """
    sides: dict[str, Any] = dict.fromkeys(("queries", "documents", "ahead"), "u8*")
    others: dict[str, Any] = {
        "words": "i64",
        "token": "i32",
        "best": "float*",
        "best_token": "i32*",
        "shift": "i32*",
    }
    x = Function(
        f"tile{vectors}x{rows}",
        align=1,
        **sides,
        **others,
        scales="float*",
    )
    queries, documents, ahead, words, token, best, best_token, shift, scales = x.parameters
    lanes, size, int8 = plan.lanes, 4 * plan.lanes, plan.kind == "int8"
    bests, best_tokens, shifts = (array.vectors(lanes) for array in (best, best_token, shift))
    row_size = words * 4
    query_vectors = [queries.at(words * size * v).cast(plan.ints, 1) for v in range(vectors)]
    document_words = [documents.at(row_size * row).cast("i32", 1) for row in range(rows)]
    fetched = rows * (_STORED[plan.stored][1] if plan.stored else 4)  # bytes of a word of all rows

    # inner products, word by word
    zeros = [x.constant(plan.ints if int8 else plan.floats, 0)] * (rows * vectors)
    with x.range(0, words, sums=zeros) as loop:
        query = [words_of_query[loop.i] for words_of_query in query_vectors]
        x.prefetch(ahead.at(loop.i * fetched))
        sums = []
        for row in range(rows):
            document = document_words[row][loop.i].broadcast(lanes)
            if int8:
                document = document ^ _SIGN
            for v in range(vectors):
                total = loop.sums[row * vectors + v]
                if int8:  # the instruction wants the unsigned factor first
                    sums.append(dot_bytes(total, document, query[v], vnni=True))
                else:
                    bfloat16 = plan.kind == "bfloat16"
                    sums.append(multiply_add_words(total, document, query[v], bfloat16=bfloat16))
        loop.sums = sums

    # running maxima
    for v in range(vectors):
        best, best_token = bests[lanes * v], best_tokens[lanes * v]
        shift = shifts[lanes * v] if int8 else None
        for row in range(rows):
            similarity = loop.sums[row * vectors + v]
            if int8:
                exact = similarity - shift
                scale = scales[row].broadcast(lanes)
                similarity = exact.to("float") * scale
            # the first of equal ones stays; NaN is larger than all numbers, so it shows in the score
            larger = similarity.compare("ugt", best) & best.compare("ord", best)
            document_token = (token + row).broadcast(lanes)
            best = x.where(larger, similarity, best)
            best_token = x.where(larger, document_token, best_token)
        bests[lanes * v], best_tokens[lanes * v] = best, best_token
    return x


def _sum(plan: Plan) -> Function:
    """Store the sum of ``best`` over the query tokens ``start`` to ``stop`` in ``out``."""
    x = Function("sum", align=1, best="float*", start="i64", stop="i64", out="float*")
    best, start, stop, out = x.parameters
    whole = stop - (stop - start) % plan.lanes
    with x.range(start, whole, plan.lanes, total=x.constant(plan.floats, 0)) as vectors:
        vectors.total += best.vectors(plan.lanes)[vectors.i]
    zero = x.constant("float", 0)
    total = x.intrinsic("vector.reduce.fadd", "float", zero, vectors.total, flags="reassoc")
    with x.range(whole, stop, total=total) as rest:
        rest.total += best[rest.i]
    out[0] = rest.total
    return x


def _pack(plan: Plan) -> Function:
    """Pack rows as ``[vector][word][lane]``; the unused lanes after the last row repeat it."""
    x = Function("pack", align=1, rows="u8*", n_rows="i64", words="i64", queries="u8*")
    rows, n_rows, words, queries = x.parameters
    lanes = plan.lanes
    last, row_size = n_rows - 1, words * 4
    with x.range(0, (n_rows + (lanes - 1)) & -lanes, 4) as fours:
        row_numbers = [x.minimum(fours.i + k, last) for k in range(4)]
        sources = [rows.at(number * row_size).cast("i32", 1) for number in row_numbers]
        lane = fours.i % lanes
        target = queries.at((fours.i - lane) * row_size + lane * 4)
        whole = words & -4

        # transpose squares of 4 rows x 4 words
        with x.range(0, whole, 4) as loop:
            square = [source.vectors(4)[loop.i] for source in sources]
            for _round in range(2):
                square = [
                    x.shuffle(square[k], square[k + 2], order) for k in range(2) for order in _INTERLEAVED
                ]
            packed_words = target.cast(vector(4, "i32"), 1, 4 * lanes)
            for k, word in enumerate(square):
                packed_words[loop.i + k] = word

        # the words that are left, one by one
        packed_bytes = target.cast("i32", 1, 1)
        with x.range(whole, words) as loop:
            for k, source in enumerate(sources):
                offset = loop.i * (4 * lanes) + 4 * k
                packed_bytes[offset] = source[loop.i]
    return x


def _main(plan: Plan) -> Function:
    """Run jobs ``start`` to ``stop``: pairs, or documents against all queries.

    First, ``rows`` are packed into ``queries`` as ``[vector][word][lane]`` (unless null). ``shift`` and
    ``query_scales`` have the order of the lanes. Queries are packed back to back; if ``paired``, query i
    starts at lane 0 of vector ``first[i]``. ``argmax`` may be null; if ``paired``, the argmax of job i starts
    at ``argmax_offsets[i]``. ``best`` and ``best_token`` are scratch memory for the tokens of a job, in whole
    vectors; ``converted`` is for `PART` document tokens, where `Plan.stored` says that they are converted.
    """
    x = Function("maxsim", public=True, align=1, frame=FRAME)
    (frame,) = x.parameters
    names = [name for name in FRAME.fields if plan.stored or name != "converted"]
    f = SimpleNamespace(**{name: getattr(frame, name) for name in names})  # each is loaded once
    lanes = plan.lanes

    with x.when(f.rows.exists()):
        x.call("pack", f.rows, f.n_rows, f.words, f.queries)

    with x.range(f.start, f.stop) as jobs:
        # the document and the queries of the job, and their tokens
        if plan.paired:
            pairs = f.pairs.cast("i64", 1, 1)
            query, document = (pairs[jobs.i * 16 + offset] for offset in (0, 8))
            last_query = query + 1
        else:
            query, document, last_query = x.constant("i64", 0), jobs.i, f.n_q
        begin, end = (f.document_offsets[document + k].to("i64") for k in range(2))
        token, last_token = (f.query_offsets[number].to("i64") for number in (query, last_query))
        tokens, count = last_token - token, end - begin
        first_lane = f.first[query].to("i64") * lanes if plan.paired else x.constant("i64", 0)

        # no maximum yet: the first document token, or -1 if there is none
        first = x.where(count > 0, begin.to("i32"), -1).broadcast(lanes)
        with x.range(0, tokens, lanes) as blocks:
            f.best.vectors(lanes)[blocks.i] = x.constant(plan.floats, -math.inf)
            f.best_token.vectors(lanes)[blocks.i] = first

        # maxima over a part of the document, for two vectors of query tokens at a time; a part that only two
        # vectors are multiplied with is a tile, which the first cache holds
        part = x.where(tokens > _VECTORS * lanes, PART, plan.rows) if plan.stored else count
        with x.range(0, count, part) if plan.stored else nullcontext() as parts:
            row, rows = begin, count
            if parts is not None:
                row, rows = begin + parts.i, x.minimum(count - parts.i, part)
                kind, size = _STORED[plan.stored]
                source = f.documents.at(row * f.words * size).cast(kind, 1)
                x.call("convert", source, f.document_scales.at(row), f.converted, rows, f.words)
            with x.range(0, tokens, _VECTORS * lanes) as blocks:
                many = tokens - blocks.i > lanes
                for vectors in (2, 1):
                    test, lane = many if vectors == 2 else ~many, first_lane + blocks.i
                    with x.when(test):
                        _block(x, plan, vectors, f, lane, blocks.i, row, rows)
        if plan.kind == "int8":
            with x.when(count > 0), x.range(0, tokens, lanes) as blocks:
                scale = f.query_scales.vectors(lanes)[first_lane + blocks.i]
                best = f.best.vectors(lanes)
                best[blocks.i] = best[blocks.i] * scale

        # scores: sums of the maxima of each query
        with x.range(query, last_query) as queries:
            start, stop = (f.query_offsets[queries.i + k].to("i64") - token for k in range(2))
            position = jobs.i if plan.paired else queries.i * f.n_d + jobs.i
            x.call("sum", f.best, start, stop, f.out.at(position))

        with x.when(f.argmax.exists()):
            start = f.argmax_offsets[jobs.i] if plan.paired else jobs.i * tokens
            x.call("llvm.memcpy.p0.p0.i64", f.argmax.at(start), f.best_token, tokens * 4, False)
    return x


def _block(
    x: Function,
    plan: Plan,
    vectors: int,
    f: SimpleNamespace,
    lane: Value,
    query_token: Value,
    row: Value,
    count: Value,
) -> None:
    """Update the maxima of one or two vectors of query tokens, from ``lane``, by some document tokens."""
    best, best_token = f.best.at(query_token), f.best_token.at(query_token)
    shift, queries = f.shift.at(lane), f.queries.at(lane * f.words * 4)
    size, ahead = (_STORED[plan.stored][1], PART) if plan.stored else (4, _AHEAD)

    def tile(rows: int, start: Value) -> None:
        first = row + start
        if plan.stored:
            documents = f.converted.at(start * f.words).cast("u8", 1)
        else:
            documents = f.documents.at(first * f.words * size)
        fetched = f.documents.at((first + ahead) * f.words * size)
        tensors = (best, best_token, shift, f.document_scales.at(first))
        x.call(f"tile{vectors}x{rows}", queries, documents, fetched, f.words, first.to("i32"), *tensors)

    rows = plan.rows
    with x.range(0, count & -rows, rows) as loop:
        tile(rows, loop.i)
    rows //= 2
    while rows:
        more, start = (count & rows) != 0, count & -2 * rows
        with x.when(more):
            tile(rows, start)
        rows //= 2
