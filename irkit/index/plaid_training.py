"""The codec of a plaid index: how its centroids and codebook are trained, and more centroids as it grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from irkit_kernels.residual_maxsim import train_codebook

from irkit.index import clustering
from irkit.index.array_files import Array
from irkit.index.device import on_device
from irkit.index.index_base import StageProgress
from irkit.index.index_settings import PlaidConfig
from irkit.index.limits import Limits

T = TypeVar("T")

_POINTS = 32  # tokens sampled per centroid
_UNITS = 4096  # tokens sampled to train the codebook, and to see how well centroids fit
_MISFIT = 1.02  # from this ratio of misfits on, added tokens count as another kind than the first ones
_WORK = 1 << 30  # bytes of a GPU that building takes beyond its input


class PlaidCodec(NamedTuple):
    """What compressed tokens refer to.

    Attributes:
        centroids: ``(K, dim)`` float16.
        codebook: Levels of residuals, ``(2**(8 - nbits), 2**nbits)`` int8.
        misfit: Share of the squared lengths of the first tokens that the first centroids did not explain.
        length: Length of a centroid.
        hubs: Neighbourhoods of the centroids; None for few centroids.
    """

    centroids: Array
    codebook: Array
    misfit: float
    length: float
    hubs: clustering.Hubs | None


def train_codec(
    config: PlaidConfig,
    limits: Limits,
    before: PlaidCodec | None,
    total: int,
    added: int,
    sample: Callable[[int, int], Array],
    report: StageProgress,
) -> PlaidCodec | None:
    """Make the first centroids, or more of them from the added tokens that they fit worst.

    Args:
        config: Settings of the index.
        limits: Its limits.
        before: Its codec; None before the first training.
        total: Number of tokens of all rows.
        added: Number of tokens that are not compressed.
        sample: Takes a size and a seed; returns ``(size or fewer, dim)`` float32 of the added tokens.
        report: Called with the stage "training".

    Returns:
        The codec, whose first centroids are those of ``before``; None if it needs no more.
    """
    have, fixed, seed = len(before.centroids) if before else 0, config.centroids, config.seed
    # how many are missing
    goal = fixed or clustering.centroid_count(total, config.train_size)
    new = min(goal - have, added)
    if before and not fixed:
        misfit = _misfit(config, before.centroids, sample)
        if misfit > _MISFIT * before.misfit:
            new = max(new, 3 * added * goal // (2 * total))  # half more than a rebuild gives tokens like them
    if new <= have // 64:
        return None
    # a sample of the added tokens; if there are centroids, of those that they fit worst
    report("training", 0, None)
    values = sample(max(new, min(config.train_size, _POINTS * new * (2 if before else 1))), seed)
    if before:
        errors = np.linalg.norm(values - _nearest(config, before.centroids, values), axis=1)
        values = values[np.argsort(-errors)[: max(new, len(values) // 2)]]
    length = before.length if before else clustering.typical_length(values)
    centroids = on_builder(
        config,
        3,
        values,
        lambda device: clustering.train_centroids(values, new, length, seed, device, limits),
    )
    if before:
        centroids = np.concatenate([before.centroids, centroids])
        return before._replace(centroids=centroids, hubs=_hubs(centroids, limits))
    # the codebook, from a smaller sample
    values = values[clustering.sample_positions(len(values), _UNITS, seed)]
    codebook = train_codebook(values - _nearest(config, centroids, values), config.nbits)
    hubs = _hubs(centroids, limits)
    return PlaidCodec(centroids, codebook, _misfit(config, centroids, sample), length, hubs)


def _hubs(centroids: Array, limits: Limits) -> clustering.Hubs | None:
    many = len(centroids) >= limits.plaid_hubs
    return clustering.make_hubs(centroids.astype(np.float32)) if many else None


def _misfit(config: PlaidConfig, centroids: Array, sample: Callable[[int, int], Array]) -> float:
    """Return the share of the squared lengths of the added tokens that centroids do not explain."""
    values = sample(_UNITS, config.seed + 1)
    left = np.square(values - _nearest(config, centroids, values)).sum()
    return float(left / max(np.square(values).sum(), 1e-30))


def _nearest(config: PlaidConfig, centroids: Array, values: Array) -> Array:
    """Return the nearest of ``centroids (K, dim)`` of each token, ``(n, dim)`` float32."""
    exact = centroids.astype(np.float32)
    codes = on_builder(
        config, 2, values, lambda device: clustering.nearest_codes(values, exact, None, device)
    )
    nearest: Array = exact[codes]
    return nearest


def on_builder(config: PlaidConfig, copies: int, values: Array, work: Callable[[torch.device], T]) -> T:
    """Do work on the configured device, where it takes ``copies`` times the bytes of ``values``."""
    return on_device(config.device, "building this index", _WORK + copies * values.nbytes, work)
