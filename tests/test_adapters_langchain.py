"""The adapters of LangChain: its standard tests, every kind of index, bad input."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

pytest.importorskip("langchain_tests", reason="make adapters installs langchain-tests")

from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_tests.integration_tests import (
    EmbeddingsIntegrationTests,
    RetrieversIntegrationTests,
    VectorStoreIntegrationTests,
)
from langchain_tests.unit_tests import EmbeddingsUnitTests

from irkit import Hybrid, Model, Retriever
from irkit.adapters.langchain import IrkitEmbeddings, IrkitRetriever, IrkitVectorStore
from irkit.errors import BadTypeError, BadValueError

TEXTS = ["Bears sleep in winter.", "Copper conducts electricity.", "Swifts sleep on the wing."]
METADATA = [{"topic": "animals"}, {"topic": "physics"}, {"topic": "animals", "year": 2020}]
IDS = ["b", "c", "s"]


class TestVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self):
        return IrkitVectorStore.from_texts([], self.get_embeddings())


class TestVectorStoreOfModel(VectorStoreIntegrationTests):
    """The model of the index encodes the texts."""

    @pytest.fixture
    def vectorstore(self, tiny_dense):
        return IrkitVectorStore.from_texts([], IrkitEmbeddings(tiny_dense))


class TestRetriever(RetrieversIntegrationTests):
    retriever_constructor = IrkitRetriever
    retriever_query_example = "bears"

    @pytest.fixture(autouse=True)
    def build(self, tmp_path, tiny_dense):
        self.built = Retriever.build(tiny_dense, TEXTS, tmp_path / "index")

    @property
    def retriever_constructor_params(self):
        return {"retriever": self.built}


class EmbeddingsCase:
    embeddings_class = IrkitEmbeddings

    @pytest.fixture(autouse=True)
    def take(self, tiny_dense):
        self.path = tiny_dense

    @property
    def embedding_model_params(self):
        return {"model": self.path}


class TestEmbeddingsUnit(EmbeddingsCase, EmbeddingsUnitTests):
    pass


class TestEmbeddings(EmbeddingsCase, EmbeddingsIntegrationTests):
    pass


@pytest.fixture
def store():
    return IrkitVectorStore.from_texts(TEXTS, "bm25", METADATA, ids=IDS)


def test_embeddings_are_those_of_the_model(tiny_dense):
    model = Model.from_pretrained(tiny_dense)
    model.prompts["query"] = "search "
    made = IrkitEmbeddings(model)
    assert made.embed_query("a vector") == pytest.approx(model.encode_query("a vector").tolist())
    assert made.embed_documents(["a vector", ""]) == model.encode_document(["a vector", ""]).tolist()
    assert made.embed_query("a vector") != made.embed_documents(["a vector"])[0]


def test_embeddings_refuse_other_kinds_of_models(tiny_bert):
    with pytest.raises(BadValueError, match="expected a dense model"):
        IrkitEmbeddings(Model.multi_vector(tiny_bert))
    with pytest.raises(BadValueError, match="bm25"):
        IrkitEmbeddings("bm25")


def test_store_finds_what_its_retriever_finds(store):
    hits = store.retriever.search("sleep in winter")
    found = store.similarity_search_with_score("sleep in winter", k=100)
    assert [(document.id, score) for document, score in found] == [(hit.id, hit.score) for hit in hits]
    assert found[0][0] == Document(id="b", page_content=TEXTS[0], metadata=METADATA[0])
    assert store.similarity_search("sleep", filter={"year": {">": 2000}})[0].id == "s"
    assert store.similarity_search("sleep", filter=["b"], threshold=0.1)[0].id == "b"
    assert store.similarity_search("sleep", threshold=1e9) == store.similarity_search("") == []
    assert store.as_retriever(search_kwargs={"k": 1}).invoke("copper")[0].id == "c"
    assert [item.id for item in asyncio.run(store.asimilarity_search("sleep", filter={"year": 2020}))] == [
        "s"
    ]


def test_store_of_any_model_and_index(tiny_bert, tmp_path):
    models = [Model.multi_vector(tiny_bert), Model.sparse(tiny_bert), DeterministicFakeEmbedding(size=8)]
    for number, model in enumerate(models):
        store = IrkitVectorStore.from_texts(TEXTS, model, METADATA, ids=IDS, path=tmp_path / str(number))
        assert store.similarity_search(TEXTS[1], k=1)[0].id == "c"
        store.add_texts(["Copper conducts electricity, too."], ids=["b"])
        assert len(store.retriever) == 3
    assert IrkitVectorStore(Retriever.load(tmp_path / "2"), models[2]).get_by_ids(["b"])[0].metadata == {}
    store = IrkitVectorStore.from_texts(TEXTS * 5, models[2], index="hnsw")
    vector = models[2].embed_query(TEXTS[1])
    assert {item.page_content for item in store.similarity_search_by_vector(vector, k=5)} == {TEXTS[1]}
    assert store.similarity_search_with_relevance_scores(TEXTS[1], k=1)[0][1] == pytest.approx(1)


def test_temporary_index_goes_with_its_store():
    store = IrkitVectorStore.from_texts(TEXTS, "bm25")
    path = store.retriever.store.path
    assert path.is_dir()
    retriever = store.as_retriever()
    del store
    assert retriever.invoke("copper")  # the retriever holds the store
    del retriever
    gc.collect()
    assert not path.exists()


def test_titles_and_scores_are_metadata(tmp_path):
    documents = [
        {"_id": "b", "title": "Bears", "text": TEXTS[0], "lang": "en"},
        {"_id": "c", "text": "bears"},
    ]
    retriever = Retriever.build("bm25", documents, tmp_path / "index")
    found = IrkitRetriever(retriever=Hybrid([retriever, retriever]), k=2).invoke("bears")
    assert {item.id: item.metadata.keys() for item in found} == {
        "b": {"lang", "title", "relevance_score"},
        "c": {"relevance_score"},
    }
    assert IrkitVectorStore(retriever).get_by_ids(["c", "b", "x", "b"])[1].metadata["title"] == "Bears"
    assert [item.id for item in IrkitRetriever(retriever=retriever).invoke("bears", k=1, filter=["b"])] == [
        "b"
    ]


def test_documents_without_text():
    store = IrkitVectorStore.from_texts(
        ["", "x"], DeterministicFakeEmbedding(size=4), [None, {}], ids=["e", "x"]
    )
    assert store.similarity_search("", k=1) == [Document(id="e", page_content="", metadata={})]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((["a", "b"], [{}]), {}, "2 texts, 1 metadatas and 2 ids"),
        ((["a", "b"],), {"ids": ["x"]}, "2 texts, 2 metadatas and 1 ids"),
        ((["a", "b"],), {"ids": ["x", "x"]}, "'x'"),
        ((["a"],), {"ids": [""]}, "not empty"),
        ((["a"],), {"ids": [7]}, "expected a string"),
        ((["a", None],), {}, "expected a string"),
        ((["a"], [{"when": time}]), {}, "when|JSON"),
        ((["a"], ["topic"]), {}, "expected keys and values"),
    ],
)
def test_bad_texts_change_nothing(store, arguments, options, message):
    with pytest.raises((BadValueError, BadTypeError), match=message):
        store.add_texts(*arguments, **options)
    with pytest.raises((BadValueError, BadTypeError), match=message):
        IrkitVectorStore.from_texts(arguments[0], "bm25", *arguments[1:], **options)
    assert [item.id for item in store.get_by_ids(IDS)] == IDS


def test_bad_searches_are_refused(store, tmp_path):
    with pytest.raises(BadValueError, match="did you mean 'topic'"):
        store.similarity_search("sleep", filter={"topics": "animals"})
    with pytest.raises(BadValueError, match="k is 0"):
        store.similarity_search("sleep", k=0)
    with pytest.raises(BadTypeError, match="no option is named 'fetch'"):
        store.similarity_search("sleep", fetch=3)
    with pytest.raises(BadTypeError, match="expected a string"):
        store.similarity_search_by_vector([0.1, 0.2])
    with pytest.raises(BadValueError, match="no fixed range"):
        store.similarity_search_with_relevance_scores("sleep")
    vectors = IrkitVectorStore(Retriever.build("vectors", {"a": [1.0, 0.0]}, tmp_path / "vectors"))
    with pytest.raises(BadTypeError, match="no model for texts"):
        vectors.similarity_search("sleep")


def test_delete(store):
    assert store.delete(["b", "unknown", "b"])
    assert store.get_by_ids(IDS) == store.get_by_ids(["c", "s"])
    with pytest.raises(BadTypeError, match="expected a string"):
        store.delete([1])
    assert store.delete()
    assert (len(store.retriever), store.similarity_search("copper")) == (0, [])


def test_a_failed_embedding_changes_nothing():
    class Broken(Embeddings):
        def embed_documents(self, texts):
            return [[1.0, 2.0, 3.0]] * (len(texts) - ("bad" in texts))

        def embed_query(self, text):
            return [1.0, 2.0, 3.0]

    store = IrkitVectorStore.from_texts(["a"], Broken(), ids=["a"])
    with pytest.raises(ValueError, match="shorter"):
        store.add_texts(["a", "bad"], ids=["a", "b"])
    assert [item.page_content for item in store.similarity_search("a", k=9)] == ["a"]


def test_indexing_of_langchain():
    records = InMemoryRecordManager("notes")
    records.create_schema()
    store = IrkitVectorStore.from_texts([], "bm25")
    documents = [Document(page_content=text, metadata={"source": "notes"}) for text in TEXTS]

    def run(documents):
        return index(documents, records, store, cleanup="full", source_id_key="source", key_encoder="sha256")

    assert run(documents)["num_added"] == 3
    assert (run(documents[:2])["num_skipped"], len(store.retriever)) == (2, 2)
