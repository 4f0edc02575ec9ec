"""What is particular to inverted indexes: kept weights, segments, rows without hits, effort, BM25."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import irkit.index.inverted
from irkit import Ragged, Sparse, score
from irkit.core.representation import concat
from irkit.errors import BadValueError, ConfigError, CorruptError
from irkit.index import Index, InvertedConfig, Limits, Store, compact, create_index, open_index, use_limits
from irkit.index import bm25_index as bm25
from irkit.index.inverted import quantize

DIM = 2000
SMALL = Limits(inverted_unlisted=32)
DTYPES = ("float32", "float16", "uint16", "uint8")


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with use_limits(SMALL):
        yield


def texts(n: int, seed: int, topics: int = 20, length: int = 40) -> Sparse:
    """Documents of some ``length`` terms, half of them from their topic's 60, half by Zipf's law."""
    space, rng = np.random.default_rng(99), np.random.default_rng(seed)
    vocabulary = space.integers(0, DIM, (topics, 60))
    terms, weights = [], []
    for topic in rng.integers(0, topics, n):
        own = rng.choice(vocabulary[topic], length // 2)
        common = np.minimum(rng.zipf(1.3, rng.integers(1, length)), DIM) - 1
        terms.append(np.unique(np.concatenate([own, common])))
        weights.append(np.log1p(rng.lognormal(0, 1, len(terms[-1]))).astype(np.float32))
    return Sparse(Ragged.from_rows(terms), torch.from_numpy(np.concatenate(weights)), DIM)


def build(path: Path, pieces: list[Sparse], **options: Any) -> Index:
    with Store.build(path) as store:
        index = create_index(store, {"kind": "inverted", "mode": "exact"} | options)
        for piece in pieces:
            index.add(piece)
            index.finish()
        store.publish()
    return open_index(Store.open(path))


def tune(index: Index, **changes: Any) -> Index:
    index.config = index.config.model_copy(update=changes)
    return index


def check_exact(index: Index, queries: Sparse, k: int, keep: np.ndarray | None = None) -> None:
    """Scores are those of what is kept; nothing that is better by more than rounding is missed."""
    keep = index.live if keep is None else keep & index.live
    truth = score(queries, index.representations(np.arange(len(index)))).numpy()
    hits = index.search(queries, k, keep)
    count = min(k, int(keep.sum()))
    assert (hits.rows[:, :count] >= 0).all()
    assert (hits.rows[:, count:] == -1).all()
    assert keep[hits.rows[:, :count]].all()
    atol = 1e-6 * max(1, truth.max())  # float32: some 40 terms
    found = np.take_along_axis(truth, hits.rows[:, :count], 1)
    np.testing.assert_allclose(hits.scores[:, :count], found, rtol=0, atol=atol)
    best = -np.sort(-truth[:, keep], axis=1)[:, :count]
    np.testing.assert_allclose(hits.scores[:, :count], best, rtol=0, atol=atol)
    for rows, scores in zip(hits.rows, hits.scores, strict=True):
        assert len(set(rows[:count].tolist())) == count
        assert (np.lexsort((rows[:count], -scores[:count])) == np.arange(count)).all()


def test_a_segment_has_a_limit(tmp_path: Path) -> None:
    with use_limits(replace(SMALL, inverted_segment=100)):
        index = build(tmp_path / "index", [texts(250, 1), texts(40, 2), texts(60, 3)])
    bounds = [(about["start"], about["stop"]) for about in index.store.meta["index"]["segments"]]
    assert all(0 < stop - start <= 100 for start, stop in bounds)
    assert [stop for _, stop in bounds[:-1]] == [start for start, _ in bounds[1:]]
    assert (bounds[0][0], bounds[-1][1]) == (0, 350)
    check_exact(index, texts(8, 4), 12)


@given(
    st.lists(st.lists(st.floats(0, 60000, width=32), max_size=6), min_size=1, max_size=5),
    st.sampled_from(DTYPES),
)
def test_kept_weights_are_as_near_as_documented(rows: list[list[float]], dtype: str) -> None:
    lengths, weights = np.array([len(row) for row in rows]), np.float32(list(itertools.chain(*rows)))
    kept = quantize(weights, lengths, dtype)
    assert kept["weights"].dtype == dtype
    found = kept["weights"].astype(np.float64)
    if dtype.startswith("float"):
        assert (np.abs(found - weights) <= weights * 2.0**-11 + 2.0**-25).all()  # 0 of float32
        return
    found *= np.repeat(kept["scales"].astype(np.float64), lengths)
    most = np.repeat([max(row, default=0) for row in rows], lengths)
    step = most / np.iinfo(dtype).max
    assert (np.abs(found - weights) <= 0.5 * step * (1 + 1e-6) + 1e-38 + 2**-24 * most).all()


@pytest.mark.parametrize(("dtype", "nbytes"), [("float32", 4), ("float16", 2), ("uint16", 2), ("uint8", 1)])
@pytest.mark.parametrize(("dim", "wide"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_bytes_of_a_weight(tmp_path: Path, dtype: str, nbytes: int, dim: int, wide: int) -> None:
    data = Sparse(Ragged.from_rows([[0, dim - 1], [], [3]]), torch.tensor([1.0, 2.0, 3.0]), dim)
    store = (index := build(tmp_path / "index", [data], dtype=dtype)).store
    assert (store.sizes()["weights.bin"], store.sizes()["terms.bin"]) == (3 * nbytes, 3 * wide)
    kept = index.representations(np.array([2, 0, 1, 0]))
    assert [row.tolist() for row in kept.terms] == [[3], [0, dim - 1], [], [0, dim - 1]]
    torch.testing.assert_close(kept.weights, torch.tensor([3.0, 1, 2, 1, 2]), rtol=0, atol=2 / 255)
    each = 8 + 4 * (nbytes < 2 or dtype == "uint16")  # bytes of a row: its length, its scale
    assert index.stats()["bytes_per_weight"] == round(nbytes + wide + each, 2)  # 3 rows, 3 weights


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), k=st.integers(1, 30), sizes=st.lists(st.integers(0, 120), max_size=4))
def test_exact_search_of_segments_filters_and_removed_rows(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, seed: int, k: int, sizes: list[int]
) -> None:
    rng = np.random.default_rng(seed)
    pieces = [texts(size, seed + place) for place, size in enumerate([150, *sizes]) if size]
    index = build(tmp_path_factory.mktemp("index") / "index", pieces, dtype=dtype)
    queries = texts(4, seed + 9, length=12)
    check_exact(index, queries, k)
    check_exact(index, queries, k, rng.random(len(index)) < 0.4)
    index.remove(np.flatnonzero(rng.random(len(index)) < 0.3))
    check_exact(index, queries, k)
    check_exact(index, queries, len(index) + 5)


def test_rows_that_match_nothing_come_last_and_in_order(tmp_path: Path) -> None:
    terms = Ragged.from_rows([[5], [1, 7], [], [1], [2]] * 20)
    data = Sparse(terms, torch.ones(len(terms.values)), 10)
    index = build(tmp_path / "index", [data])
    assert index.stats()["covered"] == 100
    index.add(data[:5])  # are scanned
    queries = Sparse(Ragged.from_rows([[7], [], [9], [1]]), torch.tensor([2.0, 1, 1]), 10)
    index.remove([0, 6])
    hits = index.search(queries, 105)
    truth = score(queries, concat([data, data[:5]])).numpy()
    for rows, scores, line in zip(hits.rows, hits.scores, truth, strict=True):
        line[[0, 6]] = -np.inf
        order = np.argsort(-line, kind="stable")[:103]
        np.testing.assert_array_equal(rows, [*order, -1, -1])
        np.testing.assert_array_equal(scores[:103], line[order])
    few = index.search(queries, 3, np.arange(105) > 90)
    assert few.rows.tolist() == [[91, 96, 101], [91, 92, 93], [91, 92, 93], [91, 93, 96]]


def test_segments_fall_in_size_and_hold_what_one_build_holds(tmp_path: Path) -> None:
    data, queries = texts(1500, 1), texts(20, 2, length=12)
    whole = build(tmp_path / "whole", [data])
    pieces = [data[start : start + 50] for start in range(0, 1500, 50)]
    grown = build(tmp_path / "grown", pieces)
    assert whole.stats()["segments"] == 1
    sizes = [about["stop"] - about["start"] for about in grown.store.meta["index"]["segments"]]
    assert 1 < len(sizes) < 5
    assert all(before >= 4 * after for before, after in itertools.pairwise(sizes))
    assert sum(sizes) == grown.stats()["covered"] == 1500
    for keep in (None, np.random.default_rng(0).random(1500) < 0.3):
        one, other = (index.search(queries, 20, keep) for index in (whole, grown))
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-6)
        assert np.mean(one.rows == other.rows) > 0.99  # the others are equally good, but for rounding
    named = {entry["file"] for entry in manifest(grown)["arrays"].values()}
    assert {path.name for path in (tmp_path / "grown").iterdir()} == named | {"irkit.json", "irkit.lock"}


def manifest(index: Index) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((index.store.path / "irkit.json").read_bytes())
    return found


def test_few_rows_more_are_scanned_many_get_a_segment(tmp_path: Path) -> None:
    index = build(tmp_path / "index", [texts(200, 1)])
    for count, covered in ((32, 200), (1, 233)):
        index.add(texts(count, count))
        index.finish()
        assert index.stats()["covered"] == covered
        check_exact(index, texts(5, 3, length=12), 10)


@pytest.mark.parametrize("dtype", ["float16", "uint8"])
def test_effort_finds_more(tmp_path: Path, dtype: str) -> None:
    data, queries = texts(4000, 1, topics=100), texts(100, 2, topics=100, length=20)
    index = build(tmp_path / "index", [data], dtype=dtype)
    best = index.search(queries, 10)
    recalls = []
    for effort in (0.01, 0.2, 0.5, 0.99):
        hits = tune(index, mode="approximate", effort=effort).search(queries, 10)
        recalls.append(recall(hits.rows, best.rows))
        np.testing.assert_allclose(hits.scores, index.rescore(queries, hits.rows), rtol=1e-5)
    assert recalls == sorted(recalls)
    assert recalls[1] > 0.9
    assert recalls[-1] > 0.999
    again = open_index(Store.open(index.store.path))
    assert again.config.mode == "exact"  # searching differently does not change what is stored
    np.testing.assert_array_equal(again.search(queries, 10).rows, best.rows)


def test_many_documents_are_approximated_unless_a_filter_hides_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = build(tmp_path / "index", [texts(100, 1)], mode="auto", effort=0.3)
    find, efforts, queries = irkit.index.inverted.Searcher.find, [], texts(3, 2)

    def watched(self: Any, queries: Any, k: int, keep: Any = None, effort: Any = None) -> Any:
        efforts.append(effort)
        return find(self, queries, k, keep, effort)

    monkeypatch.setattr("irkit.index.inverted.Searcher.find", watched)
    for many in (100, 99):
        index.store.limits = replace(SMALL, inverted_exact=many)
        index.search(queries, 3)
        index.search(queries, 3, np.arange(100) < 50)
        index.search(queries, 3, np.arange(100) < 49)
    assert efforts == [None, None, None, 0.3, 0.3, None]


def recall(rows: np.ndarray, truth: np.ndarray) -> float:
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(rows, truth, strict=True)]))


def test_approximate_search_finds_k_where_there_are_k(tmp_path: Path) -> None:
    index = tune(build(tmp_path / "index", [texts(400, 1)]), mode="approximate", effort=0.1)
    queries = texts(10, 2, length=4)
    for k, keep in ((400, None), (50, np.random.default_rng(0).random(400) < 0.2)):
        hits = index.search(queries, k, keep)
        assert (hits.rows >= 0).all()
        assert all(len(set(row)) == k for row in hits.rows.tolist())
        np.testing.assert_allclose(hits.scores, index.rescore(queries, hits.rows), rtol=1e-5, atol=1e-6)


def test_queries_of_any_form(tmp_path: Path) -> None:
    data, queries = texts(200, 1), texts(3, 2, length=12)
    index = build(tmp_path / "index", [data], dtype="float32")
    best = index.search(queries, 10)
    twice = torch.stack([queries.weights, -queries.weights], 1)
    terms = torch.stack([queries.terms.values, queries.terms.values * 0], 1)
    strided = Sparse(Ragged(terms[:, 0], queries.terms.lengths), twice[:, 0], DIM)
    zeros = Sparse.from_dense(queries.to_dense())
    zeros = Sparse(
        Ragged.concat([zeros.terms, Ragged.from_rows([[5]])]), torch.cat([zeros.weights, torch.zeros(1)]), DIM
    )
    learnt = Sparse(queries.terms, queries.weights.clone().requires_grad_(), DIM)
    for other in (strided, learnt, zeros[:3], queries.to(dtype=torch.float64), zeros):
        hits = index.search(other, 10)
        np.testing.assert_array_equal(hits.rows[:3], best.rows)
        np.testing.assert_array_equal(hits.scores[:3], best.scores)
    assert hits.rows[3].tolist() == list(range(10))
    for one in range(3):
        np.testing.assert_array_equal(index.search(queries[one : one + 1], 10).rows[0], best.rows[one])
    allowed = np.zeros((200, 2), bool)
    allowed[::3, 0] = allowed[:, 1] = True
    check_exact(index, queries, 10, allowed[:, 0])
    for k in (0, "1", 2.0):
        with pytest.raises(BadValueError, match="expected a whole number of 1 or more"):
            index.search(queries, k)


@pytest.mark.parametrize("where", ["documents", "queries"])
def test_negative_weights_are_scanned(tmp_path: Path, where: str) -> None:
    data, queries = texts(300, 1), texts(5, 2, length=12)
    if where == "documents":
        data.weights[7] = -1
    else:
        queries.weights[::2] *= -1
    index = build(tmp_path / "index", [data], dtype="float32")
    assert index.stats()["covered"] == (0 if where == "documents" else 300)
    truth = score(queries, data)
    hits = index.search(queries, 10)
    np.testing.assert_array_equal(hits.scores, truth.topk(10).values.numpy())
    index.add(Sparse(data.terms, -data.weights, DIM)[:40])
    index.finish()
    check_exact(index, queries, 350)
    with pytest.raises(BadValueError, match="choose the dtype"):
        build(tmp_path / "other", [Sparse(data.terms, -data.weights, DIM)], dtype="uint8")


def test_weights_too_large_for_a_half(tmp_path: Path) -> None:
    data = Sparse(Ragged.from_rows([[1]]), torch.tensor([7e4]), DIM)
    for dtype in DTYPES:
        path = tmp_path / dtype
        if dtype == "float16":
            with pytest.raises(BadValueError, match="float32"):
                build(path, [data], dtype=dtype)
        else:
            assert build(path, [data], dtype=dtype).representations(np.array([0])).weights.item() == 7e4


@pytest.mark.parametrize("dtype", DTYPES)
def test_compaction_keeps_weights_as_they_are(tmp_path: Path, dtype: str) -> None:
    index = build(tmp_path / "index", [texts(300, 1), texts(20, 2)], dtype=dtype)
    index.remove(range(0, 320, 3))
    live, queries = np.flatnonzero(index.live), texts(10, 3, length=12)
    kept, before = index.representations(live), index.search(queries, 10)
    bytes_before = index.stats()["bytes"]
    compact(tmp_path / "index")
    index = open_index(Store.open(tmp_path / "index"))
    again = index.representations(np.arange(len(live)))
    assert torch.equal(again.terms.values, kept.terms.values)
    assert torch.equal(again.weights, kept.weights)
    assert index.stats()["covered"] == len(live)
    assert index.stats()["bytes"] < bytes_before
    after = index.search(queries, 10)
    np.testing.assert_array_equal(live[after.rows], before.rows)
    np.testing.assert_allclose(after.scores, before.scores, rtol=1e-6)


def test_a_segment_that_is_cut_short_is_noticed(tmp_path: Path) -> None:
    index = build(tmp_path / "index", [texts(100, 1)])
    with index.store.update():
        index.store.replace("segment_a.bin", lambda path: path.write_bytes(b"half"))
    with pytest.raises(CorruptError, match="too short"):
        index.search(texts(1, 2), 1)


def test_wrong_configurations() -> None:
    for wrong in ({"dtype": "int8"}, {"mode": "fast"}, {"effort": 0}, {"efort": 1}):
        with pytest.raises(ConfigError):
            InvertedConfig.parse({"kind": "inverted"} | wrong, "index")


# ---- BM25 ----


def counts(n: int, seed: int, dim: int = DIM) -> Sparse:
    data, rng = texts(n, seed), np.random.default_rng(seed)
    return Sparse(data.terms, torch.from_numpy(rng.geometric(0.6, len(data.weights)).astype(np.float32)), dim)


def build_counts(path: Path, kind: str, pieces: list[Sparse], **options: Any) -> Index:
    with Store.build(path) as store:
        index = create_index(store, {"kind": kind, "dtype": "float32"} | options)
        with store.update():
            bm25.begin(store, 1.2, 0.75)
            store.append(
                "vocabulary.txt", np.frombuffer(b"and so on\n" * 10_000, np.uint8)
            )  # as one that grows has it
        for piece in pieces:
            index.add(piece)
            index.finish()
        store.publish()
    return open_index(Store.open(path))


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_bm25_follows_what_comes_and_goes(tmp_path: Path, dtype: str) -> None:
    long = concat([counts(100, 5), counts(100, 6)])
    long = Sparse(long.terms, long.weights * 3, DIM)  # the mean length moves: segments are made anew
    pieces = [counts(300, 1), counts(40, 2), counts(10, 3), long]
    queries = texts(10, 4, length=12)
    flat, index = (
        build_counts(tmp_path / kind, kind, pieces, **options)
        for kind, options in (("flat", {}), ("inverted", {"mode": "exact", "dtype": dtype}))
    )
    apart = 0 if dtype == "float32" else 1 / 510  # of a weight: none is above 1
    wider = Sparse(Ragged.from_rows([[DIM], [DIM, 3]]), torch.tensor([2.0, 1, 1]), DIM + 1)
    more = Sparse(queries.terms, queries.weights, DIM + 1)
    for step in range(3):
        asked = queries if step < 2 else more
        one, other = (each.search(asked, 20) for each in (flat, index))
        most = apart * max(float(row.sum()) for row in Ragged(asked.weights, asked.terms.lengths))
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-6, atol=most)
        check_exact(index, asked, 20)
        rows = index.representations(np.arange(5)).weights
        torch.testing.assert_close(rows, flat.representations(np.arange(5)).weights, rtol=0, atol=apart)
        for each in (flat, index):
            each.remove(range(step, 550, 7))
            each.add(wider if step == 1 else counts(60, step, each.dim))
            each.finish()
    assert index.stats()["segments"] > 0
    compact(index.store.path)
    fresh = open_index(Store.open(index.store.path))
    one, other = fresh.search(more, 20), build_fresh(tmp_path / "fresh", fresh, dtype).search(more, 20)
    np.testing.assert_array_equal(one.rows, other.rows)
    np.testing.assert_array_equal(one.scores, other.scores)


def build_fresh(path: Path, index: Any, dtype: str) -> Index:
    """The same counts, added at once."""
    raw = index.stored_arrays(np.arange(len(index)))
    terms = Ragged(torch.from_numpy(raw["terms"].astype(np.int32)), torch.from_numpy(raw["lengths"]))
    data = Sparse(terms, torch.from_numpy(raw["weights"].astype(np.float32)), index.dim)
    return build_counts(path, "inverted", [data], mode="exact", dtype=dtype)


def test_terms_get_more_bytes_when_the_vocabulary_grows(tmp_path: Path) -> None:
    index = build_counts(tmp_path / "index", "inverted", [counts(50, 1)])
    before = index.representations(np.arange(50)).weights
    index.add(Sparse(Ragged.from_rows([[70_000]]), torch.ones(1), 70_001))
    index.add(Sparse(Ragged.from_rows([[3, 70_000]]), torch.ones(2), 70_001))
    assert index.store.read("terms.bin").dtype == np.uint32
    assert index.representations(np.array([50, 51])).terms.values.tolist() == [70_000, 3, 70_000]
    assert index.representations(np.arange(50)).weights.shape == before.shape
    check_exact(index, Sparse(Ragged.from_rows([[70_000], [3]]), torch.ones(2), 70_001), 10)


def test_terms_get_more_bytes_although_there_are_none(tmp_path: Path) -> None:
    empty = Sparse(Ragged.from_rows([[], []], dtype=torch.int32), torch.empty(0), 1)
    index = build_counts(tmp_path / "index", "inverted", [empty])
    index.add(Sparse(Ragged.from_rows([[70_000]]), torch.ones(1), 70_001))
    assert index.store.read("terms.bin").dtype == np.uint32
    assert index.representations(np.arange(3)).terms.values.tolist() == [70_000]


def test_counts_are_whole_numbers(tmp_path: Path) -> None:
    for wrong in (0.5, -1, 70_000):
        with pytest.raises(BadValueError, match="whole number"):
            build_counts(
                tmp_path / str(wrong),
                "inverted",
                [Sparse(Ragged.from_rows([[1]]), torch.tensor([float(wrong)]), 9)],
            )
