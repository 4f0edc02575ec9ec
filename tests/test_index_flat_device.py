"""Exact search of dense vectors on a GPU: what the CPU finds, ties and filters included."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from irkit import Dense, MultiVector, Ragged
from irkit.errors import ConfigError
from irkit.index import FlatConfig, Index, Limits, Store, create_index, open_index, use_limits


def vectors(n: int, seed: int) -> Dense:
    """Of small integers, whose products are exact in any order, with many ties."""
    return Dense(torch.from_numpy(np.random.default_rng(seed).integers(-1, 2, (n, 3)).astype(np.float32)))


def build(path: Path, data: Any, **options: Any) -> Index:
    with Store.build(path) as store:
        index = create_index(store, {"kind": "flat"} | options)
        index.add(data)
        store.publish()
    return open_index(Store.open(path))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 90),
    st.integers(1, 5),
    st.integers(1, 100),
    st.sampled_from([0.0, 0.5, 1.0, None]),
    st.sampled_from([1, 60, 10**6]),
    st.integers(0, 2**31),
)
def test_rows_and_scores_are_those_of_the_cpu(
    gpu: Any, n: int, n_q: int, k: int, share: float | None, scores: int, seed: int
) -> None:
    keep = None if share is None else np.random.default_rng(seed).random(n) < share
    limits = Limits(scan_gpu_scores=scores)
    with tempfile.TemporaryDirectory() as folder, use_limits(limits):
        index, queries = build(Path(folder) / "index", vectors(n, seed)), vectors(n_q, seed + 1)
        index.remove([0] if n > 3 else [])
        expected = index.search(queries, k, keep)
        assert gpu.operations == []
        index.config = FlatConfig(device="gpu")
        found = index.search(queries, k, keep)
        assert gpu.operations or not (found.rows >= 0).any()
    np.testing.assert_array_equal(found.rows, expected.rows)
    np.testing.assert_array_equal(found.scores, expected.scores)
    gpu.clear()


def test_a_search_waits_for_its_result_alone_and_moves_the_vectors_once(tmp_path: Path, gpu: Any) -> None:
    index = build(tmp_path / "index", vectors(900, 0), device="auto")
    index.search(vectors(2, 1), 5)
    gpu.clear()
    index.search(vectors(2, 1), 5)
    assert len([wait for wait in gpu.waits if "from the device" in wait]) == 1
    assert gpu.operations.count("mm") == 1
    assert len(gpu.pageable) == 2  # the queries and the result
    index.add(vectors(3, 2))
    assert index.search(vectors(2, 1), 903).rows.max() == 902


def test_without_memory_the_cpu_searches(tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    index = build(tmp_path / "index", vectors(900, 0), device="auto")
    gpu.free = 1 << 28
    with pytest.warns(UserWarning, match=r"searching this index takes 0\.5 GB .* so the CPU does it"):
        found = index.search(vectors(2, 1), 5)
    assert gpu.operations == []
    index.config = FlatConfig()
    np.testing.assert_array_equal(found.rows, index.search(vectors(2, 1), 5).rows)
    index.config = FlatConfig(device="gpu")
    with pytest.raises(ConfigError, match=r"takes 0\.5 GB of the GPU, which has 0\.2 GB free"):
        index.search(vectors(2, 1), 5)


def test_a_gpu_is_for_dense_vectors(tmp_path: Path, gpu: Any) -> None:
    tokens = MultiVector(Ragged(torch.ones(4, 3), torch.tensor([3, 1])))
    for dtype in ("float32", "int8"):
        with pytest.raises(ConfigError, match=r"for dense vectors, got multi_vector; .* or choose 'plaid'"):
            build(tmp_path / dtype, tokens, dtype=dtype, device="gpu")
    index = build(tmp_path / "auto", tokens, device="auto")
    assert index.search(tokens[:1], 2).rows.tolist() == [[0, 1]]
    assert gpu.operations == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="torch finds none"):
        build(tmp_path / "index", vectors(0, 0), device="gpu")
    index = build(tmp_path / "auto", vectors(5, 0), device="auto")
    assert (index.search(vectors(1, 0), 2).rows >= 0).all()
    index.config = FlatConfig(device="gpu")
    with pytest.raises(ConfigError, match="torch finds none"):
        index.search(vectors(1, 0), 2)


@pytest.mark.gpu
def test_a_gpu_finds_what_the_cpu_finds(tmp_path: Path) -> None:
    index, queries = build(tmp_path / "index", vectors(5000, 0), device="gpu"), vectors(20, 1)
    found = index.search(queries, 100)
    index.config = FlatConfig()
    expected = index.search(queries, 100)
    np.testing.assert_array_equal(found.rows, expected.rows)
    np.testing.assert_array_equal(found.scores, expected.scores)
