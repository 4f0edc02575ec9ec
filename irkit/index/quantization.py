"""Store the weights of sparse representations in few bytes."""

from __future__ import annotations

import numpy as np

from irkit.errors import BadValueError
from irkit.index.array_files import Array

LARGEST = {"uint8": 255, "uint16": 65535}
"""Integer types, and the integer that the largest weight of a row becomes."""


def quantize(weights: Array, lengths: Array, dtype: str) -> dict[str, Array]:
    """Return ``weights`` in a dtype, and ``scales (n,)`` of the rows if it is an integer type.

    Raises:
        BadValueError: A weight is too large, or below 0 for an integer type.
    """
    lowest, largest = weights.min(initial=0), weights.max(initial=0)
    if dtype in LARGEST and lowest < 0:
        raise BadValueError(
            f"adding documents: got a weight of {lowest:g}, expected 0 or more for an index of {dtype}; "
            "choose the dtype float16 or float32"
        )
    if dtype not in LARGEST:
        with np.errstate(over="ignore"):
            rounded = weights.astype(dtype)
        if not np.isfinite(rounded).all():
            raise BadValueError(
                f"adding documents: got weights of {lowest:g} to {largest:g}, expected at most 65504, the "
                "largest float16; choose the dtype float32"
            )
        return {"weights": rounded}
    most = np.zeros(len(lengths), np.float32)
    filled = lengths > 0
    if filled.any():
        most[filled] = np.maximum.reduceat(weights, (np.cumsum(lengths) - lengths)[filled])
    scales = np.maximum(most / np.float32(LARGEST[dtype]), np.finfo(np.float32).tiny)
    return {"weights": np.rint(weights / np.repeat(scales, lengths)).astype(dtype), "scales": scales}


def to_counts(weights: Array) -> Array:
    """Return how often each term occurs, in two bytes.

    Raises:
        BadValueError: A number is not a count, or too large.
    """
    with np.errstate(invalid="ignore"):
        counts = weights.astype(np.uint16)
    if (counts != weights).any():
        raise BadValueError(
            f"adding documents: got {weights[counts != weights][0]:g} as how often a term occurs; expected a "
            "whole number from 0 to 65535"
        )
    return counts
