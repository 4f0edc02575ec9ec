"""LLVM IR for scores of many documents, most of which are not good enough.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.

Each candidate is scored roughly first, 16 elements at once, which rounds in another order. If a document with
this rough score can be a hit, it is scored exactly, as in exact search.
"""

from __future__ import annotations

from .._typed import Function, Value, vector
from .cpu_frame import FRAME
from .cpu_score import number_of, row_scaled

__all__ = ["write_examine"]

_FETCHED = 8  # documents that are fetched ahead
_LANES = 16  # elements of a document, multiplied at once
_FLOATS = vector(_LANES, "float")


def write_examine(terms: str, weights: str) -> list[Function]:
    """Write ``score_promising``, which scores the candidates.

    Args:
        terms: Kind of the terms of a document, as for exact search.
        weights: Kind of its weights.
    """
    return [_estimate_score(terms, weights), _score_promising(terms, weights)]


def _estimate_score(terms: str, weights: str) -> Function:
    """Generate the function that stores the approximate score of a document in ``%out``."""
    x = Function("estimate_score", f=FRAME, document="i64", out="float*")
    f, document, out = x.parameters
    own_terms, own_weights = f.terms.cast(terms), f.weights.cast(weights)
    start, stop = f.offsets[document], f.offsets[document + 1]
    lanes = x.constants("i64", range(_LANES))
    dim = f.dim.to("u32").broadcast(_LANES)
    with x.range(start, stop, _LANES, sums=x.constant(_FLOATS, 0)) as loop:
        exists = lanes < (stop - loop.i).broadcast(_LANES)
        term = x.masked_load(own_terms.at(loop.i), exists).to("u32")
        if terms == "u32":
            term = x.intrinsic("umin", term.kind, term, dim)
        addresses = x.value(vector(_LANES, "ptr"), f"getelementptr float, ptr {f.table}, {term.typed}")
        gather = f"llvm.masked.gather.v{_LANES}f32.v{_LANES}p0"
        zeros, four = x.constant(_FLOATS, 0), x.constant("i32", 4)
        query_weights = x.call(gather, addresses, four, exists, zeros, kind=_FLOATS)
        weight = x.masked_load(own_weights.at(loop.i), exists)
        loop.sums = x.fma(number_of(weight), query_weights, loop.sums)
    zero = x.constant("float", 0)
    score = x.intrinsic("vector.reduce.fadd", "float", zero, loop.sums, flags="reassoc")
    out.value = row_scaled(f, weights, document, score)
    return x


def _score_promising(terms: str, weights: str) -> Function:
    """Score the candidates roughly, and exactly if the rough score is high enough."""
    x = Function("score_promising", f=FRAME)
    (f,) = x.parameters
    offsets, own_terms, own_weights = f.offsets, f.terms.cast(terms), f.weights.cast(weights)
    candidates, number = f.candidates, f.count
    out = x.local("float")

    def fetch(candidate: Value) -> None:
        ahead = candidates[candidate].to("i64")
        start, stop = offsets[ahead], offsets[ahead + 1]
        for array in (own_terms, own_weights):
            with x.range(start, stop, 64 // array.step) as line:
                x.prefetch(array.at(line.i))
            x.prefetch(array.at(x.maximum(stop - 1, start)))  # documents begin anywhere in a line

    # Fetch where the documents begin, then the first of them.
    with x.range(0, number) as loop:
        x.prefetch(offsets.at(candidates[loop.i].to("i64")))
    with x.range(0, x.minimum(number, _FETCHED)) as loop:
        fetch(loop.i)

    with x.range(0, number) as loop:
        ahead = loop.i + _FETCHED
        with x.when(ahead < number):
            fetch(ahead)
        document = candidates[loop.i].to("i64")
        x.call("estimate_score", f, document, out)
        theta = f.theta
        enough = theta * f.margin
        with x.when(out.value >= enough):
            x.call("score_document", f, document, out)
            score = out.value
            with x.when((score >= theta) & (score > 0)):
                x.call("insert_hit", f, document, score)
    return x
