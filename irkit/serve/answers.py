"""What the routes answer, as OpenAPI shows it. The routes themselves write JSON without these models."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

JSONObject = dict[str, Any]


def _example(**value: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [value]}, protected_namespaces=())


class OpenAIError(BaseModel):
    """An error as OpenAI describes it."""

    message: str
    type: str
    code: int
    param: str | None


class Error(BaseModel):
    """What is wrong, a word for programs, and the id of the request in the log."""

    error: str | OpenAIError
    error_type: str
    request_id: str


class Status(BaseModel):
    """Whether the process is alive."""

    status: str


class Readiness(BaseModel):
    """Whether requests are taken."""

    ready: bool


# ---- indexes and models ----


class IndexFacts(BaseModel):
    """An index."""

    name: str
    documents: int
    kind: str
    representation: str
    parts: list[str]
    heads: list[str]
    model: str
    similarity: str | None
    dim: int | None
    explain: list[str]
    keys: list[str]
    writable: bool
    most_hits: int  # of a query in one answer; more come with stream


class Indexes(BaseModel):
    """All indexes."""

    indexes: list[IndexFacts]


class ModelFacts(BaseModel):
    """A model; a cross-encoder has no dimension, similarity and prompts."""

    name: str
    kind: str
    max_length: int | None
    dim: int | None = None
    similarity: str | None = None
    prompts: list[str] = []
    indexes: list[str]


class Models(BaseModel):
    """All models."""

    models: list[ModelFacts]


# ---- search ----


class Window(BaseModel):
    """Where the best window of a long document is in its text."""

    start: int
    end: int


class Hit(BaseModel):
    """A document that was found; fields that were not asked for are empty."""

    id: str
    score: float | None
    title: str
    text: str
    metadata: JSONObject
    passage: Window | None = None
    parts: dict[str, float | None] = {}
    highlight: JSONObject = {}
    snippet: JSONObject = {}
    explanation: JSONObject = {}


class Result(BaseModel):
    """A query and its hits, best first."""

    query: Any
    hits: list[Hit]
    missing: list[str] = []  # shards that gave no answer


class Ranked(BaseModel):
    """A result for each query, in order."""

    results: list[Result]


class Count(BaseModel):
    """A value of a key of the metadata, and the number of documents that have it."""

    value: Any
    count: int


class Counts(BaseModel):
    """Values of each key, and the number of documents that meet the filter."""

    model_config = _example(facets={"topic": [{"value": "animals", "count": 4}]}, documents=16)

    facets: dict[str, list[Count]]
    documents: int


class Found(Ranked):
    """The results of a search, and the number of documents of the index."""

    model_config = _example(
        results=[
            {
                "query": "which animals hibernate",
                "hits": [{"id": "bears", "score": 4.2, "title": "Bears", "text": "", "metadata": {}}],
            }
        ],
        documents=16,
        seconds=0.002,
    )

    facets: dict[str, list[Count]] = {}
    documents: int
    seconds: float


class Passage(BaseModel):
    """Where a passage starts and ends, and its score."""

    start: int
    end: int
    score: float | None


class ExplainedPart(BaseModel):
    """Why a document answers a query, by one kind of representation."""

    part: str
    query: Any
    document: str
    score: float | None
    matches: list[JSONObject]
    words: list[JSONObject]
    passages: list[Passage]
    view: JSONObject


class Explained(ExplainedPart):
    """Why a document answers a query."""

    index: str
    id: str
    parts: dict[str, ExplainedPart] = {}  # of an index of several representations


# ---- documents ----


class StoredDocument(BaseModel):
    """A document of an index."""

    id: str
    title: str
    text: str
    metadata: JSONObject


class StoredDocuments(BaseModel):
    """Documents of an index."""

    documents: list[StoredDocument]


class Change(BaseModel):
    """How many documents a request changed, and how many the index has now."""

    model_config = _example(added=1, documents=17)

    added: int = 0
    updated: int = 0
    removed: int = 0
    documents: int


# ---- text-embeddings-inference ----


class TextScore(BaseModel):
    """The place of a text in the request, and its score."""

    model_config = _example(index=1, score=0.97)

    index: int
    score: float | None
    text: str = ""


class Weight(BaseModel):
    """The weight of a term, given by its id."""

    model_config = _example(index=2003, value=1.25)

    index: int
    value: float


class Token(BaseModel):
    """A token, and the characters that it covers: none, if it is a special one."""

    model_config = _example(id=6847, text="bears", special=False, start=0, stop=5)

    id: int
    text: str
    special: bool
    start: int
    stop: int


class Info(BaseModel):
    """The first model and the limits; without a model, only limits."""

    model_config = _example(
        version="1.0",
        model_id="all-MiniLM-L6-v2",
        model_type={"embedding": {"pooling": "dense"}},
        served_model_name="all-MiniLM-L6-v2",
        model_dtype="float32",
        max_input_length=256,
        max_concurrent_requests=512,
        max_client_batch_size=2048,
        max_batch_tokens=8192,
        auto_truncate=True,
    )

    version: str
    model_id: str | None
    model_type: dict[str, dict[str, str]] | None
    served_model_name: str = ""
    model_dtype: str = ""
    max_input_length: int | None = None
    max_concurrent_requests: int
    max_client_batch_size: int
    max_batch_tokens: int
    auto_truncate: bool


# ---- OpenAI and Cohere ----


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """The vector of a text; base64 has float32, little-endian."""

    object: str
    index: int
    embedding: list[float] | str


class Embeddings(BaseModel):
    """The vectors of texts."""

    model_config = _example(
        object="list",
        data=[{"object": "embedding", "index": 0, "embedding": [0.6, -0.8]}],
        model="all-MiniLM-L6-v2",
        usage={"prompt_tokens": 4, "total_tokens": 4},
    )

    object: str
    data: list[Embedding]
    model: str
    usage: Usage


class ModelList(BaseModel):
    """All models, as OpenAI lists them."""

    object: str
    data: list[JSONObject]


class CohereResult(BaseModel):
    """The place of a document in the request, and its score."""

    index: int
    relevance_score: float | None
    document: JSONObject = {}


class CohereRanking(BaseModel):
    """Documents, best first."""

    model_config = _example(
        object="rerank",
        id="5f3a9c",
        model="reranker",
        results=[{"index": 1, "relevance_score": 0.97}],
        usage={"prompt_tokens": 18, "total_tokens": 18},
        meta={"api_version": {"version": "1"}},
    )

    object: str
    id: str
    model: str
    results: list[CohereResult]
    usage: Usage
    meta: JSONObject


class CohereRankingV2(BaseModel):
    """Documents, best first, in version 2 of Cohere's interface."""

    model_config = _example(
        id="5f3a9c",
        results=[{"index": 1, "relevance_score": 0.97}],
        meta={"api_version": {"version": "2"}},
    )

    id: str
    results: list[CohereResult]
    meta: JSONObject
