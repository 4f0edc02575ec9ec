"""Exact search: calls the machine code, with memory to work in that each thread keeps."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._jit import compile_ir
from .cpu_exact import FIELDS, RANGE, write_exact

__all__ = ["KINDS", "Exact"]

Array = NDArray[Any]

KINDS = {
    "float32": "float",
    "float16": "half",
    "uint8": "i8",
    "uint16": "i16",
    "int32": "i32",
    "uint32": "i32",
}
_PLACES = {name: place for place, name in enumerate(FIELDS)}


class Exact:
    """Finds exactly the best documents of queries without negative weights.

    Args:
        arrays: What `build_exact` made.
        forward: ``offsets (n + 1)`` int64, ``terms``, ``weights`` and ``scales (n,)`` float32 or None of the
            documents it was made of.
    """

    def __init__(self, arrays: dict[str, Array], forward: tuple[Array, Array, Array, Array | None]) -> None:
        offsets, terms, weights, scales = forward
        self.gains = arrays["gains"]
        self._n_ranges = -(-(len(offsets) - 1) // RANGE)
        self._held = {name: arrays[name] for name in ("list_offsets", "lists", "postings")}
        self._held |= {"offsets": offsets, "terms": terms, "weights": weights}
        if scales is not None:
            self._held["row_scales"] = scales
        self._frame = np.zeros(len(FIELDS), np.int64)
        for name, array in self._held.items():
            self._frame[_PLACES[name]] = _address(array)
        self._frame[_PLACES["n"]], self._frame[_PLACES["n_ranges"]] = len(offsets) - 1, self._n_ranges
        self._code = _compiled(KINDS[str(terms.dtype)], KINDS[str(weights.dtype)])
        self._own = threading.local()

    def search(
        self, queries: tuple[Array, Array, Array], k: int, keep: Array | None = None
    ) -> tuple[Array, Array]:
        """Search for queries ``offsets (n_q + 1)`` int64, ``terms`` int32 below dim, ``weights`` float32 > 0.

        Args:
            queries: Their arrays.
            k: Hits of a query.
            keep: ``(n,)`` bool, documents that may be found.

        Returns:
            Rows int64 and scores float32 ``(n_q, k)``, best first, ties to the lower row, -1 and -inf where
            nothing more scores above 0.
        """
        offsets, terms, weights = queries
        n_q = len(offsets) - 1
        order = self._order(offsets, terms, weights)
        rows, scores = np.full((n_q, k), -1, np.int64), np.full((n_q, k), -np.inf, np.float32)
        longest = int(np.diff(offsets).max(initial=0)) if n_q != 1 else len(terms)
        frame = self._prepared(longest)
        passed = {"q_offsets": offsets, "q_terms": terms[order], "q_weights": weights[order]}
        passed |= {"rows": rows, "scores": scores}
        for name, array in passed.items():
            frame[_PLACES[name]] = _address(array)
        frame[_PLACES["k"]], frame[_PLACES["keep"]] = k, 0 if keep is None else _address(keep)
        self._code(_address(frame), 0, n_q)
        return rows, scores

    def _order(self, offsets: Array, terms: Array, weights: Array) -> Array:
        """The terms of each query, those first that bring most for what they cost."""
        gains = -weights * self.gains[terms]
        if len(offsets) == 2:
            return np.argsort(gains)
        return np.lexsort((gains, np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))))

    def _prepared(self, longest: int) -> Array:
        """A frame of this thread with scratch memory for queries of at most so many terms."""
        own = self._own
        if not hasattr(own, "frame"):
            own.frame, own.longest = self._frame.copy(), -1
            own.memory = {
                "sums": aligned(2 * RANGE),
                "chosen": np.empty(RANGE + 1, np.int32),
                "slot_counts": np.empty(self._n_ranges, np.int32),
                "bounds": np.empty(self._n_ranges, np.float32),
                "table": np.zeros(len(self.gains), np.float32),
            }
            for name, array in own.memory.items():
                own.frame[_PLACES[name]] = _address(array)
        if longest > own.longest:
            own.longest = longest
            own.memory["slots"] = np.empty((self._n_ranges * longest + 1, 2), np.int64)
            own.frame[_PLACES["slots"]] = _address(own.memory["slots"])
        frame: Array = own.frame
        return frame


def aligned(size: int) -> Array:
    """Bytes that begin at a cache line."""
    room = np.zeros(size + 64, np.uint8)
    start = -_address(room) % 64
    return room[start : start + size]


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


@cache
def _compiled(terms: str, weights: str) -> Callable[..., None]:
    arguments = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    return compile_ir(write_exact(terms, weights), "exact", arguments)
