"""Search of vectors by lists around centroids, and by codes of one or more bits per dimension.

A kind of index stores these vectors, or computes them from its rows. Over ranges of rows lie
*segments*, whose lists and codes the kernel ``dense_search`` makes and searches. All segments share the
centroids, which a k-means over a sample trains. Each segment follows the one before; small segments at the
end are merged with what is added, so a row is coded a logarithmic number of times. Rows after the last
segment are scanned.

A search reads the lists of the best centroids, chooses candidates by the signs of their residuals, and ranks
these by more bits of their codes, or by the stored rows. Everything is trained and coded anew once there are
four times as many rows as those it was trained on. A filter that leaves few rows makes a search scan these.

Source: Jegou et al., PAMI 2011 (lists); Gao and Long, RaBitQ, arXiv 2405.12497 (codes of one bit).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from irkit_kernels.dense_search import (
    NO_PLACE,
    Candidates,
    Effort,
    Encoder,
    Rotation,
    Searcher,
    assign,
    make_rotation,
)
from irkit_kernels.dense_search.checks import check_rotation, check_segment
from irkit_kernels.dense_search.rotation import MAX_DIM, padded, rotation_matrix

from irkit.core.representation import Representation
from irkit.errors import ConfigError
from irkit.index.array_files import Array, corrupt
from irkit.index.clustering import sample_positions
from irkit.index.coded_rows import CodedRows, Codes, add_codes
from irkit.index.dense_training import ListCodec, train_codec
from irkit.index.index_base import Index, StageProgress
from irkit.index.index_settings import DenseConfig, MuveraConfig
from irkit.index.layout import fitting, row_blocks, segment_name
from irkit.index.segments import Segment, covered_rows, drop_segments, read_segments
from irkit.index.state import snapshot
from irkit.index.stored_rows import StoredRows
from irkit.index.topk import Hits, query_table

_POINTS = 32  # rows sampled per centroid
_GROWTH = 4  # train again at this many times the rows of the last training
QUERIES = 512  # searched at once
SIGNS = 4  # times as many rows as are ranked are chosen by signs, where more bits choose among these
_ROTATION = ("rotation_signs.bin", "rotation_order.bin")
_LISTS = ("centroids.bin", "centroid_scales.bin", "margins.bin")


class CodedLists(StoredRows):
    """Lists and codes over segments of rows; see the module for what is stored and how it is searched.

    Every search returns ``min(k, documents)`` hits: a scan finds what the lists miss.
    """

    config: DenseConfig | MuveraConfig
    scores_codes: ClassVar = False
    """Whether documents are the vectors that codes stand for, and no others are stored."""

    def finish(self, progress: StageProgress | None = None) -> None:
        """Train centroids if rows have become many, and put the rows without lists into a segment.

        Args:
            progress: Called with the stages "training" and "listing".
        """
        report, n = progress or (lambda stage, count, total: None), len(self)
        if n - self._covered <= self.store.limits.dense_scan:
            return
        with self.store.update():
            if self.outgrown(n):
                codec = self.train(n, self._reader(), report)
                if codec is None:
                    return
                self.take_codec(codec, report)
            self.code(report)

    # ---- the steps of `finish`, which shards take together ----

    def outgrown(self, n: int) -> bool:
        """Return whether ``n`` rows are so many that the centroids are trained anew."""
        return n >= _GROWTH * self.codec_version

    def train(self, n: int, values: Callable[[Array], Array], report: StageProgress) -> ListCodec | None:
        """Train centroids on a sample; return None if float32 cannot compute with its rows.

        Args:
            n: Number of rows of the index; if it is a shard, of the index in shards.
            values: Returns the vectors ``(m, width)`` float32 of ascending ones of these rows.
            report: Called with the stage "training".
        """
        report("training", 0, None)
        lists = self._list_count(n)
        rows = sample_positions(n, self._sample_size(lists), self.config.seed)
        sample = np.empty((len(rows), self._width(self.dim)), np.float32)
        for at, stop in self._row_blocks(0, len(rows)):
            sample[at:stop] = values(rows[at:stop])
        return train_codec(sample, lists, self.config.seed, self._matrix(), n)

    @property
    def codec_version(self) -> int:
        """Number of rows that the centroids were trained for, which grows; 0 without centroids."""
        return self._count("trained")

    def codec(self) -> ListCodec:
        """Return the centroids, as they are stored."""
        centroids, scales = map(self.store.read, _LISTS[:2])
        margins = self.store.read(_LISTS[2]) if self.store.rows(_LISTS[2]) else None
        return ListCodec(centroids, scales, margins, self.codec_version)

    def take_codec(self, codec: ListCodec, report: StageProgress) -> None:
        """Replace the centroids; code all rows anew if some have codes."""
        with self.store.update():
            values, has_codes = self._reader(), self._covered > 0  # codes are read as they were
            for name, array in zip(_LISTS, codec[:3], strict=True):
                self.store.drop(name)
                if array is not None:
                    self.store.append(name, array)
            self.store.meta["index"]["trained"] = codec.trained
            drop_segments(self.store, 0)
            if has_codes:
                self.code(report, values)

    def code(self, report: StageProgress, values: Callable[[Array], Array] | None = None) -> None:
        """Put the rows after the last segment into a segment.

        Args:
            report: Called with the stage "listing".
            values: Returns the vectors of rows; by default `_reader` makes it.
        """
        start, n = self._covered, len(self)
        if start == n:
            return
        read = values or self._reader()
        report("listing", 0, n - start)
        with fitting(self.store.path):
            encoder = self._encoder()

        def encode(rows: Array, lists: Array) -> Codes:
            report("listing", len(rows), n - start)
            return encoder.encode(read(rows), lists)

        def nearest(rows: Array) -> Array:
            return assign(read(rows), encoder.centroids)

        with self.store.update():
            add_codes(self.store, start, n, len(encoder.centroids), self._row_blocks, nearest, encode)

    def copy(self, source: Index, rows: Array) -> None:
        """Add documents ``rows (n,)``, ascending, of an index of the same kind, exactly as stored.

        Their codes are copied, too, so nothing is trained or coded again.
        """
        assert isinstance(source, CodedLists)
        with self.store.update():
            start, coded = len(self), rows[rows < source._covered]
            for name in _ROTATION if source.dim and not self.store.rows(_ROTATION[0]) else ():
                self.store.append(name, source.store.read(name))
            if len(coded) and start == self._covered:
                if not self.codec_version:
                    self.take_codec(source.codec(), lambda stage, count, total: None)
                codes, count = source._coded(), self.store.rows("centroids.bin")

                def copied(numbers: Array, lists: Array | None = None) -> Codes:
                    return codes.take(coded[numbers - start])

                def lists(numbers: Array) -> Array:
                    return copied(numbers)["lists"]

                add_codes(self.store, start, start + len(coded), count, self._row_blocks, lists, copied)
            super().copy(source, rows)

    @snapshot
    def stats(self) -> dict[str, Any]:
        """Return what `Index.stats` returns, and numbers about lists, segments and the rows in them."""
        about = self.store.meta["index"]
        return super().stats() | {
            "lists": self.store.rows("centroids.bin"),
            "segments": len(about.get("segments", [])),
            "covered": self._covered,
        }

    # ---- what lists and codes are of; a kind of index may override these ----

    def _nbits(self) -> int:
        """Return the bits of a code per dimension."""
        raise NotImplementedError

    def _width(self, dim: int) -> int:
        """Return the dimensions of the coded vectors of documents of ``dim``."""
        return dim

    def _reader(self) -> Callable[[Array], Array]:
        """Return a function of ascending rows that returns their vectors ``(n, width)`` float32."""
        raise NotImplementedError

    def _query_vectors(self, queries: Representation) -> Array:
        """Return the vectors ``(n_q, width)`` float32 of queries."""
        return queries.arrays()["values"]

    def _kept(self) -> dict[str, Array]:
        """Return the arrays by which the kernel ranks candidates, if not by their codes."""
        return {}

    def _list_rows(self) -> int:
        """Return the smallest mean number of rows per list."""
        return self.store.limits.dense_points

    def _sample_size(self, lists: int) -> int:
        """Return the number of rows to train the centroids of ``lists`` lists on."""
        return _POINTS * lists

    # ---- rows as they are stored ----

    @property
    def _covered(self) -> int:
        """Number of rows in segments: the first ones."""
        return covered_rows(self.store)

    coded = _covered

    def _rotation(self) -> Rotation:
        """Return the rotation of the codes, and of rows in 8 bits."""

        def make() -> Rotation:
            rotation = Rotation(*map(self.store.read, _ROTATION))
            with fitting(self.store.path):
                check_rotation(rotation, self._width(self.dim))
            return rotation

        return self.store.derived("rotation", make)

    def _matrix(self) -> torch.Tensor:
        """Return the matrix ``(dim, width)`` that rotates rows."""
        return self.store.derived("matrix", lambda: rotation_matrix(self._width(self.dim), self._rotation()))

    def _encoder(self) -> Encoder:
        """Return the encoder, whose rotated centroids a search has; they are stored in 8 bits."""

        def extend(before: Encoder | None) -> Encoder:
            if before:
                return before
            codes, scales = (torch.from_numpy(self.store.read(name)) for name in _LISTS[:2])
            centroids = ((codes * scales[:, None]) @ self._matrix().T).numpy()
            distances = {"euclidean": self._metric == "euclidean", "decoded": self.scores_codes}
            return Encoder(centroids, self._rotation(), self._nbits(), **distances)

        return self.store.extended("encoder", ["centroids.bin"], extend)

    def _coded(self) -> CodedRows:
        """Return the codes of rows in segments."""

        def extend(before: CodedRows | None) -> CodedRows:
            return before or CodedRows(self._segments())

        return self.store.extended("coded", self._parts(), extend)

    def _parts(self) -> list[str]:
        """Return the names of arrays that are the same as long as segments and centroids are."""
        count = len(self.store.meta["index"].get("segments", []))
        return ["centroids.bin", *map(segment_name, range(count))]

    def _segments(self) -> list[Segment]:
        """Return all segments, checked."""
        lists, width = self.store.rows("centroids.bin"), padded(self._width(self.dim))

        def check(segment: Segment) -> None:
            with fitting(self.store.path):
                nbits = check_segment(segment.arrays, lists, width, self._metric == "euclidean")
            if nbits != self._nbits() or len(segment.arrays["rows"]) != segment.stop - segment.start:
                raise corrupt(self.store.path, "a segment is of other rows or codes")

        return read_segments(self.store, check)

    def _check_build(self, representation: Representation) -> None:
        width = self._width(representation.dim)
        if width > MAX_DIM:
            raise ConfigError(
                f"index: {self.config.kind!r} holds vectors of up to {MAX_DIM} dimensions, got {width}; "
                + ("choose 'hnsw' or 'flat'" if self.config.kind == "dense" else "make its keys smaller")
            )

    def _append(self, representation: Representation) -> None:
        self._check_build(representation)
        if not self.store.rows(_ROTATION[0]):
            rotation = make_rotation(self._width(representation.dim), self.config.seed)
            for name, array in zip(_ROTATION, rotation, strict=True):
                self.store.append(name, array)
            self.store.meta["index"]["dim"] = representation.dim
        super()._append(representation)

    # ---- building ----

    def _list_count(self, n: int) -> int:
        """Return the number of lists of ``n`` rows."""
        return min(self.config.lists or round(4 * math.sqrt(n)), max(1, n // self._list_rows()))

    def _row_blocks(self, start: int, stop: int) -> Any:
        size = self.store.limits.read_bytes // (4 * max(1, self._width(self.dim)))
        return row_blocks(None, start, stop, max(1, size))

    # ---- searching ----

    def _few(self, live: int, covered: int, k: int) -> bool:
        """Return whether a scan takes less time, or finds more, than the lists of ``covered`` rows."""
        limits = self.store.limits
        return live <= max(limits.dense_scan, limits.dense_scan_per_hit * k)

    def _search(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        return self._search_structure(queries, k, keep, self._covered, QUERIES)

    def _look_up(self, queries: Representation, k: int, keep: Array | None, live: int) -> Hits:
        """Return the best rows in lists; ``live`` rows may be hits."""
        searcher, keep = self._searcher(), keep if keep is None else keep[: self._covered]
        effort = self._effort(k, live, self._covered)
        return Hits(*searcher.find(self._query_vectors(queries), k, effort, keep))

    def candidates(self, queries: Representation, effort: Effort, keep: Array | None) -> Candidates:
        """Return the rows of lists that a search would rank, where ``keep (n,)`` is true (None: all)."""
        keep = keep if keep is None else keep[: self._covered]
        return self._searcher().candidates(self._query_vectors(queries), effort, keep)

    def candidate_scores(
        self, queries: Representation, found: Candidates, query: Array, column: Array
    ) -> Array:
        """Return the scores ``(n,)`` that a search gives to candidates.

        Args:
            queries: The queries that ``found`` is of.
            found: From `candidates`.
            query: ``(n,)`` ascending numbers of queries.
            column: ``(n,)`` which candidates of these queries.
        """
        places = query_table(query, found.places[query, column], len(queries), NO_PLACE)
        scores: Array = self._searcher().rank(self._query_vectors(queries), places)[places != NO_PLACE]
        return scores

    def _effort(self, k: int, live: int, covered: int) -> Effort:
        """Return how much a search reads if ``live`` of the ``covered`` rows of lists may be hits."""
        candidates = max(self.config.candidates or 80 + 2 * k, k)
        candidates = math.ceil(candidates * self._spare(live, covered))
        return Effort(self._probes(k, live), candidates, candidates)

    def _spare(self, live: int, covered: int) -> float:
        """Return how many times as many candidates to rank if a filter leaves ``live`` rows of lists.

        A filter may hide the rows nearest to a query, and codes order those farther away less well.
        """
        return min(2, covered / max(1, live))

    def _reach(self) -> int:
        """Return how many lists a search reads for each square root of their number."""
        return 6

    def _probes(self, k: int, live: int) -> int:
        """Return how many lists a search reads."""
        lists = self.store.rows("centroids.bin")
        usual = self.config.probes or math.ceil(self._reach() * math.sqrt(lists))
        return max(usual, math.ceil(4 * k * lists / live))

    def _searcher(self) -> Searcher:
        """Return the searcher of all segments; a searcher of the same segments is used again."""

        def extend(before: Searcher | None) -> Searcher:
            return before or self._open()

        return self.store.extended("searcher", ["values.bin", *self._parts()], extend)

    def _open(self) -> Searcher:
        """Open the segments."""
        store, covered, kept = self.store, self._covered, self._kept()
        segments = [segment.arrays for segment in self._segments()]
        margins = store.read("margins.bin") if store.rows("margins.bin") else None
        with fitting(store.path):
            return Searcher(
                self._encoder().centroids,
                self._rotation(),
                segments,
                covered,
                metric="euclidean" if self._metric == "euclidean" else "inner_product",
                kept=kept.get("kept"),
                kept_scales=kept.get("kept_scales"),
                margins=margins,
            )
