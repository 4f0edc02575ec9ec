"""An inverted index of sparse vectors, and the search for the best documents of queries; see README.md."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._jit import compile_ir, compiled_once
from .cpu_approximate import TOTALS, write_approximate
from .cpu_best import best_lists
from .cpu_build import build_exact
from .cpu_pool import FRAME
from .cpu_search import ARGUMENTS, DEFAULT, KINDS, LONG, Exact, Single, Thresholds, address, aligned

__all__ = ["Effort", "Searcher", "Single", "Thresholds", "build", "effort_of"]

Array = NDArray[Any]
Forward = tuple[Array, Array, Array, Array | None]
_WORD = {name: offset // 8 for name, offset in FRAME.offsets.items()}  # of the frame
_EFFORT, _EFFORT_AT = struct.Struct("=2qf"), FRAME.offsets["cut"]  # from "cut" to "doubt"
_DOCUMENTS = 1 << 24  # rows of postings have 24 bits


class Effort(NamedTuple):
    """How much approximate search reads; `cpu_approximate` says how it searches.

    Attributes:
        cut: Number of lists that are read: the lists of the terms that can add most to a score.
        doubt: Number from 0 to 1. A document is scored if its total plus ``doubt`` times what unread postings
            can add is high enough. With 1 no document is lost.
        scored: Maximum number of documents that are scored; documents of the highest totals come first.
    """

    cut: int
    doubt: float
    scored: int


@lru_cache
def effort_of(effort: float, n: int, k: int = 10) -> Effort:
    """Return what an effort between 0 and 1 means for ``k`` hits of ``n`` documents.

    Fitted so that the same effort gives about the same recall for any number of documents and hits.
    """
    scored = 0.66 * max(k, 10) ** 1.5 * max(1.0, n / 1e5) ** 0.2 * 2 ** (5.5 * effort)
    return Effort(14 + round(18 * effort), 0.1 + 0.2 * effort, int(scored))


def build(
    forward: Forward,
    dim: int,
    *,
    allocate: Callable[[str, tuple[int, ...], Any], Array] | None = None,
    approximate: bool = True,
) -> dict[str, Array]:
    """Build the lists of all terms, which `Searcher` reads.

    Documents are read several times, in blocks. Lists are written from the first to the last.

    Args:
        forward: ``offsets (n + 1,)`` int64, ``terms`` uint16 or uint32 below ``dim``, each once per
            document, and ``weights`` float32, float16, uint16 or uint8. Integers have ``scales (n,)``
            float32, which multiply them; floats have None. No weight may be below 0.
        dim: Size of the vocabulary.
        allocate: ``allocate(name, shape, dtype)`` makes the large arrays; None makes them in memory.
        approximate: Build the lists of approximate search, too, for at most 2**24 documents.

    Returns:
        The arrays that `Searcher` takes, by name.

    Raises:
        ValueError: The arrays have other dtypes or shapes, or there are too many documents.
    """
    _check(forward, dim)
    if len(forward[1]) and forward[1].max() >= dim:
        raise ValueError(f"sparse_search: got term {forward[1].max()} of a vocabulary of {dim}")
    if approximate and len(forward[0]) - 1 > _DOCUMENTS:
        raise ValueError(
            f"sparse_search: lists for approximate search are of at most {_DOCUMENTS} documents, got "
            f"{len(forward[0]) - 1}; build several, or lists for exact search alone"
        )
    make = allocate or (lambda name, shape, dtype: np.zeros(shape, dtype))
    arrays = build_exact(forward, dim, make)
    return arrays | best_lists(forward, dim, make) if approximate else arrays


class Searcher(Exact):
    """Finds the best documents of queries; many threads may use it at a time.

    Args:
        arrays: The result of `build`.
        forward: The documents that ``arrays`` were built from, as for `build`.
        thresholds: Numbers of documents that decide how to search.

    Raises:
        ValueError: The arrays of documents are not as `build` takes them.
    """

    def __init__(self, arrays: dict[str, Array], forward: Forward, thresholds: Thresholds = DEFAULT) -> None:
        _check(forward, len(arrays["gains"]))
        super().__init__(arrays, forward, thresholds)
        self.n = len(forward[0]) - 1
        frame = np.zeros(len(_WORD), np.int64)
        frame[: len(self._frame)] = self._frame
        self._has_best = "best" in arrays
        for name in ("best_offsets", "best", "best_scales", "best_missed") if self._has_best else ():
            self._arrays[name] = arrays[name]
            frame[_WORD[name]] = address(arrays[name])
        self._frame = frame
        self._approximate = _approximate(KINDS[str(forward[1].dtype)], KINDS[str(forward[2].dtype)])

    def find(
        self,
        queries: tuple[Array, Array, Array],
        k: int,
        keep: Array | None = None,
        effort: float | Effort | None = None,
    ) -> tuple[Array, Array]:
        """Find the best documents of each query, exactly or approximately.

        Args:
            queries: ``offsets (n_q + 1,)``, ``terms``, each once per query, and ``weights`` above 0, of any
                types that int64, int32 and float32 can hold. No document has terms from ``dim`` on.
            k: Hits per query.
            keep: ``(n,)`` bool, documents that may be found; None means all.
            effort: Above 0 and below 1. 1 or None searches exactly. So does an effort that would take longer
                than exact search, and any effort if the lists were built for exact search alone.

        Returns:
            Rows int64 and scores float32 ``(n_q, k)``, best first, ties to the lower row, -1 and -inf where
            no more is found. A hit scores above 0. Its score is added up in the order of the document's
            terms, from weights as they are stored.

        Raises:
            ValueError: The filter has another dtype or shape.
        """
        if keep is not None:
            if keep.dtype != np.bool_ or keep.shape != (self.n,):
                raise ValueError(
                    f"sparse_search: the filter is {keep.dtype} {keep.shape}, expected bool ({self.n},)"
                )
            keep = np.ascontiguousarray(keep)
        if not k:
            shape = len(queries[0]) - 1, 0
            return np.empty(shape, np.int64), np.empty(shape, np.float32)
        budget = self._budget(k, effort)
        if budget is None:
            return self.search(queries, k, keep)
        prepare = partial(self._prepare_approximate, k, budget)
        return self._search_all((self._approximate,), prepare, queries, k, keep)

    def single(self, k: int, effort: float | None = None) -> Single:
        """Return a function that finds the best documents of one query, with the least overhead.

        Args:
            k: Hits, at most as many as there are documents.
            effort: As for `find`.

        Returns:
            A function of ``terms (m,)`` and ``weights (m,)``, for this thread alone; terms of weight 0 do not
            count. It returns rows and scores ``(1, k)``, documents of score 0 among them, the lower rows
            first. It returns None if fewer documents are found, if a weight is negative or not finite, or if
            the query is not of up to 256 contiguous int32 or int64 terms and float32 weights on the CPU.
        """
        budget = self._budget(k, effort)
        if budget is None:
            return self._search_one(self._functions(k), self._prepare(LONG), k)
        return self._search_one((self._approximate,), self._prepare_approximate(k, budget, LONG), k)

    def _budget(self, k: int, effort: float | Effort | None) -> Effort | None:
        """Return how much approximate search reads; None if exact search is wanted or faster."""
        if effort is None or effort == 1 or not self._has_best:
            return None
        if isinstance(effort, Effort):
            return effort
        budget, least = effort_of(effort, self.n, k), self._thresholds
        return None if self.n < max(least.approximate, budget.scored * least.per_score) else budget

    def _prepare_approximate(self, k: int, budget: Effort, longest: int) -> Array:
        """Return the frame of this thread to find ``k`` documents, for queries of up to ``longest`` terms."""
        frame, thread, candidates = self._prepare(1), self._thread, max(budget.scored, 2 * k, 32)
        if not hasattr(thread, "room"):
            thread.room = 0, 0
            thread.memory |= {
                # Damaged postings miss the totals by up to so many bytes. Unwritten memory takes no room.
                "totals": aligned(2 * _DOCUMENTS + TOTALS)[_DOCUMENTS:],
                "pool": np.empty(self.n + 64, np.int32),
                "pool_totals": np.empty(self.n + 128, np.uint8),
                "counts": np.empty(256, np.int64),
            }
        if longest > thread.room[0] or candidates > thread.room[1]:
            thread.room = longest, candidates = max(longest, thread.room[0]), max(candidates, thread.room[1])
            thread.memory |= {
                "shares": np.empty(longest, np.float32),
                "code_gains": np.empty((longest, 256), np.uint8),
                "picks": np.empty((longest, 3), np.int64),
                "candidates": np.empty(max(candidates + 1, len(thread.memory["candidates"])), np.int32),
            }
            for name, array in thread.memory.items():
                frame[_WORD[name]] = address(array)
        _EFFORT.pack_into(frame.data, _EFFORT_AT, budget.cut, budget.scored, budget.doubt)
        return frame


def _check(forward: Forward, dim: int) -> None:
    offsets, terms, weights, scales = forward
    integers = weights.dtype in (np.uint8, np.uint16)
    expected = {
        "offsets": offsets.dtype == np.int64 and len(offsets) > 0,
        "terms": terms.dtype in (np.uint16, np.uint32),
        "weights": weights.shape == terms.shape and (integers or weights.dtype in (np.float16, np.float32)),
        "scales": (scales is not None) == integers,
        "row scales": scales is None or (scales.dtype == np.float32 and scales.shape == (len(offsets) - 1,)),
        "length": len(offsets) > 0 and 0 <= offsets[0] <= offsets[-1] <= len(terms),
        "dim": dim > 0,
    }
    for name, fine in expected.items():
        if not fine:
            raise ValueError(
                f"sparse_search: {name} is not what build expects; got offsets {offsets.dtype} "
                f"{offsets.shape}, terms {terms.dtype} {terms.shape}, weights {weights.dtype} "
                f"{weights.shape}, scales {None if scales is None else scales.dtype}, dim {dim}"
            )


@compiled_once
def _approximate(terms: str, weights: str) -> Callable[..., None]:
    return compile_ir(write_approximate(terms, weights), "approximate", ARGUMENTS)
