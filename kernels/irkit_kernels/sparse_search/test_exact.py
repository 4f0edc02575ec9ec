"""Exact search, compared with the scores of all documents."""

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
from irkit_kernels.sparse_search.cpu_build import build_exact
from irkit_kernels.sparse_search.cpu_frame import RANGE
from irkit_kernels.sparse_search.cpu_search import _WORD, Exact, Thresholds

Array = NDArray[Any]
Forward = tuple[Array, Array, Array, Array | None]


PLAIN = Thresholds(few=0)


def searcher(forward: Forward, dim: int, thresholds: Thresholds = PLAIN) -> Exact:
    """Return an index, by default without the search for few documents."""
    arrays = build_exact(forward, dim, lambda name, shape, dtype: np.zeros(shape, dtype))
    return Exact(arrays, forward, thresholds)


def csr(matrix: Array, kind: str = "uint16") -> tuple[Array, Array, Array]:
    """Return offsets, terms and values of the numbers that are not zero."""
    rows, terms = np.nonzero(matrix)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(matrix)))])
    return offsets, terms.astype(kind), matrix[rows, terms].astype(np.float32)


def queries_of(matrix: Array) -> tuple[Array, Array, Array]:
    return csr(matrix, "int32")


def expected(scores: Array, k: int, keep: Array | None = None) -> tuple[Array, Array]:
    """Return the hits by definition: scores above 0, best first, ties to the lower row."""
    scores = np.where(scores > 0, scores, -np.inf)
    if keep is not None:
        scores = np.where(keep, scores, -np.inf)
    scores = np.pad(scores, ((0, 0), (0, k)), constant_values=-np.inf)
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(scores, rows, 1)
    return np.where(best > 0, rows, -1), best.astype(np.float32)


def whole(rng: np.random.Generator, shape: tuple[int, int], density: Array | float) -> Array:
    """Return small integers: their sums are exact in float32, and many are equal."""
    return np.where(rng.random(shape) < density, rng.integers(1, 4, shape), 0)


def assert_same(found: tuple[Array, Array], wanted: tuple[Array, Array]) -> None:
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1], wanted[1])


@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 300),
    k=st.integers(1, 320),
    dim=st.integers(1, 40),
    few=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_follows_the_definition(seed: int, n: int, k: int, dim: int, few: bool) -> None:
    rng = np.random.default_rng(seed)
    documents = whole(rng, (n, dim), rng.random(dim) ** 2)
    queries = whole(rng, (4, dim), rng.random())
    index = searcher((*csr(documents), None), dim, Thresholds() if few else PLAIN)
    for keep in (None, rng.random(n) < rng.random()):
        assert_same(index.search(queries_of(queries), k, keep), expected(queries @ documents.T, k, keep))


@pytest.mark.parametrize("weights", ["float32", "float16", "uint16", "uint8"])
@pytest.mark.parametrize("terms", ["uint16", "uint32"])
def test_every_kind_of_array(terms: str, weights: str) -> None:
    rng = np.random.default_rng(0)
    documents = whole(rng, (500, 50), rng.random(50) ** 2)
    offsets, numbers, values = csr(documents, terms)
    scales = None
    if weights.startswith("uint"):
        scales = 2.0 ** rng.integers(-3, 3, 500).astype(np.float32)
    queries = whole(rng, (20, 50), 0.2)
    index = searcher((offsets, numbers, values.astype(weights), scales), 50)
    scores = queries @ documents.T * (1 if scales is None else scales)
    assert_same(index.search(queries_of(queries), 10), expected(scores, 10))


@pytest.fixture(scope="module")
def large() -> tuple[Array, Array]:
    """Return documents of four ranges, one of which has the best hits, with frequent and rare terms."""
    rng = np.random.default_rng(1)
    n, dim = 3 * RANGE + 77, 60
    documents = whole(rng, (n, dim), 0.6 * rng.random(dim) ** 4).astype(np.float32)
    documents[RANGE : 2 * RANGE] *= rng.integers(1, 3, (RANGE, dim))
    return documents, whole(rng, (25, dim), 0.3).astype(np.float32)


def test_many_ranges(large: tuple[Array, Array]) -> None:
    documents, queries = large
    scores = queries @ documents.T
    index = searcher((*csr(documents), None), documents.shape[1])
    rng = np.random.default_rng(2)
    for k in (1, 10, 1000):
        assert_same(index.search(queries_of(queries), k), expected(scores, k))
    for share in (0, 0.001, 0.5):
        keep = rng.random(len(documents)) < share
        assert_same(index.search(queries_of(queries), 10, keep), expected(scores, 10, keep))
    one = [index.search(queries_of(query[None]), 10) for query in queries]
    assert_same(tuple(np.concatenate(parts) for parts in zip(*one, strict=True)), expected(scores, 10))


SURVEYS = pytest.mark.parametrize("survey", [0, 1 << 40], ids=["no survey", "always a survey"])


@SURVEYS
def test_many_hits(large: tuple[Array, Array], survey: int) -> None:
    documents, queries = large
    scores, keep = queries @ documents.T, np.random.default_rng(2).random(len(documents)) < 0.5
    index = searcher((*csr(documents), None), documents.shape[1], Thresholds(few=0, survey=survey))
    for k in (1, 40, 3000, len(documents)):
        assert_same(index.search(queries_of(queries[:9]), k), expected(scores[:9], k))
    assert_same(index.search(queries_of(queries), 40, keep), expected(scores, 40, keep))
    one = np.eye(documents.shape[1], dtype=np.float32)[[0, 5, 59]]  # a term each: many ties, few documents
    assert_same(index.search(queries_of(one), 2000), expected(one @ documents.T, 2000))
    assert bool(index._thread.frame[_WORD["surveyed"]]) == (survey > 0)


@pytest.mark.parametrize("weights", ["float32", "float16", "uint16", "uint8"])
def test_surveys_of_every_kind_of_array(large: tuple[Array, Array], weights: str) -> None:
    documents, queries = large[0], large[1][:5]
    offsets, terms, values = csr(documents)
    scales = None
    if weights.startswith("uint"):
        scales = 2.0 ** np.random.default_rng(3).integers(-3, 3, len(documents)).astype(np.float32)
    always = Thresholds(few=0, survey=1 << 40)
    index = searcher((offsets, terms, values.astype(weights), scales), documents.shape[1], always)
    scores = queries @ documents.T * (1 if scales is None else scales)
    assert_same(index.search(queries_of(queries), 500), expected(scores, 500))


def test_a_survey_of_real_weights_changes_nothing(large: tuple[Array, Array]) -> None:
    rng = np.random.default_rng(3)
    forward = (*csr(large[0] * rng.lognormal(0, 1, large[0].shape).astype(np.float32)), None)
    queries = queries_of(large[1] * rng.lognormal(0, 2, large[1].shape).astype(np.float32))
    ways = [Thresholds(few=0, survey=survey) for survey in (0, 1 << 40)]
    without, surveyed = (searcher(forward, large[0].shape[1], way) for way in ways)
    for k in (1, 100, 5000):
        assert_same(surveyed.search(queries, k), without.search(queries, k))


def test_real_weights(large: tuple[Array, Array]) -> None:
    rng = np.random.default_rng(3)
    documents = large[0] * rng.lognormal(0, 1, large[0].shape).astype(np.float32)
    queries = large[1] * rng.lognormal(0, 2, large[1].shape).astype(np.float32)
    rows, scores = searcher((*csr(documents), None), documents.shape[1]).search(queries_of(queries), 20)
    exact = queries.astype(np.float64) @ documents.T.astype(np.float64)
    best = -np.sort(-exact, axis=1)[:, :20]
    found = np.take_along_axis(exact, rows, 1)
    rounding = documents.shape[1] * 2.0**-24  # of a sum of as many terms (Higham 2002, 3.1)
    np.testing.assert_allclose(scores, found, rtol=rounding)
    np.testing.assert_allclose(found, best, rtol=2 * rounding)


@pytest.mark.parametrize("densities", [(0.11, 0.11), (0.02, 0.3)], ids=["lists", "lists and vectors"])
def test_unread_lists_count_for_candidates(densities: tuple[float, float]) -> None:
    """A few heavy terms choose the candidates; what unread lists can add decides among them."""
    rng = np.random.default_rng(8)
    n, dim = RANGE + 77, 150
    documents = whole(rng, (n, dim), rng.uniform(*densities, dim)).astype(np.float32)
    queries = np.clip(np.rint(rng.lognormal(0, 2, (40, dim))), 1, 1000).astype(np.float32)
    index = searcher((*csr(documents), None), dim)
    assert_same(index.search(queries_of(queries), 10), expected(queries @ documents.T, 10))


def test_long_queries() -> None:
    """Above 256 terms queries are sorted by numpy; above 30,000 sums of 16 bits would overflow."""
    rng = np.random.default_rng(4)
    dim = 31000
    documents = whole(rng, (60, dim), 0.02)
    index = searcher((*csr(documents), None), dim)
    for terms in (200, 1000, dim):
        queries = np.zeros((3, dim))
        queries[:, rng.permutation(dim)[:terms]] = rng.integers(1, 5, (3, terms))
        assert_same(index.search(queries_of(queries), 7), expected(queries @ documents.T, 7))


def test_few_documents_and_queries_of_any_order() -> None:
    """The search for few documents refuses terms that are not in rising order; then exact search answers."""
    rng = np.random.default_rng(7)
    documents, queries = whole(rng, (200, 400), 0.1), whole(rng, (300, 400), 0.2)
    queries[77] = 1  # longer than what is sorted by insertion
    index = searcher((*csr(documents), None), 400, Thresholds())
    offsets, terms, weights = queries_of(queries)
    wanted = expected(queries @ documents.T, 10)
    assert_same(index.search((offsets, terms, weights), 10), wanted)
    order = np.lexsort((rng.random(len(terms)), np.repeat(np.arange(300), np.diff(offsets))))
    some = np.where(np.arange(len(terms)) < offsets[150], np.arange(len(terms)), order)
    assert_same(index.search((offsets, terms[some], weights[some]), 10), wanted)


def test_single_terms_of_high_weight() -> None:
    """A single list makes up the whole bound: its factor must not overflow."""
    rng = np.random.default_rng(5)
    documents = np.where(rng.random((400, 20)) < 0.1, rng.integers(1, 2000, (400, 20)), 0)
    queries = np.eye(20) * 1024
    index = searcher((*csr(documents), None), 20)
    assert_same(index.search(queries_of(queries), 10), expected(queries @ documents.T, 10))


def test_nothing_to_find() -> None:
    documents = np.zeros((5, 4))
    index = searcher((*csr(documents), None), 4)
    assert_same(index.search(queries_of(np.ones((2, 4))), 3), expected(np.zeros((2, 5)), 3))
    documents[2, 1] = 1
    index = searcher((*csr(documents), None), 4)
    for queries in (np.zeros((2, 4)), np.eye(4)[:1], np.eye(4)[1:2]):
        assert_same(index.search(queries_of(queries), 3), expected(queries @ documents.T, 3))
    found = index.search((np.array([0, 2]), np.int32([1, 9]), np.float32([2, 5])), 2)  # 9 is of no document
    assert (found[0].tolist(), found[1].tolist()) == ([[2, -1]], [[2.0, -np.inf]])
    assert index.search(queries_of(np.zeros((0, 4))), 3)[0].shape == (0, 3)


def test_kept_zeros_are_no_hits() -> None:
    """A document can have a weight of 0."""
    forward = np.array([0, 2, 3]), np.uint16([0, 1, 0]), np.float32([0, 1, 0]), None
    rows, scores = searcher(forward, 2).search(queries_of(np.array([[1, 0], [1, 1]])), 2)
    assert (rows.tolist(), scores.tolist()) == ([[-1, -1], [0, -1]], [[-np.inf, -np.inf], [1, -np.inf]])


def test_tiny_and_huge_weights() -> None:
    documents = np.array([[1e-30, 0, 1e30], [1e-20, 1, 0], [3e-38, 0, 0], [0, 1e20, 1e-10]])
    index = searcher((*csr(documents), None), 3)
    queries = np.array([[1, 0, 0], [1, 1, 0], [1e-3, 1e-3, 1e3]])
    rows, scores = index.search(queries_of(queries), 4)
    wanted = expected((queries @ documents.T).astype(np.float32), 4)
    np.testing.assert_array_equal(rows, wanted[0])
    np.testing.assert_allclose(scores, wanted[1], rtol=2**-22)


@SURVEYS
def test_threads_share_an_index(large: tuple[Array, Array], survey: int) -> None:
    documents, queries = large
    index = searcher((*csr(documents), None), documents.shape[1], Thresholds(few=0, survey=survey))
    wanted = expected(queries @ documents.T, 10)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: index.search(queries_of(queries), 10), range(12)):
            assert_same(found, wanted)


def test_memory_comes_from_the_caller() -> None:
    rng = np.random.default_rng(6)
    documents = whole(rng, (300, 30), rng.random(30))
    forward = (*csr(documents), None)
    named = {}

    def allocate(name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        named[name] = np.zeros(shape, dtype)
        return named[name]

    arrays = build_exact(forward, 30, allocate)
    assert named
    assert all(arrays[name] is array for name, array in named.items())
    again = build_exact(forward, 30, lambda name, shape, dtype: np.zeros(shape, dtype))
    assert all((arrays[name] == again[name]).all() for name in again)


@needs_x86
@pytest.mark.parametrize("weights", ["float32", "float16"])
def test_processors_without_wide_registers(large: tuple[Array, Array], weights: str) -> None:
    """They have no instruction that converts float16 either."""
    documents, queries = large
    offsets, terms, values = csr(documents)

    def run() -> None:
        with compiling_for(OLD):
            index = searcher((offsets, terms, values.astype(weights), None), documents.shape[1])
        for k in (10, 3000):
            assert_same(index.search(queries_of(queries), k), expected(queries @ documents.T, k))

    in_child(run)
