"""Assign vectors to lists, and encode their residuals; see README.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._jit import cpu_features
from ..dense_scan import matmul_error, products
from ..residual_maxsim import assign as largest_product
from .codes import decode
from .lists import quantized
from .rotation import Rotation, rotate, rotate_rows, rotate_rows_back

__all__ = ["STEPS", "Encoder", "assign", "list_margins"]

Array = NDArray[Any]

STEPS = {2: 0.996, 4: 0.335}  # of the levels, in root mean squares: the best for normal residuals
_BLOCK = 1 << 22  # numbers of a block of vectors, and of its products with centroids
_TINY = 1e-30
_SPARE = 4  # dimensions that are added to vectors


def assign(vectors: Array, centroids: Array) -> Array:
    """Find the nearest centroid of each vector.

    The nearest centroid has the largest ``v c - |c|**2 / 2``. With AVX512-VNNI this is a product of vectors
    of some more dimensions, rounded to bytes to find candidates, see `residual_maxsim.assign`: 1 of 20,000
    vectors gets another centroid, hardly farther away. Otherwise it is a product in float32. The vectors
    beside a vector do not matter.

    Args:
        vectors: ``(n, dim)`` float32 or float16, such as a memory map; read in blocks.
        centroids: ``(lists, dim)`` float32, at least one.

    Returns:
        ``(n,)`` int32.
    """
    centroids = np.array(centroids, np.float32)
    lists = np.zeros(len(vectors), np.int32)
    if len(centroids) < 2 or not len(vectors):
        return lists
    halves = -0.5 * np.square(centroids).sum(1)
    nearest = _nearest_bytes if "avx512vnni" in cpu_features() else _nearest_floats
    size = max(1, _BLOCK // (centroids.shape[1] if nearest is _nearest_bytes else max(centroids.shape)))
    for start in range(0, len(vectors), size):
        block = np.array(vectors[start : start + size], np.float32)
        lists[start : start + size] = nearest(block, centroids, halves)
    return lists


def _nearest_floats(vectors: Array, centroids: Array, halves: Array) -> Array:
    """Choose by torch's product, and where its rounding might decide, by products rounded one by one."""
    columns = torch.from_numpy(centroids).T
    scores = torch.addmm(torch.from_numpy(halves), torch.from_numpy(vectors), columns).numpy()
    nearest: Array = scores.argmax(1)
    reach = np.sqrt(-2 * halves.min()) * (np.linalg.norm(vectors, axis=1) + np.sqrt(-2 * halves.min()))
    error = (2 * matmul_error(vectors.shape[1]) * reach + _TINY).astype(np.float32)
    close = np.count_nonzero(scores >= (scores.max(1) - error)[:, None], axis=1) > 1
    if close.any():
        every = np.tile(np.arange(len(centroids)), (int(close.sum()), 1))
        nearest[close] = (products(centroids, vectors[close], every) + halves).argmax(1)
    return nearest


def _nearest_bytes(vectors: Array, centroids: Array, halves: Array) -> Array:
    """Append dimensions whose product adds the halves, with numbers of the size of a centroid's."""
    size = max(float(np.abs(centroids).max(1).mean()), _TINY)
    more = ((halves - halves.mean()) / (_SPARE * size)).astype(np.float32)
    wide_vectors = np.concatenate([vectors, np.full((len(vectors), _SPARE), size, np.float32)], 1)
    wide_centroids = np.concatenate([centroids, np.repeat(more[:, None], _SPARE, 1)], 1)
    return largest_product(wide_vectors, wide_centroids)


def list_margins(vectors: Array, centroids: Array, lists: Array) -> Array:
    """Return how much better the best rows of each list are than its centroid.

    Lists are searched in the order of ``q c + |q| margin``. The margin is half the mean square of the
    residuals, in proportion to the length of the vectors. With vectors of length 1 it is a constant less
    ``|c|**2 / 2``, so lists are ordered by distance.

    Args:
        vectors: ``(n, dim)``, a sample.
        centroids: ``(lists, dim)`` float32.
        lists: ``(n,)``, the result of `assign`.

    Returns:
        ``(lists,)`` float32.
    """
    squares, length = np.zeros(len(centroids)), 0.0
    size = max(1, _BLOCK // centroids.shape[1])
    for start in range(0, len(vectors), size):
        block, own = np.asarray(vectors[start : start + size], np.float32), lists[start : start + size]
        length += float(np.square(block).sum())
        squares += np.bincount(own, np.square(block - centroids[own]).sum(1), len(centroids))
    counts = np.bincount(lists, minlength=len(centroids))
    root = max((length / max(len(vectors), 1)) ** 0.5, _TINY)
    return (squares / np.maximum(counts, 1) / (2 * root)).astype(np.float32)


class Encoder:
    """Encodes vectors for a `Searcher`.

    Args:
        centroids: ``(lists, dim)`` float32.
        rotation: Rotation of vectors of ``dim`` numbers, from `make_rotation`.
        nbits: Bits of a code per dimension: 1, 2 or 4.
        euclidean: Rows are ranked by their distance to the query instead of their product with it.
        decoded: Distances are to the vectors that codes of 2 or 4 bits stand for, as no others are kept.
        keep_int8: Also make the rows in int8 that candidates are ranked by.

    Attributes:
        rotated: ``(lists, width)`` float32, the centroids after rotation and rounding to bytes, as a search
            reads them.
    """

    def __init__(
        self,
        centroids: Array,
        rotation: Rotation,
        nbits: int = 1,
        *,
        euclidean: bool = False,
        decoded: bool = False,
        keep_int8: bool = False,
    ) -> None:
        if nbits not in (1, *STEPS):
            raise ValueError(f"dense_search: got codes of {nbits} bits, expected 1, 2 or 4")
        if decoded and nbits == 1:
            raise ValueError("dense_search: codes of 1 bit stand for no vectors; expected 2 or 4 for decoded")
        self.centroids, self.nbits = np.array(centroids, np.float32), nbits
        self.euclidean, self.decoded, self.keep_int8 = euclidean, decoded, keep_int8
        self._rotation = rotation
        codes, scales = quantized(rotate(torch.from_numpy(self.centroids), rotation).numpy())
        self.rotated = torch.from_numpy(codes * scales[:, None])
        self._squares = self.rotated.square().sum(1)

    def encode(self, vectors: Array, lists: Array | None = None) -> dict[str, Array]:
        """Encode ``vectors (n, dim)``, in blocks; the codes of a vector do not depend on the others.

        Args:
            vectors: Finite numbers.
            lists: ``(n,)`` int32, the list of each; None finds the nearest, see `assign`.

        Returns:
            By name, in the order of the vectors: ``lists (n,)`` int32; ``signs (n, width / 8)`` uint8;
            ``factors (n,)`` uint32, two bfloat16; with more than 1 bit ``planes (n, (nbits - 1) * width /
            8)`` uint8 and ``level_factors (n,)`` as ``factors``; ``biases (n,)`` float32 of euclidean
            distances; ``kept (n, width)`` int8 and ``kept_scales (n,)`` float32 if they were asked for.
        """
        size = max(1, _BLOCK // self.rotated.shape[1])
        blocks = range(0, max(1, len(vectors)), size)
        lists = assign(vectors, self.centroids) if lists is None else lists
        parts = [
            self._encode(np.array(vectors[at : at + size], np.float32), lists[at : at + size])
            for at in blocks
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _encode(self, block: Array, lists: Array) -> dict[str, Array]:
        vectors = torch.from_numpy(block)
        rotated, own = rotate_rows(vectors, self._rotation), torch.from_numpy(lists).long()
        centroids, squares = self.rotated[own], self._squares[own]
        residuals = rotated - centroids
        square = residuals.square().sum(1)
        codes: dict[str, Array] = {"lists": lists}
        signs = residuals >= 0
        if self.nbits > 1:
            levels = self._levels(residuals, square)
            signs = levels >= 0
            codes["planes"] = self._planes(levels)
            codes["level_factors"] = _factors(residuals, levels + 0.5, square, centroids, squares)
        codes["factors"] = _factors(residuals, signs.float().mul_(2).sub_(1), square, centroids, squares)
        codes["signs"] = _packed(signs)
        if self.euclidean:
            compared = vectors
            if self.decoded:
                compared = rotate_rows_back(decode(codes, self.rotated), self._rotation, block.shape[1])
            codes["biases"] = -compared.square().sum(1).numpy()
        if self.keep_int8:
            codes["kept"], codes["kept_scales"] = _int8(rotated)
        return codes

    def _levels(self, residuals: Tensor, square: Tensor) -> Tensor:
        """Round residuals to integer levels ``(n, width)``, which are decoded as ``(level + 0.5) * step``.

        Levels go from ``-2**(nbits - 1)`` to ``2**(nbits - 1) - 1``. The step of a row is proportional to the
        root mean square of its residual.
        """
        half = 1 << self.nbits - 1
        step = (square / residuals.shape[1]).sqrt() * STEPS[self.nbits]
        inverse = torch.where(step > _TINY, 1 / step, 0)
        return (residuals * inverse[:, None]).floor_().clamp_(-half, half - 1)

    def _planes(self, levels: Tensor) -> Array:
        """Return all bits of the levels but the highest, which is the sign."""
        codes = (levels + (1 << self.nbits - 1)).to(torch.uint8)
        return np.concatenate([_packed((codes & (1 << bit)) > 0) for bit in range(self.nbits - 1)], 1)


def _factors(
    residuals: Tensor,
    codes: Tensor,
    square: Tensor,
    centroids: Tensor,
    squares: Tensor,
) -> Array:
    """Compute two factors per row, stored as two bfloat16 in a uint32.

    A search estimates ``<q, residual>`` as ``a <q, code> + b <q, centroid>``:

    * ``a`` is such that ``<a code, residual>`` equals ``|residual|**2``.
    * ``b`` corrects the error of ``a code`` along the centroid. Queries that visit a list are close to its
      centroid, so this part of the error would not average out.

    Args:
        residuals: ``(n, width)``.
        codes: ``(n, width)``.
        square: ``(n,)``, squared lengths of the residuals.
        centroids: ``(n, width)``.
        squares: ``(n,)``, squared lengths of the centroids.

    Returns:
        ``(n,)`` uint32: ``a`` in the upper 16 bits, ``b`` in the lower.
    """
    products = (residuals * codes).sum(1)
    factor = torch.where(products > _TINY, square / products, 0).bfloat16()
    missing = (residuals * centroids).sum(1) - factor.float() * (codes * centroids).sum(1)
    base_factor = torch.where(squares > _TINY, missing / squares, 0).bfloat16()
    upper, lower = (part.view(torch.int16).numpy().view(np.uint16) for part in (factor, base_factor))
    return upper.astype(np.uint32) << 16 | lower


def _packed(bits: Tensor) -> Array:
    """Pack ``(n, width)`` bool to ``(n, width / 8)`` bytes, the lowest bit first."""
    return np.packbits(bits.numpy(), axis=1, bitorder="little")


def _int8(rotated: Tensor) -> tuple[Array, Array]:
    scales = rotated.abs().amax(1) / 127
    codes = (rotated / torch.where(scales > 0, scales, 1)[:, None]).round_().clamp_(-127, 127)
    return codes.to(torch.int8).numpy(), scales.numpy()
