"""What the routes answer, as OpenAPI shows it. The routes themselves write JSON without these models."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

JSONObject = dict[str, Any]


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

    facets: dict[str, list[Count]]
    documents: int


class Found(Ranked):
    """The results of a search, and the number of documents of the index."""

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

    added: int = 0
    updated: int = 0
    removed: int = 0
    documents: int


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

    object: str
    id: str
    model: str
    results: list[CohereResult]
    usage: Usage
    meta: JSONObject
