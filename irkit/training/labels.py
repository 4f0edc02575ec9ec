"""Scores of a teacher for the documents of training files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Literal

import torch

from irkit.data import Document, Query
from irkit.errors import BadValueError
from irkit.training.data import Record
from irkit.training.data.texts import Texts
from irkit.training.losses.base import Normalization, normalize
from irkit.training.teachers import Array, IndexTeacher, Teacher, score_all, shortest

__all__ = ["label", "resolve"]

_RECORDS = 64  # scored together


def label(
    records: Iterable[Record],
    teacher: Teacher,
    *,
    queries: Texts | None = None,
    corpus: Texts | None = None,
    normalization: Normalization = "none",
) -> Iterator[Record]:
    """Give every document of records the score of a teacher, in the place of any it has.

    Args:
        records: Streamed.
        teacher: See `irkit.training.teachers.load_teacher`.
        queries: Texts of the queries that records have by id only.
        corpus: Texts of the documents that records have by id only; an `IndexTeacher` needs none.
        normalization: Of the scores of each record: as they are; to 0 ... 1; or to mean 0 and variance 1,
            all 0 where they are equal.

    Raises:
        BadValueError: While iterating: a text is missing, or an id for a teacher that goes by ids.

    Examples:
        >>> import tempfile
        >>> from irkit import Retriever
        >>> retriever = Retriever.build("bm25", {"a": "red apple", "b": "blue sky"}, tempfile.mkdtemp())
        >>> records = [Record("q", "red", ("a", "b"))]
        >>> [record.scores for record in label(records, IndexTeacher(retriever), normalization="minmax")]
        [(1.0, 0.0)]
    """
    stream = iter(records)
    while some := list(islice(stream, _RECORDS)):
        asked, documents = zip(*(resolve(record, teacher, queries, corpus) for record in some), strict=True)
        for record, scores in zip(some, score_all(teacher, asked, documents), strict=True):
            yield replace(record, scores=shortest(_normalized(scores, normalization)))


def resolve(
    record: Record, teacher: Teacher, queries: Texts | None, corpus: Texts | None
) -> tuple[Query, list[Document]]:
    """What a teacher is asked about a record; arguments as for `label`.

    Raises:
        BadValueError: A text is missing, or an id for a teacher that goes by ids.
    """
    name = record.query_id or "-"
    query = Query(name, _text(name, queries, "query") if record.query is None else record.query)
    return query, _named(record) if isinstance(teacher, IndexTeacher) else _written(record, corpus)


def _named(record: Record) -> list[Document]:
    if not record.document_ids:
        raise BadValueError(
            f"labelling: query {record.query_id or record.query!r:.60} has documents without ids, which an "
            "index cannot find; take its model as teacher"
        )
    return [Document(name, "") for name in record.document_ids]


def _written(record: Record, texts: Texts | None) -> list[Document]:
    if record.documents is None:
        return [Document(name, _text(name, texts, "document")) for name in record.document_ids]
    return [Document(str(place), text) for place, text in enumerate(record.documents)]


def _text(name: str, texts: Texts | None, what: Literal["query", "document"]) -> str:
    source = "queries" if what == "query" else "corpus"
    if texts is None:
        raise BadValueError(
            f"labelling: {what} {name!r} is given by id only; give {source}, where its text is"
        )
    try:
        return texts[name]
    except KeyError:
        raise BadValueError(
            f"labelling: there is no {what} {name!r} in {getattr(texts, 'source', 'what is given')}; give "
            f"the {source} that the examples are of"
        ) from None


def _normalized(scores: Array, how: Normalization) -> Array:
    values = torch.from_numpy(scores)[None].double()
    return normalize(values, torch.ones_like(values, dtype=torch.bool), how)[0].numpy()
