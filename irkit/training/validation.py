"""Measure the current model on judged collections, by exact search in bounded memory."""

from __future__ import annotations

import copy
import hashlib
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from pydantic import PositiveInt, StringConstraints, model_validator
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
        run: Rerank this run, in a file of TREC or of JSON lines: each query scores only the documents that
            the run has for it.
        document_length: Number of tokens at which documents are cut; None cuts them as in training.
        at_end: Measure only the final model; the collection must not choose it.
    """

    source: str
    split: str | None = None
    name: str = ""
    measures: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)] = "nDCG@10"
    k: PositiveInt = 100
    dtype: Literal["float32", "bfloat16", "int8", "auto"] = "float32"
    documents: PositiveInt | None = None
    run: str | None = None
    document_length: PositiveInt | None = None
    at_end: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.run and self.documents:
            raise ValueError("'run' has its own documents; leave out 'documents'")
        return self

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
        candidates: Numbers of the queries that may find each document, by id; None if all queries may.
    """

    config: EvaluationConfig
    queries: list[Query]
    qrels: Qrels
    source: Source[Document]
    chosen: frozenset[str] | None
    total: int
    candidates: Mapping[str, list[int]] | None = None

    def documents(self) -> Iterator[Document]:
        """Read the documents that are searched."""
        return (document for document in self.source if self.chosen is None or document.id in self.chosen)


def open_collections(configs: Sequence[EvaluationConfig]) -> list[JudgedCollection]:
    """Read queries and judgments, and check that they fit the documents.

    Raises:
        StorageError: A file cannot be read.
        BadValueError: A measure is unknown, no query or no judged document is in the collection, or a run
            has none of the queries or documents that the collection lacks.
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
    candidates = None if config.run is None else _read_candidates(config.run, queries)
    total = n_judged = n_candidates = 0
    for document in source:
        total, n_judged = total + 1, n_judged + (document.id in judged)
        n_candidates += candidates is not None and document.id in candidates
    if not n_judged:
        raise BadValueError(f"evaluation: no judged document is among the {total:,} of {config.source}")
    if candidates is not None:
        if missing := len(candidates) - n_candidates:
            raise BadValueError(
                f"evaluation: {missing:,} of the {len(candidates):,} documents of {config.run} are not in "
                f"{config.source}; expected a run over this collection"
            )
        return JudgedCollection(
            config, queries, qrels, source, frozenset(candidates), n_candidates, candidates
        )
    chosen = None
    if config.documents is not None and config.documents < total:
        others = (document.id for document in source if document.id not in judged)
        chosen = frozenset(judged) | set(heapq.nsmallest(config.documents - n_judged, others, _random_order))
        total = max(config.documents, n_judged)
    return JudgedCollection(config, queries, qrels, source, chosen, total)


def _read_candidates(path: str, queries: Sequence[Query]) -> dict[str, list[int]]:
    """Read which queries, by number, a run has each document for.

    Raises:
        StorageError: The run cannot be read.
        BadValueError: The run is malformed or has no document for any of the queries.
    """
    run = Run.read(path)
    candidates: dict[str, list[int]] = {}
    for number, query in enumerate(queries):
        for document in run.columns(query.id)[0] if query.id in run else ():
            candidates.setdefault(document, []).append(number)
    if not candidates:
        raise BadValueError(
            f"evaluation: {path} has no document for any of the {len(queries):,} judged queries"
        )
    return candidates


def _random_order(identifier: str) -> bytes:
    """Return the sort key of an id for a random order that is always the same."""
    return hashlib.blake2b(identifier.encode(), digest_size=8).digest()


def evaluate_model(
    model: Model, collection: JudgedCollection, score: Score = score, progress: Progress | None = None
) -> Evaluation:
    """Search a collection exactly, or rerank its run, and evaluate the result.

    Args:
        model: Model of any kind. The call leaves its mode, training or evaluation, as before.
        collection: See `open_collections`.
        score: Returns the scores ``(n_q, n_d)`` of queries and documents; higher is better.
        progress: Called with the number of documents done since its last call.

    Raises:
        BadValueError: The similarity of the model is not an inner product.
    """
    training = model.training
    model = _adjusted(model, collection.config)
    try:
        queries = concat(model.stream_representations((query.text for query in collection.queries), "query"))
        texts = (document.full_text for document in collection.documents())
        ids = collection.documents()  # a second time, in step with the chunks
        best, first = TopK(len(queries), collection.config.k), 0
        for chunk in model.stream_representations(texts, "document", chunk_size=_CHUNK, progress=progress):
            with torch.no_grad():
                scores = score(queries, chunk).numpy()
            if collection.candidates is not None:
                chunk_ids = [document.id for document in islice(ids, len(chunk))]
                scores = _only_candidates(scores, [collection.candidates[name] for name in chunk_ids])
            best.push(scores, np.arange(first, first + len(chunk)))
            first += len(chunk)
    finally:
        model.train(training)
    run = _as_run(collection, best.hits())
    return evaluate(run, collection.qrels, collection.config.measures)


def _only_candidates(
    scores: npt.NDArray[np.float32], allowed: Sequence[list[int]]
) -> npt.NDArray[np.float32]:
    """Return scores ``(n_q, n_d)`` with -inf, which is no hit, where a query may not find a document."""
    rows = np.concatenate([np.asarray(numbers, np.int64) for numbers in allowed])
    columns = np.repeat(np.arange(len(allowed)), [len(numbers) for numbers in allowed])
    kept = np.full_like(scores, -np.inf)
    kept[rows, columns] = scores[rows, columns]
    return kept


def _adjusted(model: Model, config: EvaluationConfig) -> Model:
    """Return the model, or a copy of it with the precision and the length of documents of ``config``."""
    if config.dtype == "float32" and config.document_length is None:
        return model
    model = copy.deepcopy(model)
    if config.document_length is not None:
        model.set_length("document", config.document_length)
    if config.dtype == "float32":
        return model
    for side in (model, model.query_model):
        if side is not None and not isinstance(side.encoder, InferenceFreeEncoder):
            side.encoder = with_dtype(side.encoder, side.head, side.tokenizer, config.dtype)
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
