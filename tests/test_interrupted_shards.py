"""What interrupted builds, changes and rewrites of an index in shards leave to those that come after."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_shards import SMALL, Source, arrays_of, die_at

from irkit import Retriever
from irkit.errors import BadValueError, StorageError
from irkit.index import compact, use_limits
from irkit.shards import open_store, reshard
from irkit.shards.placement import shard_of
from irkit.utils.atomic import sync_all


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with use_limits(SMALL):
        yield


CHANGES: dict[str, Callable[[list[Any]], list[Any]]] = {
    "edited": lambda items: [*items[:20], *(item | {"text": item["text"] + " more"} for item in items[20:])],
    "inserted": lambda items: [*items[:25], {"_id": "new", "text": "word1"}, *items[25:]],
    "deleted": lambda items: [*items[:21], *items[22:]],
    "shortened": lambda items: items[:22],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_build_of_other_documents_is_refused_or_discarded(change: str, tmp_path: Path) -> None:
    source = Source("bm25", 4)
    documents = [source.document(f"d{number}") for number in range(60)]
    others = CHANGES[change](documents)

    def build(path: Path, items: Any, overwrite: bool = False) -> None:
        Retriever.build("bm25", items, path, shards=3, chunk_size=20, overwrite=overwrite).close()

    build(tmp_path / "others", others)
    for commit in (20, 22):  # while the second chunk is stored, shard by shard
        path = tmp_path / str(commit)
        die_at(commit, lambda path=path: build(path, documents))  # type: ignore[misc]
        with pytest.raises(BadValueError, match="a build of other documents was begun there"):
            build(path, others)
        build(path, others, overwrite=True)
        assert arrays_of(path) == arrays_of(tmp_path / "others")


@pytest.mark.parametrize("model", ["bm25", "impacts"])
@pytest.mark.parametrize("shards", [2, 3])
def test_terms_of_an_interrupted_addition_outlive_a_reshard(model: str, shards: int, tmp_path: Path) -> None:
    source = Source(model, 5)
    documents = [source.document(f"d{number}") for number in range(40)]
    new = []
    for number in range(12):
        content = {"text": f"fresh{number}"} if model == "bm25" else {"vector": {f"fresh{number}": 2.0}}
        new.append({"_id": f"n{number}", **content})
    path = tmp_path / "index"
    Retriever.build(model, documents, path, shards=3).close()
    die_at(2, lambda: Retriever.load(path).add(new))
    stored = [document.id for document in Retriever.load(path).documents if document.id.startswith("n")]
    assert 0 < len(stored) < 12
    reshard(path, shards)
    after = Retriever.load(path, verify=True)
    for name in stored:
        query = name.replace("n", "fresh")
        [hit] = after.search(query if model == "bm25" else {query: 1.0}, 3)
        assert hit.id == name
    after.add([item for item in new if item["_id"] not in stored])
    assert len(after) == 52


def test_a_killed_reshard_may_be_followed_by_one_to_another_number(tmp_path: Path) -> None:
    source = Source("bm25", 5)
    documents = [source.document(f"d{number}") for number in range(40)]
    for commit in (1, 3, 6, 11):
        path = tmp_path / str(commit)
        Retriever.build("bm25", documents, path, shards=2).close()
        die_at(commit, lambda path=path: reshard(path, 4))  # type: ignore[misc]
        reshard(path, 3)
        after = Retriever.load(path, verify=True)
        assert after.stats()["shards"] == 3
        assert [document.id for document in after.documents] == [item["_id"] for item in documents]
        assert len(list(path.glob("shard-*"))) == 3


@pytest.mark.parametrize("shards", [None, 2])
def test_an_index_that_never_had_documents_can_be_rewritten(shards: int | None, tmp_path: Path) -> None:
    path = tmp_path / "index"
    Retriever.build("bm25", [], path, shards=shards).close()
    if shards is None:
        compact(path)
    reshard(path, 3)
    index = Retriever.load(path, verify=True)
    assert index.search("bears", 3) == []
    index.add(["brown bears", "winter sleep of bears"])
    one = Retriever.build("bm25", ["brown bears", "winter sleep of bears"], tmp_path / "one")
    assert index.search("bears", 3) == one.search("bears", 3)


@pytest.mark.parametrize("shards", [None, 2])
def test_ids_of_texts_are_given_once_whatever_is_compacted_away(shards: int | None, tmp_path: Path) -> None:
    path = tmp_path / "index"
    index = Retriever.build("bm25", [f"text {number}" for number in range(10)], path, shards=shards)
    index.remove(["0", "9"])
    for expected in ("10", "12"):
        index.close()
        reshard(path, shards) if shards else compact(path)
        index = Retriever.load(path)
        index.add(["new", "newer"])
        assert [document.id for document in index.documents][-2] == expected


def fail_at(commit: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the given commit of a store fail, and the ones after it succeed."""
    commits = iter(range(1000))

    def counted(paths: Collection[Path]) -> None:
        if next(commits) == commit:
            raise error
        sync_all(paths)

    monkeypatch.setattr("irkit.index.store.sync_all", counted)


@pytest.mark.parametrize("commit", [0, 1, 2, 3])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), KeyboardInterrupt()])
def test_a_change_that_some_shards_have_stored_is_shown_and_can_be_repeated(
    commit: int, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source("bm25", 3)
    index = Retriever.build(
        "bm25", [source.document(f"d{n}") for n in range(40)], tmp_path / "index", shards=3
    )
    new = [source.document(f"n{number}") for number in range(9)]
    assert len(set(shard_of([item["_id"] for item in new], 3))) == 3  # the whole commits last
    expected = StorageError if isinstance(error, OSError) else KeyboardInterrupt
    with monkeypatch.context() as patch:
        fail_at(commit, error, patch)
        with pytest.raises(expected) as caught:
            index.add(new)
    if expected is StorageError:
        assert ("is unchanged" in str(caught.value)) == (commit == 0)
        assert ("so repeat the change" in str(caught.value)) == (commit > 0)
    for each in (index, Retriever.load(tmp_path / "index", verify=True)):
        added = [document.id for document in each.documents if document.id.startswith("n")]
        assert (len(added) > 0) == (commit > 0)
    index.add(new)
    assert sorted(document.id for document in index.documents)[40:] == sorted(item["_id"] for item in new)


def test_a_change_that_is_complete_is_not_to_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "index"
    index = Retriever.build("bm25", [f"text {number}" for number in range(20)], path, shards=2)

    def fail(folder: Path) -> None:
        if folder == path:  # after the whole was committed
            raise OSError(errno.EIO, "no disk")

    monkeypatch.setattr("irkit.index.store.sync", fail)
    with pytest.raises(StorageError, match="the change is made, but may not survive a power cut"):
        index.add(["new", "newer"])
    assert [len(each) for each in (index, Retriever.load(path))] == [22, 22]


@pytest.mark.parametrize("opens", [False, True])
def test_a_reader_waits_for_a_slow_writer(
    opens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shard is written in 0.05 s, four of them in more than a reader waits without news."""
    source, path = Source("bm25", 3), tmp_path / "index"
    Retriever.build("bm25", [source.document(f"d{n}") for n in range(40)], path, shards=4).close()
    reader = Retriever.load(path)
    new = [source.document(f"n{number}") for number in range(30)]
    begun = threading.Event()

    def slowly(paths: Collection[Path]) -> None:
        time.sleep(0.05)
        sync_all(paths)
        begun.set()

    monkeypatch.setattr("irkit.index.store.sync_all", slowly)
    writer = threading.Thread(target=lambda: Retriever.load(path).add(new))
    writer.start()
    seen = set()
    begun.wait()
    while writer.is_alive():
        if opens:
            reader = Retriever.load(path)
        else:
            reader.refresh()
        seen.add(len(reader))
    writer.join()
    reader.refresh()
    assert seen | {len(reader)} <= {40, 70}
    assert len(reader) == 70
    assert not open_store(path).meta.get("before")
