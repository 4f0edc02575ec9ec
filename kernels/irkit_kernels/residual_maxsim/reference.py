"""The definitions of the codec and of the steps of a search, in numpy: slow."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "NBITS",
    "NOTHING",
    "STEPS",
    "TURNS",
    "WINDOW",
    "CentroidTable",
    "Tokens",
    "assign_reference",
    "best_path",
    "bits_of",
    "centroid_table_reference",
    "decode_reference",
    "encode_reference",
    "interaction_reference",
    "packed_width",
    "probe_reference",
    "quantize_signed",
    "residual_maxsim_reference",
    "windows",
]

NBITS = (1, 2, 4, 8)
WINDOW = 8  # bits that choose a level: the number's own, and the last ones before
STEPS = 32  # levels are in steps of 1 / 32 of a residual's root mean square
TURNS = 2  # rounds of choosing levels and fitting coefficients; each lowers the error
NOTHING = 1e-6  # a smaller fraction of a sum of squares is rounding error
FLOOR, CEILING = -0.25, 1.0  # the range of a centroid's score in 8 bits, relative to the largest possible one

Array = NDArray[np.generic]


class Tokens(NamedTuple):
    """Encoded tokens; a slice of all three arrays is a slice of the tokens.

    Attributes:
        codes: ``(n,)`` uint16 or int32, the centroid of each token.
        coefficients: ``(n, 2)`` float16, ``a`` and ``b`` of ``token = a * centroid + b * levels``.
        packed: ``(n, bytes)`` uint8, the bits that choose the levels, see `windows`.
    """

    codes: NDArray[np.uint16] | NDArray[np.int32]
    coefficients: NDArray[np.float16]
    packed: NDArray[np.uint8]


class CentroidTable(NamedTuple):
    """The scores of all centroids for a query.

    Attributes:
        scores: ``(K, m)`` float32, inner products of vectors rounded to 8 bits.
        bytes: ``(K, m)`` uint8, the scores on a common scale of 256 steps.
    """

    scores: NDArray[np.float32]
    bytes: NDArray[np.uint8]


def quantize_signed(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round rows ``(n, d)`` to int8 in -127 .. 127: ``x ~ q * scale (n,)``; rows of zeros have scale 1."""
    high = np.abs(x).max(1, initial=0)
    scale = np.where(high > 0, high / np.float32(127), 1).astype(np.float32)
    return np.rint(x / scale[:, None]).astype(np.int8), scale


def packed_width(dim: int, nbits: int) -> int:
    """Return the bytes per token of ``dim`` levels, a multiple of 4."""
    return -(-dim * nbits // 32) * 4


def bits_of(codebook: Any) -> int:
    """Return ``nbits``, the bits per number, of a codebook ``(2**(8 - nbits), 2**nbits)``."""
    return int(codebook.shape[1]).bit_length() - 1


def windows(packed: NDArray[np.uint8], dim: int, nbits: int) -> NDArray[np.uint8]:
    """Return which of the 256 levels each number of ``packed (n, width)`` has.

    The bytes of a token are one row of bits, high bits first. Number ``plane * width + i`` is the
    ``plane``-th of byte ``i``. Its level is chosen by the 8 bits that end there: its own and the ones
    before, with zeros before the first byte.

    Returns:
        ``(n, dim)`` uint8.
    """
    both = packed.astype(np.uint16)
    both[:, 1:] |= both[:, :-1] << 8
    shifts = range(WINDOW - nbits, -1, -nbits)
    return np.concatenate([both >> shift & 255 for shift in shifts], axis=1)[:, :dim].astype(np.uint8)


def assign_reference(values: NDArray[np.float32], centroids: NDArray[np.float32]) -> NDArray[np.int32]:
    """Return the centroid ``(K, d)`` with the largest inner product for each row of ``values (n, d)``."""
    rows = max(1, 2**24 // len(centroids))
    blocks = [values[i : i + rows] @ centroids.T for i in range(0, len(values), rows)]
    return np.concatenate([np.empty(0, np.int64), *(block.argmax(1) for block in blocks)]).astype(np.int32)


def encode_reference(
    values: NDArray[np.float32], centroids: NDArray[np.float32], codes: Array, codebook: NDArray[np.int8]
) -> Tokens:
    """Choose the best levels and fit both coefficients by least squares, in turns, in float64."""
    # without levels: the best multiple of the centroid, and the scale of its residual
    nbits, (x, c) = bits_of(codebook), (v.astype(np.float64) for v in (values, centroids[codes]))
    xx, cc, xc = ((p * q).sum(1) for p, q in ((x, x), (c, c), (x, c)))
    a, b = _ratio(xc, cc, cc > 0), np.zeros(len(x))
    square = np.square(x - a[:, None] * c).sum(1)
    has_residual = square > NOTHING * xx
    factor = STEPS * _ratio(x.shape[1], square, has_residual) ** 0.5
    for _ in range(TURNS):
        # levels of the residual
        steps = np.rint(np.clip(factor[:, None] * (x - a[:, None] * c), -128, 127))
        packed = best_path(steps, codebook)
        u = codebook.ravel()[windows(packed, x.shape[1], nbits)].astype(np.float64)
        cu, uu, xu = ((p * q).sum(1) for p, q in ((c, u), (u, u), (x, u)))
        # coefficients: the normal equations, or one coefficient alone where they have no unique solution
        det = cc * uu - cu * cu
        fits = has_residual & (det > NOTHING * cc * uu)
        b_alone = _ratio(xu, uu, has_residual & (cc == 0) & (uu > 0))
        a = np.where(fits, _ratio(xc * uu - xu * cu, det, fits), _ratio(xc, cc, cc > 0))
        b = np.where(fits, _ratio(xu * cc - xc * cu, det, fits), b_alone)
        factor = _ratio(1, b, b != 0)
    most = np.finfo(np.float16).max
    coefficients = np.clip(np.stack([a, b], 1), -most, most).astype(np.float16)
    return Tokens(codes, coefficients, packed)  # type: ignore[arg-type]


def best_path(steps: NDArray[np.float64], codebook: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Return the bytes ``(n, width)`` whose levels are nearest to ``steps (n, d)``, by Viterbi's algorithm.

    `cpu_trellis` explains the trellis.
    """
    (n, dim), nbits = steps.shape, bits_of(codebook)
    width, planes, states = packed_width(dim, nbits), WINDOW // nbits, 2 ** (WINDOW - nbits)
    order = (
        np.arange(planes * width).reshape(planes, width).T.ravel()
    )  # the numbers in the order of their bits

    # forward: the cheapest window into each state
    costs = np.full((n, states), np.inf)
    costs[:, 0] = 0
    first = np.empty((len(order), n, states), np.uint8)  # the bits of the window that leave it next
    for i, number in enumerate(order):
        all_costs = np.repeat(costs, 2**nbits, axis=1)
        if number < dim:
            all_costs += np.square(steps[:, number, None] - codebook.ravel())
        by_state = all_costs.reshape(n, 2**nbits, states)
        first[i], costs = by_state.argmin(1), by_state.min(1)

    # backward: from the cheapest state
    state = costs.argmin(1)
    packed = np.empty((n, width), np.uint8)
    for i in range(len(first) - 1, -1, -1):
        window = first[i, np.arange(n), state].astype(np.int64) * states + state
        if i % planes == planes - 1:
            packed[:, i // planes] = window
        state = window >> nbits
    return packed


def _ratio(a: Any, b: NDArray[np.float64], valid: NDArray[np.bool_]) -> NDArray[np.float64]:
    return np.where(valid, a / np.where(valid, b, 1), 0)


def decode_reference(
    tokens: Tokens, centroids: NDArray[np.float32], codebook: NDArray[np.int8]
) -> NDArray[np.float32]:
    """Return ``a * centroid + b * levels``, ``(n, d)``."""
    levels = codebook.ravel().astype(np.float32)[
        windows(tokens.packed, centroids.shape[1], bits_of(codebook))
    ]
    a, b = tokens.coefficients.astype(np.float32).T
    values: NDArray[np.float32] = a[:, None] * centroids[tokens.codes] + b[:, None] * levels
    return values


def centroid_table_reference(query: NDArray[np.float32], centroids: NDArray[np.float32]) -> CentroidTable:
    """Score every centroid ``(K, d)`` for every token of the query ``(m, d)``."""
    (q, q_scale), (c, c_scale) = quantize_signed(query), quantize_signed(centroids)
    scores = (c.astype(np.int32) @ q.astype(np.int32).T).astype(np.float32) * c_scale[:, None] * q_scale
    norms = [np.sqrt(np.square(x).sum(1).max(initial=0)) for x in (query, centroids)]
    reach = np.float32(max(norms[0] * norms[1], 1e-30))
    steps = np.rint((scores / reach - FLOOR) * (255 / (CEILING - FLOOR)))
    return CentroidTable(scores, np.clip(steps, 0, 255).astype(np.uint8))


def probe_reference(
    table: CentroidTable,
    nprobe: int,
    list_offsets: NDArray[np.int64],
    list_documents: NDArray[np.int32],
    keep: NDArray[np.bool_],
    count: int,
) -> NDArray[np.int32]:
    """Return, in order, the documents that have the most of the ``nprobe`` best centroids of query tokens."""
    near = (table.scores >= np.sort(table.scores, 0)[-nprobe:][0]).sum(1)
    counts = np.zeros(len(keep), np.int64)
    for centroid in np.flatnonzero(near):
        counts[list_documents[list_offsets[centroid] : list_offsets[centroid + 1]]] += near[centroid]
    counts = np.minimum(counts, 255) * keep
    least = max(1, np.sort(counts)[::-1][:count][-1]) if len(counts) >= count else 1
    return np.flatnonzero(counts >= least).astype(np.int32)


def interaction_reference(
    table: CentroidTable, codes: Array, offsets: NDArray[np.int64], rows: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Score each document ``rows[i]`` by MaxSim of its centroids, in bytes; 0 without tokens."""
    scores = [table.bytes[codes[offsets[row] : offsets[row + 1]]] for row in rows]
    return np.array([s.max(0, initial=0).sum(dtype=np.int32) for s in scores], np.int32)


def residual_maxsim_reference(
    query: NDArray[np.float32],
    table: CentroidTable,
    tokens: Tokens,
    offsets: NDArray[np.int64],
    codebook: NDArray[np.int8],
    rows: NDArray[np.int32],
) -> NDArray[np.float64]:
    """Score each document ``rows[i]`` by MaxSim, with an 8-bit query, in float64; -inf without tokens."""
    nbits, (q, scale) = bits_of(codebook), quantize_signed(query)
    out = np.full(len(rows), -np.inf)
    for i, row in enumerate(rows):
        part = slice(offsets[row], offsets[row + 1])
        codes = tokens.codes[part]
        levels = codebook.ravel().astype(np.float64)[windows(tokens.packed[part], query.shape[1], nbits)]
        a, b = tokens.coefficients[part].astype(np.float64).T
        scores = a[:, None] * table.scores[codes] + b[:, None] * (levels @ q.T * scale)
        if len(codes):
            out[i] = scores.max(0).sum()
    return out
