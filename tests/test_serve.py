"""The server answers as the library does, to its own client and to the unmodified clients of others."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from irkit.client import Client
from irkit.data import Document, Query
from irkit.encoder_free import RM3
from irkit.errors import BadKeyError, BadTypeError, BadValueError, StorageError
from irkit.evaluation.run import Run
from irkit.retrieval.hybrid import Hybrid
from irkit.retrieval.retriever import Retriever
from irkit.shards import rewrite

Call = Callable[..., tuple[int, Any]]
KEY = {"authorization": "Bearer correct-horse"}


@pytest.fixture
def call(served: Any) -> Call:
    """Send a request: path, JSON or bytes, headers; status and answer."""

    def send(
        path: str, body: Any = None, method: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        parts = urlsplit(served.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        with contextlib.closing(connection):
            content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            given = {"content-type": "application/json"} | (headers or {})
            connection.request(method or ("GET" if body is None else "POST"), path, content, given)
            response = connection.getresponse()
            data = response.read()
            if response.headers.get("content-type") == "application/json":
                return response.status, json.loads(data)
            return response.status, data.decode()

    return send


# ---- search ----


def test_search_is_that_of_the_library(served: Any, call: Call) -> None:
    queries, options = ["search index", "neural"], {"k": 3, "offset": 1, "filter": {"year": {">=": 1}}}
    status, answer = call("/indexes/notes/search", {"queries": queries, **options})
    expected = served.retriever.search(queries, 3, {"year": {">=": 1}}, offset=1)
    assert (status, [result["query"] for result in answer["results"]]) == (200, queries)
    for result, hits in zip(answer["results"], expected, strict=True):
        assert [hit["id"] for hit in result["hits"]] == [hit.id for hit in hits]
        assert [hit["score"] for hit in result["hits"]] == pytest.approx([hit.score for hit in hits])
        assert [hit["metadata"] for hit in result["hits"]] == [hit.metadata for hit in hits]


def test_several_indexes_are_fused_with_the_score_of_each(served: Any, call: Call) -> None:
    body = {"queries": "neural search", "k": 3, "fuse": {"indexes": ["words"], "method": "minmax"}}
    hits = call("/indexes/notes/search", body)[1]["results"][0]["hits"]
    with Retriever.load(served.root / "words") as words:
        fused = Hybrid([served.retriever, words], "minmax").search("neural search", 3)
        exact = {hit.id: hit.score for hit in words.rerank("neural search", [hit.id for hit in fused])}
    assert [(hit["id"], hit["score"]) for hit in hits] == [
        (hit.id, pytest.approx(hit.score)) for hit in fused
    ]
    assert {hit["id"]: hit["parts"]["words"] for hit in hits} == pytest.approx(exact)


@pytest.mark.parametrize("by", ["colbert", "tokens", "cross"])
def test_hits_are_ranked_again(call: Call, by: str) -> None:
    body = {"queries": ["neural search"], "k": 12, "rerank": {"by": by}, "fields": ["text"]}
    status, answer = call("/indexes/notes/search", body)
    hits = answer["results"][0]["hits"]
    scores = [hit["score"] for hit in hits]
    assert (status, len(hits), scores) == (200, 12, sorted(scores, reverse=True))
    if by != "cross":  # an index of stored vectors, or the model that made them
        stored = call("/indexes/colbert/search", {"queries": "neural search", "k": 12})[1]
        assert [hit["id"] for hit in hits] == [hit["id"] for hit in stored["results"][0]["hits"]]


def test_highlights_explanations_and_facets(call: Call) -> None:
    body = {"queries": "searching tokens", "k": 2, "highlights": True, "explain": True, "facets": ["year"]}
    answer = call("/indexes/words/search", body)[1]
    for hit in answer["results"][0]["hits"]:
        words = [hit["text"][start:end] for start, end in hit["highlight"]["text"]]
        assert words
        assert set(words) <= {"search", "token"}
        explanation = hit["explanation"]
        assert explanation["score"] == pytest.approx(hit["score"])
        assert sum(match["score"] for match in explanation["matches"]) == pytest.approx(hit["score"])
        assert explanation["part"] == "terms"
    assert answer["facets"] == {"year": [{"value": year, "count": 4} for year in (0, 1, 2)]}
    counts = call("/indexes/words/facets", {"keys": ["year"], "filter": {"year": [0, 1]}})[1]
    assert (counts["documents"], len(counts["facets"]["year"])) == (8, 2)


def test_snippets_come_without_texts(call: Call) -> None:
    body = {"queries": "searching tokens", "k": 3, "snippet": True, "fields": ["metadata"]}
    hits = call("/indexes/words/search", body)[1]["results"][0]["hits"]
    assert [(hit["text"], hit["title"], set(hit["metadata"])) for hit in hits] == [("", "", {"year"})] * 3
    for made in (hit["snippet"] for hit in hits):
        words = {made["text"][start:end] for start, end in made["marks"]}
        assert words
        assert words <= {"search", "token"}
        assert (made["start"], made["end"]) == (0, made["length"])


@pytest.mark.parametrize(("index", "part"), [("notes", "passages"), ("colbert", "tokens")])
def test_explanations_of_models(call: Call, index: str, part: str) -> None:
    status, answer = call(f"/indexes/{index}/explain", {"query": "neural", "id": "d3"})
    assert (status, answer["part"], bool(answer["passages"])) == (200, part, True)
    assert bool(answer["matches"]) == (part == "tokens")
    other = {"id": "x", "text": "neural model"}
    assert call(f"/indexes/{index}/explain", {"query": "neural", "document": other})[0] == 200


def test_stream_has_a_line_for_each_hit(call: Call) -> None:
    body = {"queries": ["search", "neural"] * 10, "k": 200, "fields": ["id"]}
    lines = call("/indexes/notes/search", body | {"stream": True})[1].splitlines()
    *hits, end = map(json.loads, lines)
    assert (end["done"], end["hits"], len(hits)) == (True, 240, 240)
    assert [line["query"] for line in hits] == [number for number in range(20) for _ in range(12)]
    assert "limit" in call("/indexes/notes/search", body)[1]["error"]  # too many for one answer
    bad = call("/indexes/notes/search", body | {"stream": True, "filter": {"no": 1}})[1]
    assert json.loads(bad)["error_type"] == "Validation"


# ---- clients ----


def test_client_has_the_methods_of_a_retriever(served: Any) -> None:
    ours = served.retriever
    with Client(served.url, "notes") as client:
        assert len(client) == len(ours) == 12
        assert client.search("neural", 3)[0].metadata == ours.search("neural", 3)[0].metadata
        hits, expected = client.search(["neural", "text"], 3), ours.search(["neural", "text"], 3)
        assert [[hit.id for hit in line] for line in hits] == [[hit.id for hit in line] for line in expected]
        queries = {"q1": "neural", "q2": "text"}
        run, expected_run = client.run(queries, 5), ours.run(queries, 5)
        assert [result.doc_id for result in run] == [result.doc_id for result in expected_run]
        best = client.rerank("neural", ["d1", "d2", "d3"], 2)
        assert [hit.id for hit in best] == [hit.id for hit in ours.rerank("neural", ["d1", "d2", "d3"], 2)]
        assert client.facets("year", ["d0", "d1"]) == ours.facets("year", ["d0", "d1"])
        assert client.documents["d3"] == ours.documents["d3"]
        assert client.documents.fetch(["d3", "d1"]) == [ours.documents[name] for name in ("d3", "d1")]
        assert ("d3" in client.documents, "none" in client.documents) == (True, False)
        options: Any = {"offset": 1, "group_by": "year", "fields": ["title"]}
        assert_same(
            client.rerank(["neural"], [["d1", "d2", "d3", "d4"]], 2, **options),
            ours.rerank(["neural"], [["d1", "d2", "d3", "d4"]], 2, **options),
        )
        done = list[int]()
        ranked: Any = client.rerank(queries, run, 3, progress=done.append)
        expected_run = ours.rerank(queries, expected_run, 3)
        assert [result.doc_id for result in ranked] == [result.doc_id for result in expected_run]
        assert done == [2]
        client.run(queries, 2, progress=done.append)
        assert done == [2, 2]
        assert client.stats()["kind"] == "flat"
    with Client(served.url, "colbert") as client, Retriever.load(served.root / "colbert") as theirs:
        assert client.explain("neural", "d3").words().to_dict()["matches"][0]["query"]["token"]
        assert client.explain("neural", "d3").score == pytest.approx(theirs.explain("neural", "d3").score)


def assert_same(found: Any, expected: Any) -> None:
    for line, other in zip(found, expected, strict=True):
        for hit, theirs in zip(line, other, strict=True):
            assert (hit.id, hit.title, hit.text) == (theirs.id, theirs.title, theirs.text)
            assert hit.score == pytest.approx(theirs.score)


def test_client_gets_many_hits_as_a_stream(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = ["search", "neural", "nothing at all"]
    with Client(served.url, "words") as client, Retriever.load(served.root / "words") as ours:
        sent, ask = list[Any](), client.transport.ask

        def watched(method: str, path: str, body: Any = None) -> Any:
            sent.append(body)
            return ask(method, path, body)

        monkeypatch.setattr(client.transport, "ask", watched)
        assert_same(client.search(queries, 101), ours.search(queries, 101))
        assert_same(client.search(queries, 100, offset=1), ours.search(queries, 100, offset=1))
        client.search(queries, 100)
        assert [body.get("stream", False) for body in sent] == [True, True, False]
        with pytest.raises(BadValueError, match="nothing"):  # the stream says it, with the status 200
            client.search("x", 200, {"nothing": 1})
        with pytest.raises(BadValueError, match="the limit is 1000"):
            client.search("x", 1001)


def test_a_stream_that_is_cut_off_is_an_error(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(served.url, "words") as client:
        headers = {"content-type": "application/x-ndjson"}
        answer = 200, headers, b'{"query": 0, "hit": {}}\n'
        monkeypatch.setattr(client.transport, "exchange", lambda *arguments: answer)
        with pytest.raises(StorageError, match="no JSON"):
            client.search("x", 200)


def test_client_expands_queries_of_bm25(served: Any) -> None:
    queries, feedback = {"q1": "neural", "q2": "token"}, RM3(documents=3, terms=5, weight=0.3)
    with Client(served.url, "words") as client, Retriever.load(served.root / "words") as ours:
        expected = ours.search([*queries.values()], feedback=feedback)
        assert_same(client.search([*queries.values()], feedback=feedback), expected)
        assert [hit.score for hit in expected[0]] != [hit.score for hit in ours.search("neural")]
        run, expected_run = client.run(queries, 5, feedback=feedback), ours.run(queries, 5, feedback=feedback)
        assert [(item.doc_id, pytest.approx(item.score)) for item in run] == [
            (item.doc_id, item.score) for item in expected_run
        ]
    with Client(served.url, "notes") as client, pytest.raises(BadValueError, match="BM25"):
        client.search("neural", feedback=feedback)


def test_client_takes_one_query_that_is_no_text(served: Any) -> None:
    with Client(served.url, "words") as client:
        for wrong in ({"q1": "neural"}, {"neural": 1.5}, np.ones(3)):
            with pytest.raises(BadValueError, match=r"expected a string or several|queries"):
                client.search(wrong)
        with pytest.raises(BadTypeError, match="got 5, expected a query or several"):
            client.search(5)
        for wrong in ({"lang": {"de", "en"}}, {1: 2000}):
            with pytest.raises(BadValueError, match="filter"):
                client.search("x", filter=wrong)  # type: ignore[arg-type]
        with pytest.raises(BadValueError, match="not JSON serializable; expected what JSON can say"):
            client.add([{"_id": "1", "text": "x", "day": datetime.date(2020, 1, 1)}])
        run = Run.from_dict({"q": {"d1": 1.0}})
        with pytest.raises(BadValueError, match="'q' is a vector, and a Client sends texts"):
            client.rerank([Query("q", "", {"neural": 1.0})], run)


def test_client_says_what_is_wrong(served: Any) -> None:
    for arguments, kind, message in [
        ((served.url,), BadValueError, "3 indexes"),
        ((served.url, "nots"), BadValueError, "known: notes"),
        (("localhost",), BadValueError, "http://"),
        (("http://127.0.0.1:9",), StorageError, "is the server up"),
    ]:
        with pytest.raises(kind, match=message):
            Client(*arguments)
    with Client(served.url, "notes") as client:
        with pytest.raises(BadValueError, match="nothing"):
            client.search("x", filter={"nothing": 1})
        with pytest.raises(BadValueError, match="Authorization"):
            client.remove("d1")
        wrong: Any
        for wrong in ({"interaction": len}, {"teacher": len}):
            with pytest.raises(BadValueError, match="the server scores"):
                client.rerank("x", ["d1"], **wrong)
        with pytest.raises(BadValueError, match="1 queries and 2 lists"):
            client.rerank(["x"], [["d1"], ["d2"]])
        for wrong in ("d1", {"d1": "a text"}, [{"_id": "d1"}]):
            with pytest.raises(BadValueError, match="expected ids of documents, or hits"):
                client.rerank("x", wrong)
        with pytest.raises(BadKeyError, match="none"):
            client.documents["none"]
        with pytest.raises(BadTypeError, match="a list of ids"):
            client.documents.fetch("d1")
        with pytest.raises(BadValueError, match="'q1', whose text"):
            client.rerank({}, client.run({"q1": "x"}))


def test_openai_client(served: Any) -> None:
    openai = pytest.importorskip("openai", reason="needs: pip install openai")
    model = served.catalogue.models["dense"].model
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        assert {item.id for item in client.models.list()} >= {"dense", "tokens", "terms"}
        for encoding in ("float", "base64", None):  # None: the client asks for base64 and decodes it
            options = {} if encoding is None else {"encoding_format": encoding}
            made = client.embeddings.create(model="dense", input=["a text", "search"], **options)
            assert (made.usage.prompt_tokens, made.model) == (7, "dense")
        vectors = [item.embedding for item in made.data]
        np.testing.assert_allclose(
            vectors, model.encode(["a text", "search"], normalize_embeddings=True), atol=1e-6
        )
        short = client.embeddings.create(model="dense", input="a text", dimensions=4).data[0].embedding
        assert np.linalg.norm(short) == pytest.approx(1)
        side = client.embeddings.create(model="dense", input="a", extra_body={"input_type": "query"})
        np.testing.assert_allclose(
            side.data[0].embedding, model.encode_query("a", normalize_embeddings=True), atol=1e-6
        )
        with pytest.raises(openai.NotFoundError, match="did you mean"):
            client.embeddings.create(model="denso", input="a")
        with pytest.raises(openai.UnprocessableEntityError, match="input_type"):
            client.embeddings.create(model="dense", input="a", extra_body={"input_type": "both"})


def test_hugging_face_client(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import InferenceClient

    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)  # this server is no hub

    client = InferenceClient(served.url)
    model = served.catalogue.models["dense"].model
    vectors = client.feature_extraction(["a text", "search"], normalize=True)
    np.testing.assert_allclose(
        vectors, model.encode(["a text", "search"], normalize_embeddings=True), atol=1e-6
    )
    scores = client.sentence_similarity("a text", other_sentences=["a text", "neural"])
    assert scores[0] == pytest.approx(1, abs=1e-5)


def test_cohere_client(served: Any) -> None:
    cohere = pytest.importorskip("cohere", reason="needs: pip install cohere")
    documents = ["a text", "neural search", "index"]
    with cohere.Client(base_url=served.url, api_key="none") as client:
        result = client.rerank(model="tokens", query="neural", documents=documents, top_n=2)
        crossed = client.rerank(model="cross", query="neural", documents=documents).results
    model = served.catalogue.models["tokens"].model
    [scores] = model.similarity([model.encode_query("neural")], model.encode_document(documents)).tolist()
    found = {item.index: item.relevance_score for item in result.results}
    best = sorted(range(3), key=lambda i: -scores[i])[:2]
    assert found == pytest.approx({i: scores[i] for i in best}, rel=1e-5)
    assert all(0 < item.relevance_score < 1 for item in crossed)
    with cohere.ClientV2(base_url=served.url, api_key="none") as second:
        newer = second.rerank(model="tokens", query="neural", documents=documents, top_n=2)
        with pytest.raises(cohere.errors.UnprocessableEntityError, match="max_tokens_per_doc"):
            second.rerank(model="tokens", query="neural", documents=documents, max_tokens_per_doc=2)
    assert {item.index: item.relevance_score for item in newer.results} == found
    assert newer.meta.api_version.version == "2"


def test_pairs_of_a_cross_encoder_come_in_items_and_are_counted(
    served: Any, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    cross = served.catalogue.models["cross"]
    texts = ["search " * (1 + number % 40) for number in range(60)]
    sizes, score = [], cross.model.score_tokens

    def watched(rows: Any) -> Any:
        sizes.append(sum(map(len, rows["input_ids"])))
        return score(rows)

    monkeypatch.setattr(cross.model, "score_tokens", watched)
    body = {"query": "neural", "documents": texts, "model": "cross"}
    status, answer = call("/v1/rerank", body)
    total = sum(map(len, cross.model.tokenizer(["neural"] * 60, texts)["input_ids"]))
    assert (status, answer["usage"]["total_tokens"], sum(sizes)) == (200, total, total)
    assert len(sizes) > 1
    assert max(sizes) <= cross.limits.batch_tokens
    [expected] = cross.model([Query("q", "neural")], [[Document("d", text) for text in texts]])
    found = {item["index"]: item["relevance_score"] for item in answer["results"]}
    assert [found[i] for i in range(60)] == pytest.approx((1 / (1 + np.exp(-expected))).tolist(), abs=1e-6)
    monkeypatch.setattr(cross, "limits", cross.limits.model_copy(update={"tokens": total - 1}))
    status, answer = call("/v1/rerank", body)
    assert (status, f"{total} tokens in one request" in answer["error"]["message"]) == (413, True)


def test_tokens_are_counted_before_they_are_described(
    served: Any, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served.catalogue.models["dense"]
    monkeypatch.setattr(model, "limits", model.limits.model_copy(update={"tokens": 9}))
    body = {"inputs": ["neural search", "neural"], "model": "dense"}
    assert [len(row) for row in call("/tokenize", body)[1]] == [4, 3]
    status, answer = call("/tokenize", body | {"inputs": ["neural search"] * 3})
    assert (status, "12 tokens in one request" in answer["error"]) == (413, True)


def test_token_vectors_terms_and_tokens(served: Any, call: Call) -> None:
    models = served.catalogue.models
    rows = call("/embed_all", {"inputs": ["neural search"], "prompt_name": "query"})[1]
    np.testing.assert_allclose(rows[0], models["tokens"].model.encode_query("neural search"), atol=1e-6)
    [weights] = call("/embed_sparse", {"inputs": "neural search", "prompt_name": "document"})[1]
    dense = models["terms"].model.encode_document("neural search", convert_to_sparse_tensor=False)
    made = np.zeros(len(dense))
    made[[item["index"] for item in weights]] = [item["value"] for item in weights]
    np.testing.assert_allclose(made, dense, atol=1e-6)
    [tokens] = call("/tokenize", {"inputs": "neural!", "model": "dense"})[1]
    assert [(item["text"], item["special"]) for item in tokens] == [
        ("[CLS]", True),
        ("neural", False),
        ("!", False),
        ("[SEP]", True),
    ]
    plain = call("/tokenize", {"inputs": "neural", "model": "dense", "add_special_tokens": False})[1]
    assert [item["text"] for item in plain[0]] == ["neural"]
    ranked = call("/rerank", {"query": "neural", "texts": ["text", "neural"], "return_text": True})[1]
    assert sorted(item["text"] for item in ranked) == ["neural", "text"]


# ---- changes, batches, operations ----


def test_documents_are_added_replaced_and_removed(call: Call) -> None:
    path, new = "/indexes/words/documents", {"id": "new/1", "text": "zebra", "metadata": {"year": 9}}
    assert call(path, {"documents": [new]}, headers=KEY) == (201, {"added": 1, "documents": 13})
    assert call("/indexes/words/search", {"queries": "zebra"})[1]["results"][0]["hits"][0]["id"] == "new/1"
    assert call(path, {"documents": [new]}, headers=KEY)[0] == 409
    assert call(path, {"documents": [new | {"text": "lion"}]}, "PUT", KEY)[0] == 200
    assert call(f"{path}?id=new/1")[1]["documents"][0]["text"] == "lion"
    assert call(path, {"documents": [{"id": "none"}]}, "PUT", KEY)[0] == 404
    assert call(path, {"ids": ["new/1"]}, "DELETE", KEY) == (200, {"removed": 1, "documents": 12})
    assert call(path, {"ids": ["new/1"]}, "DELETE", KEY)[0] == 404
    assert call(f"{path}?id=new/1")[0] == 404


def fill_with_removed(call: Call, count: int = 20) -> None:
    path, ids = "/indexes/words/documents", [f"gone{number}" for number in range(count)]
    assert call(path, {"documents": [{"id": name, "text": "zebra"} for name in ids]}, headers=KEY)[0] == 201
    assert call(path, {"ids": ids}, "DELETE", KEY) == (200, {"removed": count, "documents": 12})


def wait_until_compact(index: Any, rows: int) -> None:
    end = time.monotonic() + 30
    while index.is_compacting or len(index.retriever().index) != rows:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("compact_rows", [50, 5], ids=["at once", "after a while"])
def test_removed_documents_are_compacted_away(
    served: Any, call: Call, monkeypatch: pytest.MonkeyPatch, compact_rows: int
) -> None:
    index = served.catalogue.indexes["words"]
    soon = {"compact_rows": compact_rows, "compact_removed": 3, "compact_seconds": 0.05}
    monkeypatch.setattr(index, "limits", index.limits.model_copy(update=soon))
    fill_with_removed(call)
    wait_until_compact(index, 12)
    body = {"queries": "search", "k": 50}
    hits = call("/indexes/words/search", body)[1]["results"][0]["hits"]
    assert {hit["id"] for hit in hits} == {f"d{number}" for number in range(12)}


def test_a_change_does_not_wait_for_the_compaction_of_a_large_index(
    served: Any, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, attempts = served.catalogue.indexes["words"], list[str]()
    begun = threading.Event()

    def rewrite_when_a_change_waits(*arguments: Any, **options: Any) -> None:
        attempts.append("begun")
        begun.set()
        while len(attempts) == 1 and not index.writes.waiting:
            time.sleep(0.01)
        rewrite(*arguments, **options)
        attempts.append("ended")

    monkeypatch.setattr("irkit.serve.served_indexes.rewrite", rewrite_when_a_change_waits)
    soon = {"compact_rows": 5, "compact_removed": 3, "compact_seconds": 0.05}
    monkeypatch.setattr(index, "limits", index.limits.model_copy(update=soon))
    fill_with_removed(call)
    assert begun.wait(30)
    path, new = "/indexes/words/documents", {"id": "new", "text": "zebra"}
    assert call(path, {"documents": [new]}, headers=KEY) == (201, {"added": 1, "documents": 13})
    wait_until_compact(index, 13)
    assert attempts == ["begun", "begun", "ended"]
    assert call("/indexes/words/search", {"queries": "zebra"})[1]["results"][0]["hits"][0]["id"] == "new"
    assert call(path, {"ids": ["new"]}, "DELETE", KEY)[0] == 200


def test_server_moves_on_when_another_process_changes_the_index(served: Any, call: Call) -> None:
    with Retriever.load(served.root / "words") as other:
        other.add({"later": "quagga"})
        assert call("/indexes/words/search", {"queries": "quagga"})[1]["results"][0]["hits"]
        other.remove("later")
    assert not call("/indexes/words/search", {"queries": "quagga"})[1]["results"][0]["hits"]


def test_requests_of_many_clients_are_worked_on_together(served: Any) -> None:
    index, sizes = served.catalogue.indexes["notes"], []
    begun, goes_on, work = threading.Event(), threading.Event(), index.work

    def slow(name: str, retriever: Any, jobs: list[Any]) -> Any:
        sizes.append(sum(len(job.queries) for job in jobs))
        begun.set()
        goes_on.wait(30)
        return work(name, retriever, jobs)

    index.work = slow
    try:
        with Client(served.url, "notes") as client:
            found: dict[int, Any] = {}
            ask = [
                threading.Thread(
                    target=lambda n=n: found.update({n: client.search(f"search {n}", 2 + n % 3)})
                )
                for n in range(9)
            ]
            ask[0].start()
            begun.wait(30)
            for thread in ask[1:]:
                thread.start()
            while index.searches.waiting < 8:  # all of them wait
                ask[0].join(0.01)
            goes_on.set()
            for thread in ask:
                thread.join()
    finally:
        index.work = work
    assert sizes == [1, 8]
    for number, hits in found.items():  # each with a k of its own
        expected = served.retriever.search(f"search {number}", 2 + number % 3)
        assert [hit.id for hit in hits] == [hit.id for hit in expected]


def test_batches_are_fair_and_queues_are_bounded() -> None:
    from irkit.serve.batcher import Batcher
    from irkit.serve.problems import Problem

    batches: list[list[str]] = []

    def work(key: Any, values: list[str]) -> list[str]:
        batches.append(values)
        if "bad" in values:
            raise BadValueError("bad")
        return [f"{key}{value}" for value in values]

    async def ask() -> None:
        batcher = Batcher("test", work, batch_size=10, most_waiting=50)
        large = asyncio.create_task(batcher.submit("k", [(f"large {i}", 10) for i in range(5)]))
        await asyncio.sleep(0)
        small, bad = (asyncio.create_task(batcher.submit("k", [(name, 2)])) for name in ("small", "bad"))
        await asyncio.sleep(0)
        with pytest.raises(Problem, match="waiting") as refused:
            await batcher.submit("k", [("more", 10)])
        assert refused.value.status == 429
        assert (await small, len(await large)) == (["ksmall"], 5)
        with pytest.raises(BadValueError):
            await bad
        await batcher.close()

    asyncio.run(ask())
    assert batches[0] == ["large 0"]
    assert batches[2] == ["small", "bad"]  # they do not wait for all of the large request
    assert batches[-1] == ["large 4"]


def test_operations(served: Any, call: Call) -> None:
    assert call("/health") == (200, {"status": "ok"})
    assert call("/ready") == (200, {"ready": True})
    info = call("/info")[1]
    assert (info["model_id"], info["max_client_batch_size"]) == ("dense", 64)
    assert {item["name"]: item["kind"] for item in call("/models")[1]["models"]} == {
        "dense": "dense",
        "tokens": "multi_vector",
        "terms": "sparse",
        "cross": "cross_encoder",
    }
    described = call("/indexes")[1]["indexes"]
    assert [(item["name"], item["parts"], item["keys"]) for item in described] == [
        ("notes", ["dense"], ["year"]),
        ("words", ["bm25"], ["year"]),
        ("colbert", ["tokens"], ["year"]),
    ]
    assert str(served.root) not in json.dumps(described)
    call("/embed", {"inputs": "a text", "model": "dense"})
    metrics = call("/metrics")[1]
    assert 'irkit_requests_total{name="dense",route="/embed",status="200"}' in metrics
    assert 'irkit_batch_size_bucket{le="1.0",name="index notes"}' in metrics
    paths = call("/openapi.json")[1]["paths"]
    assert {"/embed", "/v1/embeddings", "/indexes/{name}/search"} <= paths.keys()
