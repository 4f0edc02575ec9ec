"""Training of the levels of residuals, from a sample, by Lloyd's algorithm over the trellis."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from .cpu_build import encode
from .reference import STEPS, WINDOW, windows

__all__ = ["train"]

_ROUNDS = 30  # more rounds hardly help
_STRIDE = 81  # odd, so every level occurs; windows that differ by little get levels far from each other
_FIRST = 216  # makes the two levels of a first single bit, which has no bits before it, opposite
_FURTHER = 1.8  # factor of the move towards the mean: rounding to integers would end many short moves


def train(residuals: NDArray[np.float32], nbits: int) -> NDArray[np.int8]:
    """Train the levels of residuals, see `op.train_codebook`.

    Levels start at quantiles of a normal distribution. Each level then moves towards the mean of the numbers
    that use it, until no level changes or after `_ROUNDS` rounds. With 8 bits nothing is trained.
    """
    if nbits == WINDOW:
        return np.arange(-128, 128, dtype=np.int8).reshape(1, -1)
    shares = ((np.arange(256) * _STRIDE + _FIRST) % 256 + 0.5) / 256
    levels = np.array([STEPS * NormalDist().inv_cdf(share) for share in shares]).round().astype(np.int8)
    origin, codes = np.zeros((1, residuals.shape[1]), np.float32), np.zeros(len(residuals), np.uint16)
    for _ in range(_ROUNDS):
        tokens = encode(residuals, origin, codes, levels.reshape(-1, 2**nbits))
        factors = tokens.coefficients[:, 1].astype(np.float32)
        nonzero = factors != 0
        steps = np.clip(residuals[nonzero] / factors[nonzero, None], -128, 127)
        chosen = windows(tokens.packed[nonzero], residuals.shape[1], nbits).ravel()
        counts = np.bincount(chosen, minlength=256)
        means = np.bincount(chosen, steps.ravel(), 256) / np.maximum(counts, 1)
        moved = np.clip(levels + _FURTHER * (means - levels), -128, 127)
        new = np.where(counts > 0, np.rint(moved), levels).astype(np.int8)
        if (new == levels).all():
            break
        levels = new
    return levels.reshape(-1, 2**nbits)
