"""Levels of residuals, found from a sample."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from .cpu_build import encode
from .reference import STEPS, WINDOW, windows

__all__ = ["train"]

_ROUNDS = 30  # more hardly help
_STRIDE = 81  # odd, so that every level occurs: windows that differ by little have levels far from each other
_FIRST = 216  # so that of one bit, where nothing is before it, the levels are opposite
_FURTHER = 1.8  # times the way to the mean, as rounding to whole steps would end many a short one


def train(residuals: NDArray[np.float32], nbits: int) -> NDArray[np.int8]:
    """As `op.train_codebook`: begin with levels of a normal distribution, then take means in turns."""
    if nbits == WINDOW:
        return np.arange(-128, 128, dtype=np.int8).reshape(1, -1)
    shares = ((np.arange(256) * _STRIDE + _FIRST) % 256 + 0.5) / 256
    levels = np.array([STEPS * NormalDist().inv_cdf(share) for share in shares]).round().astype(np.int8)
    origin, codes = np.zeros((1, residuals.shape[1]), np.float32), np.zeros(len(residuals), np.uint16)
    for _ in range(_ROUNDS):
        tokens = encode(residuals, origin, codes, levels.reshape(-1, 2**nbits))
        factors = tokens.coefficients[:, 1].astype(np.float32)
        some = factors != 0
        steps = np.clip(residuals[some] / factors[some, None], -128, 127)
        chosen = windows(tokens.packed[some], residuals.shape[1], nbits).ravel()
        counts = np.bincount(chosen, minlength=256)
        means = np.bincount(chosen, steps.ravel(), 256) / np.maximum(counts, 1)
        moved = np.clip(levels + _FURTHER * (means - levels), -128, 127)
        new = np.where(counts > 0, np.rint(moved), levels).astype(np.int8)
        if (new == levels).all():
            break
        levels = new
    return levels.reshape(-1, 2**nbits)
