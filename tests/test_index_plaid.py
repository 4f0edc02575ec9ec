"""What is particular to plaid and muvera: the codec, growth, resumed passes, effort, devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from irkit_kernels.residual_maxsim import train_codebook

import irkit.index.clustering
from irkit import Dense, Model, MultiVector, Ragged, Retriever, Sparse, score
from irkit.errors import BadValueError, ConfigError, CorruptError
from irkit.index import (
    AutoConfig,
    DenseConfig,
    FaissConfig,
    FlatConfig,
    Hits,
    Index,
    InvertedConfig,
    Limits,
    MuveraConfig,
    PlaidConfig,
    Store,
    compact,
    create_index,
    open_index,
    use_limits,
)
from irkit.index.clustering import (
    build_lists,
    centroid_count,
    fit_tokens,
    make_hubs,
    read_lists,
    sample_positions,
    train_centroids,
    write_lists,
)
from irkit.index.muvera import Encoder
from irkit.index.plaid import Plaid
from irkit.index.plaid_search import CpuSearch, TensorSearch, pack, plan_search
from irkit.index.topk import TopK

DIM = 32
SMALL = Limits(plaid_uncompressed=256, plaid_scan=16)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with use_limits(SMALL):
        yield


def texts(n: int, seed: int, topics: int = 30) -> MultiVector:
    """Documents of 5 to 20 tokens, near some of their topic's 12 prototypes; length 1."""
    space, rng = np.random.default_rng(99), np.random.default_rng(seed)
    prototypes = space.standard_normal((topics, 12, DIM))
    lengths = rng.integers(5, 21, n)
    topic = np.repeat(rng.integers(0, topics, n), lengths)
    tokens = prototypes[topic, rng.integers(0, 12, len(topic))]
    tokens = tokens + 0.7 * rng.standard_normal((len(topic), DIM))
    values = torch.nn.functional.normalize(torch.tensor(tokens, dtype=torch.float32))
    return MultiVector(Ragged(values, torch.tensor(lengths)))


def build(path: Path, pieces: list[MultiVector], **options: Any) -> Index:
    with Store.build(path) as store:
        index = create_index(store, {"kind": "plaid"} | options)
        for piece in pieces:
            index.add(piece)
        index.finish()
        store.publish()
    return open_index(Store.open(path))


def recall(index: Index, queries: MultiVector, data: MultiVector, k: int = 10) -> float:
    truth = score(queries, data).topk(k).indices.numpy()
    rows = index.search(queries, k).rows
    return float(np.mean([len(set(a) & set(b)) / k for a, b in zip(rows, truth, strict=True)]))


def test_a_token_is_closer_the_more_bits_it_has(tmp_path: Path) -> None:
    data, errors = texts(300, 0), []
    for nbits in (1, 2, 4, 8):
        index = build(tmp_path / str(nbits), [data], nbits=nbits)
        kept = index.representations(np.arange(300)).tokens.values
        errors.append(float((kept - data.tokens.values).square().sum(1).mean()))
        assert index.stats()["nbits"] == nbits
    residual = (data.tokens.values - nearest(index, data)).square().sum(1).mean()
    # levels of each number alone leave .3634, .1175, .0095 of a normal variable (Max 1960, table I)
    for found, bound in zip(errors, (0.3, 0.08, 0.0065, 0.0004), strict=True):
        assert found < bound * residual


@pytest.mark.parametrize("length", [1e-3, 0.05, 10.0, 1e3])
def test_tokens_of_any_length_are_kept_and_found_as_those_of_length_1(length: float, tmp_path: Path) -> None:
    def measured(scale: float) -> tuple[float, float]:
        values = scale * data.tokens.values
        index = build(tmp_path / str(scale), [MultiVector(data.tokens.with_values(values))])
        kept = index.representations(np.arange(len(data))).tokens.values
        return float((kept - values).norm() / values.norm()), recall(index, queries, data)

    data, queries = texts(600, 0), texts(100, 1)
    (error, found), (usual_error, usual_found) = measured(length), measured(1.0)
    assert error < 1.05 * usual_error
    assert found > usual_found - 0.02


def test_centroids_that_are_added_are_as_long_as_the_first(tmp_path: Path) -> None:
    data = MultiVector(texts(300, 1, topics=5).tokens.with_values(20 * texts(300, 1, topics=5).tokens.values))
    index = build(tmp_path / "index", [data])
    first = index.stats()["centroids"]
    index.add(texts(600, 2))
    index.finish()
    lengths = np.linalg.norm(index.store.read("centroids.bin").astype(np.float32), axis=1)
    assert len(lengths) > first
    np.testing.assert_allclose(lengths, 20, rtol=2e-3)


def test_hubs_have_length_1_whatever_the_length_of_centroids() -> None:
    rng = np.random.default_rng(0)
    distinct = 8 * np.eye(24, dtype=np.float32)[rng.integers(0, 12, 2048)]  # many hubs get no centroid
    vectors, near = make_hubs(distinct)
    assert len(vectors) == near.shape[0] == math.isqrt(32 * 2048)
    np.testing.assert_allclose(np.linalg.norm(vectors.astype(np.float32), axis=1), 1, atol=2e-3)


def test_a_build_that_was_killed_before_its_lists_is_searched_as_it_is(tmp_path: Path) -> None:
    def stop_at_lists(stage: str, count: int, total: int | None) -> None:
        if stage == "listing":
            raise KeyboardInterrupt

    data = texts(600, 0)
    with Store.build(tmp_path / "index", key=1) as store:
        index = create_index(store, "plaid")
        index.add(data)
        with pytest.raises(KeyboardInterrupt):
            index.finish(stop_at_lists)
        assert index.stats()["covered"] == 600
        assert index.search(data[:2], 3).rows[:, 0].tolist() == [0, 1]


@pytest.mark.parametrize("shape", [(16,), (64, 4), (16, 17)])
def test_residuals_of_an_earlier_version_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    index = build(tmp_path / "index", [texts(300, 0)])
    with index.store.update():
        index.store.drop("codebook.bin")
        index.store.append("codebook.bin", np.zeros(shape, np.int8))
    opened = open_index(Store.open(tmp_path / "index"))
    for use in (lambda: opened.search(texts(1, 1), 3), lambda: opened.representations(np.arange(3))):
        with pytest.raises(CorruptError, match=r"earlier version coded its residuals, or .* rebuild"):
            use()


def nearest(index: Index, data: MultiVector) -> torch.Tensor:
    centroids = torch.from_numpy(index.store.read("centroids.bin").astype(np.float32))
    return centroids[(data.tokens.values @ centroids.T).argmax(1)]


def test_bytes_of_a_token(tmp_path: Path) -> None:
    data = texts(300, 0)
    for nbits in (1, 2, 4, 8):
        store = build(tmp_path / str(nbits), [data], nbits=nbits).store
        total = sum(store.sizes()[name] for name in ("codes.bin", "coefficients.bin", "residuals.bin"))
        assert total == len(data.tokens.values) * (2 + 4 + DIM * nbits // 8)
        assert store.rows("values.bin") == 0


def test_ten_additions_are_as_good_as_one_build(tmp_path: Path) -> None:
    """Half of the topics come only later."""
    early, late = texts(600, 1, topics=15), texts(1200, 2, topics=60)
    pieces = [early, *(late[start : start + 120] for start in range(0, 1200, 120))]
    data = MultiVector(Ragged.concat([piece.tokens for piece in pieces]))
    queries = texts(500, 3, topics=60)
    index = build(tmp_path / "grown", pieces[:1], nbits=2)
    first = index.stats()["centroids"]
    for piece in pieces[1:]:
        index.add(piece)
        index.finish()
    rebuilt = build(tmp_path / "rebuilt", pieces, nbits=2)
    assert index.stats()["centroids"] > 1.2 * first
    assert index.stats()["covered"] == rebuilt.stats()["covered"] == len(data)
    assert recall(index, queries, data) >= recall(rebuilt, queries, data) - 0.01


def test_old_rows_stay_when_centroids_are_added(tmp_path: Path) -> None:
    index, queries = build(tmp_path / "index", [texts(300, 1, topics=5)]), texts(5, 3)
    before = index.representations(np.arange(300)).tokens.values
    index.search(queries, 10)  # so that there are packed centroids of before
    index.add(texts(900, 2))
    index.finish()
    assert torch.equal(index.representations(np.arange(300)).tokens.values, before)
    again = open_index(Store.open(tmp_path / "index")).search(queries, 10)
    assert np.array_equal(index.search(queries, 10).rows, again.rows)


def test_compaction_keeps_what_is_compressed_as_it_is(tmp_path: Path) -> None:
    index = build(tmp_path / "index", [texts(300, 1)], nbits=1)
    rows = index.add(texts(10, 2))
    index.remove([*range(0, 300, 3), rows[4]])
    live = np.flatnonzero(index.live)
    kept, queries = index.representations(live).tokens, texts(20, 3)
    before = index.search(queries, 10)
    compact(tmp_path / "index")
    index = open_index(Store.open(tmp_path / "index"))
    assert index.stats()["covered"] == 200
    assert torch.equal(index.representations(np.arange(len(live))).tokens.values, kept.values)
    np.testing.assert_array_equal(live[index.search(queries, 10).rows], before.rows)


def test_tokens_that_are_kept_give_exact_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, queries = texts(900, 0), texts(40, 1)
    halves = MultiVector(data.tokens.with_values(data.tokens.values.half().float()))
    truth = score(queries, halves)
    best = truth.topk(5).indices.numpy()
    found = {}
    for keep in (False, True):
        path = tmp_path / str(keep)
        build(path, [data[:600]], nbits=1, keep_tokens=keep)
        index = open_index(Store.open(path))
        index.add(data[600:])
        index.remove([3, 700])
        index.finish()
        compact(path)  # renumbers the rows behind those that were removed
        index = open_index(Store.open(path))
        assert index.stats()["covered"] == len(index) == 898
        hits = index.search(queries, 5)
        rows = hits.rows + (hits.rows >= 3) + (hits.rows >= 699)
        found[keep] = np.mean(
            [len(set(a) & set(b)) for a, b in zip(rows.tolist(), best.tolist(), strict=True)]
        )
        if keep:
            np.testing.assert_allclose(hits.scores, truth.gather(1, torch.tensor(rows)), rtol=1e-5)
    assert found[False] < 4.7 < 4.95 < found[True]


def test_codes_are_widened_when_centroids_are_many(tmp_path: Path) -> None:
    data = texts(900, 1)
    index = build(tmp_path / "index", [data[:300]])
    index.store.limits = replace(SMALL, narrow=index.stats()["centroids"])
    kept = index.representations(np.arange(300)).tokens.values
    index.add(data[300:])
    index.finish()
    assert index.store.read("codes.bin").dtype == np.int32
    assert torch.equal(index.representations(np.arange(300)).tokens.values, kept)
    assert recall(index, texts(50, 5), data) > 0.8


@pytest.mark.parametrize("keep", [False, True])
def test_both_passes_of_a_build_go_on_where_they_stopped(tmp_path: Path, keep: bool) -> None:
    data, stages = texts(300, 0), list[tuple[str, int, int | None]]()
    limits = replace(SMALL, plaid_block=500)

    def resume(stop: tuple[str, int] | None = None) -> None:
        """Build, or go on with a build, until so many calls have told of a stage."""
        stages.clear()

        def report(*told: Any) -> None:
            stages.append(told)
            if stop and [name for name, *_ in stages].count(stop[0]) == stop[1]:
                raise KeyboardInterrupt

        with use_limits(limits), Store.build(tmp_path / "index", key=1) as store:
            index = create_index(store, {"kind": "plaid", "keep_tokens": keep})
            if not len(index):
                index.add(data)
            index.finish(report)
            store.publish()

    for stop in (("compressing", 1), ("compressing", 3)):
        with pytest.raises(KeyboardInterrupt):
            resume(stop)
        assert (stages[0][0] == "training") == (stop[1] == 1)
        with Store.build(tmp_path / "index", key=1) as store:  # searched as it is, exactly
            index = open_index(store)
            rows = index.search(data[:5], 3).rows
            assert (rows == score(data[:5], data).topk(3).indices.numpy()).all()
    resume()
    assert stages[0][0] == "compressing"
    assert stages[0][1] > 0
    assert len(stages) > 4
    assert sum(count for name, count, _ in stages if name == "compressing") == stages[0][2] == 300
    whole = build(tmp_path / "whole", [data], keep_tokens=keep).search(data[:20], 10)
    hits = open_index(Store.open(tmp_path / "index")).search(data[:20], 10)
    np.testing.assert_array_equal(hits.rows, whole.rows)
    np.testing.assert_array_equal(hits.scores, whole.scores)


def ranked(hits: Hits) -> list[dict[int, float]]:
    return [
        dict(zip(*pair, strict=True)) for pair in zip(hits.rows.tolist(), hits.scores.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    ("more", "nbits"),
    [(9, 1), (400, 4), *(pytest.param(*values, marks=pytest.mark.slow) for values in ((9, 4), (400, 1)))],
)
def test_tensors_rank_as_cpu_kernels_do(tmp_path: Path, nbits: int, more: int) -> None:
    data, queries = texts(300, 0), texts(6, 1)
    index = build(tmp_path / "index", [data], nbits=nbits)
    queries.tokens.values[3] = 0
    assert isinstance(index, Plaid)
    arrays = index.arrays()
    cpu = CpuSearch(arrays, pack(arrays.centroids, None))
    searches = cpu, TensorSearch(arrays, torch.device("cpu"))
    filters = ~np.isin(np.arange(300), [3, 5, 8]), np.random.default_rng(0).random(300) < 0.5
    for options, k in itertools.product(({"candidates": 20}, {"candidates": 400, "nprobe": 3}), (1, 10, 400)):
        config = index.config.model_copy(update=options)
        for allowed in filters:
            budget = plan_search(config, SMALL, k, allowed, index.listed)._replace(ranked=k + more)
            found = []
            for search in searches:
                best = TopK(len(queries), k)
                best.push_pairs(*search(queries.tokens, budget, allowed))
                found.append(best.hits())
            kernels, hits = found
            np.testing.assert_allclose(hits.scores, kernels.scores, atol=1e-4)
            for one, other in zip(ranked(hits), ranked(kernels), strict=True):
                assert one == pytest.approx(other, abs=1e-4)  # equal scores may come in either order


@pytest.mark.parametrize("options", [{}, {"nprobe": 3, "candidates": 20}, {"candidates": 400}])
def test_a_block_of_a_search_waits_for_the_device_twice(
    tmp_path: Path, options: dict[str, Any], record_dispatch: Any
) -> None:
    """Once for the number of documents found, once for the result; all else is queued."""
    index, queries = build(tmp_path / "index", [texts(900, 0)], **options), texts(8, 1)
    assert isinstance(index, Plaid)
    expected = index.search(queries, 10)
    arrays = index.arrays()
    search = TensorSearch(arrays, record_dispatch.device)
    budget = plan_search(index.config, SMALL, 10, arrays.filled, index.listed)
    assert budget.nprobe
    record_dispatch.clear()
    scores, rows = search(queries.tokens, budget, arrays.filled)
    assert len(record_dispatch.waits) <= 2, record_dispatch.waits
    assert not [copy for copy in record_dispatch.pageable if "to the device" in copy]
    assert {"triton:residual_probe", "triton:residual_maxsim"} <= set(record_dispatch.operations)
    np.testing.assert_allclose(scores[:, :10], expected.scores, atol=1e-4)
    np.testing.assert_array_equal(rows[:, :10], expected.rows)


def test_queries_without_tokens_score_nothing_with_everything(tmp_path: Path) -> None:
    index = build(tmp_path / "index", [texts(300, 0)])
    empty = MultiVector(Ragged(torch.empty(0, DIM), torch.zeros(2, dtype=torch.int64)))
    hits = index.search(empty, 3)
    assert (hits.rows.tolist(), hits.scores.tolist()) == ([[0, 1, 2]] * 2, [[0, 0, 0]] * 2)
    mixed = MultiVector(Ragged.concat([empty.tokens, texts(1, 1).tokens]))
    np.testing.assert_array_equal(index.search(mixed, 3).rows[2:], index.search(mixed[2:], 3).rows)


def test_more_candidates_find_more(tmp_path: Path) -> None:
    data, queries = texts(2000, 0), texts(100, 1)
    index = build(tmp_path / "index", [data])
    found = []
    for nprobe, candidates in ((1, 14), (2, 50), (50, 2000)):
        index.config = index.config.model_copy(update={"nprobe": nprobe, "candidates": candidates})
        found.append(recall(index, queries, data))
    assert found == sorted(found)
    assert found[-1] > found[0]
    kept = index.representations(np.arange(2000))
    assert recall(index, queries, kept) > 0.999  # all that is there


@pytest.mark.parametrize("dim", [1, 7, 20, 130])
def test_any_width(tmp_path: Path, dim: int) -> None:
    rng = np.random.default_rng(dim)
    values = torch.from_numpy(rng.standard_normal((900, dim), dtype=np.float32))
    data = MultiVector(Ragged(values, torch.full((300,), 3)))
    index = build(tmp_path / "index", [data])
    hits = index.search(data[:20], 300)
    truth = score(data[:20], index.representations(np.arange(300))).numpy()
    assert (np.sort(hits.rows, axis=1) == np.arange(300)).all()
    np.testing.assert_allclose(hits.scores, np.take_along_axis(truth, hits.rows, 1), rtol=1e-5, atol=1e-4)


def test_zeros_duplicates_and_single_tokens(tmp_path: Path) -> None:
    values = torch.zeros(600, DIM)
    values[100:200, 0] = 1
    values[200:, :] = torch.nn.functional.normalize(torch.ones(1, DIM))
    data = MultiVector(Ragged(values, torch.ones(600, dtype=torch.int64)))
    index = build(tmp_path / "index", [data])
    hits = index.search(data[[150, 300]], 300)
    assert (hits.rows[0, :100] == np.arange(100, 200)).all()
    assert (hits.rows[1] == np.arange(200, 500)).all()
    np.testing.assert_allclose(hits.scores[:, :100], 1, atol=2e-3)
    assert (index.representations(np.arange(100)).tokens.values == 0).all()


def test_a_document_without_tokens_is_rescored_behind_compressed_ones(tmp_path: Path) -> None:
    data = texts(300, 0)
    empty = MultiVector(Ragged(torch.empty(0, DIM), torch.tensor([0])))
    index = build(tmp_path / "index", [data, empty])
    assert "values.bin" not in index.store.sizes()
    rows = np.array([[300, 300], [300, 7]])
    scores = index.rescore(data[[7, 8]], rows)
    assert np.isneginf(scores[rows == 300]).all()
    assert np.isfinite(scores[1, 1])
    assert np.isneginf(index.rescore(data[[7]], np.array([[300]]))).all()


def test_huge_values_are_refused(tmp_path: Path) -> None:
    index = build(tmp_path / "index", [texts(300, 0)])
    for value in (1e5, -65520.0):  # float16 rounds both to infinity
        with pytest.raises(BadValueError, match="65504"):
            index.add(MultiVector(Ragged(torch.full((1, DIM), value), torch.tensor([1]))))
    assert len(index) == 300
    index.add(MultiVector(Ragged(torch.full((1, DIM), -65519.0), torch.tensor([1]))))
    assert index.representations(np.array([300])).tokens.values.min() == -65504


def test_what_does_not_fit_together_is_noticed_when_searched(tmp_path: Path) -> None:
    index = build(tmp_path / "index", [texts(300, 0)])
    lengths = next((tmp_path / "index").glob("lengths.*"))
    content = np.fromfile(lengths, np.int64)
    content[0] += 1
    content.tofile(lengths)
    with pytest.raises(CorruptError):
        Store.open(tmp_path / "index")
    index = open_index(Store.open(tmp_path / "index", verify=False))
    with pytest.raises(CorruptError, match="do not fit"):
        index.search(texts(1, 1), 3)


@pytest.mark.gpu
def test_a_gpu_finds_what_the_cpu_finds(tmp_path: Path) -> None:
    index, queries = build(tmp_path / "index", [texts(3000, 0)], device="gpu"), texts(20, 1)
    found = index.search(queries, 10)
    index.config = PlaidConfig(device="cpu")
    expected = index.search(queries, 10)
    np.testing.assert_allclose(found.scores[:, 0], expected.scores[:, 0], rtol=1e-4)
    assert np.mean([np.isin(a, b).mean() for a, b in zip(found.rows, expected.rows, strict=True)]) >= 0.95


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="torch finds none"), Store.build(tmp_path / "index") as store:
        create_index(store, {"kind": "plaid", "device": "gpu"}).add(texts(0, 0))
    index = build(tmp_path / "index", [texts(300, 0)])
    index.config = PlaidConfig(device="gpu")
    with pytest.raises(ConfigError, match="torch finds none"):
        index.search(texts(1, 1), 3)
    index.config = PlaidConfig()
    assert index.search(texts(1, 1), 3).rows.min() >= 0


@pytest.mark.slow
def test_an_index_is_built_on_a_gpu_as_on_a_cpu(tmp_path: Path, gpu: Any) -> None:
    """With faiss-cpu, too: all of it is torch."""
    data, queries = texts(900, 0), texts(60, 1)
    index = build(tmp_path / "gpu", [data], device="gpu")
    assert {"argmax", "segment_reduce", "min"} <= set(gpu.operations)
    found = recall(index, queries, data)
    assert {"triton:residual_probe", "triton:residual_maxsim"} <= set(gpu.operations)
    kept = index.representations(np.arange(900)).tokens.values
    gpu.clear()
    expected = build(tmp_path / "cpu", [data], device="cpu")
    assert gpu.operations == []
    assert index.stats() | {"bytes": 0} == expected.stats() | {"bytes": 0}
    assert found >= recall(expected, queries, data) - 0.02
    error, usual = (
        float((each - data.tokens.values).square().sum())
        for each in (kept, expected.representations(np.arange(900)).tokens.values)
    )
    assert error < 1.02 * usual
    assert len(index.add(texts(100, 5))) == 100
    index.finish()  # more centroids, of tokens that those there fit worst
    assert index.stats()["covered"] == 1000


@pytest.mark.parametrize("count", [1, 40, 600])
def test_centroids_by_tensors_are_as_good_as_those_of_faiss(count: int) -> None:
    values = texts(900, 0).tokens.values.numpy()
    fit = {}
    for name in ("tensors", "faiss"):
        centroids = (
            irkit.index.clustering._tensor_centroids(torch.from_numpy(values), count, 0).numpy()
            if name == "tensors"
            else train_centroids(values, count, 1.0, 0, CPU, Limits()).astype(np.float32)
        )
        assert centroids.shape == (count, DIM)
        np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1, rtol=1e-3)
        fit[name] = float((values @ centroids.T).max(1).mean())
    assert fit["tensors"] > 0.98 * fit["faiss"]


def test_centroids_of_few_different_values_and_of_none() -> None:
    values = torch.eye(DIM)[:2].repeat(50, 1)
    centroids = irkit.index.clustering._tensor_centroids(values, 10, 0)
    assert torch.allclose((values @ centroids.T).amax(1), torch.ones(100), atol=1e-5)
    assert torch.equal(
        irkit.index.clustering._tensor_centroids(torch.zeros(9, DIM), 3, 0), torch.zeros(3, DIM)
    )


@pytest.mark.parametrize("empty", [False, True])
def test_documents_are_compressed_by_tensors_as_by_kernels(empty: bool) -> None:
    data, rng = texts(40, 0).tokens, np.random.default_rng(0)
    values, lengths = data.values.numpy(), data.lengths.numpy()
    if empty:
        lengths = np.concatenate([[0], lengths, [0]])
    centroids = values[rng.choice(len(values), 20, replace=False)]
    codes = (values @ centroids.T).argmax(1).astype(np.uint16)
    codebook = train_codebook(values - centroids[codes], 4)
    arrays = (values, lengths, centroids, codes, codebook)
    tokens, means, scales = fit_tokens(*arrays, CPU)
    _, packed, of_means, factors = irkit.index.clustering._tensor_fit(*map(torch.from_numpy, arrays))
    np.testing.assert_allclose(factors, scales, rtol=1e-4)
    assert (np.abs(of_means.numpy() - means.astype(np.int32)) <= 1).all()  # rounded either way
    assert np.mean((packed.numpy() == tokens.packed).all(1)) > 0.9


def test_a_gpu_without_memory_is_left_alone(tmp_path: Path, gpu: Any) -> None:
    index, queries = build(tmp_path / "index", [texts(300, 0)], device="cpu"), texts(3, 1)
    expected = index.search(queries, 5)
    gpu.free = 1 << 20
    index.config = PlaidConfig(device="auto")
    with pytest.warns(UserWarning, match=r"searching this index takes 0\.0 GB .* so the CPU does it"):
        found = index.search(queries, 5)
    np.testing.assert_array_equal(found.rows, expected.rows)
    assert index.search(queries, 5).rows.shape == (3, 5)  # nothing is told again
    index.config = PlaidConfig(device="gpu")
    with pytest.raises(ConfigError, match=r"has 0\.0 GB free; free some, or set device to 'auto'"):
        index.search(queries, 5)
    with pytest.warns(UserWarning, match="building this index takes 1.0 GB"):
        build(tmp_path / "other", [texts(300, 0)], device="auto")


def test_memory_that_runs_out_on_the_way_is_as_if_there_were_none(
    tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    index, queries = build(tmp_path / "index", [texts(300, 0)], device="cpu"), texts(3, 1)
    expected = index.search(queries, 5)
    monkeypatch.setattr(torch.Tensor, "amax", full)
    index.config = PlaidConfig(device="auto")
    with pytest.warns(UserWarning, match="so the CPU does it"):
        found = index.search(queries, 5)
    np.testing.assert_array_equal(found.rows, expected.rows)
    index.config = PlaidConfig(device="gpu")
    with pytest.raises(ConfigError, match="searching this index takes"):
        index.search(queries, 5)


def test_numbers_of_centroids() -> None:
    assert [centroid_count(tokens, 10**6) for tokens in (1, 100, 700_000, 3_500_000)] == [1, 12, 8320, 18688]
    assert centroid_count(10**9, 10**5) == 10**5 // 8 // 64 * 64
    assert centroid_count(10**9, 10**6) == 1 << 15


def test_samples_are_spread() -> None:
    assert sample_positions(5, 9, 0).tolist() == [0, 1, 2, 3, 4]
    places = sample_positions(1000, 10, 0)
    assert (places // 100 == np.arange(10)).all()


@pytest.mark.parametrize("narrow", [39, 40])
def test_lists_hold_each_document_once_per_centroid(narrow: int, tmp_path: Path) -> None:
    limits = Limits(plaid_list_block=50, narrow=narrow)
    rng = np.random.default_rng(0)
    ends, codes = np.cumsum(rng.integers(0, 30, 40)), rng.integers(0, 9, 2000).astype(np.uint16)
    offsets = build_lists(codes, ends, 9, limits)
    write_lists(tmp_path / "lists", codes, ends, offsets, limits)
    stored = np.fromfile(tmp_path / "lists", np.uint8)
    assert len(stored) == offsets[-1] * (2 if narrow == 40 else 4)
    found = np.split(read_lists(stored, int(offsets[-1])), offsets[1:-1])
    parts = np.split(codes, ends)[:-1]
    for centroid in range(9):
        assert found[centroid].tolist() == [row for row, part in enumerate(parts) if centroid in part]


def test_centroids_fit_as_well_as_those_of_one_clustering() -> None:
    values = texts(3000, 0).tokens.values.numpy()
    at_once = train_centroids(values, 400, 3.0, 0, CPU, Limits())
    in_steps = train_centroids(values, 400, 3.0, 0, CPU, Limits(plaid_direct=10))
    fits = [(values @ c.astype(np.float32).T).max(1).mean() for c in (at_once, in_steps)]
    assert fits[1] >= fits[0] - 0.015
    np.testing.assert_allclose(np.linalg.norm(in_steps.astype(np.float32), axis=1), 3, atol=6e-3)


def test_hubs_find_nearly_the_nearest_of_many_centroids(tmp_path: Path) -> None:
    data, queries = texts(3000, 0), texts(50, 1)
    whole = build(tmp_path / "whole", [data])
    with use_limits(replace(SMALL, plaid_hubs=128)):
        index = build(tmp_path / "index", [data])
        count = index.stats()["centroids"]
        assert index.store.read("hub_centroids.bin").shape == (
            math.isqrt(32 * count),
            4 * math.isqrt(32 * count),
        )
        assert whole.store.rows("hubs.bin") == 0
        errors = [
            float((each.representations(np.arange(3000)).tokens.values - data.tokens.values).square().sum())
            for each in (index, whole)
        ]
        assert errors[0] < 1.03 * errors[1]
        assert recall(index, queries, data) > recall(whole, queries, data) - 0.02
        # more centroids have new hubs
        index.add(texts(3000, 2, topics=60))
        index.finish()
        more = index.stats()["centroids"]
        assert index.store.rows("hubs.bin") == math.isqrt(32 * more) > math.isqrt(32 * count)
        # copies have the same
        hubs = [index.store.read(name).tolist() for name in ("hubs.bin", "hub_centroids.bin")]
        index.remove([0])
        compact(tmp_path / "index")
        index = open_index(Store.open(tmp_path / "index", verify=True))
        assert [index.store.read(name).tolist() for name in ("hubs.bin", "hub_centroids.bin")] == hubs
        # damaged ones are noticed
        for change in (lambda near: near + more, lambda near: near[1:]):
            with index.store.update():
                near = index.store.read("hub_centroids.bin").copy()
                index.store.drop("hub_centroids.bin")
                index.store.append("hub_centroids.bin", change(near))
            index.add(data[:30])  # which need no more centroids
            with pytest.raises(CorruptError, match="not fit together"):
                index.finish()


def test_encodings_follow_their_definition() -> None:
    config = MuveraConfig(repetitions=3, bits=2, projection=4)
    encoder, data = Encoder(DIM, config), texts(6, 0)
    queries, documents = encoder.queries(data.tokens), encoder.documents(data.tokens)
    assert queries.shape == documents.shape == (6, encoder.width) == (6, 3 * 4 * 4)
    planes, signs = encoder._planes.float().view(DIM, 3, 2), encoder._signs.float().view(DIM, 3, 4)
    for text, tokens in enumerate(data.tokens):
        for repetition, cell in itertools.product(range(3), range(4)):
            above = tokens @ planes[:, repetition] > 0
            cells = above[:, 0] * 1 + above[:, 1] * 2
            projected = tokens @ signs[:, repetition]
            part = slice((repetition * 4 + cell) * 4, (repetition * 4 + cell) * 4 + 4)
            torch.testing.assert_close(queries[text, part], projected[cells == cell].sum(0))
            distances = {other: bin(other ^ cell).count("1") for other in cells.tolist()}
            near = min(distances, key=lambda other: (distances[other], other))
            torch.testing.assert_close(documents[text, part], projected[cells == near].mean(0))


def test_inner_products_of_encodings_rank_as_maxsim_does() -> None:
    data, queries = texts(400, 0), texts(50, 1)
    truth = score(queries, data)
    found = []
    for repetitions in (2, 10, 40):
        encoder = Encoder(DIM, MuveraConfig(repetitions=repetitions))
        rough = encoder.queries(queries.tokens) @ encoder.documents(data.tokens).T
        found.append(np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(rough, truth, strict=True)]))
    assert found == sorted(found)


def test_muvera_refuses_what_it_cannot_code(tmp_path: Path) -> None:
    with Store.build(tmp_path / "index") as store:
        index = create_index(store, {"kind": "muvera", "repetitions": 33})
        with pytest.raises(ConfigError, match=r"'muvera' holds vectors of up to 4096 dimensions, got 4224"):
            index.add(texts(3, 0))
    with Store.build(tmp_path / "other") as store, pytest.raises(ConfigError, match="factory"):
        create_index(store, {"kind": "muvera", "factory": "pq"})


def test_auto_chooses_by_number_and_kind(tmp_path: Path) -> None:
    auto = AutoConfig(documents=10)
    dense, tokens, sparse = Dense(torch.ones(0, 4096)), texts(0, 0), Sparse.from_dense(torch.ones(0, 9))
    assert auto.choose(dense, 9) == auto.choose(tokens, 9) == FlatConfig()
    assert auto.choose(tokens, 10) == PlaidConfig()
    assert auto.choose(dense, 10) == DenseConfig()
    assert auto.choose(Dense(torch.ones(0, 4097)), 10) == FaissConfig(factory="hnsw")
    assert auto.choose(sparse, 9) == auto.choose(sparse, 10) == InvertedConfig()
    with Store.build(tmp_path / "index") as store, pytest.raises(ConfigError, match="name an index"):
        create_index(store, "auto")


@pytest.mark.parametrize("given", [dict, iter])
def test_auto_reads_ahead(tiny_bert: Path, tmp_path: Path, given: Any) -> None:
    notes = {str(number): f"note {number}" for number in range(12)}
    with pytest.warns(UserWarning, match="mean"):
        model = Model.from_pretrained(tiny_bert)
    for documents, kind in ((12, "dense"), (13, "flat")):
        source = notes if given is dict else ({"_id": name, "text": text} for name, text in notes.items())
        path, index = tmp_path / kind, {"kind": "auto", "documents": documents}
        retriever = Retriever.build(model, source, path, index=index)
        assert (retriever.stats()["kind"], len(retriever)) == (kind, 12)
