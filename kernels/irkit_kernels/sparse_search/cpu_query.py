"""LLVM IR of the function that Python calls: a loop over the queries of a frame.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.
"""

from __future__ import annotations

from .._typed import Function
from .cpu_frame import FRAME

__all__ = ["write_main"]


def write_main(name: str) -> Function:
    """Write ``name(frame)``, which calls ``query`` for each of ``n_q`` queries.

    A single query can be given as the caller stores it, with terms of ``term_words`` 32-bit words. The code
    copies this query without its terms of weight 0. ``refused`` is set if fewer than k documents are found
    for this query. It is also set if a weight is negative or not finite; then nothing is searched.
    """
    x = Function(name, public=True, f=FRAME)
    (f,) = x.parameters
    terms, weights = f.q_terms, f.q_weights
    for words, kind in ((1, "u32"), (2, "u64")):
        with x.when(f.term_words == words):
            with x.range(0, f.given_length, number=0, refused=0) as loop:
                source = f.given_terms.cast(kind).at(loop.i).cast("u32")  # the lower half of 64 bits is first
                weight = f.given_weights[loop.i]
                terms[loop.number] = source.value
                weights[loop.number] = weight
                fine = (weight >= 0) & (weight < float("inf"))
                loop.number += (weight != 0).to("i64")
                loop.refused += (~fine).to("i64")
            f.refused = loop.refused
            offsets = f.q_offsets
            offsets[0] = 0
            offsets[1] = x.where(loop.refused == 0, loop.number, 0)
    with x.range(0, f.n_q) as loop:
        x.call("search_query", f, loop.i)
    missing = (f.n_hits < f.k).to("i64")
    f.refused = f.refused | missing
    return x
