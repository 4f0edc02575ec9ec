"""What a `Plaid` index is made of: centroids of tokens, codes, and which documents each centroid has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from irkit_kernels.residual_maxsim import Tokens, assign, encode, tensor_assign, tensor_encode
from torch import Tensor

from irkit.index.faiss_package import import_faiss
from irkit.index.files import Array, allocate

__all__ = [
    "build_lists",
    "centroid_count",
    "fit_tokens",
    "nearest_codes",
    "read_lists",
    "sample_places",
    "train_centroids",
    "write_lists",
]

_DIRECT = 512  # centroids that are trained at once
_ROUNDS = 4  # of k-means: more hardly help, as residuals are stored
_REFINED = 3
_PART = 1 << 17  # tokens assigned at a time
_POINTS = 8  # tokens for each centroid, at least
_STEP = 64  # centroids come in multiples of it
_BLOCK = 1 << 20  # tokens listed at a time
_SPLIT = 1 / 1024  # how far a centroid is from that whose tokens it shares, as FAISS has it
_NARROW = 1 << 16  # documents whose numbers fit into two bytes


def centroid_count(tokens: int, limit: int) -> int:
    """Centroids for ``tokens``, of which ``limit`` are sampled at most: 10 times the root, as PLAID has."""
    count = min(int(10 * math.sqrt(tokens)), min(tokens, limit) // _POINTS)
    return max(1, count - count % _STEP if count > _STEP else count)


def sample_places(total: int, size: int, seed: int) -> Array:
    """``(min(size, total),)`` int64, ascending: one place of each of as many equal parts of ``total``."""
    if size >= total:
        return np.arange(total)
    parts = np.arange(size) + np.random.default_rng(seed).random(size)
    return np.minimum((parts * (total / size)).astype(np.int64), total - 1)


def nearest_codes(values: Array, centroids: Array, device: torch.device) -> Array:
    """The centroid ``(K, dim)`` of largest inner product with each of ``values (n, dim)``: ``(n,)`` int32."""
    if device.type == "cpu":
        return assign(values, centroids)
    nearest: Array = tensor_assign(*(_moved(x, device) for x in (values, centroids))).int().cpu().numpy()
    return nearest


def train_centroids(values: Array, count: int, length: float, seed: int, device: torch.device) -> Array:
    """Spherical k-means.

    On a CPU, FAISS makes few clusters first, then more within each, which takes a moment; some rounds over
    all of them make up for the order. A GPU does all of it at once.

    Args:
        values: ``(n, dim)`` float32, at least ``count``.
        count: Of centroids.
        length: That they get, all the same, so that the largest inner product is that of the nearest.
        seed: Of the choice of the first ones.
        device: Where to compute.

    Returns:
        ``(count, dim)`` float16 of that length (or 0, where all values are).
    """
    if device.type != "cpu":
        found: Array = _tensor_centroids(_moved(values, device), count, seed).cpu().numpy()
        return (length * found).astype(np.float16)
    faiss: Any = import_faiss()  # a second, where it is not needed

    def cluster(some: Array, groups: int) -> Array:
        clustering = faiss.Kmeans(
            some.shape[1],
            groups,
            niter=_ROUNDS,
            seed=seed + 1,  # FAISS takes no 0
            spherical=True,
            min_points_per_centroid=1,
            max_points_per_centroid=len(some),
        )
        clustering.train(some)
        centroids: Array = clustering.centroids
        return centroids

    if count <= _DIRECT:
        return (length * cluster(values, count)).astype(np.float16)
    groups = cluster(values[sample_places(len(values), _POINTS * count, seed)], math.isqrt(count))
    order, starts = _grouped(assign(values, groups), len(groups))
    parts = []
    shares = np.diff(np.rint(starts * (count / len(values))).astype(np.int64))  # sum up to count
    for start, stop, share in zip(starts[:-1], starts[1:], shares, strict=True):
        if share:
            parts.append(cluster(values[order[start:stop]], int(share)))
    centroids = np.concatenate(parts)
    for _ in range(_REFINED):
        sums = np.zeros_like(centroids)
        for start in range(0, len(values), _PART):
            part = values[start : start + _PART]
            order, starts = _grouped(assign(part, centroids), count)
            filled = np.diff(starts) > 0
            sums[filled] += np.add.reduceat(part[order], starts[:-1][filled])
        sizes = np.linalg.norm(sums, axis=1, keepdims=True)
        centroids = np.where(sizes > 0, sums / np.where(sizes > 0, sizes, 1), centroids)
    return (length * centroids).astype(np.float16)


def _tensor_centroids(values: Tensor, count: int, seed: int) -> Tensor:
    """What FAISS's k-means does, as tensors: ``(count, dim)`` of length 1, or 0, where all values are.

    Sums are of sorted values, so that they do not depend on the order in which a GPU adds.
    """
    first = np.sort(np.random.default_rng(seed).choice(len(values), count, replace=False))
    centroids = _normalised(values[_moved(first, values.device)])
    apart = 1 + _SPLIT * (-1) ** torch.arange(values.shape[1], device=values.device)
    for _ in range(_ROUNDS):
        codes = tensor_assign(values, centroids)
        sizes = torch.zeros(count, dtype=torch.int64, device=values.device)
        sizes.scatter_add_(0, codes, torch.ones_like(codes))
        sums = _sums(values[codes.argsort(stable=True)], sizes)
        # those that have no values share those of the largest, a little apart
        empty, order = sizes == 0, sizes.argsort(stable=True, descending=True)
        other = order[(empty.cumsum(0) - 1) % (~empty).sum()]
        sums = torch.where(empty[:, None], sums[other] * apart, sums)
        centroids = _normalised(sums)
    return centroids


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums ``(n, dim)`` of as many rows of ``values (total, dim)``, in turn, as ``lengths (n,)`` say."""
    sums: Tensor = torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True, initial=0)
    return sums


def _normalised(values: Tensor) -> Tensor:
    """Rows of length 1, but for those of length 0."""
    lengths = values.norm(dim=1, keepdim=True)
    return values.div(lengths.where(lengths > 0, 1))


def _moved(array: Array, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def _grouped(codes: Array, count: int) -> tuple[Array, Array]:
    """Places in order of their code, and where those of each begin: ``(n,)`` and ``(count + 1,)``."""
    starts = np.concatenate([[0], np.cumsum(np.bincount(codes, minlength=count))])
    return np.argsort(codes, kind="stable"), starts


def fit_tokens(
    values: Array, lengths: Array, centroids: Array, codes: Array, codebook: Array, device: torch.device
) -> tuple[Tokens, Array, Array]:
    """Compress documents: each token less its document's mean residual, which 8 bits hold.

    Args:
        values: ``(total, dim)`` float32, all tokens of the documents.
        lengths: ``(n,)`` tokens of each.
        centroids: ``(K, dim)`` float32.
        codes: ``(total,)`` uint16 or int32, the centroid of each token.
        codebook: Levels of residuals.
        device: Where to compute.

    Returns:
        The tokens; and the means, ``(n, dim)`` int8 with a factor for each, ``(n,)`` float32.
    """
    if device.type != "cpu":
        parts = _tensor_fit(*(_moved(x, device) for x in (values, lengths, centroids, codes, codebook)))
        coefficients, packed, of_means, factors = (part.cpu().numpy() for part in parts)
        return Tokens(codes, coefficients, packed), of_means, factors
    means, scales = _means(values - centroids[codes], lengths)
    rest = values - np.repeat(means * scales[:, None], lengths, axis=0)
    return encode(rest, centroids, codes, codebook), means, scales


def _tensor_fit(
    values: Tensor, lengths: Tensor, centroids: Tensor, codes: Tensor, codebook: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Coefficients and levels of the tokens, and means and their factors, as `fit_tokens` has them."""
    sums = _sums(values - centroids[codes.int()], lengths)
    means = sums / lengths.clamp(min=1)[:, None]
    scales = means.abs().amax(1) / 127
    scales = scales.where(scales > 0, 1)
    means = (means / scales[:, None]).round()
    row = torch.repeat_interleave(lengths, output_size=len(values))
    tokens = tensor_encode(values - (means * scales[:, None])[row], centroids, codes, codebook)
    return tokens.coefficients, tokens.packed, means.to(torch.int8), scales


def _means(residuals: Array, lengths: Array) -> tuple[Array, Array]:
    """Mean residual of each document, rounded to 8 bits: ``(n, dim)`` int8 and factors ``(n,)`` float32."""
    means = np.zeros((len(lengths), residuals.shape[1]), np.float32)
    filled = lengths > 0
    starts = np.cumsum(lengths) - lengths
    means[filled] = np.add.reduceat(residuals, starts[filled]) / lengths[filled, None] if filled.any() else 0
    scales = np.abs(means).max(1, initial=0) / np.float32(127)
    scales[scales == 0] = 1
    return np.rint(means / scales[:, None]).astype(np.int8), scales


def build_lists(codes: Array, ends: Array, count: int) -> Array:
    """``(count + 1,)`` int64: where the list of each centroid starts, once documents are listed.

    Args:
        codes: ``(tokens,)`` centroid of each token.
        ends: ``(n,)`` where the tokens of each document end.
        count: Of centroids.
    """
    sizes = np.zeros(count + 1, np.int64)
    for places, _ in _pairs(codes, ends):
        sizes[1:] += np.bincount(places, minlength=count)
    return np.cumsum(sizes)


def write_lists(path: Path, codes: Array, ends: Array, offsets: Array) -> None:
    """Write documents, ascending in the list of each centroid that they have a token of: uint16, if these do.

    Args:
        path: Of the file, which is not kept in memory.
        codes: As for `build_lists`.
        ends: As for `build_lists`.
        offsets: Its result.
    """
    path.touch()
    written = allocate(path, 0, (int(offsets[-1]),), np.uint16 if len(ends) <= _NARROW else np.int32)
    following = offsets[:-1].copy()
    for places, documents in _pairs(codes, ends):
        counts = np.bincount(places, minlength=len(following))
        before = np.cumsum(counts) - counts
        written[following[places] + np.arange(len(places)) - before[places]] = documents
        following += counts


def read_lists(stored: Array, count: int) -> Array:
    """``(count,)`` int32: what `write_lists` wrote, of the bytes of its file; narrow ones are copied."""
    narrow = len(stored) == count * np.dtype(np.uint16).itemsize
    return stored.view(np.uint16).astype(np.int32) if narrow else stored.view(np.int32)


def _pairs(codes: Array, ends: Array) -> Iterator[tuple[Array, Array]]:
    """Centroids and documents of some documents at a time, each pair once, in order of both."""
    start = 0
    while start < len(ends):
        begin = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, begin + _BLOCK, "right")))
        some = codes[begin : int(ends[stop - 1])]
        order = np.argsort(some, kind="stable")
        lengths = np.diff(ends[start:stop], prepend=begin)
        places = some[order]
        documents = np.repeat(np.arange(start, stop, dtype=np.int32), lengths)[order]
        first = np.ones(len(places), np.bool_)
        first[1:] = (places[1:] != places[:-1]) | (documents[1:] != documents[:-1])
        yield places[first], documents[first]
        start = stop
