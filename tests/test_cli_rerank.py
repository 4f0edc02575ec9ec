"""``irkit rerank`` and ``irkit explain``, with a multi-vector model of random weights."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from irkit import Model, Retriever, Run, evaluate
from irkit.heads import MultiVectorHead, Normalize, Projection
from irkit.retrieval.explanation import Explanation
from irkit.training.interaction import MVA, PooledAttention

TEXTS = ["neural search", "index of vectors", "a token model", "text of the gnu", "cab", "neural gnu"]
QUERIES = {"q1": "neural index", "q2": "gnu search"}
QRELS = {"q1": {"d0": 2, "d1": 1}, "q2": {"d3": 1}}
RUN = {"q1": {"d1": 3.0, "d0": 2.0, "d4": 1.0}, "q2": {"d5": 2.0, "d3": 1.0}}

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def place(tiny_bert: Path, write_beir: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a BEIR folder, a run and an index, and one of dense vectors."""
    place = tmp_path_factory.mktemp("cli")
    with pytest.warns(UserWarning, match="mean"):
        dense = Model.from_pretrained(tiny_bert)
    dense.save_pretrained(place / "dense-model")
    torch.manual_seed(0)
    head = MultiVectorHead(32, [Projection(32, 8, bias=False), Normalize()])
    Model(dense.tokenizer, dense.encoder, head).save_pretrained(place / "model")
    texts = {f"d{i}": text for i, text in enumerate(TEXTS)}
    write_beir(place / "beir", texts, QUERIES, QRELS, "test")
    Run.from_dict(RUN).write(place / "run.trec")
    Retriever.build(place / "model", place / "beir", place / "index")
    Retriever.build(place / "dense-model", place / "beir", place / "dense")
    return place


@pytest.fixture
def call(place: Path, monkeypatch: pytest.MonkeyPatch, command: Call) -> Call:
    """Run a command in ``place``."""
    monkeypatch.chdir(place)
    return command


@pytest.mark.parametrize("index", ["index", "dense"])
def test_a_run_in_and_a_run_out(call: Call, index: str) -> None:
    with Retriever.load(index) as retriever:
        expected = retriever.rerank(QUERIES, Run.from_dict(RUN))
    code, out, err = call("rerank", index, "beir", "run.trec")
    assert (code, err) == (0, "")
    assert [line.split()[2] for line in out.splitlines()] == [doc for _, doc, _ in expected]
    code, out, err = call("rerank", index, "beir", "run.trec", "--out", "again.jsonl", "--k", "2")
    assert (code, out, err) == (0, "", "")
    assert Run.read("again.jsonl").to_dict() == expected.cut(2).to_dict()
    code, out, err = call(
        "rerank", index, "beir/queries.jsonl", "run.trec", "--qrels", "beir", "--measures", "RR@10"
    )
    value = evaluate(expected, QRELS, "RR@10").mean["RR@10"]
    assert (code, out) == (0, f"measure\tvalue\nRR@10\t{value:.4f}\n")


def test_by_the_attention_that_a_model_was_trained_with(call: Call, place: Path) -> None:
    attention = PooledAttention(8, MVA(dim=4, pooling="first_k", size=2))
    attention.save_pretrained(place / "trained")
    with Retriever.load("index") as retriever:
        expected = retriever.rerank(QUERIES, Run.from_dict(RUN), interaction=attention)
        assert expected.to_dict() != retriever.rerank(QUERIES, Run.from_dict(RUN)).to_dict()
    code, out, err = call(
        "rerank", "index", "beir", "run.trec", "--out", "mva.jsonl", "--interaction", "trained"
    )
    assert (code, out, err) == (0, "", "")
    assert Run.read("mva.jsonl").to_dict() == expected.to_dict()


def test_by_a_teacher(call: Call) -> None:
    with Retriever.load("dense") as retriever:
        expected = retriever.rerank(QUERIES, Run.from_dict(RUN))
    for teacher in ("dense", "dense-model"):  # of the other index only the texts count
        code, out, err = call("rerank", "index", "beir", "run.trec", "--out", "t.jsonl", "--teacher", teacher)
        assert (code, out, err) == (0, "", "")
        again = Run.read("t.jsonl")
        assert {query: dict(again[query]) for query in again.query_ids} == {
            query: pytest.approx(dict(expected[query]), abs=1e-5) for query in expected.query_ids
        }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("index", "-", "-"), "QUERIES and RUN would both be read from standard input"),
        (("index", "beir", "nowhere.trec"), "nowhere.trec"),
        (("index", "beir", "unknown.trec"), "reranking: the index has no document 'd99'; give documents"),
        (("index", "beir", "other.trec"), "the run has query 'q9', whose text is not given"),
        (("index", "beir", "run.trec", "--out", "no/where"), "--out no/where: there is no such directory"),
        (("index", "beir", "run.trec", "--k", "0"), "Invalid value for '--k'"),
        (("index", "beir", "run.trec", "--qrels", "beir", "--out", "-"), "both write to standard output"),
        (("index", "beir", "run.trec", "--qrels", "beir", "--measures", "nDGC@10"), "nDGC@10"),
        (("nowhere", "beir", "run.trec"), "nowhere"),
        (("nowhere", "beir", "spaces.jsonl"), "writing a TREC run: 'd 1' has a space"),
        (("index", "beir", "run.trec", "--teacher", "nowhere/x"), "loading nowhere/x"),
        (("index", "beir", "run.trec", "--interaction", "model"), "was not trained with attention"),
        (("index", "beir", "run.trec", "--interaction", "wider"), "vectors of width 8, expected 16"),
        (
            ("index", "beir", "run.trec", "--interaction", "others"),
            "a model of fingerprint 01234567,",
        ),
        (("dense", "beir", "run.trec", "--interaction", "wider"), "attention: got dense representations"),
    ],
)
def test_what_cannot_be_reranked(call: Call, words: tuple[str, ...], message: str) -> None:
    Run.from_dict({"q1": {"d99": 1.0}}).write("unknown.trec")
    Run.from_dict({"q9": {"d1": 1.0}}).write("other.trec")
    Run.from_dict({"q1": {"d 1": 1.0}}).write("spaces.jsonl")
    PooledAttention(16, MVA()).save_pretrained("wider")
    (others := PooledAttention(8, MVA())).fingerprint = "0123456789"
    others.save_pretrained("others")
    code, out, err = call("rerank", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_explain_in_lines(call: Call) -> None:
    with Retriever.load("index") as retriever:
        explanation = retriever.explain("gnu search", "d3")
    code, out, err = call("explain", "index", "gnu search", "d3")
    assert (code, err) == (0, "")
    header, *lines = [line.split("\t") for line in out.splitlines()]
    assert header == ["query", "document", "score"]
    assert lines == [
        [match.query.token, match.document.token, f"{match.score:.4f}"]
        for match in explanation.words().matches
    ]
    _, out, _ = call("explain", "index", "gnu search", "d3", "--tokens")
    assert [line.split("\t")[0] for line in out.splitlines()[1:]] == [
        match.query.token for match in explanation.matches
    ]


def test_explain_weights_of_terms(call: Call) -> None:
    assert call("index", "bm25", "beir", "--out", "words", "--set", "k1=0", "--set", "b=0")[0] == 0
    _, out, _ = call("explain", "words", "gnu search", "d3")
    header, line = (row.split("\t") for row in out.splitlines())
    assert header == ["query", "document", "score", "query weight", "document weight"]
    assert line == ["gnu", "gnu", "1.0296", "1.0296", "1.0000"]  # log(1 + 4.5 / 2.5); it occurs or not
    assert call("explain", "words", "nothing", "d3")[1:] == (
        "",
        "irkit: nothing matched: query and document share no term\n",
    )


def test_explain_a_document_without_tokens(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retriever, "explain", lambda *_: Explanation("gnu", "", -math.inf, ()))
    said = "irkit: nothing matched: the document has no tokens\n"
    assert call("explain", "index", "gnu", "d3") == (0, "", said)


def test_explain_in_colour_and_as_a_page(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    with monkeypatch.context() as context:
        context.setattr("sys.stdout", screen)
        context.setenv("TERM", "xterm-256color")
        assert call("explain", "index", "gnu search", "d3")[0] == 0
    shown = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())
    assert "text of the gnu" in shown
    assert re.search(r"^score \d+\.\d{4}$", shown, re.M)
    code, out, err = call("explain", "index", "gnu search", "d3", "--html", "page.html")
    assert (code, out, err) == (0, "", "irkit: wrote page.html\n")
    assert Path("page.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("index", "gnu", "d99"), "explaining a score: the index has no document 'd99'; expected an id"),
        (
            ("index", "gnu", "d3", "--html", "no/where.html"),
            "--html no/where.html: there is no such directory",
        ),
        (("index", "gnu", "d3", "--html", "beir"), "writing beir: "),
        (("nowhere", "gnu", "d3"), "nowhere"),
    ],
)
def test_what_cannot_be_explained(call: Call, words: tuple[str, ...], message: str) -> None:
    code, out, err = call("explain", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_options_of_a_search_apply_to_the_new_ranking(call: Call) -> None:
    with Retriever.load("index") as retriever:
        expected = retriever.rerank(QUERIES, Run.from_dict(RUN), 1, offset=1)
    code, out, _ = call("rerank", "index", "beir", "run.trec", "--offset", "1", "--k", "1")
    assert code == 0
    assert [line.split()[2] for line in out.splitlines()] == [doc for _, doc, _ in expected]
    code, _, err = call("rerank", "index", "none", "none.trec", "--per-group", "2")
    assert (code, "per_group without group_by" in err) == (2, True)
