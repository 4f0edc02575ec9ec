"""LLVM IR of a search: lists, then rows by their signs, then the best of them by their codes and kept rows.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.
"""

from __future__ import annotations

from .._typed import Function, module
from .cpu_collect import float_of, write_collect
from .cpu_frame import FRAME, Plan
from .cpu_lists import write_lists
from .cpu_prepare import write_prepare
from .cpu_rank import write_rank
from .cpu_scan import write_scan

__all__ = ["write_search"]


def write_search(plan: Plan) -> str:
    """Return the LLVM IR module of ``search(frame)``."""
    steps = [*write_prepare(plan), *write_lists(plan), *write_scan(plan), *write_rank(plan)]
    return module(*write_collect(plan.nbits > 1), *steps, _search_query(plan), _search())


def _search_query(plan: Plan) -> Function:
    """Search for one query."""
    x = Function("search_query", f=FRAME, query="i64")
    f, query = x.parameters

    x.call("prepare", f, query)
    x.call("find_lists", f)

    # Collect rows of these lists by their signs, and rank them.
    lists = f.count
    f.count, f.n_kept, f.threshold = 0, f.candidates, float("-inf")
    x.call("scan_probed", f, lists)
    x.call("shrink", f)
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
        scores[loop.i] = float_of(f.sorted_keys[loop.i]) * f.result_factor + f.result_bias
    with x.range(n_hits, k) as loop:
        rows[loop.i] = -1
        scores[loop.i] = float("-inf")
    return x


def _search() -> Function:
    """Search for all queries."""
    x = Function("search", public=True, f=FRAME)
    (f,) = x.parameters
    with x.range(0, f.n_q) as loop:
        x.call("search_query", f, loop.i)
    return x
