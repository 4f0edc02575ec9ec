"""Threads that share a store: each sees one committed state, whatever others change at whatever moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from irkit import Dense, Hybrid, MultiVector, Ragged, Retriever, Sparse
from irkit.core.representation import Representation
from irkit.data import Query
from irkit.encoder_free import BM25
from irkit.errors import LockedError
from irkit.index import Index, Limits, Store, compact, create_index, open_index
from irkit.index.array_files import Entry
from irkit.index.topk import Hits

T = TypeVar("T")
DIM = 16
STEPS = range(1, 13)


def elsewhere(action: Callable[[], T]) -> T:
    """What ``action`` gives in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(action).result()


@contextmanager
def before(owner: Any, name: str, action: Callable[[], Any], call: int = 0) -> Iterator[list[str]]:
    """Run ``action`` in another thread as this one makes its ``call``-th call of ``owner.name``."""
    real, here, calls, done = (
        getattr(owner, name),
        threading.current_thread(),
        iter(range(10**6)),
        list[str](),
    )

    def function(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is here and next(calls) == call:
            elsewhere(action)
            done.append(name)
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, function)
        yield done


# ---- the store ----


@pytest.fixture
def store(tmp_path: Path) -> Store:
    with Store.build(tmp_path / "index") as store:
        with store.update():
            store.append("numbers.bin", np.arange(10))
            store.append("pairs.bin", np.ones((10, 2)))
            store.meta["about"] = {"rows": 10}
        store.publish()
    return Store.open(tmp_path / "index")


def add(store: Store) -> None:
    with store.update():
        n = store.rows("numbers.bin")
        store.append("numbers.bin", np.arange(n, n + 5))
        store.append("pairs.bin", np.ones((5, 2)))
        store.meta["about"]["rows"] = n + 5


def seen(store: Store) -> tuple[int, ...]:
    arrays = (len(store.read(name)) for name in ("numbers.bin", "pairs.bin"))
    return store.rows("numbers.bin"), *arrays, store.meta["about"]["rows"]


def test_a_derived_value_belongs_to_the_state_it_came_from(store: Store) -> None:
    def total() -> int:
        elsewhere(lambda: add(store))
        return int(store.read("numbers.bin").sum())

    assert store.derived("total", total) == 45
    assert store.derived("total", lambda: int(store.read("numbers.bin").sum())) == 105


@pytest.mark.parametrize("opened", [True, False], ids=["opened", "written"])
def test_a_mapped_array_belongs_to_the_state_it_came_from(store: Store, opened: bool) -> None:
    if not opened:
        add(store)
    rows = store.rows("numbers.bin")
    with before(Entry, "map", lambda: add(store)) as called:
        store.read("numbers.bin")
    if not called:
        add(store)
    assert seen(store) == (rows + 5,) * 4


def test_only_its_thread_sees_an_update_before_it_ends(store: Store) -> None:
    version = store.version
    with store.update():
        store.append("numbers.bin", np.arange(5))
        assert elsewhere(lambda: seen(store)) == (10,) * 4
        store.append("pairs.bin", np.ones((5, 2)))
        store.meta["about"]["rows"] = 15
        with store.snapshot():
            assert seen(store) == (15,) * 4
        assert elsewhere(lambda: (seen(store), store.version)) == ((10,) * 4, version)
        assert not elsewhere(store.refresh)
    assert elsewhere(lambda: seen(store)) == (15,) * 4
    assert store.version > version
    with pytest.raises(KeyError), store.update():  # noqa: PT012
        add(store)
        raise KeyError
    assert seen(store) == elsewhere(lambda: seen(store)) == (15,) * 4


def test_a_pinned_state_stays(store: Store) -> None:
    other = Store.open(store.path)
    with store.snapshot() as state:
        elsewhere(lambda: add(store))
        with store.snapshot():
            assert seen(store) == (10,) * 4
        add(other)
        assert elsewhere(store.refresh)
        assert elsewhere(lambda: seen(store)) == (20,) * 4
        assert seen(store) == (10,) * 4
        add(store)  # moves to the newest state, and back
        assert seen(store) == (10,) * 4
    assert seen(store) == (25,) * 4
    with store.snapshot(state):
        assert seen(store) == (10,) * 4


def test_a_state_outlasts_its_files(store: Store) -> None:
    """Also one that this store has written, and one whose store is closed meanwhile."""
    add(store)

    def replace() -> None:
        with Store.build(store.path, overwrite=True) as build:
            build.publish()

    with store.snapshot():
        elsewhere(store.close)
        replace()
        assert store.read("numbers.bin").tolist() == list(range(15))


@pytest.mark.parametrize("building", [False, True])
def test_one_thread_changes_a_store_at_a_time(tmp_path: Path, store: Store, building: bool) -> None:
    if building:
        store = Store.build(tmp_path / "build")
    with store.update():
        store.append("more.bin", np.arange(3))
        with pytest.raises(LockedError, match="somebody else is writing"):
            elsewhere(lambda: add(store))
    assert store.read("more.bin").tolist() == [0, 1, 2]
    with store.update():
        store.append("more.bin", np.arange(3))
    store.close()


# ---- indexes and documents ----

KINDS = {
    "flat": "dense",
    "hnsw": "dense",
    "inverted": "sparse",
    "plaid": "multi_vector",
    "muvera": "multi_vector",
}


def texts(kind: str, n: int, seed: int) -> Representation:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((n * 4, DIM)).astype(np.float32)
    tensor = torch.nn.functional.normalize(torch.from_numpy(values))
    if kind == "dense":
        return Dense(tensor[:n])
    if kind == "multi_vector":
        return MultiVector(Ragged(tensor, torch.full((n,), 4)))
    return Sparse.from_dense(tensor[:n].clamp(min=0))


@pytest.fixture
def small(small_limits: Callable[..., None]) -> None:
    """Small numbers of documents are indexed as large ones."""
    small_limits(
        plaid_uncompressed=256, plaid_scan=32, faiss_scan=64, faiss_scan_per_hit=1, inverted_unlisted=32
    )


def build(path: Path, kind: str, n: int = 200) -> Index:
    with Store.build(path) as store:
        index = create_index(store, {"kind": kind, "device": "cpu"} if kind == "plaid" else kind)
        index.add(texts(KINDS[kind], n, 0))
        index.finish()
        store.publish()
    return open_index(Store.open(path))


def same(one: Hits, other: Hits) -> bool:
    return bool(np.array_equal(one.rows, other.rows) and np.array_equal(one.scores, other.scores))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("refreshed", [False, True], ids=["changed", "refreshed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_search_sees_one_state(tmp_path: Path, kind: str, refreshed: bool) -> None:
    index, queries = build(tmp_path / "index", kind), texts(KINDS[kind], 4, 1)
    expected = index.search(queries, 5)

    def change() -> None:
        writer = open_index(Store.open(tmp_path / "index")) if refreshed else index
        writer.remove(expected.rows[:, 0])
        writer.add(queries)
        writer.add(texts(KINDS[kind], 100, 2))
        writer.finish()
        if refreshed:
            compact(tmp_path / "index")
            assert index.store.refresh()

    index = open_index(Store.open(tmp_path / "index"))  # nothing is derived yet
    with before(index, "_plain" if kind == "inverted" else "_keep", change) as called:
        assert same(index.search(queries, 5), expected)
    assert called
    after = index.search(queries, 5)
    assert same(after, open_index(Store.open(tmp_path / "index")).search(queries, 5))
    assert not same(after, expected)


@pytest.mark.usefixtures("small")
def test_lists_prepared_for_one_state_answer_it_alone(tmp_path: Path) -> None:
    index, query = build(tmp_path / "index", "inverted"), texts("sparse", 1, 1)
    expected = index.search(query, 5)

    def change() -> None:
        with index.store.update():
            index.add(query)
            index.finish()

    index = open_index(Store.open(tmp_path / "index"))
    with before(index, "_prepare", change) as called:
        assert same(index.search(query, 5), expected)
    assert called
    assert index.search(query, 5).rows[0, 0] == 200


@pytest.fixture
def retriever(tmp_path: Path) -> Retriever:
    vectors = texts("dense", 40, 0)
    assert isinstance(vectors, Dense)
    documents = [
        {"_id": f"d{row}", "text": f"text {row}", "vector": vector.tolist()}
        for row, vector in enumerate(vectors.values)
    ]
    Retriever.build("vectors", documents, tmp_path / "index")
    return Retriever.load(tmp_path / "index")


def rewrite(retriever: Retriever) -> None:
    """All rows are others, and of other documents."""
    with Retriever.load(retriever.store.path) as writer:
        writer.remove([f"d{row}" for row in range(0, 40, 2)])
    compact(retriever.store.path)
    assert retriever.refresh()


@pytest.mark.parametrize("step", ["index.search", "documents.fetch"])
def test_hits_and_their_texts_are_of_one_state(retriever: Retriever, step: str) -> None:
    vector, part = [1.0] * DIM, getattr(retriever, step.split(".")[0])
    expected = retriever.search(vector, 40)
    with before(part, step.split(".")[1], lambda: rewrite(retriever)) as called:
        assert retriever.search(vector, 40) == expected
    assert called
    assert len(retriever.search(vector, 40)) == 20


@pytest.mark.parametrize("step", ["index.search", "documents.ids"])
def test_a_run_is_of_one_state(retriever: Retriever, step: str) -> None:
    part = getattr(retriever, step.split(".")[0])
    queries = [Query(name, "", np.full(DIM, value, np.float32)) for name, value in (("a", 1), ("b", -1))]
    expected = list(retriever.run(queries))
    with before(part, step.split(".")[1], lambda: rewrite(retriever)) as called:
        assert list(retriever.run(queries)) == expected
    assert called


def test_reranked_documents_are_of_one_state(retriever: Retriever) -> None:
    ids = [f"d{row}" for row in range(40)]
    expected = retriever.rerank([1.0] * DIM, ids)
    with before(retriever.index, "rescore", lambda: rewrite(retriever)) as called:
        assert retriever.rerank([1.0] * DIM, ids) == expected
    assert called


def test_documents_are_found_and_filtered_in_one_state(retriever: Retriever) -> None:
    documents = retriever.documents
    with before(documents, "ids", lambda: rewrite(retriever)) as called:
        assert documents.find(["d39", "d2"]).tolist() == [39, 2]
    assert called
    assert documents.find(["d39", "d2"]).tolist() == [19, -1]


def test_documents_are_iterated_in_one_state(retriever: Retriever) -> None:
    retriever.store.limits = Limits(read_documents=4)
    documents = iter(retriever.documents)
    assert next(documents).id == "d0"
    rewrite(retriever)
    assert [document.id for document in documents] == [f"d{row}" for row in range(1, 40)]


def test_ids_of_an_update_are_not_found_before_it_ends(retriever: Retriever) -> None:
    documents = retriever.documents
    new = [{"_id": "new", "text": "", "vector": [0.5] * DIM}]
    with retriever.store.update():
        retriever.add(new)
        assert documents.find(["new", "d3"]).tolist() == [40, 3]
        assert elsewhere(lambda: documents.find(["new", "d3"]).tolist()) == [-1, 3]
        assert [hit.id for hit in elsewhere(lambda: retriever.search([0.5] * DIM, 50))].count("new") == 0
        assert documents.find(["new", "d3"]).tolist() == [40, 3]
    assert elsewhere(lambda: documents.find(["new", "d3"]).tolist()) == [40, 3]


def test_hybrid_hits_and_their_texts_are_of_one_state(retriever: Retriever, tmp_path: Path) -> None:
    Retriever.build(BM25(), {f"d{row}": f"text {row}" for row in range(40)}, tmp_path / "words")
    words, hybrid = Retriever.load(tmp_path / "words"), Hybrid([Retriever.load(tmp_path / "words")] * 2)
    hybrid.retrievers = [words, words]
    expected = hybrid.search("text", 40)
    with before(hybrid, "_documents", lambda: words.remove(["d1", "d7"])) as called:
        assert hybrid.search("text", 40) == expected
    assert called
    assert len(hybrid.search("text", 40)) == 38


def test_terms_of_an_update_are_not_known_before_it_ends(tmp_path: Path) -> None:
    Retriever.build(BM25(), {"a": "red", "b": "green"}, tmp_path / "words")
    retriever, twin = Retriever.load(tmp_path / "words"), Retriever.load(tmp_path / "words")
    expected = elsewhere(lambda: retriever.search("red blue", 5))

    def others() -> None:
        assert elsewhere(lambda: retriever.search("red blue", 5)) == expected

    with retriever.store.snapshot():  # an old state, which a thread may go on to ask for
        with retriever.store.update():
            with before(retriever.documents, "add", others):
                retriever.add({"c": "blue blue"})
            others()
            retriever.add({"d": "yellow blue"})
        assert retriever.search("red blue", 5) == expected
    retriever.add({"e": "white"})
    twin.add({"f": "black red"})
    retriever.refresh()
    for one in (retriever, Retriever.load(tmp_path / "words")):
        assert [hit.id for hit in one.search("blue", 5)] == ["c", "d"]
        assert [[hit.id for hit in hits] for hits in one.search(["yellow", "white", "black"], 5)] == [
            ["d"],
            ["e"],
            ["f"],
        ]


def change(index: Index, step: int) -> None:
    index.add(texts(KINDS[index.config.kind], 20, step))
    index.remove([3 * step, 3 * step + 1])
    if step % 2:
        index.finish()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["flat", "plaid"])
def test_threads_search_while_one_changes_and_refreshes(tmp_path: Path, kind: str) -> None:
    index, queries = build(tmp_path / "index", kind, 100), texts(KINDS[kind], 3, 99)
    other, stop = open_index(Store.open(tmp_path / "index")), threading.Event()

    def search() -> list[Hits]:
        found = []
        while not stop.is_set():
            found.append(index.search(queries, 5))
        return found

    with ThreadPoolExecutor(2) as pool:
        searches = [pool.submit(search) for _ in range(2)]
        try:
            for step in STEPS:
                change(other if step % 3 == 0 else index, step)
                index.store.refresh()
        finally:
            stop.set()

    twin = build(tmp_path / "twin", kind, 100)
    states = [twin.search(queries, 5)]

    def show(path: Path) -> None:
        states.append(elsewhere(lambda: twin.search(queries, 5)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("irkit.index.store.sync", show)  # the last step of a commit
        for step in STEPS:
            change(twin, step)
    for hits in searches[0].result() + searches[1].result():
        assert any(same(hits, state) for state in states)
    one, whole = Store.open(tmp_path / "index"), Store.open(tmp_path / "twin")
    assert one.sizes() == whole.sizes()
    for name in one.sizes():
        np.testing.assert_array_equal(one.read(name), whole.read(name), err_msg=name)
    assert one.meta["index"] == whole.meta["index"]
