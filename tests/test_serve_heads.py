"""A model with several heads, and its index, behind the server."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import KEY, ask, serving
from three_heads import QUERIES, WEIGHTS, make_model

from irkit import Model, Retriever
from irkit.client import Client

TEXTS = {
    f"d{i}": f"{word} search the {other}"
    for i, (word, other) in enumerate(
        [("index", "text"), ("vector", "token"), ("neural", "model"), ("token", "index"), ("text", "search")]
    )
}
SEARCH, EXPLAIN = "/indexes/three/search", "/indexes/three/explain"


@pytest.fixture(scope="module")
def model(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tiny_bert, tmp_path_factory.mktemp("heads") / "model")


@pytest.fixture(scope="module")
def retriever(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Retriever]:
    with Retriever.build(model, TEXTS, tmp_path_factory.mktemp("heads-index") / "three") as made:
        yield made


@pytest.fixture(scope="module")
def url(retriever: Retriever) -> Iterator[str]:
    with serving(retriever.store.path, keys=[("write", sha256(b"correct-horse").hexdigest())]) as address:
        yield address


def test_each_route_takes_the_head_that_fits(url: str, model: Model) -> None:
    expected: Any = model.encode(QUERIES)
    for path, head, name in [
        ("/embed", "dense", None),
        ("/embed", "dense", "model"),
        ("/embed_all", "multi_vector", "model"),
        ("/embed_all", "multi_vector", "model/multi_vector"),
    ]:
        status, rows = ask(url, path, {"inputs": QUERIES, "model": name, "normalize": False})
        assert status == 200, rows
        for row, other in zip(rows, expected[head], strict=True):
            np.testing.assert_allclose(row, other, atol=1e-5)
    status, rows = ask(url, "/embed_sparse", {"inputs": QUERIES})
    dense = expected["sparse"].to_dense()
    assert [{item["index"]: item["value"] for item in row} for row in rows] == [
        pytest.approx({int(term): float(row[term]) for term in row.nonzero()[:, 0]}, abs=1e-5)
        for row in dense
    ]
    _, answer = ask(url, "/models", None, "GET")
    kinds = {item["name"]: item["kind"] for item in answer["models"]}
    assert kinds == {"model": "several"} | {f"model/{head}": head for head in model.heads}
    assert ask(url, "/v1/embeddings", {"input": "a", "model": "model"})[1]["model"] == "model/dense"
    status, answer = ask(url, "/embed", {"inputs": "a", "model": "model/sparse"})
    assert (status, "of kind sparse, expected dense" in answer["error"]) == (422, True)


def test_texts_are_scored_by_all_heads_or_one(url: str, model: Model, retriever: Retriever) -> None:
    texts = [*TEXTS.values()]
    _, ranked = ask(url, "/rerank", {"query": QUERIES[0], "texts": texts, "raw_scores": True})
    hits = retriever.rerank(QUERIES[0], TEXTS)
    assert {f"d{item['index']}": item["score"] for item in ranked} == pytest.approx(
        {hit.id: hit.score for hit in hits}, abs=1e-5
    )
    body = {"inputs": {"source_sentence": QUERIES[0], "sentences": texts}}
    dense = model.heads["dense"]
    expected = dense.similarity(dense.encode(QUERIES[:1]), dense.encode(texts))[0].tolist()
    assert ask(url, "/similarity", body)[1] == pytest.approx(expected, abs=1e-5)
    assert ask(url, "/tokenize", {"inputs": "text"})[0] == 200


@pytest.mark.parametrize("fuse", [None, "rrf", WEIGHTS, {"sparse": 1.0}])
def test_hits_are_fused_with_the_score_of_each_head(url: str, retriever: Retriever, fuse: Any) -> None:
    status, answer = ask(url, SEARCH, {"queries": QUERIES, "k": 4, "fuse": fuse})
    assert status == 200, answer
    for query, result, hits in zip(
        QUERIES, answer["results"], retriever.search(QUERIES, 4, fuse=fuse), strict=True
    ):
        assert [(hit["id"], hit["score"]) for hit in result["hits"]] == [
            (hit.id, pytest.approx(hit.score, abs=1e-6)) for hit in hits
        ]
        for head in WEIGHTS:
            exact = {hit.id: hit.score for hit in retriever.rerank(query, [*TEXTS], fuse={head: 1.0})}
            for hit in result["hits"]:
                assert hit["parts"][f"three/{head}"] == pytest.approx(exact[hit["id"]], abs=1e-5)
    _, facts = ask(url, "/indexes/three", None, "GET")
    assert (facts["heads"], facts["parts"]) == ([*WEIGHTS], ["dense", "sparse", "tokens"])
    assert facts["explain"] == ["terms", "tokens", "passages"]


def test_fuse_that_makes_no_sense(url: str) -> None:
    for fuse, words in [
        ({"dense": -1.0}, "above 0"),
        ({"none": 1.0}, "none"),
        ({}, "one or more of dense"),
        ("sum", "rrf"),
        ({"indexes": ["words"]}, "no index"),
    ]:
        status, answer = ask(url, SEARCH, {"queries": "a", "fuse": fuse})
        assert (status, words in answer["error"]) == (422, True), answer


def test_an_explanation_has_all_heads(url: str, retriever: Retriever) -> None:
    from irkit.serve.answers import Explained, Found

    _, answer = ask(url, EXPLAIN, {"query": QUERIES[0], "id": "d1"})
    assert (
        Explained.model_validate(answer, extra="forbid").model_dump(mode="json", exclude_unset=True) == answer
    )
    parts = {head: part["part"] for head, part in answer["parts"].items()}
    assert parts == {"dense": "passages", "sparse": "terms", "multi_vector": "tokens"}
    assert answer["score"] == pytest.approx(sum(part["score"] for part in answer["parts"].values()))
    with Client(url) as client:
        ours, theirs = client.explain(QUERIES[0], "d1"), retriever.explain(QUERIES[0], "d1")
        for head in WEIGHTS:
            assert [(match.query, match.document) for match in ours.parts[head].matches] == [
                (match.query, match.document) for match in theirs.parts[head].matches
            ]
        found, expected = (each.search("neural", 2, fuse=WEIGHTS) for each in (client, retriever))
        assert [(hit.id, hit.score) for hit in found] == [
            (hit.id, pytest.approx(hit.score, abs=1e-6)) for hit in expected
        ]
    body = {"queries": "neural", "k": 1, "explain": True, "highlights": True, "rerank": {"by": "three"}}
    _, answer = ask(url, SEARCH, body)
    Found.model_validate(answer, extra="forbid")
    assert {*answer["results"][0]["hits"][0]["explanation"]["parts"]} == {*WEIGHTS}


def test_documents_change_in_all_heads(url: str) -> None:
    added = {"documents": [{"id": "new", "text": "neural neural neural"}]}
    assert ask(url, "/indexes/three/documents", added, headers=KEY)[0] == 201
    _, answer = ask(url, SEARCH, {"queries": "neural neural neural", "k": 1, "fuse": WEIGHTS})
    assert answer["results"][0]["hits"][0]["id"] == "new"
    assert ask(url, "/indexes/three/documents", {"ids": ["new"]}, "DELETE", headers=KEY)[0] == 200
