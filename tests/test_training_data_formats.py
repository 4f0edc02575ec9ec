"""Formats of training files: each row becomes the training row that its makers meant."""

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
from irkit.training.training_data import (
    Batches,
    DataConfig,
    TrainingRow,
    check,
    open_data,
    read_training_rows,
    to_line,
    write_examples,
)
from irkit.training.training_data.row_formats import ROWS, detect, parse
from irkit.training.training_data.row_sequences import open_rows
from irkit.training.training_data.row_sources import read_pickle


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("IRKIT_CACHE", str(tmp_path_factory.mktemp("cache")))


PASSAGES = [{"docid": 7, "title": "T", "text": "yes"}, {"docid": "8", "title": "", "text": "no"}]

# row, whether there is a corpus, format, expected
EXAMPLES: list[tuple[Any, bool, str, TrainingRow]] = [
    (["q", "yes", "no"], False, "tuples", TrainingRow("", "q", (), ("yes", "no"))),
    (["q", "yes"], False, "tuples", TrainingRow("", "q", (), ("yes",))),
    ([3, 10, 11, 12], True, "tuples", TrainingRow("3", None, ("10", "11", "12"))),
    ([3, [10, 0.5], [11, -1]], True, "nway", TrainingRow("3", None, ("10", "11"), None, (0.5, -1.0))),
    ([3, [10], [11]], True, "nway", TrainingRow("3", None, ("10", "11"))),
    (["1.5", "-0.5", "q", "d", "e"], True, "vienna", TrainingRow("q", None, ("d", "e"), None, (1.5, -0.5))),
    (
        ["10.5", "9.0", "3", "10", "11"],
        True,
        "vienna",
        TrainingRow("3", None, ("10", "11"), None, (10.5, 9.0)),
    ),
    (
        ["q", "yes", "no", "2.5", "1"],
        False,
        "distillation",
        TrainingRow("", "q", (), ("yes", "no"), (2.5, 1.0)),
    ),
    (["q", "a", "b", "c", "d"], False, "tuples", TrainingRow("", "q", (), ("a", "b", "c", "d"))),
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
        TrainingRow("", "q", (), ("a", "b", "c"), (3.0, 2.0, 1.5), 2),
    ),
    ({"query": "q", "pos": ["a"], "neg": []}, False, "flagembedding", TrainingRow("", "q", (), ("a",))),
    (
        {"query": "q", "pos": ["a"], "neg": ["b"], "pos_scores": [1]},
        False,
        "flagembedding",
        TrainingRow("", "q", (), ("a", "b")),
    ),
    ({"query": "q", "pos": "a", "negs": ["b"]}, False, "opensearch", TrainingRow("", "q", (), ("a", "b"))),
    (
        {"query": "hi", "docs": ["hello", "hi"], "scores": [0.99, 1]},
        False,
        "opensearch",
        TrainingRow("", "hi", (), ("hello", "hi"), (0.99, 1.0), 0),
    ),
    (
        {"query_id": 3, "query_text": "q", "positive_document_ids": [7], "negative_document_ids": ["8", "9"]},
        True,
        "tevatron",
        TrainingRow("3", "q", ("7", "8", "9")),
    ),
    (
        {"query_id": "3", "query": "q", "positive_passages": PASSAGES[:1], "negative_passages": PASSAGES[1:]},
        False,
        "tevatron",
        TrainingRow("3", "q", ("7", "8"), ("T yes", "no")),
    ),
    (
        {"query_id": 3, "document_ids": "[10, 11]", "scores": "[0.5, 0.25]"},  # lists as strings: PyLate
        True,
        "irkit",
        TrainingRow("3", None, ("10", "11"), None, (0.5, 0.25)),
    ),
    (
        {"anchor": "q", "positive": "a", "negative": "b"},
        False,
        "columns",
        TrainingRow("", "q", (), ("a", "b")),
    ),
    ({"a": "x", "b": "y", "score": 0.8}, False, "columns", TrainingRow("", "x", (), ("y",), (0.8,), 1)),
    ({"a": "x", "b": "y", "label": 0}, False, "columns", TrainingRow("", "x", (), ("y",), (0.0,), 0)),
    # of a triple it is the margin of the scores, as MarginMSELoss reads it
    (
        {"q": "x", "p": "y", "n": "z", "label": 2},
        False,
        "columns",
        TrainingRow("", "x", (), ("y", "z"), (0, -2)),
    ),
    (
        {"q": "x", "p": "y", "n": "z", "m": "w", "labels": [2.0, 3.0]},
        False,
        "columns",
        TrainingRow("", "x", (), ("y", "z", "w"), (0, -2, -3)),
    ),
    (
        {"q": "x", "documents": ["y", "z"], "scores": [5.0, 3.0]},
        False,
        "columns",
        TrainingRow("", "x", (), ("y", "z"), (5.0, 3.0)),
    ),
    ({"query": 3, "positive": 10, "negative": 11}, True, "columns", TrainingRow("3", None, ("10", "11"))),
]


@pytest.mark.parametrize(("row", "ids", "name", "expected"), EXAMPLES)
def test_rows_become_training_rows(row: Any, ids: bool, name: str, expected: TrainingRow) -> None:
    assert detect(row) == name
    assert parse(row, name, ids) == expected


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
def training_rows(draw: st.DrawFn) -> TrainingRow:
    n = draw(st.integers(1, 4))
    texts = draw(st.booleans())
    scores = draw(st.none() | st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * n))
    return TrainingRow(
        draw(words),
        draw(st.none() | st.text(st.characters(exclude_categories=["Cs"]))),
        () if texts else draw(st.tuples(*[words] * n)),
        draw(st.tuples(*[words] * n)) if texts else None,
        scores,
        draw(st.integers(0, n)),
    )


@given(training_rows())
def test_lines_read_back_exactly(row: TrainingRow) -> None:
    values = json.loads(to_line(row))
    assert parse(values, "irkit", ids=False) == row
    assert detect(values) in ("irkit", "columns")


def test_files_read_back(tmp_path: Path) -> None:
    rows = [
        TrainingRow("é1", "a\u2028b", ("d1", "d2"), None, (0.1, 1e-30), 2),
        TrainingRow("2", document_ids=("d",)),
    ]
    assert write_examples(tmp_path / "x.jsonl", rows) == 2
    assert list(read_training_rows(tmp_path / "x.jsonl")) == rows


def test_a_failed_writer_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_examples(path, [TrainingRow("old", document_ids=("d",))])

    def broken() -> Any:
        yield TrainingRow("new", document_ids=("d",))
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_examples(path, broken())
    assert [row.query_id for row in read_training_rows(path)] == ["old"]
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
    expected = [TrainingRow("", "a", (), ("b", "c")), TrainingRow("", "d", (), ("e", "f"))]
    assert list(read_training_rows(config)) == expected
    rows = open_rows(config)
    assert [rows[0], rows[1]] == expected
    assert list(open_rows(config)) == expected  # from the cache


def test_tables_are_read_a_folder_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text('anchor,positive\n"a question","its, answer"\n')
    with pytest.raises(BadValueError, match=r"pairs\.csv: a table .* hf:FOLDER"):
        next(read_training_rows(tmp_path / "pairs.csv"))


def test_a_header_does_not_hide_scores(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text("query\tpos\tneg\ts1\ts2\nq\ta\tb\t2.0\t1.0\n")
    assert list(read_training_rows(path)) == [TrainingRow("", "q", (), ("a", "b"), (2.0, 1.0))]


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
        open_rows(DataConfig(source=str(path)))
    with pytest.raises(StorageError, match="no such file"):
        open_rows(DataConfig(source=str(tmp_path / "none.jsonl")))


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
    assert list(read_training_rows(source)) == [TrainingRow("1", None, ("a", "b", "c"), positives=2)]
    strict = DataConfig(source=source, relevant_grade=2)
    assert list(read_training_rows(strict)) == [TrainingRow("1", None, ("a", "b", "c"), positives=1)]
    mined = DataConfig(source=source, negatives=str(folder / "bm25.trec"))
    assert list(read_training_rows(mined)) == [TrainingRow("1", None, ("a", "b", "c", "e"), positives=2)]
    with pytest.raises(ConfigError, match="needs a BEIR folder"):
        open_rows(DataConfig(source=str(folder / "bm25.trec"), negatives="x"))


def test_runs_become_examples_with_targets(folder: Path) -> None:
    run = str(folder / "bm25.trec")
    scores = (3.0, 2.5, 2.0)
    assert next(read_training_rows(run)) == TrainingRow("1", None, ("c", "b", "e"), None, scores, 0)
    judged = DataConfig(source=run, corpus=str(folder), split="train")
    assert list(read_training_rows(judged)) == [
        TrainingRow("1", None, ("b", "c", "e"), None, (2.5, 3.0, 2.0), 1),
        TrainingRow("2", None, ("d",), None, (1.0,), 0),
    ]
    lines = [
        {"query_id": q, "doc_id": d, "score": s} for q, d, s in [("1", "b", 1), ("1", "c", 2), ("2", "d", 0)]
    ]
    path = folder / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert next(read_training_rows(path)) == TrainingRow("1", None, ("c", "b"), None, (2.0, 1.0), 0)
    with pytest.raises(BadValueError, match="split='train' needs a BEIR folder"):
        list(read_training_rows(DataConfig(source=run, split="train")))


@pytest.mark.parametrize("name", ["scores.pkl", "scores.pkl.gz"])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_scores_are_read(tmp_path: Path, folder: Path, name: str, protocol: int) -> None:
    data = pickle.dumps({1: {10: 0.5, 11: 2}, "2": {}}, protocol)
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert read_pickle(path) == {"1": {"10": 0.5, "11": 2.0}, "2": {}}
    (tmp_path / "qrel.json").write_text('{"1": {"10": 1}}')
    config = DataConfig(source=str(path), qrels=str(tmp_path / "qrel.json"))
    assert list(read_training_rows(config)) == [TrainingRow("1", None, ("10", "11"), None, (0.5, 2.0), 1)]


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
        content = read_pickle(path)
    except (BadValueError, StorageError):
        return
    assert isinstance(content, dict)


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
    assert len(Batches(data, batch_size=2)) == 2
    streamed = open_data([config.model_copy(update={"streaming": True})])
    assert [streamed[0, i, 0] for i in range(5)] == [data[0, i % 3, 0] for i in range(5)]


@pytest.mark.data
def test_real_files(data_dir: Path) -> None:
    toy = data_dir / "msmarco-toy"
    triples = list(read_training_rows(toy / "triples.tsv"))
    assert len(triples) == 100
    assert triples[0].query == "is a little caffeine ok during pregnancy"
    assert all(len(row) == 2 and row.positives == 1 for row in triples)
    for name in ("flagembedding_msmarco", "flagembedding_nq", "flagembedding_reranker"):
        lines = [json.loads(line) for line in (toy / f"{name}.jsonl").read_text().splitlines()]
        for values, row in zip(lines, read_training_rows(toy / f"{name}.jsonl"), strict=True):
            assert row.documents == (*values["pos"], *values["neg"])
            assert row.scores == (*values["pos_scores"], *values["neg_scores"])
    scifact = list(read_training_rows(data_dir / "scifact"))
    assert (len(scifact), sum(row.positives for row in scifact)) == (809, 919)  # never the test queries
    folder = data_dir / "msmarco-dl21-pool"
    for run in ("BM25", "SPLADE_P_P_ENSEMBLE_DISTIL"):
        source = str(folder / "runs" / f"{run}.trec")
        config = DataConfig(source=source, corpus=str(folder), split="train", relevant_grade=2)
        ranked = list(read_training_rows(config))
        assert [len(row) for row in ranked] == [100] * 53
        assert sum(row.positives for row in ranked) > 500
