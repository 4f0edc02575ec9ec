"""Convert what a `Client` sends to JSON, and what a server answers to objects of the library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from irkit.arguments import brief
from irkit.data import Document
from irkit.errors import BadValueError
from irkit.index.filters import as_json, parse_filter
from irkit.retrieval.explanation import Explanation, Match
from irkit.retrieval.searching import Filter, Hit
from irkit.retrieval.windows import Passage
from irkit.tokenizer import TokenSpan


def to_hits(result: Mapping[str, Any]) -> list[Hit]:
    """Return the hits of a result, see `irkit.serve.answers.Result`."""
    names = ("id", "score", "text", "title", "metadata")
    return [
        Hit(**{name: hit[name] for name in names}, passage=_passage(hit.get("passage")))
        for hit in result["hits"]
    ]


def _passage(answer: dict[str, int] | None) -> Passage | None:
    return None if answer is None else Passage(answer["start"], answer["end"])


def plain(value: Any) -> Any:
    """Convert a value for JSON: arrays and other iterables become lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):  # RM3
        return asdict(value)
    is_plain = value is None or isinstance(value, str | int | float | Mapping)
    return value if is_plain else [plain(item) for item in value]


def plain_filter(filter: Filter | None) -> Any:
    """Convert a filter for JSON.

    Raises:
        BadValueError: It is no filter.
    """
    if filter is None:
        return None
    if not isinstance(filter, Mapping):
        return list(filter)
    parse_filter(filter)  # refuses what is no filter before it is sent
    return json.loads(as_json(filter))


def to_explanation(answer: Mapping[str, Any]) -> Explanation:
    """Return the explanation that an answer describes, see `irkit.serve.answers.Explained`."""
    query, document = answer["query"], answer["document"]
    if answer["part"] == "passages":  # of a dense model
        whole = TokenSpan(query, 0, len(query))
        places = [(item["start"], item["end"], item["score"]) for item in answer["passages"]]
        matches = tuple(
            Match(whole, TokenSpan(document[start:end], start, end), score) for start, end, score in places
        )
    else:
        matches = tuple(
            Match(
                TokenSpan(**match["query"]),
                TokenSpan(**match["document"]),
                match["score"],
                tuple(match["weights"]) if "weights" in match else None,
                tuple(TokenSpan(**span) for span in match.get("repeats", ())),
            )
            for match in answer["matches"]
        )
    score = float("-inf") if answer["score"] is None else answer["score"]
    parts = {name: to_explanation(part) for name, part in answer.get("parts", {}).items()}
    return Explanation(query, document, score, matches, parts)


def with_ids(documents: Any) -> Any:
    """Return documents in the form that was given; a listed one without an id is refused when it is read."""
    is_listed = isinstance(documents, Iterable) and not isinstance(documents, str | Path | Mapping)
    if not is_listed or hasattr(documents, "columns"):  # a table, which parse_documents refuses
        return documents
    return map(_with_id, documents)


def _with_id(item: Any) -> Any:
    if isinstance(item, str | list) or hasattr(item, "shape"):
        raise BadValueError(
            f"changing documents: got {brief(item)}, expected a document with an id, which a Client does not "
            "number; give (id, text), a record or a Document"
        )
    return item


def to_record(document: Document) -> dict[str, Any]:
    """Convert a document for JSON."""
    record = {"id": document.id, "text": document.text, "title": document.title}
    return record | {"metadata": dict(document.metadata), "vector": plain(document.vector)}
