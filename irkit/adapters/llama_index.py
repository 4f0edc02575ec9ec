"""irkit as retriever and embedding of LlamaIndex."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from irkit.adapters.shared import (
    AnyRetriever,
    dense_model,
    embed_documents,
    embed_queries,
    hit_metadata,
    missing,
)
from irkit.model import Model
from irkit.retrieval.searching import Filter

try:
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
except ImportError as error:
    raise missing("llama-index-core", error) from error


class IrkitRetriever(BaseRetriever):
    """Searches an index and returns documents as nodes.

    Args:
        retriever: A `Retriever`, a `Hybrid`, or a `irkit.client.Client` of a server.
        similarity_top_k: Maximum number of nodes.
        filter: See `Retriever.search`.
        options: Options of ``BaseRetriever``, such as ``callback_manager``.
    """

    def __init__(
        self,
        retriever: AnyRetriever,
        similarity_top_k: int = 10,
        filter: Filter | None = None,
        **options: Any,
    ) -> None:
        self.retriever, self.similarity_top_k, self.filter = retriever, similarity_top_k, filter
        super().__init__(**options)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        hits = self.retriever.search(query_bundle.query_str, self.similarity_top_k, self.filter)
        return [
            NodeWithScore(
                node=TextNode(id_=hit.id, text=hit.text, metadata=hit_metadata(hit)), score=hit.score
            )
            for hit in hits
        ]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


class IrkitEmbedding(BaseEmbedding):
    """Encodes queries and texts with a dense model, each with the prompt that the model has for them.

    Args:
        model: A model, or an argument of `Model.from_pretrained`.
        options: Options of ``BaseEmbedding``.

    Raises:
        BadValueError: The model is not dense.
    """

    _model: Any = PrivateAttr()

    def __init__(self, model: Model | str | Path, **options: Any) -> None:
        loaded = dense_model("IrkitEmbedding", model)
        super().__init__(**{"model_name": loaded.name or "irkit", "embed_batch_size": 256, **options})
        self._model = loaded

    @classmethod
    def class_name(cls) -> str:
        """Return the name that LlamaIndex stores."""
        return "IrkitEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        return embed_queries(self._model, [query])[0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return embed_documents(self._model, texts)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)
