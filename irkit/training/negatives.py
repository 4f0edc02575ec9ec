"""Hard negatives: documents that an index ranks high for a query and that are not known to be relevant."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from irkit.config import Config
from irkit.data import Document, Qrels, Query
from irkit.data.given import Queries, given_queries
from irkit.errors import BadValueError
from irkit.retriever import Retriever
from irkit.training.data import Record
from irkit.training.teachers import IndexTeacher, Teacher, score_all, shortest

__all__ = ["MiningConfig", "mine"]

_QUERIES = 64  # searched and scored together


class MiningConfig(Config):
    """Which documents become negatives; the names are those of sentence-transformers.

    Attributes:
        num_negatives: Of each query, at most.
        range_min: The best so many results are passed over: the likeliest to be relevant unjudged.
        range_max: The results after so many are passed over. What is known to be relevant has no rank.
        max_score: Negatives score at most this.
        min_score: Negatives score at least this.
        absolute_margin: Negatives score at least so much less than the worst relevant document.
        relative_margin: The same as a share of the magnitude of that document's score; 0.05 is the
            TopK-PercPos (95 %) of NV-Retriever.
        sampling_strategy: ``"top"``, the best that are left, or ``"random"`` ones of them.
        seed: Of random ones; the choice for a query depends on it and on the id of the query only.
        relevant_grade: Documents judged this or more are relevant; others judged above 0 become neither.

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
        """Whether scores decide on what becomes a negative."""
        bounds = (self.max_score, self.min_score, self.absolute_margin, self.relative_margin)
        return any(bound is not None for bound in bounds)


class _Known(NamedTuple):
    """What is known of a query: documents to train on, and all that must not become a negative."""

    relevant: list[str]
    judged: set[str]


def mine(
    retriever: Retriever,
    queries: Queries,
    qrels: Qrels,
    config: MiningConfig | None = None,
    *,
    teacher: Teacher | None = None,
    start: int = 0,
) -> Iterator[Record]:
    """Mine hard negatives for every query that has a relevant document.

    No document known to be relevant becomes a negative, nor one of the same text or with the id of the query.
    Margins and bounds are on the scores of the teacher, or without one on exact scores of the index.

    Args:
        retriever: Any index of the documents.
        queries: Streamed, see `Retriever.run`; those without a relevant document are passed over.
        qrels: Judgments, all of whose relevant documents are in the index.
        config: Which documents become negatives.
        teacher: Its scores are kept in the records; where scores decide, the best are those it finds best.
        start: How many records to leave out at the beginning, of queries that are neither searched nor
            scored.

    Returns:
        A record a query, in their order: the relevant documents in the order of their grades, then negatives,
        best first; of these fewer than asked for where fewer qualify.

    Raises:
        BadValueError: At once: no query has a relevant document, or one of these is not in the index.

    Examples:
        >>> import tempfile
        >>> from irkit import Retriever
        >>> texts = {"a": "red apple", "b": "green apple", "c": "apple pie", "d": "blue sky"}
        >>> retriever = Retriever.build("bm25", texts, tempfile.mkdtemp())
        >>> [record] = mine(retriever, {"q": "apple"}, {"q": {"b": 1}}, MiningConfig(num_negatives=2))
        >>> record.document_ids, record.positives
        (('b', 'a', 'c'), 1)
    """
    config = config or MiningConfig()
    known = {query: _known(grades, config.relevant_grade) for query, grades in qrels.items()}
    known = {query: found for query, found in known.items() if found.relevant}
    if not known:
        raise BadValueError(
            f"mining negatives: no query has a document judged {config.relevant_grade} or more; expected "
            "judgments of what is relevant"
        )
    _check_relevant(retriever, known)
    chosen = (query for query in given_queries(queries) if query.id in known)
    return _mine(retriever, islice(chosen, start, None), known, config, teacher)


def _known(grades: dict[str, int], relevant_grade: int) -> _Known:
    relevant = sorted(
        (doc for doc, grade in grades.items() if grade >= relevant_grade), key=lambda doc: -grades[doc]
    )
    return _Known(relevant, {doc for doc, grade in grades.items() if grade > 0})


def _check_relevant(retriever: Retriever, known: dict[str, _Known]) -> None:
    names = list(dict.fromkeys(doc for found in known.values() for doc in found.relevant))
    missing = [name for name, row in zip(names, retriever.documents.find(names), strict=True) if row < 0]
    if missing:
        raise BadValueError(
            f"mining negatives: {len(missing):,} of {len(names):,} relevant documents are not in the index, "
            f"such as {missing[0]!r}; index the whole collection, or give judgments of what is in it"
        )


def _mine(
    retriever: Retriever,
    queries: Iterator[Query],
    known: dict[str, _Known],
    config: MiningConfig,
    teacher: Teacher | None,
) -> Iterator[Record]:
    judge = teacher or IndexTeacher(retriever)
    while some := list(islice(queries, _QUERIES)):
        facts = [known[query.id] for query in some]
        positives = _fetch(retriever, [fact.relevant for fact in facts])
        candidates = _candidates(retriever, some, facts, positives, config)
        scores = None
        if config.filters:
            scores = _scores(judge, some, [[*a, *b] for a, b in zip(positives, candidates, strict=True)])
            candidates = [
                _filtered(found, relevant, values, config)
                for found, relevant, values in zip(candidates, positives, scores, strict=True)
            ]
        chosen = [
            [*relevant, *_sampled(found, query.id, config)]
            for query, relevant, found in zip(some, positives, candidates, strict=True)
        ]
        if teacher and not scores:
            scores = _scores(teacher, some, chosen)
        for place, (query, documents) in enumerate(zip(some, chosen, strict=True)):
            ids = tuple(document.id for document in documents)
            kept = tuple(scores[place][name] for name in ids) if teacher and scores else None
            yield Record(query.id, query.text, ids, scores=kept, positives=len(positives[place]))


def _scores(judge: Teacher, queries: list[Query], documents: list[list[Document]]) -> list[dict[str, float]]:
    """By the id of the document."""
    return [
        {document.id: value for document, value in zip(some, shortest(line), strict=True)}
        for some, line in zip(documents, score_all(judge, queries, documents), strict=True)
    ]


def _fetch(retriever: Retriever, ids: Sequence[Sequence[str]]) -> list[list[Document]]:
    """Documents of the ids of each query; each is read once."""
    names = list({name for some in ids for name in some})
    known = dict(zip(names, retriever.documents.fetch(retriever.documents.find(names)), strict=True))
    return [[known[name] for name in some] for some in ids]


def _candidates(
    retriever: Retriever,
    queries: list[Query],
    facts: list[_Known],
    positives: list[list[Document]],
    config: MiningConfig,
) -> list[list[Document]]:
    """What the index ranks in the range, without what is relevant as far as known."""
    spare = max(len(fact.judged) for fact in facts) + 1  # and a document with the id of the query
    run = retriever.run(queries, config.range_max + spare)
    ranked = [
        [name for name, _ in run[query.id] if name not in fact.judged and name != query.id]
        for query, fact in zip(queries, facts, strict=True)
    ]
    documents = _fetch(retriever, [names[config.range_min : config.range_max] for names in ranked])
    texts = [{document.full_text for document in some} for some in positives]
    return [
        [document for document in some if document.full_text not in same]
        for some, same in zip(documents, texts, strict=True)
    ]


def _filtered(
    documents: list[Document], positives: list[Document], scores: dict[str, float], config: MiningConfig
) -> list[Document]:
    """Candidates whose scores are within the bounds, best first."""
    worst = min(scores[document.id] for document in positives)
    most = [math.inf if config.max_score is None else config.max_score]
    if config.absolute_margin is not None:
        most.append(worst - config.absolute_margin)
    if config.relative_margin is not None:  # of the magnitude: logits may be below 0
        most.append(worst - abs(worst) * config.relative_margin)
    least = -math.inf if config.min_score is None else config.min_score
    good = (document for document in documents if least <= scores[document.id] <= min(most))
    return sorted(good, key=lambda document: -scores[document.id])


def _sampled(documents: list[Document], query_id: str, config: MiningConfig) -> list[Document]:
    if config.sampling_strategy == "top" or len(documents) <= config.num_negatives:
        return documents[: config.num_negatives]
    name = int.from_bytes(hashlib.blake2b(query_id.encode(), digest_size=8).digest(), "little")
    drawn = np.random.default_rng([config.seed, name]).choice(
        len(documents), config.num_negatives, replace=False
    )
    return [documents[i] for i in sorted(drawn.tolist())]
