"""The part of ``exact_maxsim`` that makes the maxima of a document exact, in LLVM IR.

Scores of 8 bits bound the exact score of every pair of a query token and a document token: it differs from
them by at most ``|a|`` times an error of the centroids plus ``|b|`` times an error of the levels, which are
known for each query token (`cpu_kernel.exact_query`). So a pair whose upper bound is below the highest lower
bound of its query token is not the maximum. About one or two document tokens are left for each query token.
They are decoded to float32, once for all query tokens that need them, and multiplied with these.
"""

from __future__ import annotations

from .._typed import Array, Value
from .cpu_tile import FLOATS, LANES, Header, Writer

__all__ = ["ENTRY", "refine", "write_error"]

_SUMS = 4  # sums of a product, which do not wait for each other
_AHEAD = 8  # tokens between the one being decoded and the one whose centroid is prefetched
ENTRY = 4  # words of an entry of the list of tokens:
_WORDS = ("token", "block", "bits", "centroid")


def write_error(x: Writer, a: Value, b: Value, block: Value) -> list[Value]:
    """Return how far the scores of a token with coefficients ``a`` and ``b`` may be from the exact ones."""
    magnitudes = [x.intrinsic("fabs", FLOATS, coefficient) for coefficient in (a, b)]
    rows = [x.words(x.arguments.errors.at((x.arguments.blocks * k + block) * x.plan.lanes)) for k in (0, 1)]
    pairs = zip(*rows, strict=True)
    return [x.fmuladd(magnitudes[1], levels, magnitudes[0] * centroid) for centroid, levels in pairs]


def refine(
    x: Writer, start: Value, stop: Value, bests: Array, nbits: int, width: int, dim: int, table: list[Value]
) -> None:
    """Replace lower bounds of the maxima of a document by the exact maxima.

    Args:
        x: The function, whose parameter ``uppers`` has the upper bounds of all scores of the document.
        start: The first token of the document.
        stop: The token after its last.
        bests: The highest lower bound of each query token.
        nbits: Bits per number of a token.
        width: Bytes per packed token.
        dim: Numbers of a token.
        table: The result of `Writer.lookup_table`.
    """
    a, lanes, words = x.arguments, x.plan.lanes, ENTRY
    chunks = -(-dim // LANES)
    last = x.constants("i1", [LANES * (chunks - 1) + lane < dim for lane in range(LANES)])

    # list the tokens that may be a maximum, with a bit for each query token
    with x.range(start, stop, count=0) as tokens:
        with x.range(0, a.blocks, count=tokens.count) as blocks:
            part, best_words = x.block(blocks.i), bests.at(blocks.i * lanes)
            uppers = x.words(a.uppers.at(((tokens.i - start) * a.blocks + blocks.i) * lanes))
            bits = x.constant("u32", 0)
            for v, (upper, low) in enumerate(zip(uppers, x.words(best_words), strict=True)):
                exists = x.words(part.header, Header.FLOOR)[v] < float("inf")
                may = upper.compare("uge", low) & exists
                bits = bits | (may.cast("u16").to("u32") << (LANES * v))
            entry = a.listed.at(blocks.count * words)
            number = x.centroid(a.codes, tokens.i)
            for k, word in enumerate((tokens.i - start, blocks.i, bits, number)):  # in the order of _WORDS
                entry[k] = word.to("u32")
            blocks.count += (bits != 0).to("i64")
        tokens.count = blocks.count

    with x.range(0, tokens.count) as entries:
        entry = a.listed.at(entries.i * words)
        ahead = a.listed.at(x.minimum(entries.i + _AHEAD, tokens.count - 1) * words)
        x.prefetch_bytes(a.centroids.at(ahead[_WORDS.index("centroid")].to("i64") * dim), 4 * dim)
        position, block, bits, number = (entry[k] for k in range(words))
        token, block_number = start + position.to("i64"), block.to("i64")
        best_words = bests.at(block_number * lanes)
        # decode the token
        x.unpack(a.packed.at(token * width), a.scratch, nbits, width, table)
        of_centroid, of_levels = (x.half(a.coefficients[token * 2 + k]) for k in (0, 1))
        centroid = a.centroids.at(number.to("i64") * dim)
        for chunk in range(chunks):
            row = centroid.at(LANES * chunk)
            c = x.masked_load(row, last, align=4) if chunk == chunks - 1 else row.vectors(LANES)[0]
            level = (a.scratch.vectors(LANES)[LANES * chunk].to("i32") - 128).to("float")
            a.decoded.vectors(LANES)[LANES * chunk] = x.fmuladd(of_levels, level, c * of_centroid)
        # multiply it with these query tokens
        with x.range(0, bits.count_ones().to("i64"), bits=bits) as pairs:
            lane = pairs.bits.lowest_bit().to("i64")
            pairs.bits = pairs.bits & (pairs.bits - 1)
            query = a.floats.at((block_number * lanes + lane) * (chunks * LANES))
            sums = [x.constant(FLOATS, 0)] * _SUMS
            for chunk in range(chunks):
                numbers, weights = (array.vectors(LANES)[LANES * chunk] for array in (a.decoded, query))
                sums[chunk % _SUMS] = x.fmuladd(numbers, weights, sums[chunk % _SUMS])
            product = x.total((sums[0] + sums[1]) + (sums[2] + sums[3]))
            best_words[lane] = x.maximum(product, best_words[lane])
