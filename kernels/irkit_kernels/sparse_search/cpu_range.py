"""LLVM IR for exact search of one range of documents: read its lists until few documents can be hits.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

`cpu_exact` says how this belongs to a search. A possible hit is a document with a sum of at least theta less
what the unread lists can add. The possible hits are counted now and then; as soon as it costs less to score
them than to read on, they become the candidates. Unread vectors rule some candidates out
(`write_refine_candidates`); the others are scored (`cpu_score.write_score_candidates`).
"""

from __future__ import annotations

from .._typed import Array, Function, Record, Value
from .cpu_frame import FRAME, QUERY_LIST, RANGE, STEP, ceiling, unread

__all__ = [
    "AHEAD",
    "DENSE_COST",
    "LINES",
    "MANY",
    "SUMS",
    "add_list",
    "begin_range",
    "enter_range",
    "fetch_list",
    "list_cost",
    "write_refine_candidates",
    "write_score_range",
    "write_search_range",
]

MANY = 30000  # terms of a query: the sums have room for no more
SUMS = 65536  # above all sums
_CHECK = 4096  # postings read between two looks at the sums
_SCORE = 300  # postings that are read in the time of a score
DENSE_COST = 10  # documents of a vector that are read in the time of a posting
_GO, _FEW, _END = 0, 1, 2  # after a list: read on, few documents are possible hits, it was the last
_EARLY = 0.12  # of the range's bound: when no more is unread, some documents are scored to have a theta
AHEAD, LINES = 2, 12  # lists, and lines of the cache, fetched in advance


def write_score_range() -> Function:
    """Score the possible hits of the range, beginning with the highest sums.

    If ``%complete``, score all of them; else stop at k hits.
    """
    x = Function("score_range", f=FRAME, complete="i1")
    f, complete = x.parameters
    k = f.k
    f.high = SUMS  # documents of at least this sum are scored already
    f.above = 0
    f.step = k - f.n_hits + 1
    with x.repeat() as turn:
        high = f.high
        f.low = x.maximum(f.least_sum - unread(f), 1)

        # Theta does not exist before k hits are found. Find by bisection a sum that as many reach as are
        # wanted.
        with x.when(f.n_hits < k):
            number, more = f.above + f.step, f.step
            f.low, f.top = 1, high
            with x.repeat() as bisection:
                low, top = f.low, f.top
                middle = x.maximum((low + top) >> 1, 1)
                x.call("count_sums", f, middle)
                reached = f.count >= number
                f.low = x.where(reached, middle, low)
                f.top = x.where(reached, top, middle)
                close = reached & (f.count <= number + (more >> 2))
                bisection.again_if((f.top - f.low > 1) & ~close)
            f.step = more * 2

        # Score the documents between this sum and the one before.
        low = f.low
        left = low < high
        with x.when(left):
            x.call("collect_candidates", f, low, high)
            x.call("score_candidates", f)
            x.call("count_sums", f, low)
            f.above, f.high = f.count, low
        enough = (f.n_hits == k) & ~complete
        turn.again_if(left & (low > 1) & ~enough)
    return x


def _postings(f: Record, entry: Record) -> tuple[Array, Value, Value]:
    """Return the codes of a list, its number of postings, and whether it is a vector."""
    count = entry.count.to("i64")
    return f.postings.at(entry.postings), count, count < 0


def _share(f: Record, entry: Record) -> tuple[Value, Value]:
    """Return what one step of a code adds to a sum: as a float, and as an integer in 256ths, rounded up."""
    share = entry.share * f.sum_scale
    return share, ceiling(share * 256)


def list_cost(x: Function, f: Record, entry: Record) -> Value:
    """Return what it costs to read a list of the range, in postings."""
    _, count, dense = _postings(f, entry)
    return x.where(dense, (f.n_sums.cast("u64") // DENSE_COST).cast("i64"), count)


def fetch_list(x: Function, f: Record, entry: Record) -> None:
    """Bring the beginning of a list into the cache."""
    codes, count, _ = _postings(f, entry)
    with x.range(0, x.minimum(count * 3, 64 * LINES), 64) as loop:
        x.prefetch(codes.at(loop.i))


def add_list(x: Function, f: Record, entry: Record) -> Value:
    """Add a list to the sums; return what one step of a code adds to a sum."""
    share, factor = _share(f, entry)
    codes, count, dense = _postings(f, entry)
    with x.when(dense):
        x.call("add_vector", f, codes, factor)
    with x.when(~dense):
        x.call("add_postings", f, codes, count, factor)
    return share


def enter_range(x: Function, f: Record, this: Value) -> Value:
    """Make a range the one that functions work on; return the number of its documents."""
    documents = x.minimum(f.n - this * RANGE, RANGE)
    f.range, f.n_sums = this, (documents + (STEP - 1)) & -STEP
    return documents


def begin_range(x: Function, f: Record, this: Value) -> Value:
    """Begin a range, whose sums are all 0; return the number of its documents."""
    documents, sums = enter_range(x, f, this), f.sums.cast("u8").vectors(64, align=64)
    with x.range(0, f.n_sums * 2, 64) as loop:
        sums[loop.i] = 0
    return documents


def write_search_range() -> Function:
    """Search a range: read its lists in order until few documents are possible hits, and score these."""
    x = Function("search_range", f=FRAME, range="i64")
    f, this = x.parameters
    f.rescoring = 0
    documents, sums = begin_range(x, f, this), f.sums
    many = f.n_terms > MANY  # the sums would overflow: all documents are scored
    with x.when(many), x.range(0, documents) as loop:
        sums[loop.i] = 1

    # The query's lists in the range, what they can add to a sum, and what it costs to read them.
    n_lists = f.list_counts[this].to("i64")
    lists = f.query_lists.at(this * f.n_terms)
    bound = f.bounds[this] * f.sum_scale
    f.unread_bound = bound
    f.read_cost = 0
    with x.range(0, n_lists, cost=0) as loop:
        loop.cost += list_cost(x, f, lists[loop.i])
    f.unread_cost = loop.cost

    following, state, early = x.local("i64"), x.local("i64"), x.local("float")
    following.value = 0
    early.value = bound * _EARLY

    def look(unread_bound: Value) -> None:
        """Decide from the sums: once, score some documents early; then, whether few are possible hits."""
        ready = (f.n_hits < f.k) & (unread_bound <= early.value)
        with x.when(ready):
            x.call("score_range", f, False)
            f.rescoring = 1
            early.value = -1  # not again
        low = f.least_sum - unread(f)
        with x.when((f.n_hits == f.k) & (low > 0)):
            f.read_cost = 0
            x.call("count_sums", f, low)
            cheap = f.count * _SCORE <= f.unread_cost
            state.value = x.where(cheap, _FEW, _GO)

    def read() -> Value:
        """Read the next list; return whether to read on."""
        # Fetch a list ahead, then add this one to the sums.
        i = following.value
        fetch_list(x, f, lists[x.minimum(i + AHEAD, n_lists - 1)])
        share = add_list(x, f, lists[i])
        # Note what is still unread, and look at the sums now and then.
        cost = list_cost(x, f, lists[i])
        unread_bound = f.unread_bound - share * 255
        f.unread_bound = unread_bound
        f.unread_cost -= cost
        f.read_cost += cost
        i = i + 1
        following.value = i
        state.value = x.where(i < n_lists, _GO, _END)
        with x.when((f.read_cost >= _CHECK) & (i < n_lists)):
            look(unread_bound)
        return state.value == _GO

    state.value = _END
    with x.when(~many), x.repeat() as turn:
        turn.again_if(read())

    # Score the possible hits: if few, after a look at the unread vectors, else in the order of their sums.
    few = state.value == _FEW
    with x.when(few):
        x.call("collect_candidates", f, f.least_sum - unread(f), SUMS)
        x.call("refine_candidates", f, lists, following.value, n_lists)
        x.call("score_candidates", f)
    with x.when(~few):
        x.call("score_range", f, True)
    return x


def write_refine_candidates() -> Function:
    """Look the candidates up in the unread vectors, and keep those that are still possible hits."""
    x = Function("refine_candidates", f=FRAME, lists=[QUERY_LIST], start="i64", stop="i64")
    f, lists, start, stop = x.parameters
    candidates, number, sums = f.candidates, f.count, f.sums
    first = f.range * RANGE

    def sum_of(candidate: Value) -> tuple[Value, Array]:
        """Return the row of a candidate within the range, and its sum."""
        row = candidates[candidate].to("i64") - first
        return row, sums.at(row)

    # Postings cannot be looked up by row, so only vectors are.
    with x.range(start, stop) as loop:
        codes, _, dense = _postings(f, lists[loop.i])
        with x.when(dense):
            share, factor = _share(f, lists[loop.i])
            with x.range(0, number) as candidate:
                row, total = sum_of(candidate.i)
                code = codes[row].to("i64")
                exists = (code != 0).to("i64")
                added = ((code * factor >> 8) + exists).to("u16")
                total.value += added
            f.unread_bound -= share * 255

    # Keep the possible hits, side by side.
    low = f.least_sum - unread(f)
    with x.range(0, number, kept=0) as loop:
        row, total = sum_of(loop.i)
        possible = total.value.to("i64") >= low
        candidates[loop.kept] = (first + row).to("u32")
        loop.kept += possible.to("i64")
    f.count = loop.kept
    return x
