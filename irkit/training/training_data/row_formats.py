"""Rows of training data: a `TrainingRow`, how a row of each file format becomes one, and how to write it.

A row is a JSON object or a list; the columns of a tsv file are a list, too. In lists, and in objects with
keys of any name, strings are ids if the dataset has a corpus.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from irkit.errors import BadTypeError, BadValueError, IrkitError
from irkit.utils.atomic import replacing

Row: TypeAlias = "dict[str, Any] | list[Any]"

_LABELS = ("label", "labels", "score", "scores")


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A query with documents: the row has each as a text or as an id.

    Args:
        query_id: Id of the query; may be empty if the row has its text.
        query: Text of the query; None to look it up by id.
        document_ids: Ids of the documents, the relevant ones first; may be empty if the row has their texts.
        documents: Texts of the documents; None to look them up by id.
        scores: Score of a teacher for each document; None without a teacher.
        positives: How many of the first documents are known to be relevant.

    Raises:
        BadValueError: The row has no documents, the query has neither id nor text, or numbers do not match.
        BadTypeError: An id or a text is not a string.

    Examples:
        >>> TrainingRow("q1", document_ids=("d7", "d3"), scores=(0.9, 0.2)).positives
        1
    """

    query_id: str
    query: str | None = None
    document_ids: tuple[str, ...] = ()
    documents: tuple[str, ...] | None = None
    scores: tuple[float, ...] | None = None
    positives: int = 1

    def __post_init__(self) -> None:
        for text in (self.query_id, self.query or "", *self.document_ids, *(self.documents or ())):
            if not isinstance(text, str):
                raise BadTypeError(f"expected a string as id or text, got {text!r:.60}")
        if not self.query_id and self.query is None:
            raise BadValueError("the query has neither id nor text")
        n = len(self)
        if not n or "" in self.document_ids:
            raise BadValueError("a document has an empty id" if n else "there are no documents")
        if type(self.positives) is not int or not 0 <= self.positives <= n:
            raise BadValueError(f"{self.positives!r} of {n} documents are relevant; expected 0 to {n}")
        for name, values in (("ids", self.document_ids or None), ("scores", self.scores)):
            if values is not None and len(values) != n:
                raise BadValueError(f"{len(values)} {name} of {n} documents; expected one of each")
        for score in self.scores or ():
            if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
                raise BadValueError(f"expected finite numbers as scores, got {score!r:.60}")

    @property
    def names(self) -> tuple[str, ...]:
        """Ids of the documents, or their texts if they have no ids."""
        return self.document_ids or self.documents or ()

    def __len__(self) -> int:
        return len(self.document_ids if self.documents is None else self.documents)


def to_line(row: TrainingRow) -> str:
    r"""Return a row as one line of JSON with its line break, which `read_training_rows` reads back exactly.

    Examples:
        >>> to_line(TrainingRow("q1", document_ids=("d1", "d2")))
        '{"query_id": "q1", "document_ids": ["d1", "d2"], "positives": 1}\n'
    """
    values = {
        "query_id": row.query_id or None,
        "query": row.query,
        "document_ids": row.document_ids or None,
        "documents": row.documents,
        "positives": row.positives,
        "scores": row.scores,
    }
    return json.dumps({name: v for name, v in values.items() if v is not None}, ensure_ascii=False) + "\n"


def write_examples(path: str | Path, rows: Iterable[TrainingRow]) -> int:
    """Write rows, one JSON object per line; the file appears whole or not at all.

    Returns:
        The number of rows.

    Raises:
        StorageError: The file cannot be written.
    """
    count = 0
    with replacing(path) as aside, aside.open("w", encoding="utf-8") as stream:
        for count, row in enumerate(rows, 1):  # noqa: B007
            stream.write(to_line(row))
    return count


def parse(row: Row, name: str, ids: bool) -> TrainingRow:
    """Parse a row.

    Args:
        row: An object or a list.
        name: A key of `ROWS`.
        ids: Whether strings without a name are ids rather than texts.

    Raises:
        BadValueError: The row is not in the format.
        BadTypeError: A text is not a string.
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
    """Detect the format of a row.

    Raises:
        BadValueError: The row fits two formats.
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


def name_parts(row: Row, format: str, header: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Return which columns or keys of a row hold the query, the relevant document, others and scores.

    Args:
        row: An object or a list.
        format: A key of `ROWS`.
        header: Names of the columns of a list; without them, the columns are numbered from 1.

    Examples:
        >>> name_parts({"anchor": "a", "positive": "b", "label": 1}, "columns")
        {'query': ['anchor'], 'relevant': ['positive'], 'scores': ['label']}
    """
    if isinstance(row, dict) and format != "columns":
        pairs = [(_KEYS[name], name) for name in row if name in _KEYS]
    else:
        if isinstance(row, dict):
            names, scores = list(row), {name for name in row if name in _LABELS}
        else:
            names = list(header or (f"column {number}" for number in range(1, len(row) + 1)))
            scores = set(names[_SCORE_COLUMNS.get(format, slice(0))])
        texts = [name for name in names if name not in scores]
        parts = ["query", "relevant", *["others"] * len(texts)]
        pairs = [*zip(parts, texts, strict=False), *(("scores", name) for name in names if name in scores)]
    columns: dict[str, list[str]] = {}
    for part, name in pairs:
        columns.setdefault(part, []).append(name)
    return columns


_SCORE_COLUMNS = {"vienna": slice(2), "distillation": slice(3, 5)}
"""Columns of formats of lists that hold scores."""

_KEYS = {
    "query": "query",
    "query_text": "query",
    "query_id": "query",
    "documents": "documents",
    "document_ids": "documents",
    "docs": "documents",
    "pos": "relevant",
    "positive_passages": "relevant",
    "positive_document_ids": "relevant",
    "neg": "others",
    "negs": "others",
    "negative_passages": "others",
    "negative_document_ids": "others",
    "scores": "scores",
    "pos_scores": "scores",
    "neg_scores": "scores",
}
"""The part of a row that each key holds, in formats whose keys have fixed names."""


def _detect_columns(row: list[Any]) -> str:
    """Tell apart formats of five columns: scores are numbers, with points if ids are numbers, too."""
    first, last = _are_numbers(row[:2]), _are_numbers(row[3:])
    if first and last:
        first, last = ("." in "".join(map(str, values)) for values in (row[:2], row[3:]))
        if first == last:
            raise BadValueError(
                f"{row!r:.80} has numbers at both ends; say format: vienna (scores, then ids) or "
                "distillation (ids, then scores)"
            )
    return "vienna" if first else "distillation" if last else "tuples"


def _are_numbers(values: list[Any]) -> bool:
    try:
        return all(float(value) == float(value) for value in values)
    except (TypeError, ValueError):
        return False


def _irkit(row: dict[str, Any], ids: bool) -> TrainingRow:
    """Parse irkit's format, and PyLate's, which may have lists written as strings."""
    documents = row.get("documents")
    return TrainingRow(
        _id(row.get("query_id", "")),
        row.get("query"),
        _ids(_parse_list(row.get("document_ids") or [])),
        None if documents is None else tuple(_parse_list(documents)),
        _scores(row.get("scores")),
        row.get("positives", 1),
    )


def _tuples(row: list[Any], ids: bool) -> TrainingRow:
    return _make_row(row[0], row[1:], ids)


def _nway(row: list[Any], ids: bool) -> TrainingRow:
    """Parse ColBERTv2's format: a query, then pairs of a document and its score, the relevant one first."""
    scored = all(len(pair) > 1 for pair in row[1:])
    scores = _scores([pair[1] for pair in row[1:]]) if scored else None
    return _make_row(row[0], [pair[0] for pair in row[1:]], ids, scores)


def _vienna(row: list[Any], ids: bool) -> TrainingRow:
    positive, negative, query, *documents = row
    return _make_row(query, documents, ids, _scores([positive, negative]))


def _distillation(row: list[Any], ids: bool) -> TrainingRow:
    query, positive, negative, *scores = row
    return _make_row(query, [positive, negative], ids, _scores(scores))


def _flagembedding(row: dict[str, Any], ids: bool) -> TrainingRow:
    positive, negative = _texts(row["pos"]), _texts(row.get("neg") or [])
    scores = None
    if row.get("pos_scores") and (row.get("neg_scores") or not negative):
        scores = _scores([*row["pos_scores"], *(row.get("neg_scores") or [])])
    return TrainingRow("", row["query"], (), (*positive, *negative), scores, len(positive))


def _opensearch(row: dict[str, Any], ids: bool) -> TrainingRow:
    if "docs" in row:  # in no order: none is known to be relevant
        return TrainingRow("", row["query"], (), _texts(row["docs"]), _scores(row.get("scores")), 0)
    positive = _texts(row["pos"])
    return TrainingRow("", row["query"], (), (*positive, *_texts(row.get("negs") or [])), None, len(positive))


def _tevatron(row: dict[str, Any], ids: bool) -> TrainingRow:
    query_id, query = _id(row.get("query_id", "")), row.get("query_text", row.get("query"))
    if "positive_document_ids" in row:
        positive, negative = row["positive_document_ids"], row.get("negative_document_ids") or []
        return TrainingRow(query_id, query or None, _ids([*positive, *negative]), positives=len(positive))
    positive, negative = row["positive_passages"], row.get("negative_passages") or []
    passages = [*positive, *negative]
    names = _ids(passage["docid"] for passage in passages) if all("docid" in p for p in passages) else ()
    texts = tuple(f"{passage.get('title') or ''} {passage['text']}".strip() for passage in passages)
    return TrainingRow(query_id, query, names, texts, positives=len(positive))


def _columns(row: dict[str, Any], ids: bool) -> TrainingRow:
    """Parse sentence-transformers' format: columns count by position, except for a label.

    The label of a pair of texts says how similar they are. The label of a triple is the margin between the
    scores of its documents. A list with one number less than documents holds margins, too.
    """
    label = next((row[name] for name in _LABELS if name in row), None)
    texts: list[Any] = []
    for name, value in row.items():
        if name not in _LABELS:
            texts += value if isinstance(value, list | tuple) else [value]
    count = len(texts) - 1
    if label is None:
        return _make_row(texts[0], texts[1:], ids)
    labels = list(_scores(_parse_list(label) if isinstance(label, list | tuple | str) else [label]) or ())
    if len(labels) == count - 1:
        labels = [0.0, *(-margin for margin in labels)]
    positives = 1 if count > 1 or labels[0] > 0 else 0
    return _make_row(texts[0], texts[1:], ids, tuple(labels), positives)


def _make_row(
    query: Any,
    documents: Iterable[Any],
    ids: bool,
    scores: tuple[float, ...] | None = None,
    positives: int = 1,
) -> TrainingRow:
    if ids:
        return TrainingRow(_id(query), None, _ids(documents), None, scores, positives)
    texts = tuple(documents)
    if any(type(text) is int for text in (query, *texts)):
        raise BadValueError(
            "expected texts, got numbers; where they are ids, give corpus: where the texts are"
        )
    return TrainingRow("", query, (), texts, scores, positives)


def _id(value: Any) -> Any:
    return str(value) if type(value) is int else value or ""


def _ids(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(map(_id, values))


def _texts(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _parse_list(value: Any) -> Iterable[Any]:
    if not isinstance(value, str):
        return list(value)
    try:
        values = ast.literal_eval(value)  # literals only: nothing is run
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise BadValueError(f"expected a list, also written as a string, got {value!r:.60}") from error
    return list(values) if isinstance(values, list | tuple) else [values]


def _scores(values: Any) -> tuple[float, ...] | None:
    if values is None:
        return None
    try:
        return tuple(float(value) for value in _parse_list(values))
    except (TypeError, ValueError) as error:
        raise BadValueError(f"expected numbers as scores, got {values!r:.60}") from error


ROWS: dict[str, Callable[[Any, bool], TrainingRow]] = {
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
"""Parsers of a row by format: they take the row, and whether its strings are ids."""

_LISTS = (_distillation, _nway, _tuples, _vienna)
