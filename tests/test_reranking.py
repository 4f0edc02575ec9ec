"""Rerank and explain: the scores of the model for given documents, and what they are made of."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from irkit import Dense, Model, Retriever, Run
from irkit.core.late_interaction import MultiVectorAttention, mean_maxsim
from irkit.data import Document, Query
from irkit.encoder_free import Vectors
from irkit.errors import BadTypeError, BadValueError
from irkit.heads import MultiVectorHead, Normalize, Projection

TEXTS = [
    "neural search",
    "index of vectors",
    "a token model.",
    "text of the gnu",
    "cab",
    "neural gnu",
    "hip model",
]
CORPUS = [Document(f"d{i}", text, "An a" if i % 2 else "", {"year": i}) for i, text in enumerate(TEXTS)]
QUERIES = {"q1": "neural index", "q2": "gnu", "q3": "the model of a cab"}


@pytest.fixture(scope="module", params=["dense", "multi_vector"])
def model(request: pytest.FixtureRequest, tiny_bert: Path) -> Model:
    with pytest.warns(UserWarning, match="mean"):
        bare = Model.from_pretrained(tiny_bert)
    if request.param == "dense":
        return bare
    torch.manual_seed(0)
    head = MultiVectorHead(32, [Projection(32, 8, bias=False), Normalize()])
    return Model(bare.tokenizer, bare.encoder, head)


@pytest.fixture
def retriever(model: Model, tmp_path: Path) -> Retriever:
    return Retriever.build(model, CORPUS, tmp_path / "index")


def values(hits: list[Any]) -> dict[str, float]:
    return {hit.id: hit.score for hit in hits}


def test_candidates_get_the_scores_of_an_exact_search(retriever: Retriever) -> None:
    ids = ["d5", "d0", "d3", "d5"]
    for query in QUERIES.values():
        found = [hit for hit in retriever.search(query, k=7) if hit.id in ids]
        hits = retriever.rerank(query, ids)
        assert [hit.id for hit in hits] == [hit.id for hit in found]
        assert values(hits) == pytest.approx(values(found), abs=1e-6)
        assert retriever.rerank(query, ids, k=2) == hits[:2]
    together = retriever.rerank(list(QUERIES.values()), [ids] * 3)
    for query, hits in zip(QUERIES.values(), together, strict=True):
        assert values(hits) == pytest.approx(values(retriever.rerank(query, ids)), abs=1e-6)


def test_hits_of_another_retriever_stand_for_their_ids(retriever: Retriever, tmp_path: Path) -> None:
    words = Retriever.build("bm25", CORPUS, tmp_path / "words")
    found = words.search(["neural gnu", "cab"], k=3)
    assert all(found)
    ids = [[hit.id for hit in hits] for hits in found]
    assert retriever.rerank(["neural gnu", "cab"], found) == retriever.rerank(["neural gnu", "cab"], ids)
    assert retriever.rerank("cab", found[1]) == retriever.rerank("cab", ids[1])


def test_lists_of_any_length(retriever: Retriever) -> None:
    hits = retriever.rerank(["neural", "gnu", "cab"], [["d1"], [], ["d2", "d4"]])
    assert [sorted(values(line)) for line in hits] == [["d1"], [], ["d2", "d4"]]
    assert retriever.rerank("neural", []) == []
    assert retriever.rerank([], []) == []


@pytest.mark.parametrize(
    "form",
    [
        lambda corpus: corpus,
        lambda corpus: iter(corpus),
        lambda corpus: {doc.id: doc.full_text for doc in corpus},
        lambda corpus: [(doc.id, doc.full_text) for doc in corpus],
        lambda corpus: [{"_id": doc.id, "title": doc.title, "text": doc.text} for doc in corpus],
    ],
    ids=["documents", "generator", "texts", "pairs", "records"],
)
def test_texts_that_are_not_in_the_index(retriever: Retriever, form: Callable[[list[Document]], Any]) -> None:
    new = [Document(f"new {document.id}", document.text, document.title) for document in CORPUS]
    expected = retriever.search("neural gnu", k=7)
    hits = retriever.rerank("neural gnu", form(new))
    assert values(hits) == pytest.approx({f"new {hit.id}": hit.score for hit in expected}, abs=1e-5)
    assert len(retriever) == len(CORPUS)


def test_metadata_of_documents_comes_back(retriever: Retriever) -> None:
    hit = retriever.rerank("neural", [CORPUS[3]])[0]
    assert (hit.id, hit.text, hit.title, hit.metadata) == ("d3", TEXTS[3], "An a", {"year": 3})


def test_a_run_is_reranked(retriever: Retriever) -> None:
    first = Run.from_dict({"q2": {"d1": 5.0, "d3": 1.0, "d6": 4.0}, "q1": {"d0": 0.0}})
    done = list[int]()
    second = retriever.rerank(QUERIES, first, progress=done.append)
    assert isinstance(second, Run)
    assert second.query_ids == ["q2", "q1"]
    assert second["q2"] == [(hit.id, hit.score) for hit in retriever.rerank("gnu", ["d1", "d3", "d6"])]
    assert sum(done) == 2
    assert len(retriever.rerank([Query("q1", "neural index"), ("q2", "gnu")], first, k=1)["q2"]) == 1


def test_search_then_rerank_changes_nothing(retriever: Retriever) -> None:
    run = retriever.run(QUERIES, k=5)
    again = retriever.rerank(QUERIES, run)
    for name in QUERIES:
        assert dict(again[name]) == pytest.approx(dict(run[name]), abs=1e-6)


def test_other_interactions(retriever: Retriever, model: Model) -> None:
    ids = ["d1", "d2", "d3"]
    if model.kind == "dense":
        hits = retriever.rerank("gnu", ids, interaction=lambda q, d: q.values @ d.values.T * 2)
        expected = {hit.id: 2 * hit.score for hit in retriever.rerank("gnu", ids)}
        assert values(hits) == pytest.approx(expected, abs=1e-6)
        return
    hits = retriever.rerank("gnu", ids, interaction=mean_maxsim)
    length = len(model.encode_with_token_spans("gnu", "query")[1])
    expected = {hit.id: hit.score / length for hit in retriever.rerank("gnu", ids)}
    assert values(hits) == pytest.approx(expected, abs=1e-6)
    attention = MultiVectorAttention(8, dim=4)
    stored, query = (
        retriever.index.representations(retriever.documents.find(ids)),
        model.encode_representation(["gnu"], "query"),
    )
    wanted = dict(zip(ids, attention(query, stored)[0].tolist(), strict=True))
    assert values(retriever.rerank("gnu", ids, interaction=attention)) == pytest.approx(wanted, abs=1e-6)
    texts = {document.id: document.full_text for document in CORPUS[1:4]}
    assert values(retriever.rerank("gnu", texts, interaction=attention)) == pytest.approx(wanted, abs=1e-5)


def test_a_teacher_reads_the_texts(retriever: Retriever, tmp_path: Path) -> None:
    def longest(queries: list[Query], documents: list[list[Document]]) -> list[np.ndarray]:
        return [
            np.array([len(query.text) + len(doc.full_text) for doc in some], np.float32)
            for query, some in zip(queries, documents, strict=True)
        ]

    ids, words = ["d4", "d2", "d3", "d2"], Retriever.build("bm25", CORPUS, tmp_path / "words")
    wanted = [("d3", 3.0 + len("An a text of the gnu")), ("d2", 3.0 + len(TEXTS[2])), ("d4", 6.0)]
    for index in (retriever, words):
        assert [(hit.id, hit.score) for hit in index.rerank("gnu", ids, teacher=longest)] == wanted
        assert index.rerank("gnu", CORPUS[2:5], teacher=longest) == index.rerank("gnu", ids, teacher=longest)
        run = Run.from_dict({"q2": {"d4": 3.0, "d2": 2.0, "d3": 1.0}, "q1": {"d0": 1.0}})
        again = index.rerank(QUERIES, run, k=2, teacher=longest)
        assert (again.query_ids, again["q2"]) == (["q2", "q1"], wanted[:2])
    [first, none] = retriever.rerank(["gnu", "cab"], [words.search("gnu"), []], teacher=longest)
    assert sorted(values(first)) == sorted(hit.id for hit in words.search("gnu"))
    assert none == retriever.rerank([], [], teacher=longest) == []
    with pytest.raises(BadValueError, match="an interaction and a teacher"):
        retriever.rerank("gnu", ids, teacher=longest, interaction=mean_maxsim)
    with pytest.raises(BadValueError, match="the index has no document 'x'"):
        retriever.rerank("gnu", ["x"], teacher=longest)
    with pytest.raises(BadValueError, match="k is 0"):
        retriever.rerank("gnu", ids, 0, teacher=longest)
    with pytest.raises(BadValueError, match="gave nan for query"):
        retriever.rerank("gnu", ids, teacher=lambda _, some: [np.full(len(each), np.nan) for each in some])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            ("gnu", ["d1", "nowhere", "gone"]),
            BadValueError,
            "the index has no document 'nowhere', nor 1 more of those given; give documents",
        ),
        (("gnu", "d1"), BadTypeError, "candidates are 'd1', expected ids in a list"),
        (("gnu", 3), BadTypeError, "candidates are 3, expected ids in a list"),
        (("gnu", ["d1", Document("x", "y")]), BadTypeError, "some candidates are strings, which are ids"),
        (("gnu", [Document("x", "y"), Document("x", "z")]), BadValueError, "have the same id"),
        (("gnu", [3]), BadValueError, "item 0 of the documents given"),
        ((["gnu", "cab"], [["d1"]]), BadValueError, "2 queries and 1 lists of candidates"),
        ((["gnu"], {"d1": "a"}), BadValueError, "1 queries and 0 lists of candidates"),
        ((3, ["d1"]), BadTypeError, "reranking: got 3"),
        (("gnu", ["d1"], 0), BadValueError, "k is 0; expected a whole number of 1 or more"),
        (("gnu", {"x": "y"}, "3"), BadValueError, "k is '3'; expected"),
        (
            ({"q2": "gnu"}, Run.from_dict({"q1": {"d1": 1.0}})),
            BadValueError,
            "query 'q1', whose text is not",
        ),
        (
            ({"q1": "gnu"}, Run.from_dict({"q1": {"x": 1.0}})),
            BadValueError,
            "the index has no document 'x'; give",
        ),
    ],
)
def test_what_cannot_be_reranked(
    retriever: Retriever, arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        retriever.rerank(*arguments)


def test_removed_documents_are_no_candidates(retriever: Retriever) -> None:
    retriever.remove(["d1"])
    with pytest.raises(BadValueError, match="no document 'd1'"):
        retriever.rerank("gnu", ["d1"])


@pytest.mark.parametrize(
    ("interaction", "error", "message"),
    [
        (lambda q, d: torch.zeros(len(d)), BadTypeError, r"the interaction gave \(2,\) for 1 query and 2"),
        (lambda q, d: 1.0, BadTypeError, "the interaction gave float"),
        ("mean_maxsim", BadTypeError, "the interaction is 'mean_maxsim'; expected a function"),
        (lambda q, d: torch.full((1, 2), torch.nan), BadValueError, "gave NaN"),
        (lambda q, d: mean_maxsim(Dense(torch.zeros(1, 2)), d), BadTypeError, "expected two MultiVector"),
    ],
)
def test_interactions_that_are_none(
    retriever: Retriever, interaction: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        retriever.rerank("gnu", ["d1", "d2"], interaction=interaction)
    with pytest.raises(error, match=message):
        retriever.rerank("gnu", {"a": "b", "c": "d"}, interaction=interaction)


# ---- explain -------------------------------------------------------------------------------------


def test_explanations_are_of_the_score_that_was_given(retriever: Retriever, model: Model) -> None:
    query = "Neural gnus, the gnu"
    if model.kind == "dense":
        passages = ["The gnu eats the grass.", "Search the index of neural models!"]
        explanation = retriever.explain(query, ("x", "  ".join(passages)))
        for match in explanation.words().matches:
            [alone] = retriever.rerank(query, {"x": match.document.token})
            assert match.score == pytest.approx(alone.score, abs=1e-5)
        assert sorted(match.document.token for match in explanation.matches) == passages[::-1]
        assert explanation.matches[0].score >= explanation.matches[1].score
        assert explanation.score == retriever.explain(query, ("y", explanation.document)).score
        assert retriever.explain(query, ("x", "")).matches == ()
        return
    for hit in retriever.search(query, k=7):
        explanation = retriever.explain(query, hit.id)
        assert explanation.score == pytest.approx(hit.score, abs=1e-5)
        assert sum(match.score for match in explanation.matches) == pytest.approx(hit.score, abs=1e-5)
        assert explanation.document == f"{hit.title} {hit.text}".strip()
        words = [match.query.token for match in explanation.words().matches]
        assert list(dict.fromkeys(words)) == ["[CLS]", "Neural", "gnus", ",", "the", "gnu", "[SEP]"]
        assert "." not in [match.document.token for match in explanation.matches]  # gives no vector
    given = retriever.explain(query, Document("x", "text of the gnu", "An a"))
    assert given == retriever.explain(query, "d3")
    assert given == retriever.explain(query, {"_id": "x", "text": "text of the gnu", "title": "An a"})
    assert given == retriever.explain(query, ("x", "An a text of the gnu"))
    json.dumps(given.to_dict())
    broken = retriever.explain("\ud83d\ude42 gnu \ud800", "d3").words()  # halves of characters
    assert broken.query == "\U0001f642 gnu \ufffd"
    assert "gnu" in [match.query.token for match in broken.matches]
    assert "\U0001f642 " in broken.to_html()
    with pytest.raises(
        BadValueError, match=r"no document 'nowhere'; expected an id of the index; .* as a Document"
    ):
        retriever.explain(query, "nowhere")
    with pytest.raises(BadTypeError, match="text 0 is int, expected a string"):
        retriever.explain(3, "d3")
    with pytest.raises(BadValueError, match="expected a Document, a record"):
        retriever.explain(query, 3)


def test_matches_are_of_equal_tokens_where_vectors_are(tiny_bert: Path) -> None:
    """With the same context on both sides, every token finds itself."""
    with pytest.warns(UserWarning, match="mean"):
        bare = Model.from_pretrained(tiny_bert)
    from irkit.retrieval.explanation import explain

    model = Model(bare.tokenizer, bare.encoder, MultiVectorHead(32, [Normalize()]))
    explanation = explain(model, "neural gnu search", "neural gnu search")
    assert all(match.query == match.document for match in explanation.matches)
    assert explanation.score == pytest.approx(len(explanation.matches), abs=1e-4)


def test_a_mean_is_not_taken_twice(tiny_bert: Path, tmp_path: Path) -> None:
    model = Model.multi_vector(tiny_bert, device="cpu")
    model.similarity_name = "meanmaxsim"
    retriever = Retriever.build(model, CORPUS, tmp_path / "index")
    with pytest.raises(BadValueError, match="a model that averages already"):
        retriever.rerank("gnu", ["d0"], interaction=mean_maxsim)


OPTIONS: list[dict[str, Any]] = [
    {"offset": 2},
    {"threshold": 0.0},
    {"group_by": "parity"},
    {"group_by": "parity", "per_group": 2, "offset": 1, "k": 2},
    {"fields": ["metadata.year"], "k": 3},
    {"fields": "id"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_a_search_select_candidates(model: Model, tmp_path: Path, options: dict[str, Any]) -> None:
    metadata = [{"year": i, "parity": i % 2} for i in range(len(CORPUS))]
    documents = [
        Document(item.id, item.text, item.title, known) for item, known in zip(CORPUS, metadata, strict=True)
    ]
    retriever = Retriever.build(model, documents, tmp_path / "index")
    given, k = {name: value for name, value in options.items() if name != "k"}, options.get("k")
    queries = list(QUERIES.values())
    if "threshold" in given:
        third, fourth = retriever.search(queries[0], 4)[2:]
        given["threshold"] = (third.score + fourth.score) / 2
    expected = retriever.search(queries, k or 7, **given)
    ids = [item.id for item in documents]
    assert any(len(line) < 7 or "fields" in options for line in expected)
    for candidates in (ids, documents):
        hits = retriever.rerank(queries, [candidates] * 3, k, **given)
        for line, wanted in zip(hits, expected, strict=True):
            assert values(line) == pytest.approx(values(wanted), abs=1e-6)
            assert [(hit.id, hit.text, hit.metadata) for hit in line] == [
                (hit.id, hit.text, hit.metadata) for hit in wanted
            ]
    if "fields" not in options:
        run = retriever.rerank(QUERIES, retriever.run(QUERIES, 7), k, **given)
        assert [list(row) for row in run.to_dict().values()] == [[hit.id for hit in row] for row in expected]


def test_options_of_a_search_that_make_no_sense(retriever: Retriever) -> None:
    run = Run.from_dict({"q1": {"d0": 1.0}})
    documents = {"d0": "a text"}
    for error, message, candidates, options in [
        (BadTypeError, "no option is named 'fields'", run, {"fields": ["title"]}),
        (BadTypeError, "no option is named 'ofset'; did you mean 'offset'", ["d0"], {"ofset": 1}),
        (BadValueError, "offset is -1", ["d0"], {"offset": -1}),
        (BadValueError, "per_group without group_by", ["d0"], {"per_group": 2}),
        (BadValueError, "group_by 'yaer': .*did you mean 'year'", ["d0"], {"group_by": "yaer"}),
        (BadValueError, "group_by 'year': no candidate has this key", documents, {"group_by": "year"}),
        (BadValueError, "threshold is nan", ["d0"], {"threshold": float("nan")}),
    ]:
        queries: Any = QUERIES if isinstance(candidates, Run) else "a query"
        with pytest.raises(error, match=message):
            retriever.rerank(queries, candidates, **options)


@pytest.mark.parametrize("windows", [None, {"length": 2}])
def test_one_long_list_does_not_lengthen_the_others(
    model: Model, tmp_path: Path, windows: dict[str, int] | None
) -> None:
    retriever = Retriever.build(model, CORPUS, tmp_path / "index", windows=windows)
    queries = [*QUERIES.values(), "text", "hip"]
    lists = [["d3"], ["d0", "d1", "d2", "d3", "d4", "d5", "d6"], [], ["d5"], ["d6", "d2"]]
    ranked = retriever.rerank(queries, lists)
    assert [len(line) for line in ranked] == [1, 7, 0, 1, 2]
    for line, query, ids in zip(ranked, queries, lists, strict=True):
        alone = retriever.rerank(query, ids)
        assert [(hit.id, hit.passage) for hit in line] == [(hit.id, hit.passage) for hit in alone]
        assert values(line) == pytest.approx(values(alone), abs=1e-5)


def test_memory_is_bounded_by_the_candidates(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).normal(size=(4000, 8)).astype(np.float32)
    names = [f"d{number}" for number in range(4000)]
    retriever = Retriever.build(Vectors(), zip(names, vectors, strict=True), tmp_path / "index")
    lists = [names, *([name] for name in names[1:])]
    retriever.rerank(vectors[:2], lists[:2])
    tracemalloc.start()
    try:
        hits = retriever.rerank(vectors, lists, fields=["id"])
        assert tracemalloc.get_traced_memory()[1] < 40 << 20  # a full table alone takes 122 MiB
    finally:
        tracemalloc.stop()
    assert (len(hits[0]), [hit.id for hit in hits[9]]) == (4000, ["d9"])
