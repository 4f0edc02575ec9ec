"""LLVM IR that scores the rows of a list by their signs.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

The signs of 4 dimensions of a row are 4 bits, the number of a sum in the query's table. One instruction looks
up 64 sums, for 16 rows and 16 dimensions (Andre et al. 2015, Cache locality is not enough; FAISS calls it
FastScan). Four sums of a row are added as bytes, and the results in 16 bits, even and odd bytes apart.
"""

from __future__ import annotations

from typing import Any

from .._simd import lanes_of
from .._typed import Function, Record, Value, vector
from .cpu_collect import make_room, push
from .cpu_frame import BLOCK, FLOATS, FRAME, INTS, LANES, SEGMENT, Plan
from .cpu_prepare import look_up

__all__ = ["write_scan"]

_WORDS = vector(32, "u16")
_UNROLLED = 4  # registers of signs of a turn of the loop
_NARROW = 1024  # sums of up to so many dimensions fit 16 bits


def write_scan(plan: Plan) -> list[Function]:
    """Write ``scan_probed(f, count)``."""
    return [_scan_rows(plan), _scan_probed(plan)]


def _scan_rows(plan: Plan) -> Function:
    """Score the rows from ``%start`` to ``%stop`` of a segment by their signs, and collect them.

    Meanwhile the blocks of the next list are fetched, from number ``%ahead`` to ``%last``.
    """
    kinds: dict[str, Any] = {"start": "i64", "stop": "i64", "ahead": "i64", "last": "i64"}
    x = Function("scan_rows", f=FRAME, segment=SEGMENT, base="float", **kinds)
    f, segment, base, start, stop, ahead, last = x.parameters
    signs, table, scratch = segment.signs, f.table, x.local("u8", 128)
    factors, biases, first = segment.factors, segment.biases, segment.first
    offset = (f.below * 2 + f.level_total).to("i32").broadcast(LANES)
    level_scale, bases = f.level_scale.broadcast(LANES), base.broadcast(LANES)
    step = 4 * LANES  # bytes of a register
    with x.range(start >> 5, (stop + (BLOCK - 1)) >> 5) as blocks:
        block = signs.at(blocks.i * (4 * plan.width))
        following = x.minimum(ahead + (blocks.i - (start >> 5)), last)
        for line in (0, LANES):
            x.prefetch(factors.at((following << 5) + line), locality=2)
        next_block = signs.at(following * (4 * plan.width))

        # Sums of signs: each half of a byte is an index into the query's table, for one of 2 times 16 rows.
        nothing = [x.constant(_WORDS, 0)] * 4
        with x.range(0, 4 * plan.width, _UNROLLED * step, sums=nothing) as loop:
            sums = list(loop.sums)
            for j in range(_UNROLLED):
                x.prefetch(next_block.at(loop.i + j * step), locality=2)
            byte_sums: list[list[Value]] = [[], []]
            for j in range(_UNROLLED):
                codes = block.vectors(step)[loop.i + j * step]
                sums_of = table.vectors(step)[loop.i + j * step]
                upper = (codes.cast(_WORDS) >> 4).cast(codes.kind)
                for half, indices in enumerate((codes & 15, upper & 15)):
                    byte_sums[half].append(look_up(x, plan, sums_of, indices, scratch))
            for half, (a, b, c, d) in enumerate(byte_sums):
                four = ((a + b) + (c + d)).cast(_WORDS)  # still a byte per row
                sums[2 * half] += four
                sums[2 * half + 1] += four >> 8
            loop.sums = sums

        # Rows of the block that belong to the list.
        first_row = blocks.i << 5
        above = x.minimum(stop - first_row, BLOCK).cast("u64")
        below = x.maximum(start - first_row, 0).cast("u64")
        one = x.constant("u64", 1)
        inside = ((one << above) - 1) & ~((one << below) - 1)

        # Scores of 16 rows at a time; those above the threshold join the collection.
        for half in (0, 1):
            total = _total(x, plan, *loop.sums[2 * half : 2 * half + 2])
            here = first_row + LANES * half
            members = (inside >> LANES * half).to("u16")
            lanes = lanes_of(x, members)
            numbers = (total + total - offset).to("float")
            words = x.masked_load(factors.at(here), lanes, align=4)
            factor = (words & 0xFFFF0000).cast(FLOATS)
            row_bases = bases * (words << 16).cast(FLOATS) + bases
            with x.when(biases.exists(), row_bases=row_bases) as branch:
                branch.row_bases = row_bases + x.masked_load(biases.at(here), lanes, align=4)
            scores = numbers * factor * level_scale + branch.row_bases
            mask = (scores > f.threshold.broadcast(LANES)).cast("u16") & members
            with x.when(mask != 0):
                x.prefetch(segment.rows.at(here), locality=2)
                mask = _without_forbidden(x, f, segment, here, mask)
                push(x, plan, f, scores, (first + here).to("u32"), mask, bases, numbers)
        make_room(x, f)
    return x


def _total(x: Function, plan: Plan, both: Value, odd: Value) -> Value:
    """Return the sums of 16 rows.

    Args:
        x: The function.
        plan: The variant.
        both: In each quarter the sums of 8 pairs of rows: the first, plus 256 times the second.
        odd: The sums of the second rows.
    """
    even = both - (odd << 8)
    quarters = [range(start, start + 8) for start in range(0, 32, 8)]
    pairs = [lane // 2 + lane % 2 * 8 for lane in range(LANES)]
    parts = [(x.shuffle(even, None, lanes), x.shuffle(odd, None, lanes)) for lanes in quarters]
    if plan.width <= _NARROW:
        first, second = parts[0]
        for a, b in parts[1:]:
            first, second = first + a, second + b
        return x.shuffle(first, second, pairs).to("i32")
    total = x.constant(INTS, 0)
    for a, b in parts:
        total += x.shuffle(a, b, pairs).to("i32")
    return total


def _without_forbidden(x: Function, f: Record, segment: Record, here: Value, mask: Value) -> Value:
    """Return the mask without rows that the filter does not allow."""
    allowed, rows, n_rows = f.allowed, segment.rows, f.n_rows
    nothing = x.constant("u16", 0)
    with x.when(allowed.exists(), mask=mask) as branch:
        with x.range(0, mask.count_ones().to("i64"), left=mask, good=nothing) as loop:
            lane = loop.left.lowest_bit()
            row = rows[here + lane.to("i64")].to("i64")
            inside = row < n_rows
            fine = inside & (allowed[x.where(inside, row, 0)] != 0)
            loop.good = loop.good | x.where(fine, x.constant("u16", 1) << lane, nothing)
            loop.left = loop.left & (loop.left - 1)
        branch.mask = loop.good
    return branch.mask


def _scan_probed(plan: Plan) -> Function:
    """Scan the probed lists in all segments."""
    x = Function("scan_probed", f=FRAME, count="i64")
    f, count = x.parameters
    with x.range(0, count) as loop:
        number = f.probed[loop.i].to("i64")
        following = f.probed[x.minimum(loop.i + 1, count - 1)].to("i64")
        base = f.probed_scores[loop.i]
        with x.range(0, f.n_segments) as parts:
            segment = f.segments[parts.i]
            offsets = segment.offsets
            start, stop = offsets[number], offsets[number + 1]
            ahead, last = offsets[following] >> 5, x.maximum(offsets[following + 1] - 1, 0) >> 5
            with x.when(start < stop):
                x.call("scan_rows", f, segment, base, start, stop, ahead, last)
    return x
