"""What the routes of search and documents take, as OpenAPI shows it. Unknown keys are refused."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from irkit.evaluation.fusion import Method

T = TypeVar("T")


def _check_weights(value: Any) -> Any:
    """Refuse weights at the first wrong one; pydantic would describe each of them."""
    weights = value.values() if isinstance(value, dict) else ()
    if not all(type(weight) in (int, float) and abs(weight) <= sys.float_info.max for weight in weights):
        raise ValueError("expected weights that are finite numbers")
    return value


Many = Annotated[list[T], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: a large body could have millions, each with an error."""
Weights = Annotated[dict[str, float], BeforeValidator(_check_weights)]
Content = str | Weights | Many[float] | Many[Many[float]]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Message(BaseModel):
    """Base of all messages. Numbers and booleans are not made from other types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ForeignMessage(BaseModel):
    """Base of the messages of other services: unknown keys are ignored, as those services ignore them."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Fuse(Message):
    """Search further indexes too, and fuse the results, see `irkit.Hybrid`."""

    indexes: Many[str] = Field(min_length=1, max_length=8, description="Names of the other indexes.")
    method: Method = "rrf"
    weights: Many[float] | None = Field(None, description="Weight of this index and of the others.")
    depth: int = Field(100, ge=1, description="Hits of each index that are fused.")


class Rerank(Message):
    """Rank the best hits again by exact scores."""

    by: str = Field(description="Index, by its stored vectors; or model, by the texts.")
    depth: int = Field(100, ge=1, description="Hits that are ranked again.")


class Feedback(Message):
    """Expand queries of BM25 by terms of the documents found first, see `irkit.encoder_free.RM3`."""

    documents: int = Field(10, ge=1, le=1000, description="Documents found first that count as relevant.")
    terms: int = Field(10, ge=1, le=1000, description="Terms that are added.")
    weight: float = Field(0.5, ge=0, le=1, description="Weight of the original query.")


class Selection(Message):
    """Which hits of a ranking are returned, and what of their documents."""

    offset: int = Field(0, ge=0, description="Hits to skip.")
    threshold: float | None = Field(None, description="Lowest score.")
    group_by: str | None = Field(None, description="Key of metadata: a few hits of each value.")
    per_group: int = Field(1, ge=1, description="Hits of each value of group_by.")
    fields: Annotated[Many[str] | None, BeforeValidator(_as_list, str | list[str] | None)] = Field(
        None, description="title, text, metadata, metadata.KEY: one or several; null is all."
    )


class SearchRequest(Selection):
    """A search for one query or several."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"queries": "which animals hibernate", "k": 3},
                {"queries": ["bears", "moon"], "filter": {"year": {">=": 2000}}, "fields": ["title"]},
            ]
        }
    )

    queries: str | Weights | Many[Content] = Field(
        description="A text or several; vectors or weights of terms where the index has such."
    )
    k: int = Field(10, ge=1, description="Hits of each query.")
    filter: dict[str, Any] | Many[str] | None = Field(None, description="Conditions on metadata, or ids.")
    feedback: Feedback | None = Field(None, description="Of an index of BM25: expand the queries.")
    facets: Many[str] = Field([], max_length=16, description="Keys to count, over all that meet the filter.")
    facet_k: int = Field(10, ge=1, le=1000)
    highlights: bool = Field(False, description="Where words of the query are in the text.")
    snippet: bool = Field(
        False, description="The best passage of each text, and where it has words of the query."
    )
    explain: bool = Field(False, description="Explain each hit; k is at most 20 then.")
    fuse: Fuse | Literal["rrf"] | Weights | None = Field(
        None,
        description="Other indexes to search, too. Or, of an index of several representations, how their "
        "hits are fused: rrf, the default, or weights by head.",
    )
    rerank: Rerank | None = None
    partial: bool = Field(
        False, description="Answer without shards that do not answer, and name them; else that is an error."
    )
    stream: bool = Field(False, description="One line of JSON for each hit.")


class RerankRequest(Selection):
    """Documents of the index to rank for each query."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"queries": ["which animals hibernate"], "ids": [["moon", "bears"]]}]}
    )

    queries: Many[str]
    ids: Many[Many[str]] = Field(description="Ids of documents, for each query.")
    k: int | None = Field(None, ge=1, description="Hits of each query; null is all.")
    fuse: Weights | None = Field(
        None, description="Of an index of several representations: weights by head; by default all weigh 1."
    )


class DocumentMessage(Message):
    """A document."""

    id: str = Field(min_length=1)
    text: str = ""
    title: str = ""
    metadata: dict[str, Any] = {}
    vector: Weights | Many[float] | Many[Many[float]] | None = None


class DocumentsRequest(Message):
    """Documents to add, or to put in the place of documents of the same ids."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"documents": [{"id": "owls", "text": "Owls hunt at night.", "metadata": {"year": 2020}}]}
            ]
        }
    )

    documents: Many[DocumentMessage] = Field(min_length=1)


class RemoveRequest(Message):
    """Ids of documents to remove."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"ids": ["owls"]}]})

    ids: Many[str] = Field(min_length=1)


class ExplainRequest(Message):
    """A query, and a document of the index or another one."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"query": "which animals hibernate", "id": "bears"}]}
    )

    query: str | Weights
    id: str | None = Field(None, description="Id of a document of the index.")
    document: DocumentMessage | None = Field(None, description="A document that need not be in the index.")


class FacetsRequest(Message):
    """Keys of metadata whose values are counted."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"keys": ["year"], "k": 3}]})

    keys: Many[str] = Field(min_length=1, max_length=16)
    filter: dict[str, Any] | Many[str] | None = None
    k: int = Field(10, ge=1, le=1000)
