"""Exact search: calls the machine code, with memory to work in that each thread keeps."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._jit import compile_ir, cpu_features
from .._threads import share
from .cpu_exact import write_exact
from .cpu_few import MOST_DOCUMENTS, MOST_HITS, build_few, write_few
from .cpu_frame import FIELDS, RANGE

__all__ = ["ARGUMENTS", "KINDS", "LONG", "Exact", "Single"]

Array = NDArray[Any]

KINDS = {
    "float32": "float",
    "float16": "half",
    "uint8": "i8",
    "uint16": "i16",
    "int32": "i32",
    "uint32": "i32",
}
Codes = tuple[Callable[..., None], ...]
Single = Callable[[Tensor, Tensor], tuple[Array, Array] | None]

ARGUMENTS = (ctypes.c_void_p,)  # the frame
LONG = 256  # terms of a query
_PLACES = {name: place for place, name in enumerate(FIELDS)}
_REFUSED = _PLACES["refused"]
_QUERY, _START = struct.Struct("=8q"), 8 * _PLACES["n_q"]  # from "n_q" to "scores"
_GIVEN, _GIVEN_AT = struct.Struct("=4q"), 8 * _PLACES["given_terms"]  # to "given_kind"
_GIVEN_KINDS = {torch.int32: 1, torch.int64: 2}
_QUERIES, _HITS = 32, 1 << 16  # a thread takes at a time
_NARROW = 1 << 16  # numbers of 16 bits
_QUICK = 4  # times as many queries of few documents


class Exact:
    """Finds exactly the best documents of queries without negative weights.

    Args:
        arrays: What `build_exact` made.
        forward: ``offsets (n + 1)`` int64, ``terms``, ``weights`` and ``scales (n,)`` float32 or None of the
            documents it was made of.
    """

    def __init__(self, arrays: dict[str, Array], forward: tuple[Array, Array, Array, Array | None]) -> None:
        offsets, terms, weights, scales = forward
        self._n_ranges = -(-(len(offsets) - 1) // RANGE)
        self._held = {name: arrays[name] for name in ("list_offsets", "lists", "postings", "gains")}
        self._held |= {"offsets": offsets, "terms": terms, "weights": weights}
        if scales is not None:
            self._held["row_scales"] = scales
        self._frame = np.zeros(len(FIELDS), np.int64)
        for name, array in self._held.items():
            self._frame[_PLACES[name]] = _address(array)
        self._dim = len(arrays["gains"])
        # so long that damaged terms are in it, too: all of 16 bits, or the last for what is beyond
        self._table = max(self._dim + 1, _NARROW if terms.dtype == np.uint16 else 0)
        for name, number in (("n", len(offsets) - 1), ("n_ranges", self._n_ranges), ("dim", self._dim)):
            self._frame[_PLACES[name]] = number
        self._code = _compiled(KINDS[str(terms.dtype)], KINDS[str(weights.dtype)])
        self._own = threading.local()
        self._forward = forward

    def search(
        self, queries: tuple[Array, Array, Array], k: int, keep: Array | None = None
    ) -> tuple[Array, Array]:
        """The best documents of each query.

        Args:
            queries: ``offsets (n_q + 1,)`` int64, ``terms`` int32 and ``weights`` float32 above 0; terms from
                dim on are of no document.
            k: Hits of a query.
            keep: ``(n,)`` bool, documents that may be found.

        Returns:
            Rows int64 and scores float32 ``(n_q, k)``, best first, ties to the lower row, -1 and -inf where
            nothing more scores above 0.
        """
        return self._run(self._codes(k, keep), self._prepared, queries, k, keep)

    def _run(
        self,
        codes: Codes,
        prepare: Callable[[int], Array],
        queries: tuple[Array, Array, Array],
        k: int,
        keep: Array | None,
    ) -> tuple[Array, Array]:
        """Run machine code, shared by threads; ``prepare(longest)`` gives the frame of a thread.

        Where some code refuses queries, the next of ``codes`` is tried.
        """
        n_q = len(queries[0]) - 1
        rows, scores = np.empty((n_q, k), np.int64), np.empty((n_q, k), np.float32)
        if n_q == 1:
            self._work(codes, prepare, queries, rows, scores, keep)
            return rows, scores
        step = max(1, min(_QUERIES if len(codes) == 1 else _QUICK * _QUERIES, _HITS // k))

        def work(first: int, last: int) -> None:
            for start in range(first, last, step):
                stop = min(start + step, last)
                some = _part(queries, start, stop)
                self._work(codes, prepare, some, rows[start:stop], scores[start:stop], keep)

        share(work, n_q, torch.get_num_threads(), multiple=step)
        return rows, scores

    def _single(self, codes: Codes, prepared: Array, k: int) -> Single:
        """What runs machine code for one query after the other in this thread, with as little else as can be.

        Args:
            codes: Machine code; where one refuses a query, the next is tried.
            prepared: A frame for queries of `LONG` terms.
            k: Hits of each.
        """
        frame, rows, scores = prepared.copy(), np.empty((1, k), np.int64), np.empty((1, k), np.float32)
        memory: dict[str, Array] = {"rows": rows, "scores": scores, "q_offsets": np.zeros(2, np.int64)}
        memory |= {"q_terms": np.empty(LONG, np.int32), "q_weights": np.empty(LONG, np.float32)}
        for name, array in memory.items():
            frame[_PLACES[name]] = _address(array)
        for name, number in (("n_q", 1), ("k", k), ("keep", 0)):
            frame[_PLACES[name]] = number
        view, address, refused = frame.data, _address(frame), _REFUSED
        memory |= self._own.memory  # which is replaced when a longer query needs more
        give, kinds, float32 = _GIVEN.pack_into, _GIVEN_KINDS, torch.float32
        copy_rows, copy_scores = rows.copy, scores.copy

        def search(terms: Tensor, weights: Tensor, _held: Any = (self, memory)) -> tuple[Array, Array] | None:
            m, kind = weights.numel(), kinds.get(terms.dtype)
            if m > LONG or kind is None or weights.dtype is not float32:
                return None
            if not (terms.is_cpu and terms.is_contiguous() and weights.is_cpu and weights.is_contiguous()):
                return None
            give(view, _GIVEN_AT, terms.data_ptr(), weights.data_ptr(), m, kind)
            for code in codes:
                code(address)
                if not view[refused]:
                    return copy_rows(), copy_scores()
            return None

        return search

    def _codes(self, k: int, keep: Array | None = None) -> Codes:
        """What finds ``k`` documents: the way for few documents first, where there is one."""
        few = keep is None and k <= min(MOST_HITS, len(self._forward[0]) - 1) and self._few
        return (_few(), self._code) if few else (self._code,)

    @cached_property
    def _few(self) -> dict[str, Array]:
        """The lists that the way for few documents reads; nothing where it will not do."""
        n, terms = len(self._forward[0]) - 1, self._forward[1]
        fine = n <= MOST_DOCUMENTS and terms.max(initial=0) < self._dim
        made = build_few(self._forward, self._dim) if fine else None
        if made is None:
            return {}
        lists, rows, values = made
        weights = aligned(values.nbytes).view(np.float32)
        weights[:] = values
        return {"few_lists": lists, "few_rows": rows, "few_weights": weights}

    def _work(
        self,
        codes: Codes,
        prepare: Callable[[int], Array],
        queries: tuple[Array, Array, Array],
        rows: Array,
        scores: Array,
        keep: Array | None,
    ) -> None:
        """Run machine code for some queries in this thread, on arrays at fixed addresses."""
        offsets, terms, weights = queries
        n_q, m = len(offsets) - 1, len(terms)
        longest = m if n_q == 1 else int(np.diff(offsets).max())
        if longest > LONG and len(codes) == 1:
            terms, weights = self._sorted(offsets, terms, weights)
        frame = prepare(longest)
        own, hits = self._own, rows.size
        if n_q > own.size[0] or m > own.size[1] or hits > own.size[2]:
            self._make_room(n_q, m, hits)
        own.offsets[: n_q + 1], own.terms[:m], own.weights[:m] = offsets, terms, weights
        given, results = own.addresses
        _QUERY.pack_into(
            frame.data, _START, n_q, *given, rows.shape[1], 0 if keep is None else _address(keep), *results
        )
        for code in codes:
            code(own.address)
            if not frame[_REFUSED]:
                break
        rows.reshape(-1)[:], scores.reshape(-1)[:] = own.rows[:hits], own.scores[:hits]

    def _make_room(self, *size: int) -> None:
        """Memory of this thread for so many queries, terms and hits."""
        own = self._own
        own.size = n_q, m, hits = tuple(map(max, size, own.size))
        own.offsets, own.terms, own.weights = (
            np.empty(n_q + 1, np.int64),
            np.empty(m, np.int32),
            np.empty(m, np.float32),
        )
        own.rows, own.scores = np.empty(hits, np.int64), np.empty(hits, np.float32)
        arrays = (own.offsets, own.terms, own.weights), (own.rows, own.scores)
        own.addresses = [tuple(map(_address, some)) for some in arrays]

    def _sorted(self, offsets: Array, terms: Array, weights: Array) -> tuple[Array, Array]:
        """Terms of long queries, those first that bring most: the machine code sorts by insertion."""
        gains = weights * self._held["gains"][np.minimum(terms, self._dim - 1)]
        order = np.lexsort((-gains, np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))))
        return terms[order], weights[order]

    def _prepared(self, longest: int) -> Array:
        """A frame of this thread with scratch memory for queries of at most so many terms."""
        own = self._own
        if not hasattr(own, "frame"):
            own.frame, own.longest, own.size = self._frame.copy(), -1, (-1, -1, -1)
            own.memory = {
                "sums": aligned(2 * _NARROW),  # of all rows that damaged postings may have
                "chosen": np.empty(RANGE + 1, np.int32),
                "slot_counts": np.empty(self._n_ranges, np.int32),
                "bounds": np.empty(self._n_ranges, np.float32),
                "table": np.zeros(self._table, np.float32),
                "marks": aligned(64),
                **self._few,
            }
            for name, array in own.memory.items():
                own.frame[_PLACES[name]] = _address(array)
            own.address = _address(own.frame)
        if longest > own.longest:
            own.longest = longest
            kinds = {"own_terms": np.int32, "own_weights": np.float32, "own_gains": np.float32}
            memory = {name: np.empty(longest + 1, kind) for name, kind in kinds.items()}
            memory["slots"] = np.empty((self._n_ranges * longest + 1, 2), np.int64)
            own.memory |= memory
            for name, array in memory.items():
                own.frame[_PLACES[name]] = _address(array)
        frame: Array = own.frame
        return frame


def _part(queries: tuple[Array, Array, Array], start: int, stop: int) -> tuple[Array, Array, Array]:
    offsets, terms, weights = queries
    if start == 0 and stop == len(offsets) - 1:
        return queries
    places = slice(int(offsets[start]), int(offsets[stop]))
    return offsets[start : stop + 1] - offsets[start], terms[places], weights[places]


def aligned(size: int) -> Array:
    """Bytes that begin at a cache line."""
    room = np.zeros(size + 64, np.uint8)
    start = -_address(room) % 64
    return room[start : start + size]


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


@cache
def _few() -> Callable[..., None]:
    return compile_ir(write_few(), "few", ARGUMENTS)


@cache
def _compiled(terms: str, weights: str) -> Callable[..., None]:
    wide = "avx512bw" in cpu_features()
    return compile_ir(write_exact(terms, weights, wide), "exact", ARGUMENTS)
