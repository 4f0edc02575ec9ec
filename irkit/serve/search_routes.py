"""The routes that search indexes, explain hits and count values of metadata."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from irkit.data import Document
from irkit.remote.remote_retriever import RemoteRetriever
from irkit.retrieval.searching import parse_filter
from irkit.serve.answers import Counts, Explained, Found, Indexes, IndexFacts, Models, Ranked
from irkit.serve.catalogue import Catalogue
from irkit.serve.messages import (
    DocumentMessage,
    ExplainRequest,
    FacetsRequest,
    Fuse,
    RerankRequest,
    SearchRequest,
)
from irkit.serve.problems import Problem, describe, problem_of, respond
from irkit.serve.search_work import AnyRetriever, explain, rerank_ids
from irkit.serve.served_indexes import ServedIndex

router = APIRouter(tags=["search"])
_MOST_EXPLAINED = 20  # hits of a query
_MOST_EXPLANATIONS = 100  # of a request
_MOST_HITS = 100_000  # of an answer in one piece
_STREAMED = 16  # queries whose hits are found together, and then sent


def find_index(request: Request, name: str) -> ServedIndex:
    """Return the index that a route names."""
    catalogue: Catalogue = request.app.state.catalogue
    return catalogue.index(name)


@router.get("/indexes", response_model=Indexes)
async def list_indexes(request: Request) -> Response:
    """Describe all indexes."""
    catalogue: Catalogue = request.app.state.catalogue
    facts = [await asyncio.to_thread(_facts, request, index) for index in catalogue.indexes.values()]
    return respond({"indexes": facts})


@router.get("/indexes/{name}", response_model=IndexFacts)
async def describe_index(request: Request, name: str) -> Response:
    """Describe an index."""
    return respond(await asyncio.to_thread(_facts, request, find_index(request, name)))


def _facts(request: Request, index: ServedIndex) -> dict[str, Any]:
    """Describe an index, which may have to be opened again first."""
    config = request.app.state.catalogue.config
    writable = any(scope == "write" for scope, _ in config.keys)
    return index.facts() | {"writable": writable, "most_hits": config.limits.k}


@router.get("/models", response_model=Models)
async def list_models(request: Request) -> Response:
    """Describe all models."""
    catalogue: Catalogue = request.app.state.catalogue
    models = []
    for name, served in catalogue.models.items():
        facts: dict[str, Any] = {"name": name, "kind": served.kind, "max_length": served.max_length}
        if served.kind != "cross_encoder":
            model = served.retriever_model()
            facts |= {"dim": model.dim, "similarity": model.similarity_name, "prompts": list(model.prompts)}
        models.append(facts | {"indexes": served.indexes})
    return respond({"models": models})


@router.post(
    "/indexes/{name}/search",
    response_model=Found,
    responses={200: {"content": {"application/x-ndjson": {}}}},
)
async def search(request: Request, name: str, body: SearchRequest) -> Response:
    """Search for one query or several; the answer has a result for each, in order."""
    start = time.perf_counter()
    index = find_index(request, name)
    queries: list[Any] = body.queries if isinstance(body.queries, list) else [body.queries]
    limits = request.app.state.catalogue.config.limits
    if not queries or len(queries) > limits.texts:
        raise Problem(413 if queries else 400, f"queries: got {len(queries)}, expected 1 to {limits.texts}")
    most, depth = limits.stream_k if body.stream else limits.k, body.k + body.offset
    fuse = body.fuse if isinstance(body.fuse, Fuse) else None  # else of the heads of one index
    depths = [depth, *(stage.depth for stage in (body.rerank, fuse) if stage)]
    if max(depths) > most:
        hint = "" if body.stream else "; more hits come with stream: true"
        raise Problem(422, f"k, offset and depth: {max(depths)} hits of a query, the limit is {most}{hint}")
    if body.explain and body.k > _MOST_EXPLAINED:
        raise Problem(422, f"explain with k {body.k}; expected at most {_MOST_EXPLAINED}")
    _check_work(request.app.state.catalogue, name, body, len(queries), depths[0])
    options = body.model_dump(exclude={"queries", "facets", "facet_k", "stream"})
    options |= {"fuse": None, "heads": body.fuse} if fuse is None else {"heads": None}
    if body.stream:
        return StreamingResponse(
            _stream(index, queries, options, request.state.request_id), media_type="application/x-ndjson"
        )
    answer: dict[str, Any] = {"results": await index.search(queries, options)}
    if body.facets:
        answer["facets"] = (await _count(index, body.facets, body.filter, body.facet_k))["facets"]
    answer |= {"documents": index.count(), "seconds": round(time.perf_counter() - start, 6)}
    return respond(answer)


def _check_work(catalogue: Catalogue, name: str, body: SearchRequest, count: int, depth: int) -> None:
    """Refuse what would keep other searches of the index waiting for long, and answers that would be huge.

    Args:
        catalogue: Has the index.
        name: Name of the index.
        body: The request.
        count: Number of its queries.
        depth: Hits of a query, skipped ones included.
    """
    if not body.stream and count * body.k > _MOST_HITS:
        raise Problem(
            422,
            f"{count} queries with k {body.k}: {count * body.k} hits in one answer, the limit is "
            f"{_MOST_HITS}; ask for fewer, or set stream: true",
        )
    if body.explain and count * body.k > _MOST_EXPLANATIONS:
        raise Problem(
            422,
            f"explain of {count} queries with k {body.k}: {count * body.k} hits, the limit is "
            f"{_MOST_EXPLANATIONS}; ask for fewer, or the route explain for single hits",
        )
    by = body.rerank.by if body.rerank else ""
    if body.rerank and by in catalogue.models and by not in catalogue.indexes:
        names = {name, *(body.fuse.indexes if isinstance(body.fuse, Fuse) else ())}
        documents = sum(catalogue.indexes[part].count() for part in names & catalogue.indexes.keys())
        texts, most = count * min(max(depth, body.rerank.depth), documents), catalogue.config.limits.texts
        if texts > most:
            raise Problem(
                422,
                f"rerank by model {by}: {texts} texts of {count} queries, the limit is {most}; ask for fewer "
                "queries at once or a smaller depth, or rank by an index, whose vectors are stored",
            )


async def _stream(
    index: ServedIndex, queries: list[Any], options: dict[str, Any], request_id: str
) -> AsyncIterator[bytes]:
    """Yield a line for each hit, and one at the end; a few queries are searched at a time."""
    start, count, missing = time.perf_counter(), 0, set[str]()
    together = max(1, min(_STREAMED, 10_000 // options["k"]))
    try:
        for first in range(0, len(queries), together):
            results = await index.search(queries[first : first + together], options)
            for number, result in enumerate(results, first):
                for hit in result["hits"]:
                    yield bytes(respond({"query": number, "hit": hit}).body) + b"\n"
                count += len(result["hits"])
                missing.update(result.get("missing", ()))
        end: dict[str, Any] = {"done": True, "hits": count}
        if missing:
            end["missing"] = sorted(missing)
        yield json.dumps(end | {"seconds": round(time.perf_counter() - start, 6)}).encode() + b"\n"
    except Exception as error:  # the status is sent already
        yield json.dumps(describe(problem_of(error), request_id)).encode() + b"\n"


@router.post("/indexes/{name}/rerank", response_model=Ranked)
async def rerank_hits(request: Request, name: str, body: RerankRequest) -> Response:
    """Rank documents of an index by the exact scores of its model."""
    index, limits = find_index(request, name), request.app.state.catalogue.config.limits
    count = sum(map(len, body.ids))
    if len(body.queries) > limits.texts or count > limits.stream_k:
        raise Problem(
            413,
            f"{len(body.queries)} queries and {count} documents in one request, "
            f"the limits are {limits.texts} and {limits.stream_k}",
        )
    return respond({"results": await index.read(partial(rerank_ids, body.model_dump()))})


@router.post("/indexes/{name}/explain", response_model=Explained)
async def explain_hit(request: Request, name: str, body: ExplainRequest) -> Response:
    """Explain why a document answers a query: tokens, terms or passages that match."""
    if (body.id is None) == (body.document is None):
        raise Problem(422, "explain: expected an id or a document, and not both")
    document = body.id if body.document is None else make_document(body.document)
    index = find_index(request, name)
    return respond(await index.read(lambda retriever: explain(name, retriever, body.query, document)))


@router.post("/indexes/{name}/facets", response_model=Counts)
async def facets(request: Request, name: str, body: FacetsRequest) -> Response:
    """Count the values of keys of metadata, over the documents that meet a filter."""
    return respond(await _count(find_index(request, name), body.keys, body.filter, body.k))


async def _count(index: ServedIndex, keys: list[str], filter: Any, k: int) -> dict[str, Any]:
    def count(retriever: AnyRetriever) -> dict[str, Any]:
        if isinstance(retriever, RemoteRetriever):
            raise Problem(422, f"index {index.name} is in another engine, whose values are not counted")
        counts = {
            key: [{"value": value, "count": n} for value, n in retriever.facets(key, filter, k)]
            for key in keys
        }
        live = retriever.index.live
        mask = live if filter is None else live & retriever.documents.filter(parse_filter(filter))
        return {"facets": counts, "documents": int(mask.sum())}

    return await index.read(count)


def make_document(message: DocumentMessage) -> Document:
    """Return the document that a message describes.

    Raises:
        BadValueError: It has something that no index can hold, such as an unpaired surrogate.
    """
    return Document(message.id, message.text, message.title, message.metadata, message.vector)
