"""Label training rows: score their documents by a teacher."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Literal

import numpy as np
import torch

from irkit.arguments import check_counts
from irkit.data import Document, Query
from irkit.errors import BadValueError
from irkit.retrieval.scorer import Array, IndexScorer, Scorer, score_checked
from irkit.training.losses.loss import Normalization, normalize
from irkit.training.training_data import TrainingRow
from irkit.training.training_data.text_store import Texts

LABELLED = 64
"""Rows that are scored together."""


def label(
    rows: Iterable[TrainingRow],
    teacher: Scorer,
    *,
    queries: Texts | None = None,
    corpus: Texts | None = None,
    normalization: Normalization = "none",
    batch_size: int = LABELLED,
) -> Iterator[TrainingRow]:
    """Give every document of training rows the score of a teacher, which replaces an existing score.

    Args:
        rows: Training rows, streamed.
        teacher: A scorer, see `irkit.training.teachers.load_teacher`.
        queries: Texts of the queries that rows name by id.
        corpus: Texts of the documents that rows name by id; an `irkit.retrieval.scorer.IndexScorer` needs
            none.
        normalization: Normalize the scores of each row: not at all; to 0 ... 1; or to mean 0 and variance 1.
            Equal scores become 0.
        batch_size: Number of rows scored together.

    Raises:
        BadValueError: While iterating: a text is missing, or a document has no id for an index.

    Examples:
        >>> import tempfile
        >>> from irkit import Retriever
        >>> retriever = Retriever.build("bm25", {"a": "red apple", "b": "blue sky"}, tempfile.mkdtemp())
        >>> rows = [TrainingRow("q", "red", ("a", "b"))]
        >>> scorer = IndexScorer(retriever.collection)
        >>> [row.scores for row in label(rows, scorer, normalization="minmax")]
        [(1.0, 0.0)]
    """
    check_counts("labelling", batch_size=batch_size)
    stream = iter(rows)
    while batch := list(islice(stream, batch_size)):
        items, documents = zip(*(resolve(row, teacher, queries, corpus) for row in batch), strict=True)
        for row, scores in zip(batch, score_checked(teacher, items, documents), strict=True):
            values = torch.from_numpy(scores)[None].double()
            mask = torch.ones_like(values, dtype=torch.bool)
            yield replace(row, scores=shortest(normalize(values, mask, normalization)[0].numpy()))


def resolve(
    row: TrainingRow, teacher: Scorer, queries: Texts | None, corpus: Texts | None
) -> tuple[Query, list[Document]]:
    """Return the query and the documents of a row, for a teacher; arguments as for `label`.

    Raises:
        BadValueError: A text is missing, or a document has no id for an index.
    """
    query_id = row.query_id or "-"
    query = Query(query_id, _find_text(query_id, queries, "query") if row.query is None else row.query)
    if isinstance(teacher, IndexScorer):  # reads ids, not texts
        if not row.document_ids:
            raise BadValueError(
                f"labelling: query {row.query_id or row.query!r:.60} has documents without ids, which an "
                "index cannot find; take its model as teacher"
            )
        return query, [Document(name, "") for name in row.document_ids]
    if row.documents is None:
        return query, [Document(name, _find_text(name, corpus, "document")) for name in row.document_ids]
    return query, [Document(str(position), text) for position, text in enumerate(row.documents)]


def _find_text(name: str, texts: Texts | None, kind: Literal["query", "document"]) -> str:
    source = "queries" if kind == "query" else "corpus"
    if texts is None:
        raise BadValueError(
            f"labelling: {kind} {name!r} is given by id only; give {source}, where its text is"
        )
    try:
        return texts[name]
    except KeyError:
        raise BadValueError(
            f"labelling: there is no {kind} {name!r} in {getattr(texts, 'source', 'what is given')}; give "
            f"the {source} that the examples are of"
        ) from None


def shortest(scores: Array) -> tuple[float, ...]:
    """Round scores for a file: to the fewest digits that read back as the same float32."""
    return tuple(float(value) for value in scores.astype(np.float32).astype(str))
