from __future__ import annotations

import datetime
import gzip
from pathlib import Path

import pytest

from irkit import Retriever
from irkit.data import Document, check_documents, read_documents, read_queries
from irkit.errors import BadTypeError, BadValueError

GOOD = (
    b"\xef\xbb\xbfID,Title,Text,year,zip,ok,note\r\n"
    b'a,T,"one, ""two""\r\nthree",2001,01234,true,\r\n\r\nb,,x,1.5,NaN,True,-\r\n'
)


@pytest.mark.parametrize("name", ["a.csv", "A.CSV", "a.csv.gz"])
def test_csv(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(GOOD) if name.endswith("gz") else GOOD)
    first, second = read_documents(path).numbered()
    assert first == (
        2,
        Document("a", 'one, "two"\r\nthree', "T", {"year": 2001, "zip": "01234", "ok": True}),
    )
    assert second == (5, Document("b", "x", "", {"year": 1.5, "zip": "NaN", "ok": "True", "note": "-"}))


def test_columns_with_other_names(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("url,head,p1,p2,id\nu,H,1,two,7\n")
    named = read_documents(path, id="url", text=["p1", "p2"], title="head")
    assert list(named) == [Document("u", "1 two", "H", {"id": 7})]
    assert list(read_documents(path, text="p2", metadata=[])) == [Document("7", "two")]
    assert next(iter(read_documents(path, text="p2", metadata=["url", "id"]))).metadata == {
        "url": "u",
        "id": "7",
    }
    assert [query.id for query in read_queries(path, field="p1", id="url")] == ["u"]
    table = tmp_path / "a.tsv"
    table.write_text("body2\tn\nx\t1\n")
    assert list(read_documents(table, text="body2")) == [Document("0", "x", metadata={"n": 1})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("id,text\na,b\na,c\n", ":3: id 'a' was used before, at 2"),
        ("id,text\na,b,c\n", ":2: expected 2 columns .id, text., got 3"),
        ("id,text\n,b\n", ":2: id: .*not empty"),
        ('id,text\na,"b\nc\n', ":2: not valid csv"),
        ('id,text\na,"b"c\n', ":2: not valid csv"),
        ("id;text\na;b\n", ":1: expected columns separated by commas"),
        ("id,id\na,b\n", ":1: two columns are named 'id'"),
        ("id,boddy\na,b\n", ":2: missing key 'text' .*other keys: boddy.*--text-column"),
        (b"id,text\na,\xff\n", ":2: byte 3 of the line"),
    ],
)
def test_bad_csv(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadValueError, match=message):
        check_documents(read_documents(path))
    with pytest.raises(BadValueError, match=message):
        Retriever.build("no such model", read_documents(path), tmp_path / "index")
    assert list(tmp_path.iterdir()) == [path]


def test_names_of_columns_that_are_wrong(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,body_text\na,b\n")
    with pytest.raises(BadValueError, match=r"a\.csv:1: no column 'bodytext'; did you mean 'body_text'"):
        list(read_documents(path, text="bodytext"))
    with pytest.raises(BadTypeError, match="id is"):
        read_documents(path, id=5)  # type: ignore[arg-type]
    with pytest.raises(BadTypeError, match="metadata is"):
        read_documents(path, metadata="year")
    with pytest.raises(BadValueError, match="text has no name"):
        read_documents(path, text=[])


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    day = datetime.date(2020, 1, 2)
    rows = [{"text": "a", "n": 1, "d": day, "s": {"x": [1]}, "b": b"x"}, {"text": "b", "n": None}]
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    kept = read_documents(path, metadata=["n", "d", "s"])
    assert list(kept) == [
        Document("0", "a", metadata={"n": 1, "d": "2020-01-02", "s": {"x": [1]}}),
        Document("1", "b"),
    ]
    with pytest.raises(BadValueError, match=r"a\.parquet:1: column 'b' holds bytes.*--metadata-columns"):
        list(read_documents(path))
    with pytest.raises(BadValueError, match="no column 'txt'; did you mean 'text'"):
        list(read_documents(path, text="txt"))
