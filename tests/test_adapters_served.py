"""The HTTP classes of LangChain and LlamaIndex, unmodified, as clients of `irkit serve`."""

from __future__ import annotations

import asyncio
import gc
import warnings

import numpy as np
import pytest

from irkit.client import Client

TEXTS = ["a text", "neural search", "index"]


@pytest.fixture(autouse=True)
def close_connections():
    """Collect connections that the libraries leave open."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def vectors(served):
    model = served.catalogue.models["dense"].model
    return model.encode(TEXTS, normalize_embeddings=True)


def test_openai_embeddings_of_langchain(served, vectors):
    classes = pytest.importorskip("langchain_openai", reason="make adapters installs langchain-openai")
    embeddings = classes.OpenAIEmbeddings(
        model="dense", base_url=f"{served.url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    np.testing.assert_allclose(embeddings.embed_documents(TEXTS), vectors, atol=1e-6)
    np.testing.assert_allclose(embeddings.embed_query(TEXTS[1]), vectors[1], atol=1e-6)
    np.testing.assert_allclose(asyncio.run(embeddings.aembed_query(TEXTS[1])), vectors[1], atol=1e-6)
    sided = embeddings.model_copy(update={"model_kwargs": {"extra_body": {"input_type": "query"}}})
    np.testing.assert_allclose(sided.embed_query(TEXTS[1]), vectors[1], atol=1e-6)


@pytest.mark.parametrize(
    ("module", "name", "options"),
    [
        ("openai_like", "OpenAILikeEmbedding", {"model_name": "dense", "api_key": "none"}),
        ("openai", "OpenAIEmbedding", {"model_name": "dense", "api_key": "none"}),
        ("text_embeddings_inference", "TextEmbeddingsInference", {"model_name": "dense"}),
    ],
)
def test_embeddings_of_llama_index(served, vectors, module, name, options):
    package = f"llama_index.embeddings.{module}"
    made = getattr(pytest.importorskip(package, reason=f"make adapters installs {package}"), name)
    if name == "TextEmbeddingsInference":
        embedding = made(base_url=served.url, **options)
    else:
        embedding = made(api_base=f"{served.url}/v1", **options)
    np.testing.assert_allclose(embedding.get_text_embedding_batch(TEXTS), vectors, atol=1e-6)
    np.testing.assert_allclose(embedding.get_query_embedding(TEXTS[1]), vectors[1], atol=1e-6)
    found = asyncio.run(embedding.aget_text_embedding_batch(TEXTS))
    np.testing.assert_allclose(found, vectors, atol=1e-6)


def test_retrievers_of_an_index_on_a_server(served):
    pytest.importorskip("langchain_core", reason="make adapters installs langchain-core")
    pytest.importorskip("llama_index.core", reason="make adapters installs llama-index-core")
    from irkit.adapters import langchain, llama_index

    hits = served.retriever.search("neural", k=3, filter={"year": 1})
    with Client(served.url, "notes") as client:
        documents = langchain.IrkitRetriever(retriever=client, k=3, filter={"year": 1}).invoke("neural")
        nodes = llama_index.IrkitRetriever(client, 3, {"year": 1}).retrieve("neural")
    assert [item.id for item in documents] == [node.node_id for node in nodes] == [hit.id for hit in hits]
    assert documents[0].metadata["title"] == nodes[0].metadata["title"] == hits[0].title
