"""A client gives what a retriever of the same index gives: for vectors, explanations and many hits."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import ask, serving

from irkit import Retriever
from irkit.client import Client
from irkit.data import Document
from irkit.encoder_free import Vectors
from irkit.errors import BadTypeError, BadValueError

RNG = np.random.default_rng(0)
DENSE = RNG.normal(size=(12, 3)).astype(np.float32)
TOKENS = RNG.normal(size=(12, 4, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("client")
    for name, vectors in (("dense", DENSE), ("tokens", TOKENS)):
        documents = [Document(f"d{i}", "", f"title {i}", vector=row) for i, row in enumerate(vectors)]
        Retriever.build(Vectors("cosine"), documents, root / name).close()
    text = "Cats sleep. A cat hunts by night, and other cats sleep. Bears do not."
    texts = {f"d{i}": f"{text} {i}" for i in range(3)}
    Retriever.build("bm25", texts, root / "words").close()
    return root


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    paths = [folder / name for name in ("dense", "tokens", "words")]
    with serving(*paths, keys=[("write", sha256(b"correct-horse").hexdigest())]) as address:
        yield address


QUERIES = [
    ("dense", DENSE[0]),
    ("dense", DENSE[0].tolist()),
    ("dense", DENSE[:2]),
    ("dense", [DENSE[0], DENSE[1].tolist()]),
    ("tokens", TOKENS[0]),
    ("tokens", TOKENS[0].tolist()),
    ("tokens", [*TOKENS[0]]),
    ("tokens", TOKENS[:2]),
    ("tokens", [TOKENS[0], TOKENS[1, :2]]),
    ("tokens", [TOKENS[0]]),
]


@pytest.mark.parametrize(("index", "queries"), QUERIES)
def test_vectors_are_one_query_or_several(folder: Path, url: str, index: str, queries: Any) -> None:
    with Client(url, index) as client, Retriever.load(folder / index) as retriever:
        assert client.search(queries, 5) == retriever.search(queries, 5)


@pytest.mark.parametrize(
    ("index", "queries"),
    [
        ("tokens", [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]),
        ("tokens", [TOKENS[0].tolist(), [0.1, 0.2, 0.3]]),
        ("dense", [[[0.1, 0.2, 0.3]]]),
        ("dense", [[0.1, 0.2]]),
        ("dense", [[]]),
        ("dense", ["a text"]),
    ],
)
def test_vectors_of_another_kind_are_refused(url: str, index: str, queries: Any) -> None:
    status, answer = ask(url, f"/indexes/{index}/search", {"queries": queries})
    assert (status, answer["error"].startswith("vectors: a query")) == (422, True), answer


def test_a_query_without_tokens_has_no_hits(url: str) -> None:
    body = {"queries": [[], TOKENS[0].tolist()], "k": 1}
    status, answer = ask(url, "/indexes/tokens/search", body)
    assert status == 200
    assert [len(result["hits"]) for result in answer["results"]] == [1, 1]


def test_a_field_may_come_alone(folder: Path, url: str) -> None:
    with Client(url, "words") as client, Retriever.load(folder / "words") as retriever:
        assert client.search("cat", fields="title") == retriever.search("cat", fields="title")
        assert client.rerank("cat", ["d1"], fields="id") == retriever.rerank("cat", ["d1"], fields="id")
    body = {"queries": "cat", "fields": "title", "snippet": True}
    assert ask(url, "/indexes/words/search", body)[1]["results"][0]["hits"][0]["text"] == ""


def test_explanations_of_terms_are_those_of_the_library(folder: Path, url: str) -> None:
    query = "cats that hunt"
    with Client(url, "words") as client, Retriever.load(folder / "words") as retriever:
        ours, theirs = client.explain(query, "d1"), retriever.explain(query, "d1")
        assert any(match.repeats for match in theirs.matches)
        assert ours == theirs
        assert (ours.view(), ours.to_html()) == (theirs.view(), theirs.to_html())


def test_explanations_of_passages_are_those_of_the_library(served: Any) -> None:
    document = Document("x", "Neural search of an index. Text of a token and a model. Hip search.", "Vectors")
    with Client(served.url, "notes") as client:
        ours, theirs = client.explain("neural", document), served.retriever.explain("neural", document)
    assert len(theirs.matches) > 1
    assert [match.document for match in ours.matches] == [match.document for match in theirs.matches]
    assert [match.query for match in ours.matches] == [match.query for match in theirs.matches]
    assert [match.score for match in ours.matches] == pytest.approx([match.score for match in theirs.matches])
    assert ours.to_html() == theirs.to_html()


def test_many_hits_of_many_queries(folder: Path, url: str) -> None:
    queries = ["cat"] * 101
    status, answer = ask(url, "/indexes/words/search", {"queries": queries, "k": 1000})
    assert (status, "101000 hits in one answer, the limit is 100000" in answer["error"]) == (422, True)
    assert ask(url, "/indexes/words/search", {"queries": queries[1:], "k": 1000})[0] == 200
    with Client(url, "words") as client, Retriever.load(folder / "words") as retriever:
        assert client.search(queries, 1000) == retriever.search(queries, 1000)
        assert client.search(queries[:2], 1001) == retriever.search(queries[:2], 1001)


def test_documents_need_ids(url: str) -> None:
    with Client(url, "words", key="correct-horse") as client:
        for change in (client.add, client.update):
            wrong: Any
            for wrong in (["a text"], [("d9", "x"), "a text"], iter(["a text"])):
                with pytest.raises(BadValueError, match="got 'a text', expected a document with an id"):
                    change(wrong)
        with pytest.raises(BadValueError, match="with an id"):
            client.add(DENSE)
        with pytest.raises(BadTypeError, match="to_dict"):
            client.add(pytest.importorskip("pandas").DataFrame({"text": ["a"]}))
        client.add({"new": "zebra"})
        client.add([{"_id": "newer", "text": "zebra"}, Document("newest", "zebra"), ("last", "zebra")])
        assert {hit.id for hit in client.search("zebra")} == {"new", "newer", "newest", "last"}
        client.remove(["new", "newer", "newest", "last"])
