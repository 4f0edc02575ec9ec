"""LLVM IR for the accumulators of a range of documents: add lists to them, count them, collect documents.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

An accumulator is the 16-bit sum of what the query's lists add to one document, each share rounded up, so that
it bounds the document's score from above. Lists come in two layouts: postings (codes, then rows), and, where
many documents have the term, a vector of one code for each document of the range.
"""

from __future__ import annotations

from typing import Any

from .._typed import Function, Value, vector
from .cpu_frame import FRAME, LANES, RANGE, STEP

__all__ = ["write_add_postings", "write_add_vector", "write_collect_candidates", "write_count_sums"]

_GROUP = 16  # postings scaled at once
_AHEAD = 1024  # bytes of a vector that are fetched ahead
_SUMS = vector(LANES, "u16")


def write_add_postings() -> Function:
    """Add the postings of a list to the sums of their documents: ``factor * code / 256``, rounded up."""
    x = Function("add_postings", f=FRAME, list="u8*", count="i64", factor="i64")
    f, codes, count, factor = x.parameters
    sums, shares = f.sums, x.local(vector(_GROUP, "u16"))
    factors = factor.to("u16").broadcast(_GROUP)
    rows, full = codes.at(count).cast("u16", align=1), count & -_GROUP

    def add(row: Value, share: Value) -> None:
        total = sums.at(row.to("i64"))
        total.value += share

    # Scale a group at once, through memory, then add its postings one by one.
    with x.range(0, full, _GROUP) as loop:
        shares.value = _scaled(codes.vectors(_GROUP)[loop.i].to("u16"), factors)
        group_rows = rows.at(loop.i)
        for lane in range(_GROUP):
            add(group_rows[lane], shares.cast("u16")[lane])
    # The rest.
    with x.range(full, count) as loop:
        share = (codes[loop.i].to("i64") * factor >> 8) + 1
        add(rows[loop.i], share.to("u16"))
    return x


def write_add_vector() -> Function:
    """Add a list that is a vector: a code for each document, 0 where the document lacks the term."""
    x = Function("add_vector", f=FRAME, list="u8*", factor="i64")
    f, codes, factor = x.parameters
    sums = f.sums
    factors = factor.to("u16").broadcast(LANES)
    with x.range(0, f.n_sums, STEP) as loop:
        for line in range(0, STEP, 64):
            x.prefetch(codes.at(loop.i + (_AHEAD + line)))
        for part in range(0, STEP, LANES):
            total = sums.vectors(LANES, align=64).at(loop.i + part)
            code = codes.vectors(LANES)[loop.i + part].to("u16")
            share = x.where(code != 0, _scaled(code, factors), 0)
            total.value += share
    return x


def _scaled(codes: Value, factors: Value) -> Value:
    """Return ``codes * factors / 256`` of vectors of 16 bits, rounded down, plus 1."""
    product = (codes << 8).to("u32") * factors.to("u32")
    return (product >> 16).to("u16") + 1


def write_count_sums() -> Function:
    """Count the sums of at least ``low``, into ``number``."""
    x = Function("count_sums", f=FRAME, low="i64")
    f, low = x.parameters
    sums, least = f.sums, low.to("u16").broadcast(LANES)
    zeros = [x.constant(_SUMS, 0)] * (STEP // LANES)
    with x.range(0, f.n_sums, STEP, counts=zeros) as loop:
        here = sums.vectors(LANES, align=64).at(loop.i)
        loop.counts = [
            count - (here[LANES * part] >= least).mask("u16") for part, count in enumerate(loop.counts)
        ]
    total, *others = loop.counts
    for other in others:
        total += other
    f.count = x.intrinsic("vector.reduce.add", "u16", total).to("i64")
    return x


def write_collect_candidates() -> Function:
    """Make the documents of ``low <= sum < high`` that may be found the candidates."""
    x = Function("collect_candidates", f=FRAME, low="i64", high="i64")
    f, low, high = x.parameters
    sums, keep = f.sums, f.keep
    filtered, n = keep.exists(), f.n
    least = low.to("u16").broadcast(LANES)
    most = (high - 1).to("u16").broadcast(LANES)
    first, candidates = f.range * RANGE, f.candidates
    f.count = 0

    def take(i: Any) -> Value:
        """Append the document of the lowest bit of ``f.bits``; return what is left of the bits."""
        word = f.bits.to("u32")
        lane = word.lowest_bit().to("i64")
        document = first + i + lane
        number = f.count
        candidates[number] = document.to("u32")  # which counts only if the number grows
        exists = (document < n).to("i64")  # damaged lists may have other documents
        f.count = number + exists
        with x.when(filtered):
            f.count = number + (exists & keep[x.minimum(document, n - 1)].to("i64"))
        left = word & (word - 1)
        f.bits = left.to("i64")
        return left

    # Most registers of sums hold no candidate: one comparison passes over 32 documents.
    with x.range(0, f.n_sums, LANES) as loop:
        total = sums.vectors(LANES, align=64)[loop.i]
        mask = ((total >= least) & (total <= most)).cast("u32")
        with x.when(mask != 0):
            f.bits = mask.to("i64")
            with x.repeat() as again:
                again.again_if(take(loop.i) != 0)
    return x
