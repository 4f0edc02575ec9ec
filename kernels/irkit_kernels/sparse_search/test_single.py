"""The search for a single query in torch's memory, compared with the search for many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from irkit_kernels._jit import compiling_for
from irkit_kernels._testing import OLD, needs_x86
from irkit_kernels.sparse_search import Effort, Searcher, Thresholds, build
from irkit_kernels.sparse_search.cpu_few import MOST_DOCUMENTS, MOST_HITS
from irkit_kernels.sparse_search.cpu_search import DEFAULT, LONG

Array = np.ndarray[Any, Any]

DIM = 600


def searcher(
    rng: np.random.Generator,
    n: int,
    terms: str = "uint16",
    length: int = 60,
    thresholds: Thresholds = DEFAULT,
) -> Searcher:
    rows = [np.sort(rng.permutation(DIM)[: rng.integers(0, length)]) for _ in range(n)]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    weights = rng.lognormal(0, 1, offsets[-1]).astype(np.float32)
    forward = offsets, np.concatenate(rows).astype(terms), weights, None
    return index_of(forward, thresholds=thresholds)


def index_of(forward: Any, dim: int = DIM, thresholds: Thresholds = DEFAULT) -> Searcher:
    """Return a searcher; its ``plain`` is one without the search for few documents."""
    arrays = build(forward, dim)
    index = Searcher(arrays, forward, thresholds)
    index.plain = Searcher(arrays, forward, Thresholds(few=0))  # type: ignore[attr-defined]
    return index


def query(rng: np.random.Generator, m: int, kind: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    terms = torch.from_numpy(rng.permutation(DIM + 20)[:m]).to(kind)  # some are of no document
    return terms, torch.from_numpy(rng.lognormal(0, 1, m).astype(np.float32))


def filled(found: tuple[Array, Array], n: int) -> tuple[Array, Array]:
    """Fill hits up with the lowest rows of score 0."""
    rows, scores = found[0].copy(), found[1].copy()
    missing = rows[0] < 0
    rows[0, missing] = np.setdiff1d(np.arange(n), rows)[: missing.sum()]
    scores[0, missing] = 0
    return rows, scores


def assert_same(
    found: Any, index: Searcher, query: tuple[Tensor, Tensor], k: int, effort: Any = None
) -> None:
    """Assert that ``found`` is what `find` returns, with the search for few documents and without it.

    ``found`` is None if there are too few hits, and documents of score 0 are not among them.
    """
    terms, weights = (values.numpy() for values in query)
    some = weights > 0
    asked = np.array([0, some.sum()]), terms[some].astype(np.int32), weights[some]
    wanted = index.plain.find(asked, k, None, effort)  # type: ignore[attr-defined]
    for one, other in zip(index.find(asked, k, None, effort), wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    if found is None:
        assert wanted[0][0, -1] < 0
        return
    for one, other in zip(found, filled(wanted, index.n), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 200),
    kinds=st.tuples(st.sampled_from(["uint16", "uint32"]), st.sampled_from([torch.int32, torch.int64])),
    effort=st.sampled_from([None, Effort(20, 0.5, 50)]),
)
@settings(max_examples=60, deadline=None)
def test_finds_what_search_finds(seed: int, n: int, kinds: Any, effort: Any) -> None:
    rng = np.random.default_rng(seed)
    index = searcher(rng, n, kinds[0])
    for k in (min(k, n) for k in (5, 40, 3)):
        single = index.single(k, effort)
        for _ in range(3):  # memory is kept from one query to the next
            terms, weights = query(rng, int(rng.integers(0, 60)), kinds[1])
            weights[torch.from_numpy(rng.random(len(weights)) < 0.1)] = 0
            assert_same(single(terms, weights), index, (terms, weights), k, effort)


@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 700),
    k=st.integers(1, MOST_HITS + 2),
    kind=st.sampled_from(["float32", "float16", "uint16", "uint8"]),
    ties=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_few_documents_have_the_same_bits(seed: int, n: int, k: int, kind: str, ties: bool) -> None:
    """Among frequent and rare terms, equal scores, weights of 0, and fewer hits than asked for."""
    rng = np.random.default_rng(seed)
    k = min(k, n)
    matrix = rng.random((n, 50)) < rng.random(50) ** 3
    offsets = np.concatenate([[0], np.cumsum(matrix.sum(1))]).astype(np.int64)
    values = rng.integers(0, 4, offsets[-1]) if ties else 100 * rng.random(offsets[-1])
    scales = None
    if kind.startswith("uint"):
        scales = np.ones(n, np.float32) if ties else rng.random(n).astype(np.float32)
    forward = offsets, np.nonzero(matrix)[1].astype("uint16"), values.astype(kind), scales
    index = index_of(forward, 50)
    single = index.single(k)
    for _ in range(4):
        terms = torch.from_numpy(np.sort(rng.permutation(53)[: rng.integers(0, 20)]))
        weights = torch.from_numpy(rng.lognormal(0, 3, len(terms)).astype(np.float32))
        weights = weights.ceil() if ties else weights
        found = single(terms, weights)
        assert found is not None or k > MOST_HITS
        assert_same(found, index, (terms, weights), k)


@pytest.mark.parametrize("n", [MOST_DOCUMENTS, MOST_DOCUMENTS + 1])
def test_extreme_weights_and_as_many_documents_as_may_be(n: int) -> None:
    rng = np.random.default_rng(n)
    terms = np.stack([rng.permutation(6)[:2] for _ in range(n)])
    terms.sort(1)
    values = 10.0 ** rng.integers(-30, 30, 2 * n)
    forward = np.arange(0, 2 * n + 1, 2), terms.reshape(-1).astype("uint16"), values.astype("float32"), None
    index = index_of(forward, 6)
    for k in (1, 10, MOST_HITS):
        asked = torch.tensor([0, 2, 5]), torch.tensor([1e-10, 1e-3, 1e8])
        found = index.single(k)(*asked)
        assert found is not None
        assert_same(found, index, asked, k)


def test_documents_with_terms_in_any_order_are_added_up_in_theirs() -> None:
    rng = np.random.default_rng(3)
    terms = np.concatenate([rng.permutation(30) for _ in range(100)]).astype("uint16")
    forward = np.arange(0, 3001, 30), terms, rng.random(3000).astype("float32"), None
    index = index_of(forward, 30)
    asked = torch.arange(30), torch.rand(30, generator=torch.Generator().manual_seed(0))
    rows, scores = index.single(100)(*asked) or pytest.fail("nothing was found")
    wanted = np.zeros(100, np.float32)
    weights = asked[1].numpy().astype(np.float64)
    for place in range(30):  # a product of float32 is exact in float64, so that this rounds as fma does
        number = terms.reshape(100, 30)[:, place]
        wanted = (weights[number] * forward[2].reshape(100, 30)[:, place] + wanted).astype(np.float32)
    np.testing.assert_array_equal(scores[0], wanted[rows[0]])


@pytest.mark.parametrize("k", [10, 60, 1000])
def test_results_are_not_overwritten_and_long_queries_may_come_between(k: int) -> None:
    rng = np.random.default_rng(0)
    index = searcher(rng, 1500, thresholds=Thresholds(few=0))
    before = query(rng, 30)  # after which this thread has memory of its own
    index.find((np.array([0, 30]), before[0].numpy(), before[1].numpy()), k)
    single, kept = index.single(k), []
    for m in (9, 300, 20, LONG, 500, 7, 120, 130, 140):
        asked = query(rng, m)
        found = single(*asked)
        if m > LONG:
            assert found is None
            index.find((np.array([0, m]), asked[0].numpy(), asked[1].numpy()), k)
        elif found is not None:  # which it is if there are fewer hits
            kept.append((found, asked))
    assert len(kept) >= 3
    for found, asked in kept:
        assert_same(found, index, asked, k)


def test_what_it_leaves_to_others() -> None:
    rng = np.random.default_rng(1)
    index = searcher(rng, 50)
    single = index.single(3)
    for terms, weights in (query(rng, 12), query(rng, 1)):
        assert single(terms, weights) is not None
        for wrong in (-1.0, float("nan"), float("inf"), -float("inf")):
            bad = weights.clone()
            bad[-1] = wrong
            assert single(terms, bad) is None
            unknown = torch.cat([terms, torch.tensor([DIM + 50], dtype=torch.int32)])
            assert single(unknown, torch.cat([weights, torch.tensor([wrong])])) is None
    terms, weights = query(rng, 12)
    strided = torch.stack([terms, terms], 1)[:, 0], torch.stack([weights, weights], 1)[:, 0]
    for other in ((strided[0], weights), (terms, strided[1]), (terms, weights.double())):
        assert single(*other) is None
    assert single(terms.short(), weights) is None
    assert single(terms.to("meta"), weights.to("meta")) is None
    assert_same(single(terms, weights), index, (terms, weights), 3)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_numbers_beyond_the_vocabulary_are_of_no_document(kind: torch.dtype) -> None:
    single = searcher(np.random.default_rng(2), 50).single(1)
    for numbers in ([-1, 2**31 - 1, 3], [3, 2**31 - 2, 2**31 - 1], [3, DIM]):
        terms, weights = torch.tensor(numbers, dtype=kind), torch.ones(len(numbers))
        found, wanted = single(terms, weights), single(terms[terms == 3], torch.ones(1))
        for one, other in zip(found or (), wanted or (), strict=True):
            np.testing.assert_array_equal(one, other)


@needs_x86
def test_processors_without_wide_registers() -> None:
    rng = np.random.default_rng(4)
    with compiling_for(OLD):
        index = searcher(rng, 300)
        single = index.single(10)
    for _ in range(5):
        terms, weights = query(rng, 40)
        terms = terms.sort().values
        assert_same(single(terms, weights), index, (terms, weights), 10)
