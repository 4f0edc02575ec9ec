"""The code that scores centroids and documents, in LLVM IR: the steps of a search after PLAID.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

A search narrows the candidates: `write_table` scores all centroids, `cpu_probe` finds documents by their
centroids, `write_interaction` scores these roughly, with each token replaced by its centroid, and
`write_maxsim` scores the best of them by their compressed tokens.

Source: Santhanam et al. 2022 (PLAID), section 4.
"""

from __future__ import annotations

from .._typed import Value, module, vector
from .cpu_exact import refine, write_error
from .cpu_tile import (
    FLOATS,
    GROUP,
    INTS,
    LANES,
    LOWEST,
    TABLE,
    TILE,
    Header,
    Plan,
    Writer,
    unsigned,
)

__all__ = ["write_interaction", "write_maxsim", "write_table"]

_AHEAD = 4 * TILE  # tokens prefetched: the processor cannot predict where the next document starts
_NEXT = 8  # `interaction` prefetches the codes of the document that comes so many documents later
_CODES = 128  # codes of a document that it prefetches, at most


def write_table(plan: Plan) -> str:
    """Return the LLVM IR of ``query_table``: scores of all centroids, also as bytes, and maxima of groups."""
    numbers = {"rows": "i64", "blocks": "i64"}
    x = Writer("query_table", plan, **TABLE, centroids="u8*", scales="float*", **numbers)
    a, lanes = x.arguments, plan.lanes

    def byte(score: Value, factor: Value, offset: Value) -> Value:
        level = x.maximum(x.fmuladd(score, factor, offset), 0).to("i32")
        return x.intrinsic("umin", INTS, level, x.constant(INTS, 255)).to("u8")

    with x.range(0, a.blocks) as blocks:
        part = x.block(blocks.i)
        bias = x.words(part.header.cast("i32", 1), Header.BIAS)
        factor, offset = (x.words(part.header, row) for row in (Header.FACTOR, Header.OFFSET))
        with x.range(0, a.rows, GROUP) as groups:
            lowest = [x.constant(FLOATS, LOWEST)] * plan.vectors
            with x.range(groups.i, groups.i + GROUP, TILE, best=lowest) as tiles:
                # a tile of 4 centroids
                first = tiles.i * lanes
                sums = x.dots(a.centroids.at(tiles.i * plan.dim), plan.dim, part.query, bias)
                scales, best = a.scales.at(tiles.i), list(tiles.best)
                scores, levels = part.scores.at(first).vectors(LANES), part.bytes.at(first).vectors(LANES)
                for r in range(TILE):
                    scale = scales[r].broadcast(LANES)
                    for v in x.vectors:
                        score = sums[r][v].to("float") * scale
                        scores[r * lanes + LANES * v] = score
                        levels[r * lanes + LANES * v] = byte(score, factor[v], offset[v])
                        best[v] = x.maximum(score, best[v])
                tiles.best = best
            x.store_words(part.maxima.at(groups.i.cast("u64") // GROUP * lanes), tiles.best)
    return module(x)


def write_interaction(plan: Plan, code: str) -> str:
    """Return the LLVM IR of ``interaction``: sums of maxima of bytes, for codes of LLVM type ``code``."""
    kinds = {"codes": f"{unsigned(code)}*", "offsets": "i64*", "documents": "i32*", "out": "i32*"}
    numbers = dict.fromkeys(("items", "last", "rows", "blocks"), "i64")
    x = Writer("interaction", plan, **TABLE, **kinds, **numbers)
    a, lanes = x.arguments, plan.lanes

    with x.range(0, a.items) as documents:
        start, stop = x.token_range(documents.i)

        # prefetch the offsets of a later document, and the codes of the one whose offsets have arrived
        final = a.items - 1
        x.prefetch_bytes(x.offsets_at(x.minimum(documents.i + 2 * _NEXT, final)), 16)
        following, end = x.token_range(x.minimum(documents.i + _NEXT, final))
        for line in range(0, _CODES, 64 // a.codes.step):  # no further than its last code
            x.prefetch_bytes(a.codes.at(x.minimum(following + line, end - 1)), 1)

        # The last tile overlaps the one before it: a maximum may see tokens twice.
        tail, last = x.maximum(start, stop - TILE), stop - 1
        with x.range(0, a.blocks, total=x.constant("i32", 0)) as blocks:
            levels = x.block(blocks.i).bytes.vectors(lanes)
            best = x.constant(vector(lanes, "u8"), 0)
            for first, end in ((start, tail), (tail, stop)):
                with x.range(first, end, TILE, best=best) as tiles:
                    if end is tail:
                        tokens = [tiles.i + r for r in range(TILE)]
                    else:
                        tokens = [x.minimum(tiles.i + r, last) for r in range(TILE)]
                    for token in tokens:
                        row = levels[x.centroid(a.codes, token) * lanes]
                        tiles.best = x.intrinsic("umax", row.kind, tiles.best, row)
                best = tiles.best
            blocks.total += x.intrinsic("vector.reduce.add", "i32", best.to("i32"))
        a.out[documents.i] = blocks.total
    return module(x)


def write_maxsim(plan: Plan, code: str, nbits: int, width: int, dim: int = 0) -> str:
    """Return the LLVM IR of ``residual_maxsim``, for tokens of ``width`` bytes and codes of type ``code``.

    Scratch memory holds the unpacked tokens of a tile, then the best scores of the document so far. With the
    number of dimensions ``dim`` it is ``exact_maxsim``: the best scores are lower bounds of the exact ones,
    until `cpu_exact.refine` makes them exact from the upper bounds of all scores of the document.
    """
    kinds = {"codes": f"{unsigned(code)}*", "coefficients": "i16*", "packed": "u8*", "offsets": "i64*"}
    kinds |= {"levels": "u8*", "documents": "i32*", "out": "float*", "scratch": "u8*"}
    if dim:
        kinds |= dict.fromkeys(("centroids", "floats", "errors", "uppers", "decoded"), "float*")
        kinds |= {"listed": "u32*"}
    numbers = dict.fromkeys(("items", "last", "rows", "blocks"), "i64")
    x = Writer("exact_maxsim" if dim else "residual_maxsim", plan, **TABLE, **kinds, **numbers)
    a, lanes, stride = x.arguments, plan.lanes, plan.stride(nbits, width)
    bests, table = a.scratch.at(TILE * stride).cast("float", 1), x.lookup_table()

    with x.range(0, a.items) as documents:
        start, stop = x.token_range(documents.i)
        following, _end = x.token_range(x.minimum(documents.i + 1, a.items - 1))
        x.prefetch_bytes(a.packed.at(following * width), _AHEAD * width)
        x.prefetch_bytes(a.codes.at(following), _AHEAD * a.codes.step)
        x.prefetch_bytes(a.coefficients.at(following * 2), _AHEAD * 4)
        last = stop - 1
        with x.range(0, a.blocks * (4 * lanes), 4 * LANES) as bytes_:
            bests.cast(FLOATS, 1, step=1)[bytes_.i] = LOWEST

        with x.range(start, stop, TILE) as tiles:
            # prefetch the next tile
            ahead = x.minimum(tiles.i + _AHEAD, last)
            x.prefetch_bytes(a.packed.at(ahead * width), TILE * width)
            for r in range(TILE):
                token = x.minimum(tiles.i + (TILE + r), last)
                x.prefetch_bytes(a.scores.at(x.centroid(a.codes, token) * lanes), 4 * lanes)

            # unpack the tokens; the last token of the document fills up its tile
            tokens = [x.minimum(tiles.i + r, last) for r in range(TILE)]
            for r, token in enumerate(tokens):
                x.unpack(a.packed.at(token * width), a.scratch.at(r * stride), nbits, width, table)
            coefficients = [a.coefficients.at(token * 2) for token in tokens]
            of_centroid, of_levels = ([x.half(pair[k]) for pair in coefficients] for k in (0, 1))
            rows = [x.centroid(a.codes, token) * lanes for token in tokens]

            # maxima of a * (score of the centroid) + b * (product with the levels)
            with x.range(0, a.blocks) as blocks:
                part, best_words = x.block(blocks.i), bests.at(blocks.i * lanes)
                bias, best = x.words(part.header.cast("i32", 1), Header.BIAS), x.words(best_words)
                sums = x.dots(a.scratch, stride, part.query, bias)
                for r, token in enumerate(tokens):
                    scores = [
                        x.fmuladd(score, of_centroid[r], sums[r][v].to("float") * of_levels[r])
                        for v, score in enumerate(x.words(part.scores.at(rows[r])))
                    ]
                    if dim:
                        errors = write_error(x, of_centroid[r], of_levels[r], blocks.i)
                        bounds = [(score - e, score + e) for score, e in zip(scores, errors, strict=True)]
                        scores, upper = ([bound[k] for bound in bounds] for k in (0, 1))
                        x.store_words(a.uppers.at(((token - start) * a.blocks + blocks.i) * lanes), upper)
                    best = [x.maximum(score, before) for score, before in zip(scores, best, strict=True)]
                x.store_words(best_words, best)
        if dim:
            refine(x, start, stop, bests, nbits, width, dim, table)

        # the sum of the maxima of all query tokens
        with x.range(0, a.blocks, sums=x.constant(FLOATS, 0)) as blocks:
            best = x.words(bests.at(blocks.i * lanes))
            for v, scale in enumerate(x.words(x.block(blocks.i).header, Header.SCALE)):
                blocks.sums = x.fmuladd(best[v], scale, blocks.sums)
        some = start < stop
        a.out[documents.i] = x.where(some, x.total(blocks.sums), float("-inf"))
    return module(x)
