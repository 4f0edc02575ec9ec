"""irkit in MTEB: any index as a ``SearchProtocol``, dense models as an ``EncoderProtocol``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from irkit.adapters.shared import AnyIndex, build_temporary, dense_model, missing
from irkit.data import Document
from irkit.errors import BadValueError
from irkit.evaluation.run import Run
from irkit.model import Model
from irkit.retrieval.collection import AnyModel, load_model
from irkit.retrieval.retriever import Retriever

try:
    from mteb._create_dataloaders import create_dataloader
    from mteb.models.model_meta import ModelMeta
    from mteb.types import PromptType
except ImportError as error:
    raise missing("mteb", error) from error


class IrkitSearch:
    """Builds an index of each corpus and searches it, for tasks of retrieval and of reranking.

    Args:
        model: A model of any kind, see `Retriever.build`.
        index: Kind of the index, see `Retriever.build`.
    """

    def __init__(self, model: AnyModel | str | Path, index: AnyIndex = None) -> None:
        self.model, self.kind = load_model(model), index
        self._retriever: Retriever | None = None

    def index(self, corpus: Iterable[Mapping[str, Any]], **_: Any) -> None:
        """Build a temporary index of a corpus; it replaces the index of the call before."""
        documents = (Document(row["id"], row["text"], row.get("title") or "") for row in corpus)
        self._retriever = build_temporary(self.model, documents, self.kind)

    def search(
        self,
        queries: Any,
        *,
        task_metadata: Any,
        top_k: int,
        top_ranked: Mapping[str, list[str]] | None = None,
        **_: Any,
    ) -> dict[str, dict[str, float]]:
        """Return the ``top_k`` best documents of each query: of all documents, or of those in ``top_ranked``.

        Raises:
            BadValueError: No corpus was indexed.
        """
        if self._retriever is None:
            raise BadValueError("IrkitSearch.search: no corpus was indexed; call index(corpus) first")
        # MTEB joins instructions and conversations to one text
        loader = create_dataloader(queries, task_metadata=task_metadata, prompt_type=PromptType.query)
        texts = dict(zip(queries["id"], _texts(loader), strict=True))
        if top_ranked is None:
            return self._retriever.run(texts, top_k).to_dict()
        lists = {query: list(dict.fromkeys(top_ranked[query])) for query in texts if query in top_ranked}
        candidates = Run((query, ids, [0.0] * len(ids)) for query, ids in lists.items())
        return self._retriever.rerank(texts, candidates, top_k).to_dict()

    @property
    def mteb_model_meta(self) -> ModelMeta:
        """Name and revision under which MTEB stores results."""
        return _meta(self.model)


class IrkitEncoder:
    """Encodes texts with a dense model, for tasks of every type.

    Args:
        model: A dense model, or an argument of `Model.from_pretrained`.

    Raises:
        BadValueError: The model is not dense.
    """

    def __init__(self, model: Model | str | Path) -> None:
        self.model = dense_model("IrkitEncoder", model)

    def encode(self, inputs: Any, *, prompt_type: PromptType | None = None, **_: Any) -> Any:
        """Return vectors ``(n, dim)`` of texts: of queries, of documents, or of texts that are neither."""
        texts = _texts(inputs)
        if prompt_type is None:
            return self.model.encode(texts)
        is_query = prompt_type == PromptType.query
        return self.model.encode_query(texts) if is_query else self.model.encode_document(texts)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Return the similarities of all pairs ``(n, m)``."""
        return self.model.similarity(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Return the similarities of the pairs ``(n,)``."""
        return self.model.similarity_pairwise(embeddings1, embeddings2)

    @property
    def mteb_model_meta(self) -> ModelMeta:
        """Name and revision under which MTEB stores results."""
        return _meta(self.model)


def _texts(batches: Iterable[Mapping[str, Any]]) -> list[str]:
    return [text for batch in batches for text in batch["text"]]


def _meta(model: AnyModel) -> ModelMeta:
    """Describe a model: ``owner/name`` of its repository, else ``irkit/`` and its last name."""
    name = model.name or "unnamed"
    if name.count("/") != 1 or Path(name).exists():
        name = f"irkit/{Path(name).name}"
    return ModelMeta.create_empty({"name": name, "revision": model.fingerprint})
