"""The search finds what its definition finds, on every kind of CPU, for every kind of code."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit_kernels._jit import Target, compiling_for, cpu_features
from irkit_kernels._testing import OLD, in_child, needs_x86
from irkit_kernels.dense_search import (
    Effort,
    Encoder,
    Searcher,
    arrange,
    assign,
    codes_of,
    list_margins,
    make_rotation,
)
from irkit_kernels.dense_search.op import METRICS
from irkit_kernels.dense_search.reference import reference

WITHOUT = {
    "avx512": frozenset[str](),
    "avx2": frozenset({"avx512vnni", "avx512bw", "avx512f"}),
    "ssse3": frozenset({"avx512vnni", "avx512bw", "avx512f", "avxvnni", "avx2"}),
    "portable": frozenset({"avx512vnni", "avx512bw", "avx512f", "avxvnni", "avx2", "ssse3", "neon", "f16c"}),
}
DRAWN = {"avx512": 15, "avx2": 15, "ssse3": 6, "portable": 4}  # code for older CPUs compiles slowly
KEEPS = ("none", "int8", "float16", "float32")


@pytest.fixture(params=list(WITHOUT), scope="module", autouse=True)
def cpu(request: pytest.FixtureRequest) -> Iterator[str]:
    features, without = cpu_features(), WITHOUT[request.param]
    if not without and "avx512vnni" not in features:
        pytest.skip("this CPU lacks AVX512-VNNI")
    with compiling_for(Target(features - without) if without else None):
        yield request.param


class Case:
    """Random vectors in lists, in segments, and their `Searcher`."""

    def __init__(
        self, seed: int, dim: int, sizes: list[int], n_lists: int, nbits: int, keep: str, metric: str
    ) -> None:
        rng = np.random.default_rng(seed)
        self.n = sum(sizes)
        self.metric, self.nbits, self.keep = metric, nbits, keep
        centroids = rng.standard_normal((n_lists, dim)).astype(np.float32)
        places = rng.integers(0, n_lists, self.n)
        vectors = centroids[places] + 0.7 * rng.standard_normal((self.n, dim)).astype(np.float32)
        self.vectors, self.rotation = vectors.astype(np.float32), make_rotation(dim, seed)
        self.queries = rng.standard_normal((3, dim)).astype(np.float32)
        encoder = Encoder(
            centroids, self.rotation, nbits, euclidean=metric == "euclidean", keep_int8=keep == "int8"
        )
        self.centroids, self.segments, self.codes = centroids, list[dict[str, Any]](), list[dict[str, Any]]()
        for start, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
            codes = encoder.encode(self.vectors[start : start + size])
            self.codes.append(codes)
            self.segments.append(arrange(codes, n_lists, int(start)))
        self.kept: dict[str, Any] = {}
        if keep == "int8":
            for name in ("kept", "kept_scales"):
                self.kept[name] = np.concatenate([codes[name] for codes in self.codes])
        elif keep != "none":
            self.kept = {"kept": self.vectors.astype(keep)}
        if metric == "inner_product":
            self.kept["margins"] = list_margins(self.vectors, centroids, assign(self.vectors, centroids))

    def searcher(self) -> Searcher:
        return Searcher(self.centroids, self.rotation, self.segments, self.n, metric=self.metric, **self.kept)

    def expected(self, query: Any, k: int, effort: Effort, keep: Any = None) -> tuple[Any, Any]:
        return reference(
            self.centroids,
            self.rotation,
            self.segments,
            self.n,
            query,
            k,
            effort,
            metric=self.metric,
            keep=keep,
            **self.kept,
        )

    def check(self, k: int, effort: Effort, keep: Any = None) -> None:
        searcher = self.searcher()
        rows, scores = searcher.find(self.queries, k, effort, keep)
        effort = searcher.effort(effort, k)
        for query, own_rows, own_scores in zip(self.queries, rows, scores, strict=True):
            expected_rows, expected_scores = self.expected(query, k, effort, keep)
            number = len(expected_rows)
            assert (own_rows[number:] == -1).all()
            assert np.isneginf(own_scores[number:]).all()
            size = np.abs(query).max() * np.abs(self.vectors).max(initial=0) * len(query)
            np.testing.assert_allclose(own_scores[:number], expected_scores, rtol=1e-6, atol=1e-6 * size)
            # rows of scores that are equal but for rounding may change places
            unlike = own_rows[:number] != expected_rows
            gaps = np.abs(np.diff(expected_scores, append=-np.inf, prepend=np.inf))
            close = np.minimum(gaps[1:], gaps[:-1]) <= 2e-6 * size
            assert close[unlike].all()


sizes = st.lists(st.integers(0, 90), min_size=1, max_size=3).filter(any)


PROBLEM = (
    st.integers(0, 2**31),
    st.sampled_from([1, 7, 64, 100, 192]),
    sizes,
    st.sampled_from([1, 3, 70, 700]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(KEEPS),
    st.sampled_from(METRICS),
    st.booleans(),
)


def check_search(seed, dim, sizes, n_lists, nbits, keep, metric, filtered):
    case = Case(seed, dim, sizes, n_lists, nbits, keep, metric)
    rng = np.random.default_rng(seed)
    allowed = rng.random(case.n) < 0.5 if filtered else None
    k, *effort = (int(rng.integers(1, most)) for most in (20, 80, 200, 40))
    case.check(k, Effort(*effort), allowed)


def test_finds_what_the_definition_finds(cpu):
    settings(max_examples=DRAWN[cpu], deadline=None)(given(*PROBLEM)(check_search))()


@needs_x86
def test_processors_without_float16(cpu):
    if cpu != "portable":
        pytest.skip("compiles for another CPU whatever this one is")

    def run() -> None:
        with compiling_for(OLD):
            Case(0, 100, [60], 3, 1, "float16", "inner_product").check(5, Effort(3, 40, 20))

    in_child(run)


@pytest.mark.sampled
@pytest.mark.parametrize("bits", [0, 1, 2])
@pytest.mark.parametrize("metric", [0, 1])
def test_more_rows_than_are_collected_at_once(bits, metric, cpu):
    if DRAWN[cpu] < 15 and bits % 2 != metric:  # other CPUs' code is compiled for each
        pytest.skip("this CPU's code is tested with all metrics")
    keeps = (bits + metric, bits + metric + 2)  # each pair of two of the three
    for keep in keeps[: 2 if DRAWN[cpu] == 15 else 1]:
        Case(0, 64, [900, 1100], 9, 1 << bits, KEEPS[keep % 4], METRICS[metric]).check(10, Effort(9, 60, 30))


def test_wide_vectors():
    Case(0, 1100, [80], 3, 4, "int8", "euclidean").check(5, Effort(3, 20, 10))
    Case(0, 2000, [40], 1, 1, "none", "inner_product").check(5, Effort(1, 20, 10))
    with pytest.raises(ValueError, match="4097 dimensions"):
        make_rotation(4097)


def test_equal_rows_are_ordered_by_number():
    case = Case(0, 64, [3], 1, 1, "float32", "inner_product")
    vectors = np.repeat(case.vectors[:1], 2000, 0)
    segment = arrange(Encoder(case.centroids, case.rotation).encode(vectors), 1)
    searcher = Searcher(case.centroids, case.rotation, [segment], 2000, kept=vectors)
    for k in (30, 900):
        rows, _ = searcher.find(case.queries, k, Effort(1, k + 20, k + 20))
        assert (rows == np.arange(k)).all()


@pytest.mark.parametrize("k", [256, 257, 1500])
def test_many_hits_are_ordered(k):
    Case(5, 24, [900, 1100], 3, 1, "float32", "inner_product").check(k, Effort(3, 2000, 2000))


def test_codes_find_near_rows():
    case = Case(0, 128, [3000], 20, 4, "none", "inner_product")
    exact = np.argsort(-case.queries @ case.vectors.T, 1)[:, :10]
    rows, _ = case.searcher().find(case.queries, 10, Effort(20, 100, 0))
    assert np.mean([np.isin(a, b).mean() for a, b in zip(exact, rows, strict=True)]) >= 0.8


def test_filters_and_single_queries_and_threads():
    case = Case(1, 100, [300, 200], 5, 2, "float16", "inner_product")
    searcher, effort = case.searcher(), Effort(5, 60, 30)
    allowed = np.arange(case.n) % 3 == 0
    rows, scores = searcher.find(case.queries, 10, effort, allowed)
    assert allowed[rows].all()
    by_number = searcher.find(case.queries, 10, effort, np.flatnonzero(allowed))
    np.testing.assert_array_equal(by_number[0], rows)
    assert (searcher.find(case.queries, 10, effort, np.zeros(case.n, bool))[0] == -1).all()

    expected = searcher.find(np.tile(case.queries, (40, 1)), 10, effort)
    single = searcher.single(10, effort)
    for number in range(3):
        one = single(case.queries[number])
        assert (one[0] == expected[0][number]).all()
        assert (one[1] == expected[1][number]).all()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        shared = searcher.find(np.tile(case.queries, (40, 1)), 10, effort)
    finally:
        torch.set_num_threads(threads)
    np.testing.assert_array_equal(shared[0], expected[0])
    results: list[Any] = []
    workers = [
        threading.Thread(target=lambda: results.append(searcher.find(case.queries, 10, effort)))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for found in results:
        np.testing.assert_array_equal(found[0], expected[0][:3])
    assert len(scores) == 3


def test_nothing_to_find():
    case = Case(0, 8, [5], 2, 1, "none", "inner_product")
    empty = Searcher(case.centroids, case.rotation, [], 0)
    rows, scores = empty.find(case.queries, 3)
    assert (rows == -1).all()
    assert np.isneginf(scores).all()
    assert case.searcher().find(case.queries[:0], 3)[0].shape == (0, 3)
    assert case.searcher().find(case.queries, 9)[0][:, 5:].tolist() == [[-1] * 4] * 3
    assert (case.searcher().find(np.zeros((1, 8)), 5)[1] == 0).all()


@pytest.mark.sampled
@pytest.mark.parametrize("nbits", [1, 4])
def test_segments_are_merged(nbits):
    case = Case(2, 70, [50, 0, 41, 33], 6, nbits, "float32", "euclidean")
    parts = [codes_of(segment) for segment in case.segments]
    merged = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    whole = Encoder(case.centroids, case.rotation, nbits, euclidean=True).encode(case.vectors)
    for name, array in whole.items():
        if name != "factors":  # sums of blocks of other sizes round differently
            np.testing.assert_allclose(merged[name], array, rtol=1e-4, atol=1e-5)
    effort = Effort(3, 40, 20)
    expected = case.searcher().find(case.queries, 10, effort)
    case.segments = [arrange(merged, 6)]
    for array, other in zip(case.searcher().find(case.queries, 10, effort), expected, strict=True):
        np.testing.assert_array_equal(array, other)
    kept = np.flatnonzero(merged["rows"] % 2)
    case.segments = [arrange({name: array[kept] for name, array in merged.items()}, 6)]
    rows, _ = case.searcher().find(case.queries, 10, effort)
    assert (rows % 2 == 1).all()


def test_a_single_search_keeps_its_index():
    case = Case(3, 64, [200], 4, 1, "int8", "inner_product")
    expected, search = case.searcher().find(case.queries[:1], 5), case.searcher().single(5)
    for _ in range(3):
        case.searcher().find(case.queries, 100, Effort(4, 200, 200))  # uses the memory that was freed
        np.testing.assert_array_equal(search(case.queries[0])[0], expected[0])


def test_a_few_lists_find_what_all_lists_have():
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((900, 64)).astype(np.float32)
    vectors = np.repeat(centres, 10, 0) + 0.3 * rng.standard_normal((9000, 64)).astype(np.float32)
    rotation = make_rotation(64)
    euclidean = Encoder(centres, rotation, euclidean=True)
    segment = arrange(euclidean.encode(vectors), 900)
    searcher = Searcher(centres, rotation, [segment], 9000, metric="euclidean", kept=vectors)
    queries = vectors[::100] + 0.1 * rng.standard_normal((90, 64)).astype(np.float32)
    distances = np.square(queries[:, None] - vectors[None]).sum(2)
    rows, scores = searcher.find(queries, 3, 6)
    best = np.argsort(distances, 1)[:, :3]
    assert np.mean([np.isin(a, b).mean() for a, b in zip(best, rows, strict=True)]) >= 0.95
    np.testing.assert_allclose(-scores, np.take_along_axis(distances, rows, 1), rtol=1e-4, atol=1e-3)


def test_lists_that_are_alike_are_all_searched():
    centroids = np.ones((600, 8), np.float32)
    centroids[-1] = 2
    vectors = np.concatenate([centroids[:1], centroids[-1:]]) + np.float32(0.1)
    rotation = make_rotation(8)
    encoder = Encoder(centroids, rotation, euclidean=True)
    searcher = Searcher(
        centroids, rotation, [arrange(encoder.encode(vectors), 600)], 2, metric="euclidean", kept=vectors
    )
    for row in (0, 1):
        assert searcher.find(vectors[row : row + 1], 1, 600)[0].tolist() == [[row]]
    assert searcher.find(vectors[1:], 1, 1)[0].tolist() == [[1]]
