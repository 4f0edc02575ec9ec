"""Weights by term that other software computed: read, indexed, searched and written again without loss."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit import Model, Retriever, Run, Sparse
from irkit.cli import main
from irkit.core.representation import concat
from irkit.data import Document, Query, read_documents, read_queries
from irkit.data.vector_files import write_vectors
from irkit.encoder_free import Impacts
from irkit.errors import BadTypeError, BadValueError, StorageError
from irkit.index import compact

VECTORS = {
    "bear": {"bear": 2.5, "##s": 0.125, "winter": 1.0},
    "copper": {"copper": 3.0, "métal": 0.75},
    "nothing": {},
    "both": {"copper": 0.5, "bear": 0.5},
}
RECORDS = [
    {"id": name, "contents": f"about {name}", "vector": vector, "year": 2000 + len(vector)}
    for name, vector in VECTORS.items()
]


def write_lines(path: Path, records: Any) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
    return path


def inner(query: dict[str, float], document: dict[str, float]) -> float:
    return math.fsum(weight * document.get(term, 0.0) for term, weight in query.items())


def export(retriever: Retriever, path: Path) -> dict[str, dict[str, float]]:
    """What is in the index, written to a file and read again."""
    rows = np.flatnonzero(retriever.index.live)
    part = retriever.documents.ids(rows), retriever.index.representations(rows)
    write_vectors(path, iter([part]), retriever.model.vocabulary)  # type: ignore[union-attr]
    return {document.id: dict(document.vector or {}) for document in read_documents(path)}


def test_records_have_weights_beside_or_instead_of_a_text(tmp_path: Path) -> None:
    documents = list(read_documents(write_lines(tmp_path / "documents.jsonl", RECORDS)))
    assert [document.vector for document in documents] == list(VECTORS.values())
    assert documents[0] == Document("bear", "about bear", metadata={"year": 2003})  # weights are no content
    [query] = read_queries(write_lines(tmp_path / "queries.jsonl", [{"qid": "q", "vector": {"bear": 1}}]))
    assert query == Query("q", "", {"bear": 1})
    assert query != Query("q", "", {"bear": 2})
    other = {"id": "d", "text": "", "vector": ["plasmid"]}  # is no vector, but metadata
    [document] = read_documents(write_lines(tmp_path / "other.jsonl", [other]))
    assert document.vector is None
    assert document.metadata == {"vector": ["plasmid"]}


@pytest.mark.parametrize("index", [None, "flat"])
def test_documents_are_searched_and_come_back_without_loss(index: str | None, tmp_path: Path) -> None:
    Retriever.build("impacts", RECORDS, tmp_path / "index", index=index).close()
    with Retriever.load(tmp_path / "index") as retriever:
        query = {"bear": 1.5, "##s": 2.0, "unheard of": 9.0, "copper": 0.25}
        hits = retriever.search(query)
        expected = {name: inner(query, vector) for name, vector in VECTORS.items()}
        assert {hit.id: hit.score for hit in hits} == {
            name: value for name, value in expected.items() if value
        }
        assert (hits[0].id, hits[0].text, hits[0].metadata) == ("bear", "about bear", {"year": 2003})
        assert [hit.id for hit in retriever.search(query, filter={"year": 2002})] == ["both", "copper"]
        assert retriever.search([query, {}])[1] == retriever.search({"unheard of": 1.0}) == []
        run = retriever.run([Query("q", "", query), ("none", {"x": 1.0})], k=2)
        assert [(line.query_id, line.doc_id) for line in run] == [("q", "bear"), ("q", "both")]
        again = retriever.rerank({"q": query, "none": {}}, run)
        assert dict(again["q"]) == dict(run["q"])
        assert export(retriever, tmp_path / "again.jsonl") == VECTORS
        for document in ("bear", RECORDS[0]):
            explanation = retriever.explain(query, document)
            matches = [(match.document.token, match.weights) for match in explanation.matches]
            assert matches == [("bear", (1.5, 2.5)), ("##s", (2.0, 0.125))]
            assert explanation.score == hits[0].score


def test_changes(tmp_path: Path, small_limits: Callable[..., None]) -> None:
    small_limits(inverted_unlisted=1)
    vectors: dict[str, dict[str, float]] = {**VECTORS}
    with Retriever.build(Impacts(), RECORDS, tmp_path / "index") as retriever:
        for name, vector in {"new": {"zebra": 1.0, "bear": 0.25}, "both": {"stripes": 2.0}}.items():
            change = retriever.update if name in vectors else retriever.add
            change({name: {"vector": vector}})
            vectors[name] = vector
        retriever.remove("copper")
        del vectors["copper"]
        assert export(retriever, tmp_path / "a.jsonl") == vectors
        assert [hit.id for hit in retriever.search({"zebra": 1, "stripes": 1})] == ["both", "new"]
    compact(tmp_path / "index")
    with Retriever.load(tmp_path / "index") as retriever:
        assert export(retriever, tmp_path / "b.jsonl") == vectors
        retriever.add([{"_id": "more", "vector": {"lion": 1.0, "zebra": 2.0}}])
        assert [hit.id for hit in retriever.search({"zebra": 1})] == ["more", "new"]


WEIGHTS = st.floats(width=32, allow_nan=False, allow_infinity=False).filter(bool)
TERMS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=5)


@settings(max_examples=40, deadline=None)
@given(vectors=st.lists(st.dictionaries(TERMS, WEIGHTS, max_size=5), min_size=1, max_size=5))
def test_any_weights_survive_a_file(vectors: list[dict[str, float]], tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("impacts")
    documents = [{"id": str(number), "vector": vector} for number, vector in enumerate(vectors)]
    with Retriever.build("impacts", documents, folder / "index") as retriever:
        back = list(export(retriever, folder / "file.jsonl").values())
    assert [{term: np.float32(weight) for term, weight in vector.items()} for vector in back] == vectors


def test_files_of_several_parts_and_of_nothing(tmp_path: Path) -> None:
    rows = Sparse.from_dense(torch.tensor([[0.0, 0.1], [0.0, 0.0], [3.0, 1e-30]]))
    parts = iter([(["a"], rows[:1]), (["b", "c"], rows[1:])])
    assert write_vectors(tmp_path / "some.jsonl", parts, ["x", "y"]) == 3
    lines = [json.loads(line) for line in (tmp_path / "some.jsonl").read_text().splitlines()]
    assert lines[0] == {"id": "a", "contents": "", "vector": {"y": 0.1}}  # as Anserini's JsonVectorCollection
    assert [line["vector"] for line in lines[1:]] == [{}, {"x": 3.0, "y": 1e-30}]
    assert write_vectors(tmp_path / "none.jsonl", iter([([], rows[:0])]), ["x", "y"]) == 0
    assert not list(read_documents(tmp_path / "none.jsonl"))
    with pytest.raises(StorageError):
        write_vectors(tmp_path / "missing" / "some.jsonl", iter([(["a"], rows[:1])]), ["x", "y"])


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        ({"a": "much"}, "a number for each term, got 'a': 'much'"),
        ({"a": True}, "a number for each term"),
        ({"a": math.nan}, "the weight of 'a' is nan"),
        ({"a\nb": 1.0}, "line break"),
        ({"\ud800": 1.0}, "unpaired surrogate"),
        ({3: 1.0}, "a number for each term, got 3"),
        ("text", "expected weights by term"),
    ],
)
def test_bad_weights_are_refused(vector: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((BadValueError, BadTypeError), match=message):
        Document("d", "", vector=vector)
    with Retriever.build("impacts", RECORDS, tmp_path) as retriever:
        with pytest.raises((BadValueError, BadTypeError), match=message):
            retriever.search([vector])
        assert len(retriever.search({"bear": 1.0})) == 2


def test_what_has_no_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BadValueError, match=r"document 'x' has no weights; expected vector: \{term: weight\}"
    ):
        Retriever.build("impacts", {"x": "a text"}, tmp_path / "a")
    with Retriever.build("impacts", RECORDS, tmp_path / "b") as retriever:
        with pytest.raises(BadValueError, match="query 'q' has no weights"):
            retriever.run({"q": "a text"})
        for queries in ("a text", ["a text"], None, 3):
            with pytest.raises(BadTypeError, match="expected weights by term"):
                retriever.search(queries)  # type: ignore[call-overload]
        with pytest.raises(BadTypeError, match="expected weights by term"):
            retriever.rerank({"bear": 1.0}, {"x": "a text"})


def test_malformed_lines_are_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "bad.jsonl", [RECORDS[0], {"id": "x", "vector": {"a": "b"}}])
    with pytest.raises(BadValueError, match=r"bad.jsonl:2: vector: .*'a': 'b'"):
        list(read_documents(path))


def irkit(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return int(str(stop.value.code))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = write_lines(tmp_path / "documents.jsonl", RECORDS)
    queries = write_lines(tmp_path / "queries.jsonl", [{"id": "q", "vector": {"copper": 2, "bear": 1}}])
    assert irkit("index", "impacts", documents, "--out", tmp_path / "index", "--set", "mode=exact") == 0
    assert irkit("search", tmp_path / "index", queries, "--out", tmp_path / "run.trec") == 0
    assert dict(Run.read(tmp_path / "run.trec")["q"]) == {"copper": 6.0, "bear": 2.5, "both": 1.5}
    assert irkit("rerank", tmp_path / "index", queries, tmp_path / "run.trec", "--k", 1) == 0
    assert capsys.readouterr().out.split()[:3] == ["q", "Q0", "copper"]
    assert irkit("search", tmp_path / "index", "--text", "bear") == 2
    assert "expected weights by term" in capsys.readouterr().err


@pytest.mark.data
def test_queries_of_splade(data_dir: Path, tmp_path: Path) -> None:
    """43 queries that SPLADE++ EnsembleDistil encoded, as Anserini has them, over documents of our own."""
    golden = data_dir / "golden" / "dl19.splade_pp_ed.jsonl"
    lines = [json.loads(line) for line in golden.read_text().splitlines()]
    truth = {line["_id"]: line["weights_x100"] for line in lines}
    queries = list(read_queries(golden))
    assert {query.id: query.vector for query in queries} == truth
    assert len(queries) == 43
    documents = [{"id": f"like {name}", "vector": weights} for name, weights in truth.items()]
    documents += [
        {"id": f"half of {name}", "vector": dict(list(w.items())[::2])} for name, w in truth.items()
    ]
    with Retriever.build("impacts", documents, tmp_path / "index") as retriever:
        back = export(retriever, tmp_path / "documents.jsonl")
        assert {name: back[f"like {name}"] for name in truth} == truth
        run = retriever.run(queries, 10)
        scores = {document["id"]: document["vector"] for document in documents}
        for query in queries:
            exact = {name: inner(truth[query.id], vector) for name, vector in scores.items()}
            best = sorted(exact.values(), reverse=True)[:10]
            ranking = run[query.id]
            assert ranking[0][0] == f"like {query.id}"
            rounding = len(truth[query.id]) * 2**-24  # of as many sums in float32
            np.testing.assert_allclose([value for _, value in ranking], best[: len(ranking)], rounding)
        encoded = retriever.model.encode_representation([query.vector for query in queries], "query")
        assert write_vectors(
            tmp_path / "queries.jsonl",
            iter([([query.id for query in queries], concat([encoded]))]),
            retriever.model.vocabulary,  # type: ignore[union-attr]
        )
    assert {query.id: query.vector for query in read_queries(tmp_path / "queries.jsonl")} == truth


def test_a_sparse_model_and_its_file_give_the_same_scores(tiny_bert: Path, tmp_path: Path) -> None:
    model = Model.sparse(tiny_bert)
    model.save_pretrained(tmp_path / "model")
    texts = {"a": "a vector index", "b": "neural search of the text", "c": "the token"}
    lines = [{"_id": name, "text": text} for name, text in texts.items()]
    corpus = write_lines(tmp_path / "corpus.jsonl", lines)
    for side in ("document", "query"):
        out = tmp_path / f"{side}.jsonl"
        assert (
            irkit("encode", tmp_path / "model", corpus, "--out", out, "--side", side, "--dtype", "float32")
            == 0
        )
    with (
        Retriever.build(model, texts, tmp_path / "one", index="flat") as one,
        Retriever.build("impacts", tmp_path / "document.jsonl", tmp_path / "two") as two,
    ):
        first, second = one.run(texts), two.run(tmp_path / "query.jsonl")
        for name in texts:
            assert dict(first[name]) == pytest.approx(dict(second[name]), rel=1e-5)


def test_scores_below_0_stand_before_no_score(tmp_path: Path) -> None:
    vectors = {"up": {"x": 1.0}, "nothing": {"y": 1.0}, "down": {"x": -1.0}}
    retriever = Retriever.build("impacts", {name: {"vector": row} for name, row in vectors.items()}, tmp_path)
    assert [hit.id for hit in retriever.search({"x": 2.0}, k=3)] == ["up", "down"]
    run = retriever.run([Query("q", "", vector={"x": 2.0})], k=3)
    assert [(item.doc_id, item.score) for item in run] == [("up", 2.0), ("down", -2.0)]


@pytest.mark.parametrize("kind", ["inverted", "flat"])
@pytest.mark.parametrize("where", ["documents", "queries"])
def test_negative_scores_come_after_positive_ones_however_few_hits_are_wanted(
    tmp_path: Path, kind: str, where: str
) -> None:
    sign = -1 if where == "documents" else 1
    vectors = {f"none{i}": {"fish": 1.0} for i in range(30)} | {
        "bad": {"bear": 2.0 * sign},
        "good": {"owl": 1.0},
        "worse": {"bear": 3.0 * sign},
    }
    query = {"bear": 1.0 if where == "documents" else -1.0, "owl": 1.0}
    records = [{"_id": name, "text": "", "vector": vector} for name, vector in vectors.items()]
    with Retriever.build(Impacts(), records, tmp_path / "index", index={"kind": kind}) as retriever:
        scores = {"good": 1.0, "bad": -2.0, "worse": -3.0}
        for k in (1, 2, 3, 31, 32, 33):
            hits = retriever.search(query, k)
            assert {hit.id: hit.score for hit in hits} == dict(list(scores.items())[:k])
        assert [hit.id for hit in retriever.search(query, 1, offset=1)] == ["bad"]
        assert [hit.id for hit in retriever.search(query, 2, filter=["none1", "worse"])] == ["worse"]
