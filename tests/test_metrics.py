"""What a score of dense vectors is: inner products, cosines and distances, of vectors of any length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from irkit import Dense, MultiVector, Ragged
from irkit.errors import BadValueError, ConfigError
from irkit.index import Limits, Store, compact, create_index, open_index, use_limits
from irkit.index.metrics import unit

DIM, ROWS = 24, 600
KINDS: list[dict[str, Any]] = [
    {"kind": "flat"},
    {"kind": "flat", "dtype": "float16"},
    {"kind": "dense", "keep": "float32"},
    {"kind": "dense", "keep": "float16", "bits": 4},
]


def vectors(n: int, seed: int) -> torch.Tensor:
    """Vectors in clusters, of lengths between 0.2 and 5."""
    own = torch.Generator().manual_seed(seed)
    centres = torch.randn(30, DIM, generator=torch.Generator().manual_seed(0))
    values = centres[torch.randint(0, 30, (n,), generator=own)] + 0.4 * torch.randn(n, DIM, generator=own)
    return torch.nn.functional.normalize(values) * torch.empty(n, 1).uniform_(0.2, 5, generator=own)


def definition(metric: str, queries: torch.Tensor, documents: torch.Tensor) -> np.ndarray:
    q, d = queries.double(), documents.double()
    if metric == "euclidean":
        return -(q[:, None] - d).square().sum(-1).numpy()
    if metric == "cosine":
        return torch.nn.functional.cosine_similarity(q[:, None], d, dim=-1).numpy()
    return (q @ d.T).numpy()


@pytest.mark.parametrize("metric", ["inner_product", "cosine", "euclidean"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_scores_are_those_of_the_metric(kind: dict[str, Any], metric: str, tmp_path: Path) -> None:
    documents, queries = vectors(ROWS, 1), vectors(20, 2)
    truth = definition(metric, queries, documents)
    atol = 0.1 if "float16" in kind.values() else 1e-4
    with use_limits(Limits(flat_scan=17, flat_share=1, dense_scan=20, dense_scan_per_hit=1, dense_points=8)):
        with Store.build(tmp_path / "index") as store:
            index = create_index(store, kind | {"metric": metric})
            index.add(Dense(documents[:500]))
            index.finish()
            store.publish()
        index = open_index(Store.open(tmp_path / "index"))
        index.add(Dense(documents[500:]))
        index.finish()
        for opened in (index, open_index(Store.open(tmp_path / "index"))):
            hits = opened.search(Dense(queries), 10)
            best = -np.sort(-truth, axis=1)[:, :10]
            np.testing.assert_allclose(hits.scores, best, rtol=0, atol=atol)
            np.testing.assert_allclose(np.take_along_axis(truth, hits.rows, 1), best, rtol=0, atol=atol)
            for number in range(20):
                alone = opened.search(Dense(queries[number : number + 1]), 10)
                np.testing.assert_allclose(alone.scores[0], hits.scores[number], rtol=0, atol=1e-4)
        rows = np.arange(40).reshape(20, 2)
        np.testing.assert_allclose(
            index.rescore(Dense(queries), rows), np.take_along_axis(truth, rows, 1), rtol=0, atol=atol
        )
        index.remove(np.arange(0, ROWS, 2))
        index.store.close()
        compact(tmp_path / "index")
        hits = open_index(Store.open(tmp_path / "index")).search(Dense(queries), 10)
        best = -np.sort(-truth[:, 1::2], axis=1)[:, :10]
        np.testing.assert_allclose(hits.scores, best, rtol=0, atol=atol)


def test_vectors_of_any_size_are_normalised() -> None:
    values = torch.tensor([[3e30, 4e30], [3e-30, 4e-30], [0.0, 0.0], [-3.0, 4.0]])
    found = unit(Dense(values))
    assert isinstance(found, Dense)
    torch.testing.assert_close(found.values, torch.tensor([[0.6, 0.8], [0.6, 0.8], [0.0, 0.0], [-0.6, 0.8]]))
    tokens = MultiVector(Ragged.from_rows([values]))
    assert unit(tokens) is tokens


def test_a_metric_that_does_not_exist(tmp_path: Path) -> None:
    message = "metric.*'inner_product', 'cosine' or 'euclidean'"
    with Store.build(tmp_path / "index") as store, pytest.raises(ConfigError, match=message):
        create_index(store, {"kind": "dense", "metric": "l2"})


@pytest.mark.parametrize("bits", [2, 4])
def test_distances_to_vectors_that_codes_stand_for(bits: int, tmp_path: Path) -> None:
    documents, queries = vectors(ROWS, 1), vectors(20, 2)
    with use_limits(Limits(dense_scan=20, dense_scan_per_hit=1)):
        with Store.build(tmp_path / "index") as store:
            index = create_index(
                store, {"kind": "dense", "keep": "none", "bits": bits, "metric": "euclidean"}
            )
            index.add(Dense(documents))
            index.finish()
            store.publish()
        index = open_index(Store.open(tmp_path / "index"))
        kept = index.representations(np.arange(ROWS))
        assert isinstance(kept, Dense)
        hits, truth = index.search(Dense(queries), 10), definition("euclidean", queries, kept.values)
    best = -np.sort(-truth, axis=1)[:, :10]
    np.testing.assert_allclose(hits.scores, np.take_along_axis(truth, hits.rows, 1), rtol=0, atol=1e-3)
    assert (np.abs(hits.scores - best) < 1e-3).mean() >= 0.95
    given = definition("euclidean", queries, documents)
    assert np.abs(truth - given).mean() < 0.1 * np.abs(given).mean()


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_metrics_compare_dense_vectors(metric: str, tmp_path: Path) -> None:
    tokens = MultiVector(Ragged.from_rows([torch.ones(2, 4)]))
    with Store.build(tmp_path / "index") as store:
        index = create_index(store, {"kind": "flat", "metric": metric})
        with pytest.raises(ConfigError, match=f"metric '{metric}' compares dense vectors, got multi_vector"):
            index.add(tokens)


@pytest.mark.parametrize("kind", [{"kind": "flat"}, {"kind": "dense", "keep": "float32"}])
def test_distances_that_float32_does_not_hold_are_refused(kind: dict[str, Any], tmp_path: Path) -> None:
    """The score of such a vector would be NaN, and a search would drop its document."""
    longest = torch.eye(DIM)[:4] * 8.9e18
    with Store.build(tmp_path / "index") as store:
        index = create_index(store, {**kind, "metric": "euclidean"})
        index.add(Dense(longest))
        with pytest.raises(BadValueError, match=r"adding documents: a vector is longer than 9e\+18.*divide"):
            index.add(Dense(longest[:1] * 2))
        index.finish()
        store.publish()
    index = open_index(Store.open(tmp_path / "index"))
    assert len(index) == 4
    hits = index.search(Dense(-longest[:1]), 4)  # opposite vectors, the longest distance
    assert (hits.rows[0, 3], np.isfinite(hits.scores).all()) == (0, True)
    for count in (1, 3):
        with pytest.raises(BadValueError, match="searching: a vector is longer than"):
            index.search(Dense(longest[:count] * 1e10), 2)
    with pytest.raises(BadValueError, match="rescoring: a vector is longer than"):
        index.rescore(Dense(longest[:1] * 2), np.zeros((1, 1), np.int64))


def test_distances_have_no_gpu_search(tmp_path: Path) -> None:
    with Store.build(tmp_path / "index") as store:
        index = create_index(store, {"kind": "flat", "metric": "euclidean", "device": "gpu"})
        with pytest.raises(ConfigError, match="no GPU search for metric 'euclidean'"):
            index.add(Dense(torch.ones(1, 4)))
