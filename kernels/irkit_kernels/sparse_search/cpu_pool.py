"""LLVM IR for the pool of approximate search: documents whose totals are high enough to be scored.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

A total is the sum, in a byte, of what the best postings of the query's terms add to one document. The pool
holds the rows of documents whose totals reach a limit, with their totals, and counts them by total. From
these counts follows a higher limit, which only as many documents reach as may be scored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._typed import Array, Carried, Function, Struct, Value
from . import cpu_frame

__all__ = ["FRAME", "GLOBALS", "PICK", "TOP", "write_pool"]

_LANES = 64  # totals looked at
TOP = 255  # the highest total

PICK = Struct(next="i64", end="i64", share="float")  # a list that is read, and what a code of it stands for

FRAME = cpu_frame.FRAME.extended(
    # The index, see `cpu_best.best_lists`.
    best_offsets="i64*",
    best="u32*",
    best_scales="float*",
    best_missed="float*",
    # How much of it is read, see `op.Effort`.
    cut="i64",
    scored="i64",
    doubt="float",
    # Scratch memory.
    totals="u8*",  # of the documents of a range
    pool="u32*",
    pool_totals="u8*",
    counts="i64*",  # documents of the pool by total
    shares="float*",  # of the query's terms
    picks=[PICK],
    code_gains="u8*",  # of each list that is read: what each of its 256 codes adds to a total
    # Variables of a query.
    missing="float",  # what a score can have that no total counts
    n_picks="i64",  # lists that are read
    limit="i64",  # the lowest total of the pool
    pool_size="i64",
    reached="i64",
    total_scale="float",  # a score times this is a total
)

GLOBALS = "@always = internal constant i8 1"  # read if the search has no filter


def write_pool() -> list[Function]:
    """Write the functions of the pool."""
    return [_fill_pool(), _find_limit(), _take_highest(), _raise_limit()]


def _visit(
    x: Function, totals: Array, limit: Value, take: Callable[[Value, Carried], None], **carried: Any
) -> Carried:
    """Generate a loop over those of 64 totals that reach the limit; ``take(lane, variables)`` is its body."""
    reached = (totals.vectors(_LANES)[0] >= limit).cast("u64")
    with x.when(reached != 0, **carried) as branch:
        with x.range(0, reached.count_ones(), lanes=reached, **carried) as loop:
            lane = loop.lanes.lowest_bit()
            loop.lanes = loop.lanes & (loop.lanes - 1)
            take(lane, loop)
        for name in carried:
            setattr(branch, name, getattr(loop, name))
    return branch


def _fill_pool() -> Function:
    """Put the documents of a range whose totals reach the limit into the pool; set the totals to 0."""
    x = Function("fill_pool", f=FRAME, start="i64", stop="i64")
    f, start, stop = x.parameters
    totals, keep, counts = f.totals, f.keep, f.counts
    pool, pool_totals = f.pool, f.pool_totals
    filtered, n = keep.exists(), f.n
    limit = f.limit.to("u8").broadcast(_LANES)
    before = f.pool_size
    with x.range(0, stop - start, _LANES, pooled=before) as loop:
        here = totals.at(loop.i)

        def take(lane: Value, now: Carried, i: Value = loop.i, here: Array = here) -> None:
            row, total = start + i + lane, here[lane]
            exists = row < n  # damaged lists may have other documents
            allowed = x.where(filtered & exists, keep.at(row), Array(x, "u8", "@always")).value
            pool[now.pooled] = row.to("u32")
            pool_totals[now.pooled] = total
            kept = (exists & (allowed != 0)).to("i64")
            count = counts.at(total.to("i64"))
            count.value += kept
            now.pooled += kept

        loop.pooled = _visit(x, here, limit, take, pooled=loop.pooled).pooled
        here.vectors(_LANES, align=_LANES).value = 0
    f.pool_size = loop.pooled
    f.high = f.high + (loop.pooled - before)
    return x


def _find_limit() -> Function:
    """Find the highest total that ``%wanted`` documents of the pool reach, at least the limit and ``%least``.

    Sets ``reached``, and ``above`` to the number of documents that reach it.
    """
    x = Function("find_limit", f=FRAME, wanted="i64", least="i64")
    f, wanted, least = x.parameters
    counts = f.counts
    f.above = f.high

    def fewer(total: Value) -> Value:
        """Return the number of documents above a total."""
        return f.above - counts[total]

    def goes_on(total: Value) -> Value:
        return ((total < least) | (fewer(total) >= wanted)) & (total < TOP)

    with x.count(f.limit, goes_on) as loop:
        f.above = fewer(loop.i)
    f.reached = loop.i
    return x


def _raise_limit() -> Function:
    """Raise the limit to ``%least``, or higher, if more documents than may be scored reach that."""
    x = Function("raise_limit", f=FRAME, least="i64")
    f, least = x.parameters
    x.call("find_limit", f, f.scored, least)
    f.limit = f.reached
    f.high = f.above
    return x


def _take_highest() -> Function:
    """Take the ``%wanted`` documents of the highest totals out of the pool, as candidates.

    Among equal totals the first are taken. The others stay in the pool if they reach the limit.
    """
    x = Function("take_highest", f=FRAME, wanted="i64")
    f, wanted = x.parameters
    pool, totals, candidates = f.pool, f.pool_totals, f.candidates
    counts, pooled = f.counts, f.pool_size
    totals.vectors(_LANES)[pooled] = 0

    # The lowest total that is taken, and the number of documents above it.
    x.call("find_limit", f, wanted, 0)
    low = f.reached
    ties = counts[low]
    above = f.above - ties
    limit = f.limit.to("u8").broadcast(_LANES)
    with x.range(0, pooled, _LANES, number=0, rest=0, left=wanted - above) as loop:

        def take(lane: Value, now: Carried, i: Value = loop.i) -> None:
            position = i + lane
            code, row = totals[position], pool[position]
            total = code.to("i64")
            tie = (total == low) & (now.left > 0)
            pick = ((total > low) | tie).to("i64")
            candidates[now.number] = row
            pool[now.rest] = row
            totals[now.rest] = code
            now.number += pick
            now.rest += 1 - pick
            now.left -= tie.to("i64")

        state = {name: getattr(loop, name) for name in ("number", "rest", "left")}
        after = _visit(x, totals.at(loop.i), limit, take, **state)
        loop.number, loop.rest, loop.left = after.number, after.rest, after.left

    # Update the counts.
    with x.range(low + 1, TOP + 1) as total:
        counts[total.i] = 0
    counts[low] = ties - (loop.number - above)
    f.count = loop.number
    f.pool_size = loop.rest
    f.high = loop.rest
    return x
