"""LLVM IR of exact search: bounds for all documents, scores for few.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

1. **Lists.** Documents are cut into ranges of 16,384, and each term has a list of postings in each range
   (`cpu_build`). A posting holds a row and the weight as a code of 8 bits, rounded up, on a scale of the
   list. The highest weights of a query's lists bound all scores of a range (block-max bounds): the range of
   the highest bound comes first, and a range whose bound is below theta, the k-th best score so far, is
   left out.
2. **Order.** Within a range lists are read in the order of what they can add to a score, divided by what
   they cost. Frequent terms of little weight come last.
3. **Sums** (`cpu_scan`). A list is added to 16-bit sums, one for each document of the range, which fit the
   first cache. As codes are rounded up, a sum bounds what the lists read so far give the document.
4. **Stopping** (`cpu_range`). Only documents with a sum of at least theta less what the unread lists can
   add are possible hits (MaxScore). As soon as it costs less to score these than to read on, the rest is
   not read.
5. **Scores** (`cpu_score`) are added up from the documents themselves. `cpu_heap` keeps the k best and
   raises theta.

For many hits `cpu_survey` takes the place of steps 2 to 4.

Sources: Turtle and Flood 1995 (Query evaluation: strategies and optimizations), MaxScore; Ding and Suel
2011 (Faster top-k document retrieval using block-max indexes); Mallia et al. 2024 (Faster learned sparse
retrieval with block-max pruning), bounds in few bits.
"""

from __future__ import annotations

from .._typed import Function, module
from .cpu_frame import FRAME, ceiling
from .cpu_heap import write_heap, write_insert_hit
from .cpu_query import write_main
from .cpu_range import LINES, write_refine_candidates, write_score_range, write_search_range
from .cpu_scan import write_add_postings, write_add_vector, write_collect_candidates, write_count_sums
from .cpu_score import clear_marks, mark, write_score_candidates, write_score_pair
from .cpu_survey import write_survey

__all__ = ["write_exact"]

_HIGHEST = 65200  # that a sum may reach
_LITTLE = 4096  # documents: fewer are not worth sorting the lists


def write_exact(terms: str, weights: str, wide: bool = False) -> str:
    """Return the LLVM IR module of ``exact(frame)``.

    Args:
        terms: Kind of the terms of a document, ``u16`` or ``u32``.
        weights: Kind of its weights: ``float``, ``half``, or, with a scale by document, ``u16`` or ``u8``.
        wide: Whether the processor has AVX512-BW.
    """
    return module(
        *(write_add_postings(), write_add_vector(), write_count_sums(), write_collect_candidates()),
        *(
            write_score_pair(terms, weights, wide),
            write_insert_hit(),
            *write_heap(),
            write_score_candidates(terms, weights),
        ),
        *(write_score_range(), write_search_range(), write_refine_candidates(), *write_survey()),
        *(_sort_terms(), _gather_lists(), _search_query(), write_main("exact")),
    )


def _sort_terms() -> Function:
    """Copy the query's terms below ``dim``, in falling order of what a term adds to scores per cost.

    Sorts by insertion; a long query comes sorted already.
    """
    x = Function("sort_terms", f=FRAME, query="i64")
    f, query = x.parameters
    terms, weights, gains, table, list_offsets = f.q_terms, f.q_weights, f.gains, f.table, f.list_offsets
    by_gain = f.sorted_terms, f.sorted_weights, f.sorted_gains
    sorted_gains = by_gain[2]
    start, stop = f.q_offsets[query], f.q_offsets[query + 1]
    dim, at = f.dim, x.local("i64")
    little = f.n < _LITTLE
    with x.range(start, stop, known=0) as loop:
        term, weight = terms[loop.i].to("i64"), weights[loop.i]
        known = term < dim
        with x.when(known):
            x.prefetch(table.at(term))
            x.prefetch(list_offsets.at(term))
            gain = weight * gains[term]
            gain = x.where(little, 0, gain)
            # Move terms of less gain up by one, from the last on.
            at.value = loop.known
            with x.repeat() as move:
                here = at.value
                before = x.maximum(here - 1, 0)
                less = sorted_gains[before] < gain
                ahead = (here > 0) & less
                with x.when(ahead):
                    for array in by_gain:
                        array[here] = array[before]
                    at.value = before
                move.again_if(ahead)
            here = at.value
            for array, value in zip(by_gain, (term.to("u32"), weight, gain), strict=True):
                array[here] = value
        loop.known += known.to("i64")
    f.n_terms = loop.known
    return x


def _gather_lists() -> Function:
    """Gather the query's lists and the bound of each range; put the query's weights into ``table``."""
    x = Function("gather_lists", f=FRAME)
    (f,) = x.parameters
    terms, weights, table = f.sorted_terms, f.sorted_weights, f.table
    list_offsets, lists = f.list_offsets, f.lists
    m, n_ranges = f.n_terms, f.n_ranges
    bounds, counts, query_lists = f.bounds, f.list_counts, f.query_lists
    with x.range(0, n_ranges) as loop:
        bounds[loop.i] = 0.0
        counts[loop.i] = 0
    clear_marks(f)

    # Fetch the rows of ``lists`` of all terms.
    with x.range(0, m) as loop:
        first = list_offsets[terms[loop.i].to("i64")]
        rows = lists.at(first).cast("u8")
        for line in range(LINES):
            x.prefetch(rows.at(64 * line))

    with x.range(0, m) as loop:
        term, weight = terms[loop.i].to("i64"), weights[loop.i]
        table[term] = weight
        mark(f, term)
        start, stop = (list_offsets[term + i] for i in range(2))
        with x.range(start, stop) as each:
            row = lists[each.i]
            this = row.range.to("i64")
            share = weight * row.share
            count = counts[this]
            entry = query_lists[this * m + count.to("i64")]
            entry.postings = row.postings
            entry.count = row.count
            entry.share = share
            counts[this] = count + 1
            bounds[this] = bounds[this] + share * 255
    return x


def _search_query() -> Function:
    """Search for a query, in the range of the highest bound first."""
    x = Function("search_query", f=FRAME, query="i64")
    f, query = x.parameters
    terms, table = f.sorted_terms, f.table
    x.call("sort_terms", f, query)
    m, k, n_ranges = f.n_terms, f.k, f.n_ranges
    f.n_hits = 0
    f.theta = 0.0
    f.least_sum = 0
    rows, scores = f.rows.at(query * k), f.scores.at(query * k)
    f.out_rows = rows
    f.out_scores = scores
    with x.range(0, k) as loop:
        rows[loop.i] = -1
        scores[loop.i] = float("-inf")
    x.call("gather_lists", f)

    # The range of the highest bound.
    bounds, best = f.bounds, x.local("i64")
    best.value = 0
    with x.range(0, n_ranges, highest=0.0) as loop:
        bound = bounds[loop.i]
        above = bound > loop.highest
        with x.when(above):
            best.value = loop.i
        loop.highest = x.where(above, bound, loop.highest)
    highest = loop.highest

    with x.when(highest > 0):
        # Sums fill 16 bits at most: a list adds 2 more by rounding, and a factor has 16 bits, too.
        room = x.maximum(_HIGHEST - m * 2, 1).to("float")
        f.sum_scale = room / highest
        error = (m + 8).to("float") * 2**-22  # of sums in float32, at most
        f.margin = 1 - error
        x.call("weigh_survey", f)
        with x.when(f.surveyed != 0):
            x.call("search_surveyed", f)
        first, n_ranges = best.value, x.where(f.surveyed != 0, 0, n_ranges)
        with x.range(0, n_ranges) as loop:
            this = x.where(loop.i <= first, loop.i - 1, loop.i)
            this = x.where(loop.i == 0, first, this)
            hope = ceiling(bounds[this] * f.sum_scale) >= f.least_sum
            has_lists = f.list_counts[this].to("i64") > 0
            with x.when(hope & has_lists):
                x.call("search_range", f, this)
    x.call("order_hits", f)

    # All of the table is 0 again for the next query.
    with x.range(0, m) as loop:
        table[terms[loop.i].to("i64")] = 0.0
    return x
