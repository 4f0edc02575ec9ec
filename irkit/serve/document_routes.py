"""The routes that read and change the documents of an index.

A change is answered after its commit. Changes of an index are made one after another, in the order of their
arrival.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from irkit.data import Document
from irkit.retrieval.retriever import Retriever
from irkit.serve.answers import Change, StoredDocuments
from irkit.serve.messages import DocumentsRequest, RemoveRequest
from irkit.serve.problems import Problem, respond
from irkit.serve.search_routes import find_index, make_document
from irkit.serve.search_work import AnyRetriever, fetch_known, find_known
from irkit.shards import ShardedStore

router = APIRouter(prefix="/indexes/{name}/documents", tags=["documents"])


@router.get("", response_model=StoredDocuments)
async def get_documents(
    request: Request, name: str, id: Annotated[list[str], Query(min_length=1, max_length=1000)]
) -> Response:
    """Return documents by their ids."""

    def fetch(retriever: AnyRetriever) -> list[Document]:
        _check_known(retriever, id, "")
        by_id = fetch_known(retriever, id)
        return [by_id[name] for name in id]

    documents = await find_index(request, name).read(fetch)
    return respond(
        {
            "documents": [
                {"id": item.id, "title": item.title, "text": item.text, "metadata": dict(item.metadata)}
                for item in documents
            ]
        }
    )


@router.post("", status_code=201, response_model=Change)
async def add_documents(request: Request, name: str, body: DocumentsRequest) -> Response:
    """Add documents: all of them, or none if an id is there already."""
    items = _documents(request, body)

    def add(retriever: Retriever) -> None:
        _refuse(retriever.documents.taken(items), 409, "the index already has document")
        retriever.add(items)

    return await _change(request, name, add, {"added": len(items)}, 201)


@router.put("", response_model=Change)
async def update_documents(request: Request, name: str, body: DocumentsRequest) -> Response:
    """Replace documents by others of the same ids, all in one step."""
    items = _documents(request, body)

    def update(retriever: Retriever) -> None:
        _check_known(retriever, [item.id for item in items])
        retriever.update(items)

    return await _change(request, name, update, {"updated": len(items)})


@router.delete("", response_model=Change)
async def remove_documents(request: Request, name: str, body: RemoveRequest) -> Response:
    """Remove documents: all of them, or none if an id is unknown."""
    ids = list(dict.fromkeys(body.ids))

    def remove(retriever: Retriever) -> None:
        _check_known(retriever, ids)
        retriever.remove(ids)

    return await _change(request, name, remove, {"removed": len(ids)})


async def _change(
    request: Request,
    name: str,
    function: Callable[[Retriever], None],
    done: dict[str, Any],
    status: int = 200,
) -> Response:
    def change(retriever: Retriever) -> int:
        retriever.refresh()
        store = retriever.store
        is_interrupted = isinstance(store, ShardedStore) and any(map(store.ahead, store.parts))
        # inside an update, documents that an interrupted change has removed are found, so that the client
        # can repeat it
        with store.update() if is_interrupted else nullcontext():
            function(retriever)
        return len(retriever)

    documents = await find_index(request, name).change(change, request.state.ends)
    return respond(done | {"documents": documents}, status)


def _documents(request: Request, body: DocumentsRequest) -> list[Document]:
    most = request.app.state.catalogue.config.limits.texts
    if len(body.documents) > most:
        raise Problem(413, f"{len(body.documents)} documents in one request, the limit is {most}")
    return [make_document(message) for message in body.documents]


def _check_known(retriever: AnyRetriever, ids: list[str], ending: str = "; nothing was changed") -> None:
    known = set(find_known(retriever, ids))
    _refuse([name for name in ids if name not in known], 404, "the index has no document", ending)


def _refuse(wrong: list[str], status: int, problem: str, ending: str = "; nothing was changed") -> None:
    if wrong:
        others = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise Problem(status, f"{problem} {wrong[0][:60]!r}{others}{ending}")
