"""Shards of `faiss` share a trained structure, so that they find what one index finds, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_shards import elsewhere

from irkit import Retriever
from irkit.errors import CorruptError
from irkit.index import Limits, compact, use_limits
from irkit.index.faiss_candidates import drop_ties
from irkit.shards import reshard

DIM = 24
SMALL = Limits(faiss_scan=30, faiss_scan_per_hit=1, faiss_points=1)

QUICK = ["ivfpqfs"]
SLOW = [
    *("ivf", "pq", "Flat", "IVF16_HNSW8,Flat", "PQ6x4fs", "PQ3x4fs", "PQ6", "SQ4", "SQ8", "SQfp16"),
    *(
        "IVF16,SQ8",
        "IVF16,PQ6x4fs",
        "IVF16,PQ6",
        "OPQ6,IVF16,PQ6x4fs",
        "OPQ6,PQ6",
        "PCA8,IVF16,SQfp16",
        "RaBitQ",
    ),
    *("IVF16,RaBitQ", "RQ3x4", "L2norm,IVF8,Flat"),
]
FACTORIES = [*QUICK, *(pytest.param(factory, marks=pytest.mark.slow) for factory in SLOW)]


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with use_limits(SMALL):
        yield


def vectors(count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Vectors around 20 centres; one in ten is as another one was, and one in fifty is zeros."""
    centres = np.random.default_rng(0).standard_normal((20, DIM))
    rows = (centres[rng.integers(0, 20, count)] + 0.7 * rng.standard_normal((count, DIM))).astype(np.float32)
    rows[9::10] = rows[: len(rows[9::10])]
    rows[25::50] = 0
    return list(rows)


def documents(names: list[str], rng: np.random.Generator) -> list[dict[str, Any]]:
    return [
        {"_id": name, "text": "", "vector": row, "metadata": {"year": int(rng.integers(5))}}
        for name, row in zip(names, vectors(len(names), rng), strict=True)
    ]


def build(path: Path, config: Any, items: list[dict[str, Any]], counts: tuple[Any, ...]) -> list[Retriever]:
    return [
        Retriever.build("vectors", items, path / str(count), index=config, shards=count) for count in counts
    ]


def stored(retriever: Retriever, count: int) -> list[np.ndarray]:
    """Vectors of the first rows."""
    return list(retriever.index.representations(np.arange(count)).arrays()["values"])


def check_same(built: list[Retriever], rng: np.random.Generator) -> None:
    """Compare hits of one index and of shards, with filters, of many queries and of single ones."""
    one, *others = built
    queries = [*vectors(20, rng), *stored(one, 5)]
    for filter, k in itertools.product((None, {"year": {">": 1}}), (1, 10, 40)):
        wanted = one.search(queries, k, filter)
        for many in others:
            assert many.search(queries, k, filter) == wanted
            with elsewhere(many):
                assert many.search(queries, k, filter) == wanted
        for query in queries[18:22]:
            wanted = one.search(query, k, filter)
            assert all(many.search(query, k, filter) == wanted for many in others)


@pytest.mark.parametrize("factory", FACTORIES)
def test_shards_choose_the_candidates_of_one_index(factory: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    config = {"kind": "faiss", "factory": factory, "refine": 3}
    items = documents([f"d{number}" for number in range(500)], rng)
    built = build(tmp_path, config, items, (None, 2, 5))
    assert sum(part.stats()["covered"] for part in built[2].index.parts) == 500
    check_same(built, rng)
    # 30 rows that the structures lack, 25 removed ones, then 60 rows that structures take
    for step, added in enumerate((30, 60)):
        names = [f"d{number}" for number in range(step, 500, 21)]
        new = documents([f"n{step}-{number}" for number in range(added)], rng)
        for retriever in built:
            retriever.remove(names)
            retriever.add(new)
        check_same(built, rng)
    assert {retriever.index.stats().get("covered", 590) for retriever in built} == {590}
    for retriever, count in zip(built, (None, 3, 2), strict=True):
        retriever.close()
        if count is None:
            compact(retriever.store.path)
        else:
            reshard(retriever.store.path, count)
    check_same([Retriever.load(retriever.store.path) for retriever in built], rng)


def test_documents_that_are_equal_come_in_order_of_addition(tmp_path: Path) -> None:
    """More of them than a search asks for, so that it asks again, and scans at last."""
    rng = np.random.default_rng(2)
    rows = [*vectors(300, rng), *[np.ones(DIM, np.float32)] * 200, *vectors(100, rng)]
    items = [{"_id": f"d{number}", "text": "", "vector": row} for number, row in enumerate(rows)]
    for factory in ("IVF8,Flat", "PQ6x4fs"):
        one, many = build(tmp_path / factory, factory, items, (None, 3))
        for k in (1, 7, 30):
            wanted = [f"d{number}" for number in range(300, 300 + k)]
            for query in (rows[300], [rows[300], rows[301]]):
                hits = one.search(query, k)
                assert many.search(query, k) == hits
                assert [hit.id for hit in (hits if query is rows[300] else hits[1])] == wanted


def test_a_lone_query_has_the_score_of_one_index(tmp_path: Path) -> None:
    """FAISS itself scores a lone query of vectors that are stored as they are."""
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((400, DIM)).astype(np.float32)
    items = [{"_id": f"d{number}", "text": "", "vector": row} for number, row in enumerate(rows)]
    for factory in ("Flat", "IVF8,Flat"):
        one, many = build(tmp_path / factory, factory, items, (None, 3))
        for query in rng.standard_normal((20, DIM)).astype(np.float32):
            assert many.search(query, 10) == one.search(query, 10)


def test_too_few_documents_to_train_are_scanned(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    config = {"kind": "faiss", "factory": "IVF200,Flat", "nprobe": 8}
    built = build(tmp_path, config, documents([f"d{number}" for number in range(150)], rng), (None, 3))
    assert [retriever.index.store.meta["index"].get("covered", 0) for retriever in built] == [0, 0]
    check_same(built, rng)
    more = documents([f"n{number}" for number in range(100)], rng)
    for retriever in built:
        retriever.add(more)
    assert [part.codec_version for part in built[1].index.parts] == [250] * 3
    check_same(built, rng)


def test_a_damaged_structure_of_a_shard_is_reported(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    many = Retriever.build(
        "vectors", documents([*map(str, range(200))], rng), tmp_path, index="SQ8", shards=2
    )
    many.close()
    file = next((tmp_path / "shard-1-001").glob("faiss.*"))
    file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(CorruptError, match="shard-1-001"):
        Retriever.load(tmp_path)
    with pytest.raises(CorruptError, match="shard-1-001"):
        Retriever.load(tmp_path, verify=False).search(vectors(1, rng)[0])


def test_graphs_have_nothing_to_share(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    items = documents([f"d{number}" for number in range(300)], rng)
    for factory in ("hnsw", "NSG8", "PCA8,HNSW8"):
        one, many = build(tmp_path / factory, factory, items, (None, 2))
        assert {part.store.rows("faiss.index") > 0 for part in many.index.parts} == {True}
        query = vectors(1, rng)[0]
        ours, theirs = ({hit.id: hit.score for hit in each.search(query, 20)} for each in (many, one))
        assert all(theirs[name] == score for name, score in ours.items() if name in theirs)


def test_candidates_that_tie_with_the_next_one_are_left_out() -> None:
    scores = np.float32([[5, 4, 3, 2, 1], [5, 4, 3, 3, 1], [5, 3, 3, 3, 3], [5, 4, 3, -np.inf, -np.inf]])
    rows = np.tile(np.arange(5), (4, 1))
    few = drop_ties(rows, scores, 3, 2)
    assert rows.tolist() == [[0, 1, 2, -1, -1], [0, 1, -1, -1, -1], [0, -1, -1, -1, -1], [0, 1, 2, -1, -1]]
    assert few.tolist() == [False, False, True, False]
