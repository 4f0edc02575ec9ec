"""Hard negatives: which documents qualify, files that survive a kill, and ``irkit mine``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit import Model, Retriever
from irkit.errors import BadValueError, ConfigError, LockedError, StorageError
from irkit.retrieval.scorer import IndexScorer
from irkit.training.negatives import MiningConfig, mine
from irkit.training.resumable import write_resumable
from irkit.training.training_data import TrainingRow

WORDS = ["search", "index", "vector", "token", "model", "neural", "text", "an", "the", "of"]
RANDOM = np.random.default_rng(0)


def some_texts(number: int, shortest: int) -> list[str]:
    """Different ones."""
    texts = dict.fromkeys(
        " ".join(RANDOM.choice(WORDS, shortest + i % 5, replace=False)) for i in range(2 * number)
    )
    return list(texts)[:number]


TEXTS = {f"d{i}": text for i, text in enumerate(some_texts(60, 3))}
QUERIES = {f"q{i}": text for i, text in enumerate(some_texts(12, 1))}
QRELS = {
    query: {f"d{i}": 1 for i in RANDOM.choice(60, 1 + n % 3, replace=False)}
    for n, query in enumerate(QUERIES)
}

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def bm25(tmp_path_factory: pytest.TempPathFactory) -> Retriever:
    return Retriever.build("bm25", TEXTS, tmp_path_factory.mktemp("bm25") / "index")


@pytest.fixture(scope="module")
def dense_model(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense-model")
    with pytest.warns(UserWarning, match="mean"):
        Model.from_pretrained(tiny_bert).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def dense(dense_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Retriever:
    return Retriever.build(dense_model, TEXTS, tmp_path_factory.mktemp("dense") / "index")


def negatives(records: Iterator[TrainingRow]) -> dict[str, list[str]]:
    return {record.query_id: list(record.document_ids[record.positives :]) for record in records}


def test_a_record_has_what_is_relevant_and_then_negatives(bm25: Retriever) -> None:
    queries = {**QUERIES, "unjudged": "search"}
    records = list(mine(bm25, queries, QRELS, MiningConfig(num_negatives=4)))
    assert [record.query_id for record in records] == list(QUERIES)
    for record in records:
        relevant = QRELS[record.query_id]
        assert record.query == QUERIES[record.query_id]
        assert set(record.document_ids[: record.positives]) == set(relevant)
        assert record.positives == len(relevant)
        ranked = [hit.id for hit in bm25.search(record.query, 60) if hit.id not in relevant]
        same = {TEXTS[doc] for doc in relevant}
        assert (
            list(record.document_ids[record.positives :])
            == [doc for doc in ranked if TEXTS[doc] not in same][:4]
        )
        assert record.scores is None
        assert record.documents is None


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_negatives_are_in_range_and_bounds(dense: Retriever, data: st.DataObject) -> None:
    low = data.draw(st.integers(0, 20))
    number = data.draw(st.integers(1, 8))
    bound = st.none() | st.floats(-1, 1)
    config = MiningConfig(
        num_negatives=number,
        range_min=low,
        range_max=low + data.draw(st.integers(number, 50)),
        max_score=data.draw(bound),
        min_score=data.draw(bound),
        absolute_margin=data.draw(st.none() | st.floats(0, 0.5)),
        relative_margin=data.draw(st.none() | st.floats(0, 0.5)),
        sampling_strategy=data.draw(st.sampled_from(["top", "random"])),
        seed=data.draw(st.integers(0, 3)),
    )
    names = data.draw(st.lists(st.sampled_from(sorted(QUERIES)), min_size=1, unique=True))
    qrels = {
        name: {
            doc: data.draw(st.integers(0, 2)) for doc in data.draw(st.sets(st.sampled_from(sorted(TEXTS))))
        }
        | {"d0": 1}
        for name in names
    }
    for record in mine(dense, {name: QUERIES[name] for name in names}, qrels, config):
        scores = {hit.id: hit.score for hit in dense.rerank(record.query, list(TEXTS))}
        known = {doc for doc, grade in qrels[record.query_id].items() if grade > 0}
        texts = {TEXTS[doc] for doc in known}
        worst = min(scores[doc] for doc in known)
        ranked = [hit.id for hit in dense.search(record.query, 60) if hit.id not in known]
        good = [
            doc
            for doc in ranked[config.range_min : config.range_max]
            if TEXTS[doc] not in texts
            and (config.max_score is None or scores[doc] <= config.max_score)
            and (config.min_score is None or scores[doc] >= config.min_score)
            and (config.absolute_margin is None or scores[doc] <= worst - config.absolute_margin)
            and (config.relative_margin is None or scores[doc] <= worst - abs(worst) * config.relative_margin)
        ]
        found = list(record.document_ids[record.positives :])
        assert len(found) == min(number, len(good))
        if config.sampling_strategy == "top":
            assert [scores[doc] for doc in found] == pytest.approx(
                [scores[doc] for doc in good[:number]], abs=1e-6
            )
        assert set(found) <= set(good)
        assert [good.index(doc) for doc in found] == sorted(good.index(doc) for doc in found)


@pytest.mark.parametrize(
    "bounds",
    [
        {},
        {"range_min": 5, "range_max": 30},
        {"relative_margin": 0.02, "range_max": 59},
        {"absolute_margin": 0.05, "range_max": 59},
        {"max_score": 0.9, "min_score": 0.3, "range_max": 59},
    ],
    ids=str,
)
def test_the_same_negatives_as_sentence_transformers(
    peer: Any, tiny_bert: Path, dense: Retriever, bounds: dict[str, Any]
) -> None:
    """Where both mean the same: it counts ranks after margins, and needs as many positives of each query."""
    datasets = pytest.importorskip("datasets")
    from sentence_transformers.util import mine_hard_negatives

    texts = {text: doc for doc, text in TEXTS.items()}
    pairs = [(QUERIES[query], TEXTS[doc]) for query, docs in QRELS.items() for doc in docs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = mine_hard_negatives(
            datasets.Dataset.from_dict({"query": [q for q, _ in pairs], "document": [d for _, d in pairs]}),
            peer.SentenceTransformer(str(tiny_bert), device="cpu"),
            corpus=list(TEXTS.values()),
            num_negatives=5,
            output_format="labeled-list",
            verbose=False,
            **({"range_max": 50} | bounds),
        )
    expected = {row["query"]: [texts[text] for text in row["document"][1:]] for row in theirs}
    config = MiningConfig.parse({"num_negatives": 5, "range_max": 50} | bounds)
    found = {
        QUERIES[name]: some for name, some in negatives(mine(dense, QUERIES, QRELS, config)).items() if some
    }
    assert found == expected
    assert len(found) > 5


def test_what_is_relevant_in_other_words_is_no_negative(tmp_path: Path) -> None:
    texts = {"a": "red apple", "same": "red apple", "q": "red red", "b": "apple", "c": "red", "d": "red sky"}
    retriever = Retriever.build("bm25", texts, tmp_path / "index")
    qrels = {"q": {"a": 2, "c": 1, "b": 0}}
    [record] = mine(retriever, {"q": "red apple"}, qrels)
    assert record.document_ids[:2] == ("a", "c")
    assert record.positives == 2
    assert set(record.document_ids[2:]) == {"b", "d"}  # judged not to be relevant, and not judged
    [record] = mine(retriever, {"q": "red apple"}, qrels, MiningConfig(relevant_grade=2))
    assert (record.document_ids[: record.positives], set(record.document_ids[1:])) == (("a",), {"b", "d"})


def test_random_negatives_depend_on_seed_and_query_only(bm25: Retriever) -> None:
    config = MiningConfig(num_negatives=3, sampling_strategy="random", range_max=30)
    every = list(mine(bm25, QUERIES, QRELS, config))
    assert every == list(mine(bm25, QUERIES, QRELS, config))
    assert every[7:] == list(mine(bm25, QUERIES, QRELS, config, start=7))
    assert every[4:5] == list(mine(bm25, {"q4": QUERIES["q4"]}, QRELS, config))
    other = mine(bm25, QUERIES, QRELS, config.model_copy(update={"seed": 1}))
    assert negatives(iter(every)) != negatives(other)
    tops = negatives(mine(bm25, QUERIES, QRELS, MiningConfig(num_negatives=3)))
    assert negatives(iter(every)) != tops


def test_a_teacher_decides_and_its_scores_are_kept(bm25: Retriever, dense: Retriever) -> None:
    teacher = IndexScorer(dense.collection)
    plain = negatives(mine(bm25, QUERIES, QRELS))
    for record in mine(bm25, QUERIES, QRELS, teacher=teacher):
        scores = {hit.id: hit.score for hit in dense.rerank(record.query, list(TEXTS))}
        assert record.scores == pytest.approx([scores[doc] for doc in record.document_ids], abs=1e-6)
        assert (
            list(record.document_ids[record.positives :]) == plain[record.query_id]
        )  # as the index ranks them
    below = 0
    for record in mine(bm25, QUERIES, QRELS, MiningConfig(relative_margin=0.1), teacher=teacher):
        worst = min(record.scores[: record.positives])
        rest = record.scores[record.positives :]
        assert all(score <= worst - 0.1 * abs(worst) for score in rest)
        assert list(rest) == sorted(rest, reverse=True)
        below += len(rest)
    assert below


@pytest.mark.parametrize(
    ("kind", "index"), [("multi_vector", "plaid"), ("sparse", "inverted"), ("dense", "hnsw")]
)
def test_every_kind_of_index(tiny_bert: Path, tmp_path: Path, kind: str, index: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # new heads, and one that does not say how to pool
        make = Model.from_pretrained if kind == "dense" else getattr(Model, kind)
        retriever = Retriever.build(make(tiny_bert), TEXTS, tmp_path / "index", index=index)
    config = MiningConfig(num_negatives=4, absolute_margin=0.01)
    total = 0
    for record in mine(retriever, QUERIES, QRELS, config, teacher=IndexScorer(retriever.collection)):
        exact = {hit.id: hit.score for hit in retriever.rerank(record.query, list(TEXTS))}
        assert record.scores == pytest.approx([exact[doc] for doc in record.document_ids], rel=1e-5)
        rest = record.scores[record.positives :]
        assert all(score <= min(record.scores[: record.positives]) - 0.01 for score in rest)
        assert not set(record.document_ids[record.positives :]) & set(QRELS[record.query_id])
        total += len(rest)
    assert total > 4


def test_bad_values(bm25: Retriever, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ranks 0 to 5 cannot hold 7 negatives"):
        MiningConfig(range_max=5)
    with pytest.raises(ConfigError, match="did you mean 'relative_margin'"):
        MiningConfig.parse({"relativ_margin": 0.1})
    with pytest.raises(BadValueError, match="no query has a document judged 2 or more"):
        mine(bm25, QUERIES, QRELS, MiningConfig(relevant_grade=2))
    with pytest.raises(BadValueError, match="1 of 2 relevant documents are not in the index, such as 'gone'"):
        mine(bm25, QUERIES, {"q1": {"d1": 1, "gone": 1}})
    other = Retriever.build("bm25", {"d1": "text"}, tmp_path / "other")
    with pytest.raises(BadValueError, match="the index has no document"):
        list(mine(bm25, QUERIES, QRELS, teacher=IndexScorer(other.collection)))
    with pytest.raises(BadValueError, match=r"one a document"):
        list(mine(bm25, QUERIES, QRELS, teacher=lambda queries, documents: [np.zeros(1)] * len(queries)))

    def broken(queries: Any, documents: Any) -> Any:
        return [np.full(len(some), np.nan) for some in documents]

    with pytest.raises(BadValueError, match="gave nan for query 'q0'"):
        list(mine(bm25, QUERIES, QRELS, teacher=broken))


# ---- files ----


RECORDS = [TrainingRow(f"q{i}", "a text, ü", (f"d{i}", "d"), scores=(1.5, i / 3)) for i in range(9)]


@pytest.mark.slow
def test_a_killed_writer_goes_on(tmp_path: Path) -> None:
    code = f"""
import os, signal
from irkit.training.training_data import TrainingRow
from irkit.training.resumable import write_resumable
def records(skip):
    for i in range(skip, 9):
        if i == 5 and skip == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        yield TrainingRow(f"q{{i}}", "a text, ü", (f"d{{i}}", "d"), scores=(1.5, i / 3))
print(write_resumable({str(tmp_path / "train.jsonl")!r}, records, "key"))
"""
    run = [sys.executable, "-c", code]
    assert subprocess.run(run, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode == -9
    [part] = tmp_path.iterdir()
    assert part.name.endswith(".part")
    assert part.read_bytes().count(b"\n") == 5
    with part.open("ab") as stream:
        stream.write(b'{"query_id": "q5", "qu')  # what a writer leaves whose machine stopped
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "(9, 5)\n"
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]
    write_resumable(tmp_path / "whole.jsonl", lambda skip: iter(RECORDS[skip:]), "key")
    assert (tmp_path / "train.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_other_work_starts_anew(tmp_path: Path) -> None:
    target = tmp_path / "train.jsonl"

    def stops(skip: int) -> Iterator[TrainingRow]:
        yield from RECORDS[skip:3]
        raise BadValueError("stopped")

    with pytest.raises(BadValueError, match="stopped"):
        write_resumable(target, stops, {"seed": 0})
    assert not target.exists()
    assert write_resumable(target, lambda skip: iter(RECORDS[skip:]), {"seed": 1}) == (9, 0)
    assert list(tmp_path.iterdir()) == [target]
    assert write_resumable(target, lambda skip: iter(RECORDS[skip:4]), {"seed": 1}) == (4, 0)  # replaces it


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    def records(skip: int) -> Iterator[TrainingRow]:
        yield RECORDS[0]
        with pytest.raises(LockedError, match="another process is writing it"):
            write_resumable(tmp_path / "train.jsonl", records, "key")
        yield RECORDS[1]

    assert write_resumable(tmp_path / "train.jsonl", records, "key") == (2, 0)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"writing .*train.jsonl: No such file or directory"):
        write_resumable(tmp_path / "none" / "train.jsonl", lambda skip: iter(RECORDS), "key")


# ---- command line ----


@pytest.fixture(scope="module")
def place(
    bm25: Retriever, dense: Retriever, write_beir: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A BEIR folder and two indexes of it."""
    place = tmp_path_factory.mktemp("cli")
    write_beir(place / "beir", TEXTS, QUERIES, QRELS, "train")
    bm25.save(place / "bm25")
    dense.save(place / "dense")
    return place


@pytest.fixture
def call(place: Path, monkeypatch: pytest.MonkeyPatch, command: Call) -> Call:
    """Run a command in ``place``."""
    monkeypatch.chdir(place)
    return command


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_the_command_line(call: Call, bm25: Retriever, dense: Retriever) -> None:
    options = ("--negatives", "3", "--range", "2-40", "--sampling", "random", "--set", "seed=4")
    code, out, err = call("mine", "bm25", "beir", "--out", "train.jsonl", *options)
    assert (code, out) == (0, "")
    assert err.startswith("irkit: mined negatives for 12 queries in ")
    config = MiningConfig(num_negatives=3, range_min=2, range_max=40, sampling_strategy="random", seed=4)
    ids = [(row["query_id"], tuple(row["document_ids"]), row["positives"]) for row in read("train.jsonl")]
    assert ids == [(r.query_id, r.document_ids, r.positives) for r in mine(bm25, QUERIES, QRELS, config)]
    words = (
        "mine",
        "bm25",
        "beir/queries.jsonl",
        "--qrels",
        "beir",
        "--teacher",
        "dense",
        "--out",
        "train.jsonl",
    )
    code, out, err = call(*words)
    assert (code, err) == (
        2,
        "irkit: error: --out train.jsonl: it exists; choose another file or give --overwrite\n",
    )
    assert call(*words, "--overwrite")[0] == 0
    expected = [record.scores for record in mine(bm25, QUERIES, QRELS, teacher=IndexScorer(dense.collection))]
    assert [tuple(row["scores"]) for row in read("train.jsonl")] == expected
    code, _, err = call(*words, "--overwrite", "--relative-margin", "0.9")
    assert code == 0
    assert "queries have fewer than 7 negatives; a wider --range or a smaller margin gives more" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("bm25", "beir/queries.jsonl"),
            "beir/queries.jsonl is no BEIR folder; give its judgments as --qrels",
        ),
        (("bm25", "beir", "--split", "test"), "no split 'test' (qrels/test.tsv); found train"),
        (("bm25", "beir", "--range", "10"), "--range 10: expected two ranks such as 10-100"),
        (("bm25", "beir", "--range", "10-12"), "ranks 10 to 12 cannot hold 7 negatives"),
        (("bm25", "beir", "--sampling", "best"), "sampling_strategy: Input should be 'top' or 'random'"),
        (("bm25", "beir", "--set", "relevant_grad=2"), "did you mean 'relevant_grade'?"),
        (
            ("bm25", "beir", "--set", "relevant_grade=2"),
            "beir has no document judged 2 or more for a query of beir",
        ),
        (("bm25", "beir", "--teacher", "dense", "--max-length", "64"), "settings of a cross-encoder"),
        (("none", "beir"), "opening index none: no such directory"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_commands(call: Call, words: tuple[str, ...], message: str) -> None:
    code, out, err = call("mine", *words, "--out", "bad.jsonl")
    assert (code, out) == (2, "")
    assert message in err
    assert not Path("bad.jsonl").exists()


def test_the_uri_of_a_folder_is_read_as_the_folder(call: Call, place: Path) -> None:
    pytest.importorskip("fsspec")
    uri = f"file://{place / 'beir'}"
    (place / "beir" / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nnone\td0\t1\n")
    try:
        for number, words in enumerate((("beir",), ("beir/queries.jsonl", "--qrels", uri), (uri,))):
            assert call("mine", "bm25", *words, "--out", f"uri{number}.jsonl")[0] == 0
            assert read(f"uri{number}.jsonl") == read("uri0.jsonl")
        for words in (("beir", "--qrels", uri), (uri, "--qrels", "beir"), (uri, "--qrels", uri)):
            assert call("search", "bm25", *words, "--split", "train")[0] == 0
    finally:
        (place / "beir" / "qrels" / "test.tsv").unlink()


def test_bad_targets(call: Call) -> None:
    for target, message in (
        ("train.tsv", "expected the extension .jsonl"),
        ("no/t.jsonl", "no such directory"),
    ):
        code, _, err = call("mine", "bm25", "beir", "--out", target)
        assert (code, message in err) == (2, True)


def test_a_file_that_another_process_writes_is_left_alone(tmp_path: Path) -> None:
    target, begun = tmp_path / "[rows].jsonl", list[Path]()

    def rows(done: int) -> Iterator[TrainingRow]:
        yield TrainingRow("q1", "q", ("d",))
        begun.extend(path for path in tmp_path.glob(".*.part") if path != left)
        assert write_resumable(target, lambda done: iter([TrainingRow("q2", "q", ("d",))]), "other") == (1, 0)
        assert all(path.exists() for path in begun)

    left = tmp_path / f".{target.name}.{'0' * 16}.part"
    left.write_text("of a killed process")
    assert write_resumable(target, rows, "one") == (1, 0)
    assert "q1" in target.read_text()
    assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
