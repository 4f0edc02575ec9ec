"""Documents on disk: what comes back, ids that stay unique, filters, and changes that fail."""

# ruff: noqa: PT012 (an update is a block)
from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit import Dense
from irkit.data.document import Document
from irkit.errors import BadValueError, StorageError
from irkit.index import Documents, Limits, Store, compact, create_index, open_index


def build(path: Path, documents: list[Document], chunk: int = 3) -> Documents:
    with Store.build(path) as store:
        create_index(store)
        for start in range(0, len(documents), chunk):
            Documents(store).add(documents[start : start + chunk])
        store.publish()
    return Documents(Store.open(path))


def numbered(n: int, **metadata: Any) -> list[Document]:
    return [Document(f"d{i}", f"text {i}", metadata=metadata) for i in range(n)]


def mark_removed(documents: Documents, rows: list[int]) -> None:
    """What an index does when it removes rows."""
    with documents.store.update():
        documents.store.append("removed.bin", np.array(rows, np.int64))


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)  # no UTF-8 for lone surrogates
metadata_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=5,
)
documents_lists = st.lists(
    st.builds(
        Document,
        id=texts.filter(bool),
        text=texts,
        title=texts,
        metadata=st.dictionaries(st.text(max_size=3), metadata_values, max_size=3),
    ),
    max_size=12,
    unique_by=lambda document: document.id,
)


@given(documents_lists, st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_documents_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, given: list[Document], chunk: int
) -> None:
    documents = build(tmp_path_factory.mktemp("index"), given, chunk)
    rows = np.arange(len(given))
    assert documents.fetch(rows) == given
    assert documents.ids(rows) == [document.id for document in given]
    assert documents.find([document.id for document in given]).tolist() == rows.tolist()
    assert documents.fetch(rows[::-1]) == given[::-1]
    assert documents.find(["\N{BELL} not an id"]).tolist() == [-1]


def test_the_file_is_a_beir_corpus(tmp_path: Path) -> None:
    build(tmp_path / "index", [Document("a", "one\ntwo", "title", {"year": 1}), Document("b", "ümlaut")])
    (file,) = (tmp_path / "index").glob("documents.*.jsonl")
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert lines == [
        {"_id": "a", "title": "title", "text": "one\ntwo", "metadata": {"year": 1}},
        {"_id": "b", "title": "", "text": "ümlaut"},
    ]


def test_ids_are_unique_among_what_is_there(tmp_path: Path) -> None:
    documents = build(tmp_path / "index", numbered(10))
    before = {file.name: file.read_bytes() for file in (tmp_path / "index").iterdir()}
    with pytest.raises(BadValueError, match=r"1 of the ids in the index already: 'd3'; .*update"):
        documents.add([Document("new", ""), Document("d3", "")])
    with pytest.raises(BadValueError, match="2 of the ids given more than once: 'x', 'y'"):
        documents.add([Document(name, "") for name in "xyzxy"])
    with pytest.raises(BadValueError, match=r"'d0', 'd1', 'd2', \.\.\.;"):
        documents.add(numbered(10))
    assert {file.name: file.read_bytes() for file in (tmp_path / "index").iterdir()} == before
    assert documents.add([Document("new", "")]) == range(10, 11)


def test_removed_ids_may_come_again(tmp_path: Path) -> None:
    documents = build(tmp_path / "index", numbered(5))
    for again in range(3):
        (row,) = documents.find(["d2"]).tolist()
        mark_removed(documents, [row])
        assert documents.find(["d1", "d2"]).tolist() == [1, -1]
        assert documents.add([Document("d2", f"new {again}")]) == range(5 + again, 6 + again)
        assert documents.find(["d2"]).tolist() == [5 + again]
    assert documents.fetch(np.array([2, 7])) == [Document("d2", "text 2"), Document("d2", "new 2")]
    assert Documents(Store.open(tmp_path / "index")).find(["d2"]).tolist() == [7]


def test_ids_of_the_same_hash_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashlib, "blake2b", lambda *_, **__: SimpleNamespace(digest=lambda: bytes(8)))
    documents = build(tmp_path / "index", numbered(7))
    assert documents.find(["d6", "d0", "d9"]).tolist() == [6, 0, -1]
    with pytest.raises(BadValueError, match="already"):
        documents.add([Document("d4", "")])


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_lookup_after_any_history(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    documents = build(tmp_path_factory.mktemp("index"), [])
    live: dict[str, int] = {}
    count = 0
    for _ in range(data.draw(st.integers(1, 6))):
        names = data.draw(st.lists(st.sampled_from(string.ascii_lowercase), unique=True, max_size=8))
        action = data.draw(st.sampled_from(["update", "remove", "fail", "reopen"]))
        rows = [live[name] for name in names if name in live]
        if action == "reopen":
            documents = Documents(Store.open(documents.store.path))
        elif action == "fail":  # everything of it is taken back
            with pytest.raises(KeyError), documents.store.update():
                mark_removed(documents, rows)
                documents.add([Document(name, "gone") for name in names])
                documents.find(names)
                raise KeyError
        else:
            with documents.store.update():
                mark_removed(documents, rows)
                live = {name: row for name, row in live.items() if name not in names}
                if action == "update":
                    documents.add([Document(name, "") for name in names])
                    live |= {name: count + place for place, name in enumerate(names)}
                    count += len(names)
        letters = list(string.ascii_lowercase)
        assert documents.find(letters).tolist() == [live.get(name, -1) for name in letters]
        assert len(documents) == count


def test_a_lookup_sees_what_another_process_added(tmp_path: Path) -> None:
    reader = build(tmp_path / "index", numbered(3))
    assert reader.find(["d1", "new"]).tolist() == [1, -1]
    writer = Documents(Store.open(tmp_path / "index"))
    writer.add([Document("new", "")])
    assert reader.find(["new"]).tolist() == [-1]
    reader.store.refresh()
    assert reader.find(["new"]).tolist() == [3]


def test_bad_rows_and_metadata_are_refused(tmp_path: Path) -> None:
    documents = build(tmp_path / "index", numbered(3))
    for rows in ([3], [-1], [0, 99]):
        for method in (documents.ids, documents.fetch):
            with pytest.raises(BadValueError, match="expected 0 to 2"):
                method(np.array(rows))
    for value in ({1, 2}, object(), b"bytes"):
        with pytest.raises(BadValueError, match="metadata of 'x' is not JSON"):
            documents.add([Document("x", "", metadata={"key": value})])
    assert len(documents) == 3
    assert documents.fetch(np.array([], int)) == documents.ids(np.array([], int)) == []


def test_lone_surrogates_in_metadata(tmp_path: Path) -> None:
    document = Document("a", "", metadata={"broken": "\ud800", "\udfff": 1})
    documents = build(tmp_path / "index", [document])
    assert documents.fetch(np.array([0])) == [document]
    assert documents.filter({"broken": "\ud800"}).tolist() == [True]


YEARS: list[dict[str, Any]] = [
    {"year": 1999, "lang": "de", "open": True},
    {"year": 2000, "lang": "en", "tags": ["a", "b"]},
    {},
    {"year": 2005.5, "lang": None, "tags": []},
    {"year": "2005", "open": False, "tags": ["b", 3]},
    {"year": True, "open": 1},
    {"year": 2010, "nested": {"year": 2000}},
]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"year": 2000}, [1]),
        ({"year": {">=": 2000}}, [1, 3, 6]),
        ({"year": {">=": 2000, "<": 2010}}, [1, 3]),
        ({"year": {"<=": "2005"}}, [4]),
        ({"year": {"!=": 2000}}, [0, 3, 4, 5, 6]),
        ({"year": [1999, 2010]}, [0, 6]),
        ({"year": {"in": (1999, 2010)}}, [0, 6]),
        ({"year": []}, []),
        ({"year": 1}, []),  # true is not 1
        ({"open": True}, [0]),
        ({"open": 1}, [5]),
        ({"lang": None}, [3]),
        ({"lang": {"!=": None}}, [0, 1]),
        ({"lang": {">": "de"}}, [1]),
        ({"tags": "b"}, [1, 4]),
        ({"tags": ["a", 3]}, [1, 4]),
        ({"tags": {"!=": "a"}}, [3, 4]),
        ({"tags": {">": 2}}, [4]),
        ({"year": {">": 1000}, "lang": ["de", "en"]}, [0, 1]),
        ({"lang": {"!=": None}, "year": [1999, "2005"]}, [0]),
        ({"tags": None}, []),  # null may be anywhere
        ({"tags": {"all": ["b", 3]}}, [4]),
        ({"tags": {"all": []}}, [1, 3, 4]),
        ({"year": {"not in": [1999, "2005"]}}, [1, 3, 5, 6]),
        ({"tags": {"not in": ["a"]}}, [3, 4]),
        ({"lang": {"exists": True}}, [0, 1, 3]),
        ({"lang": {"exists": False}}, [2, 4, 5, 6]),
        ({"year": {"prefix": "20"}}, [4]),
        ({"lang": {"prefix": ""}}, [0, 1]),
        ({"$or": [{"year": 1999}, {"tags": "b", "open": False}]}, [0, 4]),
        ({"$and": [{"year": {">": 1}}, {"$not": {"lang": "de"}}], "year": {"<": 2010}}, [1, 3]),
        ({"$not": {"year": {"exists": True}}}, [2]),
        ({"$not": {}}, []),
        ({"_id": ["d1", "d4", "none"]}, [1, 4]),
        ({"$or": [{"_id": "d0"}, {"_id": {"in": ["d2"]}}]}, [0, 2]),
        ({"_id": {"!=": "d0"}, "year": {"exists": True}}, [1, 3, 4, 5, 6]),
    ],
)
@pytest.mark.parametrize("block", [1, 3, 1 << 14])
def test_filters(tmp_path: Path, where: dict[str, Any], rows: list[int], block: int) -> None:
    given = [Document(f"d{i}", "", metadata=metadata) for i, metadata in enumerate(YEARS)]
    documents = build(tmp_path / "index", given)
    documents.store.limits = Limits(filter_rows=block)
    assert np.flatnonzero(documents.filter(where)).tolist() == rows


def nested(depth: int) -> dict[str, Any]:
    where: dict[str, Any] = {"year": 1}
    for _ in range(depth):
        where = {"$not": where}
    return where


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"year": {"~": 1}}, "operator '~'.*== != < <= > >= in"),
        ({"year": {">": None}}, "expected a number"),
        ({"year": {">": [1]}}, "expected a number"),
        ({"year": {">": True}}, "expected a number"),
        ({"year": {"in": 3}}, "list"),
        ({"year": {"in": "abc"}}, "list"),
        ({"year": [{"a": 1}]}, "list"),
        ({"year": {"==": {"a": 1}}}, "expected a number"),
        ({"year": object()}, "expected a number"),
        ({1: 2}, "expected a dictionary"),
        ("year=2000", "expected a dictionary"),
        ({"year": {"prefix": 2}}, "'year' prefix 2; expected a string"),
        ({"year": {"exists": 1}}, "'year' exists 1; expected true or false"),
        ({"year": {"all": 1}}, "expected a list, each a number"),
        ({"year": {"not in": "ab"}}, "expected a list"),
        ({"year": float("nan")}, "expected a number"),
        ({"year": {"in": [float("nan")]}}, "expected a list"),
        ({"year": 10**5000}, "expected a number"),
        ({"year": {}}, "'year' has no condition"),
        ({"$or": {"year": 1}}, r"\$or has .*expected filters in a list"),
        ({"$or": []}, r"\$or has \[\]; expected filters in a list"),
        ({"$and": [1]}, "expected a dictionary"),
        ({"$not": [{"year": 1}]}, "expected a dictionary"),
        ({"$nor": [{"year": 1}]}, r"did you mean '\$or'\?"),
        ({"_id": {">": "d1"}}, "'_id' has the operator '>'; expected one of == != in not in"),
        (nested(60), "more than 50 groups"),
    ],
)
def test_bad_filters_are_refused(tmp_path: Path, where: Any, message: str) -> None:
    documents = build(tmp_path / "index", numbered(2))
    with pytest.raises(BadValueError, match=message):
        documents.filter(where)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"yaer": 2000}, "no document has the key 'yaer'; did you mean 'year'"),
        (
            {"year": 2000, "zzz": 1},
            "no document has the key 'zzz'; there are 'lang', 'nested', 'open', 'tags'",
        ),
        ({"missing": {"!=": 1}}, "no document has the key 'missing'"),
        ({"lang": 5}, r"'lang' == 5 is a number; documents have a string, such as 'de'"),
        ({"lang": ["de", 5]}, "'lang' in 5 is a number"),
        ({"lang": {">": 5}}, "'lang' > 5 is a number"),
        ({"lang": {"!=": True}}, "'lang' != True is true or false"),
        ({"$or": [{"year": 1}, {"$not": {"yaer": 1}}]}, "did you mean 'year'"),
        ({"yaer": {"exists": False}}, "did you mean 'year'"),
        (
            {"open": {"prefix": "t"}},
            "'open' prefix 't' is a string; documents have true or false, such as True or",
        ),
        ({"nested": 2000}, "documents have keys and values, such as {'year': 2000}"),
    ],
)
def test_filters_that_nothing_could_meet_are_refused(tmp_path: Path, where: Any, message: str) -> None:
    given = [Document(f"d{i}", "", metadata=metadata) for i, metadata in enumerate(YEARS)]
    documents = build(tmp_path / "index", given)
    with pytest.raises(BadValueError, match=message):
        documents.filter(where)


def test_the_keys_of_a_filter_are_those_of_the_newest_state(tmp_path: Path) -> None:
    documents = build(tmp_path / "index", [])
    assert documents.filter({"year": 1}).tolist() == []  # there is nothing that it could disagree with
    documents.add(numbered(2))
    with pytest.raises(BadValueError, match="no document has the key 'year'; none has metadata"):
        documents.filter({"year": 1})
    documents.add([Document("x", "", metadata={"year": 1})])
    assert documents.filter({"year": 1}).tolist() == [False, False, True]
    with pytest.raises(BadValueError, match="documents have a number, such as 1"):
        documents.filter({"year": "new"})
    documents.add([Document("y", "", metadata={"year": "new"})])
    assert documents.filter({"year": "new"}).tolist() == [False] * 3 + [True]


def test_filters_follow_changes(tmp_path: Path) -> None:
    documents = build(tmp_path / "index", numbered(3, year=1))
    assert documents.filter({"year": 1}).tolist() == [True] * 3
    assert documents.filter({"year": 1}) is documents.filter({"year": 1})  # kept
    documents.add([Document("x", "", metadata={"year": 2}), Document("y", "")])
    assert documents.filter({"year": 2}).tolist() == [False] * 3 + [True, False]
    assert documents.filter({"year": 1}).tolist() == [True] * 3 + [False, False]


def test_filtered_search_and_removal_through_the_index(tmp_path: Path) -> None:
    given = [Document(f"d{i}", "", metadata={"even": i % 2 == 0}) for i in range(8)]
    with Store.build(tmp_path / "index") as store:
        index, documents = create_index(store), Documents(store)
        for chunk in (given[:3], given[3:]):
            with store.update():
                documents.add(chunk)
                index.add(Dense(torch.ones(len(chunk), 2)))
        store.publish()
    store = Store.open(tmp_path / "index")
    index, documents = open_index(store), Documents(store)
    with store.update():  # an update of a document: out with the old row, in with the new
        index.remove(documents.find(["d2", "d3"]))
        documents.add([Document("d2", "new", metadata={"even": True})])
        index.add(Dense(torch.ones(1, 2)))
    hits = index.search(Dense(torch.ones(1, 2)), 9, documents.filter({"even": True}))
    assert hits.rows.tolist() == [[0, 4, 6, 8, -1, -1, -1, -1, -1]]
    assert documents.ids(hits.rows[0, :4]) == ["d0", "d4", "d6", "d2"]


def test_compaction_keeps_what_is_live(tmp_path: Path, small_limits: Callable[..., None]) -> None:
    small_limits(compact_bytes=400)
    path = tmp_path / "index"
    given = [Document(f"d{i}", f"text {i}", metadata={"even": i % 2 == 0}) for i in range(50)]
    data = torch.arange(100.0).view(50, 2)
    with Store.build(path, key="what") as store:
        index = create_index(store)
        with store.update():
            Documents(store).add(given)
            index.add(Dense(data))
            index.remove(range(10, 40))
            store.meta["model"] = {"name": "x"}
        store.publish()
    before, reader = store.meta, Store.open(path)
    size = open_index(reader).stats()["bytes"]
    compact(path)
    store = Store.open(path)
    index, documents = open_index(store), Documents(store)
    kept = [*range(10), *range(40, 50)]
    assert documents.fetch(np.arange(20)) == [given[i] for i in kept]
    assert documents.find(["d9", "d10", "d40"]).tolist() == [9, -1, 10]
    assert torch.equal(index.representations(np.arange(20)).values, data[kept])
    assert (store.meta["model"], store.meta["build"]) == (before["model"], before["build"])
    assert index.stats() == open_index(reader).stats() | {
        "removed": 0,
        "removed_share": 0.0,
        "bytes": index.stats()["bytes"],
    }
    assert index.stats()["bytes"] < size / 2
    assert Documents(reader).ids(np.array([10])) == ["d10"]  # who had it open sees no difference


def test_compaction_does_not_lose_a_change_made_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = build(tmp_path / "index", numbered(5))
    real = Store.build

    def late(*arguments: Any, **options: Any) -> Store:
        documents.add([Document("late", "")])
        return real(*arguments, **options)

    monkeypatch.setattr(Store, "build", late)
    with pytest.raises(StorageError, match="changed meanwhile"):
        compact(tmp_path / "index")
    assert Documents(Store.open(tmp_path / "index")).find(["late"]).tolist() == [5]


def test_metadata_that_json_cannot_say_is_refused(tmp_path: Path) -> None:
    documents = build(tmp_path / "index", numbered(3))
    for number in (float("nan"), float("inf")):
        with pytest.raises(BadValueError, match="metadata of 'x' is not JSON"):
            documents.add([Document("x", "", metadata={"score": number})])
    assert len(documents) == 3
