"""Processes made by fork, spawn and forkserver, and threads of asyncio: they search, and take no lock along.

Run as a script, this file searches, or encodes, with two threads, forks, and does the same in the child.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import irkit.index.state
import irkit.index.store
from irkit import Dense, MultiVector, Ragged, Retriever, Sparse
from irkit.errors import BadValueError, LockedError, StorageError
from irkit.index import Store, create_index, open_index
from irkit.training.resumable import write_resumable

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

SECONDS = 60  # after which a child that hangs is ended
KINDS: dict[str, tuple[str, Any]] = {
    "flat": ("dense", "flat"),
    "flat_tokens": ("multi_vector", "flat"),
    "int8": ("multi_vector", {"kind": "flat", "dtype": "int8"}),
    "plaid": ("multi_vector", {"kind": "plaid", "centroids": 64}),
    "muvera": ("multi_vector", {"kind": "muvera", "repetitions": 4}),
    "hnsw": ("dense", "hnsw"),
    "ivf": ("dense", "ivf"),
    "pq": ("dense", {"kind": "faiss", "factory": "PQ8x4"}),
    "inverted": ("sparse", "inverted"),
}


def in_child(action: Callable[[], object]) -> int:
    """Start ``action`` in a child that is forked here; its id. It ends with 0 if nothing goes wrong."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.alarm(SECONDS)
        action()
        code = 0
    except BaseException as error:
        os.write(2, repr(error).encode())
    finally:
        os._exit(code)


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextlib.contextmanager
def living_child() -> Iterator[None]:
    """A child that is forked here and lives until the block ends."""
    ours, theirs = os.pipe()

    def wait() -> None:
        os.close(theirs)
        os.read(ours, 1)

    child = in_child(wait)
    os.close(ours)
    try:
        yield
    finally:
        os.close(theirs)
        assert ended(child) == 0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    with Store.build(tmp_path / "index") as store:
        with store.update():
            store.append("numbers.bin", np.arange(10))
        store.publish()
    return Store.open(tmp_path / "index")


def add(store: Store, count: int = 5) -> None:
    with store.update():
        store.append("numbers.bin", np.arange(count))


def rows(store: Store) -> int:
    return Store.open(store.path).rows("numbers.bin")


# ---- locks ----


def test_a_child_that_lives_on_holds_no_lock(store: Store) -> None:
    with contextlib.ExitStack() as stack:
        with store.update():
            stack.enter_context(living_child())
            store.append("numbers.bin", np.arange(5))
        add(store)
        add(Store.open(store.path))
        with Store.build(store.path, overwrite=True) as build:
            stack.enter_context(living_child())
            add(build)
            build.publish()
        add(Store.open(store.path), 1)
    assert rows(store) == 6


def test_a_program_that_is_started_holds_no_lock(store: Store) -> None:
    wait = [sys.executable, "-c", "input()"]
    with store.update():
        program = subprocess.Popen(wait, stdin=subprocess.PIPE, close_fds=False)
        store.append("numbers.bin", np.arange(5))
    add(store)
    assert rows(store) == 20
    program.communicate(b"\n")


def test_the_change_of_the_parent_is_not_the_childs(store: Store) -> None:
    def go_on() -> None:
        assert store.rows("numbers.bin") == 10  # what is committed
        with pytest.raises(BadValueError, match="a change must be inside"):
            store.append("numbers.bin", np.full(5, 7))
        for other in (store, Store.open(store.path)):
            with pytest.raises(LockedError):
                add(other)

    with store.update():
        store.append("numbers.bin", np.arange(5))
        assert ended(in_child(go_on)) == 0
        store.append("numbers.bin", np.arange(5))
    assert Store.open(store.path).read("numbers.bin").tolist() == [*range(10), *range(5), *range(5)]


@pytest.mark.parametrize("error", [None, SystemExit])
def test_a_child_that_leaves_the_block_changes_nothing(store: Store, error: Any) -> None:
    here = os.getpid()
    expected = error or StorageError
    try:
        with store.update():
            store.append("numbers.bin", np.arange(5))
            child = os.fork()
            if not child and error:
                raise error
            if child:
                assert ended(child) == 0
    except BaseException as problem:
        if os.getpid() == here:
            raise
        fine = type(problem) is expected and (error or "forked inside an update" in str(problem))
        os._exit(0 if fine else 1)
    assert store.read("numbers.bin").tolist() == [*range(10), *range(5)]
    assert rows(store) == 15


def test_a_child_changes_the_index_when_its_parent_has(store: Store) -> None:
    with Store.build(store.path, overwrite=True) as build:
        add(build)

        def publish() -> None:
            with pytest.raises(BadValueError, match="no build to publish"):
                build.publish()
            build.close()

        assert ended(in_child(publish)) == 0
        with pytest.raises(LockedError):
            add(store)  # closing in the child has not unlocked it
        build.publish()
    assert ended(in_child(lambda: add(store))) == 0
    assert rows(store) == 10


def test_a_fork_while_another_thread_refreshes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Store.open(store.path)
    add(other)
    inside, go_on = threading.Event(), threading.Event()
    real = irkit.index.store.load_state

    def load(*arguments: Any) -> Any:
        if threading.current_thread() is thread:
            inside.set()
            go_on.wait()
        return real(*arguments)

    monkeypatch.setattr(irkit.index.store, "load_state", load)
    thread = threading.Thread(target=store.refresh)
    thread.start()
    inside.wait()

    def use() -> None:
        assert store.refresh()
        add(store)

    try:
        assert ended(in_child(use)) == 0
    finally:
        go_on.set()
        thread.join()
    assert rows(store) == 20


def test_a_file_of_records_is_free_when_its_writer_has_failed(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:

        def fail(done: int) -> Any:
            stack.enter_context(living_child())
            raise KeyboardInterrupt
            yield

        with pytest.raises(KeyboardInterrupt):
            write_resumable(tmp_path / "records.jsonl", fail, "key")
        assert write_resumable(tmp_path / "records.jsonl", lambda done: iter(()), "key") == (0, 0)


# ---- computing in a child ----


def made(kind: str, count: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    if kind == "sparse":
        return Sparse.from_dense(torch.from_numpy(rng.standard_normal((count, 400), np.float32)).clamp(min=1))
    if kind == "dense":
        return Dense(torch.from_numpy(rng.standard_normal((count, 64), np.float32)))
    values = torch.from_numpy(rng.standard_normal((8 * count, 64), np.float32))
    return MultiVector(Ragged(values, torch.full((count,), 8)))


def search_twice(name: str, path: str) -> int:
    kind, config = KINDS[name]
    with Store.build(path) as store:
        index = create_index(store, config)
        index.add(made(kind, 2500, 0))
        index.finish()
        store.publish()
    queries = made(kind, 64, 1)
    once = index.search(queries, 10)

    def again() -> None:
        np.testing.assert_array_equal(index.search(queries, 10).rows, once.rows)

    def again_and_again() -> None:
        again()
        assert ended(in_child(again)) == 0

    return ended(in_child(again_and_again))


def open_and_fork(name: str, path: str) -> int:
    queries, index = made(KINDS[name][0], 64, 1), open_index(Store.open(path))
    return ended(in_child(lambda: index.search(queries, 10)))


def encode_twice(path: str) -> int:
    from irkit import Model, score

    model = Model.multi_vector(path, "linear")
    texts = ["search index vector " * 8] * 64
    once = model.encode_representation(texts, "document")
    scores = score(once, once)

    def again() -> None:
        torch.testing.assert_close(score(model.encode_representation(texts, "document"), once), scores)

    return ended(in_child(again))


def run_script(*words: object) -> str:
    """Run this file with two threads; what it writes: how children ended."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, __file__, *map(str, words)]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.slow
def test_search_fork_search(tmp_path: Path) -> None:
    codes = json.loads(run_script("search", tmp_path))
    assert codes == dict.fromkeys(KINDS, 0)
    codes = json.loads(run_script("open", tmp_path))  # nothing is computed before the fork
    assert codes == dict.fromkeys(KINDS, 0)


def test_encode_fork_encode(tiny_bert: Path) -> None:
    assert json.loads(run_script("encode", tiny_bert)) == 0


def test_a_child_that_was_forked_before_keeps_its_threads() -> None:
    code = (
        "import os, torch, irkit, irkit.index; torch.set_num_threads(2); child = os.fork()\n"
        "if not child: os._exit(torch.get_num_threads())\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 2


# ---- other ways ----


@pytest.fixture
def words(tmp_path: Path) -> Retriever:
    texts = {f"d{i}": f"word{i} common" for i in range(50)}
    return Retriever.build("bm25", texts, tmp_path / "words")


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "forkserver"))]
)
def test_pools_of_processes_search(words: Retriever, method: str) -> None:
    opened = Retriever.load(words.store.path)
    expected = opened.search(["word3", "common"], 5)
    with ProcessPoolExecutor(2, multiprocessing.get_context(method)) as pool:
        found = list(pool.map(opened.search, [["word3", "common"]] * 4, [5] * 4))
    assert found == [expected] * 4


def test_tasks_search_in_threads_while_one_changes_the_index(words: Retriever) -> None:
    async def searches() -> list[int]:
        found = []
        for _ in range(20):
            hits = await asyncio.to_thread(words.search, "common", 100)
            found.append(len(hits))
        return found

    async def changes() -> None:
        for number in range(10):
            await asyncio.to_thread(words.add, {f"new{number}": "common", f"more{number}": "common"})

    async def both() -> list[list[int]]:
        *found, _ = await asyncio.gather(searches(), searches(), changes())
        return found

    for found in asyncio.run(both()):
        assert set(found) <= set(range(50, 71, 2))
        assert found == sorted(found)
    assert len(words.search("common", 100)) == 70


if __name__ == "__main__":
    task, place = sys.argv[1:]
    if task == "encode":
        result: Any = encode_twice(place)
    else:
        act = search_twice if task == "search" else open_and_fork
        result = {name: act(name, f"{place}/{name}") for name in KINDS}
    sys.stdout.write(json.dumps(result))


def test_a_child_forgets_the_change_that_its_parent_undoes(tmp_path: Path) -> None:
    """It adds other documents in the places of those, and finds them."""
    retriever = Retriever.build("bm25", {"first": "a text"}, tmp_path / "index")
    undone, undo = os.pipe()

    def add_others() -> None:
        os.read(undone, 1)
        retriever.add({"c": "its own", "d": "documents", "e": "here"})
        assert retriever.documents.find(["first", "a", "b", "c", "d", "e"]).tolist() == [0, -1, -1, 1, 2, 3]

    assert "first" in retriever.documents
    with contextlib.suppress(KeyError), retriever.store.update():
        retriever.add({"a": "one"})
        retriever.add({"b": "two"})
        assert "a" in retriever.documents
        child = in_child(add_others)
        raise KeyError
    os.write(undo, b"x")
    assert ended(child) == 0
