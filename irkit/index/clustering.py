"""The parts of a plaid index: centroids of tokens, codes of tokens, and lists of documents by centroid."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from irkit_kernels.residual_maxsim import Tokens, assign, assign_near, encode, tensor_assign, tensor_encode
from torch import Tensor

from irkit.index.array_files import Array, allocate
from irkit.index.faiss_package import import_faiss
from irkit.index.layout import row_blocks
from irkit.index.limits import Limits

_ROUNDS = 4  # of k-means: more hardly help, as residuals are stored
_REFINED = 3  # rounds over all centroids, after those within clusters
_PART = 1 << 17  # tokens assigned at once
_POINTS = 8  # tokens per centroid, at least
_STEP = 64  # numbers of centroids are multiples of it
_MOST = 1 << 15  # centroids: a query scores all of them, and a build compares each token with all
_LONGEST = 1 << 15  # length of a centroid, which float16 has to hold
_HUBS = 32  # times the number of centroids: the square of the number of hubs
_NEAR = 4  # centroids near a hub, per hub
_HUB_STEP = 64  # hubs that are compared with all centroids at once
_SPLIT = 1 / 1024  # relative distance of a centroid from the one whose tokens it shares, as in FAISS


def centroid_count(tokens: int, limit: int) -> int:
    """Return the number of centroids for ``tokens``, of which ``limit`` are sampled.

    It is 10 times the root of ``tokens``, up to `_MOST`: more of them take time and hardly find more.
    """
    count = min(int(10 * math.sqrt(tokens)), min(tokens, limit) // _POINTS, _MOST)
    return max(1, count - count % _STEP if count > _STEP else count)


def sample_positions(total: int, size: int, seed: int) -> Array:
    """Return ``size`` positions below ``total``, ascending: one in each of as many equal parts."""
    if size >= total:
        return np.arange(total)
    parts = np.arange(size) + np.random.default_rng(seed).random(size)
    return np.minimum((parts * (total / size)).astype(np.int64), total - 1)


class Hubs(NamedTuple):
    """Neighbourhoods of centroids, so that a value is compared with a part of them: a sixth of 32,768.

    A value looks for its nearest hub, then among the centroids that are near this hub. Tokens of MiniLM miss
    their nearest centroid once in 100 times, and then find one that is hardly farther away.

    Attributes:
        vectors: ``(G, dim)`` float16, of length 1 or 0.
        near: ``(G, M)`` int32, the centroids nearest to each hub, ascending.
    """

    vectors: Array
    near: Array


def make_hubs(centroids: Array) -> Hubs:
    """Make ``sqrt(32 K)`` hubs of ``centroids (K, dim)`` float32 by k-means, each near four times as many."""
    count = math.isqrt(_HUBS * len(centroids))
    # from centroids that lie apart, as those trained within a cluster lie together
    vectors = centroids[np.arange(count) * len(centroids) // count]
    vectors = _means_of_groups(vectors, vectors)
    for _ in range(_ROUNDS):
        order, starts = _grouped(assign(centroids, vectors), count)
        vectors = _means_of_groups(_group_sums(centroids[order], starts), vectors)
    vectors = vectors.astype(np.float16)
    near = np.empty((count, min(_NEAR * count, len(centroids))), np.int32)
    for start in range(0, count, _HUB_STEP):
        scores = vectors[start : start + _HUB_STEP].astype(np.float32) @ centroids.T
        part = np.argpartition(-scores, near.shape[1] - 1, axis=1)[:, : near.shape[1]]
        near[start : start + _HUB_STEP] = np.sort(part, axis=1)
    return Hubs(vectors, near)


def nearest_codes(values: Array, centroids: Array, hubs: Hubs | None, device: torch.device) -> Array:
    """Return the centroid with the largest inner product for each value: ``(n,)`` int32.

    On a CPU, it is the nearest of those near the hub of the value, if there are ``hubs``.
    """
    if device.type == "cpu":
        if hubs is None:
            return assign(values, centroids)
        return assign_near(values, centroids, hubs.vectors.astype(np.float32), hubs.near)
    nearest: Array = tensor_assign(*(_to_device(x, device) for x in (values, centroids))).int().cpu().numpy()
    return nearest


def train_centroids(
    values: Array, count: int, length: float, seed: int, device: torch.device, limits: Limits
) -> Array:
    """Train centroids by spherical k-means: values belong to the centroid with the largest inner product.

    On a CPU, a k-means over many centroids would take minutes. So FAISS makes ``sqrt(count)`` clusters first,
    then centroids within each, in proportion to its values. A few rounds over all centroids and values then
    move values across the borders of the clusters. A GPU trains all centroids at once.

    Args:
        values: ``(n, dim)`` float32, at least ``count``.
        count: Number of centroids.
        length: Length of all centroids, so that the nearest one has the largest inner product.
        seed: Seed of the choice of the first centroids.
        device: Where to compute.
        limits: Numbers of centroids from which on a CPU does not compare all with all.

    Returns:
        ``(count, dim)`` float16 of that length (or 0, where all values are 0).
    """
    if device.type != "cpu":
        centroids: Array = _tensor_centroids(_to_device(values, device), count, seed).cpu().numpy()
        return (length * centroids).astype(np.float16)
    faiss: Any = import_faiss()  # a second, where it is not needed

    def cluster(points: Array, groups: int) -> Array:
        clustering = faiss.Kmeans(
            points.shape[1],
            groups,
            niter=_ROUNDS,
            seed=seed + 1,  # FAISS takes no 0
            spherical=True,
            min_points_per_centroid=1,
            max_points_per_centroid=len(points),
        )
        clustering.train(points)
        result: Array = clustering.centroids
        return result

    if count <= limits.plaid_direct:
        return (length * cluster(values, count)).astype(np.float16)
    # clusters of a sample, and centroids within each
    groups = cluster(values[sample_positions(len(values), _POINTS * count, seed)], math.isqrt(count))
    order, starts = _grouped(assign(values, groups), len(groups))
    parts = []
    shares = np.diff(np.rint(starts * (count / len(values))).astype(np.int64))  # they add up to count
    for start, stop, share in zip(starts[:-1], starts[1:], shares, strict=True):
        if share:
            parts.append(cluster(values[order[start:stop]], int(share)))
    centroids = np.concatenate(parts)
    # rounds over all of them
    for _ in range(_REFINED):
        sums, hubs = np.zeros_like(centroids), make_hubs(centroids) if count >= limits.plaid_hubs else None
        for start in range(0, len(values), _PART):
            part = values[start : start + _PART]
            order, starts = _grouped(nearest_codes(part, centroids, hubs, device), count)
            sums += _group_sums(part[order], starts)
        centroids = _means_of_groups(sums, centroids)
    return (length * centroids).astype(np.float16)


def _group_sums(values: Array, starts: Array) -> Array:
    """Return ``(n, dim)``: sums of stretches of ``values (total, dim)`` from ``starts (n + 1,)`` on."""
    sums, filled = np.zeros((len(starts) - 1, values.shape[1]), np.float32), np.diff(starts) > 0
    sums[filled] = np.add.reduceat(values, starts[:-1][filled])
    return sums


def _means_of_groups(sums: Array, before: Array) -> Array:
    """Return ``sums (n, dim)`` scaled to length 1, and rows of ``before`` where sums are 0."""
    sizes = np.linalg.norm(sums, axis=1, keepdims=True)
    return np.where(sizes > 0, sums / np.where(sizes > 0, sizes, 1), before)


def _tensor_centroids(values: Tensor, count: int, seed: int) -> Tensor:
    """Run k-means as FAISS does, with tensors; return centroids ``(count, dim)`` of length 1 or 0.

    Values are sorted before they are added up, so that sums do not depend on the order in which a GPU adds.
    """
    first = np.sort(np.random.default_rng(seed).choice(len(values), count, replace=False))
    centroids = _normalised(values[_to_device(first, values.device)])
    apart = 1 + _SPLIT * (-1) ** torch.arange(values.shape[1], device=values.device)
    for _ in range(_ROUNDS):
        codes = tensor_assign(values, centroids)
        sizes = torch.zeros(count, dtype=torch.int64, device=values.device)
        sizes.scatter_add_(0, codes, torch.ones_like(codes))
        sums = _sums(values[codes.argsort(stable=True)], sizes)
        # a centroid without values moves next to the centroid of a large cluster
        empty, order = sizes == 0, sizes.argsort(stable=True, descending=True)
        other = order[(empty.cumsum(0) - 1) % (~empty).sum()]
        sums = torch.where(empty[:, None], sums[other] * apart, sums)
        centroids = _normalised(sums)
    return centroids


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return ``(n, dim)``: sums of stretches of ``values (total, dim)``, of ``lengths (n,)`` rows each."""
    sums: Tensor = torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True, initial=0)
    return sums


def _normalised(values: Tensor) -> Tensor:
    """Scale rows to length 1, except rows of length 0."""
    lengths = values.norm(dim=1, keepdim=True)
    return values.div(lengths.where(lengths > 0, 1))


def _to_device(array: Array, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def _grouped(codes: Array, count: int) -> tuple[Array, Array]:
    """Return positions in order of their codes, and where each code begins (``count + 1``)."""
    starts = np.concatenate([[0], np.cumsum(np.bincount(codes, minlength=count))])
    return np.argsort(codes, kind="stable"), starts


def fit_tokens(
    values: Array, lengths: Array, centroids: Array, codes: Array, codebook: Array, device: torch.device
) -> tuple[Tokens, Array, Array]:
    """Compress documents: subtract the mean residual of its document from each token, and encode the rest.

    Args:
        values: ``(total, dim)`` float32, all tokens of the documents.
        lengths: ``(n,)`` tokens per document.
        centroids: ``(K, dim)`` float32.
        codes: ``(total,)`` uint16 or int32: the centroid of each token.
        codebook: Levels of residuals.
        device: Where to compute.

    Returns:
        The tokens, the means ``(n, dim)`` int8, and the factors of the means ``(n,)`` float32.
    """
    if device.type != "cpu":
        parts = _tensor_fit(*(_to_device(x, device) for x in (values, lengths, centroids, codes, codebook)))
        coefficients, packed, of_means, factors = (part.cpu().numpy() for part in parts)
        return Tokens(codes, coefficients, packed), of_means, factors
    means, scales = _means(values - centroids[codes], lengths)
    rest = values - np.repeat(means * scales[:, None], lengths, axis=0)
    return encode(rest, centroids, codes, codebook), means, scales


def _tensor_fit(
    values: Tensor, lengths: Tensor, centroids: Tensor, codes: Tensor, codebook: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return coefficients and residuals of the tokens, and means and their factors, as in `fit_tokens`."""
    sums = _sums(values - centroids[codes.int()], lengths)
    means = sums / lengths.clamp(min=1)[:, None]
    scales = means.abs().amax(1) / 127
    scales = scales.where(scales > 0, 1)
    means = (means / scales[:, None]).round()
    row = torch.repeat_interleave(lengths, output_size=len(values))
    tokens = tensor_encode(values - (means * scales[:, None])[row], centroids, codes, codebook)
    return tokens.coefficients, tokens.packed, means.to(torch.int8), scales


def _means(residuals: Array, lengths: Array) -> tuple[Array, Array]:
    """Return the mean residual of each document in 8 bits: ``(n, dim)`` int8 and factors ``(n,)`` float32."""
    means = np.zeros((len(lengths), residuals.shape[1]), np.float32)
    filled = lengths > 0
    starts = np.cumsum(lengths) - lengths
    means[filled] = np.add.reduceat(residuals, starts[filled]) / lengths[filled, None] if filled.any() else 0
    scales = np.abs(means).max(1, initial=0) / np.float32(127)
    scales[scales == 0] = 1
    return np.rint(means / scales[:, None]).astype(np.int8), scales


def build_lists(codes: Array, ends: Array, count: int, limits: Limits) -> Array:
    """Return where the list of each centroid starts, ``(count + 1,)`` int64.

    Args:
        codes: ``(tokens,)`` centroid of each token.
        ends: ``(n,)`` where the tokens of each document end.
        count: Number of centroids.
        limits: Sizes of blocks.
    """
    sizes = np.zeros(count + 1, np.int64)
    for centroids, _ in _pairs(codes, ends, limits.plaid_list_block):
        sizes[1:] += np.bincount(centroids, minlength=count)
    return np.cumsum(sizes)


def write_lists(path: Path, codes: Array, ends: Array, offsets: Array, limits: Limits) -> None:
    """Write the lists: the documents that have a token of each centroid, ascending.

    Args:
        path: File, which is not kept in memory.
        codes: As for `build_lists`.
        ends: As for `build_lists`.
        offsets: What `build_lists` returned.
        limits: Sizes of blocks, and the number of documents that two bytes hold.
    """
    path.touch()
    dtype = np.uint16 if len(ends) <= limits.narrow else np.int32
    written = allocate(path, 0, (int(offsets[-1]),), dtype)
    following = offsets[:-1].copy()  # where the next document of each centroid goes
    for centroids, documents in _pairs(codes, ends, limits.plaid_list_block):
        counts = np.bincount(centroids, minlength=len(following))
        before = np.cumsum(counts) - counts
        written[following[centroids] + np.arange(len(centroids)) - before[centroids]] = documents
        following += counts


def read_lists(stored: Array, count: int) -> Array:
    """Return ``(count,)`` int32 documents from the bytes that `write_lists` wrote; narrow ones are copied."""
    narrow = len(stored) == count * np.dtype(np.uint16).itemsize
    return stored.view(np.uint16).astype(np.int32) if narrow else stored.view(np.int32)


def _pairs(codes: Array, ends: Array, block: int) -> Iterator[tuple[Array, Array]]:
    """Yield centroids and documents of about ``block`` tokens at a time, each pair once, in order of both."""
    for start, stop in row_blocks(ends, 0, len(ends), block):
        first = int(ends[start - 1]) if start else 0
        part = codes[first : int(ends[stop - 1])]
        order = np.argsort(part, kind="stable")
        centroids = part[order]
        lengths = np.diff(ends[start:stop], prepend=first)
        documents = np.repeat(np.arange(start, stop, dtype=np.int32), lengths)[order]
        new = np.ones(len(centroids), np.bool_)
        new[1:] = (centroids[1:] != centroids[:-1]) | (documents[1:] != documents[:-1])
        yield centroids[new], documents[new]


def typical_length(values: Array) -> float:
    """Return the typical length of tokens ``(n, dim)``, which centroids get, so that residuals are small."""
    length = float(np.sqrt(np.square(values, dtype=np.float64).sum(1).mean()))
    return min(length, _LONGEST) or 1.0
