"""A score depends on the query and the document alone: not on other queries, and not on other documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit import Dense, MultiVector, Ragged, Sparse, score
from irkit.core.representation import Representation
from irkit.index import FlatConfig, Index, Limits, Store, create_index, dense_scores, open_index, use_limits
from irkit.index.dense_scores import longest_of, pair_scores, push_rows
from irkit.index.flat import Flat
from irkit.index.topk import TopK

ROWS, QUERIES = 3000, 70
METRICS = ("inner_product", "cosine", "euclidean")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"flat-{dtype}-{metric}": ("dense", {"kind": "flat", "dtype": dtype, "metric": metric})
        for dtype in ("float32", "float16", "bfloat16", "int8")
        for metric in METRICS
    },
    **{f"dense-{keep}": ("dense", {"kind": "dense", "keep": keep}) for keep in ("float32", "int8", "none")},
    "dense-cosine": ("dense", {"kind": "dense", "metric": "cosine"}),
    "ivf": ("dense", {"kind": "faiss", "factory": "ivf"}),
    "hnsw": ("dense", {"kind": "faiss", "factory": "hnsw"}),
    "dense-euclidean": ("dense", {"kind": "dense", "metric": "euclidean", "bits": 4}),
    "tokens": ("multi_vector", {"kind": "flat"}),
    "tokens-int8": ("multi_vector", {"kind": "flat", "dtype": "int8"}),
    "muvera": ("multi_vector", {"kind": "muvera", "repetitions": 4, "bits": 2}),
    "plaid": ("multi_vector", {"kind": "plaid", "device": "cpu"}),
    "sparse": ("sparse", {"kind": "flat"}),
    "inverted": ("sparse", {"kind": "inverted", "mode": "exact"}),
}


def make(kind: str, n: int, rng: np.random.Generator) -> Representation:
    def rows(count: int, dim: int) -> torch.Tensor:
        centres = np.random.default_rng(0).standard_normal((30, dim))
        values = centres[rng.integers(0, 30, count)] + 0.4 * rng.standard_normal((count, dim))
        return torch.from_numpy(values.astype(np.float32))

    if kind == "dense":
        return Dense(rows(n, 100))
    if kind == "multi_vector":
        lengths = torch.from_numpy(rng.integers(1, 8, n))
        return MultiVector(Ragged(rows(int(lengths.sum()), 20), lengths))
    weights = rows(n, 60).abs() * torch.from_numpy(rng.random((n, 60)) < 0.3)
    return Sparse.from_dense(weights.float())


def build(path: Path, config: dict[str, Any], data: Representation) -> Index:
    with Store.build(path) as store:
        index = create_index(store, config)
        index.add(data)
        index.finish()
        store.publish()
    return open_index(Store.open(path))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_a_query_alone_finds_what_it_finds_among_others(kind: str, tmp_path: Path) -> None:
    held, config = KINDS[kind]
    rng = np.random.default_rng(1)
    data, queries = make(held, ROWS, rng), make(held, QUERIES, rng)
    for name, limits in (
        ("codes", Limits(dense_scan=100, faiss_scan=100, faiss_scan_per_hit=1)),
        ("scan", Limits(flat_scan=ROWS, dense_scan=ROWS)),
    ):
        with use_limits(limits):
            index = build(tmp_path / name, config, data)
            for allowed in (None, rng.random(ROWS) < 0.6, rng.random(ROWS) < 0.02):
                for k in (1, 10, 400):
                    whole = index.search(queries, k, allowed)
                    for start, stop in ((0, 1), (5, 6), (7, 20), (40, 70)):
                        part = index.search(queries[start:stop], k, allowed)
                        np.testing.assert_array_equal(part.rows, whole.rows[start:stop])
                        np.testing.assert_array_equal(part.scores, whole.scores[start:stop])


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith(("flat", "tokens", "sparse"))])
def test_a_document_scores_in_a_part_as_in_the_whole(kind: str, tmp_path: Path) -> None:
    held, config = KINDS[kind]
    rng = np.random.default_rng(2)
    data, queries = make(held, ROWS, rng), make(held, QUERIES, rng)
    whole = build(tmp_path / "whole", config, data).search(queries, 100)
    owners, best = rng.integers(0, 3, ROWS), TopK(QUERIES, 100)
    for owner in range(3):
        rows = np.flatnonzero(owners == owner)
        part = build(tmp_path / str(owner), config, data[torch.from_numpy(rows)])
        hits = part.search(queries, 100)
        best.push_pairs(hits.scores, rows[hits.rows])
        # a chosen document scores as in a search
        np.testing.assert_array_equal(part.rescore(queries, hits.rows[:, :7]), hits.scores[:, :7])
    np.testing.assert_array_equal(best.hits().rows, whole.rows)
    np.testing.assert_array_equal(best.hits().scores, whole.scores)


@pytest.mark.parametrize("held", ["dense", "sparse", "multi_vector"])
def test_documents_are_rescored_a_part_at_a_time(held: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    data, queries = make(held, 500, rng), make(held, 3, rng)
    rows = rng.integers(-1, 500, (3, 90))
    whole = build(tmp_path / "index", {"kind": "flat"}, data).rescore(queries, rows)
    assert (np.isneginf(whole) == (rows < 0)).all()
    read: list[int] = []

    class Counted(Flat):
        def representations(self, rows: np.ndarray) -> Representation:
            read.append(len(rows))
            return super().representations(rows)

    with use_limits(Limits(scan_numbers=2000)):
        index = Counted(Store.open(tmp_path / "index"), FlatConfig())
        np.testing.assert_array_equal(index.rescore(queries, rows), whole)
        np.testing.assert_array_equal(index.rescore(queries[1:2], rows[1:2]), whole[1:2])
    if held == "multi_vector":  # tokens are read where they are stored
        assert not read
    else:
        assert max(read) <= 20


def test_padding_is_not_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    data, queries = make("dense", 500, rng), make("dense", 40, rng)
    rows = np.full((40, 300), -1)
    rows[0], rows[1:, 0], rows[1:, 7] = rng.integers(0, 500, 300), 5, 9
    read: list[int] = []

    class Counted(Flat):
        def representations(self, rows: np.ndarray) -> Representation:
            read.append(len(rows))
            return super().representations(rows)

    build(tmp_path / "index", {"kind": "flat"}, data)
    index = Counted(Store.open(tmp_path / "index"), FlatConfig())
    scores = index.rescore(queries, rows)
    assert sum(read) == (rows >= 0).sum()
    assert (np.isneginf(scores) == (rows < 0)).all()
    for number in (0, 1, 39):
        given = rows[number] >= 0
        alone = index.rescore(queries[number : number + 1], rows[number : number + 1, given])
        np.testing.assert_array_equal(scores[number, given], alone[0])


@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 300),
    n_q=st.sampled_from([1, 2, 30]),
    k=st.integers(1, 40),
    dim=st.sampled_from([1, 3, 16, 70]),
    metric=st.sampled_from(METRICS),
    scale=st.sampled_from([1e-20, 1.0, 1e18, 1e19, 3e38]),
    whole=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_what_a_product_leaves_holds_the_best(
    seed: int, n: int, n_q: int, k: int, dim: int, metric: Any, scale: float, whole: bool
) -> None:
    """The choice by products finds what scoring of all pairs finds, with ties and numbers of any size."""
    rng = np.random.default_rng(seed)

    def draw(count: int) -> np.ndarray:
        values = rng.integers(-2, 3, (count, dim)) if whole else rng.standard_normal((count, dim))
        with np.errstate(over="ignore"):
            return np.clip(values * scale, -3e38, 3e38).astype(np.float32)

    queries, values, keep = draw(n_q), draw(n), rng.random(n) < 0.8
    best, every = TopK(n_q, k), TopK(n_q, k)
    for start in range(0, n, 150):
        part = slice(start, start + 150)
        numbers = np.arange(n)[part]
        push_rows(best, metric, queries, values[part], numbers, keep[part], longest_of(values[part]))
    chosen = np.tile(np.where(keep, np.arange(n), -1), (n_q, 1))
    scores = pair_scores(metric, queries, values, chosen)
    if np.isnan(scores).any():  # sums of infinite numbers are no scores
        return
    every.push_pairs(scores, chosen)
    np.testing.assert_array_equal(best.hits().rows, every.hits().rows)
    np.testing.assert_array_equal(best.hits().scores, every.hits().scores)


@pytest.mark.parametrize("allowed", ["torch", "oneDNN"])
def test_products_of_fewer_bits_lose_no_hits(allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may let torch round the factors of products; this CPU may lack the instructions for it."""

    def rounded(queries: Dense, documents: Dense) -> torch.Tensor:
        return score(queries.to(dtype=torch.bfloat16), documents.to(dtype=torch.bfloat16))

    rng = np.random.default_rng(0)
    queries, values = (unit(rng.standard_normal((n, 64)).astype(np.float32)) for n in (40, 3000))
    values[1000:] = unit(values[:1] + 0.001 * values[1000:])  # many alike
    queries[0] = values[0]
    chosen = np.tile(np.arange(3000), (40, 1))
    every, best = TopK(40, 10), TopK(40, 10)
    every.push_pairs(pair_scores("inner_product", queries, values, chosen), chosen)
    monkeypatch.setattr(dense_scores, "score", rounded)
    if allowed == "oneDNN":
        monkeypatch.setenv("DNNL_DEFAULT_FPMATH_MODE", "BF16")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium" if allowed == "torch" else before)
        push_rows(best, "inner_product", queries, values, np.arange(3000), None, longest_of(values))
    finally:
        torch.set_float32_matmul_precision(before)
    np.testing.assert_array_equal(best.hits().rows, every.hits().rows)


def unit(values: np.ndarray) -> np.ndarray:
    return np.asarray(values / np.linalg.norm(values, axis=1, keepdims=True), np.float32)
