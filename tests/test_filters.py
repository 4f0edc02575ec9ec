"""Filters by typed columns find what plain Python finds in the metadata, through every change of an index."""

# ruff: noqa: PT012 (an update is a block)
from __future__ import annotations

import datetime
import json
import operator
import shutil
import zipfile
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given as given_values
from hypothesis import settings
from hypothesis import strategies as st

from irkit import Retriever
from irkit.data.document import Document
from irkit.errors import BadTypeError, BadValueError, CorruptError
from irkit.index import Documents, Limits, Store, compact, create_index, use_limits

GOLDEN = Path(__file__).parent / "golden" / "indexes.zip"
ORDER = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@pytest.fixture(scope="module", autouse=True)
def little_is_much() -> Iterator[None]:
    """A few entries are sorted."""
    with use_limits(Limits(unsorted=2)):
        yield


def build(path: Path, metadata: list[dict[str, Any]], chunk: int = 3) -> Documents:
    with Store.build(path, overwrite=True) as store:
        create_index(store)
        for start in range(0, len(metadata), chunk):
            Documents(store).add(numbered(metadata[start : start + chunk], start))
            if start < chunk:  # the rest is not sorted
                Documents(store).finish()
        store.publish()
    return Documents(Store.open(path))


def numbered(metadata: list[dict[str, Any]], start: int = 0) -> list[Document]:
    return [Document(f"d{i}", "", metadata=values) for i, values in enumerate(metadata, start)]


# ---- the same in plain Python ----


def same(left: Any, right: Any) -> bool:
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


def comparable(left: Any, right: Any) -> bool:
    def kind(value: Any) -> Any:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return str if isinstance(value, str) else float if number else None

    return kind(left) is not None and kind(left) == kind(right)


def holds(value: Any, sign: str, wanted: Any) -> bool:
    elements = value if isinstance(value, list) else [value]
    if sign in ("!=", "not in"):
        return not holds(value, "==" if sign == "!=" else "in", wanted)
    if sign == "all":
        return all(holds(value, "==", one) for one in wanted)
    if sign == "prefix":
        return any(isinstance(element, str) and element.startswith(wanted) for element in elements)
    if sign in ORDER:
        return any(comparable(element, wanted) and ORDER[sign](element, wanted) for element in elements)
    return any(same(element, one) for element in elements for one in (wanted if sign == "in" else [wanted]))


def meets(where: dict[str, Any], document: Document) -> bool:
    metadata = json.loads(json.dumps(document.metadata))
    for key, given in where.items():
        if key in ("$and", "$or"):
            fine = (all if key == "$and" else any)(meets(part, document) for part in given)
        elif key == "$not":
            fine = not meets(given, document)
        elif key == "_id":
            fine = document.id in given
        else:
            tests = given if isinstance(given, dict) else {"in" if isinstance(given, list) else "==": given}
            fine = all(
                (key in metadata) == wanted
                if sign == "exists"
                else key in metadata and holds(metadata[key], sign, wanted)
                for sign, wanted in tests.items()
            )
        if not fine:
            return False
    return True


# ---- properties ----

HUGE = [2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**30, -(10**30)]
numbers = (
    st.integers(-3, 3)
    | st.sampled_from(HUGE)
    | st.sampled_from([0.5, -0.0, 2.0, 2.5, 1e300, float(2**53), float(2**63), -1e19, 1e30])
)
strings = st.text("ab\0ü\ud800😀", max_size=3) | st.builds(
    operator.add,
    st.sampled_from(["https://example.org/", "12345678", "1234567"]),
    st.text("a\0b", max_size=12),
)
scalars = st.none() | st.booleans() | numbers | strings
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("xy"), inner, max_size=2),
    max_leaves=6,
)
metadata_lists = st.lists(st.dictionaries(st.sampled_from("abc"), values, max_size=3), max_size=12)
tests_of_a_key = (
    scalars
    | st.lists(scalars, max_size=3)
    | st.dictionaries(st.sampled_from(["==", "!="]), scalars, min_size=1)
    | st.dictionaries(st.sampled_from(list(ORDER)), numbers | strings, min_size=1)
    | st.dictionaries(st.sampled_from(["in", "not in", "all"]), st.lists(scalars, max_size=20), min_size=1)
    | st.builds(lambda text: {"prefix": text}, strings)
    | st.builds(lambda flag: {"exists": flag}, st.booleans())
)
filters = st.recursive(
    st.dictionaries(st.sampled_from("abc"), tests_of_a_key, max_size=2)
    | st.builds(lambda ids: {"_id": ids}, st.lists(st.sampled_from(["d0", "d1", "d7", "?"]), max_size=3)),
    lambda inner: (
        st.builds(lambda part: {"$not": part}, inner)
        | st.builds(
            lambda sign, parts: {sign: parts},
            st.sampled_from(["$and", "$or"]),
            st.lists(inner, min_size=1, max_size=3),
        )
    ),
    max_leaves=4,
)


def check(documents: Documents, everything: list[Document], where: dict[str, Any]) -> None:
    """Compare a filter with plain Python; one that is refused names a key or a type that nobody has."""
    try:
        found = documents.filter(where).tolist()
    except BadValueError as error:
        if "no document has the key" not in str(error) and "; documents have" not in str(error):
            raise
        return
    live = documents.find([document.id for document in everything]) >= 0
    wanted = [meets(where, document) for document in everything]
    assert [one for one, there in zip(found, live, strict=True) if there] == [
        one for one, there in zip(wanted, live, strict=True) if there
    ]


@given_values(metadata_lists, st.lists(filters, min_size=1, max_size=6), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_a_filter_finds_what_python_finds(
    tmp_path_factory: pytest.TempPathFactory, given: list[dict[str, Any]], wheres: list[Any], chunk: int
) -> None:
    path = tmp_path_factory.mktemp("index")
    documents = build(path, given, chunk)
    for where in wheres:
        check(documents, numbered(given), where)
    shutil.rmtree(path)


@given_values(st.data())
@settings(max_examples=15, deadline=None)
def test_a_filter_follows_every_change(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("index")
    everything = numbered(data.draw(metadata_lists))
    documents = build(path, [dict(document.metadata) for document in everything])
    other = Documents(Store.open(path))
    for _ in range(data.draw(st.integers(1, 5))):
        action = data.draw(st.sampled_from(["add", "fail", "remove", "reopen", "compact", "other"]))
        more = numbered(data.draw(metadata_lists), len(everything))
        if action in ("add", "other"):
            (documents if action == "add" else other).add(more)
            everything += more
        elif action == "fail":
            with pytest.raises(KeyError), documents.store.update():
                documents.add(more)
                check(documents, everything + more, data.draw(filters))
                raise KeyError
        elif action == "remove" and everything:
            rows = data.draw(st.lists(st.integers(0, len(everything) - 1), unique=True))
            with documents.store.update():
                documents.store.append("removed.bin", np.array(rows, np.int64))
        elif action == "reopen":
            documents = Documents(Store.open(path))
        for one in (documents, other):
            one.store.refresh()
            check(one, everything, data.draw(filters))
    shutil.rmtree(path)


def test_strings_of_every_length_are_compared_byte_by_byte(tmp_path: Path) -> None:
    parts = [
        "",
        "a",
        "a\0",
        "a\0b",
        "abcdefgh",
        "abcdefgh\0",
        "abcdefghi",
        "abcdefghijklmnop",
        "ü" * 9,
        "b" * 40,
    ]
    documents = build(tmp_path, [{"s": part} for part in parts], chunk=4)
    for wanted in [*parts, "abcdefg", "abcdefghijklmnopq", "z", "ü"]:
        for sign in (*ORDER, "==", "prefix"):
            expected = [holds(part, sign, wanted) for part in parts]
            assert documents.filter({"s": {sign: wanted}}).tolist() == expected, (sign, wanted)
    many = [f"x{i}" for i in range(100)]
    assert documents.filter({"s": [*parts[::2], *many]}).tolist() == [i % 2 == 0 for i in range(len(parts))]


def test_dates_stand_for_iso_strings(tmp_path: Path) -> None:
    days = ["2024-04-30", "2024-05-01", "2024-05-31T23:00:00", "2024-06-01"]
    documents = build(tmp_path, [{"date": day} for day in days])
    may = {">=": datetime.date(2024, 5, 1), "<": datetime.date(2024, 6, 1)}
    assert documents.filter({"date": may}).tolist() == [False, True, True, False]
    assert documents.filter({"date": {">=": "2024-05"}}).tolist() == [False, True, True, True]
    assert documents.filter({"date": {"prefix": "2024-05"}}).tolist() == [False, True, True, False]
    moment = datetime.datetime(2024, 5, 31, 23)
    assert documents.filter({"date": [moment, datetime.date(2024, 6, 1)]}).tolist() == [
        False,
        False,
        True,
        True,
    ]


def test_facets(tmp_path: Path) -> None:
    metadata = [
        {"tag": ["a", "b", "a"], "n": 1},
        {"tag": "a", "n": 1.0},
        {"tag": None, "n": True},
        {"n": 10**30, "tag": []},
        {"tag": [{"x": 1}, "b"], "n": 2.5},
        {"tag": "gone"},
    ]
    documents = build(tmp_path / "index", metadata)
    with documents.store.update():
        documents.store.append("removed.bin", np.array([5]))
    assert documents.metadata_keys() == ["n", "tag"]
    assert documents.facets("tag") == [("a", 2), ("b", 2), (None, 1)]
    assert [(repr(value), count) for value, count in documents.facets("n")] == [
        ("1", 2), ("True", 1), (repr(10**30), 1), ("2.5", 1)
    ]  # fmt: skip
    assert documents.facets("tag", {"n": 1}, k=1) == [("a", 2)]
    assert documents.facets("tag", {"n": 7}) == []
    with pytest.raises(BadValueError, match=r"facets: no document has the key 'tga'; did you mean 'tag'\?"):
        documents.facets("tga")
    with pytest.raises(BadValueError, match="facets: k is 0"):
        documents.facets("tag", k=0)
    with pytest.raises(BadTypeError, match="facets: the key is 3"):
        documents.facets(3)  # type: ignore[arg-type]
    assert build(tmp_path / "empty", []).facets("tag") == []


def test_facets_of_a_retriever(tmp_path: Path) -> None:
    documents = [Document(f"d{i}", "word", metadata={"year": 2000 + i % 3}) for i in range(7)]
    retriever = Retriever.build("bm25", documents, tmp_path / "index")
    assert retriever.facets("year") == [(2000, 3), (2001, 2), (2002, 2)]
    assert retriever.facets("year", ["d1", "d4", "?"]) == [(2001, 2)]
    retriever.remove("d1")
    assert retriever.facets("year", {"year": {"<": 2002}}, k=5) == [(2000, 3), (2001, 1)]
    compact(tmp_path / "index")
    retriever.refresh()
    assert retriever.facets("year", {"year": {"<": 2002}}, k=5) == [(2000, 3), (2001, 1)]


def test_strings_that_are_stored_several_times_are_one_value(tmp_path: Path) -> None:
    metadata = [{f"k{i % 4}": f"v{i % 5}"} for i in range(40)]
    documents = build(tmp_path, metadata, chunk=7)
    for number in range(4):
        check(documents, numbered(metadata), {f"k{number}": ["v1", "v3"]})
    assert documents.facets("k1") == [(f"v{i}", 2) for i in (1, 0, 4, 3, 2)]


@pytest.mark.parametrize("block", [1, 7, 1 << 14])
def test_an_index_with_metadata_in_json_filters_and_is_upgraded_by_an_addition(
    tmp_path: Path, block: int
) -> None:
    with zipfile.ZipFile(GOLDEN) as archive:
        name = archive.namelist()[0].split("/")[0]
        name = next(file.split("/")[0] for file in archive.namelist() if "/metadata" in file) or name
        archive.extractall(tmp_path, [file for file in archive.namelist() if file.startswith(f"{name}/")])
    with use_limits(Limits(filter_rows=block)):
        documents = Documents(Store.open(tmp_path / name))
    everything = documents.fetch(np.arange(len(documents)))
    wheres: list[Any] = [{"n": {">=": 5, "<": 20}}, {"n": 1}, {"$not": {"n": {"exists": True}}}]
    expected = [[meets(where, document) for document in everything] for where in wheres]
    files = {file.name for file in (tmp_path / name).iterdir()}
    assert [documents.filter(where).tolist() for where in wheres] == expected
    assert {file.name for file in (tmp_path / name).iterdir()} == files
    documents.add([Document("new", "", metadata={"n": 6, "lang": "de"})])
    assert "metadata.jsonl" not in documents.store.sizes()
    for again in (documents, Documents(Store.open(tmp_path / name))):
        found = [again.filter(where).tolist() for where in wheres]
        assert found == [[*mask, last] for mask, last in zip(expected, [True, False, False], strict=True)]
        assert again.fetch(np.arange(len(everything))) == everything
        assert again.filter({"lang": {"prefix": "d"}}).sum() == 1


def damage(store: Store, name: str, change: Any) -> Store:
    """Write an array anew."""
    array = store.read(name).copy()
    with store.update():
        change(array)
        store.drop(name)
        store.append(name, array)
    return Store.open(store.path)


@pytest.mark.parametrize("number", [-1, -(1 << 63), 6, 1 << 40, (1 << 63) - 1])
@pytest.mark.parametrize(
    "place",
    [("field_entries.bin", (slice(None), 0)), ("field_runs.bin", (0, 0)), ("field_runs.bin", (0, 1)),
     ("field_runs.bin", (1, 2)), ("field_ends.bin", 1), ("field_entries.bin", (slice(None), 1)),
     ("field_order.bin", slice(None)), ("field_sorted.bin", slice(None)),
     ("field_groups.bin", (0, 0)), ("field_groups.bin", (1, 2))],
)  # fmt: skip
def test_damaged_columns_are_an_error_or_another_answer(tmp_path: Path, place: Any, number: int) -> None:
    documents = build(tmp_path, [{"s": f"text {i}", "n": i, "x": 0.5} for i in range(3)])
    name, at = place

    def change(array: np.ndarray) -> None:
        array[at] = np.array(number).astype(array.dtype)

    store = damage(documents.store, name, change)
    broken, refused = Documents(store), 0
    for where in (
        {"s": {"<": "text 2"}},
        {"s": "text 1"},
        {"s": {"prefix": "t"}},
        {"n": {">": 0}},
        {"x": 0.5},
    ):
        try:
            assert broken.filter(where).shape == (3,)
            broken.facets(next(iter(where)))
        except (CorruptError, BadValueError):
            refused += 1
    assert refused or number == 6 or name in ("field_entries.bin", "field_order.bin", "field_sorted.bin")


def test_arrays_that_are_too_short_are_an_error(tmp_path: Path) -> None:
    for name in ("field_entries.bin", "field_ends.bin", "field_strings.bin", "field_runs.bin"):
        documents = build(tmp_path / name, [{"s": f"text {i}"} for i in range(3)])
        store = documents.store
        array = store.read(name)[:-1].copy()
        with store.update():
            store.drop(name)
            store.append(name, array)
        with pytest.raises((CorruptError, BadValueError)):
            Documents(Store.open(store.path)).filter({"s": {">": ""}})


def test_filters_may_be_any_mapping(tmp_path: Path) -> None:
    words = Retriever.build("bm25", {str(n): {"text": "word", "n": n} for n in range(9)}, tmp_path / "index")
    where: Any = MappingProxyType({"n": MappingProxyType({">": 3}), "$not": UserDict(n=5)})
    assert {hit.id for hit in words.search("word", filter=where)} == {"4", "6", "7", "8"}


def test_facets_count_equal_floats_and_huge_integers_together(tmp_path: Path) -> None:
    numbers = [1.5, 1.5, 1e20, 10**20, 10**20]
    words = Retriever.build(
        "bm25", {str(n): {"text": "word", "n": value} for n, value in enumerate(numbers)}, tmp_path / "index"
    )
    assert words.documents.facets("n", k=1) == [(1e20, 3)]
