"""Mine negatives and label examples on Ray: every actor has the index and the teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from irkit.data import Qrels, Query
from irkit.model.hardware import find_devices
from irkit.ray_engine.ray_stream import stream
from irkit.retrieval.retriever import Retriever
from irkit.training.labels import LABELLED, label
from irkit.training.losses.loss import Normalization
from irkit.training.negatives import MINED, MiningConfig, mine
from irkit.training.teachers import load_teacher
from irkit.training.training_data import DataConfig, TrainingRow, read_training_rows
from irkit.training.training_data.text_store import TextStore

_Rows = list[TrainingRow]


def mine_on_ray(
    ray: Any,
    directory: str | Path,
    queries: list[Query],
    qrels: Qrels,
    config: MiningConfig,
    *,
    teacher: str | None = None,
    options: Mapping[str, Any] | None = None,
    start: int = 0,
) -> Iterator[TrainingRow]:
    """Yield the rows of `irkit.training.negatives.mine`.

    Args:
        ray: The module, connected.
        directory: Directory of the index, which every node has under the same path.
        queries: Queries that have a relevant document.
        qrels: Judgments.
        config: Settings.
        teacher: See `load_teacher`.
        options: Options of the teacher; its device also runs the model of the index.
        start: Number of rows to skip at the beginning.
    """
    options = dict(options or {})

    def read(skip: int) -> Iterator[tuple[list[Query], Qrels]]:
        for first in range(start + skip * MINED, len(queries), MINED):
            chunk = queries[first : first + MINED]
            yield chunk, {query.id: qrels[query.id] for query in chunk}

    begin = partial(_miner, str(directory), config, teacher, options)
    for rows in stream(ray, read, begin, gpu=_on_gpu(options)):
        yield from rows


def _miner(
    directory: str, config: MiningConfig, teacher: str | None, options: dict[str, Any]
) -> Callable[[tuple[list[Query], Qrels]], _Rows]:
    retriever = Retriever.load(directory, device=options.get("device"))
    scorer = load_teacher(teacher, **options) if teacher else None
    return lambda chunk: list(mine(retriever, *chunk, config, teacher=scorer))


def label_on_ray(
    ray: Any,
    config: DataConfig,
    teacher: str,
    *,
    queries: str | None,
    corpus: str | None,
    options: Mapping[str, Any] | None = None,
    normalization: Normalization = "none",
    start: int = 0,
) -> Iterator[TrainingRow]:
    """Yield the rows of `irkit.training.labels.label`.

    Args:
        ray: The module, connected.
        config: The examples.
        teacher: See `load_teacher`.
        queries: Source of the queries that examples name by id, on every node.
        corpus: Source of their documents.
        options: Options of the teacher.
        normalization: See `irkit.training.labels.label`.
        start: Number of rows to skip at the beginning.
    """
    options = dict(options or {})

    def read(skip: int) -> Iterator[_Rows]:
        rows = islice(read_training_rows(config), start + skip * LABELLED, None)
        while chunk := list(islice(rows, LABELLED)):
            yield chunk

    begin = partial(_labeller, config, teacher, queries, corpus, options, normalization)
    for rows in stream(ray, read, begin, gpu=_on_gpu(options)):
        yield from rows


def _labeller(
    config: DataConfig,
    teacher: str,
    queries: str | None,
    corpus: str | None,
    options: dict[str, Any],
    normalization: Normalization,
) -> Callable[[_Rows], _Rows]:
    scorer = load_teacher(teacher, **options)
    texts = TextStore(queries, "queries", config.query_columns) if queries else None
    documents = TextStore(corpus, columns=config.corpus_columns) if corpus else None
    return lambda rows: list(
        label(rows, scorer, queries=texts, corpus=documents, normalization=normalization)
    )


def _on_gpu(options: Mapping[str, Any]) -> bool:
    return find_devices(options.get("device"))[0].type == "cuda"
