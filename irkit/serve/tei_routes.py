"""The routes of text-embeddings-inference, for its clients, such as ``huggingface_hub.InferenceClient``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import torch
from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from irkit.core.representation import Dense, MultiVector, Representation, Sparse
from irkit.model import Model
from irkit.model.embeddings import postprocess
from irkit.serve.answers import Info, TextScore, Token, Weight
from irkit.serve.catalogue import Catalogue
from irkit.serve.messages import ForeignMessage, Many
from irkit.serve.problems import Problem, respond
from irkit.serve.served_models import Kind, ServedModel

router = APIRouter(tags=["text-embeddings-inference"])
INTERFACE = "1.0"
"""Version of the routes."""
_PROMPT = "query, document, or another prompt of the model; null is its default."


def _check_direction(value: Any) -> Any:
    if value in ("left", "Left"):
        raise PydanticCustomError("left", "texts are cut at their end only; send right, or shorter texts")
    return value


def _check_no_prompt(value: Any) -> Any:
    if value is not None:
        raise PydanticCustomError(
            "prompt", "the query and the texts have the prompts of their sides; send none"
        )
    return value


class TEIMessage(ForeignMessage):
    """What all requests of these routes have."""

    model: str | None = Field(None, description="Name of a served model; by default the first one.")
    truncate: bool | None = Field(None, description="False refuses texts that are too long.")
    truncation_direction: Annotated[Literal["right", "Right"], BeforeValidator(_check_direction)] = "right"


class EmbedRequest(TEIMessage):
    """Texts to encode."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": ["a text", "another text"]}]})

    inputs: str | Many[str]
    prompt_name: str | None = Field(None, description=_PROMPT)


class DenseRequest(EmbedRequest):
    """Texts to encode to one vector each."""

    normalize: bool = True
    dimensions: int | None = Field(None, ge=1)


class RerankTextsRequest(TEIMessage):
    """A query, and texts to score."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"query": "where do bears sleep", "texts": ["In a den.", "Copper."]}]}
    )

    query: str
    texts: Many[str]
    raw_scores: bool = Field(False, description="Of a cross-encoder: logits instead of probabilities.")
    return_text: bool = False
    prompt_name: Annotated[None, BeforeValidator(_check_no_prompt)] = Field(None, description="None.")


class Sentences(ForeignMessage):
    """A sentence, and others to compare with it."""

    source_sentence: str
    sentences: Many[str]


class SimilarityParameters(ForeignMessage):
    """Options of a comparison."""

    truncate: bool | None = None
    truncation_direction: Annotated[Literal["right", "Right"], BeforeValidator(_check_direction)] = "right"
    prompt_name: str | None = Field(None, description=_PROMPT)


class SimilarityRequest(ForeignMessage):
    """Sentences to compare."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"inputs": {"source_sentence": "bears", "sentences": ["a den", "copper"]}}]
        }
    )

    inputs: Sentences
    parameters: SimilarityParameters = SimilarityParameters(prompt_name=None)
    model: str | None = None


class TokenizeRequest(TEIMessage):
    """Texts to split into tokens."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"inputs": "a text"}, {"inputs": ["a text"], "prompt_name": "query"}]}
    )

    inputs: str | Many[str]
    add_special_tokens: bool = True
    prompt_name: str | None = Field(None, description=_PROMPT)


def find_model(request: Request, name: str | None, kind: Kind | None = None) -> ServedModel:
    """Return the model that a request names; by default the first one of ``kind``.

    Raises:
        Problem: The server has no such model.
    """
    catalogue: Catalogue = request.app.state.catalogue
    if name is None and kind is not None:
        fitting = [model for model in catalogue.models.values() if model.kind == kind]
        if not fitting:
            raise Problem(404, f"the server has no model of kind {kind}")
        served = fitting[0]
    else:
        served = catalogue.model(name).of_kind(kind)
    request.state.served = served.name
    return served


def check_texts(request: Request, texts: str | list[str], name: str) -> list[str]:
    """Return the texts of a request in a list.

    Raises:
        Problem: The list is empty (400), or too long (413).
    """
    items = [texts] if isinstance(texts, str) else texts
    most = request.app.state.catalogue.config.limits.texts
    if not items:
        raise Problem(400, f"{name}: got no text; expected one or more")
    if len(items) > most:
        raise Problem(413, f"{name}: {len(items)} texts in one request, the limit is {most}")
    return items


async def _encode(request: Request, body: EmbedRequest, kind: Kind) -> tuple[Model, Representation]:
    """Return a model that makes representations of a kind, and the representations of the texts."""
    texts = check_texts(request, body.inputs, "inputs")
    served = find_model(request, body.model, kind)
    model = served.retriever_model(kind)
    encoded = await served.encode(texts, body.prompt_name, cut=body.truncate is not False)
    return model, encoded.rows


@router.post("/embed", response_model=list[list[float]])
async def embed(request: Request, body: DenseRequest) -> Response:
    """Encode texts to one vector each."""
    model, rows = await _encode(request, body, "dense")
    made = postprocess(model.head, rows, body.dimensions or model.truncate_dim, body.normalize)
    assert isinstance(made, Dense)
    return respond(made.values.tolist())


@router.post("/embed_all", response_model=list[list[list[float]]])
async def embed_all(request: Request, body: EmbedRequest) -> Response:
    """Encode texts to one vector per token: of a multi-vector model, with its markers and its projection."""
    model, rows = await _encode(request, body, "multi_vector")
    made = postprocess(model.head, rows, model.truncate_dim, False)
    assert isinstance(made, MultiVector)
    return respond([vectors.tolist() for vectors in made.tokens])


@router.post("/embed_sparse", response_model=list[list[Weight]])
async def embed_sparse(request: Request, body: EmbedRequest) -> Response:
    """Encode texts to weights of terms."""
    _, rows = await _encode(request, body, "sparse")
    assert isinstance(rows, Sparse)
    pairs = zip(rows.terms.values.tolist(), rows.weights.tolist(), strict=True)
    return respond(
        [
            [
                {"index": term, "value": weight}
                for _, (term, weight) in zip(range(length), pairs, strict=False)
            ]
            for length in rows.terms.lengths.tolist()
        ]
    )


@router.post("/rerank", response_model=list[TextScore])
async def rerank(request: Request, body: RerankTextsRequest) -> Response:
    """Score texts for a query, best first: by a cross-encoder, or by the similarity of another model."""
    texts = check_texts(request, body.texts, "texts")
    cut = body.truncate is not False
    served = find_scorer(request, body.model)
    scores, _ = await score_texts(served, body.query, texts, raw=body.raw_scores, cut=cut)
    order = np.argsort(-np.array(scores), kind="stable").tolist()
    return respond(
        [{"index": i, "score": scores[i]} | ({"text": texts[i]} if body.return_text else {}) for i in order]
    )


def find_scorer(request: Request, name: str | None) -> ServedModel:
    """Return the model that scores texts: by default the first cross-encoder, or else the first model.

    Raises:
        Problem: The server has no such model.
    """
    catalogue: Catalogue = request.app.state.catalogue
    if name is None:
        crosses = (model.name for model in catalogue.models.values() if model.kind == "cross_encoder")
        name = next(crosses, None)
    return find_model(request, name)


async def score_texts(
    served: ServedModel, query: str, texts: list[str], *, raw: bool = False, cut: bool = True
) -> tuple[list[float], int]:
    """Score texts for a query, and count the tokens, see `irkit.serve.served_models.ServedModel.score`.

    Without ``raw`` the scores of a cross-encoder are probabilities.
    """
    scores, tokens = await served.score(query, texts, cut=cut)
    if served.kind == "cross_encoder" and not raw:
        scores = torch.tensor(scores).sigmoid().tolist()
    return scores, tokens


@router.post("/similarity", response_model=list[float])
async def similarity(request: Request, body: SimilarityRequest) -> Response:
    """Compare a sentence with others; of a model with several heads, by its first one."""
    texts = check_texts(request, body.inputs.sentences, "sentences")
    served = find_model(request, body.model)
    served = next(iter(served.heads.values()), served)
    options = body.parameters
    names = (options.prompt_name,) * 2
    if options.prompt_name is None and served.kind != "dense":
        names = "query", "document"
    cut = options.truncate is not False
    model = served.retriever_model()
    first = await served.encode([body.inputs.source_sentence], names[0], cut=cut)
    others = await served.encode(texts, names[1], cut=cut)
    left, right = (
        rows if not isinstance(rows, Dense) else rows.values.numpy() for rows in (first.rows, others.rows)
    )
    return respond(model.similarity(left, right)[0].tolist())


@router.post("/", include_in_schema=False)
async def embed_or_compare(request: Request, body: DenseRequest | SimilarityRequest) -> Response:
    """Compare sentences if ``inputs`` has sentences to compare; embed the texts otherwise."""
    return await (similarity(request, body) if isinstance(body, SimilarityRequest) else embed(request, body))


@router.post("/tokenize", response_model=list[list[Token]])
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Split texts into tokens, uncut."""
    texts = check_texts(request, body.inputs, "inputs")
    served = find_model(request, body.model)
    model = served.retriever_model()
    prompt = model.prompt_named(body.prompt_name)
    return respond(await served.tokens([prompt + text for text in texts], body.add_special_tokens))


@router.get("/info", response_model=Info)
async def info(request: Request) -> Response:
    """Describe the first model and the limits, as TEI does."""
    catalogue: Catalogue = request.app.state.catalogue
    limits = catalogue.config.limits
    facts: dict[str, Any] = {"version": INTERFACE, "model_id": None, "model_type": None}
    if catalogue.models:
        served = catalogue.model()
        kind = "reranker" if served.kind == "cross_encoder" else "embedding"
        facts |= {
            "model_id": served.name,
            "served_model_name": served.name,
            "model_dtype": catalogue.config.dtype,
            "model_type": {kind: {"pooling": served.kind}},
            "max_input_length": served.max_length,
        }
    return respond(
        facts
        | {
            "max_concurrent_requests": limits.requests,
            "max_client_batch_size": limits.texts,
            "max_batch_tokens": limits.batch_tokens,
            "auto_truncate": True,
        }
    )
