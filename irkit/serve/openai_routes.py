"""The routes of OpenAI for embeddings, and of Cohere and Jina for reranking, for their clients."""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field

from irkit.core.representation import Dense
from irkit.model.embeddings import postprocess
from irkit.serve.answers import CohereRanking, CohereRankingV2, Embeddings, ModelList
from irkit.serve.catalogue import Catalogue
from irkit.serve.messages import ForeignMessage, Many
from irkit.serve.problems import Problem, respond
from irkit.serve.served_models import ServedModel
from irkit.serve.tei_routes import check_texts, find_model, find_scorer, score_texts

router = APIRouter(tags=["OpenAI and Cohere"])
_SIDES = {
    "query": "query",
    "search_query": "query",
    "document": "document",
    "search_document": "document",
    "passage": "document",
}


class EmbeddingsRequest(ForeignMessage):
    """Texts to encode."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"input": ["a text", "another text"], "input_type": "document"}]}
    )

    input: str | Many[str]
    model: str | None = Field(None, description="Name of a served model; by default the first dense one.")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None
    input_type: str | None = Field(None, description="query or document; Cohere's and Jina's names, too.")


class CohereRequest(ForeignMessage):
    """A query, and documents to rank."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"query": "where do bears sleep", "documents": ["In a den.", "Copper."]}]
        }
    )

    query: str
    model: str | None = Field(
        None, description="By default the first cross-encoder, or else the first model."
    )
    top_n: int | None = Field(None, ge=1)


class CohereRerankRequest(CohereRequest):
    """A query, and documents to rank: texts, or objects with the key ``text``."""

    documents: Many[str | dict[str, Any]]
    return_documents: bool = False


class CohereRerankV2Request(CohereRequest):
    """A query, and documents to rank."""

    documents: Many[str]
    max_tokens_per_doc: int | None = Field(None, ge=1, description="No less than the model reads.")


@router.post("/v1/embeddings", response_model=Embeddings)
async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    """Encode texts to one vector each, of length 1, as OpenAI does."""
    texts = check_texts(request, body.input, "input")
    side = None if body.input_type is None else _SIDES.get(body.input_type.removeprefix("retrieval."))
    if body.input_type is not None and side is None:
        raise Problem(422, f"input_type {body.input_type[:60]!r}; known: {', '.join(_SIDES)}")
    served = find_model(request, body.model, "dense")
    model = served.retriever_model("dense")
    rows, tokens = await served.encode(texts, side)
    made = postprocess(model.head, rows, body.dimensions or model.truncate_dim, True)
    assert isinstance(made, Dense)
    vectors: list[Any] = made.values.tolist()
    if body.encoding_format == "base64":
        rows32 = made.values.numpy().astype("<f4")
        vectors = [base64.b64encode(row.tobytes()).decode() for row in rows32]
    data = [
        {"object": "embedding", "index": number, "embedding": vector} for number, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return respond({"object": "list", "data": data, "model": served.name, "usage": usage})


@router.get("/v1/models", response_model=ModelList)
async def models(request: Request) -> Response:
    """List the models, as OpenAI does."""
    catalogue: Catalogue = request.app.state.catalogue
    items = [{"id": name, "object": "model", "created": 0, "owned_by": "irkit"} for name in catalogue.models]
    return respond({"object": "list", "data": items})


@router.post("/v1/rerank", response_model=CohereRanking)
async def rerank_documents(request: Request, body: CohereRerankRequest) -> Response:
    """Rank documents for a query, best first."""
    texts = [_text(document) for document in body.documents]
    results, tokens = await _rank(request, find_scorer(request, body.model), body, texts)
    if body.return_documents:
        results = [result | {"document": {"text": texts[result["index"]]}} for result in results]
    return respond(
        {
            "object": "rerank",
            "id": request.state.request_id,
            "model": request.state.served,
            "results": results,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "meta": {"api_version": {"version": "1"}, "billed_units": {"search_units": 1}},
        }
    )


@router.post("/v2/rerank", response_model=CohereRankingV2)
async def rerank_documents_v2(request: Request, body: CohereRerankV2Request) -> Response:
    """Rank documents for a query, best first, as version 2 of Cohere's interface."""
    served = find_scorer(request, body.model)
    if (most := body.max_tokens_per_doc) is not None and most < (served.max_length or 0):
        raise Problem(
            422, f"max_tokens_per_doc {most}: model {served.name} cuts at {served.max_length}; send no less"
        )
    results, tokens = await _rank(request, served, body, body.documents)
    meta = {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": tokens},
    }
    return respond({"id": request.state.request_id, "results": results, "meta": meta})


async def _rank(
    request: Request, served: ServedModel, body: CohereRequest, texts: list[str]
) -> tuple[list[dict[str, Any]], int]:
    """Return the place and the score of each text, best first, and the number of tokens."""
    check_texts(request, texts, "documents")
    scores, tokens = await score_texts(served, body.query, texts)
    order = np.argsort(-np.array(scores), kind="stable")[: body.top_n].tolist()
    return [{"index": i, "relevance_score": scores[i]} for i in order], tokens


def _text(document: str | dict[str, Any]) -> str:
    if isinstance(document, str):
        return document
    text = document.get("text")
    if not isinstance(text, str):
        raise Problem(422, "documents: expected texts, or objects with the key text")
    return text
