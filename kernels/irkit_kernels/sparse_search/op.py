"""Lists of documents by term, and the search for the best documents of sparse queries; see README.md."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._jit import compile_ir
from .cpu_approximate import TOTALS, write_approximate
from .cpu_best import best_lists
from .cpu_build import build_exact
from .cpu_pool import FIELDS
from .cpu_search import ARGUMENTS, KINDS, LONG, Exact, Single, _address, aligned

__all__ = ["Effort", "Searcher", "Single", "build", "effort_of"]

Array = NDArray[Any]
Forward = tuple[Array, Array, Array, Array | None]
_PLACES = {name: place for place, name in enumerate(FIELDS)}
_PLAN, _START = struct.Struct("=2qf"), 8 * _PLACES["cut"]  # from "cut" to "doubt"
_DOCUMENTS = 1 << 24
_FEW = 1 << 15  # documents that exact search is sooner through
_SCORE = 200  # to score a document takes as long as exact search of so many


class Effort(NamedTuple):
    """How much approximate search reads.

    Attributes:
        cut: Lists, those of the terms that may add most to a score.
        doubt: Share of what the rest may add that a document must do without, to be scored.
        scored: Documents that are scored at most, those of the highest totals.
    """

    cut: int
    doubt: float
    scored: int


@lru_cache
def effort_of(effort: float, n: int, k: int = 10) -> Effort:
    """What one number between 0 and 1 means for ``k`` hits of ``n`` documents: much the same recall."""
    scored = 0.66 * max(k, 10) ** 1.5 * max(1.0, n / 1e5) ** 0.2 * 2 ** (5.5 * effort)
    return Effort(14 + round(18 * effort), 0.1 + 0.2 * effort, int(scored))


def build(
    forward: Forward,
    dim: int,
    *,
    allocate: Callable[[str, tuple[int, ...], Any], Array] | None = None,
    approximate: bool = True,
) -> dict[str, Array]:
    """The lists of all terms, read by `Searcher`.

    Documents are read several times in blocks, and the lists written from the first to the last.

    Args:
        forward: ``offsets (n + 1,)`` int64, ``terms`` uint16 or uint32 below ``dim``, each once a document,
            ``weights`` float32, float16, or uint16 or uint8 with ``scales (n,)`` float32, which multiply
            them; else None. No weight may be below 0.
        dim: Size of the vocabulary.
        allocate: ``allocate(name, shape, dtype)`` makes the large arrays; None means in memory.
        approximate: Whether there will be approximate search, which has lists of its own, of at most 2**24
            documents.

    Returns:
        The arrays by name.

    Raises:
        ValueError: The arrays of documents are of other kinds, or too many.
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
        arrays: What `build` made.
        forward: What it made it of.

    Raises:
        ValueError: The arrays of documents are not as `build` takes them.
    """

    def __init__(self, arrays: dict[str, Array], forward: Forward) -> None:
        _check(forward, len(arrays["gains"]))
        super().__init__(arrays, forward)
        self.n = len(forward[0]) - 1
        frame = np.zeros(len(FIELDS), np.int64)
        frame[: len(self._frame)] = self._frame
        self._listed = "best" in arrays
        for name in ("best_offsets", "best", "best_scales", "best_missed") if self._listed else ():
            self._held[name] = arrays[name]
            frame[_PLACES[name]] = _address(arrays[name])
        self._frame = frame
        self._hasten = _compiled(KINDS[str(forward[1].dtype)], KINDS[str(forward[2].dtype)])

    def find(
        self,
        queries: tuple[Array, Array, Array],
        k: int,
        keep: Array | None = None,
        effort: float | Effort | None = None,
    ) -> tuple[Array, Array]:
        """The best documents of each query: all of them, or those that some effort finds.

        Args:
            queries: ``offsets (n_q + 1,)``, ``terms``, which are of no document from ``dim`` on, and
                ``weights`` above 0, all of any type that int64, int32 and float32 can take in.
            k: Hits of a query.
            keep: ``(n,)`` bool, documents that may be found; None means all.
            effort: Above 0, and below 1; 1 or None means exactly the best, and so does what
                would take longer than that, and lists that were built for exact search alone.

        Returns:
            Rows int64 and scores float32 ``(n_q, k)``, best first, ties to the lower row, -1 and -inf where
            nothing more is found. A hit scores above 0: the sum over the terms of the document, in their
            order, of weights rounded as they are kept.
        """
        plan = self._plan(k, effort)
        if plan is None:
            return self.search(queries, k, keep)
        return self._run((self._hasten,), partial(self._ready, k, plan), queries, k, keep)

    def single(self, k: int, effort: float | None = None) -> Single:
        """What finds the best documents for one query after the other, in the least time.

        Args:
            k: Hits, at most as many as there are documents.
            effort: As `find` takes it.

        Returns:
            A function of ``terms (m,)`` and ``weights (m,)``, of which those that are 0 do not count, for
            this thread alone. It gives rows and scores ``(1, k)``, those of score 0 among them, the lower
            rows first; or None if fewer are found, a weight is negative or not finite, or the query is none
            of up to 256 neighbouring int32 or int64 terms and float32 weights in the processor's memory.
        """
        plan = self._plan(k, effort)
        if plan is None:
            return self._single(self._codes(k), self._prepared(LONG), k)
        return self._single((self._hasten,), self._ready(k, plan, LONG), k)

    def _plan(self, k: int, effort: float | Effort | None) -> Effort | None:
        """How to search approximately; None where exact search is wanted or sooner through."""
        if effort is None or effort == 1 or not self._listed:
            return None
        if isinstance(effort, Effort):
            return effort
        plan = effort_of(effort, self.n, k)
        return None if self.n < max(_FEW, plan.scored * _SCORE) else plan

    def _ready(self, k: int, plan: Effort, longest: int) -> Array:
        """A frame of this thread to find ``k`` documents by a plan, for queries of at most so many terms."""
        frame, own, chosen = self._prepared(1), self._own, max(plan.scored, 2 * k, 32)
        if not hasattr(own, "room"):
            own.room = 0, 0
            own.memory |= {
                "totals": aligned(2 * _DOCUMENTS + TOTALS)[
                    _DOCUMENTS:
                ],  # damaged postings miss it by so much
                "pool": np.empty(self.n + 64, np.int32),  # memory that is not written to takes no room
                "pool_totals": np.empty(self.n + 128, np.uint8),
                "counts": np.empty(256, np.int64),
            }
        if longest > own.room[0] or chosen > own.room[1]:
            own.room = longest, chosen = max(longest, own.room[0]), max(chosen, own.room[1])
            own.memory |= {
                "shares": np.empty(longest, np.float32),
                "code_gains": np.empty((longest, 256), np.uint8),
                "picks": np.empty((longest, 3), np.int64),
                "chosen": np.empty(max(chosen + 1, len(own.memory["chosen"])), np.int32),
            }
            for name, array in own.memory.items():
                frame[_PLACES[name]] = _address(array)
        _PLAN.pack_into(frame.data, _START, plan.cut, plan.scored, plan.doubt)
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


@cache
def _compiled(terms: str, weights: str) -> Callable[..., None]:
    return compile_ir(write_approximate(terms, weights), "approximate", ARGUMENTS)
