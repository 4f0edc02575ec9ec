"""Approximate MaxSim over compressed tokens: centroids, residuals of a few bits, inverted lists."""

from __future__ import annotations

import contextlib
import math
from typing import Any, ClassVar

import numpy as np
import torch
from irkit_kernels.residual_maxsim import Tokens, decode, train_codebook

from irkit.errors import CorruptError
from irkit.index.base import Index, StageProgress
from irkit.index.clustering import (
    build_lists,
    centroid_count,
    fit_tokens,
    nearest_codes,
    read_lists,
    sample_places,
    train_centroids,
    write_lists,
)
from irkit.index.config import PlaidConfig
from irkit.index.device import check_device, on_device
from irkit.index.files import REMEDY, Array
from irkit.index.flat import Flat, halved
from irkit.index.layout import fitting, row_ends
from irkit.index.plaid_search import CpuSearch, Effort, Structure, TensorSearch, select_tokens
from irkit.index.state import pinned
from irkit.index.topk import Hits, TopK
from irkit.ragged import Ragged
from irkit.representation import MultiVector, Representation

__all__ = ["Plaid"]

_ARRAYS = ("codes.bin", "coefficients.bin", "residuals.bin")  # fields of Tokens
_NARROW = 1 << 16  # centroids whose numbers fit into two bytes
_FEW = 1 << 14  # tokens that are scored as they are sooner than compressed
_POINTS = 32  # tokens sampled for each centroid
_UNITS = 4096  # tokens sampled to train the codebook, and to see how well centroids fit
_MISFIT = 1.02  # times as much as the first tokens is another kind of tokens
_SCAN = 2048  # documents that are ranked by their centroids sooner than looked up
_BLOCK = 1 << 16  # tokens compressed at a time
_CANDIDATES = 256  # at least
_RANKED = 4  # times as many documents of visited centroids are ranked by their centroids
_VISITED = 32  # centroids a query, at least
_LONGEST = 1 << 15  # centroids, which float16 has to hold
_WORK = 1 << 30  # bytes of a GPU that building takes beyond its input
_MARGIN = 4  # documents scored exactly beyond those wanted: whole numbers may confuse neighbours


class Plaid(Flat):
    """Compressed tokens of the first rows; those of the rows added since are kept whole until ``finish``.

    A token is ``a * centroid + b * residual``: the number of the nearest centroid, two float16 factors (a
    least-squares fit), and a residual of a few bits a dimension (a trellis code). Scores are exact for these
    tokens; with ``keep_tokens``, for those that were added.

    A search visits the centroids nearest to the query's tokens and ranks the documents listed there most
    often by their centroids alone. It scores the residuals of the best in whole numbers, and the best of
    these exactly.

    Source: Santhanam et al., PLAID, arXiv 2205.09707.
    """

    kinds: ClassVar[tuple[str, ...]] = ("multi_vector",)
    config: PlaidConfig

    def finish(self, progress: StageProgress | None = None) -> None:
        """Train centroids or add some, compress what was added and list it, if it is many tokens.

        A build commits every block, so that a killed one goes on after the last.

        Args:
            progress: Told of the stages "training", "compressing" and "listing".
        """
        report, store = progress or (lambda stage, count, total: None), self.store
        with contextlib.nullcontext() if store.building else store.update():
            if self._total() - self._begin() > _FEW:
                self._train(report)
                self._compress(report)
            covered, listed = self._state("covered"), self._state("listed")
            grown = store.rows("list_offsets.bin") <= self._count()
            if covered - listed > covered // 20 or (covered and grown):
                self._list(report)

    @pinned
    def representations(self, rows: Array) -> Representation:
        """The stored documents of ``rows (n,)``, in this order."""
        read, kept = self.store.read, self._kept()
        lengths, places = self._places(rows)
        values, compressed = np.empty((len(places), self.dim), np.float32), places < kept
        if compressed.any():
            row = np.repeat(rows, lengths)[compressed]
            tokens = select_tokens(self._encoded(), places[compressed])
            with fitting(self.store.path):
                values[compressed] = decode(tokens, self._centroids(), self._codebook())
            values[compressed] += read("means.bin")[row] * read("scales.bin")[row, None]
        if not compressed.all():
            values[~compressed] = read("values.bin")[places[~compressed] - kept]
        return MultiVector(Ragged(torch.from_numpy(values), torch.from_numpy(lengths)))

    def copy(self, source: Index, rows: Array) -> None:
        """Add documents of another `Plaid`; what is compressed stays as it is."""
        assert isinstance(source, Plaid)
        read, compressed = source.store.read, rows[rows < source._state("covered")]
        with self.store.update():
            if len(compressed):
                for name in ("centroids.bin", "codebook.bin") if not self._count() else ():
                    self.store.append(name, read(name))
                lengths, places = source._places(compressed)
                arrays = dict(zip(_ARRAYS, select_tokens(source._encoded(), places), strict=True))
                arrays |= {name: read(name)[compressed] for name in ("means.bin", "scales.bin")}
                if self.config.keep_tokens:
                    arrays["values.bin"] = read("values.bin")[places]
                for name, array in (arrays | {"lengths.bin": lengths}).items():
                    self.store.append(name, array)
                count = len(self) + len(compressed)
                about = source.store.meta["index"] | {"rows": count, "covered": count, "listed": 0}
                self.store.meta["index"] = about
            if len(compressed) < len(rows) or not len(rows):
                self.add(source.representations(rows[len(compressed) :]))

    @pinned
    def stats(self) -> dict[str, Any]:
        """As of every index; bits of a residual, centroids, and how many rows are compressed."""
        centroids = self._count()
        more = {"nbits": self.config.nbits, "centroids": centroids, "covered": self._state("covered")}
        return super().stats() | more

    def _append(self, representation: Representation) -> None:
        if not len(self):
            check_device(self.config.device)  # what is wrong shows before the work is done
        super()._append(representation)

    def _stored(self, representation: Representation) -> dict[str, Array]:
        return halved(representation)

    # ---- building ----

    def _train(self, report: StageProgress) -> None:
        """Make the first centroids, or more of them from the added tokens that they fit worst."""
        store, have, limit, seed = self.store, self._count(), self.config.train_size, self.config.seed
        fixed, total, added = self.config.centroids, self._total(), self._total() - self._begin()
        wanted = fixed or centroid_count(total, limit)
        new = min(wanted - have, added)
        if have and not fixed and self._misfit() > _MISFIT * store.meta["index"]["misfit"]:
            new = max(new, 3 * added * wanted // (2 * total))  # half more than a rebuild gives their like
        if new <= have // 64:
            return
        report("training", 0, None)
        size = max(new, min(limit, _POINTS * new * (2 if have else 1)))
        values = self._sample(size, seed)
        if have:
            errors = np.linalg.norm(values - self._nearest(values), axis=1)
            values = values[np.argsort(-errors)[: max(new, len(values) // 2)]]
        length = float(store.meta["index"].get("length", 1)) if have else _typical_length(values)
        needed = _WORK + 3 * values.nbytes
        centroids = on_device(
            self.config.device,
            "building this index",
            needed,
            lambda device: train_centroids(values, new, length, seed, device),
        )
        with store.update():
            store.append("centroids.bin", centroids)
            if not have:
                some = values[sample_places(len(values), _UNITS, seed)]
                store.append("codebook.bin", train_codebook(some - self._nearest(some), self.config.nbits))
                store.meta["index"] |= {"misfit": self._misfit(), "length": length}

    def _misfit(self) -> float:
        """Share of the tokens to be compressed, by their squared lengths, that their centroids leave open."""
        values = self._sample(_UNITS, self.config.seed + 1)
        left = np.square(values - self._nearest(values)).sum()
        return float(left / max(np.square(values).sum(), 1e-30))

    def _sample(self, size: int, seed: int) -> Array:
        """``(size or fewer, dim)`` of the tokens that are not compressed."""
        begin = self._begin()
        places = begin - self._kept() + sample_places(self._total() - begin, size, seed)
        return self.store.take("values.bin", places).astype(np.float32)

    def _nearest(self, values: Array) -> Array:
        """``(n, dim)`` the nearest centroid of each token."""
        centroids, needed = self._centroids(), _WORK + 2 * values.nbytes
        codes = on_device(
            self.config.device,
            "building this index",
            needed,
            lambda device: nearest_codes(values, centroids, device),
        )
        nearest: Array = centroids[codes]
        return nearest

    def _compress(self, report: StageProgress) -> None:
        """Encode the tokens of further rows, and let go of them unless they are to be kept."""
        store = self.store
        covered, row, ends, kept = self._state("covered"), store.rows("means.bin"), self._ends(), self._kept()
        wide = self._count() > _NARROW
        if wide and store.rows("codes.bin") and store.read("codes.bin").dtype == np.uint16:
            self._widen_codes()
        report("compressing", row - covered, len(self) - covered)
        while row < len(ends):
            first = int(ends[row - 1]) if row else 0
            stop = max(row + 1, int(np.searchsorted(ends, first + _BLOCK, "right")))
            values = store.take("values.bin", np.arange(first, ends[stop - 1]) - kept).astype(np.float32)
            lengths = np.diff(ends[row:stop], prepend=first)
            with fitting(store.path):
                tokens, means, scales = self._fit(values, lengths, wide)
            with store.update():
                for name, array in zip(_ARRAYS, tokens, strict=True):
                    store.append(name, array)
                store.append("means.bin", means)
                store.append("scales.bin", scales)
            report("compressing", stop - row, len(self) - covered)
            row = stop
        with store.update():
            if not self.config.keep_tokens:
                store.drop("values.bin")
            store.meta["index"]["covered"] = len(self)

    def _fit(self, values: Array, lengths: Array, wide: bool) -> tuple[Tokens, Array, Array]:
        """The compressed tokens ``(total, dim)`` of documents, and their means and factors."""
        centroids, codebook = self._centroids(), self._codebook()

        def compress(device: torch.device) -> tuple[Tokens, Array, Array]:
            codes = nearest_codes(values, centroids, device).astype(np.int32 if wide else np.uint16)
            return fit_tokens(values, lengths, centroids, codes, codebook, device)

        return on_device(self.config.device, "building this index", _WORK + 3 * values.nbytes, compress)

    def _widen_codes(self) -> None:
        with self.store.update():
            blocks = self.store.blocks("codes.bin")
            first = next(blocks)
            self.store.drop("codes.bin")
            for block in (first, *blocks):
                self.store.append("codes.bin", block.astype(np.int32))

    def _list(self, report: StageProgress) -> None:
        """List the documents of every centroid anew."""
        report("listing", 0, None)
        codes, ends = self.store.read("codes.bin"), self._ends()[: self._state("covered")]
        with fitting(self.store.path):
            offsets = build_lists(codes, ends, self._count())
        with self.store.update():
            self.store.drop("list_offsets.bin")
            self.store.append("list_offsets.bin", offsets)
            self.store.replace("lists.bin", lambda path: write_lists(path, codes, ends, offsets))
            self.store.meta["index"]["listed"] = len(ends)

    # ---- reading ----

    def _state(self, name: str) -> int:
        return int(self.store.meta["index"].get(name, 0))

    def _begin(self) -> int:
        """Tokens of the compressed rows."""
        covered = self._state("covered")
        return int(self._ends()[covered - 1]) if covered else 0

    def _kept(self) -> int:
        """The first of the tokens that are kept whole, as are all that follow."""
        return self._total() - self.store.rows("values.bin")

    def _total(self) -> int:
        """Tokens of all rows."""
        return int(self._ends()[-1]) if self.store.rows("lengths.bin") else 0

    def _count(self) -> int:
        return self.store.rows("centroids.bin")

    def _centroids(self) -> Array:
        return self.store.derived("centroids", lambda: self.store.read("centroids.bin").astype(np.float32))

    def _codebook(self) -> Array:
        codebook, bits = self.store.read("codebook.bin"), self.config.nbits
        if codebook.shape != (2 ** (8 - bits), 2**bits):
            raise CorruptError(
                f"index {self.store.path}: an earlier version coded its residuals, or its codebook is "
                "damaged; rebuild the index"
            )
        return codebook

    def _ends(self) -> Array:
        return self.store.derived("ends", self._make_ends)

    def _make_ends(self) -> Array:
        """Where the tokens of each row end, of which all are compressed or kept whole."""
        store, covered, lengths = self.store, self._state("covered"), self.store.read("lengths.bin")
        ends = row_ends(store.path, lengths, int(lengths.sum()))
        kept = (int(ends[-1]) if len(ends) else 0) - store.rows("values.bin")
        begin = int(ends[covered - 1]) if covered else 0  # of the tokens that nothing stands for but they
        if not 0 <= kept <= (0 if self.config.keep_tokens else begin) or begin > store.rows("codes.bin"):
            raise self._damaged()
        return ends

    def _damaged(self) -> CorruptError:
        return CorruptError(f"index {self.store.path}: its arrays do not fit together; {REMEDY}")

    def _places(self, rows: Array) -> tuple[Array, Array]:
        """Lengths of some rows, and where their tokens are."""
        lengths = self.store.read("lengths.bin")[rows]
        starts = self._ends()[rows] - lengths
        return lengths, np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())

    def _arrays(self) -> dict[str, Array]:
        return {"lengths": self.store.read("lengths.bin")}

    def _slice(self, start: int, stop: int) -> Representation:
        ends, kept = self._ends(), self._kept()
        first = int(ends[start - 1]) if start else 0
        if first < kept:
            return self.representations(np.arange(start, stop))
        values = self.store.read("values.bin")[first - kept : int(ends[stop - 1]) - kept]  # not copied
        lengths = self.store.read("lengths.bin")[start:stop]
        return MultiVector(Ragged(torch.from_numpy(values), torch.from_numpy(lengths)))

    def _encoded(self) -> Tokens:
        return Tokens(*map(self.store.read, _ARRAYS))

    def _structure(self) -> Structure:
        covered, count = self._state("covered"), self._count()
        offsets = np.concatenate([[0], self._ends()[:covered]])
        tokens = select_tokens(self._encoded(), slice(int(offsets[-1])))
        starts, lists = np.zeros(1, np.int64), np.empty(0, np.int32)
        if self.store.rows("lists.bin") and self.store.rows("list_offsets.bin"):
            starts = self.store.read("list_offsets.bin")
            size = self.store.rows("lists.bin") // max(1, int(starts[-1]))
            if starts[0] or (np.diff(starts) < 0).any() or self.store.rows("lists.bin") != size * starts[-1]:
                raise self._damaged()
            lists = read_lists(self.store.read("lists.bin"), int(starts[-1]))
        if starts[-1] != len(lists) or not count:
            raise self._damaged()
        starts = np.pad(starts, (0, count + 1 - len(starts)), mode="edge")  # new centroids have no lists yet
        codebook, listed = self._codebook(), self._state("listed")
        means, scales = (self.store.read(name)[:covered] for name in ("means.bin", "scales.bin"))
        return Structure(self._centroids(), codebook, tokens, means, scales, offsets, starts, lists, listed)

    # ---- searching ----

    def _search_block(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        covered = self._state("covered")
        if not covered:
            return super()._search_block(queries, k, keep)
        assert isinstance(queries, MultiVector)
        structure, search = self.store.derived(("search", self.config.device), self._searcher)
        kept = structure.filled if keep is None else structure.filled & keep[:covered]
        effort = self._effort(k, kept)
        empty = queries.tokens.lengths.numpy() == 0
        asked = queries.tokens[~empty] if empty.any() else queries.tokens
        scores = np.full((len(queries), effort.wanted), -np.inf, np.float32)
        rows = np.full(scores.shape, -1)
        if len(asked):
            with fitting(self.store.path):
                scores[~empty], rows[~empty] = search(asked, effort, kept)
            if self.config.keep_tokens:
                scores[~empty] = self._score_rows(MultiVector(asked), rows[~empty])
        if empty.any():  # score 0 with everything
            first = np.flatnonzero((self.live if keep is None else keep)[:covered])[:k]
            scores[empty, : len(first)], rows[empty, : len(first)] = 0, first
        best = TopK(len(queries), k)
        best.push_pairs(scores, rows)
        if covered < len(self):
            self._scan(queries, best, covered, keep)
        return best.hits()

    def _effort(self, k: int, kept: Array) -> Effort:
        """How far to go for ``k`` hits where a filter leaves ``kept``."""
        wanted = k * (2 if self.config.keep_tokens else 1) + _MARGIN
        listed, count = self._state("listed"), int(np.count_nonzero(kept))
        candidates = max(2 * wanted, self.config.candidates or max(_CANDIDATES, 8 * wanted))
        ranked, refined = _RANKED * candidates, max(2 * wanted, candidates // 8)
        if not listed or count <= max(_SCAN, 2 * candidates):
            return Effort(0, 0, ranked, candidates, refined, wanted)
        share = max(np.count_nonzero(kept[:listed]) / listed, 1 / 64)  # what a filter hides is made up for
        nprobe, visited = (self.config.nprobe, 0) if self.config.nprobe else (1, max(_VISITED, 2 * wanted))
        nprobe, visited = math.ceil(nprobe / share), math.ceil(visited / share)
        return Effort(nprobe, visited, ranked, candidates, refined, wanted)

    def _searcher(self) -> tuple[Structure, CpuSearch | TensorSearch]:
        structure = self._structure()

        def load(device: torch.device) -> CpuSearch | TensorSearch:
            if device.type == "cpu":
                with fitting(self.store.path):
                    return CpuSearch(structure)
            self._check_numbers(structure)
            return TensorSearch(structure, device)

        needed = TensorSearch.needed(structure)
        return structure, on_device(self.config.device, "searching this index", needed, load)

    def _check_numbers(self, structure: Structure) -> None:
        """Refuse what kernels of a CPU leave aside, and tensors on a GPU stumble over for good."""
        for array, count in ((structure.tokens.codes, self._count()), (structure.lists, structure.listed)):
            if len(array) and not 0 <= array.min() <= array.max() < count:
                raise self._damaged()


def _typical_length(values: Array) -> float:
    """How long centroids of tokens ``(n, dim)`` are to be: as long as these, so that little is left."""
    return min(float(np.sqrt(np.square(values, dtype=np.float64).sum(1).mean())), _LONGEST) or 1.0
