"""The code that finds documents by their centroids, in LLVM IR.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

PLAID's first step collects the documents of the ``nprobe`` best centroids of each query token. Here each
document also gets a count, of the query tokens and their best centroids that the document has. The documents
with the highest counts are scored further. README.md says how many of the best documents this finds.

The scores of the ``nprobe`` best centroids are found without a sort. The ``nprobe``-th best maximum of a
group of centroids is a lower bound of the ``nprobe``-th best score, so only the few groups above this bound
are read: first for that score itself, then for all centroids that reach it.

Source: Santhanam et al. 2022 (PLAID), section 4, for the candidates; counting hits is irkit's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from .._typed import Array, Function, Value, module
from .cpu_tile import FLOATS, GROUP, LANES, LOWEST, TABLE, Block, Header, Plan, Writer

__all__ = ["write_collect", "write_probe"]

_COUNTS = 64  # counts that are compared at once


def write_probe(plan: Plan) -> str:
    """Return the LLVM IR of ``probe``: count, per document, the best centroids of query tokens that it has.

    ``best`` is scratch memory: for each query token of a block a falling column of its best scores so far.
    """
    kinds = {"best": "float*", "list_offsets": "i64*", "lists": "u32*", "counts": "u8*"}
    numbers = dict.fromkeys(("nprobe", "count", "listed", "last", "rows", "blocks"), "i64")
    x = Writer("probe", plan, **TABLE, **kinds, **numbers)
    with x.range(0, x.arguments.blocks) as blocks:
        _count_hits(x, x.block(blocks.i))
    return module(x)


def write_collect() -> str:
    """Return the LLVM IR of ``collect``: the documents, ascending, of which a count is at least ``least``."""
    f = Function("collect", public=True, align=1, counts="u8*", documents="u32*", n="i64", least="i64")
    counts, documents, n, least = f.parameters
    whole, bound = n & -_COUNTS, least.to("u8")
    with f.range(0, whole, _COUNTS, found=f.constant("i64", 0)) as blocks:
        above = counts.at(blocks.i).vectors(_COUNTS)[0] >= bound.broadcast(_COUNTS)
        bits = above.cast(f"u{_COUNTS}")
        number = bits.count_ones().to("i64")
        with f.range(0, number, bits=bits) as each:
            documents[blocks.found + each.i] = (blocks.i + each.bits.lowest_bit().to("i64")).to("u32")
            each.bits = each.bits & (each.bits - 1)
        blocks.found += number
    with f.range(whole, n, found=blocks.found) as rest:
        with f.when(counts[rest.i] >= bound, found=rest.found) as hit:
            documents[rest.found] = rest.i.to("u32")
            hit.found = rest.found + 1
        rest.found = hit.found
    return module(f)


class _Hit(NamedTuple):
    """A centroid whose score reaches the bound of a query token."""

    centroid: Value
    scores: list[Value]
    tokens: Value  # u8, how many query tokens of the block have their bound reached


def _count_hits(x: Writer, part: Block) -> None:
    """Add the query tokens of a block to the counts of the documents."""
    # a lower bound of the nprobe-th best score of each query token, from the maxima of groups
    _clear(x)
    with x.range(0, x.arguments.rows.cast("u64") // GROUP) as groups:
        _insert(x, _row(x, part.maxima, groups.i))
    bound = _least(x, part)

    # the nprobe-th best score itself
    _clear(x)
    with _centroids_above(x, part, bound) as hit:
        _insert(x, hit.scores)

    # the documents of all centroids that reach it
    with _centroids_above(x, part, _least(x, part)) as hit:
        _add_documents(x, hit)


def _row(x: Writer, array: Array, row: Value) -> list[Value]:
    return x.words(array.at(row * x.plan.lanes))


def _clear(x: Writer) -> None:
    vectors = x.arguments.best.cast(FLOATS, 1, step=1)
    with x.range(0, x.arguments.nprobe * (4 * x.plan.lanes), 4 * LANES) as bytes_:
        vectors[bytes_.i] = LOWEST


def _insert(x: Writer, values: list[Value]) -> None:
    """Insert a value into each falling column of best scores, and drop the lowest of the column."""
    with x.range(0, x.arguments.nprobe, values=values) as loop:
        best_row = x.arguments.best.at(loop.i * x.plan.lanes)
        lower = []
        for v, old in enumerate(x.words(best_row)):
            new = loop.values[v]
            above = new > old
            best_row.vectors(LANES)[LANES * v] = x.where(above, new, old)
            lower.append(x.where(above, old, new))
        loop.values = lower


def _least(x: Writer, part: Block) -> list[Value]:
    """Return, per query token, its ``nprobe``-th best score so far, or its floor if the floor is higher."""
    last, floor = _row(x, x.arguments.best, x.arguments.nprobe - 1), x.words(part.header, Header.FLOOR)
    return [x.maximum(a, b) for a, b in zip(last, floor, strict=True)]


@contextmanager
def _centroids_above(x: Writer, part: Block, bound: list[Value]) -> Iterator[_Hit]:
    """Write a loop over the centroids whose score reaches the bound of a query token."""
    with x.range(0, x.arguments.rows, GROUP) as groups:
        maxima = _row(x, part.maxima, groups.i.cast("u64") // GROUP)
        stop = x.minimum(groups.i + GROUP, x.arguments.count)
        with x.when(_reached(x, maxima, bound) != 0), x.range(groups.i, stop) as centroids:
            scores = _row(x, part.scores, centroids.i)
            tokens = _reached(x, scores, bound)
            with x.when(tokens != 0):
                yield _Hit(centroids.i, scores, tokens)


def _reached(x: Writer, values: list[Value], bound: list[Value]) -> Value:
    """Return how many values reach the bound, as u8."""
    total = x.constant("u8", 0)
    for value, limit in zip(values, bound, strict=True):
        total = total + (value >= limit).cast(f"u{LANES}").count_ones().to("u8")
    return total


def _add_documents(x: Writer, hit: _Hit) -> None:
    """Add to the counts of a centroid's documents, up to 255; a damaged list only adds to wrong documents."""
    a = x.arguments
    list_range = a.list_offsets.at(hit.centroid)
    start, stop = list_range[0], list_range[1]
    with x.range(x.maximum(start, 0), x.minimum(stop, a.listed)) as loop:
        count = a.counts.at(x.minimum(a.lists[loop.i].to("i64"), a.last))
        count[0] = x.intrinsic("uadd.sat", "u8", count[0], hit.tokens)
