"""What several adapters need: dense vectors as lists, documents that replace others, temporary indexes."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

from irkit.data import Document, DocumentsLike
from irkit.errors import BadValueError, MissingDependencyError
from irkit.index import IndexConfig
from irkit.model import Model
from irkit.retrieval.collection import AnyModel, format_model, load_model, model_manifest
from irkit.retrieval.retriever import Retriever
from irkit.retrieval.searcher import Searcher
from irkit.retrieval.searching import Hit

AnyRetriever: TypeAlias = Retriever | Searcher
"""What adapters that only search take."""

AnyIndex: TypeAlias = str | Mapping[str, Any] | IndexConfig | None
"""An argument ``index`` of `irkit.Retriever.build`."""


def missing(package: str, error: ImportError) -> MissingDependencyError:
    """Return the error for an adapter whose library cannot be imported."""
    return MissingDependencyError(
        f"the adapter needs {package}, which cannot be imported ({error}); install it with: "
        f"pip install {package}"
    )


def dense_model(operation: str, model: Model | str | Path) -> Model:
    """Load a model that makes one vector per text.

    Raises:
        BadValueError: The model is of another kind.
    """
    loaded = load_model(model)
    if not isinstance(loaded, Model) or loaded.kind != "dense":
        raise BadValueError(
            f"{operation}: got {format_model(model_manifest(loaded))}, expected a dense model, which makes "
            "one vector per text; search other models through a Retriever"
        )
    return loaded


def embed_queries(model: Model, texts: Sequence[str]) -> list[list[float]]:
    """Encode queries as lists of numbers."""
    return cast(Any, model.encode_query(list(texts))).tolist()  # type: ignore[no-any-return]


def embed_documents(model: Model, texts: Sequence[str]) -> list[list[float]]:
    """Encode documents as lists of numbers."""
    return cast(Any, model.encode_document(list(texts))).tolist()  # type: ignore[no-any-return]


def hit_metadata(hit: Hit | Document) -> dict[str, Any]:
    """Return the metadata of a document; a title is added as ``"title"`` unless the metadata has this key."""
    return {**({"title": hit.title} if hit.title else {}), **hit.metadata}


def fetch_known(retriever: Retriever, ids: Sequence[str]) -> list[Document]:
    """Return the documents of those ids that the index has, each once."""
    documents = retriever.documents
    with retriever.store.snapshot():
        rows = documents.find(list(dict.fromkeys(ids)))
        return documents.fetch(rows[rows >= 0])


def remove_known(retriever: Retriever, ids: Sequence[str]) -> None:
    """Remove the documents of those ids that the index has."""
    with retriever.store.update():
        names = list(dict.fromkeys(ids))
        rows = retriever.documents.find(names)
        retriever.remove([name for name, row in zip(names, rows.tolist(), strict=True) if row >= 0])


def put_documents(retriever: Retriever, documents: Sequence[Document]) -> None:
    """Add documents; those whose ids the index has replace the documents there. Nothing changes on an error.

    Raises:
        BadValueError: Two of the documents have the same id.
    """
    with retriever.store.update():
        remove_known(retriever, [document.id for document in documents])
        retriever.add(documents)


def build_temporary(model: AnyModel | str | Path, documents: DocumentsLike, index: AnyIndex) -> Retriever:
    """Build an index that is deleted with its retriever, or when Python ends."""
    folder = tempfile.mkdtemp(prefix="irkit-")
    try:
        retriever = Retriever.build(model, documents, Path(folder) / "index", index=index)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(retriever, shutil.rmtree, folder, ignore_errors=True)
    return retriever
