"""irkit as a retriever and as a model of BEIR. BEIR requires methods, but no base class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from irkit.adapters.shared import AnyIndex, build_temporary, dense_model
from irkit.data import Document
from irkit.model import Model
from irkit.retrieval.collection import AnyModel

Record = Mapping[str, Any]


class IrkitSearch:
    """Builds an index of a corpus and searches it: ``EvaluateRetrieval(IrkitSearch("bm25"))``.

    Args:
        model: A model of any kind, see `Retriever.build`.
        index: Kind of the index, see `Retriever.build`.
    """

    def __init__(self, model: AnyModel | str | Path, index: AnyIndex = None) -> None:
        self.model, self.index = model, index

    def search(
        self,
        corpus: Mapping[str, Record],
        queries: Mapping[str, str],
        top_k: int,
        score_function: str | None = None,
        **_: Any,
    ) -> dict[str, dict[str, float]]:
        """Return the ``top_k`` best documents of each query, without the document that has its id.

        Args:
            corpus: Id -> title and text.
            queries: Id -> text.
            top_k: Maximum number of documents per query.
            score_function: Ignored: the model says how vectors are compared.
        """
        documents = (_document(name, record) for name, record in corpus.items())
        with build_temporary(self.model, documents, self.index) as retriever:
            run = retriever.run(queries, top_k + 1)
        return run.without_identical_ids().cut(top_k).to_dict()


class IrkitEncoder:
    """Encodes queries and a corpus for BEIR's own search: ``DenseRetrievalExactSearch(IrkitEncoder(model))``.

    Args:
        model: A dense model, or an argument of `Model.from_pretrained`.

    Raises:
        BadValueError: The model is not dense.
    """

    def __init__(self, model: Model | str | Path) -> None:
        self.model = dense_model("IrkitEncoder", model)

    def encode_queries(self, queries: Sequence[str], convert_to_tensor: bool = False, **_: Any) -> Any:
        """Return the vectors of queries ``(n, dim)``; the batch size is irkit's own."""
        return self.model.encode_query(list(queries), convert_to_tensor=convert_to_tensor)

    def encode_corpus(self, corpus: Sequence[Record], convert_to_tensor: bool = False, **_: Any) -> Any:
        """Return the vectors of documents ``(n, dim)``, of title and text each."""
        texts = [_document("-", record).full_text for record in corpus]
        return self.model.encode_document(texts, convert_to_tensor=convert_to_tensor)


def _document(name: str, record: Record) -> Document:
    return Document(name, record.get("text") or "", record.get("title") or "")
