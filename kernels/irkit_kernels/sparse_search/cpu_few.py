"""LLVM IR of exact search of few documents: all scores, term by term, then the best of them.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

Up to 4,096 documents are not worth bounds. The lists hold the weights themselves (`cpu_build_few`):

1. **Scores.** `_add_scores` adds up the lists of the query's terms. Documents and the query have their
   terms in rising order, so each score is added up in the order of `cpu_score`, to the same bits.
2. **Threshold.** Scores are not negative, so their bits, taken as integers, are in their order. `_narrow`
   finds by bisection of these bits a score that k, or hardly more, documents reach.
3. **Order.** `_sort` compares each of these documents with all others: the number of better ones is its
   place.
"""

from __future__ import annotations

from .._typed import Function, Record, Value, module, vector
from .cpu_frame import FRAME

__all__ = ["GROUP", "MOST_DOCUMENTS", "MOST_HITS", "STEP", "write_few"]

MOST_DOCUMENTS = 4096  # the sums fill half of the first cache
MOST_HITS = 128  # each is compared with all others
GROUP = 4  # postings added in a turn
_LANES, STEP = 16, 64  # sums in a register, sums looked at in a turn
_FLOATS, _BITS = vector(_LANES, "float"), vector(_LANES, "i32")
_KEYS = 8  # hits compared at once
_ROWS = (1 << 32) - 1
_ALL = (1 << 31) - 1  # above the bits of any score
_MINUS_INFINITY = -0x800000  # its bits
_CLOSE = 1 << 22  # first guess of the distance in bits from the best score to the k-th


def write_few() -> str:
    """Return the LLVM IR module of ``few(frame)``, for at most `MOST_DOCUMENTS` and `MOST_HITS`.

    ``refused`` is set if a query has weights that are negative or not finite, or terms not in rising order;
    nothing is found for it. If fewer than k documents score above 0, the hits of a single query
    (``term_words``) are filled up with documents that score 0, and the hits of several queries with -1 and
    -inf.
    """
    return module(_add_scores(), _choose_hits(), _search_one(), _main())


def _main() -> Function:
    """Search for the query that the caller gave, or else for all queries of the frame, one by one."""
    x = Function("few", public=True, f=FRAME)
    (f,) = x.parameters
    is_single = f.term_words != 0
    rows, scores, offsets, terms, weights = f.rows, f.scores, f.q_offsets, f.q_terms, f.q_weights
    f.out_rows = rows
    f.out_scores = scores
    with x.when(is_single):
        x.call("search_one", f, True)
    with x.when(~is_single):
        f.term_words = 1
        with x.range(0, f.n_q, refused=0) as query:
            start, stop = offsets[query.i], offsets[query.i + 1]
            f.given_length = stop - start
            f.given_terms = terms.at(start)
            f.given_weights = weights.at(start)
            first = query.i * f.k
            f.out_rows = rows.at(first)
            f.out_scores = scores.at(first)
            x.call("search_one", f, False)
            query.refused = query.refused | f.refused
        f.refused = query.refused
        f.term_words = 0
    return x


def _search_one() -> Function:
    """Search for the given query; if ``%zeros``, documents that score 0 are hits."""
    x = Function("search_one", f=FRAME, zeros="i1")
    f, zeros = x.parameters
    f.refused = _check(x, f)
    with x.when(f.refused == 0):
        x.call("add_scores", f)
        x.call("choose_hits", f, zeros)
    return x


def _term(x: Function, f: Record, j: Value) -> tuple[Value, Value, Record]:
    """Return a query term, its weight, and its list; the list is empty if no document has the term."""
    words = f.given_terms.at(j * 4 * f.term_words)  # the lower half of 64 bits is first
    term = words.cast("u32").value.to("i64")
    weight = f.given_weights[j]
    return term, weight, f.few_lists[x.minimum(term, f.dim)]


def _check(x: Function, f: Record) -> Value:
    """Prefetch the query's lists; return an i64 that is not 0 if the query is refused, see `write_few`."""
    with x.range(0, f.given_length, last=-1, refused=0) as loop:
        term, weight, entry = _term(x, f, loop.i)
        first = entry.first.to("i64")
        x.prefetch(f.few_rows.at(first))
        x.prefetch(f.few_weights.at(first))
        fine = (weight < float("inf")) & (weight >= 0) & (term > loop.last)
        loop.last = term
        loop.refused = loop.refused | (~fine).to("i64")
    return loop.refused


def _lanes(value: Value) -> Value:
    """Return a vector with an i64, cut to 32 bits, in every lane."""
    return value.to("i32").broadcast(_LANES)


def _add_scores() -> Function:
    """Add up the scores of all documents; those beyond the last, up to a whole turn, are -1."""
    x = Function("add_scores", f=FRAME)
    (f,) = x.parameters
    sums, n = f.sums.cast("float"), f.n
    totals = sums.vectors(_LANES, align=64)
    rows, weights = f.few_rows, f.few_weights
    last = _lanes(n)
    lanes = x.constants("i32", range(_LANES))
    length = (n + (STEP - 1)) & -STEP
    f.n_sums = length
    with x.range(0, length, _LANES) as loop:
        exists = lanes + _lanes(loop.i) < last
        totals[loop.i] = x.where(exists, x.constant(_FLOATS, 0), -1.0)

    with x.range(0, f.given_length) as term:
        _, weight, entry = _term(x, f, term.i)
        first, count = entry.first.to("i64"), entry.count.to("i64")
        own_rows, own_weights = rows.at(first), weights.at(first)
        # Postings, if the count is not negative.
        with x.range(0, count, GROUP) as loop:
            for number in range(GROUP):
                posting = loop.i + number
                row = own_rows[posting].to("i64")
                value, total = own_weights[posting], sums.at(row)
                total.value = x.fma(value, weight, total.value)
        # A vector: a weight for each document.
        with x.when(count < 0):
            factor = weight.broadcast(_LANES)
            with x.range(0, length, _LANES) as loop:
                value = own_weights.vectors(_LANES)[loop.i]
                totals[loop.i] = x.fma(value, factor, totals[loop.i])
    return x


def _choose_hits() -> Function:
    """Find a score that k documents reach, and few more; sort these documents, and return the first k."""
    x = Function("choose_hits", f=FRAME, zeros="i1")
    f, zeros = x.parameters
    most = f.k + (f.k >> 2) + 4
    _narrow(x, f, most)
    _take(x, f, f.count > most)
    _sort(x, f, zeros)
    few = f.count < f.k  # damaged weights may be negative, or no numbers
    f.refused = few.to("i64")
    return x


def _scores_of(f: Record, i: Value) -> list[Value]:
    """Return the scores of a turn, as whole numbers."""
    sums = f.sums.cast("i32").vectors(_LANES, align=64)
    return [sums[i + part] for part in range(0, STEP, _LANES)]


def _narrow(x: Function, f: Record, most: Value) -> None:
    """Find by bisection a score, ``low``, that k documents reach, and if possible not more than ``most``."""
    length, k = f.n_sums, f.k
    zeros = [x.constant(_BITS, 0)] * (STEP // _LANES)

    # The highest score, and first bounds.
    with x.range(0, length, STEP, highest=zeros) as loop:
        pairs = zip(loop.highest, _scores_of(f, loop.i), strict=True)
        loop.highest = [x.intrinsic("smax", _BITS, a, b) for a, b in pairs]
    highest, *others = loop.highest
    for other in others:
        highest = x.intrinsic("smax", _BITS, highest, other)
    top = x.intrinsic("vector.reduce.smax", "u32", highest).to("i64") + 1
    f.low, f.top, f.count, f.step = 0, top, f.n, _CLOSE

    # As long as nothing is known of the lower bound, go down from the top in steps that double.
    with x.repeat() as bisection:
        low, top, step = f.low, f.top, f.step
        f.step = step * 2
        middle = (low + top) >> 1
        middle = x.where(low == 0, x.maximum(top - step, 1), middle)
        least = _lanes(middle)
        with x.range(0, length, STEP, counts=zeros) as loop:
            ones = [(scores >= least).mask("i32") for scores in _scores_of(f, loop.i)]
            loop.counts = [a - b for a, b in zip(loop.counts, ones, strict=True)]
        total, *others = loop.counts
        for other in others:
            total += other
        number = x.intrinsic("vector.reduce.add", "u32", total).to("i64")
        reached = number >= k
        f.low = x.where(reached, middle, low)
        f.top = x.where(reached, top, middle)
        f.count = x.where(reached, number, f.count)
        apart = f.top - f.low > 1
        bisection.again_if(apart & (f.count > most))


def _take(x: Function, f: Record, many: Value) -> None:
    """Store the candidates: documents whose score is ``f.low`` or more.

    A candidate is one 64-bit key: the bits of its score, then the complement of its row.

    Args:
        x: Function to write the code to.
        f: Frame of the search.
        many: Whether too many documents reach ``f.low``. Then the documents above it come first, and those
            that score just ``f.low`` fill up the k.
    """
    sums, keys, low, top = f.sums, f.candidates.cast("i64"), f.low, f.top
    f.count = 0
    with x.range(0, x.where(many, 2, 1)) as part:
        ties = part.i == 1
        least = _lanes(x.where(many & ~ties, top, low))
        limit = _lanes(x.where(ties, top, _ALL))
        with x.range(0, f.n_sums, _LANES) as loop:
            scores = sums.cast("i32").vectors(_LANES, align=64)[loop.i]
            f.bits = ((scores >= least) & (scores < limit)).cast(f"u{_LANES}").to("i64")
            accepts = ~ties | (f.count < f.k)
            with x.when(accepts & (f.bits != 0)), x.repeat() as again:
                word, number = f.bits, f.count
                row = loop.i + word.lowest_bit()
                bits = sums.cast("u32")[row].to("i64")
                keys[number] = bits << 32 | _ROWS - row
                f.count = number + 1
                f.bits = word & (word - 1)
                again.again_if(f.bits != 0)


def _sort(x: Function, f: Record, zeros: Value) -> None:
    """Put each candidate where the number of higher keys says, and take its key apart."""
    keys, number = f.candidates.cast("i64"), f.count
    groups = keys.vectors(_KEYS)
    groups[number] = -1
    with x.range(0, number) as loop:
        key = keys[loop.i]
        own = key.broadcast(_KEYS)
        with x.range(0, number, _KEYS, rank=0) as group:
            higher = (groups[group.i] > own).cast("u8").to("i64")
            group.rank += higher.count_ones()
        rank = group.rank
        with x.when(rank < f.k):
            hit = zeros | (key > _ROWS)  # the bits of the score are above
            row = _ROWS - (key & _ROWS)
            f.out_rows[rank] = x.where(hit, row, -1)
            bits = (key >> 32).to("i32")
            f.out_scores.cast("i32")[rank] = x.where(hit, bits, _MINUS_INFINITY)
