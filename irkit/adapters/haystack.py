"""irkit as document store, retrievers and embedders of Haystack."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from irkit import data
from irkit.adapters.shared import (
    dense_model,
    embed_documents,
    embed_queries,
    fetch_known,
    hit_metadata,
    missing,
    put_documents,
    remove_known,
)
from irkit.errors import BadTypeError, BadValueError
from irkit.index.directory import MANIFEST
from irkit.retrieval.retriever import Retriever
from irkit.retrieval.searching import Hit, parse_strings

try:
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.document_stores.errors import DuplicateDocumentError
    from haystack.document_stores.types import DuplicatePolicy
    from haystack.errors import FilterError
except ImportError as error:
    raise missing("haystack-ai", error) from error

Filters = dict[str, Any]


class IrkitDocumentStore:
    """Stores documents in an index of any kind; the model of the index encodes them.

    Args:
        path: Directory of an index; an empty index is built if it does not exist.
        model: Model of a new index, by name or settings, such as ``"bm25"``. For documents with embeddings
            ``{"kind": "vectors", "similarity": "cosine", "representation": "dense", "dim": 384}``. An index
            that exists needs none.
        index: Kind of a new index, see `Retriever.build`. Kinds that learn from documents, such as
            ``"plaid"``, are better built by `Retriever.build`.

    Raises:
        BadValueError: The path has no index, and no model was given for a new one.
    """

    def __init__(
        self,
        path: str,
        model: str | dict[str, Any] | None = None,
        index: str | dict[str, Any] | None = None,
    ) -> None:
        self.path, self.model, self.index = str(path), model, index
        if (Path(path) / MANIFEST).exists():
            self.retriever = Retriever.load(path)
        elif model is None:
            raise BadValueError(
                f"IrkitDocumentStore: there is no index at {path}, and no model to build one; give "
                "model='bm25' or the name of a model"
            )
        else:
            self.retriever = Retriever.build(model, [], path, index=index)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of the store; documents stay in its directory."""
        return default_to_dict(self, path=self.path, model=self.model, index=self.index)  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> IrkitDocumentStore:
        """Open the store that `to_dict` describes."""
        return default_from_dict(cls, data)  # type: ignore[no-any-return]

    def count_documents(self) -> int:
        """Return the number of documents."""
        return len(self.retriever)

    def filter_documents(self, filters: Filters | None = None) -> list[Document]:
        """Return all documents that meet Haystack's filters, in the order of their addition.

        A filter on ``meta.KEY`` or ``id`` becomes one of `irkit.index.Documents.filter`, which refuses keys
        and types that no document has. Strings are compared as strings, dates too.

        Raises:
            FilterError: A filter is malformed, or cannot be met.
        """
        with self.retriever.store.snapshot():
            met = self.retriever.documents.filter(self._condition(filters))
            rows = np.flatnonzero(met & self.retriever.index.live)
            return [_to_document(item) for item in self.retriever.documents.fetch(rows)]

    def write_documents(
        self, documents: list[Document], policy: DuplicatePolicy = DuplicatePolicy.NONE
    ) -> int:
        """Add documents and return how many were written.

        Args:
            documents: Contents, metadata and, for the model ``"vectors"``, embeddings.
            policy: What to do with documents whose ids are in the store; by default ``FAIL``.

        Raises:
            DuplicateDocumentError: An id is in the store, and the policy is ``FAIL``; nothing is written.
            BadValueError: An item is not a document, a document has binary content, or two have one id.
        """
        items = _from_documents(documents)
        with self.retriever.store.update():
            known = {item.id for item in fetch_known(self.retriever, [item.id for item in items])}
            if known and policy in (DuplicatePolicy.NONE, DuplicatePolicy.FAIL):
                raise DuplicateDocumentError(f"document {min(known)!r} is in the store; nothing was written")
            if policy == DuplicatePolicy.SKIP:
                items = [item for item in items if item.id not in known]
            put_documents(self.retriever, items)
        return len(items)

    def delete_documents(self, document_ids: list[str]) -> None:
        """Remove documents by id; unknown ids are ignored."""
        remove_known(self.retriever, parse_strings("deleting documents", document_ids))

    def search(self, query: Any, filters: Filters | None, top_k: int) -> list[Document]:
        """Return the best documents with scores, for a text or for the vector of a query.

        Raises:
            FilterError: See `filter_documents`.
        """
        hits = self.retriever.search(query, top_k, self._condition(filters) or None)
        return [_to_document(hit) for hit in hits]

    def _condition(self, filters: Filters | None) -> dict[str, Any]:
        """Return Haystack's filters as a filter of irkit, after a check of its keys and types."""
        condition = _translate(filters) if filters else {}
        try:
            self.retriever.documents.filter(condition)
        except (BadValueError, BadTypeError) as error:
            raise FilterError(str(error)) from error
        return condition

    async def count_documents_async(self) -> int:
        """Do what `count_documents` does."""
        return self.count_documents()

    async def filter_documents_async(self, filters: Filters | None = None) -> list[Document]:
        """Do what `filter_documents` does, in a thread."""
        return await asyncio.to_thread(self.filter_documents, filters)

    async def write_documents_async(
        self, documents: list[Document], policy: DuplicatePolicy = DuplicatePolicy.NONE
    ) -> int:
        """Do what `write_documents` does, in a thread."""
        return await asyncio.to_thread(self.write_documents, documents, policy)

    async def delete_documents_async(self, document_ids: list[str]) -> None:
        """Do what `delete_documents` does, in a thread."""
        await asyncio.to_thread(self.delete_documents, document_ids)


class _Search:
    """The part that both retrievers share: arguments, and the search."""

    def __init__(
        self, document_store: IrkitDocumentStore, filters: Filters | None = None, top_k: int = 10
    ) -> None:
        if not isinstance(document_store, IrkitDocumentStore):
            raise BadTypeError(f"got {document_store!r:.60}, expected an IrkitDocumentStore")
        self.document_store, self.filters, self.top_k = document_store, filters, top_k

    def find(self, query: Any, filters: Filters | None, top_k: int | None) -> dict[str, list[Document]]:
        count = self.top_k if top_k is None else top_k
        return {"documents": self.document_store.search(query, filters or self.filters, count)}


@component
class IrkitRetriever(_Search):
    """Searches a store with texts, which the model of its index encodes.

    Args:
        document_store: The store.
        filters: Filters of Haystack. Filters passed to `run` replace them.
        top_k: Maximum number of documents.
    """

    @component.output_types(documents=list[Document])
    def run(self, query: str, filters: Filters | None = None, top_k: int | None = None) -> dict[str, Any]:
        """Return the best ``documents``."""
        return self.find(query, filters, top_k)

    @component.output_types(documents=list[Document])
    async def run_async(
        self, query: str, filters: Filters | None = None, top_k: int | None = None
    ) -> dict[str, Any]:
        """Return the best ``documents``; the search runs in a thread."""
        return await asyncio.to_thread(self.find, query, filters, top_k)


@component
class IrkitEmbeddingRetriever(_Search):
    """Searches a store of the model ``"vectors"`` with embeddings; see `IrkitRetriever`."""

    @component.output_types(documents=list[Document])
    def run(
        self, query_embedding: list[float], filters: Filters | None = None, top_k: int | None = None
    ) -> dict[str, Any]:
        """Return the best ``documents``."""
        return self.find(query_embedding, filters, top_k)

    @component.output_types(documents=list[Document])
    async def run_async(
        self, query_embedding: list[float], filters: Filters | None = None, top_k: int | None = None
    ) -> dict[str, Any]:
        """Return the best ``documents``; the search runs in a thread."""
        return await asyncio.to_thread(self.find, query_embedding, filters, top_k)


@component
class IrkitTextEmbedder:
    """Encodes a query with a dense model.

    Args:
        model: Name of the model, an argument of `Model.from_pretrained`.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self._loaded = dense_model("IrkitTextEmbedder", model)

    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, Any]:
        """Return the ``embedding`` of a query."""
        return {"embedding": embed_queries(self._loaded, [text])[0]}


@component
class IrkitDocumentEmbedder:
    """Encodes documents with a dense model.

    Args:
        model: Name of the model, an argument of `Model.from_pretrained`.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self._loaded = dense_model("IrkitDocumentEmbedder", model)

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        """Return copies of ``documents`` that have embeddings."""
        texts = [item.text for item in _from_documents(documents)]
        vectors = embed_documents(self._loaded, texts) if texts else []
        pairs = zip(documents, vectors, strict=True)
        return {"documents": [replace(document, embedding=vector) for document, vector in pairs]}


def _from_documents(documents: Any) -> list[data.Document]:
    if not isinstance(documents, list) or not all(isinstance(item, Document) for item in documents):
        raise BadValueError(f"documents: got {documents!r:.60}, expected documents of Haystack in a list")
    for item in documents:
        if item.blob is not None:
            raise BadValueError(
                f"document {item.id!r}: it has binary content, expected text; convert it first"
            )
    return [
        data.Document(item.id, item.content or "", metadata=item.meta, vector=item.embedding)
        for item in documents
    ]


def _to_document(item: Hit | data.Document) -> Document:
    score = item.score if isinstance(item, Hit) else None
    return Document(id=item.id, content=item.text, meta=hit_metadata(item), score=score)


# ---- filters ----


def _translate(filters: Any) -> dict[str, Any]:
    """Return a filter of irkit that finds what Haystack's finds.

    In Haystack, a document without a key has the value None there.

    Raises:
        FilterError: A part is missing or of another type.
    """
    if not isinstance(filters, Mapping) or "operator" not in filters:
        raise FilterError(f"filter: got {filters!r:.100}, expected an operator and conditions, or a field")
    operator = filters["operator"]
    if "field" in filters:
        if "value" not in filters:
            raise FilterError(f"filter: {filters!r:.100} has no value")
        return _condition(_key(filters["field"]), operator, filters["value"])
    conditions = filters.get("conditions")
    if not isinstance(conditions, list) or not conditions:
        raise FilterError(f"filter: {filters!r:.100} has no conditions in a list")
    parts = [_translate(condition) for condition in conditions]
    if operator == "OR":
        return {"$or": parts}
    if operator not in ("AND", "NOT"):
        raise FilterError(f"filter: operator {operator!r:.60}; expected AND, OR or NOT")
    together = {"$and": parts}
    return together if operator == "AND" else {"$not": together}


def _key(field: Any) -> str:
    if field == "id":
        return "_id"
    if not isinstance(field, str) or not field.startswith("meta."):
        raise FilterError(f"filter: field {field!r:.60}; expected 'id' or a key such as 'meta.year'")
    return field.removeprefix("meta.")


def _condition(key: str, operator: Any, value: Any) -> dict[str, Any]:
    if operator in ("!=", "not in"):
        return {"$not": _condition(key, "==" if operator == "!=" else "in", value)}
    if operator == "in" and not isinstance(value, list):
        raise FilterError(f"filter: {key!r} in {value!r:.60}; expected a list")
    if operator == "in" and None in value:
        others = [one for one in value if one is not None]
        return {"$or": [{key: {"in": others}}, _condition(key, "==", None)]}
    if value is None:  # nothing is above or below None
        return {"$not": {key: {"!=": None}}} if operator == "==" else {"_id": []}
    return {key: {operator: value}}
