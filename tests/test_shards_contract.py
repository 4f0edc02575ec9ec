"""What every index promises holds for its shards: the contract of test_index_contract.py over 1, 2 and 5."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_index_contract import BACKENDS, SMALL, Backend, check_search, whole_numbers

from irkit.core.representation import Representation
from irkit.data import Document
from irkit.index import Store, WindowsConfig, compact, create_index, use_limits
from irkit.shards import (
    ShardedDocuments,
    ShardedIndex,
    ShardedStore,
    ShardedWindows,
    open_parts,
    open_store,
    reshard,
)

pytestmark = pytest.mark.slow


@pytest.fixture(params=BACKENDS, ids=lambda backend: f"{backend.kind}-{backend.config}")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with use_limits(SMALL):
        yield request.param


def begin(path: Path, backend: Backend, shards: int | None, windows: WindowsConfig | None = None) -> None:
    """Build an index in shards, or in one directory, without documents."""
    build = Store.build(path) if shards is None else ShardedStore.build(path, shards=shards)
    with build as store:
        with store.update():
            for each in (store, *store.parts):
                each.meta["model"] = {"kind": "vectors"}
                create_index(each, backend.config, windows=windows)
            if shards is not None:
                store.meta["documents"] = store.meta["index"]["rows"] = 0
        store.publish()


def opened(path: Path) -> ShardedIndex:
    store = open_store(path)
    assert isinstance(store, ShardedStore)
    return ShardedIndex(store, ShardedDocuments(store))


def add(index: ShardedIndex, rows: Representation, start: int) -> None:
    with index.store.update():
        index._documents.add([Document(f"d{number}", "") for number in range(start, start + len(rows))])
        assert index.add(rows) == range(start, start + len(rows))


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_search_follows_the_definition(backend: Backend, shards: int, seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    n, k, path = int(rng.integers(20, 61)), int(rng.integers(1, 70)), tmp_path / "index"
    data, queries = whole_numbers(backend, n, rng), whole_numbers(backend, 3, rng)
    begin(path, backend, shards)
    index, keep = opened(path), np.ones(n, bool)
    add(index, data[: n // 2], 0)
    index.finish()
    add(index, data[n // 2 :], n // 2)
    for step in range(5):
        live = np.flatnonzero(keep) if step == 4 else np.arange(n)  # resharded: without removed rows
        allowed = [None, np.zeros(len(live), bool), rng.random(len(live)) < 0.3][step % 3]
        check_search(backend, index, queries, data[live], keep[live], allowed, k, rng)
        if step == 3:
            reshard(path, 3)
            index = opened(path)
        elif step < 3:
            gone = rng.integers(0, n, n // 6)
            assert index.remove(gone) == keep[np.unique(gone)].sum()
            keep[gone] = False
            if step == 1:
                index.finish()
                index = opened(path)
    assert len(index) == index.stats()["documents"] == keep.sum()


class Pair:
    """The same documents in windows, in one index and in shards."""

    def __init__(
        self, path: Path, backend: Backend, shards: int, pool: Any, rng: np.random.Generator
    ) -> None:
        self.paths, self.backend, self.rng = (path / "one", path / "many"), backend, rng
        windows = WindowsConfig(length=8, stride=8, pool=pool)
        for folder, count in zip(self.paths, (None, shards), strict=True):
            begin(folder, backend, count, windows)
        self.open()

    def open(self) -> None:
        self.indexes: list[Any] = []
        for path in self.paths:
            index, documents = open_parts(open_store(path))
            self.indexes.append((index, documents))
        self.one, self.many = (index for index, _ in self.indexes)
        assert isinstance(self.many, ShardedWindows)

    def add(self, start: int, stop: int) -> None:
        """Add documents of one to four windows."""
        counts = self.rng.integers(1, 5, stop - start)
        rows = whole_numbers(self.backend, int(counts.sum()), self.rng)
        spans = [self.rng.integers(0, 99, (count, 2)) for count in counts.tolist()]
        for index, documents in self.indexes:
            with index.store.update():
                documents.add([Document(f"d{number}", "") for number in range(start, stop)])
                assert len(index.add_windows(rows, spans)) == stop - start

    def check(self, k: int) -> None:
        """Compare hits, scores, passages and statistics with those of one index."""
        one, many, rng = self.one, self.many, self.rng
        n, queries = len(one), whole_numbers(self.backend, 3, rng)
        assert len(many) == n
        np.testing.assert_array_equal(many.live, one.live)
        config = many.config  # a graph, and an approximate search, finds as much or more in shards
        finds_more = getattr(config, "is_graph", False) or getattr(config, "mode", "exact") != "exact"
        for allowed in (None, np.zeros(n, bool), rng.random(n) < 0.3):
            ours, theirs = (index.search(queries, k, allowed) for index in (many, one))
            if finds_more:
                assert (ours.scores >= theirs.scores).all() or one.windows.pool == "mean"
            else:
                np.testing.assert_array_equal(ours.rows, theirs.rows)
                np.testing.assert_array_equal(ours.scores, theirs.scores)
            again = many.rescore(queries, ours.rows)
            np.testing.assert_array_equal(again, one.rescore(queries, ours.rows))
            passages = many.passages(queries, ours.rows)
            np.testing.assert_array_equal(passages, one.passages(queries, ours.rows))
        given = np.where(rng.random((3, 9)) < 0.2, -1, rng.integers(0, n, (3, 9)))  # removed ones, too
        np.testing.assert_array_equal(many.rescore(queries, given), one.rescore(queries, given))
        facts, wanted = many.stats(), one.stats()
        for key in ("kind", "representation", "dim", "documents", "removed", "removed_share", "windows"):
            assert facts[key] == wanted[key], key


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("pool", ["max", "mean"])
def test_windows_are_found_as_in_one_index(backend: Backend, shards: int, pool: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(shards)
    pair, k = Pair(tmp_path, backend, shards, pool, rng), int(rng.integers(1, 12))
    pair.add(0, 25)
    for index, _ in pair.indexes:
        index.finish()
    pair.add(25, 28)  # not coded, as few rows are
    for step in range(4):
        pair.check(k)
        gone = rng.integers(0, len(pair.one), 7)
        assert pair.many.remove(gone) == pair.one.remove(gone)
        if step == 1:
            pair.open()
    pair.check(50)
    reshard(pair.paths[1], 3)
    compact(pair.paths[0])
    pair.open()
    assert pair.many.stats()["shards"] == 3
    pair.check(k)
    pair.add(28, 60)  # so many that rows are coded
    for index, _ in pair.indexes:
        index.finish()
    pair.check(k)
