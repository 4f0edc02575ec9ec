"""Approximate search, compared with the scores of all documents."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from irkit_kernels._jit import compiling_for
from irkit_kernels._testing import OLD, in_child, needs_x86
from irkit_kernels.sparse_search import Effort, Searcher, build, cpu_best, effort_of
from irkit_kernels.sparse_search.cpu_approximate import TOTALS
from irkit_kernels.sparse_search.reference import reference

Array = NDArray[Any]
ALL = Effort(cut=1 << 20, doubt=1.0, scored=1 << 20)  # leaves out what cannot be among the best
KINDS = [np.float32, np.float16, np.uint16, np.uint8]


def corpus(rng: np.random.Generator, n: int, dim: int, kind: Any = np.float32, terms: Any = np.uint16) -> Any:
    """Return documents of up to 12 terms, few of which are frequent."""
    frequent = 1 / np.arange(1, dim + 1)
    lengths = rng.integers(0, min(dim, 12) + 1, n)
    picked = [np.sort(rng.choice(dim, length, False, frequent / frequent.sum())) for length in lengths]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    numbers = np.concatenate([np.empty(0, terms), *picked]).astype(terms)
    if np.dtype(kind).kind == "f":
        return offsets, numbers, rng.exponential(size=len(numbers)).astype(kind), None
    weights = rng.integers(1, np.iinfo(kind).max, len(numbers), kind)
    return offsets, numbers, weights, rng.random(n).astype(np.float32) + np.float32(0.1)


def some_queries(rng: np.random.Generator, number: int, dim: int) -> tuple[Array, Array, Array]:
    """Return queries of up to 8 terms, some of which no document has."""
    lengths = rng.integers(0, min(dim, 8) + 1, number)
    terms = [rng.choice(dim + 3, length, False) for length in lengths]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    numbers = np.concatenate([np.empty(0, np.int32), *terms]).astype(np.int32)
    return offsets, numbers, rng.random(len(numbers)).astype(np.float32) + np.float32(0.01)


def assert_found(found: tuple[Array, Array], wanted: tuple[Array, Array]) -> None:
    """Assert the same scores up to rounding, and the same rows where scores differ by more than that."""
    np.testing.assert_array_equal(found[0] < 0, wanted[0] < 0)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5)
    clear = np.ones(found[0].shape, bool)
    near = np.isclose(wanted[1][:, 1:], wanted[1][:, :-1], rtol=1e-5)
    clear[:, 1:] &= ~near
    clear[:, :-1] &= ~near
    clear[:, -1:] = False  # the next hit is not known
    np.testing.assert_array_equal(found[0][clear], wanted[0][clear])


@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(0, 300),
    dim=st.integers(1, 60),
    k=st.integers(1, 40),
    kind=st.sampled_from(KINDS),
    terms=st.sampled_from([np.uint16, np.uint32]),
)
@settings(max_examples=40, deadline=None)
def test_without_doubt_it_finds_the_best(seed: int, n: int, dim: int, k: int, kind: Any, terms: Any) -> None:
    rng = np.random.default_rng(seed)
    forward = corpus(rng, n, dim, kind, terms)
    searcher, queries = Searcher(build(forward, dim), forward), some_queries(rng, 4, dim)
    for keep in (None, rng.random(n) < 0.5):
        assert_found(searcher.find(queries, k, keep, ALL), reference(forward, queries, k, keep))
        assert_found(searcher.find(queries, k, keep), reference(forward, queries, k, keep))


@given(seed=st.integers(0, 2**32 - 1), effort=st.floats(0.01, 0.99), k=st.integers(1, 30))
@settings(max_examples=25, deadline=None)
def test_hits_are_documents_and_their_scores(seed: int, effort: float, k: int) -> None:
    rng = np.random.default_rng(seed)
    n, dim = 400, 80
    forward, queries, keep = corpus(rng, n, dim), some_queries(rng, 5, dim), rng.random(n) < 0.7
    rows, scores = Searcher(build(forward, dim), forward).find(queries, k, keep, effort_of(effort, n, k))
    all_rows, all_scores = reference(forward, queries, n, keep)
    for query in range(5):
        found = rows[query][rows[query] >= 0]
        assert len(set(found.tolist())) == len(found)
        place = {int(row): position for position, row in enumerate(all_rows[query]) if row >= 0}
        wanted = [all_scores[query][place[int(row)]] for row in found]  # none that keep forbids is there
        np.testing.assert_allclose(scores[query][: len(found)], wanted, rtol=1e-5)
        assert (np.diff(scores[query][: len(found)]) <= 0).all()
        assert (scores[query][len(found) :] == -np.inf).all()


@pytest.fixture(scope="module")
def large() -> tuple[Any, Any, tuple[Array, Array, Array]]:
    """Return more documents than a range has, their lists, cut off, and halves of documents as queries."""
    rng = np.random.default_rng(0)
    n, dim = 2 * TOTALS + 100, 300
    forward = corpus(rng, n, dim)
    offsets, terms, weights, _ = forward
    picked = rng.choice(np.flatnonzero(np.diff(offsets) > 5), 30, False)
    halves = [slice(offsets[row], offsets[row] + (offsets[row + 1] - offsets[row]) // 2) for row in picked]
    starts = np.concatenate([[0], np.cumsum([part.stop - part.start for part in halves])])
    queries = starts, *(np.concatenate([array[part] for part in halves]) for array in (terms, weights))
    return forward, build(forward, dim), (queries[0], queries[1].astype(np.int32), queries[2])


def test_recall_grows_with_effort(large: Any) -> None:
    forward, built, queries = large
    searcher = Searcher(built, forward)
    wanted = reference(forward, queries, 10)[1]
    lists = np.diff(built["best_offsets"])
    assert lists.max() == cpu_best.longest(len(forward[0]) - 1)
    recall = []
    for effort in (Effort(1, 0.0, 10), 0.01, 0.3, 0.8):
        scores = searcher.find(queries, 10, None, effort)[1]
        recall.append(np.mean(scores >= wanted[:, -1:] * (1 - 1e-5)))
    assert recall == sorted(recall)
    assert recall[-1] > 0.99
    for effort in (None, 1):
        assert_found(searcher.find(queries, 10, None, effort), (reference(forward, queries, 10)))


def test_queries_together_or_one_by_one_or_in_threads(large: Any) -> None:
    forward, built, (offsets, terms, weights) = large
    searcher = Searcher(built, forward)
    together = searcher.find((offsets, terms, weights), 10, None, 0.3)

    def one(query: int) -> tuple[Array, Array]:
        part = slice(offsets[query], offsets[query + 1])
        own = np.array([0, part.stop - part.start]), terms[part].copy(), weights[part].copy()
        return searcher.find(own, 10, None, 0.3)

    with ThreadPoolExecutor(4) as threads:
        alone = list(threads.map(one, range(len(offsets) - 1)))
    for array in range(2):
        np.testing.assert_array_equal(np.concatenate([found[array] for found in alone]), together[array])


def test_the_best_postings_are_kept() -> None:
    weights = np.array([4, 1, 3, 4, 2, 2, 1], np.float32)
    forward = np.array([0, 2, 3, 5, 7]), np.array([0, 2, 0, 0, 2, 0, 2], np.uint16), weights, None
    lists = cpu_best.best_lists(  # postings are read and sorted in several parts
        forward, 4, lambda name, shape, dtype: np.zeros(shape, dtype), most=2, block=3
    )
    np.testing.assert_array_equal(lists["best_offsets"], [0, 2, 2, 4, 4])
    np.testing.assert_array_equal(lists["best"] >> 8, [0, 2, 0, 2])  # 3 of document 1 is not among them
    values = (lists["best"] & 255) * np.repeat(lists["best_scales"], [2, 0, 2, 0])
    for found, weight in ((values, [4, 4, 1, 2]), (lists["best_missed"], [3, 0, 1, 0])):
        excess = found - weight  # rounded up to the next code
        assert (excess > -1e-6).all()
        assert (excess < 4 / 255).all()


@pytest.mark.parametrize("place", range(4))
def test_wrong_arrays_are_refused(place: int) -> None:
    forward: list[Any] = list(corpus(np.random.default_rng(0), 5, 9))
    forward[place] = np.zeros(5, np.int8)
    with pytest.raises(ValueError, match="not what build expects"):
        build(tuple(forward), 9)  # type: ignore[arg-type]


def test_lists_for_exact_search_alone() -> None:
    rng = np.random.default_rng(2)
    forward, queries = corpus(rng, 50, 20), some_queries(rng, 3, 20)
    arrays = build(forward, 20, approximate=False)
    assert_found(Searcher(arrays, forward).find(queries, 5, None, 0.1), reference(forward, queries, 5))
    most = 1 << 24
    many = np.zeros(most + 2, np.int64), np.empty(0, np.uint16), np.empty(0, np.float32), None
    with pytest.raises(ValueError, match=f"at most {most} documents, got {most + 1}"):
        build(many, 20)


@needs_x86
@pytest.mark.parametrize("kind", [np.float16, np.uint8])
def test_processors_without_wide_registers(kind: Any) -> None:
    """They have no instruction that converts float16 either."""
    rng = np.random.default_rng(3)
    forward, queries = corpus(rng, 300, 40, kind), some_queries(rng, 5, 40)

    def run() -> None:
        with compiling_for(OLD):
            index = Searcher(build(forward, 40), forward)
        assert_found(index.find(queries, 10, None, ALL), reference(forward, queries, 10))

    in_child(run)
