"""Formats of training files: how a row of each becomes a `Record`, and how to tell them apart.

A row is a JSON object, or a list: of JSON, or the columns of a tsv file. Strings of a list, and those in
columns of any name, are ids if the dataset has a corpus.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from irkit.errors import BadValueError, IrkitError
from irkit.training.data.record import Record

__all__ = ["ROWS", "Row", "detect", "parse"]

Row: TypeAlias = "dict[str, Any] | list[Any]"

_LABELS = ("label", "labels", "score", "scores")


def parse(row: Row, name: str, ids: bool) -> Record:
    """The record that a row is.

    Args:
        row: An object, or a list.
        name: A key of `ROWS`.
        ids: Whether strings without a name are ids rather than texts.

    Raises:
        BadValueError: The row is not in the format.
        BadTypeError: A text is no string.
    """
    reader = ROWS[name]
    expected = list if reader in _LISTS else dict
    if not isinstance(row, expected):
        shape = "a list or columns" if expected is list else "an object with keys"
        raise BadValueError(f"format {name!r}: expected {shape}, got {row!r:.80}")
    try:
        return reader(row, ids)
    except IrkitError:
        raise
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        problem = f"missing key {error}" if isinstance(error, KeyError) else str(error)
        raise BadValueError(f"format {name!r}: {problem}; got {row!r:.80}") from error


def detect(row: Row) -> str:
    """The format of a row.

    Raises:
        BadValueError: It could be one of two formats.
    """
    if isinstance(row, list):
        if len(row) > 1 and isinstance(row[1], list):
            return "nway"
        return _detect_columns(row) if len(row) == 5 else "tuples"
    keys = set(row)
    for name, marks in _MARKS:
        if marks <= keys:
            return name
    return "columns"


_MARKS: tuple[tuple[str, set[str]], ...] = (
    ("tevatron", {"positive_passages"}),
    ("tevatron", {"positive_document_ids"}),
    ("flagembedding", {"query", "pos", "neg"}),
    ("opensearch", {"query", "pos"}),
    ("opensearch", {"query", "docs"}),
    ("irkit", {"document_ids"}),
    ("irkit", {"query", "documents", "positives"}),
)


def _detect_columns(row: list[Any]) -> str:
    first, last = _numbers(row[:2]), _numbers(row[3:])
    if (
        first
        and last
        and any("." in str(each) for each in row[:2]) == any("." in str(each) for each in row[3:])
    ):
        raise BadValueError(
            f"{row!r:.80} has numbers at both ends; say format: vienna (scores, then ids) or distillation "
            "(ids, then scores)"
        )
    if first and last:
        return "vienna" if any("." in str(each) for each in row[:2]) else "distillation"
    return "vienna" if first else "distillation" if last else "tuples"


def _numbers(values: list[Any]) -> bool:
    try:
        return all(float(value) == float(value) for value in values)
    except (TypeError, ValueError):
        return False


def _irkit(row: dict[str, Any], ids: bool) -> Record:
    """Ours, and PyLate's, whose lists may be written as strings."""
    documents = row.get("documents")
    return Record(
        _name(row.get("query_id", "")),
        row.get("query"),
        _names(_listed(row.get("document_ids") or [])),
        None if documents is None else tuple(_listed(documents)),
        _scores(row.get("scores")),
        row.get("positives", 1),
    )


def _tuples(row: list[Any], ids: bool) -> Record:
    return _record(row[0], row[1:], ids)


def _nway(row: list[Any], ids: bool) -> Record:
    """ColBERTv2: the query, then pairs of a document and its score, the relevant one first."""
    scored = all(len(pair) > 1 for pair in row[1:])
    scores = _scores([pair[1] for pair in row[1:]]) if scored else None
    return _record(row[0], [pair[0] for pair in row[1:]], ids, scores)


def _vienna(row: list[Any], ids: bool) -> Record:
    positive, negative, query, *documents = row
    return _record(query, documents, ids, _scores([positive, negative]))


def _distillation(row: list[Any], ids: bool) -> Record:
    query, positive, negative, *scores = row
    return _record(query, [positive, negative], ids, _scores(scores))


def _flagembedding(row: dict[str, Any], ids: bool) -> Record:
    positive, negative = _texts(row["pos"]), _texts(row.get("neg") or [])
    scores = None
    if row.get("pos_scores") and (row.get("neg_scores") or not negative):
        scores = _scores([*row["pos_scores"], *(row.get("neg_scores") or [])])
    return Record("", row["query"], (), (*positive, *negative), scores, len(positive))


def _opensearch(row: dict[str, Any], ids: bool) -> Record:
    if "docs" in row:  # ordered by nothing
        return Record("", row["query"], (), _texts(row["docs"]), _scores(row.get("scores")), 0)
    positive = _texts(row["pos"])
    return Record("", row["query"], (), (*positive, *_texts(row.get("negs") or [])), None, len(positive))


def _tevatron(row: dict[str, Any], ids: bool) -> Record:
    query_id, query = _name(row.get("query_id", "")), row.get("query_text", row.get("query"))
    if "positive_document_ids" in row:
        positive, negative = row["positive_document_ids"], row.get("negative_document_ids") or []
        return Record(query_id, query or None, _names([*positive, *negative]), positives=len(positive))
    positive, negative = row["positive_passages"], row.get("negative_passages") or []
    passages = [*positive, *negative]
    names = _names(passage["docid"] for passage in passages) if all("docid" in p for p in passages) else ()
    texts = tuple(f"{passage.get('title') or ''} {passage['text']}".strip() for passage in passages)
    return Record(query_id, query, names, texts, positives=len(positive))


def _columns(row: dict[str, Any], ids: bool) -> Record:
    """sentence-transformers: columns count by position, but for a label.

    One label of two texts says how alike they are; one of a triple is the margin of the scores, and so is
    a list with one number less than there are documents.
    """
    label = next((row[name] for name in _LABELS if name in row), None)
    texts: list[Any] = []
    for name, value in row.items():
        if name not in _LABELS:
            texts += value if isinstance(value, list | tuple) else [value]
    count = len(texts) - 1
    if label is None:
        return _record(texts[0], texts[1:], ids)
    labels = list(_scores(_listed(label) if isinstance(label, list | tuple | str) else [label]) or ())
    if len(labels) == count - 1:
        labels = [0.0, *(-margin for margin in labels)]
    positives = 1 if count > 1 or labels[0] > 0 else 0
    return _record(texts[0], texts[1:], ids, tuple(labels), positives)


def _record(
    query: Any,
    documents: Iterable[Any],
    ids: bool,
    scores: tuple[float, ...] | None = None,
    positives: int = 1,
) -> Record:
    if ids:
        return Record(_name(query), None, _names(documents), None, scores, positives)
    texts = tuple(documents)
    if any(type(each) is int for each in (query, *texts)):
        raise BadValueError(
            "expected texts, got numbers; where they are ids, give corpus: where the texts are"
        )
    return Record("", query, (), texts, scores, positives)


def _name(value: Any) -> Any:
    return str(value) if type(value) is int else value or ""


def _names(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(map(_name, values))


def _texts(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _listed(value: Any) -> Iterable[Any]:
    if not isinstance(value, str):
        return list(value)
    try:
        found = ast.literal_eval(value)  # literals only: nothing is run
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise BadValueError(f"expected a list, also written as a string, got {value!r:.60}") from error
    return list(found) if isinstance(found, list | tuple) else [found]


def _scores(values: Any) -> tuple[float, ...] | None:
    if values is None:
        return None
    try:
        return tuple(float(value) for value in _listed(values))
    except (TypeError, ValueError) as error:
        raise BadValueError(f"expected numbers as scores, got {values!r:.60}") from error


ROWS: dict[str, Callable[[Any, bool], Record]] = {
    "columns": _columns,
    "distillation": _distillation,
    "flagembedding": _flagembedding,
    "irkit": _irkit,
    "nway": _nway,
    "opensearch": _opensearch,
    "tevatron": _tevatron,
    "tuples": _tuples,
    "vienna": _vienna,
}
"""Readers of a row by format: they take the row, and whether its strings are ids."""

_LISTS = (_distillation, _nway, _tuples, _vienna)
