"""A single query, given as torch has it, against search for several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from irkit_kernels.sparse_search import Effort, Searcher, build
from irkit_kernels.sparse_search.cpu_search import LONG

DIM = 600


def searcher(rng: np.random.Generator, n: int, terms: str = "uint16", length: int = 60) -> Searcher:
    rows = [np.sort(rng.permutation(DIM)[: rng.integers(0, length)]) for _ in range(n)]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    weights = rng.lognormal(0, 1, offsets[-1]).astype(np.float32)
    forward = offsets, np.concatenate(rows).astype(terms), weights, None
    return Searcher(build(forward, DIM), forward)


def query(rng: np.random.Generator, m: int, kind: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    terms = torch.from_numpy(rng.permutation(DIM + 20)[:m]).to(kind)  # some are of no document
    return terms, torch.from_numpy(rng.lognormal(0, 1, m).astype(np.float32))


def assert_same(found: Any, index: Searcher, terms: Tensor, weights: Tensor, k: int, effort: Any) -> None:
    some = weights.numpy() > 0
    asked = np.array([0, some.sum()]), terms.numpy()[some].astype(np.int32), weights.numpy()[some]
    for one, other in zip(found, index.find(asked, k, None, effort), strict=True):
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
    for k in (5, 5, 40, 3):  # memory is kept from one query to the next of the same k
        terms, weights = query(rng, int(rng.integers(0, 60)), kinds[1])
        weights[torch.from_numpy(rng.random(len(weights)) < 0.1)] = 0
        found = index.find_one(terms, weights, k, effort)
        assert_same(found, index, terms, weights, k, effort)


def test_results_are_not_overwritten_and_long_queries_may_come_between() -> None:
    rng = np.random.default_rng(0)
    index = searcher(rng, 150)
    kept = []
    for m in (9, 300, 20, LONG, 500, 7):
        terms, weights = query(rng, m)
        found = index.find_one(terms, weights, 10)
        assert (found is None) == (m > LONG)
        if found is None:
            index.find((np.array([0, m]), terms.numpy(), weights.numpy()), 10)
        else:
            kept.append((found, terms, weights))
    for found, terms, weights in kept:
        assert_same(found, index, terms, weights, 10, None)


def test_what_it_leaves_to_others() -> None:
    rng = np.random.default_rng(1)
    index = searcher(rng, 50)
    terms, weights = query(rng, 12)
    assert index.find_one(terms, weights, 3) is not None
    for wrong in (-1.0, float("nan"), float("inf"), -float("inf")):
        bad = weights.clone()
        bad[7] = wrong
        assert index.find_one(terms, bad, 3) is None
        unknown = torch.cat([terms, torch.tensor([DIM + 5], dtype=torch.int32)])
        assert index.find_one(unknown, torch.cat([weights, torch.tensor([wrong])]), 3) is None
    strided = torch.stack([terms, terms], 1)[:, 0], torch.stack([weights, weights], 1)[:, 0]
    for other in ((strided[0], weights), (terms, strided[1]), (terms, weights.double())):
        assert index.find_one(*other, 3) is None
    assert index.find_one(terms.short(), weights, 3) is None
    assert index.find_one(terms.to("meta"), weights.to("meta"), 3) is None
    assert_same(index.find_one(terms, weights, 3), index, terms, weights, 3, None)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_numbers_beyond_the_vocabulary_are_of_no_document(kind: torch.dtype) -> None:
    index = searcher(np.random.default_rng(2), 50)
    terms, weights = torch.tensor([-1, 2**31 - 1, 3], dtype=kind), torch.ones(3)
    found, wanted = index.find_one(terms, weights, 3), index.find_one(terms[2:], weights[2:], 3)
    for one, other in zip(found or (), wanted or (), strict=True):
        np.testing.assert_array_equal(one, other)
