"""What every index promises holds for its shards: the contract of test_index_contract.py over 1, 2 and 5."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_index_contract import BACKENDS, SMALL, Backend, check_search, whole_numbers

from irkit.core.representation import Representation
from irkit.data import Document
from irkit.index import create_index, use_limits
from irkit.shards import ShardedDocuments, ShardedIndex, ShardedStore, open_store, reshard

pytestmark = pytest.mark.slow


@pytest.fixture(params=BACKENDS, ids=lambda backend: f"{backend.kind}-{backend.config}")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with use_limits(SMALL):
        yield request.param


def begin(path: Path, backend: Backend, shards: int) -> None:
    """Build an index in shards without documents."""
    with ShardedStore.build(path, shards=shards) as store:
        with store.update():
            for each in (store, *store.parts):
                each.meta["model"] = {"kind": "vectors"}
                create_index(each, backend.config)
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
