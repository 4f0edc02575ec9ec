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
    many = ShardedRetriever.load(tmp_path / "many")  # 2 actors
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
    for documents in (600, 1):  # the index is small, or large
        with use_limits(replace(SMALL, plaid_alone=documents)):
            many = ShardedRetriever.load(tmp_path / "many", replicas=2)
        for _ in range(4):
            many.search(QUERIES[:1], 10)
        assert calls(many) == ([1, 1, 1, 1] if documents == 600 else [2, 2, 2, 2])


def test_more_queries_than_an_actor_takes_at_once(ray: RayHere, tmp_path: Path) -> None:
    build(tmp_path / "many", 2).close()
    many = ShardedRetriever.load(tmp_path / "many")
    queries = many.model.encode_representation(real_vectors("tokens", 700, np.random.default_rng(4)), "query")
    with many.watch(False) as answers:
        found = many.index.search(queries, 5)
    assert answers.asked == 12  # 5 times 128 queries, then 60
    many.actors.close()
    assert all(map(np.array_equal, many.index.search(queries, 5), found))


def test_actors_share_no_queries_of_a_large_index(ray: RayHere, tmp_path: Path) -> None:
    build(tmp_path / "many", 3).close()
    found = ShardedRetriever.load(tmp_path / "many").search(QUERIES[:1], 10)
    with use_limits(replace(SMALL, plaid_alone=500)):
        many = ShardedRetriever.load(tmp_path / "many")
    with many.watch(False) as answers:
        assert many.search(QUERIES[:1], 10) == found
        assert many.search(QUERIES[:2], 10)[:1] == found
    assert answers.asked == 6  # shards


def test_a_dead_or_silent_actor_leaves_the_batch_to_the_shards(
    ray: RayHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = build(tmp_path / "one", 1)
    build(tmp_path / "many", 2).close()
    many = ShardedRetriever.load(tmp_path / "many", replicas=2)
    ray.kill(many.actors.replicas[0][0])
    for _ in range(2):  # each replica in turn
        assert many.search(QUERIES, 10) == one.search(QUERIES, 10)
    waited = []

    def get(answers: Any, timeout: float | None = None) -> Any:
        waited.append(timeout)
        if len(waited) == 1:
            raise TimeoutError
        return RayHere.get(ray, answers, timeout)

    monkeypatch.setattr(ray, "get", get)
    with many.watch(False) as answers:
        assert many.search(QUERIES, 10) == one.search(QUERIES, 10)
    assert waited[0] == 15  # half of the time, and then half of what is left for each replica
    assert 14 < waited[1] <= 15
    assert (answers.asked, answers.repeated > 1) == (4, True)


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
