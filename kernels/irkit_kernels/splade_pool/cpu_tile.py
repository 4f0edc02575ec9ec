"""The code of pooled maxima on the CPU, in LLVM IR: tiles of terms x tokens, and the loops.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

Each token has one lane. A tile broadcasts 4 or 8 rows of the vocabulary matrix, word by word and straight
from the matrix, and multiplies them with two vectors of tokens. Its 8 or 16 sums stay in registers until they
are logits. The logits of these terms for a block of tokens (16 KB at most) stay in the first-level cache for
the maxima of the sequences. A word has 32 bits: a float32 or 2 bfloat16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._simd import multiply_add_words
from .._typed import Carried, Function, Value, module, vector

__all__ = ["BLOCK", "Plan", "write_ir"]

BLOCK = 512  # tokens per block, at most
_VECTORS = 2  # of tokens
_LAST = 2**31 - 1


@dataclass(frozen=True)
class Plan:
    """The variant of the code.

    Attributes:
        kind: float32 or bfloat16 (AVX512-BF16).
        lanes: 32-bit numbers per vector register; 16 for bfloat16.
    """

    kind: str
    lanes: int

    @property
    def packed(self) -> int:
        """Numbers per word."""
        return {"float32": 1, "bfloat16": 2}[self.kind]

    @property
    def rows(self) -> int:
        """Terms per tile; the last ones take smaller tiles.

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


def write_ir(plan: Plan) -> str:
    """Return the LLVM IR module of ``splade_pool`` as text; `_main` lists its arguments."""
    sizes = [plan.rows >> i for i in range(plan.rows.bit_length())]
    tiles = [_tile(plan, vectors, rows) for vectors in range(1, _VECTORS + 1) for rows in sizes]
    return module(*tiles, _maximum(plan), _main(plan))


def _tile(plan: Plan, vectors: int, rows: int) -> Function:
    """Compute the logits of ``rows`` terms for vectors of tokens; rows of ``logits`` are `BLOCK` long."""
    name = f"tile{vectors}x{rows}"
    x = Function(name, align=1, tokens="u8*", weight="u8*", words="i64", logits="float*")
    tokens, weight, words, logits = x.parameters
    lanes, row_size = plan.lanes, words * 4
    token_vectors = [tokens.at(words * (4 * lanes) * v).cast(plan.ints, 1) for v in range(vectors)]
    term_words = [weight.at(row_size * row).cast("i32", 1) for row in range(rows)]
    ahead = weight.at(row_size * rows)

    zeros = [x.constant(plan.floats, 0)] * (rows * vectors)
    with x.range(0, words, sums=zeros) as loop:
        token = [words_of_token[loop.i] for words_of_token in token_vectors]
        x.prefetch(ahead.at(loop.i * (4 * rows)))
        sums = []
        for row in range(rows):
            term = term_words[row][loop.i].broadcast(lanes)
            for v in range(vectors):
                total = loop.sums[row * vectors + v]
                sums.append(multiply_add_words(total, term, token[v], bfloat16=plan.kind == "bfloat16"))
        loop.sums = sums

    for i, total in enumerate(loop.sums):
        row, v = divmod(i, vectors)
        logits.vectors(lanes)[BLOCK * row + lanes * v] = total
    return x


def _maximum(plan: Plan) -> Function:
    """Update ``best`` and, unless null, ``best_token`` by ``count`` > 0 logits from token ``token`` on."""
    x = Function(
        "maximum", align=1, logits="float*", count="i64", token="i32", best="float*", best_token="i32*"
    )
    logits, count, token, best, best_token = x.parameters
    lanes, floats, ints = plan.lanes, plan.floats, plan.ints
    steps, first = x.constants("i32", range(lanes)), token.broadcast(lanes)

    def update(state: Carried, i: Value, inside: Value | None) -> None:
        """Take over the larger logits from ``i`` on, and their tokens, carried as the bits of floats."""
        new = logits.vectors(lanes)[i]
        larger = _larger(new, state.best)
        if inside is not None:
            larger = larger & inside
        offset = i.to("i32").broadcast(lanes)
        new_token = (first + offset + steps).cast(floats)
        state.best = x.where(larger, new, state.best)
        state.token = x.where(larger, new_token, state.token)

    # the maximum of each lane
    first_token = first.cast(floats)
    whole = count & -lanes
    with x.range(0, whole, lanes, best=x.constant(floats, -math.inf), token=first_token) as loop:
        update(loop, loop.i, None)
    left = (count - whole).to("i32").broadcast(lanes)
    inside = steps < left
    with x.when(whole != count, best=loop.best, token=loop.token) as tail:
        update(tail, whole, inside)

    # the maximum of all lanes; the reduction may lose NaN
    high = x.intrinsic("vector.reduce.fmax", "float", tail.best, flags="nnan")
    has_nan = x.intrinsic("vector.reduce.or", "i1", tail.best.compare("uno", tail.best))
    high = x.where(has_nan, math.nan, high)
    with x.when(_larger(high, best[0])):
        best[0] = high
        with x.when(best_token.exists()):  # the first token that has the maximum
            equal = tail.best.compare("ueq", high.broadcast(lanes))
            tokens = x.where(equal, tail.token.cast(ints), _LAST)
            best_token[0] = x.intrinsic("vector.reduce.smin", "i32", tokens)
    return x


def _larger(new: Value, old: Value) -> Value:
    """Return whether ``new`` is the maximum: the first of equal ones stays; NaN is the largest of all."""
    return new.compare("ugt", old) & old.compare("ord", old)


def _main(plan: Plan) -> Function:
    """Compute the maxima of terms ``start`` to ``stop``: ``best (n, v)`` and, unless null, ``best_token``.

    Tokens are packed as ``[vector][word][lane]``. Block ``b`` has ``block_size`` tokens, a multiple of two
    vectors, which belong to sequences ``spans[b, 0]`` to ``spans[b, 1]``. ``weight`` starts with term
    ``start``. ``logits`` is scratch memory of `Plan.rows` rows and a vector.
    """
    x = Function(
        "splade_pool",
        public=True,
        align=1,
        **{"packed": "u8*", "weight": "u8*", "offsets": "i32*", "spans": "u8*", "best": "u8*"},
        **{"best_token": "u8*", "logits": "float*"},
        **dict.fromkeys(("words", "tokens", "block_size", "v", "start", "stop"), "i64"),
    )
    packed, weight, offsets, spans, best, best_token, logits, *numbers = x.parameters
    words, tokens, block_size, v, start, stop = numbers
    lanes, row_size, vector_size = plan.lanes, words * 4, words * (4 * plan.lanes)
    n_blocks = (tokens + block_size - 1) // block_size
    with_token = best_token.exists()

    # Block by block, so that its tokens stay in the cache while all terms pass.
    with x.range(0, n_blocks) as blocks:
        first = blocks.i * block_size
        count = x.minimum(tokens - first, block_size)
        span = spans.cast("i64", 1, 1)
        first_sequence, last_sequence = (span[blocks.i * 16 + k] for k in (0, 8))
        packed_block = packed.at(first // lanes * vector_size)

        def terms(rows: int, term: Value) -> None:
            """Compute the logits of ``rows`` terms for the block, then the maxima of its sequences."""
            weight_rows = weight.at((term - start) * row_size)

            def tile(vectors: int, token: Value) -> None:
                packed_tokens = packed_block.at(token // lanes * vector_size)
                x.call(f"tile{vectors}x{rows}", packed_tokens, weight_rows, words, logits.at(token))

            pairs = (count + (lanes - 1)) & -_VECTORS * lanes
            with x.range(0, pairs, _VECTORS * lanes) as loop:
                tile(_VECTORS, loop.i)
            with x.when(pairs < count):
                tile(1, pairs)
            with x.range(first_sequence, last_sequence) as sequences:
                maxima(rows, term, sequences.i)

        def maxima(rows: int, term: Value, sequence: Value) -> None:
            """Update the maxima of a sequence by its tokens that are in the block."""
            begin, end = (offsets[sequence + k].to("i64") for k in range(2))
            begin, end = x.maximum(begin, first), x.minimum(end, first + count)
            length, token = end - begin, begin.to("i32")
            sequence_logits = logits.at(begin - first)
            with x.when(length > 0):
                for row in range(rows):
                    output = (sequence * v + term + row) * 4
                    token_output = x.where(with_token, best_token.at(output), "null")
                    row_logits = sequence_logits.at(BLOCK * row)
                    x.call("maximum", row_logits, length, token, best.at(output), token_output)

        # as many terms as a tile has, then half as many, until 1
        n_terms, rows = stop - start, plan.rows
        with x.range(start, start + (n_terms & -rows), rows) as loop:
            terms(rows, loop.i)
        rows //= 2
        while rows:
            more, term = (n_terms & rows) != 0, start + (n_terms & -2 * rows)
            with x.when(more):
                terms(rows, term)
            rows //= 2
    return x
