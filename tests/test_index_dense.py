"""The index kind dense: segments, retraining, settings of the search, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from irkit import Dense, score
from irkit.errors import ConfigError, CorruptError
from irkit.index import DenseConfig, Index, Store, compact, create_index, open_index

DIM = 24


@pytest.fixture(autouse=True)
def _small(small_limits: Callable[..., None]) -> None:
    small_limits(dense_scan=20, dense_scan_per_hit=1, dense_points=8)


def vectors(n: int, seed: int = 0) -> Dense:
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(7).standard_normal((12, DIM))
    return Dense(torch.tensor(centres[rng.integers(0, 12, n)] + 0.3 * rng.standard_normal((n, DIM))).float())


def build(path: Path, data: Dense, config: DenseConfig) -> Index:
    with Store.build(path) as store:
        index = create_index(store, config)
        index.add(data)
        index.finish()
        store.publish()
    return index


def recall(index: Index, data: Dense, k: int = 10) -> float:
    queries = vectors(30, 99)
    best = score(queries, data).numpy().argsort(1)[:, ::-1][:, :k]
    pairs = zip(index.search(queries, k).rows, best, strict=True)
    return float(np.mean([len(set(a) & set(b)) / k for a, b in pairs]))


@pytest.mark.parametrize("keep", ["none", "int8", "float16", "float32"])
def test_additions_make_segments_that_merge_and_new_centroids_when_many(tmp_path: Path, keep: str) -> None:
    data = vectors(2000)
    index = build(tmp_path / "index", data[:600], DenseConfig(keep=keep))
    lists = index.stats()["lists"]
    index.add(data[600:610])
    index.finish()
    assert (index.stats()["covered"], index.stats()["segments"]) == (600, 1)  # a few are scanned
    index.add(data[610:700])
    index.finish()
    assert (index.stats()["covered"], index.stats()["segments"]) == (700, 2)
    index.add(data[700:760])
    index.finish()
    assert (index.stats()["segments"], index.stats()["lists"]) == (1, lists)  # 60 and 100 join the 600
    assert recall(index, data[:760]) > 0.9
    index.add(data[760:2400])
    index.finish()
    assert recall(index, data) > 0.9
    assert index.stats()["bytes"] < 2000 * (4 * DIM + 40) + 60_000


def test_there_may_be_more_segments_than_letters(tmp_path: Path, small_limits: Callable[..., None]) -> None:
    small_limits(dense_scan=20, dense_scan_per_hit=1, dense_points=8, dense_segment=20)
    data = vectors(600)
    index = build(tmp_path / "index", data, DenseConfig())
    assert index.stats()["segments"] == 30
    assert recall(open_index(Store.open(tmp_path / "index", verify=True)), data) > 0.9


def test_a_single_query_finds_what_several_find(tmp_path: Path) -> None:
    data, queries = vectors(500), vectors(9, 5)
    index = build(tmp_path / "index", data, DenseConfig(keep="float32"))
    together = index.search(queries, 7)
    for number in range(9):
        alone = index.search(queries[number : number + 1], 7)
        np.testing.assert_array_equal(alone.rows[0], together.rows[number])
        np.testing.assert_array_equal(alone.scores[0], together.scores[number])
    index.remove(together.rows[0, :2])
    assert index.search(queries[:1], 5).rows[0].tolist() == together.rows[0, 2:].tolist()


@pytest.mark.parametrize("keep", ["none", "int8", "float16", "float32"])
def test_vectors_of_other_dtypes_and_with_gradients(tmp_path: Path, keep: str) -> None:
    data, queries = vectors(300).to(dtype=torch.bfloat16), vectors(4, 5)
    index = build(tmp_path / "index", data, DenseConfig(keep=keep))
    plain = build(tmp_path / "plain", data.to(dtype=torch.float32), DenseConfig(keep=keep))
    hits = index.search(queries, 7)
    learned = Dense(queries.values.clone().requires_grad_())
    for other in (plain.search(queries, 7), index.search(learned, 7)):
        np.testing.assert_array_equal(other.rows, hits.rows)
        np.testing.assert_array_equal(other.scores, hits.scores)
    for one in (learned, queries.to(dtype=torch.float64)):
        np.testing.assert_array_equal(index.rescore(one, hits.rows), index.rescore(queries, hits.rows))
    half = queries.to(dtype=torch.bfloat16)
    np.testing.assert_array_equal(
        index.rescore(half, hits.rows), index.rescore(half.to(dtype=torch.float32), hits.rows)
    )


@pytest.mark.parametrize("size", [1e-25, 1e-18, 1e15])
def test_a_cosine_does_not_depend_on_the_length_of_a_query(tmp_path: Path, size: float) -> None:
    """The squares of its numbers may vanish."""
    index = build(tmp_path / "index", vectors(500), DenseConfig(keep="float32", metric="cosine"))
    queries = vectors(3, 5)
    scaled = Dense(queries.values * size)
    expected = index.search(queries, 7)
    for number in range(3):
        alone = index.search(scaled[number : number + 1], 7)
        np.testing.assert_array_equal(alone.rows[0], expected.rows[number])
        np.testing.assert_allclose(alone.scores[0], expected.scores[number], rtol=1e-5)


def test_codes_stand_for_vectors_that_everything_returns(tmp_path: Path) -> None:
    data, queries = vectors(700), vectors(9, 5)
    index = build(tmp_path / "index", data, DenseConfig(keep="none"))
    kept = index.representations(np.arange(700))
    assert isinstance(kept, Dense)
    error = (kept.values - data.values).norm(dim=1) / data.values.norm(dim=1)
    assert 0 < error.mean() < 0.1
    assert index.store.rows("values.bin") == 0
    waiting = vectors(15, 3)
    index.add(waiting)  # they wait for the next finish as they are
    mixed = index.representations([703, 5, 700, 0, 699])
    assert isinstance(mixed, Dense)
    torch.testing.assert_close(mixed.values[[0, 2]], waiting.values[[3, 0]], rtol=0, atol=0)
    torch.testing.assert_close(mixed.values[[1, 3, 4]], kept.values[[5, 0, 699]], rtol=0, atol=1e-5)
    hits = index.search(queries, 7)
    exact = score(queries, Dense(torch.cat([kept.values, waiting.values]))).numpy()
    np.testing.assert_allclose(hits.scores, np.take_along_axis(exact, hits.rows, 1), atol=1e-4)


@pytest.mark.parametrize("keep", ["none", "int8"])
def test_a_compaction_copies_codes(tmp_path: Path, keep: str, small_limits: Callable[..., None]) -> None:
    data = vectors(900)
    index = build(tmp_path / "index", data[:600], DenseConfig(keep=keep))
    index.add(data[600:])
    index.remove(np.arange(0, 880, 3))
    rows = np.flatnonzero(index.live)
    before, lists = index.representations(rows).arrays()["values"], index.stats()["lists"]
    small_limits(dense_scan=20, dense_scan_per_hit=1, dense_points=8, compact_bytes=1 << 13)
    compact(tmp_path / "index")
    again = open_index(Store.open(tmp_path / "index"))
    after = again.representations(np.arange(len(rows))).arrays()["values"]
    uncoded = rows >= 600  # they had no codes yet
    np.testing.assert_array_equal(after[~uncoded], before[~uncoded])
    assert again.stats()["lists"] == lists
    assert again.stats()["covered"] == len(rows)
    assert recall(again, data[rows]) > 0.9


def test_codes_of_another_segment_are_an_error(tmp_path: Path) -> None:
    index = build(tmp_path / "index", vectors(300), DenseConfig(keep="none"))
    with index.store.update():
        segments = index.store.meta["index"]["segments"]
        segments[0]["fields"]["rows"][2] = [299]
    again = open_index(Store.open(tmp_path / "index"))
    for use in (lambda: again.search(vectors(2), 3), lambda: again.representations([0])):
        with pytest.raises(CorruptError):
            use()


def test_probes_may_be_changed_at_any_time(tmp_path: Path) -> None:
    data = vectors(2000)
    index = build(tmp_path / "index", data, DenseConfig(probes=1, candidates=10))
    few = recall(index, data)
    index.config = index.config.model_copy(update={"probes": 100, "candidates": 100})
    assert few < recall(index, data) > 0.98


def test_hits_for_a_thousand_and_under_any_filter(tmp_path: Path) -> None:
    data, queries = vectors(2000), vectors(3, 5)
    index = build(tmp_path / "index", data, DenseConfig(keep="float32"))
    hits = index.search(queries, 1000)
    assert (hits.rows >= 0).all()
    for share in (0.002, 0.02, 0.3):
        allowed = np.random.default_rng(1).random(2000) < share
        hits = index.search(queries, 5, allowed)
        count = min(5, allowed.sum())
        assert allowed[hits.rows[:, :count]].all()
        assert (hits.rows[:, count:] == -1).all()


def test_vectors_that_float32_cannot_square_are_scanned(tmp_path: Path) -> None:
    data = Dense(vectors(100).values * 1e20)
    index = build(tmp_path / "index", data, DenseConfig(keep="float32"))
    assert index.stats()["covered"] == 0
    queries = Dense(torch.eye(3, DIM))
    best = score(queries, data).argmax(1)
    assert index.search(queries, 1).rows[:, 0].tolist() == best.tolist()


def test_vectors_that_are_too_wide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="up to 4096 dimensions, got 5000; choose"):
        build(tmp_path / "index", Dense(torch.ones(2, 5000)), DenseConfig())


def test_a_damaged_rotation_is_an_error(tmp_path: Path) -> None:
    index = build(tmp_path / "index", vectors(100), DenseConfig())
    (file,) = (tmp_path / "index").glob("rotation_order.*")
    content = np.fromfile(file, np.int32)
    content[0] = 1 << 20
    file.write_bytes(content.tobytes())
    with pytest.raises(CorruptError, match="checksum"):
        Store.open(tmp_path / "index")
    again = open_index(Store.open(tmp_path / "index", verify=False))
    with pytest.raises(CorruptError, match="order"):
        again.search(vectors(2), 3)
    assert len(index) == 100


@pytest.mark.parametrize(("keep", "bits"), [("float16", 2), ("int8", 4), ("none", 2)])
def test_codes_of_more_bits(tmp_path: Path, keep: str, bits: int) -> None:
    data, config = vectors(700), DenseConfig(keep=keep, bits=bits)
    index = build(tmp_path / "index", data[:600], config)
    index.add(data[600:])
    index.finish()
    assert (index.stats()["covered"], index.config.bits) == (700, bits)
    assert recall(index, data) > (0.5 if keep == "none" else 0.95)
    fewer = build(tmp_path / "fewer", data[:600], DenseConfig(keep=keep, bits=4 if keep == "none" else 1))
    assert (fewer.stats()["bytes"] < index.stats()["bytes"]) == (keep != "none")
    reopened = open_index(Store.open(tmp_path / "index"))
    reopened.config = config.model_copy(update={"bits": 4 if bits == 2 else 2})
    with pytest.raises(CorruptError, match="a segment is of other rows or codes"):
        reopened.search(vectors(2, 5), 3)


def test_one_bit_stands_for_no_vector() -> None:
    with pytest.raises(
        ConfigError, match="bits is 1, but with keep 'none' codes stand for vectors; expected 2 or 4"
    ):
        DenseConfig(keep="none", bits=1)
