"""LLVM IR of a search: lists, then rows by their signs, then the best of them by their codes and kept rows.

A search is one call, or two: one collects candidates and their scores, the other ranks chosen ones. So the
rows of several searchers with the same lists are searched as those of one: which candidates go on is decided
between the calls, among the candidates of all.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.
"""

from __future__ import annotations

from collections.abc import Callable

from .._typed import Function, Record, Value, module
from .cpu_collect import float_of, write_collect
from .cpu_frame import FRAME, Plan
from .cpu_lists import write_lists
from .cpu_prepare import write_prepare
from .cpu_rank import list_of, segment_of, write_rank
from .cpu_scan import write_scan

__all__ = ["NO_PLACE", "write_candidates", "write_places", "write_search"]

NO_PLACE = 0xFFFFFFFF


def write_search(plan: Plan) -> str:
    """Return the LLVM IR module of ``search(frame)``, which finds the best rows of all queries."""
    return _module("search", plan, "search_query", _search_query)


def write_candidates(plan: Plan) -> str:
    """Return the LLVM IR module of ``candidates(frame)``, which collects candidates of all queries."""
    return _module("candidates", plan, "collect", _collect)


def write_places(plan: Plan) -> str:
    """Return the LLVM IR module of ``rank_places(frame)``, which scores chosen places of all queries."""
    return _module("rank_places", plan, "rank_query", _rank_query, scans=False)


def _module(
    name: str,
    plan: Plan,
    step: str,
    write: Callable[[Plan, Function, Record, Value], None],
    scans: bool = True,
) -> str:
    """Return the module of the function ``name``, which calls the function ``step`` of each query."""
    one = Function(step, f=FRAME, query="i64")
    write(plan, one, *one.parameters)
    x = Function(name, public=True, f=FRAME)
    (f,) = x.parameters
    with x.range(0, f.n_q) as loop:
        x.call(step, f, loop.i)
    before = write_collect(plan.nbits > 1) if scans else []
    lists = [*write_lists(plan), *write_scan(plan)] if scans else []
    return module(*before, *write_prepare(plan), *lists, *write_rank(plan), one, x)


def _scan(x: Function, f: Record, query: Value) -> Value:
    """Collect the rows of the best lists that are best by their signs, and return the number of lists."""
    x.call("prepare", f, query)
    x.call("find_lists", f)
    lists: Value = f.count
    f.count, f.n_kept, f.threshold = 0, f.candidates, float("-inf")
    x.call("scan_probed", f, lists)
    x.call("shrink", f)
    return lists


def _search_query(plan: Plan, x: Function, f: Record, query: Value) -> None:
    """Write the best rows of one query and their scores."""
    _scan(x, f, query)
    if plan.nbits > 1:
        x.call("rank_codes", f)
        f.n_kept = f.refined
        x.call("shrink", f)
        if plan.keep == "none":
            x.call("rank_levels", f)
    x.call("rank_rows", f)

    # Sort the hits alone.
    k = f.k
    f.n_kept = k
    x.call("trim", f)
    x.call("order", f)

    # Write the results.
    rows, scores = f.rows.at(query * k), f.scores.at(query * k)
    n_hits = x.minimum(f.count, k)
    with x.range(0, n_hits) as loop:
        rows[loop.i] = f.sorted_items[loop.i].to("i64")
        scores[loop.i] = float_of(f.sorted_keys[loop.i]) + f.result_bias
    with x.range(n_hits, k) as loop:
        rows[loop.i] = -1
        scores[loop.i] = float("-inf")


def _collect(plan: Plan, x: Function, f: Record, query: Value) -> None:
    """Write the candidates of one query in the order in which they are scanned."""
    lists = _scan(x, f, query)

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


def _rank_query(plan: Plan, x: Function, f: Record, query: Value) -> None:
    """Write the scores of places that were chosen for one query; places that exist come first."""
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
        scores[loop.i] = float_of(f.keys[loop.i]) + f.result_bias
    with x.range(f.count, f.k) as loop:
        scores[loop.i] = float("-inf")
