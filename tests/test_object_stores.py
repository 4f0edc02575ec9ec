"""Corpora and indexes in object stores: what is read and written is whole, or an error says why not."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from irkit import Retriever
from irkit.data import read_documents, read_qrels, read_queries
from irkit.errors import BadValueError, CorruptError, LockedError, MissingDependencyError, StorageError
from irkit.index import Limits, compact, use_limits
from irkit.index.object_store import COPY, MARKER, copies_of, download_index, upload_index
from irkit.shards import reshard

TEXTS = {f"d{number}": f"text {number} word{number % 3} common" for number in range(20)}


class Faulty(MemoryFileSystem):
    """A store in memory whose calls fail, and whose files are cut, as the test says."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012 (as in the base)
    pseudo_dirs = [""]  # noqa: RUF012
    calls = 0
    fail_at: frozenset[int] = frozenset()  # numbers of calls
    cut_after: int | None = None

    def _count(self) -> None:
        Faulty.calls += 1
        if Faulty.calls in Faulty.fail_at:
            raise ConnectionResetError("the connection was lost")

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._count()
        stream = super().open(path, mode, **options)
        return _Cut(stream, Faulty.cut_after) if mode == "rb" and Faulty.cut_after is not None else stream

    def info(self, path: str, **options: Any) -> Any:
        self._count()
        return super().info(path, **options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> Any:
        self._count()
        return super().pipe_file(path, value, **options)


class _Cut:
    """A stream that ends early."""

    def __init__(self, stream: Any, left: int) -> None:
        self._stream, self._left = stream, left

    def read(self, size: int) -> bytes:
        data: bytes = self._stream.read(min(size, self._left))
        self._left -= len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@pytest.fixture(autouse=True)
def _stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    monkeypatch.setenv("IRKIT_CACHE", str(tmp_path / "cache"))
    with use_limits(Limits(upload_pause=0)):
        yield
    for kind in (MemoryFileSystem, Faulty):
        kind.store.clear()
        kind.pseudo_dirs[:] = [""]
    Faulty.calls, Faulty.fail_at, Faulty.cut_after = 0, frozenset(), None


def put(uri: str, data: bytes | str) -> str:
    """Write a file of a store."""
    with fsspec.open(uri, "wb") as stream:
        stream.write(data.encode() if isinstance(data, str) else data)
    return uri


LINES = '{"_id": "a", "text": "bears"}\n{"_id": "b", "text": "copper", "year": 2000}\n'


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_corpus_is_read_from_a_uri(kind: str, tmp_path: Path) -> None:
    root = "memory://corpora" if kind == "memory" else f"file://{tmp_path}"
    files = {
        "lines.jsonl": LINES,
        "packed.jsonl.gz": gzip.compress(LINES.encode()),
        "table.csv": "id,text,year\na,bears,\nb,copper,2000\n",
        "lines.tsv": "a\tbears\nb\tcopper\n",
    }
    for name, content in files.items():
        documents = read_documents(put(f"{root}/{name}", content))
        for _ in range(2):  # it is read anew
            assert [(item.id, item.text) for item in documents] == [("a", "bears"), ("b", "copper")]
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(
        pyarrow.table({"id": ["a", "b"], "text": ["bears", "copper"]}), tmp_path / "t.parquet"
    )
    documents = read_documents(put(f"{root}/table.parquet", (tmp_path / "t.parquet").read_bytes()))
    assert [(item.id, item.text) for item in documents] == [("a", "bears"), ("b", "copper")]


def test_vectors_are_mapped_from_a_copy(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.eye(3, dtype=np.float32))
    uri = put("memory://v.npy", (tmp_path / "v.npy").read_bytes())
    assert [list(item.vector) for item in read_documents(uri)] == np.eye(3).tolist()
    np.save(tmp_path / "v.npy", 2 * np.eye(4, dtype=np.float32))
    put(uri, (tmp_path / "v.npy").read_bytes())
    assert [list(item.vector) for item in read_documents(uri)] == (2 * np.eye(4)).tolist()


def test_a_folder_of_beir_is_read_from_a_uri() -> None:
    put("memory://beir/corpus.jsonl", LINES)
    put("memory://beir/queries.jsonl", '{"_id": "q", "text": "bear"}\n')
    put("memory://beir/qrels/test.tsv", "query-id\tcorpus-id\tscore\nq\ta\t1\n")
    assert [item.id for item in read_documents("memory://beir")] == ["a", "b"]
    assert [item.text for item in read_queries("memory://beir", "test")] == ["bear"]
    assert read_qrels("memory://beir/") == {"q": {"a": 1}}
    with pytest.raises(StorageError, match=r"no split 'dev' .*found test"):
        read_qrels("memory://beir", "dev")
    with pytest.raises(StorageError, match=r"expected corpus\.jsonl .*found test\.tsv"):
        read_documents("memory://beir/qrels")


def test_what_cannot_be_read_is_named() -> None:
    with pytest.raises(StorageError, match=r"memory://no\.jsonl: there is no such file"):
        read_documents("memory://no.jsonl")
    with pytest.raises(BadValueError, match="nosuch:// is no kind of store"):
        read_documents("nosuch://bucket/corpus.jsonl")
    known = {"class": "absent_package.Store", "err": "install it"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(known_implementations, "absent", known)
        with pytest.raises(MissingDependencyError, match="pip install absent_package"):
            read_documents("absent://bucket/corpus.jsonl")
    with pytest.raises(BadValueError, match="unknown extension"):
        list(read_documents(put("memory://corpus.xyz", "one")))


def test_a_download_of_a_corpus_that_is_cut_is_an_error() -> None:
    uri = put("faulty://corpus.jsonl", LINES)
    Faulty.cut_after = 40
    with pytest.raises(StorageError, match=f"cut after 40 of {len(LINES)} bytes"):
        list(read_documents(uri))
    Faulty.cut_after, Faulty.fail_at = None, frozenset({Faulty.calls + 3})
    documents = read_documents(uri)
    with pytest.raises(StorageError, match="the connection was lost"):
        list(documents)
    assert [item.id for item in documents] == ["a", "b"]


# ---- indexes ----


@pytest.mark.parametrize("shards", [None, 3])
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_an_index_is_built_and_searched_in_a_store(kind: str, shards: int | None, tmp_path: Path) -> None:
    uri = "memory://bucket/notes" if kind == "memory" else f"file://{tmp_path}/store/notes"
    one = Retriever.build("bm25", TEXTS, tmp_path / "one")
    built = Retriever.build("bm25", TEXTS, uri, shards=shards)
    queries = ["word1 text", "common 7"]
    assert built.search(queries) == one.search(queries)
    again = Retriever.load(uri)
    assert again.search(queries) == one.search(queries)
    assert again.stats().get("shards") == shards
    assert pickle.loads(pickle.dumps(again)).search(queries) == one.search(queries)
    # a copy is not changed: nothing would bring the change back
    with pytest.raises(StorageError, match=f"index {uri}: it is searched from a copy"):
        again.add([("new", "text")])
    with pytest.raises(StorageError, match="searched from a copy"):
        pickle.loads(pickle.dumps(again)).remove("d1")
    for wrong in (compact, lambda path: reshard(path, 2)):
        with pytest.raises(StorageError, match="can be built, saved to and searched"):
            wrong(uri)
    with pytest.raises(StorageError, match="there is one already"):
        Retriever.build("bm25", ["other"], uri)
    # replaced by a save of a changed directory
    one.add([("new", "fresh")])
    with pytest.raises(StorageError, match="there is one already"):
        one.save(uri)
    Retriever.build("bm25", {**TEXTS, "new": "fresh"}, uri, overwrite=True, shards=shards)
    assert again.search(queries) != []  # it shows what it has opened
    assert Retriever.load(uri).search("fresh") == one.search("fresh")
    store, root = fsspec.core.url_to_fs(uri)
    assert sorted(path.rpartition("/")[2][:2] for path in store.ls(root, detail=False)) == ["ir", "v-"]
    one.save(f"{uri}-saved")
    assert Retriever.load(f"{uri}-saved").search(queries) == one.search(queries)


def test_a_fault_in_an_upload_leaves_the_index_that_was_there(
    tmp_path: Path, small_limits: Callable[..., None]
) -> None:
    small_limits(upload_tries=1)
    uri = "faulty://bucket/notes"
    old = Retriever.build("bm25", TEXTS, tmp_path / "old")
    new = Retriever.build("bm25", {"x": "only one"}, tmp_path / "new")
    upload_index(tmp_path / "old", uri)
    first, Faulty.calls = Faulty.calls, 0
    upload_index(tmp_path / "old", uri, overwrite=True)
    assert Faulty.calls < first  # files that are there are not sent again
    stored = dict(Faulty.store)
    for call in itertools.count(1):
        Faulty.store.clear()
        Faulty.store.update(stored)
        Faulty.calls, Faulty.fail_at = 0, frozenset({call})
        with contextlib.suppress(StorageError):
            upload_index(tmp_path / "new", uri, overwrite=True)
            break
        Faulty.fail_at = frozenset()
        assert Retriever.load(uri).search("common") == old.search("common")
        upload_index(tmp_path / "new", uri, overwrite=True)  # goes on
        assert Retriever.load(uri).search("only") == new.search("only")
    assert call > first // 2
    assert Retriever.load(uri).search("only") == new.search("only")


def test_faults_in_passing_are_tried_again(tmp_path: Path) -> None:
    uri = "faulty://bucket/notes"
    one = Retriever.build("bm25", TEXTS, tmp_path / "one")
    Faulty.fail_at = frozenset({2, 5, 9, 14})
    upload_index(tmp_path / "one", uri)
    Faulty.calls, Faulty.fail_at = 0, frozenset({2, 6, 7})
    assert Retriever.load(uri).search("common") == one.search("common")


def test_a_download_that_is_cut_goes_on_and_one_that_is_altered_is_refused(tmp_path: Path) -> None:
    uri = "faulty://bucket/notes"
    one = Retriever.build("bm25", TEXTS, tmp_path / "one")
    found = upload_index(tmp_path / "one", uri)
    Faulty.cut_after = 1500
    with pytest.raises(StorageError, match="cut after 1,500 of"):
        Retriever.load(uri)
    Faulty.cut_after, Faulty.calls = None, 0
    assert Retriever.load(uri).search("common") == one.search("common")
    assert Faulty.calls < 2 * len(found.files)  # the small files were there already
    # another machine, after a bit was flipped in the store
    name = max(found.files, key=lambda file: found.files[file][0])
    store, root = fsspec.core.url_to_fs(uri)
    data = bytearray(store.cat_file(f"{root}/{found.folder}/{name}"))
    data[len(data) // 2] ^= 1
    store.pipe_file(f"{root}/{found.folder}/{name}", bytes(data))
    copy = download_index(uri)
    assert Retriever.load(uri).search("common") == one.search("common")  # from the copy
    copy.rename(tmp_path / "away")
    with pytest.raises(CorruptError, match="upload the index again"):
        Retriever.load(uri)
    # markers that are damaged or name what no index has
    marker = f"{root}/{MARKER}"
    saved = json.loads(store.cat_file(marker))
    for wrong in (b"", b"{}", b"[]", json.dumps(saved | {"folder": "v-../../etc"}).encode()):
        store.pipe_file(marker, wrong)
        with pytest.raises(CorruptError, match="is damaged"):
            Retriever.load(uri)
    store.rm(marker)
    with pytest.raises(StorageError, match="no index is there"):
        Retriever.load(uri)


def test_nobody_changes_a_directory_while_it_is_uploaded(tmp_path: Path) -> None:
    one = Retriever.build("bm25", TEXTS, tmp_path / "one")
    with one.store.update(), pytest.raises(LockedError):
        upload_index(tmp_path / "one", "memory://bucket/one")
    with pytest.raises(StorageError, match="opening index"):
        upload_index(tmp_path, "memory://bucket/one")


def test_the_command_line_takes_uris(
    tmp_path: Path, notes: Path, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, out = f"file://{notes}", f"file://{tmp_path}/store/index"
    assert command("index", "bm25", corpus, "--out", out)[0] == 0
    status, told = command("search", out, "--text", "search index")[:2]
    assert status == 0
    assert command("index", "bm25", str(notes), "--out", str(tmp_path / "own"))[0] == 0
    assert command("search", str(tmp_path / "own"), "--text", "search index")[1] == told
    assert command("index", "bm25", corpus, "--out", out)[0] == 2
    assert command("index", "bm25", corpus, "--out", out, "--overwrite")[0] == 0
    assert json.loads(command("info", out, "--json")[1])["index"] == out
    assert (download_index(out) / "recipe.yaml").read_text().splitlines()[0].startswith("model: bm25")
    status, _, problem = command("search", f"file://{tmp_path}/store/none", "--text", "x")
    assert (status, "no index is there" in problem) == (2, True)


def test_a_build_that_was_killed_after_its_upload_can_be_repeated() -> None:
    uri = "memory://killed/notes"
    Retriever.build("bm25", TEXTS, uri)
    left = copies_of(uri) / "build"  # marked as a copy, and not renamed
    Retriever.build("bm25", {"a": "left"}, left).close()
    (left / COPY).write_text(uri)
    assert len(Retriever.build("bm25", {"a": "new text"}, uri, overwrite=True)) == 1
    assert [hit.id for hit in Retriever.load(uri).search("new")] == ["a"]
