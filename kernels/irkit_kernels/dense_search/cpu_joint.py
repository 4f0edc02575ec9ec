"""LLVM IR of a search in two calls: one collects candidates and their scores, the other ranks chosen ones.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

So the rows of several searchers with the same lists are searched as those of one: which candidates go on is
decided between the calls, among the candidates of all.
"""

from __future__ import annotations

from .._typed import Function, module
from .cpu_collect import float_of, write_collect
from .cpu_frame import FRAME, Plan
from .cpu_lists import write_lists
from .cpu_prepare import write_prepare
from .cpu_rank import list_of, segment_of, write_rank
from .cpu_scan import write_scan

__all__ = ["NO_PLACE", "write_candidates", "write_places"]

NO_PLACE = 0xFFFFFFFF


def write_candidates(plan: Plan) -> str:
    """Return the LLVM IR module of ``candidates(frame)``."""
    x = Function("candidates", public=True, f=FRAME)
    (f,) = x.parameters
    with x.range(0, f.n_q) as loop:
        x.call("collect", f, loop.i)
    return module(*_steps(plan), _collect(plan), x)


def write_places(plan: Plan) -> str:
    """Return the LLVM IR module of ``rank_places(frame)``."""
    x = Function("rank_places", public=True, f=FRAME)
    (f,) = x.parameters
    with x.range(0, f.n_q) as loop:
        x.call("rank_query", f, loop.i)
    return module(*_steps(plan), _rank_query(plan), x)


def _steps(plan: Plan) -> list[Function]:
    collection = write_collect(plan.nbits > 1)
    return [*collection, *write_prepare(plan), *write_lists(plan), *write_scan(plan), *write_rank(plan)]


def _collect(plan: Plan) -> Function:
    """Write the candidates of one query in the order in which they are scanned."""
    x = Function("collect", f=FRAME, query="i64")
    f, query = x.parameters
    x.call("prepare", f, query)
    x.call("find_lists", f)
    lists = f.count
    f.count, f.n_kept, f.threshold = 0, f.candidates, float("-inf")
    x.call("scan_probed", f, lists)
    x.call("shrink", f)

    # Places, ranks of their lists, and scores by signs.
    start, count, rank = query * f.candidates, f.count, x.local("i64")
    places, ranks, rough = f.places.at(start), f.ranks.at(start), f.rough.at(start)
    rank.value = 0
    with x.range(0, count) as loop:
        place = f.items[loop.i]
        segment = segment_of(x, f, place.to("i64"))
        number = list_of(x, f, segment, place.to("i64") - segment.first).to("u32")
        with x.repeat() as ahead:
            differs = (f.probed[rank.value] != number) & (rank.value < lists - 1)
            rank.value = x.where(differs, rank.value + 1, rank.value)
            ahead.again_if(differs)
        places[loop.i], ranks[loop.i] = place, rank.value.to("u32")
        rough[loop.i] = float_of(f.keys[loop.i])
    with x.range(count, f.candidates) as loop:
        places[loop.i], ranks[loop.i], rough[loop.i] = NO_PLACE, NO_PLACE, float("-inf")

    # Scores by all bits of the codes.
    if plan.nbits > 1:
        x.call("rank_codes", f)
        fine = f.fine.at(start)
        with x.range(0, count) as loop:
            fine[loop.i] = float_of(f.keys[loop.i])
        with x.range(count, f.candidates) as loop:
            fine[loop.i] = float("-inf")
    return x


def _rank_query(plan: Plan) -> Function:
    """Write the scores of places that were chosen for one query; places that exist come first."""
    x = Function("rank_query", f=FRAME, query="i64")
    f, query = x.parameters
    x.call("prepare", f, query)
    places, scores = f.places.at(query * f.k), f.scores.at(query * f.k)
    with x.range(0, f.k, count=0) as loop:
        place = places[loop.i]
        f.items[loop.count] = place
        loop.count += (place != NO_PLACE).to("i64")
    f.count = loop.count
    if plan.nbits > 1 and plan.keep == "none":
        x.call("rank_levels", f)
    x.call("rank_rows", f)
    with x.range(0, f.count) as loop:
        scores[loop.i] = float_of(f.keys[loop.i]) * f.result_factor + f.result_bias
    with x.range(f.count, f.k) as loop:
        scores[loop.i] = float("-inf")
    return x
