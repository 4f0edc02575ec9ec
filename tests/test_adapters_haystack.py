"""The adapters of Haystack: its tests of document stores, pipelines, bad input."""

from __future__ import annotations

import asyncio
import os

import pytest

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
pytest.importorskip("haystack", reason="make adapters installs haystack-ai")

from haystack import Document, Pipeline
from haystack.components.writers import DocumentWriter
from haystack.dataclasses import ByteStream
from haystack.document_stores.errors import DuplicateDocumentError
from haystack.document_stores.types import DuplicatePolicy
from haystack.errors import FilterError
from haystack.testing.document_store import (
    CountDocumentsTest,
    DeleteDocumentsTest,
    FilterDocumentsTest,
    WriteDocumentsTest,
)
from haystack.testing.document_store_async import (
    CountDocumentsAsyncTest,
    DeleteDocumentsAsyncTest,
    FilterDocumentsAsyncTest,
    WriteDocumentsAsyncTest,
)

from irkit import Retriever
from irkit.adapters.haystack import (
    IrkitDocumentEmbedder,
    IrkitDocumentStore,
    IrkitEmbeddingRetriever,
    IrkitRetriever,
    IrkitTextEmbedder,
)
from irkit.errors import BadTypeError, BadValueError

VECTORS = {"kind": "vectors", "similarity": "cosine", "representation": "dense", "dim": 2}
NOTES = [
    Document(id="b", content="Bears sleep in winter.", meta={"topic": "animals", "year": 2020}),
    Document(id="c", content="Copper conducts electricity.", meta={"topic": "physics", "tags": ["a", "b"]}),
    Document(id="e", content=None),
]


@pytest.fixture
def document_store(tmp_path):
    return IrkitDocumentStore(tmp_path / "store", "bm25")


class TestStore(CountDocumentsTest, DeleteDocumentsTest, FilterDocumentsTest, WriteDocumentsTest):
    @staticmethod
    def assert_documents_are_equal(received, expected):
        """The store has vectors of the model of its index, not those of the documents."""
        assert [{**item.to_dict(), "embedding": None} for item in received] == [
            {**item.to_dict(), "embedding": None} for item in expected
        ]

    def test_write_documents(self, document_store):
        assert document_store.write_documents(NOTES[:1]) == 1
        with pytest.raises(DuplicateDocumentError):
            document_store.write_documents(NOTES)
        assert document_store.filter_documents() == NOTES[:1]


class TestStoreAsync(
    CountDocumentsAsyncTest, DeleteDocumentsAsyncTest, FilterDocumentsAsyncTest, WriteDocumentsAsyncTest
):
    assert_documents_are_equal = staticmethod(TestStore.assert_documents_are_equal)

    async def test_write_documents_async(self, document_store):
        assert await document_store.write_documents_async(NOTES[:1]) == 1


@pytest.fixture
def notes_store(document_store):
    document_store.write_documents(NOTES)
    return document_store


def test_retriever_finds_what_the_index_finds(notes_store):
    find = IrkitRetriever(notes_store, filters={"field": "meta.topic", "operator": "!=", "value": "physics"})
    hits = notes_store.retriever.search("bears sleep", k=100)
    found = find.run("bears sleep", top_k=100)["documents"]
    assert [(item.id, item.content, item.score) for item in found] == [
        (hit.id, hit.text, hit.score) for hit in hits
    ]
    assert find.run("copper")["documents"] == find.run("")["documents"] == []
    physics = {"field": "meta.topic", "operator": "==", "value": "physics"}
    assert [item.id for item in find.run("copper", filters=physics)["documents"]] == ["c"]
    assert asyncio.run(find.run_async("bears", top_k=1))["documents"][0].meta == NOTES[0].meta


@pytest.mark.parametrize(
    ("condition", "ids"),
    [
        ({"field": "id", "operator": "in", "value": ["b", "x"]}, ["b"]),
        ({"field": "meta.year", "operator": "<=", "value": 2020}, ["b"]),
        ({"field": "meta.year", "operator": "==", "value": None}, ["c", "e"]),
        ({"field": "meta.year", "operator": "in", "value": [None]}, ["c", "e"]),
        ({"field": "meta.tags", "operator": "==", "value": "a"}, ["c"]),
        ({"field": "meta.topic", "operator": "not in", "value": ["physics"]}, ["b", "e"]),
    ],
)
def test_filters(notes_store, condition, ids):
    assert [item.id for item in notes_store.filter_documents(condition)] == ids
    both = {"operator": "NOT", "conditions": [condition]}
    assert [item.id for item in notes_store.filter_documents(both)] == [i for i in "bce" if i not in ids]


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ({"field": "meta.topics", "operator": "==", "value": "a"}, "did you mean 'topic'"),
        ({"field": "content", "operator": "==", "value": "a"}, "expected 'id' or a key"),
        ({"field": "meta.year", "operator": "=", "value": 1}, "operator '='"),
        ({"field": "meta.year", "operator": "==", "value": "2020"}, "is a string"),
        (
            {"operator": "XOR", "conditions": [{"field": "id", "operator": "==", "value": "b"}]},
            "AND, OR or NOT",
        ),
        ({"operator": "AND", "conditions": []}, "no conditions"),
        (["meta.year"], "expected an operator"),
    ],
)
def test_bad_filters_are_refused(notes_store, condition, message):
    with pytest.raises(FilterError, match=message):
        notes_store.filter_documents(condition)
    with pytest.raises(FilterError, match=message):
        IrkitRetriever(notes_store).run("bears", filters=condition)


def test_bad_documents_change_nothing(notes_store):
    twice = [Document(id="n", content="new"), Document(id="n", content="new, too")]
    for policy in DuplicatePolicy:
        with pytest.raises(BadValueError, match="'n'"):
            notes_store.write_documents(twice, policy)
    with pytest.raises(BadValueError, match="binary content"):
        notes_store.write_documents([Document(blob=ByteStream(b"x"))])
    with pytest.raises(BadValueError, match="JSON"):
        notes_store.write_documents([Document(content="x", meta={"when": object()})])
    with pytest.raises(BadTypeError, match="expected a string"):
        notes_store.delete_documents([1])
    with pytest.raises(BadValueError, match="k is 0"):
        IrkitRetriever(notes_store).run("bears", top_k=0)
    with pytest.raises(BadTypeError, match="IrkitDocumentStore"):
        IrkitRetriever("store")
    assert [item.id for item in notes_store.filter_documents()] == ["b", "c", "e"]


def test_a_store_needs_an_index_or_a_model(tmp_path):
    with pytest.raises(BadValueError, match="no index at"):
        IrkitDocumentStore(tmp_path / "nothing")
    Retriever.build("bm25", {"b": "Bears sleep."}, tmp_path / "built")
    store = IrkitDocumentStore(str(tmp_path / "built"))
    assert IrkitRetriever(store).run("bears")["documents"][0].content == "Bears sleep."


def test_a_pipeline_of_texts_is_written_and_read_again(notes_store):
    pipeline = Pipeline()
    pipeline.add_component("retriever", IrkitRetriever(notes_store, top_k=1))
    again = Pipeline.loads(pipeline.dumps(), allowed_modules=[IrkitRetriever.__module__])
    for line in (pipeline, again):
        assert line.run({"retriever": {"query": "copper"}})["retriever"]["documents"][0].id == "c"
    found = asyncio.run(again.run_async({"retriever": {"query": "copper"}}))
    assert found["retriever"]["documents"][0].id == "c"


def test_a_pipeline_of_embeddings(tmp_path, tiny_dense):
    name = str(tiny_dense)
    store = IrkitDocumentStore(str(tmp_path / "vectors"), {**VECTORS, "dim": 32})
    write, read = Pipeline(), Pipeline()
    write.add_component("embedder", IrkitDocumentEmbedder(name))
    write.add_component("writer", DocumentWriter(store))
    write.connect("embedder", "writer")
    assert write.run({"embedder": {"documents": NOTES}})["writer"]["documents_written"] == 3
    read.add_component("embedder", IrkitTextEmbedder(name))
    read.add_component("retriever", IrkitEmbeddingRetriever(store, top_k=2))
    read.connect("embedder.embedding", "retriever.query_embedding")
    read = Pipeline.loads(read.dumps(), allowed_modules=[IrkitRetriever.__module__])
    found = read.run({"embedder": {"text": "copper"}})["retriever"]["documents"]
    expected = Retriever.build(name, {item.id: item.content or "" for item in NOTES}, tmp_path / "texts")
    hits = expected.search("copper", k=2)
    assert [item.id for item in found] == [hit.id for hit in hits]
    assert [item.score for item in found] == pytest.approx([hit.score for hit in hits], abs=1e-6)
    with pytest.raises(BadValueError, match="no vector"):
        store.write_documents([Document(id="n", content="no embedding")])
    with pytest.raises(BadTypeError, match="no model for texts"):
        IrkitRetriever(store).run("copper")
    assert asyncio.run(IrkitEmbeddingRetriever(store).run_async([0.0] * 31 + [1.0]))["documents"]
    assert IrkitDocumentEmbedder(name).run([]) == {"documents": []}
