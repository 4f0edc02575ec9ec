"""Search of coded lists on a GPU: what the CPU finds, with filters, segments and rows without lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from irkit import Dense
from irkit.errors import ConfigError, CorruptError
from irkit.index import DenseConfig, Index, Limits, Store, create_index, open_index, use_limits

DIM, ROWS, K = 24, 700, 10
LISTS = Limits(dense_scan=20, dense_scan_per_hit=1, dense_points=8)


def vectors(n: int, seed: int) -> torch.Tensor:
    own = torch.Generator().manual_seed(seed)
    centres = torch.randn(30, DIM, generator=torch.Generator().manual_seed(0))
    return centres[torch.randint(0, 30, (n,), generator=own)] + 0.4 * torch.randn(n, DIM, generator=own)


def build(path: Path, **options: Any) -> Index:
    """Build an index of two segments, with some rows outside of the lists."""
    documents = vectors(ROWS, 1)
    with Store.build(path) as store:
        index = create_index(store, {"kind": "dense"} | options)
        index.add(Dense(documents[:580]))
        index.finish()
        store.publish()
    index = open_index(Store.open(path))
    index.add(Dense(documents[580:690]))
    index.finish()
    index.add(Dense(documents[690:]))
    index.remove(range(0, ROWS, 7))
    return index


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("metric", "numbers"),
    [("inner_product", 1), ("cosine", 10**6), ("euclidean", 1), ("euclidean", 10**6)],  # 1 is a query a block
)
@pytest.mark.parametrize(
    "options",
    [
        {"keep": "none"},
        {"keep": "int8"},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in ({"keep": "none", "bits": 2}, {"bits": 4}, {"keep": "float32"})
        ),
    ],
    ids=str,
)
def test_rows_and_scores_are_those_of_the_cpu(
    tmp_path: Path, gpu: Any, options: dict[str, Any], metric: str, numbers: int
) -> None:
    limits = Limits(dense_scan=20, dense_scan_per_hit=1, dense_points=8, scan_gpu_scores=numbers)
    queries, share = Dense(vectors(15, 2)), np.random.default_rng(0).random(ROWS) < 0.5
    with use_limits(limits):
        # all rows of lists are ranked, so the roundings of the CPU choose nothing
        index = build(tmp_path / "index", metric=metric, probes=999, candidates=ROWS, **options)
        assert len(index.store.meta["index"]["segments"]) == 2
        for keep in (None, share, np.zeros(ROWS, bool)):
            expected = index.search(queries, K, keep)
            before = len(gpu.operations)
            index.config = index.config.model_copy(update={"device": "gpu"})
            found = index.search(queries, K, keep)
            assert (len(gpu.operations) > before) == (keep is None or keep.any())
            np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5, atol=2e-3)
            assert np.mean(found.rows == expected.rows) >= 0.99  # nearly equal scores in another order
            one = index.search(queries[3:4], K, keep)
            np.testing.assert_allclose(one.scores[0], found.scores[3], rtol=1e-5, atol=1e-4)
            index.config = index.config.model_copy(update={"device": "cpu"})


def test_default_settings_find_the_best(tmp_path: Path, gpu: Any) -> None:
    with use_limits(LISTS):
        index = build(tmp_path / "index", device="auto")
    queries, live = vectors(40, 2), np.flatnonzero(index.live)
    truth = (queries @ vectors(ROWS, 1)[live].T).topk(K).indices
    found = index.search(Dense(queries), K).rows
    pairs = zip(live[truth.numpy()], found, strict=True)
    assert np.mean([len(np.intersect1d(best, rows)) / K for best, rows in pairs]) >= 0.95
    assert gpu.operations


def test_a_block_waits_for_the_device_twice_and_moves_the_index_once(tmp_path: Path, gpu: Any) -> None:
    with use_limits(LISTS):
        index, queries = build(tmp_path / "index", device="gpu"), Dense(vectors(8, 2))
    expected = index.search(queries, K)
    gpu.clear()
    found = index.search(queries, K)
    assert len(gpu.waits) == 2, gpu.waits
    assert not [copy for copy in gpu.pageable if "to the device" in copy]
    np.testing.assert_array_equal(found.rows, expected.rows)


def test_without_memory_the_cpu_searches(tmp_path: Path, gpu: Any) -> None:
    with use_limits(LISTS):
        index, queries = build(tmp_path / "index", device="auto"), Dense(vectors(3, 2))
        gpu.free = 1 << 20
        with pytest.warns(UserWarning, match="searching this index takes .* so the CPU does it"):
            found = index.search(queries, K)
        assert gpu.operations == []
        index.config = DenseConfig()
        np.testing.assert_array_equal(found.rows, index.search(queries, K).rows)


def test_a_damaged_row_is_told_before_it_is_looked_up(tmp_path: Path, gpu: Any) -> None:
    with use_limits(LISTS):
        index = build(tmp_path / "index", device="gpu")
        name = "segment_a.bin"
        begin = index.store.meta["index"]["segments"][0]["fields"]["rows"][0]
        path = index.store.path / index.store.state.arrays[name].file
        index.store.close()
        content = bytearray(path.read_bytes())
        content[begin : begin + 4] = (2**31).to_bytes(4, "little")
        path.write_bytes(content)
        with pytest.raises(CorruptError, match="a segment has a row that is not there"):
            open_index(Store.open(tmp_path / "index", verify=False)).search(Dense(vectors(2, 2)), K)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="torch finds none"), Store.build(tmp_path / "index") as store:
        create_index(store, {"kind": "dense", "device": "gpu"}).add(Dense(vectors(3, 0)))


@pytest.mark.gpu
def test_a_gpu_finds_what_the_cpu_finds(tmp_path: Path) -> None:
    with use_limits(LISTS):
        index, queries = build(tmp_path / "index", device="gpu", candidates=ROWS), Dense(vectors(20, 2))
        found = index.search(queries, K)
        index.config = index.config.model_copy(update={"device": "cpu"})
        np.testing.assert_allclose(found.scores, index.search(queries, K).scores, rtol=1e-4, atol=1e-3)
