"""Mine hard negatives: documents that an index ranks high but that are not known to be relevant."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from irkit.config import Config
from irkit.data import Document, Qrels, QueriesLike, Query, parse_queries
from irkit.errors import BadValueError
from irkit.retrieval.retriever import Retriever
from irkit.retrieval.scorer import IndexScorer, Scorer, score_checked
from irkit.retrieval.searching import fetch_lists
from irkit.training.labels import shortest
from irkit.training.training_data import TrainingRow

MINED = 64
"""Queries that are searched and scored together."""


class MiningConfig(Config):
    """Settings of `mine`, named as in sentence-transformers.

    Attributes:
        num_negatives: Maximum number of negatives per query.
        range_min: Number of best results to skip, because they may be relevant without a judgment.
        range_max: Rank after which results are ignored. Documents known to be relevant have no rank.
        max_score: Maximum score of a negative.
        min_score: Minimum score of a negative.
        absolute_margin: Minimum distance of a negative to the score of the worst relevant document.
        relative_margin: The same distance as a share of the magnitude of that score; 0.05 is the TopK-PercPos
            (95 %) of NV-Retriever.
        sampling_strategy: ``"top"`` takes the best candidates, ``"random"`` a random sample of them.
        seed: Seed of the random sample, which depends on the seed and on the id of the query only.
        relevant_grade: Lowest grade of a relevant document; documents with a lower grade above 0 are neither
            relevant nor negatives.

    Source: https://arxiv.org/abs/2407.15831
    """

    num_negatives: int = Field(7, ge=1)
    range_min: int = Field(0, ge=0)
    range_max: int = Field(100, ge=1)
    max_score: float | None = None
    min_score: float | None = None
    absolute_margin: float | None = Field(None, ge=0)
    relative_margin: float | None = Field(None, ge=0)
    sampling_strategy: Literal["top", "random"] = "top"
    seed: int = Field(0, ge=0)
    relevant_grade: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _check_range(self) -> MiningConfig:
        if self.range_max - self.range_min < self.num_negatives:
            raise ValueError(
                f"ranks {self.range_min} to {self.range_max} cannot hold {self.num_negatives} negatives; "
                "widen the range or ask for fewer"
            )
        return self

    @property
    def filters(self) -> bool:
        """Whether bounds or margins of scores decide which documents become negatives."""
        bounds = (self.max_score, self.min_score, self.absolute_margin, self.relative_margin)
        return any(bound is not None for bound in bounds)


class _Judgments(NamedTuple):
    """Judgments of one query.

    Attributes:
        relevant: Ids of the relevant documents, by descending grade.
        excluded: Ids that must not become negatives: all documents with a grade above 0, and the id of the
            query.
    """

    relevant: list[str]
    excluded: set[str]


def mine(
    retriever: Retriever,
    queries: QueriesLike,
    qrels: Qrels,
    config: MiningConfig | None = None,
    *,
    teacher: Scorer | None = None,
    start: int = 0,
) -> Iterator[TrainingRow]:
    """Mine hard negatives for every query that has a relevant document.

    A document does not become a negative if it is known to be relevant, has the text of a relevant document,
    or has the id of the query. Margins and bounds apply to the scores of the teacher, or without one to
    exact scores of the index.

    Args:
        retriever: Any index of the documents.
        queries: Queries, streamed, see `irkit.Retriever.run`; those without a relevant document are skipped.
        qrels: Judgments; the index holds all their relevant documents.
        config: Settings.
        teacher: Scores the documents; the rows hold the scores. If bounds or margins are set, the teacher
            also ranks the candidates. None stores no scores.
        start: Number of rows to skip at the beginning; their queries are neither searched nor scored.

    Returns:
        One row per query, in order: the relevant documents by descending grade, then the negatives, best
        first; fewer than ``num_negatives`` if fewer qualify.

    Raises:
        BadValueError: At once: no query has a relevant document, or the index lacks one.

    Examples:
        >>> import tempfile
        >>> from irkit import Retriever
        >>> texts = {"a": "red apple", "b": "green apple", "c": "apple pie", "d": "blue sky"}
        >>> retriever = Retriever.build("bm25", texts, tempfile.mkdtemp())
        >>> [row] = mine(retriever, {"q": "apple"}, {"q": {"b": 1}}, MiningConfig(num_negatives=2))
        >>> row.document_ids, row.positives
        (('b', 'a', 'c'), 1)
    """
    config = config or MiningConfig()
    # relevant documents of each query, best first, and ids that may not become negatives
    judgments = {}
    for query_id, grades in qrels.items():
        relevant = [doc_id for doc_id, grade in grades.items() if grade >= config.relevant_grade]
        relevant.sort(key=grades.__getitem__, reverse=True)
        if relevant:
            excluded = {query_id, *(doc_id for doc_id, grade in grades.items() if grade > 0)}
            judgments[query_id] = _Judgments(relevant, excluded)
    if not judgments:
        raise BadValueError(
            f"mining negatives: no query has a document judged {config.relevant_grade} or more; expected "
            "judgments of what is relevant"
        )
    # all of them must be in the index
    ids = list(dict.fromkeys(doc_id for item in judgments.values() for doc_id in item.relevant))
    missing = [name for name, row in zip(ids, retriever.documents.find(ids), strict=True) if row < 0]
    if missing:
        raise BadValueError(
            f"mining negatives: {len(missing):,} of {len(ids):,} relevant documents are not in the index, "
            f"such as {missing[0]!r}; index the whole collection, or give judgments of what is in it"
        )
    # mine the queries that have judgments
    items = (query for query in parse_queries(queries) if query.id in judgments)
    return _mine(retriever, islice(items, start, None), judgments, config, teacher)


def _mine(
    retriever: Retriever,
    queries: Iterator[Query],
    judgments: dict[str, _Judgments],
    config: MiningConfig,
    teacher: Scorer | None,
) -> Iterator[TrainingRow]:
    scorer = teacher or IndexScorer(retriever.collection)
    while batch := list(islice(queries, MINED)):
        known = [judgments[query.id] for query in batch]
        find, documents = retriever.documents.find, retriever.documents
        positives = fetch_lists(documents, [find(item.relevant) for item in known])

        # candidates: the ranks of the range, without relevant documents and copies of them
        run = retriever.run(batch, config.range_max + max(len(item.excluded) for item in known))
        ranked = [
            [doc_id for doc_id in run.columns(query.id)[0] if doc_id not in item.excluded]
            for query, item in zip(batch, known, strict=True)
        ]
        candidates = fetch_lists(
            documents, [find(ids[config.range_min : config.range_max]) for ids in ranked]
        )
        for number, relevant in enumerate(positives):
            texts = {document.full_text for document in relevant}
            candidates[number] = [item for item in candidates[number] if item.full_text not in texts]

        # negatives: those within the bounds, then the best or a sample
        scores = None
        if config.filters:
            pairs = zip(positives, candidates, strict=True)
            scores = _score(scorer, batch, [[*relevant, *others] for relevant, others in pairs])
            candidates = [
                _within_bounds(others, relevant, values, config)
                for others, relevant, values in zip(candidates, positives, scores, strict=True)
            ]
        chosen = [
            [*relevant, *_sample(others, query.id, config)]
            for query, relevant, others in zip(batch, positives, candidates, strict=True)
        ]
        if teacher and not scores:
            scores = _score(teacher, batch, chosen)
        for number, (query, items) in enumerate(zip(batch, chosen, strict=True)):
            ids = tuple(document.id for document in items)
            values = tuple(scores[number][doc_id] for doc_id in ids) if teacher and scores else None
            yield TrainingRow(query.id, query.text, ids, scores=values, positives=len(positives[number]))


def _score(scorer: Scorer, queries: list[Query], documents: list[list[Document]]) -> list[dict[str, float]]:
    """Return the scores of the documents of each query, by id."""
    return [
        {document.id: value for document, value in zip(items, shortest(line), strict=True)}
        for items, line in zip(documents, score_checked(scorer, queries, documents), strict=True)
    ]


def _within_bounds(
    candidates: list[Document], positives: list[Document], scores: dict[str, float], config: MiningConfig
) -> list[Document]:
    """Return the candidates whose scores are within the bounds, best first."""
    worst = min(scores[document.id] for document in positives)
    upper = [math.inf if config.max_score is None else config.max_score]
    if config.absolute_margin is not None:
        upper.append(worst - config.absolute_margin)
    if config.relative_margin is not None:  # a share of the magnitude: logits may be negative
        upper.append(worst - abs(worst) * config.relative_margin)
    lower = -math.inf if config.min_score is None else config.min_score
    allowed = (document for document in candidates if lower <= scores[document.id] <= min(upper))
    return sorted(allowed, key=lambda document: -scores[document.id])


def _sample(candidates: list[Document], query_id: str, config: MiningConfig) -> list[Document]:
    if config.sampling_strategy == "top" or len(candidates) <= config.num_negatives:
        return candidates[: config.num_negatives]
    seed = int.from_bytes(hashlib.blake2b(query_id.encode(), digest_size=8).digest(), "little")
    generator = np.random.default_rng([config.seed, seed])
    sample = generator.choice(len(candidates), config.num_negatives, replace=False)
    return [candidates[i] for i in sorted(sample.tolist())]
