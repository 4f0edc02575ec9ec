"""The adapters of LlamaIndex: retriever and embedding, in its own pipelines."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("llama_index.core", reason="make adapters installs llama-index-core")

from llama_index.core.schema import QueryBundle, TextNode

from irkit import Hybrid, Model, Retriever
from irkit.adapters.llama_index import IrkitEmbedding, IrkitRetriever
from irkit.errors import BadTypeError, BadValueError

DOCUMENTS = [
    {"_id": "b", "title": "Bears", "text": "Bears sleep in winter.", "topic": "animals"},
    {"_id": "c", "text": "Copper conducts electricity."},
    {"_id": "e", "text": ""},
]


@pytest.fixture
def retriever(tmp_path):
    return Retriever.build("bm25", DOCUMENTS, tmp_path / "index")


def test_nodes_are_the_hits_of_the_retriever(retriever):
    for source in (retriever, Hybrid([retriever, retriever])):
        hits = source.search("bears in winter")
        nodes = IrkitRetriever(source, similarity_top_k=100).retrieve("bears in winter")
        assert [(node.node.node_id, node.score) for node in nodes] == [(hit.id, hit.score) for hit in hits]
        assert nodes[0].node.metadata == {"title": "Bears", "topic": "animals"}
        assert nodes[0].text == "Bears sleep in winter."
    assert IrkitRetriever(retriever, filter={"topic": "animals"}).retrieve("copper") == []
    assert IrkitRetriever(retriever).retrieve("") == []
    found = asyncio.run(IrkitRetriever(retriever).aretrieve(QueryBundle("copper", embedding=[1.0])))
    assert [node.node.node_id for node in found] == ["c"]


def test_a_document_without_text_is_a_node(tmp_path, tiny_dense):
    retriever = Retriever.build(tiny_dense, DOCUMENTS, tmp_path / "index")
    nodes = IrkitRetriever(retriever).retrieve("token")
    assert {node.node.node_id: node.text for node in nodes} == {
        item["_id"]: item["text"] for item in DOCUMENTS
    }


def test_bad_searches_are_refused(retriever):
    with pytest.raises(BadValueError, match="did you mean 'topic'"):
        IrkitRetriever(retriever, filter={"topics": 1}).retrieve("bears")
    with pytest.raises(BadValueError, match="k is 0"):
        IrkitRetriever(retriever, similarity_top_k=0).retrieve("bears")
    with pytest.raises(BadTypeError):
        IrkitRetriever(retriever).retrieve(QueryBundle(None))


def test_embedding_is_that_of_the_model(tiny_dense):
    model = Model.from_pretrained(tiny_dense)
    model.prompts["query"] = "search "
    embedding = IrkitEmbedding(model)
    query, texts = model.encode_query("a vector").tolist(), model.encode_document(["a vector", ""]).tolist()
    assert embedding.get_query_embedding("a vector") == pytest.approx(query)
    assert embedding.get_text_embedding_batch(["a vector", ""]) == texts
    assert asyncio.run(embedding.aget_query_embedding("a vector")) == pytest.approx(query)
    assert asyncio.run(embedding.aget_text_embedding("a vector")) == pytest.approx(texts[0])
    assert asyncio.run(embedding.aget_text_embedding_batch(["a vector", ""])) == texts
    assert [node.embedding for node in embedding([TextNode(text="a vector")])] == [pytest.approx(texts[0])]
    assert IrkitEmbedding(tiny_dense).model_name == str(tiny_dense)


def test_embedding_refuses_other_kinds_of_models(tiny_bert):
    with pytest.raises(BadValueError, match="expected a dense model"):
        IrkitEmbedding(Model.sparse(tiny_bert))
