"""LLVM IR of approximate search: the best postings of some terms choose the documents that are scored.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

1. **Lists.** Each term keeps its postings of the highest weights (`cpu_best`). `_pick_lists` takes the
   ``cut`` terms of the query that can add most to a score. What all other terms and postings can add is
   ``missing``.
2. **Totals.** `_add_best_postings` adds the lists up in totals, a byte for each document, range after
   range. What each code of a list adds is looked up in a table of 256 bytes, rounded up. Each posting also
   adds a bonus, its share of what is missing: documents in many of the lists have more of the rest, too.
3. **Pool** (`cpu_pool`). Documents whose totals reach a limit wait in a pool. The limit rises so that not
   more documents reach it than may be scored.
4. **Scores.** `_score_highest` scores the best of the pool (`cpu_examine`). With theta, the k-th best score
   so far, a document needs a total of theta less ``doubt * missing``: this raises the limit. The rest of
   the pool is scored at the end.

With ``doubt`` 1 and room for all documents nothing is lost, because totals are bounds.

Sources: Lin and Trotman 2015 (Anytime ranking for impact-ordered indexes), JASS: postings by impact;
Lassance et al. 2024 (Two-step SPLADE): pruned, then exact; Bruch et al. 2024 (Efficient inverted indexes
for approximate retrieval over learned sparse representations), Seismic: static pruning, exact scores by a
forward index.
"""

from __future__ import annotations

from .._typed import Function, Value, module
from .cpu_examine import write_examine
from .cpu_heap import write_insert_hit
from .cpu_pool import FRAME, GLOBALS, PICK, TOP, write_pool
from .cpu_query import write_main
from .cpu_score import write_score_document

__all__ = ["TOTALS", "write_approximate"]

TOTALS = 1 << 15  # documents of a range: their totals, of a byte each, stay in the first cache
_GROUP = 8  # postings added at once
_CODES = 256  # that a posting has a weight of
_SAMPLE = 4096  # documents that are the first range
_FIRST = 16  # documents scored to see what others must reach
_MOST = 64  # lists that are read at most: what each adds is rounded up to a whole of ``TOP``
_STREAM = 1024  # bytes of a list that are fetched ahead


def write_approximate(terms: str, weights: str) -> str:
    """Return the LLVM IR module of ``approximate(frame)``.

    Args:
        terms: Kind of the terms of a document, as for exact search.
        weights: Kind of its weights.
    """
    scores = [write_score_document(terms, weights), write_insert_hit(), *write_examine(terms, weights)]
    search = [
        _add_best_postings(),
        _score_highest(),
        _pick_lists(),
        _search_query(),
        write_main("approximate"),
    ]
    return "\n".join([GLOBALS, module(*scores, *write_pool(), *search)])


def _add_best_postings() -> Function:
    """Add the gains of a list's postings to the totals of their documents, up to row ``%stop``."""
    x = Function("add_best_postings", f=FRAME, pick=PICK, gains="u8*", start="i64", stop="i64")
    f, pick, gains, start, stop = x.parameters
    postings, totals = f.best, f.totals
    first_total, limit = totals.at(0 - start), stop << 8
    first, end = pick.next, pick.end

    def posting(i: Value) -> Value:
        """Return a posting: a row of 24 bits and a code of 8."""
        return postings[i].to("u64")

    def is_before(i: Value) -> Value:
        """Return whether a posting belongs to the list and its row lies before the end."""
        inside = i < end
        return inside & (posting(x.where(inside, i, first)) < limit)

    def add(i: Value, number: int) -> None:
        if number > 1:
            x.prefetch(postings.cast("u8").at(i * 4 + _STREAM))
        for j in range(number):
            word = posting(i + j)
            gain = gains[word & (_CODES - 1)]
            total = first_total.at(word >> 8)
            total.value += gain

    with x.count(first, lambda i: is_before(i + (_GROUP - 1)), _GROUP) as many:
        add(many.i, _GROUP)
    with x.count(many.i, is_before) as one:
        add(one.i, 1)
    pick.next = one.i
    return x


def _score_highest() -> Function:
    """Score the ``%wanted`` documents of the highest totals, and raise the limit for the other documents."""
    x = Function("score_highest", f=FRAME, wanted="i64")
    f, wanted = x.parameters
    x.call("take_highest", f, wanted)
    x.call("score_promising", f)
    doubted = f.missing * f.doubt
    least = (f.theta - doubted) * f.total_scale
    least = x.minimum(x.maximum(least.to("i64"), 1), TOP)
    x.call("raise_limit", f, x.where(f.n_hits == f.k, least, 1))
    return x


def _pick_lists() -> Function:
    """Find the lists of the terms that can add most; set ``missing`` to what all other postings can add."""
    x = Function("pick_lists", f=FRAME, query="i64")
    f, query = x.parameters
    start, m, cut = f.q_offsets[query], f.n_terms, f.n_picks
    picks, dim = f.picks, f.dim
    best = x.local("i64")

    # The query's weights, and the share of each term: what a code of its list stands for.
    with x.range(0, m, total=0.0) as loop:
        term, weight = f.q_terms[start + loop.i].to("i64"), f.q_weights[start + loop.i]
        known = term.cast("u64") < dim
        with x.when(known):
            f.table[term] = weight
        scale = f.best_scales[x.where(known, term, 0)]
        share = x.where(known, weight * scale, 0)
        f.shares[loop.i] = share
        loop.total += share
    total = loop.total

    # Take the highest share, ``cut`` times.
    with x.range(0, cut, picked=0.0, missed=0.0) as pick:
        best.value = 0
        with x.range(0, m, highest=-1.0) as loop:
            share = f.shares[loop.i]
            above = share > loop.highest
            best.value = x.where(above, loop.i, best.value)
            loop.highest = x.where(above, share, loop.highest)
        share, j = loop.highest, best.value
        f.shares[j] = -1.0
        term = x.minimum(f.q_terms[start + j].to("i64"), dim - 1)
        entry, first = picks[pick.i], f.best_offsets[term]
        for line in range(0, _STREAM, 64):
            x.prefetch(f.best.at(first).cast("u8").at(line))
        entry.next = first
        entry.end = f.best_offsets[term + 1]
        entry.share = share
        pick.picked += share
        pick.missed += f.q_weights[start + j] * f.best_missed[term]
    left = (total - pick.picked) * (_CODES - 1)
    f.missing = pick.missed + left

    # A document of all lists is thought to have all that is missing, one of some lists that share of it.
    # The sum of all that is added to a total, each rounded up, must fit into it.
    missing = f.missing
    highest = pick.picked * (_CODES - 1) + missing
    highest = x.intrinsic("maxnum", "float", highest, x.constant("float", 1e-30))
    room = (TOP - cut).to("float") / highest
    f.total_scale = room
    bonus = missing * room / x.maximum(cut, 1).to("float")
    bonus = (bonus * 65536).to("i64") + 65535
    bonus = bonus.to("u32").broadcast(_GROUP)

    # What each code adds to a total, rounded up.
    with x.range(0, cut) as loop:
        factor = picks[loop.i].share * f.total_scale
        factor = x.minimum((factor * 65536).to("i64"), 65535)
        factor = factor.to("u32").broadcast(_GROUP)
        for first in range(0, _CODES, _GROUP):
            codes = x.constants("u32", range(first, first + _GROUP))
            gains = (codes * factor + bonus >> 16).to("u8")
            f.code_gains.vectors(_GROUP)[loop.i * _CODES + first] = gains
    return x


def _search_query() -> Function:
    """Search for one query, range by range of the documents."""
    x = Function("search_query", f=FRAME, query="i64")
    f, query = x.parameters
    start, stop = f.q_offsets[query], f.q_offsets[query + 1]
    m, k = stop - start, f.k
    f.n_terms = m
    cut = x.minimum(x.minimum(m, f.cut), _MOST)
    f.n_picks = cut
    f.n_hits, f.least_sum, f.pool_size, f.high = 0, 0, 0, 0
    f.theta, f.sum_scale = 0, 0
    f.limit = 1
    f.out_rows = f.rows.at(query * k)
    f.out_scores = f.scores.at(query * k)
    error = (m + 8).to("float") * 2**-22  # of sums in float32, at most
    f.margin = 1 - error
    with x.range(0, TOP + 1) as total:
        f.counts[total.i] = 0
    x.call("pick_lists", f, query)
    picks, n = f.picks, f.n
    first = k + x.maximum(k >> 1, _FIRST - 10)

    def search(start: Value | int, stop: Value) -> None:
        """Add the postings of a range up, and let its documents into the pool."""
        with x.range(0, cut) as loop:
            pick = picks[loop.i]
            gains = f.code_gains.at(loop.i * _CODES)
            with x.when(pick.next < pick.end):
                x.call("add_best_postings", f, pick, gains, start, stop)
        x.call("fill_pool", f, start, stop)
        x.call("raise_limit", f, 0)

    # Some documents of the first range are scored to have a limit; all of them fit into the pool.
    sample = x.minimum(n, _SAMPLE)
    search(0, sample)
    x.call("score_highest", f, first)
    with x.range(sample, n, TOTALS) as loop:
        search(loop.i, x.minimum(loop.i + TOTALS, n))
    # Score some of the pool to raise the limit, then what is left.
    x.call("score_highest", f, first)
    x.call("score_highest", f, f.scored)

    # Fill up the results, and set the table of terms to 0 for the next query.
    with x.range(f.n_hits, k) as loop:
        f.out_rows[loop.i] = -1
        f.out_scores[loop.i] = float("-inf")
    with x.range(start, stop) as loop:
        term = x.minimum(f.q_terms[loop.i].to("i64"), f.dim - 1)
        f.table[term] = 0.0
    return x
