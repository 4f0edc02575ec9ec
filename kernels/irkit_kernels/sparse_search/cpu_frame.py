"""The frame: a table of 64-bit words that Python fills and the machine code reads and writes.

It holds the addresses of arrays, sizes, and the variables that functions share. Each function gets the
address of a frame. Each thread has its own frame.
"""

from __future__ import annotations

from .._typed import Record, Struct, Value

__all__ = ["FRAME", "LANES", "QUERY_LIST", "RANGE", "STEP", "ceiling", "unread"]

RANGE = 16384  # documents of a range: their 16-bit accumulators fill the first cache
LANES, STEP = 32, 128  # accumulators in a register; accumulators of a turn of a loop

LIST = Struct(4, postings="i64", range="u32", count="i32", share="float")  # a row of ``lists``
QUERY_LIST = Struct(postings="i64", count="i32", share="float")  # a list, as a query uses it

FEW_LIST = Struct(first="i32", count="i32")  # a row of ``few_lists``; a count of -1 means a vector

FRAME = Struct(
    8,
    # The index, see `cpu_build`: the lists of each term, the bytes of their postings, the documents.
    list_offsets="i64*",
    lists=[LIST],
    postings="u8*",
    gains="float*",
    offsets="i64*",
    terms="u8*",  # of a kind that differs by index, as weights are
    weights="u8*",
    row_scales="float*",
    # The index of few documents, see `cpu_build_few`.
    few_lists=[FEW_LIST],
    few_rows="u16*",
    few_weights="float*",
    n="i64",
    n_ranges="i64",
    dim="i64",
    survey_gain="i64",  # postings that are read in the time that a survey saves for each hit
    # Queries and results; ``keep`` is null, or a byte for each document that is 0 if it must not be found.
    n_q="i64",
    q_offsets="i64*",
    q_terms="u32*",
    q_weights="float*",
    k="i64",
    keep="u8*",
    rows="i64*",
    scores="float*",
    # A single query as the caller stores it: terms of ``term_words`` 32-bit words; 0 without such a query.
    given_terms="u8*",
    given_weights="float*",
    given_length="i64",
    term_words="i64",
    refused="i64",  # not 0: the query needs another search
    # Scratch memory.
    sums="u16*",  # an accumulator for each document of a range
    all_sums="u16*",  # an accumulator for each document of the index
    keys="i64*",  # of hits, while they are sorted
    candidates="u32*",
    query_lists=[QUERY_LIST],  # of each range, in the order of the query's terms
    list_counts="u32*",  # query lists of each range
    bounds="float*",  # of the scores of each range
    table="float*",  # the query's weight by term, 0 for all others
    marks="u8*",  # 512 bits: one is set if the query has a term of this remainder
    sorted_terms="u32*",  # of the query, in the order in which its lists are read
    sorted_weights="float*",
    sorted_gains="float*",
    # Variables of a query.
    out_rows="i64*",
    out_scores="float*",
    n_hits="i64",  # found so far
    theta="float",  # the k-th best score so far; 0 while there are fewer hits
    least_sum="i64",  # the lowest sum that a document of this score can have
    sum_scale="float",  # a score times this is a sum
    margin="float",  # 1 less the largest relative error of a sum in float32
    n_terms="i64",
    surveyed="i64",  # not 0: all lists are read before documents are scored
    # Variables of a range.
    range="i64",  # its number
    n_sums="i64",  # its documents, rounded up to a `STEP`
    bits="i64",  # a mask of documents, whose bits are visited one by one
    unread_bound="float",  # what the unread lists can add to a sum, at most
    unread_cost="i64",  # what it costs to read them, in postings
    read_cost="i64",  # what was read since the sums were last looked at
    step="i64",  # documents to score in the next turn; in `cpu_few` how far the bisection goes next
    above="i64",  # documents that are scored already
    high="i64",  # the lowest of their sums
    low="i64",  # bounds of a bisection
    top="i64",
    count="i64",  # candidates, or sums that were counted
    rescoring="i64",  # not 0: a document may be scored a second time
)


def ceiling(value: Value) -> Value:
    """Round a float32 up to an i64."""
    return value.code.intrinsic("ceil", "float", value).to("i64")


def unread(f: Record) -> Value:
    """Return what the unread lists can add to a sum, at most, as an i64."""
    bound = f.unread_bound
    return bound.code.maximum(ceiling(bound), 0)
