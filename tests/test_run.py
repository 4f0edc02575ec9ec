from __future__ import annotations

import gzip
import io
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from irkit.data import read_documents, read_qrels, read_queries
from irkit.errors import BadTypeError, BadValueError, IrkitError, StorageError
from irkit.evaluation.run import Run, ScoredDoc

finite = st.floats(allow_nan=False, allow_infinity=False)
anything = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
without_spaces = st.text(  # U+FEFF at the start of a file is a byte order mark
    st.characters(exclude_categories=["Cs"], exclude_characters=" \t\n\r\v\f\ufeff"), min_size=1, max_size=8
)


def runs(ids):
    return st.dictionaries(ids, st.dictionaries(ids, finite, min_size=1, max_size=6), max_size=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@given(runs(anything))
def test_dictionaries_round_trip(results):
    assert Run.from_dict(results).to_dict() == results


@given(runs(without_spaces), st.sampled_from(["run.trec", "run.txt.gz"]))
def test_trec_files_round_trip(folder, results, name):
    run = Run.from_dict(results)
    run.write(folder / name)
    assert list(Run.read(folder / name)) == list(run)


@given(runs(anything), st.sampled_from(["run.jsonl", "run.jsonl.gz"]))
def test_json_lines_round_trip(folder, results, name):
    run = Run.from_dict(results)
    run.write(folder / name)
    assert list(Run.read(folder / name)) == list(run)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_float32_scores_survive_files_bit_by_bit(folder, values):
    scores = np.array(values, dtype=np.float32)
    run = Run([("q", [f"d{i}" for i in range(len(scores))], scores)])
    for name in ("run.trec", "run.jsonl"):
        run.write(folder / name)
        read = dict(Run.read(folder / name)["q"])
        back = np.array([read[f"d{i}"] for i in range(len(scores))], dtype=np.float32)
        assert back.tobytes() == scores.tobytes()


@given(st.dictionaries(anything, st.integers(0, 3), min_size=1), st.integers(1, 5))
def test_best_first_and_ties_keep_their_order(scores, k):
    run = Run.from_dict({"q": scores})
    assert run["q"] == sorted(scores.items(), key=lambda item: -item[1])
    assert run.cut(k)["q"] == run["q"][:k]


def test_is_a_collection_of_scored_documents():
    run = Run([("q2", ["a", "b"], [1, 2]), ("q1", [], []), ("q3", ["b"], np.float32([0.1]))])
    assert list(run)[:2] == [ScoredDoc("q2", "b", 2.0), ScoredDoc("q2", "a", 1.0)]
    assert (len(run), run.query_ids, run["q1"]) == (3, ["q2", "q1", "q3"], [])
    assert "q1" in run
    assert "q9" not in run
    assert repr(run) == "Run(3 queries, 3 results)"
    with pytest.raises(KeyError):
        run["q9"]
    assert list(Run()) == []


def test_identical_ids():
    run = Run.from_dict({"1": {"1": 3.0, "2": 2.0}, "2": {"1": 1.0}, "3": {"3": 1.0}})
    assert run.without_identical_ids().to_dict() == {"1": {"2": 2.0}, "2": {"1": 1.0}, "3": {}}


def test_trec_file_as_trec_eval_reads_it(tmp_path):
    # columns apart by any blanks, queries interleaved, ranks wrong, words after the tag, an id with U+00A0
    path = tmp_path / "run"
    text = "1\tQ0  a 9\t 1.5 tag more junk\n2 Q0 d\u00a0e 1 -2e-3 tag\n\n1 Q0 b 1 2.5 tag\r\n"
    path.write_bytes(text.encode())
    assert Run.read(path).to_dict() == {"1": {"b": 2.5, "a": 1.5}, "2": {"d\u00a0e": -0.002}}


def test_what_is_written(tmp_path):
    run = Run.from_dict({"q": {"a": 0.1, "é": 2}})
    run.write(tmp_path / "run.trec", tag="bm25")
    assert (tmp_path / "run.trec").read_text() == "q Q0 é 1 2.0 bm25\nq Q0 a 2 0.1 bm25\n"
    run.write(tmp_path / "run.jsonl")
    assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0]) == {
        "query_id": "q",
        "doc_id": "é",
        "score": 2.0,
    }
    run.write(tmp_path / "run.trec.gz")
    assert gzip.decompress((tmp_path / "run.trec.gz").read_bytes()).startswith(b"q Q0 ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.jsonl", "run.trec", "run.trec.gz"]


def test_standard_streams(monkeypatch, capsys):
    Run.from_dict({"q": {"a": 1.0}}).write("-")
    text = capsys.readouterr().out
    assert text == "q Q0 a 1 1.0 irkit\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert Run.read("-").to_dict() == {"q": {"a": 1.0}}


def test_failed_writes_leave_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "run.trec"
    Run.from_dict({"q": {"a": 1.0}}).write(path)
    before = path.read_bytes()
    with pytest.raises(BadValueError, match=r"'two words' has a space.*jsonl"):
        Run.from_dict({"q": {"b": 1.0, "two words": 0.0}}).write(path)
    with pytest.raises(BadValueError, match="my run"):
        Run.from_dict({"q": {"b": 1.0}}).write(path, tag="my run")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"run\.trec.*No space left"):
        Run.from_dict({"q": {"b": 1.0}}).write(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.trec"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "target.trec").write_text("old")
    (tmp_path / "link.trec").symlink_to(tmp_path / "target.trec")
    Run.from_dict({"q": {"a": 1.0}}).write(tmp_path / "link.trec")
    assert (tmp_path / "link.trec").is_symlink()
    assert Run.read(tmp_path / "target.trec").to_dict() == {"q": {"a": 1.0}}


def test_places_that_cannot_be_written(tmp_path):
    with pytest.raises(StorageError, match="folder or a device"):
        Run().write(tmp_path)
    with pytest.raises(StorageError, match="folder or a device"):
        Run().write("/dev/null")
    with pytest.raises(StorageError, match="too long"):
        Run().write(tmp_path / ("x" * 300))
    with pytest.raises(StorageError, match="Not a directory"):
        Run().write(Path(__file__) / "run.trec")
    with pytest.raises(StorageError, match="absent"):
        Run().write(tmp_path / "absent" / "run.trec")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 Q0 b 2 1.0", "6 columns.*got 5"),
        ("b", "6 columns.*got 1"),
        ("1 Q0 b 2 high tag", "finite number.*high"),
        ("1 Q0 b 2 nan tag", "finite number.*nan"),
        ("1 Q0 b 2 -inf tag", "finite number.*-inf"),
        ("1 Q0 a 2 0.5 tag", "'a' of query '1' appeared before"),
        (b"1 Q0 \xff 2 0.5 tag", "not UTF-8"),
    ],
)
def test_malformed_trec_lines(tmp_path, line, message):
    path = tmp_path / "bad.trec"
    path.write_bytes(b"1 Q0 a 1 1.0 tag\n\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(BadValueError, match=rf"bad\.trec:3: .*{message}"):
        Run.read(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "one object a line|object"),
        ('{"query_id": "1", "score": 1}', "doc_id"),
        ('{"query_id": 1, "doc_id": "b", "score": 1}', "query_id"),
        ('{"query_id": "1", "doc_id": "", "score": 1}', "doc_id"),
        ('{"query_id": "1", "doc_id": "b"}', "finite number"),
        ('{"query_id": "1", "doc_id": "b", "score": NaN}', "finite number"),
        ('{"query_id": "1", "doc_id": "b", "score": 1' + 400 * "0" + "}", "finite number"),
        ('{"query_id": "1", "doc_id": "a", "score": 2}', "appeared before"),
    ],
)
def test_malformed_json_lines(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"query_id": "1", "doc_id": "a", "score": 1}\n' + line)
    with pytest.raises(BadValueError, match=rf"bad\.jsonl:2: .*({message})"):
        Run.read(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(StorageError, match="absent"):
        Run.read(tmp_path / "absent.trec")
    with pytest.raises(StorageError):
        Run.read(tmp_path)
    packed = gzip.compress(b"1 Q0 a 1 1.0 tag\n" * 100)
    for name, content in (("cut.gz", packed[:-12]), ("plain.gz", b"1 Q0 a 1 1.0 tag\n")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(IrkitError, match=name):
            Run.read(tmp_path / name)


@pytest.mark.parametrize(
    ("rankings", "error", "message"),
    [
        ([("q", ["a"], [math.nan])], BadValueError, "'q', document 'a'.*nan"),
        ([("q", ["a", "b"], [1, math.inf])], BadValueError, "'b'.*inf"),
        ([("q", ["a"], [None])], BadValueError, "'a'.*nan"),
        ([("q", ["a"], ["x"])], BadValueError, "not numbers"),
        ([("q", ["a"], [10**400])], BadValueError, "not numbers"),
        ([("q", ["a", "b"], [1.0])], BadValueError, "2 documents"),
        ([("q", ["a"], [[1.0]])], BadValueError, "shape"),
        ([("q", ["a", "b", "a"], [3, 2, 1])], BadValueError, "'a' twice"),
        ([("q", ["a"], [1]), ("q", ["b"], [1])], BadValueError, "'q' appears twice"),
        ([("", ["a"], [1])], BadValueError, "empty"),
        ([("q", [""], [1])], BadValueError, "empty"),
        ([("q", [7], [1])], BadTypeError, "7"),
        ([(7, ["a"], [1])], BadTypeError, "7"),
    ],
)
def test_bad_rankings(rankings, error, message):
    with pytest.raises(error, match=message):
        Run(rankings)


@pytest.mark.parametrize("name", [None, 5, b"run.trec"])
def test_names_that_are_none(name):
    for use in (Run.read, Run.from_dict({"q": {"d": 1.0}}).write, read_documents, read_queries, read_qrels):
        with pytest.raises(BadTypeError, match="as a file, expected a path or the name of a source"):
            use(name)
    with pytest.raises(BadValueError, match="empty name of a file"):
        read_documents("")


@pytest.mark.parametrize("results", [[], None, {"q": ["d"]}, {"q": None}])
def test_dictionaries_that_are_none(results):
    with pytest.raises(BadTypeError, match=r"got .*, expected \{query id: \{document id: score\}\}"):
        Run.from_dict(results)


@pytest.mark.parametrize("rankings", [5, [5], [("q", ["d"])], ["abcd"]])
def test_rankings_that_are_none(rankings):
    with pytest.raises(BadTypeError, match="Run: got"):
        Run(rankings)


def test_messages_show_text_not_bytes(tmp_path):
    (tmp_path / "run.trec").write_bytes("ü d\n".encode())
    with pytest.raises(BadValueError, match="got 2: 'ü d'"):
        Run.read(tmp_path / "run.trec")
    (tmp_path / "run.trec").write_text("q Q0 d 1 high x\n")
    with pytest.raises(BadValueError, match="expected a finite number as score, got 'high'"):
        Run.read(tmp_path / "run.trec")
    with pytest.raises(BadValueError, match="got 6: 'q Q0 d"):
        read_qrels(tmp_path / "run.trec")


def test_cut_needs_a_positive_number():
    with pytest.raises(BadValueError, match=r"Run.cut: k is 0; expected a whole number of 1 or more"):
        Run().cut(0)
    assert len(Run().cut(np.int64(1))) == 0


def test_ids_with_spaces_between_tabs(tmp_path: Path) -> None:
    (tmp_path / "run.trec").write_text("q 1\tQ0\tdoc one\t1\t0.9\ttag\nq 1\tQ0\tdoc two\t2\t0.5\ttag\n")
    assert Run.read(tmp_path / "run.trec").to_dict() == {"q 1": {"doc one": 0.9, "doc two": 0.5}}
