"""Approximate MaxSim over compressed tokens: how a plaid index stores them, and how it is built and extended.

A compressed token is decoded as ``a * centroid + b * residual + mean``: its nearest centroid (two or four
bytes), two float16 coefficients (a least-squares fit), a residual of ``nbits`` bits per dimension (a trellis
code, see the kernel ``residual_maxsim``), and the mean residual of its document, which is stored once in 8
bits per dimension. `irkit.index.plaid_search` says how it is searched.

An index is built and extended in three steps that are committed one by one:

1. **Train.** A spherical k-means over a sample of the tokens makes about 10 times the square root of their
   number of centroids, at most 32,768. The codebook of the residuals is trained on a smaller sample. When
   tokens are added later, more centroids come to those that are there, trained on the tokens that these fit
   worst; how many, depends on the growth, and on whether the new tokens fit worse than the first ones did.
2. **Compress.** Each token becomes its nearest centroid and a coded residual, block by block. On a CPU, where
   centroids are many, it is compared with those near its nearest *hub* only (`irkit.index.clustering`). A
   build commits each block, so that a killed one resumes after the last. The tokens themselves are then
   dropped, unless ``keep_tokens`` is set.
3. **List.** Each centroid gets the list of the documents that have a token of it. Lists are rebuilt when
   more than a twentieth of the rows has none, and searches score the rows without lists.

Source: Santhanam et al., PLAID, arXiv 2205.09707, section 3 (centroids, residuals, and lists of documents),
and ColBERTv2, arXiv 2112.01488, which store centroid and residual alone, with scalar quantisation.
Coefficients, trellis code and means make the same bytes fit better.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from irkit_kernels.residual_maxsim import Tokens, decode

from irkit.core.ragged import Ragged
from irkit.core.representation import MultiVector, Representation
from irkit.errors import CorruptError
from irkit.index import clustering
from irkit.index.array_files import Array, corrupt
from irkit.index.device import check_device, on_device
from irkit.index.index_base import Index, StageProgress
from irkit.index.index_settings import PlaidConfig
from irkit.index.layout import element_positions, fitting, row_blocks, row_ends
from irkit.index.plaid_search import CpuSearch, PlaidArrays, TensorSearch, pack, plan_search, select_tokens
from irkit.index.plaid_training import PlaidCodec, on_builder, train_codec
from irkit.index.state import snapshot
from irkit.index.stored_rows import QUERY_BLOCK, StoredRows, search_in_blocks, to_float16, to_float32
from irkit.index.topk import Hits, TopK

# files of the codec; of the fields of `Tokens`, then of the means of documents and their factors
_CODEC = ("centroids.bin", "codebook.bin")
_HUB_FILES = ("hubs.bin", "hub_centroids.bin")  # of many centroids
_COMPRESSED = ("codes.bin", "coefficients.bin", "residuals.bin", "means.bin", "scales.bin")


class Plaid(StoredRows):
    """Searches compressed tokens by their centroids, lists and residuals, and scans the other rows.

    ``covered`` rows are compressed, the first ones, and ``listed`` of these have lists. ``values.bin`` has
    the tokens of the other rows in float16; with ``keep_tokens``, the tokens of all rows.
    """

    config: PlaidConfig

    def finish(self, progress: StageProgress | None = None) -> None:
        """Train centroids, compress what was added and list it, if these are many tokens.

        A build commits every block; a killed build resumes after the last one.

        Args:
            progress: Called with the stages "training", "compressing" and "listing".
        """
        report, store = progress or (lambda stage, count, total: None), self.store
        with contextlib.nullcontext() if store.building else store.update():
            total, added = self._total(), self._total() - self._first_added()
            if added > store.limits.plaid_uncompressed:
                codec = self.train(total, added, self._sample, report)
                if codec is not None:
                    self.take_codec(codec, report)
                self.code(report)
            if lists_due([self], self.covered):
                self.list_rows(report)

    # ---- the steps of `finish`, which shards take together ----

    def train(
        self, total: int, added: int, sample: Callable[[int, int], Array], report: StageProgress
    ) -> PlaidCodec | None:
        """Train the codec, or more centroids, see `train_codec`; numbers and tokens are of all shards."""
        before = self.codec() if self.codec_version else None
        return train_codec(self.config, self.store.limits, before, total, added, sample, report)

    @property
    def codec_version(self) -> int:
        """Number of centroids, which grows."""
        return self.store.rows("centroids.bin")

    def codec(self) -> PlaidCodec:
        """Return centroids and codebook, as they are stored."""
        about = self.store.meta["index"]
        if "misfit" not in about:
            raise self._damaged()
        centroids, codebook = map(self.store.read, _CODEC)
        return PlaidCodec(centroids, codebook, about["misfit"], float(about.get("length", 1)), self._hubs())

    def _hubs(self) -> clustering.Hubs | None:
        """Return the neighbourhoods of the centroids, if there are any."""
        return clustering.Hubs(*map(self.store.read, _HUB_FILES)) if self.store.rows(_HUB_FILES[0]) else None

    def take_codec(self, codec: PlaidCodec, report: StageProgress) -> None:
        """Add the centroids that are missing, and the codebook, and replace the hubs."""
        have = self.codec_version
        with self.store.update():
            self.store.append(_CODEC[0], codec.centroids[have:])
            if not have:
                self.store.append(_CODEC[1], codec.codebook)
            for name, array in zip(_HUB_FILES, codec.hubs or (), strict=False):
                self.store.drop(name)
                self.store.append(name, array)
            self.store.meta["index"] |= {"misfit": codec.misfit, "length": codec.length}

    def copy(self, source: Index, rows: Array) -> None:
        """Add documents ``rows (n,)``, ascending, of another plaid index, exactly as stored."""
        assert isinstance(source, Plaid)
        read, compressed = source.store.read, rows[rows < source.covered]
        with self.store.update():
            if len(compressed):
                if not self.codec_version:
                    for name in (*_CODEC, *(_HUB_FILES if source.store.rows(_HUB_FILES[0]) else ())):
                        self.store.append(name, read(name))
                lengths, positions = source._positions(compressed)
                means, scales = (read(name)[compressed] for name in _COMPRESSED[3:])
                parts = (*source._tokens(positions), means, scales)
                arrays = dict(zip(_COMPRESSED, parts, strict=True))
                if self.config.keep_tokens:
                    arrays["values.bin"] = read("values.bin")[positions]
                for name, array in (arrays | {"lengths.bin": lengths}).items():
                    self.store.append(name, array)
                count = len(self) + len(compressed)
                about = source.store.meta["index"] | {"rows": count, "covered": count, "listed": 0}
                self.store.meta["index"] |= about
            if len(compressed) < len(rows) or not len(rows):
                self.add(source.representations(rows[len(compressed) :]))

    @snapshot
    def stats(self) -> dict[str, Any]:
        """Return what `Index.stats` returns, and numbers about centroids and compressed rows."""
        more = {"nbits": self.config.nbits, "centroids": self.codec_version, "covered": self.covered}
        return super().stats() | more

    @property
    def covered(self) -> int:
        """Number of rows that are compressed."""
        return self._count("covered")

    coded = covered

    @property
    def listed(self) -> int:
        """Number of rows that are in the lists of the centroids."""
        return self._count("listed")

    def _total(self) -> int:
        """Return the number of tokens of all rows."""
        return int(self._ends()[-1]) if self.store.rows("lengths.bin") else 0

    def _first_added(self) -> int:
        """Return the position of the first token that is not compressed."""
        return int(self._ends()[self.covered - 1]) if self.covered else 0

    def _first_stored(self) -> int:
        """Return the position of the first uncompressed token; all tokens after it are uncompressed, too."""
        return self._total() - self.store.rows("values.bin")

    def _centroids(self) -> Array:
        """Return ``(K, dim)`` float32."""
        return self.store.derived("centroids", lambda: self.store.read("centroids.bin").astype(np.float32))

    def _codebook(self) -> Array:
        """Return the levels of residuals, ``(2**(8 - nbits), 2**nbits)`` int8."""
        codebook, bits = self.store.read("codebook.bin"), self.config.nbits
        if codebook.shape != (2 ** (8 - bits), 2**bits):
            raise CorruptError(
                f"index {self.store.path}: an earlier version coded its residuals, or its codebook is "
                "damaged; rebuild the index"
            )
        return codebook

    def arrays(self) -> PlaidArrays:
        """Return what a search reads."""
        covered, count = self.covered, self.store.rows("centroids.bin")
        offsets = np.concatenate([[0], self._ends()[:covered]])
        tokens = self._tokens(slice(int(offsets[-1])))
        starts, lists = np.zeros(1, np.int64), np.empty(0, np.int32)
        if self.store.rows("lists.bin") and self.store.rows("list_offsets.bin"):
            starts = self.store.read("list_offsets.bin")
            size = self.store.rows("lists.bin") // max(1, int(starts[-1]))
            fits = size in (2, 4) and self.store.rows("lists.bin") == size * starts[-1]
            if not fits or starts[0] or (np.diff(starts) < 0).any():
                raise self._damaged()
            lists = clustering.read_lists(self.store.read("lists.bin"), int(starts[-1]))
        if starts[-1] != len(lists) or not count:
            raise self._damaged()
        starts = np.pad(starts, (0, count + 1 - len(starts)), mode="edge")  # new centroids have no lists yet
        means, scales = (self.store.read(name)[:covered] for name in _COMPRESSED[3:])
        return PlaidArrays(
            self._centroids(), self._codebook(), tokens, means, scales, offsets, starts, lists, self.listed
        )

    def _damaged(self) -> CorruptError:
        """Return the error of arrays that contradict each other."""
        return corrupt(self.store.path, "its arrays do not fit together")

    # ---- rows as they are stored ----

    def _represent(self, rows: Array) -> Representation:
        """Return the stored documents of rows that have been checked."""
        read, first = self.store.read, self._first_stored()
        lengths, positions = self._positions(rows)
        values, compressed = np.empty((len(positions), self.dim), np.float32), positions < first
        if compressed.any():
            row = np.repeat(rows, lengths)[compressed]
            tokens = self._tokens(positions[compressed])
            with fitting(self.store.path):
                values[compressed] = decode(tokens, self._centroids(), self._codebook())
            values[compressed] += read("means.bin")[row] * read("scales.bin")[row, None]
        if not compressed.all():
            values[~compressed] = read("values.bin")[positions[~compressed] - first]
        return MultiVector(Ragged(torch.from_numpy(values), torch.from_numpy(lengths)))

    def _check_build(self, representation: Representation) -> None:
        check_device(self.config.device)

    def _encode(self, representation: Representation) -> dict[str, Array]:
        return to_float16(representation)

    def _ends(self) -> Array:
        """Return ``(n,)`` where the tokens of each row end."""

        def make() -> Array:
            store, lengths = self.store, self.store.read("lengths.bin")
            ends = row_ends(store.path, lengths, int(lengths.sum()))
            stored = (int(ends[-1]) if len(ends) else 0) - store.rows("values.bin")
            compressed = int(ends[self.covered - 1]) if self.covered else 0
            most = 0 if self.config.keep_tokens else compressed
            if not 0 <= stored <= most or compressed > store.rows("codes.bin"):
                raise self._damaged()
            return ends

        return self.store.derived("ends", make)

    def _positions(self, rows: Array) -> tuple[Array, Array]:
        """Return the lengths of rows, and the positions of their tokens."""
        lengths = self.store.read("lengths.bin")[rows]
        return lengths, element_positions(self._ends()[rows], lengths)

    def _slice(self, start: int, stop: int) -> Representation:
        ends, stored = self._ends(), self._first_stored()
        first = int(ends[start - 1]) if start else 0
        if first < stored:
            return self._represent(np.arange(start, stop))
        values = self.store.read("values.bin")[first - stored : int(ends[stop - 1]) - stored]  # not copied
        lengths = self.store.read("lengths.bin")[start:stop]
        return MultiVector(Ragged(torch.from_numpy(values), torch.from_numpy(lengths)))

    def _tokens(self, at: Array | slice) -> Tokens:
        """Return the compressed tokens at some positions."""
        return select_tokens(Tokens(*map(self.store.read, _COMPRESSED[:3])), at)

    # ---- building ----

    def _sample(self, size: int, seed: int) -> Array:
        """Return ``(size or fewer, dim)`` of the tokens that are not compressed."""
        first = self._first_added()
        positions = clustering.sample_positions(self._total() - first, size, seed)
        positions += first - self._first_stored()
        return to_float32(self.store.take("values.bin", positions))

    def code(self, report: StageProgress) -> None:
        """Compress the tokens of the rows that are not, and drop them unless they are to be kept."""
        store, n, covered = self.store, len(self), self.covered
        wide = store.rows("centroids.bin") > store.limits.narrow
        if wide:  # also where no row is new: shards may exchange rows
            with store.update():
                store.recast("codes.bin", np.int32)
        if covered == n:
            return
        row, ends, stored = store.rows("means.bin"), self._ends(), self._first_stored()
        report("compressing", row - covered, n - covered)
        for start, stop in row_blocks(ends, row, n, store.limits.plaid_block):
            first = int(ends[start - 1]) if start else 0
            values = to_float32(store.take("values.bin", np.arange(first, ends[stop - 1]) - stored))
            lengths = np.diff(ends[start:stop], prepend=first)
            with fitting(store.path):
                tokens, means, scales = self._fit(values, lengths, wide)
            with store.update():
                for name, array in zip(_COMPRESSED, (*tokens, means, scales), strict=True):
                    store.append(name, array)
            report("compressing", stop - start, n - covered)
        with store.update():
            if not self.config.keep_tokens:
                store.drop("values.bin")
            store.meta["index"]["covered"] = n

    def _fit(self, values: Array, lengths: Array, wide: bool) -> tuple[Tokens, Array, Array]:
        """Return the compressed tokens ``(total, dim)`` of documents, and their means and factors."""
        centroids, codebook, hubs = self._centroids(), self._codebook(), self._hubs()
        dtype = np.int32 if wide else np.uint16

        def compress(device: torch.device) -> tuple[Tokens, Array, Array]:
            codes = clustering.nearest_codes(values, centroids, hubs, device).astype(dtype)
            return clustering.fit_tokens(values, lengths, centroids, codes, codebook, device)

        return on_builder(self.config, 3, values, compress)

    @property
    def has_old_lists(self) -> bool:
        """Whether there are lists, and centroids without one."""
        return 0 < self.store.rows("list_offsets.bin") <= self.codec_version

    def list_rows(self, report: StageProgress) -> None:
        """Rebuild the list of documents of every centroid."""
        store, limits = self.store, self.store.limits
        report("listing", 0, None)
        codes, ends = store.read("codes.bin"), self._ends()[: self.covered]
        with fitting(store.path):
            starts = clustering.build_lists(codes, ends, store.rows("centroids.bin"), limits)
        with store.update():
            store.drop("list_offsets.bin")
            store.append("list_offsets.bin", starts)
            store.replace("lists.bin", lambda path: clustering.write_lists(path, codes, ends, starts, limits))
            store.meta["index"]["listed"] = len(ends)

    # ---- searching ----

    def _search(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        if not self.covered:
            return self._scan_all(queries, k, keep)
        search = partial(self._search_block, k=k, keep=keep)
        return search_in_blocks(search, queries, QUERY_BLOCK["multi_vector"])

    def _search_block(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        assert isinstance(queries, MultiVector)
        covered = self.covered
        arrays, search = self.loaded()
        allowed = arrays.filled if keep is None else arrays.filled & keep[:covered]
        budget = plan_search(self.config, self.store.limits, k, allowed, self.listed)
        empty = queries.tokens.lengths.numpy() == 0
        filled = queries.tokens[~empty] if empty.any() else queries.tokens
        scores = np.full((len(queries), budget.exact), -np.inf, np.float32)
        rows = np.full(scores.shape, -1)
        if len(filled):
            with fitting(self.store.path):
                scores[~empty], rows[~empty] = search(filled, budget, allowed)
            if self.config.keep_tokens:
                scores[~empty] = self._score_rows(MultiVector(filled), rows[~empty])
        if empty.any():  # a query without tokens scores 0 with everything
            first = np.flatnonzero((self.live if keep is None else keep)[:covered])[:k]
            scores[empty, : len(first)], rows[empty, : len(first)] = 0, first
        best = TopK(len(queries), k)
        best.push_pairs(scores, rows)
        # the rows added since
        if covered < len(self):
            self._scan(queries, best, covered, keep)
        return best.hits()

    def loaded(self) -> tuple[PlaidArrays, CpuSearch | TensorSearch]:
        """Return what is searched, and its search on the configured device."""
        return self.store.derived(("search", self.config.device), self._load)

    def _load(self) -> tuple[PlaidArrays, CpuSearch | TensorSearch]:
        arrays, device_name, extended = self.arrays(), self.config.device, self.store.extended

        def load(device: torch.device) -> CpuSearch | TensorSearch:
            if device.type == "cpu":
                with fitting(self.store.path):
                    packed = extended("packed", ["centroids.bin"], partial(pack, arrays.centroids))
                    return CpuSearch(arrays, packed)
            # kernels for the CPU skip wrong numbers, but tensors on a GPU would be read out of bounds
            count = len(arrays.centroids)
            for numbers, limit in ((arrays.tokens.codes, count), (arrays.lists, arrays.listed)):
                if len(numbers) and not 0 <= numbers.min() <= numbers.max() < limit:
                    raise self._damaged()
            return TensorSearch(arrays, device)

        return arrays, on_device(device_name, "searching this index", TensorSearch.needed(arrays), load)


def lists_due(parts: Sequence[Plaid], covered: int) -> bool:
    """Return whether lists are to be made anew, because many rows have none, or centroids have none.

    Args:
        parts: The shards of an index; an index that is not in shards is the only one.
        covered: Number of their rows that are compressed.
    """
    unlisted = covered - sum(part.listed for part in parts)
    return unlisted > covered // 20 or any(part.has_old_lists for part in parts)
