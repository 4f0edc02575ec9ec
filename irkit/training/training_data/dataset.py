"""Datasets: training rows, the texts of their ids, and which of their documents an example has.

`check` finds what is wrong with them before the first step of a training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from irkit.data import Qrels
from irkit.errors import BadValueError, ConfigError
from irkit.model import Model
from irkit.training.example import Example
from irkit.training.training_data.data_config import DataConfig
from irkit.training.training_data.row_formats import TrainingRow
from irkit.training.training_data.row_sequences import (
    Stream,
    TrainingRows,
    endless_order,
    open_rows,
    query_keys,
)
from irkit.training.training_data.row_sources import read_judgments
from irkit.training.training_data.text_store import Texts, TextStore
from irkit.training.training_data.token_estimate import SAMPLE_SIZE, TokenEstimate, count_bytes

Array = np.ndarray[Any, Any]
Side = Literal["query", "document"]
_SAMPLE = 10_000  # rows of a dataset that are checked before training

Key = tuple[int, int, int]
"""An example of a batch: number of the dataset, position in it, and the cycle that its draws depend on."""


class Dataset:
    """Examples of one source.

    Args:
        rows: Rows of the source.
        config: Which documents of a row are used, and how datasets are mixed.
        queries: Texts of the queries by id, for rows without them.
        corpus: Texts of the documents by id, for rows without them.
        qrels: Judgments: these documents are relevant, whatever the rows say.

    Examples:
        >>> data = Dataset([TrainingRow("", "a query", (), ("relevant", "not"))], DataConfig(source="pairs"))
        >>> data.example(0).documents
        ('relevant', 'not')
    """

    def __init__(
        self,
        rows: TrainingRows | Stream[TrainingRow],
        config: DataConfig,
        queries: Texts | None = None,
        corpus: Texts | None = None,
        qrels: Qrels | None = None,
    ) -> None:
        self.rows, self.config = rows, config
        self.queries: Texts = {} if queries is None else queries
        self.corpus: Texts = {} if corpus is None else corpus
        self.sizes: Any = None  # tokens by position, see `measure`
        self._relevant = {
            query: frozenset(doc for doc, grade in judged.items() if grade >= config.relevant_grade)
            for query, judged in (qrels or {}).items()
        }

    @property
    def streaming(self) -> bool:
        """Whether the dataset has no length."""
        return isinstance(self.rows, Stream)

    def __len__(self) -> int:
        if isinstance(self.rows, Stream):
            raise TypeError(f"{self.config.source}: a stream has no length; give max_steps")
        return min(len(self.rows), self.config.limit or len(self.rows))

    def query_keys(self) -> Array | None:
        """Return ``(n,)`` int64, equal where the queries of examples are equal; None for a stream."""
        return None if isinstance(self.rows, Stream) else query_keys(self.rows)[: len(self)]

    def order(self, seed: int, number: int, cycle: int) -> Iterator[int]:
        """Yield the positions of all examples in the order of a cycle; for a stream, without an end.

        They are shuffled by the seed, the number of the dataset and the cycle; a stream in blocks.
        """
        length = self.rows.block if isinstance(self.rows, Stream) else len(self)
        order = endless_order(length, seed, number, cycle) if self.config.shuffle else count()
        return order if self.streaming else islice(order, length)

    def sample(self, n: int) -> list[TrainingRow]:
        """Return ``n`` rows spread over the dataset, of a stream the first 100, or none if read once."""
        if isinstance(self.rows, Stream):
            return [] if self.rows.once else list(islice(self.rows.read(), min(n, 100)))
        positions = np.unique(np.linspace(0, len(self) - 1, min(n, len(self)), dtype=np.int64))
        return [self.rows[position] for position in positions.tolist()]

    def example(self, index: int, seed: Sequence[int] = (0,)) -> Example:
        """Return example ``index``; ``seed`` decides which documents are drawn.

        Raises:
            BadValueError: An id has no text.
        """
        row = self.rows[index]
        known = self.known(row)
        chosen, positives = choose(row, known, self.config, seed)
        scores = row.scores if self.config.scores else None
        return Example(
            self._texts(row, "query", (0,))[0],
            tuple(self._texts(row, "document", chosen)),
            None if scores is None else tuple(scores[i] for i in chosen),
            positives,
            tuple(row.names[i] for i in chosen) if row.document_ids else (),
            known,
        )

    def known(self, row: TrainingRow) -> frozenset[str]:
        """Return the names of the documents known to be relevant to the query of a row."""
        return self._relevant.get(row.query_id, frozenset()) | frozenset(row.names[: row.positives])

    def measure(self, model: Model) -> None:
        """Estimate the tokens of each example, its query and documents, from bytes; reads all rows once.

        If documents are drawn, their number times the mean of all documents of the row counts. ``sizes``
        becomes ``(n,)`` int64. Streamed examples are not measured.
        """
        if self.streaming:
            return
        sample = self.sample(SAMPLE_SIZE)
        queries, documents = (
            TokenEstimate.from_sample(
                [self._texts(row, side, (0,))[0] for row in sample],
                model.side_model(side).tokenizer,
                model.max_length(side),
            )
            for side in ("query", "document")
        )
        sizes = np.empty(len(self), np.int64)
        for position in range(len(self)):
            row = self.rows[position]
            n_used = min(self.config.documents or len(row), len(row))
            mean = documents(self._bytes(row, "document")).mean()
            sizes[position] = np.ceil(queries(self._bytes(row, "query")).sum() + n_used * mean)
        self.sizes = sizes

    def _bytes(self, row: TrainingRow, side: Side) -> Array:
        """Return ``(n,)`` int64, the bytes of the texts of one side of a row."""
        names, written, texts = self._side(row, side)
        if written is None and isinstance(texts, TextStore):
            return texts.sizes(names)
        return count_bytes(self._texts(row, side, range(len(names if written is None else written))))

    def _texts(self, row: TrainingRow, side: Side, chosen: Iterable[int]) -> list[str]:
        """Return the chosen texts of one side of a row."""
        names, written, texts = self._side(row, side)
        if written is not None:
            return [written[i] for i in chosen]
        try:
            return [texts[names[i]] for i in chosen]
        except KeyError as error:
            key, source = "queries" if side == "query" else "corpus", getattr(texts, "source", None)
            remedy = f"it is not in {key}: {source}" if source else f"give {key}: where the texts are"
            raise BadValueError(
                f"{self.config.source}: no text of {side} {error.args[0]!r}; {remedy}"
            ) from None

    def _side(self, row: TrainingRow, side: Side) -> tuple[Sequence[str], Sequence[str] | None, Texts]:
        """Return the ids of one side of a row, its texts or None, and where to look ids up."""
        if side == "document":
            return row.document_ids, row.documents, self.corpus
        return (row.query_id,), None if row.query is None else (row.query,), self.queries


def choose(
    row: TrainingRow, known: frozenset[str], config: DataConfig, seed: Sequence[int]
) -> tuple[list[int], int]:
    """Choose the documents of a row that an example has.

    Without scores these are one relevant document, and ``config.documents - 1`` that are not known to be
    relevant; with scores one relevant document and any others. Relevant ones come first; each part keeps the
    order of the row.

    Args:
        row: A row.
        known: Names of documents known to be relevant.
        config: How many documents to choose, and how.
        seed: Decides which are drawn, if they are drawn.

    Returns:
        Positions in the row, and how many of the first are relevant.
    """
    names, scores = row.names, row.scores if config.scores else None
    relevant = [i for i, name in enumerate(names) if i < row.positives or name in known]
    others = [i for i, name in enumerate(names) if i >= row.positives and name not in known]
    if config.documents is None:
        return relevant + others, len(relevant)
    if config.sampling == "top" and scores is None:
        raise ConfigError("sampling 'top' needs scores; expected 'first' or 'random' without")
    generator: np.random.Generator | None = None

    def pick(positions: list[int], count: int) -> list[int]:
        nonlocal generator
        if config.sampling == "top":
            positions = sorted(positions, key=lambda i: -scores[i])  # type: ignore[index]
        if config.sampling != "random" or len(positions) <= count:
            return positions[:count]
        generator = generator or np.random.default_rng(list(seed))  # making one takes longer than drawing
        return [positions[i] for i in generator.choice(len(positions), count, replace=False).tolist()]

    first = pick(relevant, 1)
    pool = others if scores is None else sorted({*relevant, *others} - {*first})
    chosen = sorted({*first, *pick(pool, config.documents - len(first))})
    marked = set(relevant)
    positives = [i for i in chosen if i in marked]
    return positives + [i for i in chosen if i not in marked], len(positives)


class Mixture:
    """Datasets side by side, whose examples are found by `Key`: what a `DataLoader` reads.

    Args:
        datasets: At least one.
        seed: Seed of the documents that are drawn.

    Raises:
        ConfigError: Some datasets have a weight and others none, or a stream is mixed without weights.
    """

    def __init__(self, datasets: Sequence[Dataset], seed: int = 0) -> None:
        self.datasets, self.seed = list(datasets), seed
        if not self.datasets:
            raise ConfigError("data: expected at least one dataset, got none")
        weighted = [data.config.source for data in self.datasets if data.config.weight is not None]
        if weighted and len(weighted) < len(self.datasets):
            raise ConfigError(
                f"data: only {weighted[0]} and {len(weighted) - 1} others have a weight; give all a weight, "
                "or none (then their sizes count)"
            )
        if len(self.datasets) > 1 and self.streaming and not weighted:
            raise ConfigError("data: a stream has no size; give each dataset a weight")

    @property
    def streaming(self) -> bool:
        """Whether one of the datasets has no length."""
        return any(dataset.streaming for dataset in self.datasets)

    def measure(self, model: Model) -> None:
        """Estimate the tokens of each example, see `Dataset.measure`."""
        for dataset in self.datasets:
            dataset.measure(model)

    def __len__(self) -> int:
        return sum(map(len, self.datasets))

    def __getitem__(self, key: Key) -> Example:
        number, index, cycle = key
        return self.datasets[number].example(index, (self.seed, number, cycle, index))


def open_data(configs: Sequence[DataConfig], seed: int = 0) -> Mixture:
    """Open datasets; a new file is read once, to check its lines and to note where they are.

    Raises:
        StorageError: A file is missing.
        BadValueError: A row is malformed; the message names file and line.
        ConfigError: Keys do not go together.
    """
    return Mixture([_open(config) for config in configs], seed)


def _open(config: DataConfig) -> Dataset:
    rows = open_rows(config)
    corpus = config.corpus or (config.source if Path(config.source).is_dir() else None)
    queries = config.queries or (corpus if corpus and Path(corpus).is_dir() else None)
    return Dataset(
        rows,
        config,
        TextStore(queries, "queries", config.query_columns) if queries else None,
        TextStore(corpus, columns=config.corpus_columns) if corpus else None,
        read_judgments(config),
    )


def check(data: Mixture, needs: Iterable[str] = ()) -> dict[str, int]:
    """Look for what would stop or spoil training, in up to 10,000 examples of each dataset.

    Args:
        data: The data to train on.
        needs: What losses need: with ``"targets"`` every document needs a score, with ``"some_targets"`` the
            documents of at least one dataset, with ``"positives"`` some example needs a relevant document.

    Returns:
        The numbers of ``datasets`` and ``examples`` (streams are not counted), and the most ``documents`` of
        an example.

    Raises:
        BadValueError: Texts or scores are missing.
        ConfigError: ``sampling`` needs scores, which the examples lack.
    """
    needs, most, scored = set(needs), 0, False
    for dataset in data.datasets:
        rows = dataset.sample(_SAMPLE)
        _check_texts(dataset, rows)
        scored |= _check_scores(dataset, rows, needs)
        if "positives" in needs and rows and not any(row.positives or dataset.known(row) for row in rows):
            raise BadValueError(
                f"{dataset.config.source}: no example has a document that is known to be relevant, which a "
                "loss needs; name judgments (qrels, or split of a BEIR folder), or train on targets"
            )
        widest = max(map(len, rows), default=1)
        most = max(most, min(dataset.config.documents or widest, widest))
    if "some_targets" in needs and not scored:
        raise BadValueError("data: a loss is for examples with the scores of a teacher, and none has any")
    examples = sum(len(dataset) for dataset in data.datasets if not dataset.streaming)
    return {"datasets": len(data.datasets), "examples": examples, "documents": most}


def _check_texts(dataset: Dataset, rows: list[TrainingRow]) -> None:
    """Refuse ids without a text, and texts that are ids."""
    queries = {row.query_id for row in rows if row.query is None}
    documents = {name for row in rows if row.documents is None for name in row.document_ids}
    for key, names, texts in (("queries", queries, dataset.queries), ("corpus", documents, dataset.corpus)):
        missing = sorted(name for name in names if name not in texts)
        if missing:
            source = getattr(texts, "source", None)
            remedy = f"not in {key}: {source}" if source else f"give {key}: where the texts are"
            raise BadValueError(
                f"{dataset.config.source}: no text of {len(missing)} of {len(names)} ids looked for, "
                f"among them {missing[0]!r}; {remedy}"
            )
    written = [text for row in rows for text in row.documents or ()]
    if written and all(text.isdigit() for text in written):
        raise BadValueError(
            f"{dataset.config.source}: the texts are numbers, such as {written[0]!r}; if they are ids, give "
            "corpus (and queries): where the texts are"
        )


def _check_scores(dataset: Dataset, rows: list[TrainingRow], needs: set[str]) -> bool:
    """Return whether there are scores; raise an error if needed ones are missing."""
    config = dataset.config
    without = sum(row.scores is None for row in rows) if config.scores else len(rows)
    if 0 < without < len(rows):
        raise BadValueError(
            f"{config.source}: {without} of {len(rows)} examples looked at have no scores; expected all "
            "or none. Label the others, or set scores: false"
        )
    if without and config.sampling == "top" and config.documents is not None:
        raise ConfigError(
            f"{config.source}: sampling: top needs scores, and it has none; take first or random"
        )
    if without and "targets" in needs:
        why = "scores: false keeps them out" if not config.scores else "irkit label adds them"
        raise BadValueError(
            f"{config.source}: a loss needs the scores of a teacher, and these examples have none; {why}"
        )
    return not without
