"""Search of an inverted file of dense vectors; see README.md."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .._jit import compile_ir, compiled_once, cpu_features
from .._threads import share
from .checks import check_kept, check_margins, check_rotation, check_segment
from .cpu_frame import FRAME, PANEL, SEGMENT, SLACK, Plan
from .cpu_search import NO_PLACE, write_candidates, write_places, write_search
from .lists import group_lists, list_biases, panels, quantized
from .rotation import Rotation, rotate

__all__ = ["SHUFFLES", "Candidates", "Effort", "Searcher", "effort_of"]

Array = NDArray[Any]
Single = Callable[[Array], tuple[Array, Array]]

METRICS = ("inner_product", "euclidean")
_WORD = {name: offset // 8 for name, offset in FRAME.offsets.items()}
_SEGMENT = {name: offset // 8 for name, offset in SEGMENT.offsets.items()}
_QUERIES_PER_CALL = 32
SHUFFLES = {  # by LLVM's name of a feature: the instruction that looks up bytes, see `Plan`
    "avx512bw": ("llvm.x86.avx512.pshuf.b.512", 64),
    "avx2": ("llvm.x86.avx2.pshuf.b", 32),
    "ssse3": ("llvm.x86.ssse3.pshuf.b.128", 16),
    "neon": ("llvm.aarch64.neon.tbl1.v16i8", 16),
}


class Effort(NamedTuple):
    """How much a search reads.

    Attributes:
        probes: Lists whose rows are scored by their signs.
        candidates: The best of these rows, which are scored by all bits of their codes.
        refined: The best of these, which are scored by the kept rows, or without them by the codes and a
            query that is not rounded. With codes of one bit, all candidates are.
        groups: Groups whose lists are scored by their centroids; 0 means an eighth of them, at least 4, or
            more if so many lists are to be read.
    """

    probes: int
    candidates: int
    refined: int
    groups: int = 0


class Candidates(NamedTuple):
    """The rows that a search scores by their signs and keeps, in the order in which they are scanned.

    Attributes:
        rows: ``(n_q, candidates)`` int64, -1 where there are no more.
        places: The same shape, uint32: where they are in the segments, for `Searcher.rank`.
        ranks: uint32, the rank of the list of each for the query: of equal scores the lower rank is kept, and
            in a list the lower row.
        rough: float32, scores by signs; -inf where there is no row.
        fine: float32, scores by all bits of the codes; the same as ``rough`` if codes have one bit.
    """

    rows: Array
    places: Array
    ranks: Array
    rough: Array
    fine: Array


def effort_of(probes: int, k: int) -> Effort:
    """Return an effort that ranks enough rows of ``probes`` lists to lose almost none of their hits."""
    return Effort(probes, 30 + 2 * k, 5 + k + k // 2)


class Searcher:
    """Finds the best rows of queries; many threads may use it at a time.

    Args:
        centroids: ``(lists, dim)`` float32.
        rotation: Rotation of vectors of ``dim`` numbers.
        segments: Results of `arrange`, all of codes of as many bits.
        n_rows: Rows have numbers below this.
        metric: inner_product, of vectors of length 1 for cosines, or euclidean.
        kept: Rows that candidates are ranked by, in the order of their numbers: ``(n_rows, dim)`` float16 or
            float32, or ``(n_rows, width)`` int8 as `Encoder` makes them; None ranks by codes alone.
        kept_scales: ``(n_rows,)`` float32 of int8.
        margins: ``(lists,)`` float32, see `list_margins`; None is right for vectors of length 1, and not used
            for euclidean distances.

    Raises:
        ValueError: An array has another dtype or shape, or a search of it would leave the array.
    """

    def __init__(
        self,
        centroids: Array,
        rotation: Rotation,
        segments: Sequence[Mapping[str, Array]],
        n_rows: int,
        *,
        metric: str = "inner_product",
        kept: Array | None = None,
        kept_scales: Array | None = None,
        margins: Array | None = None,
    ) -> None:
        if metric not in METRICS:
            raise ValueError(f"dense_search: metric {metric!r} is unknown; expected one of {METRICS}")
        # check the arrays, and choose the code for them
        self.n_lists, self.dim = centroids.shape
        self.n_rows, self.metric = n_rows, metric
        self._width = check_rotation(rotation, self.dim)
        nbits = {check_segment(part, self.n_lists, self._width, metric == "euclidean") for part in segments}
        if len(nbits) > 1:
            raise ValueError(f"dense_search: segments have codes of {sorted(nbits)} bits")
        check_margins(margins, self.n_lists)
        keep = check_kept(kept, kept_scales, n_rows, self.dim, self._width)
        self._plan = Plan(self._width, next(iter(nbits), 1), keep, *_features())
        self._search = _compiled(self._plan)
        self._frame = np.zeros(len(_WORD), np.int64)
        # arrays that the code reads: lists, segments and kept rows
        self._arrays = self._list_arrays(centroids, rotation, margins)
        if keep == "none" and self._plan.nbits > 1:
            rotated = rotate(torch.from_numpy(np.array(centroids, np.float32)), rotation).numpy()
            self._arrays["list_codes"], self._arrays["list_code_scales"] = quantized(rotated)
        self._n_groups = len(self._arrays["group_slots"]) - 1
        self._arrays |= {"segments": self._segment_table(segments)}
        for name, array in (("kept", kept), ("kept_scales", kept_scales)):
            if array is not None:
                self._arrays[name] = array
        for name, array in self._arrays.items():
            self._frame[_WORD[name]] = address(array)
        # numbers that the code reads
        numbers = {"dim": self.dim, "n_rows": n_rows, "n_groups": self._n_groups}
        numbers |= {"n_segments": len(segments), "n_lists": self.n_lists}
        numbers["list_bits"] = max(1, (self.n_lists - 1).bit_length())
        numbers["euclidean"] = metric == "euclidean"
        for name, number in numbers.items():
            self._frame[_WORD[name]] = number
        self._segments = segments
        self._firsts = np.cumsum([0, *(len(part["rows"]) for part in segments)])[:-1]
        self._thread = threading.local()

    def find(
        self, queries: Array, k: int, effort: Effort | int = 16, keep: Array | None = None
    ) -> tuple[Array, Array]:
        """Find the best rows of each query.

        Args:
            queries: ``(n_q, dim)`` finite numbers.
            k: Hits per query.
            effort: How much is read, or the number of lists, see `effort_of`.
            keep: ``(n_rows,)`` bool, rows that may be found; or the numbers of these rows. None means all.

        Returns:
            Rows int64 and scores float32 ``(n_q, k)``, best first, ties to the lower row, -1 and -inf where
            no more is found. Scores are inner products, or squared distances times -1.

        Raises:
            ValueError: The queries or the filter have another shape.
        """
        queries = self._checked(queries)
        allowed = None if keep is None else self._allowed(keep)
        n_q = len(queries)
        rows, scores = np.full((n_q, k), -1, np.int64), np.full((n_q, k), -np.inf, np.float32)
        if not (n_q and k and self.n_rows and self.n_lists and len(self._segments)):
            return rows, scores
        chosen = self.effort(effort, k)

        self._run(self._search, queries, chosen, k, allowed, {"rows": rows, "scores": scores})
        return rows, scores

    def _run(
        self,
        work: Callable[..., None],
        queries: Array,
        effort: Effort,
        k: int,
        allowed: Array | None,
        outputs: Mapping[str, Array],
    ) -> None:
        """Call compiled code for all queries; ``outputs`` have a row for each query."""

        def search(start: int, stop: int) -> None:
            frame = self._prepare(effort)
            for name, array in {"queries": queries, **outputs}.items():
                frame[_WORD[name]] = address(array[start:stop])
            frame[_WORD["n_q"]], frame[_WORD["k"]] = stop - start, k
            frame[_WORD["allowed"]] = 0 if allowed is None else address(allowed)
            work(address(frame))

        n_q = len(queries)
        if n_q == 1:
            search(0, 1)
        else:
            share(search, n_q, torch.get_num_threads(), multiple=min(_QUERIES_PER_CALL, max(n_q, 1)))

    def _checked(self, queries: Array) -> Array:
        queries = np.ascontiguousarray(queries, np.float32)
        if queries.ndim != 2 or queries.shape[1] != self.dim:
            raise ValueError(f"dense_search: queries are {queries.shape}, expected (n, {self.dim})")
        return queries

    def candidates(self, queries: Array, effort: Effort, keep: Array | None = None) -> Candidates:
        """Find what `find` ranks: arguments are its own.

        The best ``effort.candidates`` of several searchers that have the same lists are those of one searcher
        of all rows, and so on for the next step.
        """
        queries, chosen = self._checked(queries), self.effort(effort, 1)
        allowed, shape = None if keep is None else self._allowed(keep), (len(queries), chosen.candidates)
        places, ranks = np.full((2, *shape), NO_PLACE, np.uint32)
        rough = np.full(shape, -np.inf, np.float32)
        fine = rough if self._plan.nbits == 1 else rough.copy()
        outputs = {"places": places, "ranks": ranks, "rough": rough, "fine": fine}
        if self.n_rows and self.n_lists and len(self._segments):
            self._run(_compiled_candidates(self._plan), queries, chosen, 0, allowed, outputs)
        rows = np.full(shape, -1)
        for segment, first in zip(self._segments, self._firsts, strict=True):
            own = (places >= first) & (places < first + len(segment["rows"]))
            rows[own] = segment["rows"][places[own] - first]
        rows[rows >= self.n_rows] = -1  # of a damaged file
        return Candidates(rows, places, ranks, rough, fine)

    def rank(self, queries: Array, places: Array) -> Array:
        """Score chosen candidates as `find` scores its hits.

        Args:
            queries: ``(n_q, dim)`` finite numbers.
            places: ``(n_q, n)`` uint32, of `candidates` whose row is not -1, in any order; ``NO_PLACE`` after
                the last one of a query.

        Returns:
            ``(n_q, n)`` float32; -inf where there is no place.

        Raises:
            ValueError: A place is in no segment.
        """
        queries, scores = self._checked(queries), np.full(places.shape, -np.inf, np.float32)
        total = sum(len(segment["rows"]) for segment in self._segments)
        if ((places >= total) & (places != NO_PLACE)).any():
            raise ValueError(f"dense_search: a place is above the {total} of the segments")
        places = np.ascontiguousarray(places, np.uint32)
        if places.size and total:
            effort, outputs = Effort(1, places.shape[1], 1, 1), {"places": places, "scores": scores}
            self._run(_compiled_places(self._plan), queries, effort, places.shape[1], None, outputs)
        return scores

    def single(self, k: int, effort: Effort | int = 16) -> Single:
        """Return a function that finds the best rows of one query, with the least overhead.

        Args:
            k: Hits.
            effort: As for `find`.

        Returns:
            A function of a contiguous query ``(dim,)`` float32, for one thread at a time. It returns new
            arrays of rows and scores ``(1, k)``, as `find` does.
        """
        frame = self._prepare(self.effort(effort, k)).copy()
        query, rows = np.zeros((1, self.dim), np.float32), np.full((1, k), -1, np.int64)
        scores = np.full((1, k), -np.inf, np.float32)
        for name, array in (("queries", query), ("rows", rows), ("scores", scores)):
            frame[_WORD[name]] = address(array)
        some = bool(self.n_rows and self.n_lists and len(self._segments))
        frame[_WORD["n_q"]], frame[_WORD["k"]], frame[_WORD["allowed"]] = some, k, 0
        held = self, frame, query, self._thread.memory
        search, frame_address, target = self._search, address(frame), query[0]
        copy_rows, copy_scores = rows.copy, scores.copy

        def find(query: Array, _held: Any = held) -> tuple[Array, Array]:
            target[:] = query
            search(frame_address)
            return copy_rows(), copy_scores()

        return find

    def effort(self, effort: Effort | int, k: int) -> Effort:
        """Return an effort whose numbers are limited to possible values."""
        chosen = effort if isinstance(effort, Effort) else effort_of(effort, k)
        probes = min(max(chosen.probes, 1), max(self.n_lists, 1))
        most = max(sum(len(part["rows"]) for part in self._segments), 1)
        candidates = min(max(chosen.candidates, k, 1), most)
        most_groups, share = self._n_groups, 3 * probes / max(self.n_lists, 1)
        groups = chosen.groups or max(-(-most_groups // 8), 4, math.ceil(share * most_groups))
        refined = min(max(chosen.refined, k), candidates)
        return Effort(probes, candidates, refined, min(max(groups, 1), most_groups))

    def _allowed(self, keep: Array) -> Array:
        """Return the filter as a byte for each row."""
        if keep.dtype == np.bool_ and keep.shape == (self.n_rows,):
            return np.ascontiguousarray(keep)
        if keep.dtype.kind not in "iu" or keep.ndim != 1:
            raise ValueError(
                f"dense_search: the filter is {keep.dtype} {keep.shape}, expected ({self.n_rows},) bool or "
                "row numbers"
            )
        if len(keep) and not 0 <= keep.min() <= keep.max() < self.n_rows:
            raise ValueError(
                f"dense_search: the filter has rows {keep.min()} to {keep.max()} of {self.n_rows}"
            )
        allowed = np.zeros(self.n_rows, np.bool_)
        allowed[keep] = True
        return allowed

    def _list_arrays(self, centroids: Array, rotation: Rotation, margins: Array | None) -> dict[str, Array]:
        """Return the centroids as bytes, in panels, and the rotation as floats."""
        groups = group_lists(centroids, self.metric == "euclidean", margins)
        biases = list_biases(centroids, self.metric == "euclidean", margins)
        lists = panels(centroids, biases, groups.members, rotation)
        every = [np.arange(len(groups.members))]
        upper = panels(groups.centroids, groups.biases, every, rotation)
        names = "panels", "{}_scales", "{}_biases", "{}_numbers"
        arrays = {name.format("list"): array for name, array in zip(names, lists, strict=False)}
        for name, array in zip(("group_panels", *names[1:]), upper, strict=False):
            arrays[name.format("group")] = array
        return arrays | {
            "group_slots": lists[-1],
            "rotation_signs": rotation.signs.astype(np.float32) / 8,
            "rotation_order": np.ascontiguousarray(rotation.order, np.uint32),
        }

    def _segment_table(self, segments: Sequence[Mapping[str, Array]]) -> Array:
        """Return the records of the segments: addresses, and the number of the first row."""
        table, first = np.zeros((max(1, len(segments)), SEGMENT.size // 8), np.int64), 0
        for record, segment in zip(table, segments, strict=False):
            record[_SEGMENT["first"]] = first
            for name, array in segment.items():
                if name in _SEGMENT:
                    record[_SEGMENT[name]] = address(array)
            first += len(segment["rows"])
        if first >= 1 << 32:
            raise ValueError(f"dense_search: got {first} rows, expected fewer than 2**32")
        return table

    def _prepare(self, effort: Effort) -> Array:
        """Return the frame of this thread, with scratch memory for an effort."""
        thread, room = self._thread, max(effort.probes, effort.candidates, effort.groups) + SLACK + PANEL
        if getattr(thread, "room", 0) < room:
            thread.room, thread.frame, width = room, self._frame.copy(), self._width
            sizes = {"values": (2 * width, np.float32), "bytes": (width, np.uint8)}
            sizes |= {"levels": (width, np.int32), "table": (4 * width, np.uint8)}
            sizes |= {"probed": (room, np.uint32)}
            sizes |= {"keys": (room, np.int32), "items": (room, np.uint32), "bases": (room, np.float32)}
            sizes |= {"sums": (room, np.float32), "sorted_keys": (room, np.int32)}
            sizes |= {"sorted_items": (room, np.uint32), "probed_scores": (room, np.float32)}
            thread.memory = {name: np.zeros(*size) for name, size in sizes.items()}
            for name, array in thread.memory.items():
                thread.frame[_WORD[name]] = address(array)
        frame: Array = thread.frame
        for name, number in zip(effort._fields, effort, strict=True):
            frame[_WORD[name]] = number
        return frame


def address(array: Array) -> int:
    """Return where an array begins in memory."""
    return int(array.__array_interface__["data"][0])


def _features() -> tuple[bool, tuple[str, int]]:
    """Return whether this CPU has AVX512-VNNI, and its instruction that looks up bytes."""
    features = cpu_features()
    return "avx512vnni" in features, next((SHUFFLES[name] for name in SHUFFLES if name in features), ("", 0))


@compiled_once
def _compiled_candidates(plan: Plan) -> Callable[..., None]:
    return compile_ir(write_candidates(plan), "candidates", [ctypes.c_void_p])


@compiled_once
def _compiled_places(plan: Plan) -> Callable[..., None]:
    return compile_ir(write_places(plan), "rank_places", [ctypes.c_void_p])


@compiled_once
def _compiled(plan: Plan) -> Callable[..., None]:
    return compile_ir(write_search(plan), "search", [ctypes.c_void_p])
