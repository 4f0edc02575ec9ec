"""LLVM IR that scores chosen rows of dense vectors, and turns sorted keys into hits.

The ``write_*`` functions generate LLVM IR: what a docstring says is computed, the generated code computes.
The order of the additions of a score depends on the number of dimensions alone.

A key is an integer of 64 bits: the lower, the better. It holds the score, in bits that sort in reverse, and
the row, so that ties go to the lower row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .._simd import half_to_float
from .._typed import Array, Function, Record, Struct, Value, module, vector

__all__ = ["RANK", "write_hits", "write_keys", "write_products"]

LANES = 16
_AHEAD = 4  # rows that are fetched ahead
_ROWS = 0xFFFFFFFF
_NOTHING = 2**63 - 1  # the key of no row


def _rank(kind: str) -> Struct:
    """Return the frame for rows whose numbers have a kind, see `write_products`."""
    return Struct(
        8,
        dim="i64",
        values=f"{kind}*",  # (n, stride), of which dim numbers count
        n="i64",
        n_q="i64",
        queries="float*",  # (n_q, dim)
        width="i64",
        chosen="i64*",  # (n_q, width) rows; numbers outside the rows are left out
        keys="i64*",  # (n_q, width)
        k="i64",  # at most the width
        rows="i64*",  # (n_q, k)
        scores="float*",  # (n_q, k)
        stride="i64",
        scales="float*",  # (n,), for u8
    )


RANK = _rank("float")


def write_keys() -> str:
    """Write ``keys``, which scores the chosen rows of each query."""
    x = Function("keys", public=True, f=RANK)
    (f,) = x.parameters
    with _chosen_rows(x, f) as (start, i, row, fine, query, numbers):
        with x.when(fine, key=x.constant("i64", _NOTHING)) as branch:
            score = _product(x, f, query, numbers) + 0.0  # -0.0 would sort lower
            bits = score.cast("i32")
            lower = (bits ^ (bits.shift_signed(31) & 0x7FFFFFFF)) ^ -1
            branch.key = (lower.to("i64") << 32) | row
        f.keys[start + i] = branch.key
    return module(x)


def write_products(kind: str) -> str:
    """Write ``products``, which writes the score of each chosen row, of what is no row minus infinity.

    Args:
        kind: Kind of the numbers of rows: ``float``, ``half``, ``u16`` for bfloat16, or ``u8`` for codes.
    """
    x = Function("products", public=True, f=_rank(kind))
    (f,) = x.parameters
    with _chosen_rows(x, f) as (start, i, row, fine, query, numbers):
        with x.when(fine, score=x.constant("float", float("-inf"))) as branch:
            branch.score = _product(x, f, query, numbers, f.scales[row] if kind == "u8" else None)
        f.scores[start + i] = branch.score
    return module(x)


@contextmanager
def _chosen_rows(x: Function, f: Record) -> Iterator[tuple[Value, Value, Value, Value, Array, Array]]:
    """Write a loop over the chosen rows of all queries.

    The block gets the position of the first row of the query, and the number of this one; the row, and
    whether there is such a row; the query, and the numbers of the row.
    """
    last = f.width - 1
    with x.range(0, f.n_q) as each:
        query, start = f.queries.at(each.i * f.dim), each.i * f.width

        def row_at(i: Value) -> tuple[Value, Value, Array]:
            row = f.chosen[start + i]
            fine = (row >= 0) & (row < f.n)
            return row, fine, f.values.at(x.where(fine, row, 0) * f.stride)

        with x.range(0, f.width) as loop:
            *_, ahead = row_at(x.minimum(loop.i + _AHEAD, last))
            with x.range(0, f.dim, 64 // ahead.step) as lines:
                x.prefetch(ahead.at(lines.i))
            row, fine, numbers = row_at(loop.i)
            yield start, loop.i, row, fine, query, numbers


def write_hits() -> str:
    """Write ``hits``, which turns the first keys of each query, sorted, into rows and scores."""
    x = Function("hits", public=True, f=RANK)
    (f,) = x.parameters
    with x.range(0, f.n_q) as query, x.range(0, f.k) as loop:
        key, output = f.keys[query.i * f.width + loop.i], query.i * f.k + loop.i
        upper = key.shift_signed(32).to("i32") ^ -1
        score = (upper ^ (upper.shift_signed(31) & 0x7FFFFFFF)).cast("float")
        lowest = x.constant("float", float("-inf"))
        is_hit = (key != _NOTHING) & (score != lowest)
        f.rows[output] = x.where(is_hit, key & _ROWS, -1)
        f.scores[output] = x.where(is_hit, score, lowest)
    return module(x)


def _product(x: Function, f: Record, query: Array, numbers: Array, scale: Value | None = None) -> Value:
    """Return the product of a query and a row, whose numbers are codes if there is a scale."""
    kind = vector(LANES, "float")
    zero = x.constant(kind, 0)
    with x.range(0, f.dim & -(4 * LANES), 4 * LANES, sums=[zero] * 4) as loop:
        loop.sums = [
            x.fmuladd(
                _to_float(numbers.vectors(LANES, numbers.step)[loop.i + LANES * part], scale),
                query.vectors(LANES, 4)[loop.i + LANES * part],
                total,
            )
            for part, total in enumerate(loop.sums)
        ]
    first = (loop.sums[0] + loop.sums[1]) + (loop.sums[2] + loop.sums[3])
    with x.range(f.dim & -(4 * LANES), f.dim, LANES, total=first) as rest:
        left = x.constants("i32", range(LANES)) < (f.dim - rest.i).to("i32").broadcast(LANES)
        here, there = (x.masked_load(array.at(rest.i), left, align=array.step) for array in (numbers, query))
        rest.total = x.fmuladd(_to_float(here, scale), there, rest.total)
    return x.intrinsic("vector.reduce.fadd", "float", x.constant("float", 0), rest.total, flags="reassoc")


def _to_float(numbers: Value, scale: Value | None) -> Value:
    """Return a vector of numbers as float32; codes stand for the scale times what they are above 128."""
    if numbers.element == "half":
        return half_to_float(numbers)
    if numbers.element == "u16":  # bfloat16: the upper half of a float32
        return (numbers.to("u32") << 16).cast(vector(LANES, "float"))
    if scale is not None:
        return (numbers.to("i32") - 128).to("float") * scale.broadcast(LANES)
    return numbers
