"""Actors that share a batch of queries find what one index finds, or leave the batch to the shards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_here import Actor, RayHere
from test_shards import real_vectors

from irkit import Retriever
from irkit.encoder_free import BM25
from irkit.errors import StorageError
from irkit.index import Limits, use_limits
from irkit.ray_engine import ShardedRetriever

SMALL = Limits(plaid_uncompressed=50, plaid_scan=8, plaid_candidates=20)


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with use_limits(SMALL):
        yield


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> RayHere:
    here = RayHere(cpus=2)
    monkeypatch.setitem(sys.modules, "ray", here)
    return here


def make(names: list[str], seed: int) -> list[dict[str, Any]]:
    rows = zip(names, real_vectors("tokens", len(names), np.random.default_rng(seed)), strict=True)
    return [
        {"_id": name, "text": "", "vector": row, "metadata": {"year": number % 5}}
        for number, (name, row) in enumerate(rows)
    ]


def build(folder: Path, shards: int) -> Retriever:
    documents = make([f"d{number}" for number in range(600)], 1)
    index = {"kind": "plaid", "centroids": 16, "device": "cpu"}
    return Retriever.build("vectors", documents, folder, index=index, shards=shards)


def calls(many: ShardedRetriever) -> list[int]:
    return [actor.calls for actors in many.actors.replicas for actor in actors]


QUERIES = real_vectors("tokens", 9, np.random.default_rng(2))


def test_actors_share_a_batch(ray: RayHere, tmp_path: Path) -> None:
    one = build(tmp_path / "one", 1)
    build(tmp_path / "many", 3).close()
    many = ShardedRetriever.load(tmp_path / "many", timeout=10_000)  # 2 actors
    for filter, k in ((None, 1), (None, 10), (None, 700), ({"year": {">": 1}}, 10), (["d3", "d9", "no"], 5)):
        for queries in (QUERIES, QUERIES[:2], QUERIES[:1]):
            before = sum(calls(many))
            with many.watch(False) as answers:
                assert many.search(queries, k, filter) == one.search(queries, k, filter)
            assert sum(calls(many)) - before == answers.asked == min(2, len(queries))
    assert min(calls(many)) > 10  # single queries go to the actors in turn
    # after changes of this process; settings of the search go along
    for retriever in (one, many):
        retriever.add(make([f"n{number}" for number in range(40)], 3))
        retriever.remove([f"d{number}" for number in range(0, 600, 7)])
        retriever.index.config = retriever.index.config.model_copy(update={"candidates": 64})
    assert many.search(QUERIES, 20) == one.search(QUERIES, 20)


def test_single_queries_go_to_all_replicas(ray: RayHere, tmp_path: Path) -> None:
    build(tmp_path / "many", 2).close()
    for most in (1 << 32, 0):  # the index is small, or large
        with use_limits(replace(SMALL, shared_bytes=most)):
            many = ShardedRetriever.load(tmp_path / "many", replicas=2)
        for _ in range(4):
            many.search(QUERIES[:1], 10)
        assert calls(many) == ([1, 1, 1, 1] if most else [2, 2, 2, 2])


def test_actors_get_as_many_queries_as_they_answer_in_time(ray: RayHere, tmp_path: Path) -> None:
    build(tmp_path / "many", 2).close()
    many = ShardedRetriever.load(tmp_path / "many", timeout=100)
    queries = many.model.encode_representation(real_vectors("tokens", 700, np.random.default_rng(4)), "query")
    with many.watch(False) as answers:
        found = many.index.search(queries, 5)
    assert answers.asked == 4  # 320 queries, then the others
    hurried = ShardedRetriever.load(tmp_path / "many", timeout=0.001)
    with hurried.watch(False) as answers:
        assert all(map(np.array_equal, hurried.index.search(queries[:40], 5), (each[:40] for each in found)))
    assert answers.asked > 10
    many.actors.close()
    assert all(map(np.array_equal, many.index.search(queries, 5), found))


@pytest.mark.parametrize(("kind", "single"), [("bm25", 1), ("dense", 1), ("flat", 3), ("muvera", 3)])
def test_queries_of_all_kinds_are_shared_but_single_ones_of_scans(
    ray: RayHere, tmp_path: Path, kind: str, single: int
) -> None:
    draw = np.random.default_rng(6)
    texts = [" ".join(f"w{number}" for number in line) for line in draw.zipf(1.5, (500, 20)) % 90]
    vectors = "tokens" if kind == "muvera" else "dense"
    contents = texts if kind == "bm25" else real_vectors(vectors, 500, draw)
    model, index = ("bm25", None) if kind == "bm25" else ("vectors", kind)
    for shards in (1, 3):
        documents = [(f"d{number}", content) for number, content in enumerate(contents[:400])]
        Retriever.build(model, documents, tmp_path / str(shards), index=index, shards=shards).close()
    one = Retriever.load(tmp_path / "1")
    many = ShardedRetriever.load(tmp_path / "3", timeout=10_000)  # 2 actors, which answer a batch at once
    for count, asked in ((1, single), (2, 2), (100, 2)):
        queries = contents[400 : 400 + count]
        with many.watch(False) as answers:
            assert many.search(queries, 10) == one.search(queries, 10)
        assert answers.asked == asked


def test_shards_search_with_another_formula(ray: RayHere, tmp_path: Path) -> None:
    texts = {f"d{number}": f"word{number % 7} " * (number % 5 + 1) + "rest" for number in range(60)}
    for shards in (1, 3):
        Retriever.build("bm25", texts, tmp_path / str(shards), shards=shards).close()
    one = Retriever.load(tmp_path / "1", BM25(k1=0.3, b=1))
    many = ShardedRetriever.load(tmp_path / "3", BM25(k1=0.3, b=1))
    with many.watch(False) as answers:
        assert many.search(["word1", "word2", "rest"], 20) == one.search(["word1", "word2", "rest"], 20)
    assert answers.asked == 3  # each actor would list the rows of all shards, in its memory


def test_actors_share_no_queries_of_a_large_index(ray: RayHere, tmp_path: Path) -> None:
    build(tmp_path / "many", 3).close()
    found = ShardedRetriever.load(tmp_path / "many").search(QUERIES[:1], 10)
    with use_limits(replace(SMALL, shared_bytes=500)):
        many = ShardedRetriever.load(tmp_path / "many")
    with many.watch(False) as answers:
        assert many.search(QUERIES[:1], 10) == found
        assert many.search(QUERIES[:2], 10)[:1] == found
    assert answers.asked == 6  # shards


def test_other_actors_take_the_queries_of_dead_ones(ray: RayHere, tmp_path: Path) -> None:
    found = build(tmp_path / "one", 1).search(QUERIES, 10)
    build(tmp_path / "many", 2).close()
    many = ShardedRetriever.load(tmp_path / "many", replicas=2, timeout=3)
    for actors in many.actors.replicas:
        ray.kill(actors[0])
    with many.watch(False) as answers:
        for _ in range(4):  # each actor in turn
            assert many.search(QUERIES, 10) == found
            assert many.search(QUERIES[:1], 10) == found[:1]
    assert (answers.asked, answers.repeated > 4) == (12, True)
    ray.kill(many.actors.replicas[1][1])
    assert all(many.search(QUERIES, 10) == found for _ in range(4))
    ray.kill(many.actors.replicas[0][1])
    with pytest.raises(StorageError, match="no answer of shard"):
        many.search(QUERIES, 10)


def test_the_next_actor_takes_the_queries_of_a_silent_one(ray: RayHere, tmp_path: Path) -> None:
    found = build(tmp_path / "one", 1).search(QUERIES, 10)
    build(tmp_path / "many", 3).close()
    many = ShardedRetriever.load(tmp_path / "many", timeout=3)  # 2 actors
    many.actors.replicas[0][0].silent = True
    with many.watch(False) as answers:
        for _ in range(2):  # each actor in turn
            assert many.search(QUERIES, 10) == found
            assert many.search(QUERIES[:1], 10) == found[:1]
    assert (answers.asked, answers.repeated) == (6, 2)
    many.actors.replicas[1][0].silent = True
    with pytest.raises(StorageError, match="no answer of shard-1-000, shard-1-001, shard-1-002"):
        many.search(QUERIES, 10)
    with many.watch(True) as answers:
        assert many.search(QUERIES, 10) == [[]] * len(QUERIES)
    assert len(answers.missing) == 3


def test_an_actor_that_cannot_show_the_state_leaves_the_batch_to_the_shards(
    ray: RayHere, tmp_path: Path
) -> None:
    build(tmp_path / "many", 2).close()
    many, other = ShardedRetriever.load(tmp_path / "many"), Retriever.load(tmp_path / "many")
    before = many.search(QUERIES, 10)
    other.remove([hits[0].id for hits in before if hits])
    after = other.search(QUERIES, 10)
    fresh = ShardedRetriever.load(tmp_path / "many")  # its actors know nothing else
    assert fresh.search(QUERIES, 10) == after != before
    asked = calls(many)
    assert many.search(QUERIES, 10) == before  # its actors still map what they had
    assert calls(many) == [number + 1 for number in asked]
    assert many.refresh()
    assert many.search(QUERIES, 10) == after
    other.add(make(["late"], 5))
    for actors in many.actors.replicas:
        for actor in actors:
            assert isinstance(actor, Actor)
            actor.instance._whole.store.refresh()  # as after a search of another process
    assert many.search(QUERIES, 10) == after
    assert many.refresh()
    assert many.search(QUERIES, 10) == other.search(QUERIES, 10)
