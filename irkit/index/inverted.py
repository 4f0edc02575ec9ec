"""Search of sparse representations by lists of the documents of each term."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np
from irkit_kernels.sparse_search.checks import check_lists
from irkit_kernels.sparse_search.op import Searcher, Single, build

from irkit.index import bm25
from irkit.index.base import Index, StageProgress
from irkit.index.config import InvertedConfig
from irkit.index.files import Array
from irkit.index.flat import Flat
from irkit.index.layout import fitting
from irkit.index.quantization import LARGEST, counted, quantized
from irkit.index.segments import Allocate, Segment, add_segment, drop_segments, read_segments
from irkit.index.state import pinned
from irkit.index.topk import Hits, TopK
from irkit.representation import Representation, Sparse

__all__ = ["Inverted"]

Queries: TypeAlias = tuple[Array, Array, Array]  # offsets, terms, weights

_FEW = 1024  # rows whose lists are made when they are needed
_MOST = 1 << 24  # rows of a segment
_GROWTH = 4  # segments this many times as large as what is added behind them stay as they are
_NARROW = 1 << 16  # terms whose numbers fit into two bytes
_BLOCK = 1 << 14  # rows weighed at a time
_WEIGHTS, _SCALES = "row_weights", "row_scales"  # of a segment of counts
_FILES = ("lengths.", "terms.", "weights.", "scales.", "segment_")
_EXACT = 200_000  # rows that are searched exactly by default
_NOTHING: tuple[int, Any, int, Single] = 0, None, 0, lambda terms, weights: None  # before the first query

_hits: Callable[[tuple[Array, Array]], Hits] = partial(tuple.__new__, Hits)  # sooner than ``Hits(...)``


class Inverted(Flat):
    """Lists over segments of rows; those of the rows after the last segment are made in memory when needed.

    The weights of each row are kept as the configuration says, in order of addition: every score is exact for
    these. Segments are structures made of them, each over the rows behind those of the one before, and small
    ones at the end are merged with what is added. An index or a query with a negative weight is scanned.
    """

    kinds: ClassVar[tuple[str, ...]] = ("sparse",)
    config: InvertedConfig

    def finish(self, progress: StageProgress | None = None) -> None:
        """Make a segment of the rows that have none, and of the small ones before them, if they are many.

        Args:
            progress: Told of the stage "listing".
        """
        if len(self) - self._covered <= _FEW and "bm25" not in self.store.meta["index"]:
            return
        with self.store.update():
            if bm25.renew(self.store):  # all weights are others now
                drop_segments(self.store, 0)
            segments, start, n = read_segments(self.store), self._covered, len(self)
            if n - start <= _FEW or self._negative:
                return
            kept = len(segments)
            while kept and segments[kept - 1].stop - segments[kept - 1].start < _GROWTH * (n - start):
                if n - segments[kept - 1].start > _MOST:
                    break
                kept -= 1
                start = segments[kept].start
            if progress is not None:
                progress("listing", 0, None)
            drop_segments(self.store, kept)
            for begin in range(start, n, _MOST):
                end = min(begin + _MOST, n)
                add_segment(self.store, begin, end, partial(self._build, begin, end))

    def copy(self, source: Index, rows: Array) -> None:
        """Add documents of another `Inverted`; their weights stay as they are kept."""
        given = source.store.meta["index"]
        with self.store.update():
            if "bm25" in given:
                bm25.begin(self.store, given["bm25"]["k1"], given["bm25"]["b"])
            for name, array in cast(Inverted, source)._raw(rows).items():
                self.store.append(f"{name}.bin", array)
            about = {key: given[key] for key in ("representation", "dim", "negative")}
            self.store.meta["index"] |= about | {"rows": len(self) + len(rows)}

    @pinned
    def stats(self) -> dict[str, Any]:
        """As of every index; weights, bytes of each with its part of the lists, segments, rows they cover."""
        weights = self.store.rows("weights.bin")
        used = [size for name, size in self.store.sizes().items() if name.startswith(_FILES)]
        return super().stats() | {
            "dtype": self.config.dtype,
            "weights": weights,
            "bytes_per_weight": round(sum(used) / max(1, weights), 2),
            "segments": len(self.store.meta["index"].get("segments", [])),
            "covered": self._covered,
        }

    # ---- rows as they are kept ----

    @property
    def _covered(self) -> int:
        """Rows that have a segment: the first ones."""
        segments = self.store.meta["index"].get("segments")
        return int(segments[-1]["stop"]) if segments else 0

    @property
    def _negative(self) -> bool:
        """Whether a weight is below 0, of which lists know nothing."""
        return bool(self.store.meta["index"].get("negative", False))

    def _append(self, representation: Representation) -> None:
        assert isinstance(representation, Sparse)
        arrays, about = representation.arrays(), self.store.meta["index"]
        lowest = arrays["weights"].min(initial=0)
        about |= {"negative": self._negative or bool(lowest < 0)}
        wide = representation.dim > _NARROW
        if wide and self.store.rows("terms.bin") and self.store.read("terms.bin").dtype == np.uint16:
            self._widen_terms()
        arrays |= {"terms": arrays["terms"].astype(np.uint32 if wide else np.uint16)}
        if "bm25" in about:
            arrays |= {"weights": counted(arrays["weights"])}
        else:
            arrays |= quantized(arrays["weights"], arrays["lengths"], self.config.dtype)
        for name, array in arrays.items():
            self.store.append(f"{name}.bin", array)

    def _widen_terms(self) -> None:
        """Give terms four bytes, now that the vocabulary has grown."""
        blocks = self.store.blocks("terms.bin")
        first = next(blocks)
        self.store.drop("terms.bin")
        for block in (first, *blocks):
            self.store.append("terms.bin", block.astype(np.uint32))

    def _arrays(self) -> dict[str, Array]:
        return {name: self.store.read(f"{name}.bin") for name in ("terms", "weights", "lengths")}

    def _raw(self, rows: Array | slice) -> dict[str, Array]:
        arrays = super()._raw(rows)
        if self.store.rows("scales.bin"):
            arrays["scales"] = self.store.read("scales.bin")[rows]
        return arrays

    def _weighed(self, raw: dict[str, Array], formula: tuple[float, float] | None) -> dict[str, Array]:
        """Stored arrays with weights, as the configuration has them, where there were counts."""
        if "bm25" not in self.store.meta["index"]:
            return raw
        arrays = bm25.weigh(self.store, raw, formula)
        return arrays | quantized(arrays["weights"], arrays["lengths"], self.config.dtype)

    def _take(self, rows: Array | slice) -> dict[str, Array]:
        arrays = self._weighed(self._raw(rows), self.formula)
        weights = arrays["weights"].astype(np.float32)
        if "scales" in arrays:
            weights *= np.repeat(arrays.pop("scales"), arrays["lengths"])
        return arrays | {"terms": arrays["terms"].astype(np.int32), "weights": weights}

    # ---- segments ----

    def _build(
        self, start: int, stop: int, allocate: Allocate, formula: tuple[float, float] | None = None
    ) -> dict[str, Array]:
        """Lists of rows ``start`` to ``stop``, and their weights where counts are stored."""
        counts = "bm25" in self.store.meta["index"]
        made = self._write_weights(start, stop, allocate, formula) if counts else {}
        with fitting(self.store.path):
            return build(self._rows(start, stop, made), self.dim, allocate=allocate) | made

    def _write_weights(
        self, start: int, stop: int, allocate: Allocate, formula: tuple[float, float] | None
    ) -> dict[str, Array]:
        total, place = int(self.store.read("lengths.bin")[start:stop].sum()), 0
        made = {_WEIGHTS: allocate(_WEIGHTS, (total,), self.config.dtype)}
        if self.config.dtype in LARGEST:
            made[_SCALES] = allocate(_SCALES, (stop - start,), np.float32)
        for begin in range(start, stop, _BLOCK):
            end = min(begin + _BLOCK, stop)
            arrays = self._weighed(self._raw(slice(begin, end)), formula)
            made[_WEIGHTS][place : place + len(arrays["weights"])] = arrays["weights"]
            place += len(arrays["weights"])
            if _SCALES in made:
                made[_SCALES][begin - start : end - start] = arrays["scales"]
        return made

    def _rows(
        self, start: int, stop: int, made: dict[str, Array]
    ) -> tuple[Array, Array, Array, Array | None]:
        """Offsets, terms, weights and scales of some rows, not copied; weights may be ``made`` for them."""
        raw = self._raw(slice(start, stop))
        weights = made.get(_WEIGHTS, raw["weights"])
        return _offsets(raw["lengths"]), raw["terms"], weights, made.get(_SCALES, raw.get("scales"))

    def _open(self) -> list[tuple[int, int, Searcher]]:
        """First row, the one after the last, and what searches them: of each segment, and of the rest."""
        covered, n = 0 if self.formula else self._covered, len(self)  # those stored have other weights
        segments = [] if self.formula else read_segments(self.store, self._check_segment)
        with fitting(self.store.path):
            for start in range(covered, n, _MOST):
                stop = min(start + _MOST, n)
                segments.append(Segment(start, stop, self._build(start, stop, _in_memory, self.formula)))
            return [
                (start, stop, Searcher(arrays, self._rows(start, stop, arrays)))
                for start, stop, arrays in segments
            ]

    def _check_segment(self, segment: Segment) -> None:
        """Refuse lists that were not made here, and weights that are not those of the rows."""
        with fitting(self.store.path):
            # the vocabulary may have grown since
            check_lists(segment.arrays, segment.stop - segment.start, len(segment.arrays.get("gains", ())))

    # ---- searching ----

    @pinned
    def search(self, queries: Representation, k: int, allowed: Array | None = None) -> Hits:
        """As of every index; the shorter way, where it will do, takes as long as the lists or less."""
        if allowed is None and isinstance(queries, Sparse) and type(k) is int:
            own, terms = self.store.derived("own", threading.local), queries.terms
            asked, config, dim, find = getattr(own, "last", _NOTHING)
            if asked != k or config is not self.config:
                dim, find = self._prepare(own, k)
            if dim == queries.dim and terms.lengths.numel() == 1:
                found = find(terms.values, queries.weights)
                if found is not None:
                    return _hits(found)
            hits = self._search_plain(queries, k)
            if hits is not None:
                return hits
        return super().search(queries, k, allowed)

    def _prepare(self, own: threading.local, k: int) -> tuple[int, Single]:
        """Width of single queries for ``k`` hits, and what searches for them in this thread."""
        searcher, dim, n = self.store.derived("plain", self._plain)
        fine = searcher is not None and 0 < k <= n
        find = searcher.single(k, self._effort(None)) if searcher and fine else _NOTHING[3]
        own.last = k, self.config, dim, find
        return dim, find

    def _search_plain(self, queries: Sparse, k: int) -> Hits | None:
        """What `search` gives where nothing is to be converted or filtered, of one segment; else None."""
        searcher, dim, n = self.store.derived("plain", self._plain)
        if searcher is None or queries.dim != dim or not 0 < k <= n:
            return None
        try:
            values, terms = queries.weights.numpy(), queries.terms.values.numpy()
        except (RuntimeError, TypeError):  # they have gradients, are elsewhere, or of a type of torch alone
            return None
        if values.dtype.char != "f" or _lowest(values) <= 0 or not values[values.argmax()] < np.inf:
            return None  # none, not positive, or not finite
        asked = _offsets(queries.terms.lengths.numpy()), terms, values
        return self._completed(Hits(*searcher.find(asked, k, None, self._effort(None))), queries, None)

    def _plain(self) -> tuple[Searcher | None, int, int]:
        """What searches where there is one segment, nothing removed and no negative weight; dim, and rows."""
        self._check_same()
        if self._negative or self.store.rows("removed.bin"):
            return None, self.dim, len(self)
        segments = self.store.derived("segments", self._open)
        return segments[0][2] if len(segments) == 1 else None, self.dim, len(self)

    def _search(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        arrays = queries.arrays()
        if self._negative or arrays["weights"].min(initial=0) < 0:
            return super()._search(queries, k, keep)
        keep = keep if keep is None else np.ascontiguousarray(keep)
        return self._completed(self._look_up(_positive(arrays), k, keep), queries, keep)

    def _completed(self, hits: Hits, queries: Representation, keep: Array | None) -> Hits:
        """With rows that score 0 where fewer score above 0, and with those that an approximation left out."""
        short = np.flatnonzero(hits.rows[:, -1] < 0)
        if len(short) and self._effort(keep) is not None:
            asked = _positive(queries[short].arrays())
            hits.rows[short], hits.scores[short] = self._look_up(asked, hits.rows.shape[1], keep, exact=True)
        if len(short):
            rows, scores = hits.rows[short], hits.scores[short]
            _fill(rows, scores, keep)
            hits.rows[short], hits.scores[short] = rows, scores
        return hits

    def _look_up(self, queries: Queries, k: int, keep: Array | None, exact: bool = False) -> Hits:
        """The best rows that score above 0; of all, or of those that are found with some effort."""
        segments = self.store.derived("segments", self._open)
        effort = None if exact else self._effort(keep)
        if len(segments) == 1:
            return Hits(*segments[0][2].find(queries, k, keep, effort))
        best = TopK(len(queries[0]) - 1, k)
        for start, stop, searcher in segments:
            rows, scores = searcher.find(queries, k, None if keep is None else keep[start:stop], effort)
            best.push_pairs(scores, np.where(rows < 0, -1, rows + start))
        return best.hits()

    def _effort(self, keep: Array | None) -> float | None:
        """Of an approximation, which a filter that hides most of what lists begin with does not allow."""
        config = self.config
        if config.mode == "exact" or (config.mode == "auto" and len(self) <= _EXACT):
            return None
        return config.effort if keep is None or 2 * int(np.count_nonzero(keep)) >= len(self) else None


def _positive(queries: dict[str, Array]) -> Queries:
    """Queries without terms of weight 0."""
    some = queries["weights"] > 0
    offsets = _offsets(queries["lengths"])
    return _offsets(some)[offsets], queries["terms"][some], queries["weights"][some]


def _offsets(lengths: Array) -> Array:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.add.accumulate(lengths, out=offsets[1:])
    return offsets


def _lowest(values: Array) -> float:
    return values[values.argmin()] if len(values) else 0  # a quarter of what min() takes


def _in_memory(name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    return np.zeros(shape, dtype)


def _fill(rows: Array, scores: Array, keep: Array | None) -> None:
    """Put the lowest rows that are not there yet, which score 0, behind the hits of each query."""
    missing, k = rows < 0, rows.shape[1]  # those found and those missing are k: so many are enough
    lowest = np.arange(k) if keep is None else np.flatnonzero(keep)[:k]
    places = np.searchsorted(lowest, rows)
    places[lowest.take(places, mode="clip") != rows] = len(lowest)
    free = np.ones((len(rows), len(lowest) + 1), bool)
    np.put_along_axis(free, places, False, 1)
    free[:, -1] = False
    free &= free.cumsum(1) <= missing.sum(1, keepdims=True)
    rows[missing], scores[missing] = lowest[free.nonzero()[1]], 0
