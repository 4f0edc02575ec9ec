from __future__ import annotations

import builtins
import contextlib
import gzip
import io
import json
import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irkit.data import (
    Document,
    Query,
    check_documents,
    parse_documents,
    read_documents,
    read_qrels,
    read_queries,
)
from irkit.data.collection_files import read_records
from irkit.data.source import DOCUMENT_FIELDS
from irkit.errors import BadTypeError, BadValueError, IrkitError, MissingDependencyError, StorageError

any_text = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | any_text,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(any_text, values, max_size=3),
    max_leaves=5,
)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    write(
        tmp_path / "corpus.jsonl", '{"_id": "d1", "title": "T", "text": "one"}\n{"_id": "d2", "text": ""}\n'
    )
    write(tmp_path / "queries.jsonl", '{"_id": "q1", "text": "a"}\n{"_id": "q2", "text": "b"}\n')
    write(tmp_path / "qrels/test.tsv", "query-id\tcorpus-id\tscore\nq2\td1\t2\n")
    write(tmp_path / "qrels/train.tsv", "query-id\tcorpus-id\tscore\nq1\td2\t1\n")
    return tmp_path


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "documents", "queries", "splits"),
    [  # counts of the collections' README
        ("scifact", 5183, 1109, {"test": (300, 339), "train": (809, 919)}),
        ("vaswani", 11429, 93, {"test": (93, 2083)}),
        ("msmarco-dl19-pool", 14581, 43, {"test": (43, 4337)}),
        ("msmarco-dl21-pool", 10553, 53, {"train": (53, 4812)}),
        ("limit-small", 46, 1000, {"test": (1000, 2000)}),
    ],
)
def test_real_collections(data_dir, name, documents, queries, splits):
    folder = data_dir / name
    assert check_documents(read_documents(folder)) == documents
    assert check_documents(read_queries(folder)) == queries
    for split, (judged, judgments) in splits.items():
        qrels = read_qrels(folder, split)
        assert (len(qrels), sum(map(len, qrels.values()))) == (judged, judgments)
        assert {query.id for query in read_queries(folder, split=split)} == set(qrels)
    assert read_qrels(folder) == read_qrels(folder, "test" if "test" in splits else "train")


@pytest.mark.data
def test_real_files(data_dir):
    with (data_dir / "scifact" / "corpus.jsonl").open() as lines:
        raw = [json.loads(line) for line in lines]
    for document, record in zip(read_documents(data_dir / "scifact"), raw, strict=True):
        assert (document.id, document.text, document.title) == (
            record["_id"],
            record["text"],
            record["title"],
        )
        assert document.full_text == f"{record['title']} {record['text']}".strip()
    passages = list(read_documents(data_dir / "msmarco-toy" / "collection.tsv"))
    assert (len(passages), passages[2].id) == (89, "2")
    assert sum(map(len, read_qrels(data_dir / "msmarco-dl19-pool" / "qrels.full.trec").values())) == 9260
    lines = list(read_documents(data_dir / "english-text" / "wikitext2.valid.txt"))
    assert lines[0].text.strip() == "= Homarus gammarus ="
    with pytest.raises(BadValueError, match=r"train\.jsonl:1: missing key .*; other keys: source, text"):
        check_documents(read_documents(data_dir / "english-text" / "train.jsonl"))


def test_beir_folder(beir):
    assert list(read_documents(beir)) == [Document("d1", "one", "T"), Document("d2", "")]
    assert list(read_queries(beir)) == [Query("q1", "a"), Query("q2", "b")]
    assert list(read_queries(str(beir), split="train")) == [Query("q1", "a")]
    assert (read_qrels(beir), read_qrels(beir, "train")) == ({"q2": {"d1": 2}}, {"q1": {"d2": 1}})


def test_backups_of_judgments_are_no_splits(beir):
    for name in ("test.tsv~", "test.tsv.bak", ".test.tsv"):
        write(beir / "qrels" / name, "query-id\tcorpus-id\tscore\nq1\td2\t9\n")
    assert read_qrels(beir) == {"q2": {"d1": 2}}


def test_csv_without_an_extension_is_refused(tmp_path):
    path = write(tmp_path / "corpus", "id,text\n1,cats\n")
    with pytest.raises(BadValueError, match=r"corpus:1: expected JSON lines, tsv or texts, got csv"):
        list(read_documents(path))
    assert [each.text for each in read_documents(write(tmp_path / "texts", "a, b\n"))] == ["a, b"]


def test_beir_folder_packed(beir):
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        write(beir / f"{name}.gz", (beir / name).read_bytes())
        (beir / name).unlink()
    assert len(list(read_documents(beir))) == 2
    assert [query.id for query in read_queries(beir, "test")] == ["q2"]


def test_beir_folder_that_lacks_something(beir):
    (beir / "qrels" / "test.tsv").rename(beir / "qrels" / "dev.tsv")
    with pytest.raises(StorageError, match=r"no split 'test' .*found dev, train"):
        read_qrels(beir)
    (beir / "corpus.jsonl").unlink()
    with pytest.raises(
        StorageError, match=r"expected corpus\.jsonl or corpus\.jsonl\.gz.*found qrels, queries"
    ):
        read_documents(beir)
    write(beir / "queries.jsonl", '{"_id": "q1", "text": "a"}\n')
    write(beir / "qrels/dev.tsv", "query-id\tcorpus-id\tscore\nq1\td1\t1\nq8\td1\t1\n")
    with pytest.raises(BadValueError, match="lacks 1 judged queries, among them 'q8'"):
        list(read_queries(beir, "dev"))
    with pytest.raises(StorageError, match="found none"):
        read_qrels(beir / "qrels")
    with pytest.raises(BadValueError, match="folder only"):
        read_queries(beir / "queries.jsonl", split="dev")
    for read in (read_queries, read_qrels):
        with pytest.raises(StorageError, match="reading /nope: No such file"):
            read("/nope", split="test")


def test_jsonl_names_of_keys(tmp_path):
    path = write(
        tmp_path / "docs.jsonl",
        '\ufeff{"docid": 7, "contents": "x", "year": 1999, "metadata": {"tags": ["a"]}, "title": null}\r\n'
        "  \n"
        '{"_id": "a", "id": "b", "body": "line separator \\u2028 and \u2028 inside"}',
    )
    assert list(read_documents(path)) == [
        Document("7", "x", metadata={"year": 1999, "tags": ["a"]}),
        Document("a", "line separator \u2028 and \u2028 inside", metadata={"id": "b"}),
    ]
    path = write(tmp_path / "queries.json", '{"query_id": "1", "query": "who?", "answer": "me"}')
    assert list(read_queries(path)) == [Query("1", "who?")]


@given(
    st.lists(
        st.builds(
            Document,
            any_text.filter(bool),
            any_text,
            any_text,
            st.dictionaries(
                any_text.filter(lambda key: key not in ("_id", "text", "title", "metadata")), json_values
            ),
        ),
        max_size=4,
    ),
    st.booleans(),
    st.sampled_from(["x.jsonl", "x.jsonl.gz"]),
)
def test_jsonl_round_trip(tmp_path_factory, documents, ascii_only, name):
    records = [{"_id": d.id, "text": d.text, "title": d.title, "metadata": d.metadata} for d in documents]
    lines = "".join(json.dumps(record, ensure_ascii=ascii_only) + "\n" for record in records)
    path = write(tmp_path_factory.getbasetemp() / name, lines)
    assert list(read_documents(path)) == documents


def test_tsv(tmp_path):
    two = write(tmp_path / "a.tsv", "7\tsome  text \n8\t\n")
    assert list(read_documents(two)) == [Document("7", "some  text "), Document("8", "")]
    assert list(read_queries(two)) == [Query("7", "some  text "), Query("8", "")]
    three = write(tmp_path / "b.tsv.gz", "7\ttitle\ttext\n")
    assert list(read_documents(three)) == [Document("7", "text", "title")]
    four = write(tmp_path / "c.tsv", "D7\thttp://x\ttitle\tbody\n")
    assert list(read_documents(four)) == [Document("D7", "body", "title", {"url": "http://x"})]
    header = write(tmp_path / "d.tsv", "Text\tlang\tID\nx\tde\t7\n")
    assert list(read_documents(header)) == [Document("7", "x", metadata={"lang": "de"})]


def test_txt_numbers_its_lines(tmp_path):
    path = write(tmp_path / "a.txt", "first\n\n \t\nfourth \u0085 line\r\nfifth")
    assert [(d.id, d.text) for d in read_documents(path)] == [
        ("1", "first"),
        ("4", "fourth \u0085 line"),
        ("5", "fifth"),
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"id": "1", "text": "a"}\n', [("1", "a")]),
        ("7\tseven\n", [("7", "seven")]),
        ("plain words\n", [("1", "plain words")]),
        ("", []),
    ],
)
def test_standard_input_and_names_without_extension(tmp_path, monkeypatch, content, expected):
    path = write(tmp_path / "queries", content)
    assert [(q.id, q.text) for q in read_queries(path)] == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    source = read_documents("-")
    assert source.once
    assert [(d.id, d.text) for d in source] == expected
    with pytest.raises(StorageError, match="only once"):
        iter(source)
    with pytest.raises(BadTypeError, match="got None, expected documents"):
        check_documents(None)
    with pytest.raises(BadTypeError, match="only once"):
        check_documents(read_documents("-"))


def test_pipes_are_read_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("a\tb\n",))
    writer.start()
    source = read_documents(pipe)
    assert source.once
    assert list(source) == [Document("a", "b")]
    writer.join()


def test_sources_can_be_read_again_and_stream(tmp_path):
    path = write(
        tmp_path / "big.jsonl", "".join(f'{{"id": {i}, "text": "{"x" * 1000}"}}\n' for i in range(5000))
    )
    source = read_documents(path)
    assert next(iter(source)).id == next(iter(source)).id == "0"
    tracemalloc.start()
    assert check_documents(source) == 5000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500_000  # the file has 5 MB


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("x.jsonl", "{oops}", "not valid JSON"),
        ("x.jsonl", '["1", "a"]', "expected one JSON object a line"),
        ("x.jsonl", '{"text": "a"}', "missing key '_id' .or id, .*, document_id, pid.; other keys: text"),
        ("x.jsonl", '{"id": "1"}', "missing key 'text' .*; other keys: none"),
        ("x.jsonl", "{}", "other keys: none"),
        ("x.jsonl", '{"id": "", "text": "a"}', "id: .*not empty"),
        ("x.jsonl", '{"id": null, "text": "a"}', "id: expected a string, got None"),
        ("x.jsonl", '{"id": true, "text": "a"}', "id: expected a string, got True"),
        ("x.jsonl", '{"id": "1", "text": 5}', "text: expected a string, got 5"),
        ("x.jsonl", '{"id": "1", "text": "a", "title": ["t"]}', "title: expected a string"),
        ("x.jsonl", '{"id": "1", "text": "a", "metadata": [1]}', "metadata: expected keys and values"),
        ("x.jsonl", '{"id": "1", "text": "a \\ud83d b"}', "text: character 2 is an unpaired surrogate"),
        ("x.jsonl", '{"id": ' + "[" * 100_000, "not valid JSON"),
        ("x.jsonl", '{"id": 1' + "0" * 5000 + ', "text": "a"}', "not valid JSON"),
        ("x.jsonl", b'{"id": "1", "text": "caf\xe9"}', "byte 25 of the line .0xe9. is not UTF-8.*iconv"),
        ("x.tsv", "1", "expected 2 tab-separated columns .id, text., got 1"),
        ("x.tsv", "1\ta\tb", "expected 2 tab-separated columns .id, text., got 3"),
        ("x.tsv", "\ta", "id: .*not empty"),
        ("x.txt", b"\xff\xfeh\x00i\x00", "not UTF-8"),
    ],
)
def test_malformed_lines(tmp_path, name, line, message):
    good = {"x.jsonl": b'{"id": "0", "text": "a"}\n', "x.tsv": b"0\ta\n", "x.txt": b"a\n"}[name]
    path = write(tmp_path / name, good + b"\n" + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(BadValueError, match=rf"^{path}:3: .*{message}"):
        check_documents(read_documents(path))


def test_first_lines_of_tsv_that_fit_nothing(tmp_path):
    with pytest.raises(BadValueError, match=r"q\.tsv:1: expected 2 tab-separated columns"):
        list(read_queries(write(tmp_path / "q.tsv", "1\ta\tb\n")))
    with pytest.raises(BadValueError, match=r"d\.tsv:1: expected 2 tab-separated columns"):
        list(read_documents(write(tmp_path / "d.tsv", "just words\n")))


def test_files_that_cannot_be_read(tmp_path):
    for read in (read_documents, read_queries, read_qrels):
        with pytest.raises(StorageError, match=r"absent\.jsonl"):
            read(tmp_path / "absent.jsonl")
    with pytest.raises(StorageError, match="too long"):
        read_queries("what is the meaning of a very long question? " * 10)
    with pytest.raises(BadValueError, match="hf:FOLDER"):
        list(read_documents(write(tmp_path / "table.arrow", b"PAR1\xfa")))
    with pytest.raises(IrkitError, match=r"reading .*table\.parquet"):
        list(read_documents(write(tmp_path / "table.parquet", b"PAR1\xfa")))
    with pytest.raises(BadValueError, match=r"unknown extension '\.pdf'"):
        list(read_documents(write(tmp_path / "a.pdf", "x")))
    packed = gzip.compress(b'{"id": "1", "text": "a"}\n' * 100)
    for name, content in (
        ("cut.jsonl.gz", packed[:-12]),
        ("not.jsonl.gz", b"{}"),
        ("bad.jsonl.gz", packed[:20] * 3),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(StorageError, match=name):
            list(read_documents(tmp_path / name))


TOPICS = """
 <top>

<num> Number: 051
<title> Topic: International
Organized   Crime &amp; caf\xe9s

<desc> Description:
Which <b>groups</b>?

<narr> Narrative:
A relevant document names one.
</top>

<top>
<num> Number: MB02 </num>
<title> Owls </title>
<desc>
Owls at night
</desc></top><TOP>
<num>3<title>Bears
"""


@pytest.mark.parametrize("name", ["topics.txt", "topics", "topics.51-100", "t.51-100.gz"])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_topics_in_the_markup_of_trec(tmp_path, name, encoding):
    path = write(tmp_path / name, TOPICS.encode(encoding))
    queries = read_queries(path)
    titles = [
        Query("51", "International Organized Crime & caf\xe9s"),
        Query("MB02", "Owls"),
        Query("3", "Bears"),
    ]
    assert list(queries) == titles
    assert [number for number, _ in queries.numbered()] == [2, 15, 20]
    wanted = read_queries(path, text="narr")
    assert next(iter(wanted)) == Query("51", "A relevant document names one.")
    with pytest.raises(BadValueError, match=r":15: missing key 'narr'; other keys: title, desc, text"):
        list(wanted)


def test_topics_without_a_number_or_title(tmp_path):
    with pytest.raises(BadValueError, match=r"topics:4: expected <num> and a number"):
        list(
            read_queries(
                write(tmp_path / "topics", "<top>\n<num> 1 <title> a\n</top>\n<top>\n<title> b\n</top>")
            )
        )
    with pytest.raises(BadValueError, match=r"topics:1: missing key 'text' .*; other keys: desc"):
        list(read_queries(write(tmp_path / "topics", "<top>\n<num> 1\n<title>\n<desc> b\n</top>")))
    with pytest.raises(BadValueError, match=r"ap:1: expected <DOCNO>"):
        list(read_documents(write(tmp_path / "ap", "<DOC>\n<TEXT> b\n</TEXT></DOC>")))


def test_documents_in_the_markup_of_trec(tmp_path):
    path = write(
        tmp_path / "la010189.gz",
        b"""<DOC>
<DOCNO> LA010189-0001 </DOCNO>
<DOCID> 1 </DOCID>
<DATE><P>January 1</P></DATE>
<HEADLINE>
<P>
ZOOS IN MALM\xd6
</P>
</HEADLINE>
<TEXT>
<P>
Bears &amp; <!-- PJG <x> -->cubs: 3 < 4
</P>
</TEXT>
<GRAPHIC>Photo</GRAPHIC>
<TEXT>More</TEXT>
</DOC>
<DOC><DOCNO>GX000-00</DOCNO>
<DOCHDR>
http://example.org
</DOCHDR>
<html><title>A page</title><script>x = 1</script><body>Owls<br>hunt</body></html>
</DOC>
<DOC>
<DOCNO>AP-3</DOCNO>
<HEAD>First</HEAD><HEAD>Second</HEAD>
<TEXT>
Cut off
""",
    )
    assert list(read_documents(path)) == [
        Document("LA010189-0001", "Bears & cubs: 3 < 4 More", "ZOOS IN MALM\xd6"),
        Document("GX000-00", "Owls hunt", "A page"),
        Document("AP-3", "Cut off", "First Second"),
    ]
    assert check_documents(read_documents(path)) == 3


@given(st.text(alphabet="<>/!-abctopdTEXnum &;\n\xe9", max_size=80), st.sampled_from(["<top>", "<DOC>"]))
def test_any_markup_is_read_or_refused(tmp_path_factory, content, start):
    path = write(tmp_path_factory.mktemp("markup") / "file", f"{start}{content}")
    for read in (read_documents, read_queries):
        with contextlib.suppress(BadValueError):
            list(read(path))


def test_a_table_is_not_taken_for_the_names_of_its_columns():
    table = pytest.importorskip("pandas").DataFrame({"_id": ["1"], "text": ["a"]})
    with pytest.raises(BadTypeError, match=r"to_dict\('records'\)"):
        list(parse_documents(table))
    assert list(parse_documents(table.to_dict("records"))) == [Document("1", "a")]
    assert list(parse_documents(zip(table["_id"], table["text"], strict=True))) == [Document("1", "a")]


def test_metadata_that_no_index_can_store(tmp_path):
    path = write(tmp_path / "c.jsonl", '{"_id": "1", "text": "a"}\n{"_id": "2", "text": "b", "x": NaN}')
    assert len(list(read_documents(path))) == 2
    with pytest.raises(BadValueError, match=r"c\.jsonl:2: metadata that no index can store"):
        check_documents(read_documents(path))


def test_repeated_ids(tmp_path, monkeypatch):
    path = write(tmp_path / "a.tsv", "1\ta\n2\tb\n\n1\tc\n2\td\n")
    with pytest.raises(BadValueError, match=r"a\.tsv:4: id '1' was used before, at 1"):
        check_documents(read_documents(path))
    with pytest.raises(BadValueError, match=r"documents:2: id 'x' was used before, at 1"):
        check_documents([Document("x", "a"), Document("x", "b")])
    with pytest.raises(BadTypeError, match="only once"):
        check_documents(iter([Document("x", "a")]))
    assert check_documents([]) == 0
    monkeypatch.setattr(builtins, "hash", lambda value: 7)  # equal hashes of different ids are no repetition
    assert check_documents([Document("x", "a"), Document("y", "b")]) == 2


@given(st.lists(st.sampled_from("abcdefgh")))
def test_repeated_ids_are_found_wherever_they_are(ids):
    documents = [Document(identifier, "") for identifier in ids]
    if len(set(ids)) == len(ids):
        assert check_documents(documents) == len(ids)
    else:
        with pytest.raises(BadValueError, match="used before"):
            check_documents(documents)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("", "a"), BadValueError),
        ((1, "a"), BadTypeError),
        (("1", None), BadTypeError),
        (("1", "\ud800"), BadValueError),
        (("1", "a", 5), BadTypeError),
    ],
)
def test_documents_check_what_they_hold(arguments, error):
    with pytest.raises(error):
        Document(*arguments)


def test_qrels_files(tmp_path):
    expected = {"q1": {"d1": 1, "d2": 0}, "q2": {"d1": -1}}
    beir = "q1\td1\t1\nq1\td2\t0\nq2\td1\t-1\n"
    for name, content in {
        "a.tsv": "query-id\tcorpus-id\tscore\n" + beir,
        "b.tsv": beir,
        "c": beir.replace("\t", " "),
        "d.trec": "q1 0 d1 1\nq1\t0\td2\t0\r\n\nq2  Q0 d1   -1",
        "e.qrels.gz": "q1 0 d1 1\nq1 0 d1 1\nq1 0 d2 0\nq2 0 d1 -1\n",
    }.items():
        assert read_qrels(write(tmp_path / name, content)) == expected, name
    assert read_qrels(write(tmp_path / "spaces", "q 1\td 1\t3\n")) == {"q 1": {"d 1": 3}}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("q1 0 d2", "expected 4 columns.*got 3"),
        ("q1 0 d2 1 x", "expected 4 columns.*got 5"),
        ("q1 0 d2 high", "integer grade, got 'high'"),
        ("q1 0 d2 0.5", "integer grade"),
        ("q1 0 d1 2", "was judged 1 before and is 2 here"),
        (b"q1 0 \xff 2", "not UTF-8"),
    ],
)
def test_malformed_qrels(tmp_path, line, message):
    path = write(tmp_path / "qrels", b"q1 0 d1 1\n" + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(BadValueError, match=rf"qrels:2: .*{message}"):
        read_qrels(path)


def test_packages_that_are_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ir_datasets", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for read in (read_documents, read_queries, read_qrels):
        for source in ("ir_datasets:vaswani", "hf:BeIR/scifact:corpus"):
            with pytest.raises(MissingDependencyError, match=r"pip install 'irkit\[data\]'"):
                read(source)


def test_ir_datasets(beir, monkeypatch):
    library = pytest.importorskip("ir_datasets", reason="needs: pip install ir-datasets")
    dataset = library.create_dataset(
        docs_tsv=str(write(beir / "d.tsv", "d1\tone\nd2\ttwo\n")),
        queries_tsv=str(write(beir / "q.tsv", "q1\ta\n")),
        qrels_trec=str(write(beir / "qrels.trec", "q1 0 d2 1\n")),
    )
    known = {"mine": dataset, "docs": library.create_dataset(docs_tsv=str(beir / "d.tsv"))}
    monkeypatch.setattr(library, "load", known.__getitem__)
    documents = read_documents("ir_datasets:mine")
    assert list(documents) == list(documents) == [Document("d1", "one"), Document("d2", "two")]
    assert check_documents(documents) == 2
    assert list(read_queries("ir_datasets:mine")) == [Query("q1", "a")]
    assert read_qrels("ir_datasets:mine") == {"q1": {"d2": 1}}
    with pytest.raises(BadValueError, match="has no qrels"):
        read_qrels("ir_datasets:docs")
    with pytest.raises(BadValueError, match="knows no 'absent'"):
        read_documents("ir_datasets:absent")


def test_a_download_that_fails_is_told(monkeypatch):
    library = pytest.importorskip("ir_datasets", reason="needs: pip install ir-datasets")

    class Unreachable:
        def has_docs(self):
            return True

        has_queries = has_qrels = has_docs

        def docs_iter(self):  # downloads at once, not with the first item
            raise ConnectionError("no route")

        queries_iter = qrels_iter = docs_iter

    monkeypatch.setattr(library, "load", lambda name: Unreachable())
    for read in (read_documents, read_queries, read_qrels):
        with pytest.raises(StorageError, match="reading ir_datasets:x: no route"):
            list(read("ir_datasets:x"))


def test_ir_datasets_with_several_texts(monkeypatch):
    library = pytest.importorskip("ir_datasets", reason="needs: pip install ir-datasets")
    from ir_datasets.datasets.cord19 import Cord19Doc
    from ir_datasets.formats import TrecQuery

    class Fake:
        def has_docs(self):
            return True

        has_queries = has_docs

        def docs_iter(self):
            yield Cord19Doc("d", "Title", "10.1/x", "2020-01-01", "Abstract.")

        def queries_iter(self):
            yield TrecQuery("1", "title", "description", "narrative")

    monkeypatch.setattr(library, "load", lambda name: Fake())
    (document,) = read_documents("ir_datasets:cord19")
    assert (document.full_text, document.metadata["doi"]) == (document.text, "10.1/x")
    assert "Title" in document.text
    assert "Abstract." in document.text
    assert list(read_queries("ir_datasets:cord19")) == [Query("1", "title")]


def test_hugging_face_datasets(tmp_path, monkeypatch):
    library = pytest.importorskip("datasets", reason="needs: pip install datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "mine"
    write(folder / "train.jsonl", '{"_id": "1", "title": "t", "text": "a", "when": "2020-01-01", "n": [1]}\n')
    write(folder / "test.jsonl", '{"_id": "2", "title": "u", "text": "b", "when": "2020-01-01", "n": []}\n')
    source = read_documents(f"hf:{folder}::test")
    assert [(d.id, d.title, d.text, d.metadata["n"]) for d in source] == [("2", "u", "b", [])]
    assert check_documents(source) == 1
    assert list(read_queries(f"hf:{folder}:default:train")) == [Query("1", "a")]
    with pytest.raises(BadValueError, match=r"say which split.*train, test"):
        read_documents(f"hf:{folder}")
    with pytest.raises(BadValueError, match="expected the columns query-id, corpus-id, score"):
        read_qrels(f"hf:{folder}::test")
    for grade in ("0.7", "null"):
        row = f'{{"query-id": "q", "corpus-id": "d", "score": {grade}}}\n'
        judged = tmp_path / f"judged{grade}"
        write(judged / "test.jsonl", row + row.replace(grade, "1.5"))
        with pytest.raises(BadValueError, match=r":1: expected an integer grade"):
            read_qrels(f"hf:{judged}")
    write(tmp_path / "qrels" / "test.jsonl", '{"query-id": 1, "corpus-id": "d", "score": 2}\n')
    assert read_qrels(f"hf:{tmp_path / 'qrels'}") == {"1": {"d": 2}}
    with pytest.raises(BadValueError, match="hf:NAME"):
        read_documents("hf:a:b:c:d")
    for absent in (f"hf:{tmp_path / 'absent'}", f"hf:{folder}::nope", f"hf:{folder}:nope"):
        with pytest.raises(IrkitError, match="loading hf:"):
            read_documents(absent)


def test_importing_is_light():
    code = (
        "import sys, irkit.data; print({'torch', 'datasets', 'ir_datasets', 'pydantic'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_a_hub_that_cannot_be_reached_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    from huggingface_hub import constants

    def waits(seconds: float) -> None:
        raise AssertionError(f"{seconds} seconds until the next attempt")

    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setattr("time.sleep", waits)
    with pytest.raises(StorageError, match=r"^loading hf:nobody/nothing: Couldn't reach") as raised:
        read_documents("hf:nobody/nothing")
    assert "\n" not in str(raised.value)
    assert not constants.HF_HUB_OFFLINE  # the next call tries again
    assert not datasets.config.HF_HUB_OFFLINE


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.tsv", "a.txt"])
def test_lines_without_an_end_are_refused(tmp_path, name):
    first, second = (b"a\tb\n", b"b\t") if name == "a.tsv" else (b'{"_id": "a", "text": "b"}\n', b"")
    write = gzip.open if name.endswith(".gz") else open
    for size, problem in ((1 << 19, "not valid JSON"), (1 << 21, "more than 1 MB without an end")):
        with write(tmp_path / name, "wb") as stream:
            stream.write(first + second + b"x" * size)
        if "jsonl" in name or size > 1 << 20:
            with pytest.raises(BadValueError, match=f"{name}:2: {problem}"):
                list(read_records(str(tmp_path / name), DOCUMENT_FIELDS, longest=1 << 20))
        else:
            assert len(list(read_records(str(tmp_path / name), DOCUMENT_FIELDS, longest=1 << 20))) == 2


def test_a_topic_without_an_end_is_refused(tmp_path):
    topics = b"<top>\n<num> 1\n<title> one\n<top>\n<num> 2\n"
    (tmp_path / "topics").write_bytes(topics + (b"x" * 1000 + b"\n") * 2000)
    with pytest.raises(BadValueError, match="topics:4: more than 1 MB without an end"):
        list(read_records(str(tmp_path / "topics"), DOCUMENT_FIELDS, longest=1 << 20))


@pytest.mark.parametrize("line", ["q1\t\t1", "\td1\t1"])
def test_judgments_without_an_id(tmp_path: Path, line: str) -> None:
    (tmp_path / "qrels.tsv").write_text(f"q0\td0\t1\n{line}\n")
    with pytest.raises(BadValueError, match=r"qrels.tsv:2: an id is empty"):
        read_qrels(tmp_path / "qrels.tsv")
