"""Shards on Ray and engines elsewhere, served: the same answers, partial ones marked, nothing changed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from irkit import Hybrid, Retriever
from irkit.client import Client
from irkit.client.transport import Transport
from irkit.errors import BadTypeError, BadValueError, CorruptError, StorageError
from irkit.evaluation.run import Run
from irkit.ray_engine import PartialResultWarning, ShardedRetriever
from irkit.ray_engine.ray_search import open_on_actors
from irkit.ray_engine.shard_actors import Answers, ShardActors, _ThreadView
from irkit.remote.remote_retriever import RemoteHit, RemoteRetriever
from irkit.retrieval.collection import LoadOptions, open_collection
from irkit.serve import served_remotes
from irkit.serve.app import create_app
from irkit.serve.catalogue import Catalogue, check_paths, name_paths
from irkit.serve.serve_config import ServeConfig
from irkit.serve.served_remotes import RemoteAddress, parse_address

TEXTS = {f"d{number}": f"word{number % 5} common text {number}" for number in range(30)}
QUERY = "word1 common"


class Elsewhere(RemoteRetriever):
    """An engine that searches an index of irkit, so that results are known."""

    def __init__(self, location: str, model: Any = None) -> None:
        self.inside = Retriever.load(location)
        about = {"model": self.inside.store.meta["model"], "kind": "sparse", "dim": None, "keys": {}}
        super().__init__(location, about if len(self.inside) else None, model or location)

    def _parse(self, queries: Any, operation: str) -> tuple[list[Any], bool]:
        return [queries] if isinstance(queries, str) else list(queries), isinstance(queries, str)

    def _encode(self, contents: list[Any]) -> Iterator[Any]:
        return iter(contents)

    def _content(self, query: Any) -> Any:
        return query.text

    def _search(self, query: Any, k: int, where: Any, exact: bool, texts: bool) -> list[RemoteHit]:
        hits = self.inside.search(query, k, where)
        rows = self.inside.documents.find([hit.id for hit in hits]).tolist()
        return [
            RemoteHit(row, hit.score, self.inside.documents[hit.id])
            for row, hit in zip(rows, hits, strict=True)
        ]

    def _translate(self, where: Any) -> Any:
        (condition,) = where.parts
        return {condition.key: condition.operand}

    def fetch(self, ids: Sequence[str]) -> list[Any]:
        rows = self.inside.documents.find(list(ids))
        return self.inside.documents.fetch(rows[rows >= 0])

    def __len__(self) -> int:
        return len(self.inside)

    def close(self) -> None:
        self.inside.close()


@pytest.fixture
def words(tmp_path: Path) -> Retriever:
    return Retriever.build("bm25", TEXTS, tmp_path / "words", shards=2)


def test_an_engine_that_does_not_answer_is_an_error_of_irkit(words: Retriever) -> None:
    class Down(Elsewhere):
        def _search(self, *_: Any) -> list[RemoteHit]:
            raise RuntimeError("connection refused")

    with Down(str(words.store.path)) as far:
        for ask in (lambda: far.search(QUERY), lambda: far.rerank([QUERY], [["d1"]])):
            with pytest.raises(StorageError, match="connection refused; is the engine up"):
                ask()


@contextmanager
def served(*paths: str, keys: Any = (), **options: Any) -> Iterator[TestClient]:
    with TestClient(create_app(Catalogue(ServeConfig(paths=paths, keys=keys, **options)))) as client:
        yield client


def test_places_of_engines_are_parsed() -> None:
    assert parse_address("qdrant:http://h:6333/c#dir") == RemoteAddress("qdrant", "http://h:6333/c", "dir")
    assert parse_address("lancedb:folder") == RemoteAddress("lancedb", "folder", "")
    for path in ("notes", "qdrant", "s3://bucket/notes", "other:place"):
        assert parse_address(path) is None
    assert name_paths(("qdrant:http://h:6333/notes#words", "b=lancedb:x")) == {
        "notes": "qdrant:http://h:6333/notes#words",
        "b": "lancedb:x",
    }
    for path in ("qdrant:no-such-folder", "lancedb:no-such-folder"):
        with pytest.raises((StorageError, ImportError)):
            check_paths((path,))


def test_an_engine_is_served_and_not_changed(
    words: Retriever, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(served_remotes.ENGINES, "elsewhere", Elsewhere)
    place = f"far=elsewhere:{tmp_path / 'words'}"
    key = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # of the empty key
    with served(str(tmp_path / "words"), place, keys=(("write", key),)) as client:
        facts = {item["name"]: item for item in client.get("/indexes").json()["indexes"]}
        told = facts["far"]["kind"], facts["far"]["documents"], facts["far"]["keys"]
        assert told == ("elsewhere", 30, [])
        body: dict[str, Any] = {"queries": [QUERY, "word2"], "k": 4, "offset": 1, "snippet": True}
        near, far = (client.post(f"/indexes/{name}/search", json=body).json() for name in ("words", "far"))
        assert far["results"] == near["results"]
        assert far["documents"] == 30
        # fused, and ranked again by either
        fused = {"queries": QUERY, "k": 3, "fuse": {"indexes": ["words"]}, "fields": []}
        hits = client.post("/indexes/far/search", json=fused).json()["results"][0]["hits"]
        hybrid = Hybrid([Elsewhere(str(tmp_path / "words")), words])
        assert [hit["id"] for hit in hits] == [hit.id for hit in hybrid.search(QUERY, 3)]
        assert all(hit["parts"]["far"] == hit["parts"]["words"] for hit in hits)
        again = {"queries": [QUERY], "k": 3, "offset": 1, "rerank": {"by": "far", "depth": 9}}
        ranked = client.post("/indexes/words/search", json=again).json()["results"][0]["hits"]
        assert [hit["id"] for hit in ranked] == [hit.id for hit in words.search(QUERY, 4)][1:]
        body = {"queries": [QUERY], "ids": [["d3", "d1", "no"]]}
        for name in ("words", "far"):
            answer = client.post(f"/indexes/{name}/rerank", json=body)
            assert (answer.status_code, "no document 'no'" in answer.json()["error"]) == (422, True)
        body["ids"] = [["d3", "d1"]]
        assert client.post("/indexes/far/rerank", json=body).json()["results"][0]["hits"][0]["id"] == "d1"
        documents = client.get("/indexes/far/documents?id=d1&id=d2").json()["documents"]
        assert [item["id"] for item in documents] == ["d1", "d2"]
        assert client.get("/indexes/far/documents?id=no").status_code == 404
        # what an engine elsewhere does not do
        one = {"query": QUERY, "id": "d1"}
        refused = [
            client.post("/indexes/far/explain", json=one),
            client.post("/indexes/far/facets", json={"keys": ["year"]}),
            client.post("/indexes/far/search", json={"queries": QUERY, "k": 2, "explain": True}),
            client.post(
                "/indexes/far/documents",
                json={"documents": [{"id": "n", "text": "new"}]},
                headers={"authorization": "Bearer "},
            ),
        ]
        for answer in refused[:3]:
            assert (answer.status_code, "another engine" in answer.json()["error"]) == (422, True)
        assert refused[3].status_code in (401, 422)
        assert len(words) == 30
        client.app.state.catalogue.reload()  # type: ignore[attr-defined]
        assert client.post("/indexes/far/search", json={"queries": QUERY}).status_code == 200
    (tmp_path / "none").mkdir()
    Retriever.build("bm25", [], tmp_path / "none" / "index")
    with pytest.raises(CorruptError, match="no finished export"):
        Catalogue(ServeConfig(paths=(f"far=elsewhere:{tmp_path / 'none' / 'index'}",)))


def test_a_remote_ranks_again_with_the_options_of_a_retriever(words: Retriever, tmp_path: Path) -> None:
    far, ids = Elsewhere(str(tmp_path / "words")), list(TEXTS)
    for options in ({}, {"offset": 2}, {"fields": ["title"]}, {"threshold": 0.5}):
        selecting: Any = options
        assert far.rerank(QUERY, ids, 3, **selecting) == words.rerank(QUERY, ids, 3, **selecting)
    run = words.run({"q": QUERY}, 9)
    assert list(far.rerank({"q": QUERY}, run, 3)) == list(words.rerank({"q": QUERY}, run, 3))
    with pytest.raises(BadTypeError, match="no option is named 'ofset'"):
        far.rerank(QUERY, ids, 3, ofset=1)  # type: ignore[call-arg]
    with pytest.raises(BadValueError, match="leave the interaction out"):
        far.rerank(QUERY, ids, 3, interaction=max)  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="has one representation; leave fuse out"):
        far.rerank(QUERY, ids, 3, fuse={"dense": 1.0})
    with pytest.raises(BadTypeError, match="teacher"):
        far.rerank(QUERY, ids, 3, teacher=5)  # type: ignore[arg-type]


def test_candidates_without_a_word_of_the_query_score_0(words: Retriever, tmp_path: Path) -> None:
    far = Elsewhere(str(tmp_path / "words"))
    ids = ["d3", "d1", "d6"]
    ours, theirs = words.rerank("word1", ids), far.rerank("word1", ids)
    assert [(hit.id, hit.score) for hit in theirs] == [(hit.id, hit.score) for hit in ours]
    assert len(theirs) == 3


def test_ties_of_reranking_stay_in_the_order_of_candidates(words: Retriever, tmp_path: Path) -> None:
    far = Elsewhere(str(tmp_path / "words"))
    for ids in (["d21", "d6", "d11", "d3", "d2", "d16"], ["d3", "d2", "d8", "d1", "d26"]):
        for query in ("word1", "common"):
            ours, theirs = words.rerank(query, ids), far.rerank(query, ids)
            assert [(hit.id, hit.score) for hit in theirs] == [(hit.id, hit.score) for hit in ours]
            run = Run([("q", ids, np.zeros(len(ids), np.float32))])
            assert list(far.rerank({"q": query}, run)) == list(words.rerank({"q": query}, run))


def test_reranking_refuses_ids_that_an_engine_lacks(words: Retriever, tmp_path: Path) -> None:
    far = Elsewhere(str(tmp_path / "words"))

    def flat(queries: Any, lists: Any) -> Any:
        return [[1.0] * len(line) for line in lists]

    for options in ({}, {"teacher": flat}):
        asking: Any = options
        with pytest.raises(BadValueError, match="has no document 'no', nor 1 more of those given; give ids"):
            far.rerank("word1", ["d1", "no", "d2", "never"], **asking)


def test_a_document_that_an_engine_removes_meanwhile_is_left_out(words: Retriever, tmp_path: Path) -> None:
    class Forgetful(Elsewhere):
        def fetch(self, ids: Sequence[str]) -> list[Any]:
            return [document for document in super().fetch(ids) if document.id != "d1"]

    hits = Hybrid([Forgetful(str(tmp_path / "words")) for _ in range(2)]).search(QUERY, 5)
    assert len(hits) == 4
    assert "d1" not in {hit.id for hit in hits}


def test_an_engine_is_asked_by_one_thread_at_a_time(
    words: Retriever, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most = [0], [0]

    class Slow(Elsewhere):
        def _search(self, *arguments: Any) -> list[RemoteHit]:
            running[0] += 1
            most[0] = max(most[0], running[0])
            time.sleep(0.05)
            running[0] -= 1
            return super()._search(*arguments)

    monkeypatch.setitem(served_remotes.ENGINES, "elsewhere", Slow)
    places = [f"{name}=elsewhere:{tmp_path / 'words'}" for name in ("far", "further")]
    with served(str(tmp_path / "words"), *places[:1]) as client, ThreadPoolExecutor(4) as pool:
        bodies = [("far", {"queries": QUERY}), ("words", {"queries": QUERY, "fuse": {"indexes": ["far"]}})]
        asked = [pool.submit(client.post, f"/indexes/{name}/search", json=body) for name, body in bodies * 4]
        assert {answer.result().status_code for answer in asked} == {200}
        assert most == [1]
    with served(*places) as client, ThreadPoolExecutor(4) as pool:  # each names the other
        bodies = [
            (name, {"queries": QUERY, "fuse": {"indexes": [other]}})
            for name, other in (("far", "further"), ("further", "far"))
        ]
        asked = [pool.submit(client.post, f"/indexes/{name}/search", json=body) for name, body in bodies * 6]
        assert {answer.result(60).status_code for answer in asked} == {200}


class Deaf(ShardActors):
    """Shards whose first one does not answer, without processes."""

    deaf = True

    def __init__(self, store: Any, partial: bool) -> None:
        self._store, self._thread, self.timeout, self.replicas = store, _ThreadView(partial), 1, [[None]]
        self._ray = SimpleNamespace(kill=print)

    def divide(self, *_: Any) -> None:
        """Leave all to the shards."""

    def _ask(self, index: Any, work: Any, queries: Any, masks: Any, settings: Any) -> Any:
        found = [work(part, queries, mask, *settings) for part, mask in zip(index.parts, masks, strict=True)]
        if Deaf.deaf:
            found[0] = None
            if self._thread.answers is not None:
                self._thread.answers.repeated += 1
        return found


class DeafRetriever(ShardedRetriever):
    @classmethod
    def load(cls, path: Any, model: Any = None, **options: Any) -> Any:
        options.pop("address", None), options.pop("timeout", None)
        partial = options.pop("partial_results", False)
        collection: Any = open_collection(path, model, LoadOptions(**options))
        actors = Deaf(collection.store, partial)
        collection.index, collection.documents = open_on_actors(collection.store, actors)
        return cls(collection, actors)


def test_partial_results_are_marked_or_refused_as_the_request_says(
    words: Retriever, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("irkit.serve.catalogue.ShardedRetriever", DeafRetriever)
    monkeypatch.setattr(Deaf, "deaf", False)
    with served(str(tmp_path / "words"), engine="ray") as client:
        Deaf.deaf = True
        body = {"queries": [QUERY], "k": 30}
        whole = client.post("/indexes/words/search", json=body)
        assert (whole.status_code, "no answer of shard-1-000" in whole.json()["error"]) == (503, True)
        [result] = client.post("/indexes/words/search", json=body | {"partial": True}).json()["results"]
        assert result["missing"] == ["words/shard-1-000"]
        every = words.search(QUERY, 30)
        ids = {hit["id"] for hit in result["hits"]}
        assert 0 < len(ids) < len(every)
        assert [hit["id"] for hit in result["hits"]] == [hit.id for hit in every if hit.id in ids]
        lines = client.post("/indexes/words/search", json=body | {"partial": True, "stream": True}).text
        assert '"missing": ["words/shard-1-000"]' in lines.splitlines()[-1]
        metrics = client.get("/metrics").text
        for outcome in ("asked", "repeated", "missing"):
            assert f'irkit_shard_questions_total{{name="words",outcome="{outcome}"}}' in metrics
        old = client.app.state.catalogue.index("words").retriever()  # type: ignore[attr-defined]
        client.app.state.catalogue.reload()  # type: ignore[attr-defined]
        assert old.actors.replicas
        client.post("/indexes/words/search", json=body | {"partial": True})
        assert old.actors.replicas == []


def test_a_client_warns_of_partial_results(monkeypatch: pytest.MonkeyPatch) -> None:
    hit = {"id": "d1", "score": 1.0, "text": "", "title": "", "metadata": {}}
    sent: list[Any] = []

    def ask(transport: Transport, method: str, path: str, body: Any = None) -> Any:
        sent.append(body)
        if method == "GET":
            return {"indexes": [{"name": "words", "representation": "sparse", "most_hits": 1000}]}
        missing = {"missing": ["words/shard-1-000"]} if body.get("partial") else {}
        return {"results": [{"query": QUERY, "hits": [hit]} | missing]}

    monkeypatch.setattr(Transport, "ask", ask)
    client = Client("http://127.0.0.1:1", partial_results=True)
    with pytest.warns(PartialResultWarning, match=r"words: no answer of words/shard-1-000"):
        assert [found.id for found in client.search(QUERY)] == ["d1"]
    assert client.missing == ("words/shard-1-000",)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = Client("http://127.0.0.1:1")
        other.search(QUERY)
    assert (other.missing, "partial" in sent[-1]) == ((), False)


def test_a_thread_counts_what_its_own_searches_miss(words: Retriever, tmp_path: Path) -> None:
    deaf = DeafRetriever.load(tmp_path / "words", partial_results=True)
    with pytest.warns(PartialResultWarning, match="shard-1-000"):
        deaf.search(QUERY)
    with deaf.watch(True) as outer, deaf.watch(True) as inner:
        deaf.search([QUERY, "word2"])
    assert (outer, inner) == (Answers(), Answers(2, 1, {"shard-1-000"}))
    with deaf.watch(False), pytest.raises(StorageError, match="no answer"):
        deaf.search(QUERY)


def test_wrong_deployments_are_refused() -> None:
    pytest.importorskip("ray.serve", reason="needs: pip install 'irkit[ray]'")
    from irkit.serve.ray_deployment import deploy

    with pytest.raises(BadTypeError, match="no argument is named 'path'"):
        deploy({"path": "words"})
    with pytest.raises(BadValueError, match="nothing was given"):
        deploy({})
    for replicas in (0, "many", -1):
        with pytest.raises(BadValueError):
            deploy({"paths": "words", "replicas": replicas})
