"""Formats of training files: each row becomes the record that its makers meant."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irkit.errors import BadTypeError, BadValueError, ConfigError, StorageError
from irkit.training.data import (
    DataConfig,
    Record,
    check,
    make_batches,
    open_data,
    read_records,
    to_line,
    write_examples,
)
from irkit.training.data.formats import ROWS, detect, parse
from irkit.training.data.pickles import read_pickle
from irkit.training.data.sources import open_records


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("IRKIT_CACHE", str(tmp_path_factory.mktemp("cache")))


PASSAGES = [{"docid": 7, "title": "T", "text": "yes"}, {"docid": "8", "title": "", "text": "no"}]

# row, whether there is a corpus, format, record
EXAMPLES: list[tuple[Any, bool, str, Record]] = [
    (["q", "yes", "no"], False, "tuples", Record("", "q", (), ("yes", "no"))),
    (["q", "yes"], False, "tuples", Record("", "q", (), ("yes",))),
    ([3, 10, 11, 12], True, "tuples", Record("3", None, ("10", "11", "12"))),
    ([3, [10, 0.5], [11, -1]], True, "nway", Record("3", None, ("10", "11"), None, (0.5, -1.0))),
    ([3, [10], [11]], True, "nway", Record("3", None, ("10", "11"))),
    (["1.5", "-0.5", "q", "d", "e"], True, "vienna", Record("q", None, ("d", "e"), None, (1.5, -0.5))),
    (["10.5", "9.0", "3", "10", "11"], True, "vienna", Record("3", None, ("10", "11"), None, (10.5, 9.0))),
    (["q", "yes", "no", "2.5", "1"], False, "distillation", Record("", "q", (), ("yes", "no"), (2.5, 1.0))),
    (["q", "a", "b", "c", "d"], False, "tuples", Record("", "q", (), ("a", "b", "c", "d"))),
    (
        {
            "query": "q",
            "pos": ["a", "b"],
            "neg": ["c"],
            "pos_scores": [3, 2],
            "neg_scores": [1.5],
            "type": "x",
        },
        False,
        "flagembedding",
        Record("", "q", (), ("a", "b", "c"), (3.0, 2.0, 1.5), 2),
    ),
    ({"query": "q", "pos": ["a"], "neg": []}, False, "flagembedding", Record("", "q", (), ("a",))),
    (
        {"query": "q", "pos": ["a"], "neg": ["b"], "pos_scores": [1]},
        False,
        "flagembedding",
        Record("", "q", (), ("a", "b")),
    ),
    ({"query": "q", "pos": "a", "negs": ["b"]}, False, "opensearch", Record("", "q", (), ("a", "b"))),
    (
        {"query": "hi", "docs": ["hello", "hi"], "scores": [0.99, 1]},
        False,
        "opensearch",
        Record("", "hi", (), ("hello", "hi"), (0.99, 1.0), 0),
    ),
    (
        {"query_id": 3, "query_text": "q", "positive_document_ids": [7], "negative_document_ids": ["8", "9"]},
        True,
        "tevatron",
        Record("3", "q", ("7", "8", "9")),
    ),
    (
        {"query_id": "3", "query": "q", "positive_passages": PASSAGES[:1], "negative_passages": PASSAGES[1:]},
        False,
        "tevatron",
        Record("3", "q", ("7", "8"), ("T yes", "no")),
    ),
    (
        {"query_id": 3, "document_ids": "[10, 11]", "scores": "[0.5, 0.25]"},  # lists as strings: PyLate
        True,
        "irkit",
        Record("3", None, ("10", "11"), None, (0.5, 0.25)),
    ),
    ({"anchor": "q", "positive": "a", "negative": "b"}, False, "columns", Record("", "q", (), ("a", "b"))),
    ({"a": "x", "b": "y", "score": 0.8}, False, "columns", Record("", "x", (), ("y",), (0.8,), 1)),
    ({"a": "x", "b": "y", "label": 0}, False, "columns", Record("", "x", (), ("y",), (0.0,), 0)),
    # of a triple it is the margin of the scores, as MarginMSELoss reads it
    ({"q": "x", "p": "y", "n": "z", "label": 2}, False, "columns", Record("", "x", (), ("y", "z"), (0, -2))),
    (
        {"q": "x", "p": "y", "n": "z", "m": "w", "labels": [2.0, 3.0]},
        False,
        "columns",
        Record("", "x", (), ("y", "z", "w"), (0, -2, -3)),
    ),
    (
        {"q": "x", "documents": ["y", "z"], "scores": [5.0, 3.0]},
        False,
        "columns",
        Record("", "x", (), ("y", "z"), (5.0, 3.0)),
    ),
    ({"query": 3, "positive": 10, "negative": 11}, True, "columns", Record("3", None, ("10", "11"))),
]


@pytest.mark.parametrize(("row", "ids", "name", "record"), EXAMPLES)
def test_rows_become_records(row: Any, ids: bool, name: str, record: Record) -> None:
    assert detect(row) == name
    assert parse(row, name, ids) == record


def test_every_format_has_an_example() -> None:
    assert {name for _, _, name, _ in EXAMPLES} == set(ROWS)


@pytest.mark.parametrize(
    ("row", "name", "message"),
    [
        (["q"], "tuples", "no documents"),
        ([1, 2, 3], "tuples", "got numbers; where they are ids, give corpus"),
        ({"query": "q"}, "flagembedding", "missing key 'pos'"),
        (["q", "d"], "flagembedding", "expected an object with keys"),
        ({"q": "d"}, "nway", "expected a list or columns"),
        (["1", "x", "q", "d", "e"], "vienna", "expected numbers as scores"),
        (["1", "2", "q", "d"], "vienna", "one of each"),
        ({"a": "x", "b": "y", "scores": [1, 2, 3]}, "columns", "3 scores of 1 documents"),
        ({"query_id": "1", "document_ids": ["d"], "scores": [float("nan")]}, "irkit", "finite"),
        ({"query_id": "1", "document_ids": ["d"], "positives": 2}, "irkit", "2 of 1 documents"),
        ({"query_id": "1", "document_ids": "[d"}, "irkit", "expected a list"),
        ({"document_ids": ["d"]}, "irkit", "neither id nor text"),
        ({"query_id": "1", "document_ids": [""]}, "irkit", "empty id"),
        ({"query": "q", "pos": [3], "neg": []}, "flagembedding", "string"),
    ],
)
def test_bad_rows_say_what_is_wrong(row: Any, name: str, message: str) -> None:
    with pytest.raises((BadValueError, BadTypeError), match=message):
        parse(row, name, ids=False)


def test_ambiguous_columns_are_not_guessed() -> None:
    with pytest.raises(BadValueError, match="numbers at both ends; say format: vienna"):
        detect(["10", "9", "3", "10", "11"])


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@st.composite
def records(draw: st.DrawFn) -> Record:
    n = draw(st.integers(1, 4))
    texts = draw(st.booleans())
    scores = draw(st.none() | st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * n))
    return Record(
        draw(words),
        draw(st.none() | st.text(st.characters(exclude_categories=["Cs"]))),
        () if texts else draw(st.tuples(*[words] * n)),
        draw(st.tuples(*[words] * n)) if texts else None,
        scores,
        draw(st.integers(0, n)),
    )


@given(records())
def test_lines_read_back_exactly(record: Record) -> None:
    row = json.loads(to_line(record))
    assert parse(row, "irkit", ids=False) == record
    assert detect(row) in ("irkit", "columns")


def test_files_read_back(tmp_path: Path) -> None:
    kept = [Record("é1", "a\u2028b", ("d1", "d2"), None, (0.1, 1e-30), 2), Record("2", document_ids=("d",))]
    assert write_examples(tmp_path / "x.jsonl", kept) == 2
    assert list(read_records(tmp_path / "x.jsonl")) == kept


def test_a_failed_writer_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_examples(path, [Record("old", document_ids=("d",))])

    def broken() -> Any:
        yield Record("new", document_ids=("d",))
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_examples(path, broken())
    assert [record.query_id for record in read_records(path)] == ["old"]
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(StorageError, match="No such file"):
        write_examples(tmp_path / "none" / "x.jsonl", [])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("plain.tsv", "a\tb\tc\n\nd\te\tf\r\n"),
        ("header.tsv", "query\tpositive\tnegative\na\tb\tc\nd\te\tf"),
        ("bom.tsv", "\ufeffa\tb\tc\nd\te\tf\n   \n"),
        ("lists.jsonl", '["a", "b", "c"]\n["d", "e", "f"]\n'),
        ("keys.jsonl", '{"x": "a", "y": "b", "z": "c"}\n{"x": "d", "y": "e", "z": "f"}'),
        ("packed.tsv.gz", "a\tb\tc\nd\te\tf\n"),
    ],
)
def test_files_of_lines(tmp_path: Path, name: str, content: str) -> None:
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    config = DataConfig(source=str(tmp_path / name))
    expected = [Record("", "a", (), ("b", "c")), Record("", "d", (), ("e", "f"))]
    assert list(read_records(config)) == expected
    found = open_records(config)
    assert [found[0], found[1]] == expected
    assert list(open_records(config)) == expected  # from the cache


def test_tables_are_read_a_folder_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text('anchor,positive\n"a question","its, answer"\n')
    with pytest.raises(BadValueError, match=r"pairs\.csv: a table .* hf:FOLDER"):
        next(read_records(tmp_path / "pairs.csv"))


def test_a_header_does_not_hide_scores(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text("query\tpos\tneg\ts1\ts2\nq\ta\tb\t2.0\t1.0\n")
    assert list(read_records(path)) == [Record("", "q", (), ("a", "b"), (2.0, 1.0))]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('["a", "b"]\n{"a": "b"', "x.jsonl:2: not valid JSON"),
        ('["a", "b"]\n3', "x.jsonl:2: expected an object or a list"),
        ('["a", "b"]\n["c"]', "x.jsonl:2: there are no documents"),
        ("", "no examples"),
    ],
)
def test_bad_files_name_the_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(BadValueError, match=message):
        open_records(DataConfig(source=str(path)))
    with pytest.raises(StorageError, match="no such file"):
        open_records(DataConfig(source=str(tmp_path / "none.jsonl")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "qrels").mkdir()
    lines = ["query-id\tcorpus-id\tscore", "1\ta\t2", "1\tb\t1", "1\tc\t0", "2\td\t0"]
    (tmp_path / "qrels" / "train.tsv").write_text("\n".join(lines))
    (tmp_path / "corpus.jsonl").write_text("".join(f'{{"_id": "{i}", "text": "{i}"}}\n' for i in "abcdef"))
    (tmp_path / "queries.jsonl").write_text('{"_id": "1", "text": "one"}\n{"_id": "2", "text": "two"}\n')
    (tmp_path / "bm25.trec").write_text("1 Q0 c 1 3.0 t\n1 Q0 b 2 2.5 t\n1 Q0 e 3 2.0 t\n2 Q0 d 1 1.0 t\n")
    return tmp_path


def test_judgments_become_examples(folder: Path) -> None:
    source = str(folder)
    assert list(read_records(source)) == [Record("1", None, ("a", "b", "c"), positives=2)]
    strict = DataConfig(source=source, relevant_grade=2)
    assert list(read_records(strict)) == [Record("1", None, ("a", "b", "c"), positives=1)]
    mined = DataConfig(source=source, negatives=str(folder / "bm25.trec"))
    assert list(read_records(mined)) == [Record("1", None, ("a", "b", "c", "e"), positives=2)]
    with pytest.raises(ConfigError, match="needs a BEIR folder"):
        open_records(DataConfig(source=str(folder / "bm25.trec"), negatives="x"))


def test_runs_become_examples_with_targets(folder: Path) -> None:
    run = str(folder / "bm25.trec")
    scores = (3.0, 2.5, 2.0)
    assert next(read_records(run)) == Record("1", None, ("c", "b", "e"), None, scores, 0)
    judged = DataConfig(source=run, corpus=str(folder), split="train")
    assert list(read_records(judged)) == [
        Record("1", None, ("b", "c", "e"), None, (2.5, 3.0, 2.0), 1),
        Record("2", None, ("d",), None, (1.0,), 0),
    ]
    lines = [
        {"query_id": q, "doc_id": d, "score": s} for q, d, s in [("1", "b", 1), ("1", "c", 2), ("2", "d", 0)]
    ]
    path = folder / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert next(read_records(path)) == Record("1", None, ("c", "b"), None, (2.0, 1.0), 0)
    with pytest.raises(BadValueError, match="split='train' needs a BEIR folder"):
        list(read_records(DataConfig(source=run, split="train")))


@pytest.mark.parametrize("name", ["scores.pkl", "scores.pkl.gz"])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_scores_are_read(tmp_path: Path, folder: Path, name: str, protocol: int) -> None:
    data = pickle.dumps({1: {10: 0.5, 11: 2}, "2": {}}, protocol)
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert read_pickle(path) == {"1": {"10": 0.5, "11": 2.0}, "2": {}}
    (tmp_path / "qrel.json").write_text('{"1": {"10": 1}}')
    config = DataConfig(source=str(path), qrels=str(tmp_path / "qrel.json"))
    assert list(read_records(config)) == [Record("1", None, ("10", "11"), None, (0.5, 2.0), 1)]


class _Attack:
    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call[0], self._call[1:]


def _attacks(target: Path) -> list[bytes]:
    touch = (os.system, f"touch {target}")
    return [
        *(pickle.dumps({1: {2: _Attack(*touch)}}, protocol) for protocol in range(6)),
        *(pickle.dumps(_Attack(open, str(target), "w"), protocol) for protocol in range(6)),
        f"cos\nsystem\n(S'touch {target}'\ntR.".encode(),  # GLOBAL, REDUCE
        f"(S'touch {target}'\nios\nsystem\n.".encode(),  # INST
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + f"(S'touch {target}'\nt\x81.".encode(),  # NEWOBJ
        b"\x80\x02\x82\x01.",  # EXT1
        b"Pname\n.",  # PERSID
        b"\x80\x04}(K\x01}b.",  # BUILD
        b"\x80\x04}\x94(K\x01h\x00u.",  # a dict in itself
        b"\x80\x05\x97.",  # out-of-band buffer
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",  # a string of 2^63 bytes
        b"\x80\x04" + b"(" * 50 + b"t" * 50 + b".",
        pickle.dumps({1: {2: 0.5}})[:-4],
        pickle.dumps({1: {2: "0.5"}}),
        pickle.dumps({1: {2: True}}),
        pickle.dumps({1: [2]}),
        pickle.dumps({(1,): {2: 0.5}}),
        pickle.dumps({1: {2: 10**400}}),
        pickle.dumps([1]),
        b"not a pickle",
        b"",
    ]


def test_pickles_run_nothing(tmp_path: Path) -> None:
    target = tmp_path / "harm"
    for number, data in enumerate(_attacks(target)):
        path = tmp_path / f"{number}.pkl"
        path.write_bytes(data)
        with pytest.raises((BadValueError, StorageError), match=rf"reading .*{number}\.pkl"):
            read_pickle(path)
        assert not target.exists(), data


@given(st.binary(max_size=60))
def test_no_bytes_get_past_the_reader_of_pickles(tmp_path_factory: Any, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.pkl"
    path.write_bytes(data)
    try:
        found = read_pickle(path)
    except (BadValueError, StorageError):
        return
    assert isinstance(found, dict)


def test_datasets_in_the_layout_of_pylate(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    rows = {
        "train": [
            {"query_id": i, "document_ids": [str(i), str(i + 1)], "scores": [0.5, 0.25]} for i in range(3)
        ],
        "queries": [{"query_id": i, "text": f"query {i}"} for i in range(3)],
        "documents": [{"document_id": i, "text": f"document {i}"} for i in range(4)],
    }
    configs = []
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        configs.append(f"- config_name: {name}\n  data_files: {name}.jsonl\n")
    with pytest.raises(StorageError, match="library datasets is hf:"):
        open_data([DataConfig(source=str(tmp_path))])
    (tmp_path / "README.md").write_text("---\nconfigs:\n" + "".join(configs) + "---\n")
    source, queries, corpus = (f"hf:{tmp_path}:{name}:train" for name in rows)
    config = DataConfig(source=source, queries=queries, corpus=corpus)
    data = open_data([config])
    assert check(data, {"targets"}) == {"datasets": 1, "examples": 3, "documents": 2}
    example = data[0, 1, 0]
    assert (example.query, example.documents) == ("query 1", ("document 1", "document 2"))
    assert len(make_batches(data, batch_size=2)) == 2
    streamed = open_data([config.model_copy(update={"streaming": True})])
    assert [streamed[0, i, 0] for i in range(5)] == [data[0, i % 3, 0] for i in range(5)]


@pytest.mark.data
def test_real_files(data_dir: Path) -> None:
    toy = data_dir / "msmarco-toy"
    triples = list(read_records(toy / "triples.tsv"))
    assert len(triples) == 100
    assert triples[0].query == "is a little caffeine ok during pregnancy"
    assert all(len(record) == 2 and record.positives == 1 for record in triples)
    for name in ("flagembedding_msmarco", "flagembedding_nq", "flagembedding_reranker"):
        rows = [json.loads(line) for line in (toy / f"{name}.jsonl").read_text().splitlines()]
        for row, record in zip(rows, read_records(toy / f"{name}.jsonl"), strict=True):
            assert record.documents == (*row["pos"], *row["neg"])
            assert record.scores == (*row["pos_scores"], *row["neg_scores"])
    scifact = list(read_records(data_dir / "scifact"))
    assert (len(scifact), sum(record.positives for record in scifact)) == (809, 919)  # never the test queries
    folder = data_dir / "msmarco-dl21-pool"
    for run in ("BM25", "SPLADE_P_P_ENSEMBLE_DISTIL"):
        source = str(folder / "runs" / f"{run}.trec")
        config = DataConfig(source=source, corpus=str(folder), split="train", relevant_grade=2)
        ranked = list(read_records(config))
        assert [len(record) for record in ranked] == [100] * 53
        assert sum(record.positives for record in ranked) > 500
