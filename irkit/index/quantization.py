"""Weights of sparse representations in few bytes."""

from __future__ import annotations

import numpy as np

from irkit.errors import BadValueError
from irkit.index.files import Array

__all__ = ["LARGEST", "counted", "quantized"]

LARGEST = {"uint8": 255, "uint16": 65535}
"""The integers, and what the largest weight of a row becomes."""


def quantized(weights: Array, lengths: Array, dtype: str) -> dict[str, Array]:
    """``weights`` as they are kept, and ``scales (n,)`` of the rows if these are integers.

    Raises:
        BadValueError: A weight is too large, or below 0 where there are only numbers above.
    """
    lowest, largest = weights.min(initial=0), weights.max(initial=0)
    if dtype in LARGEST and lowest < 0:
        raise BadValueError(
            f"adding documents: got a weight of {lowest:g}, expected 0 or more for an index of {dtype}; "
            "choose the dtype float16 or float32"
        )
    if dtype not in LARGEST:
        with np.errstate(over="ignore"):
            kept = weights.astype(dtype)
        if not np.isfinite(kept).all():
            raise BadValueError(
                f"adding documents: got weights of {lowest:g} to {largest:g}, expected at most 65504, the "
                "largest float16; choose the dtype float32"
            )
        return {"weights": kept}
    most = np.zeros(len(lengths), np.float32)
    filled = lengths > 0
    if filled.any():
        most[filled] = np.maximum.reduceat(weights, (np.cumsum(lengths) - lengths)[filled])
    scales = np.maximum(most / np.float32(LARGEST[dtype]), np.finfo(np.float32).tiny)
    return {"weights": np.rint(weights / np.repeat(scales, lengths)).astype(dtype), "scales": scales}


def counted(weights: Array) -> Array:
    """How often each term occurs, in two bytes."""
    with np.errstate(invalid="ignore"):
        found = weights.astype(np.uint16)
    if (found != weights).any():
        raise BadValueError(
            f"adding documents: got {weights[found != weights][0]:g} as how often a term occurs; expected a "
            "whole number from 0 to 65535"
        )
    return found
