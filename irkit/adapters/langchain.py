"""irkit as embeddings, retriever and vector store of LangChain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import numpy as np

from irkit import data
from irkit.adapters.shared import (
    AnyIndex,
    AnyRetriever,
    build_temporary,
    dense_model,
    embed_documents,
    embed_queries,
    fetch_known,
    hit_metadata,
    missing,
    put_documents,
    remove_known,
)
from irkit.encoder_free import Vectors
from irkit.errors import BadValueError
from irkit.model import Model
from irkit.retrieval.collection import AnyModel
from irkit.retrieval.retriever import Retriever
from irkit.retrieval.searching import Hit, parse_strings

try:
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.vectorstores import VectorStore
except ImportError as error:
    raise missing("langchain-core", error) from error


class IrkitEmbeddings(Embeddings):
    """Encodes queries and documents with a dense model, each with the prompt that the model has for them.

    Args:
        model: A model, or an argument of `Model.from_pretrained`.

    Raises:
        BadValueError: The model is not dense.
    """

    def __init__(self, model: Model | str | Path) -> None:
        self.model = dense_model("IrkitEmbeddings", model)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Encode documents."""
        return embed_documents(self.model, texts)

    def embed_query(self, text: str) -> list[float]:
        """Encode a query."""
        return embed_queries(self.model, [text])[0]


class IrkitRetriever(BaseRetriever):
    """Searches an index; the metadata of a result has its score as ``relevance_score``.

    ``invoke(query, k=3, filter=...)`` takes the options of `Retriever.search`.

    Attributes:
        retriever: A `Retriever`, a `Hybrid`, or a `irkit.client.Client` of a server.
        k: Maximum number of documents.
        filter: See `Retriever.search`.
    """

    retriever: AnyRetriever
    k: int = 4
    filter: Any = None

    def _get_relevant_documents(self, query: str, *, run_manager: Any, **options: Any) -> list[Document]:
        hits = self.retriever.search(query, **{"k": self.k, "filter": self.filter, **options})
        documents = [_to_document(hit) for hit in hits]
        for document, hit in zip(documents, hits, strict=True):
            document.metadata["relevance_score"] = hit.score
        return documents


class IrkitVectorStore(VectorStore):
    """Stores texts with metadata in an index of any kind, and searches them.

    Searches take a filter and the options of `Retriever.search`. Higher scores are better.

    Args:
        retriever: An index. The texts of its documents are returned; a title is in the metadata.
        embedding: Embeddings that made the vectors of an index built with the model ``"vectors"``. By default
            the model of the index encodes documents and queries.
    """

    def __init__(self, retriever: Retriever, embedding: Embeddings | None = None) -> None:
        self.retriever, self._embedding = retriever, embedding

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings | AnyModel | str | Path,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        path: str | Path | None = None,
        index: AnyIndex = None,
        **_: Any,
    ) -> Self:
        """Build an index of texts.

        Args:
            texts: The texts; none makes an empty store.
            embedding: Embeddings, whose vectors are compared by cosine; or a model of `Retriever.build`, such
                as the name of a ColBERT model or ``"bm25"``.
            metadatas: Metadata of each text.
            ids: Id of each text; by default random ones.
            path: A new directory for the index, see `Retriever.load`. By default the index is deleted with
                the store.
            index: Kind of the index, see `Retriever.build`.

        Raises:
            BadValueError: The numbers of texts, metadata and ids differ, or an id comes twice.
        """
        own = embedding if isinstance(embedding, Embeddings) else None
        model: Any = embedding
        if isinstance(own, IrkitEmbeddings):
            model, own = own.model, None
        elif own is not None:  # the width is asked for, because there may be no text
            model = Vectors("cosine", representation="dense", dim=len(own.embed_query("width")))
        documents = _make_documents(own, texts, metadatas, ids)
        if path is None:
            return cls(build_temporary(model, documents, index), own)
        return cls(Retriever.build(model, documents, path, index=index), own)

    @property
    def embeddings(self) -> Embeddings | None:
        """LangChain's object that makes the vectors; None if the model of the index encodes texts itself."""
        return self._embedding

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **_: Any,
    ) -> list[str]:
        """Add texts and return their ids; a text whose id is in the index replaces the text there.

        Raises:
            BadValueError: The numbers of texts, metadata and ids differ, an id comes twice, or metadata is
                not JSON; nothing is added.
        """
        documents = _make_documents(self._embedding, texts, metadatas, ids)
        put_documents(self.retriever, documents)
        return [document.id for document in documents]

    def delete(self, ids: list[str] | None = None, **_: Any) -> bool:
        """Remove documents by id, or all if ``ids`` is None; unknown ids are ignored."""
        if ids is None:
            ids = self.retriever.documents.ids(np.flatnonzero(self.retriever.index.live))
        remove_known(self.retriever, parse_strings("deleting documents", ids))
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents of those ids that the index has."""
        return [_to_document(item) for item in fetch_known(self.retriever, ids)]

    def similarity_search(self, query: str, k: int = 4, filter: Any = None, **options: Any) -> list[Document]:
        """Return the ``k`` best documents, see `Retriever.search`."""
        return [document for document, _ in self.similarity_search_with_score(query, k, filter, **options)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Any = None, **options: Any
    ) -> list[tuple[Document, float]]:
        """Return the ``k`` best documents and their scores, see `Retriever.search`."""
        content: Any = query if self._embedding is None else self._embedding.embed_query(query)
        hits = self.retriever.search(content, k, filter, **options)
        return [(_to_document(hit), hit.score) for hit in hits]

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Any = None, **options: Any
    ) -> list[Document]:
        """Return the ``k`` best documents for a vector, from an index built with the model ``"vectors"``."""
        return [_to_document(hit) for hit in self.retriever.search(embedding, k, filter, **options)]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        """Return a function that maps scores to 0 to 1: a cosine below 0 counts as 0."""
        similarity = self.retriever.store.meta["model"]["similarity"]
        if similarity != "cosine":
            raise BadValueError(
                f"relevance scores: the index compares by {similarity!r}, whose scores have no fixed range; "
                "take search_kwargs={'threshold': ...}, which has the scale of the scores"
            )
        return lambda score: min(1.0, max(0.0, score))


def _make_documents(
    embedding: Embeddings | None, texts: Iterable[str], metadatas: Any, ids: Any
) -> list[data.Document]:
    """Pair texts with metadata, ids and vectors.

    Raises:
        BadTypeError: A text or an id is not a string, or metadata has no keys and values.
        BadValueError: Their numbers differ.
    """
    contents = parse_strings("adding texts", texts)
    others = [list(column) if column else [None] * len(contents) for column in (metadatas, ids)]
    if any(len(other) != len(contents) for other in others):
        raise BadValueError(
            f"adding texts: {len(contents)} texts, {len(others[0])} metadatas and {len(others[1])} ids; "
            "expected as many of each, or none"
        )
    documents = [
        data.Document(str(uuid4()) if name is None else name, text, metadata=metadata or {})
        for text, metadata, name in zip(contents, *others, strict=True)
    ]
    if embedding is None:
        return documents
    vectors = embedding.embed_documents(contents) if contents else []
    return [
        data.Document(item.id, item.text, metadata=item.metadata, vector=vector)
        for item, vector in zip(documents, vectors, strict=True)
    ]


def _to_document(item: Hit | data.Document) -> Document:
    return Document(id=item.id, page_content=item.text, metadata=hit_metadata(item))
