from __future__ import annotations

import csv
import datetime
import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from irkit import Retriever
from irkit.data import Document, check_documents, read_documents, read_queries
from irkit.errors import BadTypeError, BadValueError
from irkit.training.training_data import DataConfig, open_data
from irkit.training.training_data.data_config import Columns
from irkit.training.training_data.text_store import TextStore

Command = Callable[..., tuple[int, str, str]]

GOOD = (
    b"\xef\xbb\xbfID,Title,Text,year,zip,ok,note\r\n"
    b'a,T,"one, ""two""\r\nthree",2001,01234,true,\r\n\r\n  \r\nb,,x,1.5,NaN,True,-\r\n'
)


@pytest.mark.parametrize("name", ["a.csv", "A.CSV", "a.csv.gz", "a.CSV.GZ"])
def test_csv(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(GOOD) if name.lower().endswith("gz") else GOOD)
    first, second = read_documents(path).numbered()
    assert first == (
        2,
        Document("a", 'one, "two"\r\nthree', "T", {"year": 2001, "zip": "01234", "ok": True}),
    )
    assert second == (6, Document("b", "x", "", {"year": 1.5, "zip": "NaN", "ok": "True", "note": "-"}))


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
    assert [query.id for query in read_queries(path, text="p1", id="url")] == ["u"]
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


def test_a_number_that_no_float_holds_stays_a_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"id,text,n\na,b,{'9' * 400}\n")
    assert next(iter(read_documents(path))).metadata == {"n": "9" * 400}


def test_parquet_with_values_that_python_cannot_hold(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    late = arrow.array([10**15], arrow.timestamp("ms"))
    twice = arrow.array([[("k", 1), ("k", 2)]], arrow.map_(arrow.string(), arrow.int64()))
    for values in (late, twice):
        parquet.write_table(arrow.table({"text": ["a"], "m": values}), path)
        with pytest.raises(BadValueError, match="expected a parquet file that can be read"):
            list(read_documents(path))


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


def test_long_values_leave_the_limit_of_csv_as_it_is(tmp_path: Path) -> None:
    path, long = tmp_path / "a.csv", "x" * 200_000
    path.write_text(f"id,text\na,{long}\nb,y\n")
    before = csv.field_size_limit()
    documents = iter(read_documents(path))
    assert next(documents).text == long
    assert csv.field_size_limit() == before
    next(csv.reader(["another reader"]))
    assert next(documents).text == "y"


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a table of pages and one of questions, whose columns have unusual names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pages.csv").write_text("url,head,body\nb.org,Bears,sleep in winter\nc.org,Copper,conducts\n")
    (tmp_path / "asked.tsv").write_text("n\task\nq1\tbears in winter\n")
    (tmp_path / "qrels.trec").write_text("q1 0 b.org 1\n")
    return tmp_path


def test_verbs_that_read_tables_take_names_of_columns(tables: Path, command: Command) -> None:
    pages = ["--id-column", "url", "--text-column", "body", "--title-column", "head"]
    asked = ["--id-column", "n", "--text-column", "ask"]
    assert command("index", "bm25", "pages.csv", "--out", "words", *pages)[0] == 0
    code, run, _ = command("search", "words", "asked.tsv", *asked)
    assert code == 0
    assert run.split()[:3] == ["q1", "Q0", "b.org"]
    (tables / "run.trec").write_text(run)
    assert command("rerank", "words", "asked.tsv", "run.trec", *asked)[1] == run
    words = ["mine", "words", "asked.tsv", "--qrels", "qrels.trec", "--out", "mined.jsonl", *asked]
    assert command(*words)[0] == 0
    assert '"query": "bears in winter"' in (tables / "mined.jsonl").read_text()
    (tables / "ids.jsonl").write_text('["q1", "c.org", "b.org"]\n')
    words = ["label", "ids.jsonl", "--teacher", "words", "--queries", "asked.tsv", "--corpus", "pages.csv"]
    words += ["--out", "labelled.jsonl", "--set", "query_columns.id=n", "--set", "query_columns.text=ask"]
    assert command(*words)[0] == 0
    assert '"scores": [0.0, ' in (tables / "labelled.jsonl").read_text()


def test_names_of_columns_may_have_spaces_between_them(tables: Path, command: Command) -> None:
    (tables / "a.jsonl").write_text('{"_id": "a", "text": "b", "year": 1, "lang": "en", "other": 2}\n')
    words = ("index", "bm25", "a.jsonl", "--out", "words", "--metadata-columns", "year, lang")
    assert command(*words)[0] == 0
    assert Retriever.load("words").documents["a"].metadata == {"year": 1, "lang": "en"}


def test_verbs_refuse_columns_that_a_table_lacks(tables: Path, command: Command) -> None:
    command("index", "bm25", "pages.csv", "--out", "words", "--id-column", "url", "--text-column", "body")
    for words, message in [
        (["search", "words", "asked.tsv", "--text-column", "aks"], "no column 'aks'; did you mean 'ask'?"),
        (["search", "words", "--text", "x", "--id-column", "n"], "need QUERIES"),
        (["encode", "none", "pages.csv", "--out", "v.npy", "--text-column", "bdy"], "did you mean 'body'?"),
        (["encode", "none", "pages.csv", "--out", "v.npy", "--id-column", "url"], "loading none"),
        (["encode", "none", "x", "--out", "v.npy", "--side", "query", "--title-column", "y"], "has no title"),
        (["label", "x", "--teacher", "words", "--out", "y.jsonl", "--set", "corpus_columns.body=1"], "body"),
    ]:
        code, _, error = command(*words)
        assert (code, message in error) == (2, True), error


def test_texts_of_training_data_by_names_of_columns(tables: Path) -> None:
    (tables / "ids.jsonl").write_text('["q1", "b.org", "c.org"]\n')
    columns = {"corpus_columns": {"id": "url", "text": "body", "title": "head"}}
    sources = {"source": "ids.jsonl", "queries": "asked.tsv", "corpus": "pages.csv"}
    config = DataConfig.model_validate(
        {**sources, **columns, "query_columns": {"id": "n", "text": "ask"}, "documents": 2}
    )
    assert open_data([config])[0, 0, 0].documents == ("Bears sleep in winter", "Copper conducts")
    assert TextStore("pages.csv", columns=Columns(id="url", text="head"))["b.org"] == "Bears"
    with pytest.raises(ValueError, match="a query has none"):
        DataConfig(source="x", query_columns=Columns(title="y"))


def test_columns_that_the_caller_names_keep_their_case(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("Id,Title,Body\n1,head,long\n")
    [found] = read_documents(tmp_path / "a.csv", text=["Title", "Body"])
    assert (found.id, found.title, found.text) == ("1", "", "head long")
    [found] = read_documents(tmp_path / "a.csv", id="Title", text="Body")
    assert found.id == "head"
