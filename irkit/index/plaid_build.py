"""How a plaid index is built and extended, in three steps that are committed one by one.

1. **Train.** A spherical k-means over a sample of the tokens makes about 10 times the square root of their
   number of centroids. The codebook of the residuals is trained on a smaller sample. When tokens are added
   later, more centroids come to those that are there, trained on the tokens that these fit worst; how many,
   depends on the growth, and on whether the new tokens fit worse than the first ones did.
2. **Compress.** Each token becomes its nearest centroid and a coded residual, block by block. A build commits
   each block, so that a killed one resumes after the last. The tokens themselves are then dropped, unless
   ``keep_tokens`` is set.
3. **List.** Each centroid gets the list of the documents that have a token of it. Lists are made anew when
   more than a twentieth of the rows has none, and searches score the rows without lists.

Source: Santhanam et al., PLAID, arXiv 2205.09707, section 3 (centroids, residuals, and lists of documents).
"""

from __future__ import annotations

import numpy as np
import torch
from irkit_kernels.residual_maxsim import Tokens, train_codebook

from irkit.index.array_files import Array
from irkit.index.clustering import (
    build_lists,
    centroid_count,
    fit_tokens,
    nearest_codes,
    sample_positions,
    train_centroids,
    write_lists,
)
from irkit.index.device import on_device
from irkit.index.index_base import StageProgress
from irkit.index.layout import fitting
from irkit.index.plaid_rows import TOKEN_ARRAYS, PlaidRows

_POINTS = 32  # tokens sampled per centroid
_UNITS = 4096  # tokens sampled to train the codebook, and to see how well centroids fit
_MISFIT = 1.02  # tokens that fit so many times worse than the first ones are of another kind
_LONGEST = 1 << 15  # length of a centroid, which float16 has to hold
_WORK = 1 << 30  # bytes of a GPU that building takes beyond its input
_PURPOSE = "building this index"


class PlaidBuilder:
    """Builds or extends what a plaid index searches."""

    def __init__(self, rows: PlaidRows, report: StageProgress) -> None:
        self._rows, self._report = rows, report
        self._store, self._config, self._limits = rows.store, rows.config, rows.store.limits

    def run(self) -> None:
        """Do the steps that are due; few tokens stay as they are."""
        rows, store = self._rows, self._store
        if rows.total() - rows.first_added() > self._limits.plaid_uncompressed:
            self._train()
            self._compress()
        new_centroids = store.rows("list_offsets.bin") <= store.rows("centroids.bin")
        if rows.covered - rows.listed > rows.covered // 20 or (rows.covered and new_centroids):
            self._list()

    def _train(self) -> None:
        """Make the first centroids, or more of them from the added tokens that they fit worst."""
        store, limit, seed = self._store, self._config.train_size, self._config.seed
        have, total = store.rows("centroids.bin"), self._rows.total()
        fixed, added = self._config.centroids, total - self._rows.first_added()
        # how many are missing
        goal = fixed or centroid_count(total, limit)
        new = min(goal - have, added)
        if have and not fixed and self._misfit() > _MISFIT * store.meta["index"]["misfit"]:
            new = max(new, 3 * added * goal // (2 * total))  # half more than a rebuild gives tokens like them
        if new <= have // 64:
            return
        # a sample of the added tokens; if there are centroids, of those that they fit worst
        self._report("training", 0, None)
        size = max(new, min(limit, _POINTS * new * (2 if have else 1)))
        values = self._sample(size, seed)
        if have:
            errors = np.linalg.norm(values - self._nearest(values), axis=1)
            values = values[np.argsort(-errors)[: max(new, len(values) // 2)]]
        length = float(store.meta["index"].get("length", 1)) if have else _typical_length(values)
        centroids = on_device(
            self._config.device,
            _PURPOSE,
            _WORK + 3 * values.nbytes,
            lambda device: train_centroids(values, new, length, seed, device, self._limits.plaid_direct),
        )
        with store.update():
            store.append("centroids.bin", centroids)
            if not have:
                sample = values[sample_positions(len(values), _UNITS, seed)]
                codebook = train_codebook(sample - self._nearest(sample), self._config.nbits)
                store.append("codebook.bin", codebook)
                store.meta["index"] |= {"misfit": self._misfit(), "length": length}

    def _misfit(self) -> float:
        """Return the share of the squared lengths of the added tokens that centroids do not explain."""
        values = self._sample(_UNITS, self._config.seed + 1)
        left = np.square(values - self._nearest(values)).sum()
        return float(left / max(np.square(values).sum(), 1e-30))

    def _sample(self, size: int, seed: int) -> Array:
        """Return ``(size or fewer, dim)`` of the tokens that are not compressed."""
        first = self._rows.first_added()
        positions = sample_positions(self._rows.total() - first, size, seed)
        positions += first - self._rows.first_stored()
        return self._store.take("values.bin", positions).astype(np.float32)

    def _nearest(self, values: Array) -> Array:
        """Return the nearest centroid ``(n, dim)`` of each token."""
        centroids = self._rows.centroids()
        codes = on_device(
            self._config.device,
            _PURPOSE,
            _WORK + 2 * values.nbytes,
            lambda device: nearest_codes(values, centroids, device),
        )
        nearest: Array = centroids[codes]
        return nearest

    def _compress(self) -> None:
        """Compress the tokens of the rows that are not, and drop them unless they are to be kept."""
        store, rows, n = self._store, self._rows, len(self._rows)
        row, ends, stored = store.rows("means.bin"), rows.ends(), rows.first_stored()
        wide = store.rows("centroids.bin") > self._limits.narrow
        if wide and store.rows("codes.bin") and store.read("codes.bin").dtype == np.uint16:
            with store.update():
                store.recast("codes.bin", np.int32)
        self._report("compressing", row - rows.covered, n - rows.covered)
        while row < n:
            # the next block of whole documents
            first = int(ends[row - 1]) if row else 0
            stop = max(row + 1, int(np.searchsorted(ends, first + self._limits.plaid_block, "right")))
            values = store.take("values.bin", np.arange(first, ends[stop - 1]) - stored).astype(np.float32)
            lengths = np.diff(ends[row:stop], prepend=first)
            with fitting(store.path):
                tokens, means, scales = self._fit(values, lengths, wide)
            with store.update():
                for name, array in zip(TOKEN_ARRAYS, tokens, strict=True):
                    store.append(name, array)
                store.append("means.bin", means)
                store.append("scales.bin", scales)
            self._report("compressing", stop - row, n - rows.covered)
            row = stop
        with store.update():
            if not self._config.keep_tokens:
                store.drop("values.bin")
            store.meta["index"]["covered"] = n

    def _fit(self, values: Array, lengths: Array, wide: bool) -> tuple[Tokens, Array, Array]:
        """Return the compressed tokens ``(total, dim)`` of documents, and their means and factors."""
        centroids, codebook = self._rows.centroids(), self._rows.codebook()

        def compress(device: torch.device) -> tuple[Tokens, Array, Array]:
            codes = nearest_codes(values, centroids, device).astype(np.int32 if wide else np.uint16)
            return fit_tokens(values, lengths, centroids, codes, codebook, device)

        return on_device(self._config.device, _PURPOSE, _WORK + 3 * values.nbytes, compress)

    def _list(self) -> None:
        """List the documents of every centroid anew."""
        store, limits = self._store, self._limits
        self._report("listing", 0, None)
        codes, ends = store.read("codes.bin"), self._rows.ends()[: self._rows.covered]
        with fitting(store.path):
            offsets = build_lists(codes, ends, store.rows("centroids.bin"), limits)
        with store.update():
            store.drop("list_offsets.bin")
            store.append("list_offsets.bin", offsets)
            store.replace("lists.bin", lambda path: write_lists(path, codes, ends, offsets, limits))
            store.meta["index"]["listed"] = len(ends)


def _typical_length(values: Array) -> float:
    """Return the typical length of tokens ``(n, dim)``, which centroids get, so that residuals are small."""
    return min(float(np.sqrt(np.square(values, dtype=np.float64).sum(1).mean())), _LONGEST) or 1.0
