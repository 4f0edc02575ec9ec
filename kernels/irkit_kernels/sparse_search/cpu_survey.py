"""LLVM IR for exact search of many hits: bounds of all documents first, then scores of possible hits.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

`cpu_exact` searches range by range, so it scores documents of the first ranges that are no hits beside those
of later ones: 4 documents for each hit where there are 7 ranges, and their number grows as the logarithm of
the ranges. If reading all lists costs less than these scores, a survey takes the place of steps 2 to 4 there:

1. **Sums.** All lists are added to sums, which this search keeps for all documents of the index.
2. **Limit.** A bisection finds a sum that k documents reach, and few more.
3. **Scores.** A sum exceeds a score by no more than what codes and sums were rounded up. So k documents
   score at least the limit less this slack, and only documents of such sums are scored.
"""

from __future__ import annotations

from .._typed import Function, Record, Value
from .cpu_frame import FRAME, RANGE
from .cpu_range import AHEAD, MANY, SUMS, add_list, begin_range, enter_range, fetch_list, list_cost

__all__ = ["write_survey"]


def write_survey() -> list[Function]:
    """Write ``weigh_survey``, which sets ``surveyed`` if a survey pays, and ``search_surveyed``."""
    return [_weigh_survey(), _count_all(), _add_all(), _search_surveyed()]


def _weigh_survey() -> Function:
    """Compare what it costs to read all lists with the scores that a survey saves; both in postings."""
    x = Function("weigh_survey", f=FRAME)
    (f,) = x.parameters
    f.surveyed = 0
    saved = f.k * f.survey_gain - (f.n >> 1)  # which zeros and the bisection cost
    with x.when((saved > 0) & ~f.keep.exists() & (f.n_terms <= MANY)):
        f.n_sums = RANGE
        with x.range(0, f.n_ranges, cost=0) as loop:
            lists = f.query_lists.at(loop.i * f.n_terms)
            with x.range(0, f.list_counts[loop.i].to("i64"), cost=loop.cost) as each:
                each.cost += list_cost(x, f, lists[each.i])
            loop.cost = each.cost
        f.surveyed = (loop.cost < saved).to("i64")
    return x


def _enter(x: Function, f: Record, this: Value) -> None:
    """Make a range, and its part of the sums, those that functions work on."""
    f.sums = f.all_sums.at(this * RANGE)
    enter_range(x, f, this)


def _add_all() -> Function:
    """Add all lists of the query to the sums of all documents."""
    x = Function("add_all", f=FRAME)
    (f,) = x.parameters
    with x.range(0, f.n_ranges) as loop:
        f.sums = f.all_sums.at(loop.i * RANGE)
        begin_range(x, f, loop.i)
        count, lists = f.list_counts[loop.i].to("i64"), f.query_lists.at(loop.i * f.n_terms)
        with x.range(0, count) as each:
            fetch_list(x, f, lists[x.minimum(each.i + AHEAD, count - 1)])
            add_list(x, f, lists[each.i])
    return x


def _count_all() -> Function:
    """Count the sums of all documents of at least ``low``, into ``above``."""
    x = Function("count_all", f=FRAME, low="i64")
    f, low = x.parameters
    with x.range(0, f.n_ranges, total=0) as loop:
        _enter(x, f, loop.i)
        x.call("count_sums", f, low)
        loop.total += f.count
    f.above = loop.total
    return x


def _search_surveyed() -> Function:
    """Search for a query."""
    x = Function("search_surveyed", f=FRAME)
    (f,) = x.parameters
    own, k, m = f.sums, f.k, f.n_terms
    x.call("add_all", f)

    # A sum that k documents reach, and at most an eighth more; 1 if fewer have a sum.
    f.low, f.top = 1, SUMS
    with x.repeat() as bisection:
        middle = (f.low + f.top) >> 1
        x.call("count_all", f, middle)
        reached = f.above >= k
        f.low = x.where(reached, middle, f.low)
        f.top = x.where(reached, f.top, middle)
        close = reached & (f.above <= k + (k >> 3))
        bisection.again_if((f.top - f.low > 1) & ~close)

    # Each list is rounded up by a step of its codes, a 255th of what it adds at most, and by 2 in the sum.
    # Scores round, too, but by less than 1 for each list.
    slack = m * 3 + (SUMS // 255 + 8)
    low = x.maximum(f.low - slack, 1)
    f.rescoring = 0
    with x.range(0, f.n_ranges) as loop:
        _enter(x, f, loop.i)
        x.call("collect_candidates", f, low, SUMS)
        x.call("score_candidates", f)
    f.sums = own
    return x
