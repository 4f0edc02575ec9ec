"""Changes of an index: documents are added, removed or replaced, each call in one commit."""

from __future__ import annotations

from collections.abc import Iterable

from irkit.arguments import check_functions
from irkit.data import DocumentsLike, parse_documents
from irkit.index import StageProgress
from irkit.retrieval.building import add_documents
from irkit.retrieval.collection import Collection
from irkit.retrieval.searching import find_rows


def add(collection: Collection, documents: DocumentsLike, progress: StageProgress | None) -> None:
    """Add documents, see `irkit.Retriever.add`."""
    check_functions("adding documents", progress=progress)
    with collection.store.update():
        collection.check_current()
        added = len(collection.documents) + collection.store.meta.get("dropped", 0)  # by compactions
        items = parse_documents(documents, added)
        add_documents(collection, items, progress=progress)


def remove(collection: Collection, ids: str | Iterable[str], operation: str = "removing documents") -> None:
    """Remove documents, see `irkit.Retriever.remove`; errors name the ``operation``."""
    with collection.store.update():
        collection.check_current()
        collection.index.remove(find_rows(collection.documents, ids, operation, "nothing was changed"))


def update(collection: Collection, documents: DocumentsLike, progress: StageProgress | None) -> None:
    """Replace documents, see `irkit.Retriever.update`."""
    check_functions("updating documents", progress=progress)
    items = list(parse_documents(documents))
    with collection.store.update():
        remove(collection, [item.id for item in items], "updating documents")
        add_documents(collection, items, progress=progress)
