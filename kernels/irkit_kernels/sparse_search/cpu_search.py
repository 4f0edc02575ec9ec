"""Exact search: calls the machine code, with a frame and scratch memory for each thread."""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._jit import compile_ir, compiled_once, cpu_features
from .._threads import share
from .cpu_build_few import build_few
from .cpu_exact import write_exact
from .cpu_few import MOST_DOCUMENTS, MOST_HITS, write_few
from .cpu_frame import FRAME, RANGE

__all__ = ["ARGUMENTS", "DEFAULT", "KINDS", "LONG", "Exact", "Single", "Thresholds", "address", "aligned"]

Array = NDArray[Any]
Queries = tuple[Array, Array, Array]
Functions = tuple[Callable[..., None], ...]
Single = Callable[[Tensor, Tensor], tuple[Array, Array] | None]

KINDS = {"float32": "float", "float16": "half", "uint8": "u8", "uint16": "u16", "uint32": "u32"}
ARGUMENTS = (ctypes.c_void_p,)  # the frame
LONG = 256  # terms of a query: longer ones are sorted here and not by insertion
_WORD = {name: offset // 8 for name, offset in FRAME.offsets.items()}  # of the frame
_QUERIES, _QUERIES_AT = struct.Struct("=8q"), FRAME.offsets["n_q"]  # from "n_q" to "scores"
_SINGLE, _SINGLE_AT = struct.Struct("=4q"), FRAME.offsets["given_terms"]  # from there to "term_words"
_TERM_WORDS = {torch.int32: 1, torch.int64: 2}
_QUERIES_PER_CALL, _HITS_PER_CALL = 32, 1 << 16
_FEW_FACTOR = 4  # times as many queries per call, where there are few documents
_NARROW = 1 << 16  # numbers of 16 bits


@dataclass(frozen=True)
class Thresholds:
    """What decides how a `Searcher` searches; results of exact search do not depend on it.

    Attributes:
        few: Up to this number of documents exact search adds up all scores, see `cpu_few`.
        approximate: Below this number of documents approximate search is exact.
        per_score: Exact search of this number of documents takes as long as scoring one document. If there
            are fewer documents than this for each document that approximate search may score, search is
            exact, too.
        survey: Postings for each hit, times the logarithm of the number of ranges, up to which exact search
            reads all lists first, see `cpu_survey`; fitted. With 0 it never does.
    """

    few: int = MOST_DOCUMENTS
    approximate: int = 1 << 15
    per_score: int = 200
    survey: int = 300


DEFAULT = Thresholds()


class Exact:
    """Finds exactly the best documents of queries without negative weights.

    Args:
        arrays: The result of `build_exact`.
        forward: ``offsets (n + 1)`` int64, ``terms``, ``weights`` and ``scales (n,)`` float32 or None of the
            documents.
        thresholds: Numbers of documents that decide how to search.
    """

    def __init__(
        self,
        arrays: dict[str, Array],
        forward: tuple[Array, Array, Array, Array | None],
        thresholds: Thresholds = DEFAULT,
    ) -> None:
        offsets, terms, weights, scales = forward
        self._n_ranges = -(-(len(offsets) - 1) // RANGE)
        self._dim = len(arrays["gains"])
        # Terms of damaged documents are in the table of weights, too: all of 16 bits, or the last entry.
        self._table = max(self._dim + 1, _NARROW if terms.dtype == np.uint16 else 0)
        self._arrays = {name: arrays[name] for name in ("list_offsets", "lists", "postings", "gains")}
        self._arrays |= {"offsets": offsets, "terms": terms, "weights": weights}
        if scales is not None:
            self._arrays["row_scales"] = scales
        self._frame = np.zeros(len(_WORD), np.int64)
        _set_addresses(self._frame, self._arrays)
        numbers = {"n": len(offsets) - 1, "n_ranges": self._n_ranges, "dim": self._dim}
        numbers["survey_gain"] = int(thresholds.survey * math.log(max(1, self._n_ranges)))
        for name, number in numbers.items():
            self._frame[_WORD[name]] = number
        self._exact = _exact(KINDS[str(terms.dtype)], KINDS[str(weights.dtype)])
        self._thread = threading.local()
        self._forward, self._thresholds = forward, thresholds

    def search(self, queries: Queries, k: int, keep: Array | None = None) -> tuple[Array, Array]:
        """Find the best documents of each query.

        Args:
            queries: ``offsets (n_q + 1,)`` int64, ``terms`` int32, each once per query, and ``weights``
                float32 above 0. No document has terms from dim on.
            k: Hits per query.
            keep: ``(n,)`` bool, documents that may be found.

        Returns:
            Rows int64 and scores float32 ``(n_q, k)``, best first, ties to the lower row, -1 and -inf where
            no more documents score above 0.
        """
        return self._search_all(self._functions(k, keep), self._prepare, queries, k, keep)

    def _search_all(
        self,
        functions: Functions,
        prepare: Callable[[int], Array],
        queries: Queries,
        k: int,
        keep: Array | None,
    ) -> tuple[Array, Array]:
        """Share queries among threads.

        Args:
            functions: Machine code; if one refuses a query, the next is called.
            prepare: ``prepare(longest)`` returns the frame of a thread, for queries of so many terms.
            queries: As for `search`.
            k: Hits per query.
            keep: As for `search`.
        """
        n_q = len(queries[0]) - 1
        rows, scores = np.empty((n_q, k), np.int64), np.empty((n_q, k), np.float32)
        if n_q == 1:
            self._search_part(functions, prepare, queries, rows, scores, keep)
            return rows, scores
        factor = 1 if len(functions) == 1 else _FEW_FACTOR
        step = max(1, min(factor * _QUERIES_PER_CALL, _HITS_PER_CALL // k))

        def search(first: int, last: int) -> None:
            for start in range(first, last, step):
                stop = min(start + step, last)
                part = _part(queries, start, stop)
                self._search_part(functions, prepare, part, rows[start:stop], scores[start:stop], keep)

        share(search, n_q, torch.get_num_threads(), multiple=step)
        return rows, scores

    def _search_part(
        self,
        functions: Functions,
        prepare: Callable[[int], Array],
        queries: Queries,
        rows: Array,
        scores: Array,
        keep: Array | None,
    ) -> None:
        """Search for some queries in this thread, in arrays whose addresses stay the same."""
        offsets, terms, weights = queries
        n_q, m = len(offsets) - 1, len(terms)
        longest = m if n_q == 1 else int(np.diff(offsets).max())
        if longest > LONG and len(functions) == 1:
            terms, weights = self._sorted(offsets, terms, weights)

        # Copy the queries into the arrays of this thread.
        frame = prepare(longest)
        thread, hits = self._thread, rows.size
        most, k = thread.size, rows.shape[1]
        if n_q > most[0] or m > most[1] or hits > most[2] or k > most[3]:
            self._allocate(n_q, m, hits, k)
        thread.offsets[: n_q + 1], thread.terms[:m], thread.weights[:m] = offsets, terms, weights
        inputs, results = thread.addresses
        filter_address = 0 if keep is None else address(keep)
        _QUERIES.pack_into(frame.data, _QUERIES_AT, n_q, *inputs, rows.shape[1], filter_address, *results)

        for function in functions:
            function(thread.address)
            if not frame[_WORD["refused"]]:
                break
        rows.reshape(-1)[:], scores.reshape(-1)[:] = thread.rows[:hits], thread.scores[:hits]

    def _search_one(self, functions: Functions, prepared: Array, k: int) -> Single:
        """Return a function that searches for one query at a time in this thread, with little done in Python.

        Args:
            functions: Machine code; if one refuses a query, the next is called.
            prepared: A frame for queries of `LONG` terms.
            k: Hits per query.
        """
        frame, rows, scores = prepared.copy(), np.empty((1, k), np.int64), np.empty((1, k), np.float32)
        memory: dict[str, Array] = {"rows": rows, "scores": scores, "q_offsets": np.zeros(2, np.int64)}
        memory |= {"q_terms": np.empty(LONG, np.int32), "q_weights": np.empty(LONG, np.float32)}
        memory["keys"] = np.empty(k, np.int64)
        _set_addresses(frame, memory)
        for name, number in (("n_q", 1), ("k", k), ("keep", 0)):
            frame[_WORD[name]] = number
        memory = self._thread.memory | memory  # of the thread, whose own a longer query replaces
        # Python looks local names up faster than attributes of modules and objects.
        view, frame_address, refused = frame.data, address(frame), _WORD["refused"]
        pack, term_words, float32 = _SINGLE.pack_into, _TERM_WORDS, torch.float32
        copy_rows, copy_scores = rows.copy, scores.copy

        def search(terms: Tensor, weights: Tensor, _held: Any = (self, memory)) -> tuple[Array, Array] | None:
            m, words = weights.numel(), term_words.get(terms.dtype)
            if m > LONG or words is None or weights.dtype is not float32:
                return None
            if not (terms.is_cpu and terms.is_contiguous() and weights.is_cpu and weights.is_contiguous()):
                return None
            pack(view, _SINGLE_AT, terms.data_ptr(), weights.data_ptr(), m, words)
            for function in functions:
                function(frame_address)
                if not view[refused]:
                    return copy_rows(), copy_scores()
            return None

        return search

    def _functions(self, k: int, keep: Array | None = None) -> Functions:
        """Return the functions to try for ``k`` hits: `cpu_few` first, if it applies, then `cpu_exact`."""
        few = keep is None and k <= min(MOST_HITS, len(self._forward[0]) - 1) and self._few
        return (_few(), self._exact) if few else (self._exact,)

    @cached_property
    def _few(self) -> dict[str, Array]:
        """The lists of `build_few`, by name; empty if this search cannot be used."""
        n, terms = len(self._forward[0]) - 1, self._forward[1]
        most = min(self._thresholds.few, MOST_DOCUMENTS)
        lists = (
            build_few(self._forward, self._dim) if n <= most and terms.max(initial=0) < self._dim else None
        )
        if lists is None:
            return {}
        weights = aligned(lists[2].nbytes).view(np.float32)
        weights[:] = lists[2]
        return {"few_lists": lists[0], "few_rows": lists[1], "few_weights": weights}

    def _allocate(self, *size: int) -> None:
        """Make the arrays of this thread, for numbers of queries, terms, hits, and hits of a query."""
        thread = self._thread
        thread.size = n_q, m, hits, k = tuple(map(max, size, thread.size))
        thread.offsets = np.empty(n_q + 1, np.int64)
        thread.terms, thread.weights = np.empty(m, np.int32), np.empty(m, np.float32)
        thread.rows, thread.scores = np.empty(hits, np.int64), np.empty(hits, np.float32)
        thread.memory["keys"] = np.empty(k, np.int64)
        _set_addresses(thread.frame, {"keys": thread.memory["keys"]})
        inputs, results = (thread.offsets, thread.terms, thread.weights), (thread.rows, thread.scores)
        thread.addresses = tuple(map(address, inputs)), tuple(map(address, results))

    def _sorted(self, offsets: Array, terms: Array, weights: Array) -> tuple[Array, Array]:
        """Sort the terms of each query by gain, as `cpu_exact` does by insertion."""
        gains = weights * self._arrays["gains"][np.minimum(terms, self._dim - 1)]
        order = np.lexsort((-gains, np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))))
        return terms[order], weights[order]

    def _prepare(self, longest: int) -> Array:
        """Return the frame of this thread, with scratch memory for queries of up to ``longest`` terms."""
        thread = self._thread
        if not hasattr(thread, "frame"):
            thread.frame, thread.longest, thread.size = self._frame.copy(), -1, (-1, -1, -1, -1)
            thread.memory = {
                "sums": aligned(2 * _NARROW),  # of all rows that damaged postings can have
                # Unwritten memory takes no room.
                "all_sums": aligned(2 * (self._n_ranges * RANGE + _NARROW)),
                "candidates": np.empty(RANGE + 1, np.int32),
                "list_counts": np.empty(self._n_ranges, np.int32),
                "bounds": np.empty(self._n_ranges, np.float32),
                "table": np.zeros(self._table, np.float32),
                "marks": aligned(64),
                **self._few,
            }
            _set_addresses(thread.frame, thread.memory)
            thread.address = address(thread.frame)
        if longest > thread.longest:
            thread.longest = longest
            kinds = {"sorted_terms": np.int32, "sorted_weights": np.float32, "sorted_gains": np.float32}
            memory = {name: np.empty(longest + 1, kind) for name, kind in kinds.items()}
            memory["query_lists"] = np.empty((self._n_ranges * longest + 1, 2), np.int64)
            thread.memory |= memory
            _set_addresses(thread.frame, memory)
        frame: Array = thread.frame
        return frame


def aligned(size: int) -> Array:
    """Return bytes that begin at a cache line."""
    room = np.zeros(size + 64, np.uint8)
    start = -address(room) % 64
    return room[start : start + size]


def address(array: Array) -> int:
    """Return where an array begins in memory."""
    return int(array.__array_interface__["data"][0])


def _set_addresses(frame: Array, arrays: dict[str, Array]) -> None:
    for name, array in arrays.items():
        frame[_WORD[name]] = address(array)


def _part(queries: Queries, start: int, stop: int) -> Queries:
    """Return the queries from number ``start`` to ``stop``."""
    offsets, terms, weights = queries
    if start == 0 and stop == len(offsets) - 1:
        return queries
    span = slice(int(offsets[start]), int(offsets[stop]))
    return offsets[start : stop + 1] - offsets[start], terms[span], weights[span]


@compiled_once
def _few() -> Callable[..., None]:
    return compile_ir(write_few(), "few", ARGUMENTS)


@compiled_once
def _exact(terms: str, weights: str) -> Callable[..., None]:
    wide = "avx512bw" in cpu_features()
    return compile_ir(write_exact(terms, weights, wide), "exact", ARGUMENTS)
