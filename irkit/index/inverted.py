"""Search of sparse representations by lists of the documents that have each term.

The store has the weights of all rows, in order of addition; every score is exact for them. Over ranges of
rows lie *segments*, lists that the kernel ``sparse_search`` builds and searches. Each segment follows the one
before; small segments at the end are merged with what is added, as in a log-structured merge tree, so a row
is listed a logarithmic number of times. Rows after the last segment are listed in memory when a search needs
them.

A search takes one of these ways:

* **exact**: the kernel adds up weights rounded up to 8 bits, range by range of 16,384 documents. These sums
  bound the scores, so only documents whose bound reaches the k-th best score so far are scored (after
  MaxScore, Turtle and Flood, 1995);
* **approximate**: the kernel reads the postings of the highest weights only, as many as ``effort`` allows,
  and scores the documents that these choose (after Two-Step SPLADE, arXiv 2404.13357). A query that gets
  fewer than k documents this way is searched exactly, and so are all queries under a filter that hides more
  than half of the rows;
* **scan**: if a weight of the index or of a query is negative, upper bounds do not hold, and every row is
  scored.

Documents that share no term with a query score 0. They fill up the hits, lowest rows first, if fewer than k
documents score above 0. An index of BM25 stores counts; weights are made from them when rows are read, and
when they are listed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from irkit_kernels.sparse_search.checks import check_lists
from irkit_kernels.sparse_search.op import Searcher, Single, Thresholds, build

from irkit.core.representation import Representation, Sparse
from irkit.errors import BadValueError
from irkit.index import bm25_index as bm25
from irkit.index.array_files import Array
from irkit.index.index_base import StageProgress
from irkit.index.index_settings import InvertedConfig
from irkit.index.layout import fitting, row_blocks, segment_name
from irkit.index.segments import (
    Allocate,
    Segment,
    add_segment,
    covered_rows,
    drop_segments,
    read_segments,
)
from irkit.index.state import snapshot
from irkit.index.stored_rows import StoredRows
from irkit.index.topk import Hits, TopK

Queries: TypeAlias = tuple[Array, Array, Array]  # offsets, terms, weights

_LARGEST = {"uint8": 255, "uint16": 65535}  # integers that the largest weight of a row becomes
_GROWTH = 4  # a segment this many times as large as all that follows it is not merged
_BLOCK = 1 << 14  # rows weighed at once
_WEIGHTS, _SCALES = "row_weights", "row_scales"  # arrays of a segment over counts
_FILES = ("lengths.", "terms.", "weights.", "scales.", "segment_")
_NOTHING: tuple[int, Any, int, Single] = 0, None, 0, lambda terms, weights: None  # before the first query

_hits: Callable[[tuple[Array, Array]], Hits] = partial(tuple.__new__, Hits)  # sooner than ``Hits(...)``


class Opened(NamedTuple):
    """The searcher of rows ``start`` to ``stop``, and the file of their segment; None for lists in memory."""

    start: int
    stop: int
    searcher: Searcher
    file: str | None


class Inverted(StoredRows):
    """Lists over segments of rows; see the module for what is stored and how it is searched."""

    config: InvertedConfig

    def finish(self, progress: StageProgress | None = None) -> None:
        """Make a segment of the rows without one, and of the small segments before them, if these are many.

        Args:
            progress: Called with the stage "listing".
        """
        limits = self.store.limits
        if len(self) - self._covered <= limits.inverted_unlisted and "bm25" not in self.store.meta["index"]:
            return
        with self.store.update():
            if bm25.renew(self.store):  # all weights have changed
                drop_segments(self.store, 0)
            segments, start, n = read_segments(self.store), self._covered, len(self)
            if n - start <= limits.inverted_unlisted or self.may_be_negative:
                return
            # merge the segments at the end that are small beside what is added
            count = len(segments)
            while count and segments[count - 1].stop - segments[count - 1].start < _GROWTH * (n - start):
                if n - segments[count - 1].start > limits.inverted_segment:
                    break
                count -= 1
                start = segments[count].start
            if progress is not None:
                progress("listing", 0, None)
            drop_segments(self.store, count)
            for begin, end in row_blocks(None, start, n, limits.inverted_segment):
                add_segment(self.store, begin, end, partial(self._build, begin, end))

    @snapshot
    def stats(self) -> dict[str, Any]:
        """Return what `Index.stats` returns, and numbers about weights and segments."""
        weights = self.store.rows("weights.bin")
        used = [size for name, size in self.store.sizes().items() if name.startswith(_FILES)]
        return super().stats() | {
            "dtype": self.config.dtype,
            "weights": weights,
            "bytes_per_weight": round(sum(used) / max(1, weights), 2),
            "segments": len(self.store.meta["index"].get("segments", [])),
            "covered": self._covered,
        }

    # ---- rows as they are stored ----

    @property
    def _covered(self) -> int:
        """Number of rows in segments: the first ones."""
        return covered_rows(self.store)

    def _append(self, representation: Representation) -> None:
        if representation.dim > self.store.limits.narrow:  # the vocabulary may have grown
            self.store.recast("terms.bin", np.uint32)
        super()._append(representation)

    def _encode(self, representation: Representation) -> dict[str, Array]:
        arrays = representation.arrays()
        wide = representation.dim > self.store.limits.narrow
        arrays |= {"terms": arrays["terms"].astype(np.uint32 if wide else np.uint16)}
        if "bm25" in self.store.meta["index"]:
            return arrays | {"weights": to_counts(arrays["weights"])}
        return arrays | quantize(arrays["weights"], arrays["lengths"], self.config.dtype)

    def _row_arrays(self) -> list[str]:
        return ["lengths", "scales"] if self.store.rows("scales.bin") else ["lengths"]

    def _quantized(self, rows: Array | slice, formula: tuple[float, float] | None) -> dict[str, Array]:
        """Return stored arrays; counts become weights of the configured dtype."""
        arrays = self.stored_arrays(rows)
        if "bm25" not in self.store.meta["index"]:
            return arrays
        arrays = bm25.weigh(self.store, arrays, formula)
        return arrays | quantize(arrays["weights"], arrays["lengths"], self.config.dtype)

    def _weighed_arrays(self, rows: Array | slice) -> dict[str, Array]:
        arrays = self._quantized(rows, self.formula)
        weights = arrays["weights"].astype(np.float32)
        if "scales" in arrays:
            weights *= np.repeat(arrays.pop("scales"), arrays["lengths"])
        return arrays | {"terms": arrays["terms"].astype(np.int32), "weights": weights}

    # ---- segments ----

    def _build(
        self, start: int, stop: int, allocate: Allocate, formula: tuple[float, float] | None = None
    ) -> dict[str, Array]:
        """Make the lists of rows ``start`` to ``stop``, and their weights if counts are stored."""
        weights = {}
        if "bm25" in self.store.meta["index"]:
            weights = self._write_weights(start, stop, allocate, formula)
        with fitting(self.store.path):
            return build(self._rows(start, stop, weights), self.dim, allocate=allocate) | weights

    def _write_weights(
        self, start: int, stop: int, allocate: Allocate, formula: tuple[float, float] | None
    ) -> dict[str, Array]:
        """Write the weights that counts of rows make, block by block."""
        total, position = int(self.store.read("lengths.bin")[start:stop].sum()), 0
        made = {_WEIGHTS: allocate(_WEIGHTS, (total,), self.config.dtype)}
        if self.config.dtype in _LARGEST:
            made[_SCALES] = allocate(_SCALES, (stop - start,), np.float32)
        for begin, end in row_blocks(None, start, stop, _BLOCK):
            arrays = self._quantized(slice(begin, end), formula)
            made[_WEIGHTS][position : position + len(arrays["weights"])] = arrays["weights"]
            position += len(arrays["weights"])
            if _SCALES in made:
                made[_SCALES][begin - start : end - start] = arrays["scales"]
        return made

    def _rows(
        self, start: int, stop: int, made: dict[str, Array]
    ) -> tuple[Array, Array, Array, Array | None]:
        """Return offsets, terms, weights and scales of rows, not copied; ``made`` may have their weights."""
        stored = self.stored_arrays(slice(start, stop))
        weights = made.get(_WEIGHTS, stored["weights"])
        return _offsets(stored["lengths"]), stored["terms"], weights, made.get(_SCALES, stored.get("scales"))

    def _segments(self) -> list[Opened]:
        """Return the segments; segments of an earlier state stay open."""
        return self.store.extended("segments", ["lengths.bin", "terms.bin", "weights.bin"], self._open)

    def _open(self, before: list[Opened] | None) -> list[Opened]:
        """Open the segments that an earlier state has not opened; list rows outside of segments in memory."""
        # another formula makes other weights than those that segments have
        covered, n = 0 if self.formula else self._covered, len(self)
        segments = [] if self.formula else read_segments(self.store, self._check_segment)
        thresholds = self.store.limits.inverted_kernel or Thresholds()
        known = {opened.file: opened for opened in before or () if opened.file}
        result = []
        with fitting(self.store.path):
            for number, (start, stop, arrays) in enumerate(segments):
                file = self.store.file(segment_name(number))
                searcher = None if file not in known else known[file].searcher
                searcher = searcher or Searcher(arrays, self._rows(start, stop, arrays), thresholds)
                result.append(Opened(start, stop, searcher, file))
            for start, stop in row_blocks(None, covered, n, self.store.limits.inverted_segment):
                arrays = self._build(start, stop, _in_memory, self.formula)
                searcher = Searcher(arrays, self._rows(start, stop, arrays), thresholds)
                result.append(Opened(start, stop, searcher, None))
        return result

    def _check_segment(self, segment: Segment) -> None:
        """Raise an error if the kernel did not make the lists, or weights belong to other rows."""
        with fitting(self.store.path):
            # the vocabulary may have grown since
            check_lists(segment.arrays, segment.stop - segment.start, len(segment.arrays.get("gains", ())))

    # ---- searching ----

    @snapshot
    def search(self, queries: Representation, k: int, allowed: Array | None = None) -> Hits:
        """Return the k best documents of every query; see `Index.search`.

        Checks and conversions take as long as the search of one query. So a query that needs none of them
        goes straight to the kernel: a single one first, to a function prepared for its ``k``, then several
        ones.
        """
        if allowed is None and isinstance(queries, Sparse) and type(k) is int:
            own, terms = self.store.derived("own", threading.local), queries.terms
            last_k, config, dim, find = getattr(own, "last", _NOTHING)
            if last_k != k or config is not self.config:
                dim, find = self._prepare(own, k)
            if dim == queries.dim and terms.lengths.numel() == 1:
                pair = find(terms.values, queries.weights)
                if pair is not None:
                    return _hits(pair)
            hits = self._search_plain(queries, k)
            if hits is not None:
                return hits
        return super().search(queries, k, allowed)

    def _prepare(self, own: threading.local, k: int) -> tuple[int, Single]:
        """Return the dimensions of a query, and a function that finds its ``k`` hits in this thread."""
        searcher, dim, n = self.store.derived("plain", self._plain)
        find = searcher.single(k, self._effort(None)) if searcher and 0 < k <= n else _NOTHING[3]
        own.last = k, self.config, dim, find
        return dim, find

    def _search_plain(self, queries: Sparse, k: int) -> Hits | None:
        """Search one segment without conversion or filter; return None if that is not possible."""
        searcher, dim, n = self.store.derived("plain", self._plain)
        if searcher is None or queries.dim != dim or not 0 < k <= n:
            return None
        try:
            values, terms = queries.weights.numpy(), queries.terms.values.numpy()
        except (RuntimeError, TypeError):  # they have gradients, are elsewhere, or of a type of torch alone
            return None
        if values.dtype.char != "f" or _lowest(values) <= 0 or not values[values.argmax()] < np.inf:
            return None  # none, not positive, or not finite
        arrays = _offsets(queries.terms.lengths.numpy()), terms, values
        return self._complete(Hits(*searcher.find(arrays, k, None, self._effort(None))), queries, None)

    def _plain(self) -> tuple[Searcher | None, int, int]:
        """Return the searcher of an index of one segment whose rows and weights all count; dim, and rows."""
        self._check_same()
        if self.may_be_negative or self.store.rows("removed.bin"):
            return None, self.dim, len(self)
        segments = self._segments()
        return segments[0].searcher if len(segments) == 1 else None, self.dim, len(self)

    def _search(self, queries: Representation, k: int, keep: Array | None) -> Hits:
        arrays = queries.arrays()
        if self.may_be_negative or arrays["weights"].min(initial=0) < 0:
            return self._scan_all(queries, k, keep)
        keep = keep if keep is None else np.ascontiguousarray(keep)
        return self._complete(self._read_lists(_positive(arrays), k, keep), queries, keep)

    def _complete(self, hits: Hits, queries: Representation, keep: Array | None) -> Hits:
        """Add what an approximation left out, and rows that score 0, if fewer than k rows score above 0."""
        short = np.flatnonzero(hits.rows[:, -1] < 0)
        if len(short) and self._effort(keep) is not None:
            again = _positive(queries[short].arrays())
            hits.rows[short], hits.scores[short] = self._read_lists(
                again, hits.rows.shape[1], keep, exact=True
            )
        if len(short):
            rows, scores = hits.rows[short], hits.scores[short]
            _fill(rows, scores, keep)
            hits.rows[short], hits.scores[short] = rows, scores
        return hits

    def _read_lists(self, queries: Queries, k: int, keep: Array | None, exact: bool = False) -> Hits:
        """Return the best rows that score above 0."""
        segments = self._segments()
        effort = None if exact else self._effort(keep)
        if len(segments) == 1:
            return Hits(*segments[0].searcher.find(queries, k, keep, effort))
        best = TopK(len(queries[0]) - 1, k)
        for start, stop, searcher, _ in segments:
            rows, scores = searcher.find(queries, k, None if keep is None else keep[start:stop], effort)
            best.push_pairs(scores, np.where(rows < 0, -1, rows + start))
        return best.hits()

    def _effort(self, keep: Array | None) -> float | None:
        """Return the effort of an approximate search, or None for an exact one."""
        config, most = self.config, self.store.limits.inverted_exact
        if config.mode == "exact" or (config.mode == "auto" and len(self) <= most):
            return None
        return config.effort if keep is None or 2 * int(np.count_nonzero(keep)) >= len(self) else None


def _positive(queries: dict[str, Array]) -> Queries:
    """Return queries without terms of weight 0."""
    positive = queries["weights"] > 0
    offsets = _offsets(queries["lengths"])
    return _offsets(positive)[offsets], queries["terms"][positive], queries["weights"][positive]


def _offsets(lengths: Array) -> Array:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.add.accumulate(lengths, out=offsets[1:])
    return offsets


def _lowest(values: Array) -> float:
    return values[values.argmin()] if len(values) else 0  # a quarter of what min() takes


def _in_memory(name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    return np.zeros(shape, dtype)


def _fill(rows: Array, scores: Array, keep: Array | None) -> None:
    """Fill up the hits of each query with the lowest rows that are not among them; they score 0."""
    missing, k = rows < 0, rows.shape[1]
    lowest = (
        np.arange(k) if keep is None else np.flatnonzero(keep)[:k]
    )  # hits take k - missing of them at most
    positions = np.searchsorted(lowest, rows)
    positions[lowest.take(positions, mode="clip") != rows] = len(lowest)
    free = np.ones((len(rows), len(lowest) + 1), bool)
    np.put_along_axis(free, positions, False, 1)
    free[:, -1] = False
    free &= free.cumsum(1) <= missing.sum(1, keepdims=True)
    rows[missing], scores[missing] = lowest[free.nonzero()[1]], 0


def quantize(weights: Array, lengths: Array, dtype: str) -> dict[str, Array]:
    """Return ``weights`` in a dtype, and ``scales (n,)`` of the rows if it is an integer type.

    Raises:
        BadValueError: A weight is too large, or below 0 for an integer type.
    """
    lowest, largest = weights.min(initial=0), weights.max(initial=0)
    if dtype in _LARGEST and lowest < 0:
        raise BadValueError(
            f"adding documents: got a weight of {lowest:g}, expected 0 or more for an index of {dtype}; "
            "choose the dtype float16 or float32"
        )
    if dtype not in _LARGEST:
        with np.errstate(over="ignore"):
            rounded = weights.astype(dtype)
        if not np.isfinite(rounded).all():
            raise BadValueError(
                f"adding documents: got weights of {lowest:g} to {largest:g}, expected at most 65504, the "
                "largest float16; choose the dtype float32"
            )
        return {"weights": rounded}
    most = np.zeros(len(lengths), np.float32)
    filled = lengths > 0
    if filled.any():
        most[filled] = np.maximum.reduceat(weights, (np.cumsum(lengths) - lengths)[filled])
    scales = np.maximum(most / np.float32(_LARGEST[dtype]), np.finfo(np.float32).tiny)
    return {"weights": np.rint(weights / np.repeat(scales, lengths)).astype(dtype), "scales": scales}


def to_counts(weights: Array) -> Array:
    """Return how often each term occurs, in two bytes.

    Raises:
        BadValueError: A number is not a count, or too large.
    """
    with np.errstate(invalid="ignore"):
        counts = weights.astype(np.uint16)
    if (counts != weights).any():
        raise BadValueError(
            f"adding documents: got {weights[counts != weights][0]:g} as how often a term occurs; expected a "
            "whole number from 0 to 65535"
        )
    return counts
