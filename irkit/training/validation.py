"""Measures of the model of the moment on judged collections, by exact search in bounded memory."""

from __future__ import annotations

import copy
import hashlib
import heapq
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import PositiveInt, StringConstraints
from torch import Tensor

from irkit.config import Config
from irkit.data import Document, Qrels, Query, Source, read_documents, read_qrels, read_queries
from irkit.encoder.lookup import NoEncoder
from irkit.errors import BadValueError, ConfigError, StorageError
from irkit.evaluation import Evaluation, evaluate
from irkit.files import write_text
from irkit.index import Hits
from irkit.index.topk import TopK
from irkit.model import Model
from irkit.model.hardware import with_dtype
from irkit.representation import Representation, concat
from irkit.run import Run
from irkit.scoring import score

__all__ = [
    "EvaluationConfig",
    "JudgedCollection",
    "evaluate_model",
    "open_collections",
    "read_means",
    "summarize",
    "write_results",
]

Score = Callable[[Representation, Representation], Tensor]
Progress = Callable[[int], object]

_CHUNK = 1024  # documents encoded and scored together


class EvaluationConfig(Config):
    """A judged collection that a model is measured on.

    Attributes:
        source: BEIR folder, ``ir_datasets:ID`` or whatever else `irkit.data` reads for documents, queries and
            judgments.
        split: Of the judgments of a folder.
        name: In the results; by default the last part of ``source``.
        measures: As ir-measures names them, with spaces between; the first decides which model is best.
        k: Documents retrieved for each query.
        dtype: Precision of the encoder, as for `Model.from_pretrained`.
        documents: Search no more documents than these: the judged ones, and others drawn at random. Values
            are then higher than on all, and comparable only with each other.
        at_end: Measure only the model that training ends with: what must not choose it.
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
        """Its name in the results."""
        return self.name or Path(self.source).name

    @property
    def measure(self) -> str:
        """The first of its measures."""
        return self.measures.split()[0]


@dataclass(frozen=True)
class JudgedCollection:
    """A collection whose files were found to fit each other.

    Attributes:
        config: What to measure.
        queries: Those that are judged.
        qrels: The judgments.
        source: All documents.
        chosen: Ids of the documents that are searched; None is all.
        total: Their number.
    """

    config: EvaluationConfig
    queries: list[Query]
    qrels: Qrels
    source: Source[Document]
    chosen: frozenset[str] | None
    total: int

    def documents(self) -> Iterator[Document]:
        """The documents that are searched, read anew."""
        return (each for each in self.source if self.chosen is None or each.id in self.chosen)


def open_collections(configs: Sequence[EvaluationConfig]) -> list[JudgedCollection]:
    """Read queries and judgments, and check that they and the documents fit each other.

    Raises:
        StorageError: Something cannot be read.
        BadValueError: A measure is unknown, or no query or no relevant document is in the collection.
        ConfigError: Two collections have one name.
    """
    titles = [config.title for config in configs]
    if len(set(titles)) < len(titles):
        raise ConfigError(
            f"evaluation: the collections are named {', '.join(titles)}; give each a name of its own"
        )
    return [_open(config) for config in configs]


def _open(config: EvaluationConfig) -> JudgedCollection:
    evaluate({"q": {"d": 1.0}}, {"q": {"d": 1}}, config.measures)  # a misspelt one fails now
    qrels = read_qrels(config.source, config.split)
    queries = [query for query in read_queries(config.source, config.split) if query.id in qrels]
    source = read_documents(config.source)
    if source.once:
        raise BadValueError(f"evaluation: {config.source} can be read only once; save it to a file")
    if not queries:
        raise BadValueError(f"evaluation: none of the queries of {config.source} is judged; check split")
    judged = {identifier for query in queries for identifier in qrels[query.id]}
    total, found = 0, 0
    for document in source:
        total, found = total + 1, found + (document.id in judged)
    if not found:
        raise BadValueError(f"evaluation: no judged document is among the {total:,} of {config.source}")
    chosen = None
    if config.documents is not None and config.documents < total:
        others = (document.id for document in source if document.id not in judged)
        chosen = frozenset(judged) | set(heapq.nsmallest(config.documents - found, others, _order))
        total = max(config.documents, found)
    return JudgedCollection(config, queries, qrels, source, chosen, total)


def _order(identifier: str) -> bytes:
    """What puts ids in a random order, always the same."""
    return hashlib.blake2b(identifier.encode(), digest_size=8).digest()


def evaluate_model(
    model: Model, collection: JudgedCollection, score: Score = score, progress: Progress | None = None
) -> Evaluation:
    """Search a collection exactly and score the result; the model stays in training where it was.

    Args:
        model: Of any kind.
        collection: See `open_collections`.
        score: Of queries and documents: ``(n_q, n_d)``, higher is better.
        progress: Called with the number of documents done since its last call.

    Raises:
        BadValueError: The similarity of the model is not an inner product.
    """
    training = model.training
    model = _in_precision(model, collection.config.dtype)
    try:
        queries = concat(model.represent_stream((query.text for query in collection.queries), "query"))
        texts = (document.full_text for document in collection.documents())
        best, first = TopK(len(queries), collection.config.k), 0
        for part in model.represent_stream(texts, "document", chunk_size=_CHUNK, progress=progress):
            with torch.no_grad():
                scores = score(queries, part).numpy()
            best.push(scores, np.arange(first, first + len(part)))
            first += len(part)
    finally:
        model.train(training)
    run = _as_run(collection, best.hits())
    return evaluate(run, collection.qrels, collection.config.measures)


def _in_precision(model: Model, dtype: str) -> Model:
    """The model, or a copy of it in another precision."""
    if dtype == "float32":
        return model
    model = copy.deepcopy(model)
    for part in (model, model.query_model):
        if part is not None and not isinstance(part.encoder, NoEncoder):
            part.encoder = with_dtype(part.encoder, part.head, part.tokenizer, dtype)
    return model


def summarize(evaluations: Mapping[str, Evaluation]) -> dict[str, float]:
    """Means over collections by measure, and where there are several, each as ``collection_measure``."""
    values: dict[str, list[float]] = {}
    for evaluation in evaluations.values():
        for measure, value in evaluation.mean.items():
            values.setdefault(measure, []).append(value)
    means = {measure: sum(each) / len(each) for measure, each in values.items()}
    if len(evaluations) > 1:
        for name, evaluation in evaluations.items():
            means |= {f"{name}_{measure}": value for measure, value in evaluation.mean.items()}
    return means


def write_results(evaluations: Mapping[str, Evaluation], path: Path) -> None:
    """Write a JSON object for each collection, measure and query: dataset, measure, query_id, value.

    Raises:
        StorageError: Writing failed.
    """
    lines = (
        json.dumps({"dataset": name, "measure": measure, "query_id": query, "value": value})
        for name, evaluation in evaluations.items()
        for measure, values in evaluation.per_query.items()
        for query, value in values.items()
    )
    write_text(path, "".join(f"{line}\n" for line in lines))


def read_means(path: Path) -> list[tuple[str, str, float]]:
    """Name of a collection, measure and mean over its queries, of what `write_results` wrote.

    Raises:
        StorageError: The file cannot be read.
    """
    values: dict[tuple[str, str], list[float]] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            values.setdefault((row["dataset"], row["measure"]), []).append(row["value"])
    except OSError as error:
        raise StorageError(f"reading {path}: {error.strerror}") from error
    return [(*name, sum(each) / len(each)) for name, each in values.items()]


def _as_run(collection: JudgedCollection, hits: Hits) -> Run:
    """With the ids of what was found, which are read a second time rather than kept for all documents."""
    found = {*hits.rows.ravel().tolist()}
    ids = {row: document.id for row, document in enumerate(collection.documents()) if row in found}
    return Run(
        (query.id, [ids[row] for row in rows[rows >= 0].tolist()], scores[rows >= 0])
        for query, rows, scores in zip(collection.queries, *hits, strict=True)
    )
