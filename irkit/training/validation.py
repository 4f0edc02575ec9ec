"""Measure the current model on judged collections, by exact search in bounded memory."""

from __future__ import annotations

import copy
import hashlib
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import PositiveInt, StringConstraints
from torch import Tensor

from irkit.config import Config
from irkit.core.representation import Representation, concat
from irkit.core.scoring import score
from irkit.data import Document, Qrels, Query, Source, read_documents, read_qrels, read_queries
from irkit.encoder.inference_free import InferenceFreeEncoder
from irkit.errors import BadValueError, ConfigError
from irkit.evaluation.measures import Evaluation, evaluate
from irkit.evaluation.run import Run
from irkit.index import Hits
from irkit.index.topk import TopK
from irkit.model import Model
from irkit.model.hardware import with_dtype

Score = Callable[[Representation, Representation], Tensor]
Progress = Callable[[int], object]

_CHUNK = 1024  # documents encoded and scored together


class EvaluationConfig(Config):
    """A judged collection that a model is measured on.

    Attributes:
        source: BEIR folder, ``ir_datasets:ID`` or any other source of documents, queries and judgments that
            `irkit.data` reads.
        split: Split of the judgments of a folder.
        name: Name in the results; the last part of ``source`` by default.
        measures: Measures by their names in ir-measures, separated by spaces; the first chooses the best
            model.
        k: Number of documents retrieved per query.
        dtype: Precision of the encoder, see `Model.from_pretrained`.
        documents: Search only this many documents: the judged ones, and others drawn at random. The values
            are then higher than on all documents, and comparable only with each other.
        at_end: Measure only the final model; the collection must not choose it.
    """

    source: str
    split: str | None = None
    name: str = ""
    measures: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)] = "nDCG@10"
    k: PositiveInt = 100
    dtype: Literal["float32", "bfloat16", "int8", "auto"] = "float32"
    documents: PositiveInt | None = None
    at_end: bool = False

    @property
    def title(self) -> str:
        """Name of the collection in the results."""
        return self.name or Path(self.source).name

    @property
    def measure(self) -> str:
        """The first of the measures, which chooses the best model."""
        return self.measures.split()[0]


@dataclass(frozen=True)
class JudgedCollection:
    """A collection whose documents, queries and judgments fit each other.

    Attributes:
        config: What to measure.
        queries: The judged queries.
        qrels: The judgments.
        source: All documents.
        chosen: Ids of the documents that are searched; None for all.
        total: Number of documents that are searched.
    """

    config: EvaluationConfig
    queries: list[Query]
    qrels: Qrels
    source: Source[Document]
    chosen: frozenset[str] | None
    total: int

    def documents(self) -> Iterator[Document]:
        """Read the documents that are searched."""
        return (document for document in self.source if self.chosen is None or document.id in self.chosen)


def open_collections(configs: Sequence[EvaluationConfig]) -> list[JudgedCollection]:
    """Read queries and judgments, and check that they fit the documents.

    Raises:
        StorageError: A file cannot be read.
        BadValueError: A measure is unknown, or no query or no judged document is in the collection.
        ConfigError: Two collections have the same name.
    """
    titles = [config.title for config in configs]
    if len(set(titles)) < len(titles):
        raise ConfigError(
            f"evaluation: the collections are named {', '.join(titles)}; give each a name of its own"
        )
    return [_open(config) for config in configs]


def _open(config: EvaluationConfig) -> JudgedCollection:
    evaluate({"q": {"d": 1.0}}, {"q": {"d": 1}}, config.measures)  # a misspelt measure fails now
    qrels = read_qrels(config.source, config.split)
    queries = [query for query in read_queries(config.source, config.split) if query.id in qrels]
    source = read_documents(config.source)
    if source.once:
        raise BadValueError(f"evaluation: {config.source} can be read only once; save it to a file")
    if not queries:
        raise BadValueError(f"evaluation: none of the queries of {config.source} is judged; check split")
    judged = {identifier for query in queries for identifier in qrels[query.id]}
    total = n_judged = 0
    for document in source:
        total, n_judged = total + 1, n_judged + (document.id in judged)
    if not n_judged:
        raise BadValueError(f"evaluation: no judged document is among the {total:,} of {config.source}")
    chosen = None
    if config.documents is not None and config.documents < total:
        others = (document.id for document in source if document.id not in judged)
        chosen = frozenset(judged) | set(heapq.nsmallest(config.documents - n_judged, others, _random_order))
        total = max(config.documents, n_judged)
    return JudgedCollection(config, queries, qrels, source, chosen, total)


def _random_order(identifier: str) -> bytes:
    """Return the sort key of an id for a random order that is always the same."""
    return hashlib.blake2b(identifier.encode(), digest_size=8).digest()


def evaluate_model(
    model: Model, collection: JudgedCollection, score: Score = score, progress: Progress | None = None
) -> Evaluation:
    """Search a collection exactly and evaluate the result.

    Args:
        model: Model of any kind. The call leaves its mode, training or evaluation, as before.
        collection: See `open_collections`.
        score: Returns the scores ``(n_q, n_d)`` of queries and documents; higher is better.
        progress: Called with the number of documents done since its last call.

    Raises:
        BadValueError: The similarity of the model is not an inner product.
    """
    training = model.training
    model = _in_precision(model, collection.config.dtype)
    try:
        queries = concat(model.stream_representations((query.text for query in collection.queries), "query"))
        texts = (document.full_text for document in collection.documents())
        best, first = TopK(len(queries), collection.config.k), 0
        for chunk in model.stream_representations(texts, "document", chunk_size=_CHUNK, progress=progress):
            with torch.no_grad():
                scores = score(queries, chunk).numpy()
            best.push(scores, np.arange(first, first + len(chunk)))
            first += len(chunk)
    finally:
        model.train(training)
    run = _as_run(collection, best.hits())
    return evaluate(run, collection.qrels, collection.config.measures)


def _in_precision(model: Model, dtype: str) -> Model:
    """Return the model, or a copy of it in another precision."""
    if dtype == "float32":
        return model
    model = copy.deepcopy(model)
    for side in (model, model.query_model):
        if side is not None and not isinstance(side.encoder, InferenceFreeEncoder):
            side.encoder = with_dtype(side.encoder, side.head, side.tokenizer, dtype)
    return model


def summarize(evaluations: Mapping[str, Evaluation]) -> dict[str, float]:
    """Compute the mean of each measure over the collections.

    Returns:
        Means by measure. If there are several collections, also each of their values as
        ``collection_measure``.
    """
    values: dict[str, list[float]] = {}
    for evaluation in evaluations.values():
        for measure, value in evaluation.mean.items():
            values.setdefault(measure, []).append(value)
    means = {measure: sum(row) / len(row) for measure, row in values.items()}
    if len(evaluations) > 1:
        for name, evaluation in evaluations.items():
            means |= {f"{name}_{measure}": value for measure, value in evaluation.mean.items()}
    return means


def _as_run(collection: JudgedCollection, hits: Hits) -> Run:
    """Make a run of the hits; their ids are read a second time rather than stored for all documents."""
    hit_rows = {*hits.rows.ravel().tolist()}
    ids = {row: document.id for row, document in enumerate(collection.documents()) if row in hit_rows}
    return Run(
        (query.id, [ids[row] for row in rows[rows >= 0].tolist()], scores[rows >= 0])
        for query, rows, scores in zip(collection.queries, *hits, strict=True)
    )
