"""Datasets: records, the texts they name, and which of their documents an example has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from irkit.data import Qrels
from irkit.errors import BadValueError, ConfigError
from irkit.training.data.config import DataConfig
from irkit.training.data.record import Record
from irkit.training.data.records import Records, Stream, query_keys
from irkit.training.data.sizes import estimate_tokens
from irkit.training.data.sources import judgments, open_records
from irkit.training.data.texts import Texts, TextStore
from irkit.training.example import Example

if TYPE_CHECKING:
    from irkit.model.pipeline import Pipeline

__all__ = ["Dataset", "Mixture", "open_data"]

Array = np.ndarray[Any, Any]
Key = tuple[int, int, int]
"""Number of a dataset, position in it, and what its draws depend on: an example of a batch."""


class Dataset:
    """Examples of one source.

    Args:
        records: What is read of it.
        config: Which documents of a record are used, and how datasets are mixed.
        queries: Texts of the queries by id, where records have none.
        corpus: Texts of the documents by id, likewise.
        qrels: Judgments: these documents are relevant, whatever the records say.

    Examples:
        >>> data = Dataset([Record("", "a query", (), ("relevant", "not"))], DataConfig(source="pairs"))
        >>> data.example(0).documents
        ('relevant', 'not')
    """

    def __init__(
        self,
        records: Records | Stream[Record],
        config: DataConfig,
        queries: Texts | None = None,
        corpus: Texts | None = None,
        qrels: Qrels | None = None,
    ) -> None:
        self.records, self.config = records, config
        self.queries: Texts = {} if queries is None else queries
        self.corpus: Texts = {} if corpus is None else corpus
        self.sizes: Array | None = None
        self._relevant = {
            query: frozenset(doc for doc, grade in judged.items() if grade >= config.relevant_grade)
            for query, judged in (qrels or {}).items()
        }

    @property
    def streaming(self) -> bool:
        """Whether it has no length."""
        return isinstance(self.records, Stream)

    def __len__(self) -> int:
        if isinstance(self.records, Stream):
            raise TypeError(f"{self.config.source}: a stream has no length; give max_steps")
        return min(len(self.records), self.config.limit or len(self.records))

    def query_keys(self) -> Array | None:
        """``(n,)`` int64, equal where the queries of examples are; None of streams."""
        if isinstance(self.records, Stream):
            return None
        return query_keys(self.records)[: len(self)]

    def sample(self, count: int) -> list[Record]:
        """At most ``count`` records from all over; of a stream the first 100, or none if it is read once."""
        if isinstance(self.records, Stream):
            return [] if self.records.once else list(islice(self.records.read(), min(count, 100)))
        places = np.unique(np.linspace(0, len(self) - 1, min(count, len(self)), dtype=np.int64))
        return [self.records[place] for place in places.tolist()]

    def example(self, index: int, seed: Sequence[int] = (0,)) -> Example:
        """Example ``index``, its documents drawn by ``seed`` where they are drawn.

        Raises:
            BadValueError: There is no text of an id.
        """
        record = self.records[index]
        names = record.document_ids or record.documents or ()
        known = self.known(record)
        chosen, positives = choose(record, known, self.config, seed)
        scores = record.scores if self.config.scores else None
        documents = record.documents
        return Example(
            self._text(self.queries, record.query_id, "query") if record.query is None else record.query,
            tuple(
                self._text(self.corpus, names[i], "document") if documents is None else documents[i]
                for i in chosen
            ),
            None if scores is None else tuple(scores[i] for i in chosen),
            positives,
            tuple(names[i] for i in chosen) if record.document_ids else (),
            known,
        )

    def known(self, record: Record) -> frozenset[str]:
        """Names of the documents known to be relevant to the query of a record."""
        names = record.document_ids or record.documents or ()
        return self._relevant.get(record.query_id, frozenset()) | frozenset(names[: record.positives])

    def _text(self, texts: Texts, name: str, what: str) -> str:
        try:
            return texts[name]
        except KeyError:
            raise BadValueError(
                f"{self.config.source}: no text of {what} {name!r}; {_remedy(what, texts)}"
            ) from None


def _remedy(what: str, texts: Texts) -> str:
    key = "queries" if what == "query" else "corpus"
    there = getattr(texts, "source", None)
    return f"it is not in {key}: {there}" if there else f"give {key}: where the texts are"


def choose(
    record: Record, known: frozenset[str], config: DataConfig, seed: Sequence[int]
) -> tuple[list[int], int]:
    """Which documents of a record an example has: relevant ones first, each part in the record's order.

    Without scores it is one relevant document, and ``config.documents - 1`` that are not known to be
    relevant; with scores one relevant document and any others.

    Returns:
        Positions in the record, and how many of the first are relevant.
    """
    names, scores = record.document_ids or record.documents or (), record.scores if config.scores else None
    relevant = [i for i, name in enumerate(names) if i < record.positives or name in known]
    others = [i for i in range(len(names)) if i >= record.positives and names[i] not in known]
    if config.documents is None:
        return relevant + others, len(relevant)
    pick = _picker(config.sampling, scores, seed)
    first = pick(relevant, 1)
    pool = others if scores is None else sorted({*relevant, *others} - {*first})
    rest = pick(pool, config.documents - len(first))
    chosen = sorted({*first, *rest})
    marked = set(relevant)
    positives = [i for i in chosen if i in marked]
    return positives + [i for i in chosen if i not in marked], len(positives)


def _picker(
    sampling: str, scores: tuple[float, ...] | None, seed: Sequence[int]
) -> Callable[[list[int], int], list[int]]:
    if sampling == "first":
        return lambda places, count: places[:count]
    if sampling == "top":
        if scores is None:
            raise ConfigError("sampling 'top' needs scores; expected 'first' or 'random' without")
        return lambda places, count: sorted(places, key=lambda i: -scores[i])[:count]
    generator: list[np.random.Generator] = []

    def draw(places: list[int], count: int) -> list[int]:
        if len(places) <= count:
            return places
        if not generator:  # making one takes longer than drawing
            generator.append(np.random.default_rng(list(seed)))
        return [places[i] for i in generator[0].choice(len(places), count, replace=False).tolist()]

    return draw


class Mixture:
    """Datasets side by side, whose examples are named by `Key`: what a `DataLoader` reads.

    Args:
        datasets: At least one.
        seed: Of the documents that are drawn.

    Raises:
        ConfigError: Some have a weight and others none, or a stream is mixed without weights.
    """

    def __init__(self, datasets: Sequence[Dataset], seed: int = 0) -> None:
        self.datasets, self.seed = list(datasets), seed
        if not self.datasets:
            raise ConfigError("data: expected at least one dataset, got none")
        weighted = [each.config.source for each in self.datasets if each.config.weight is not None]
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

    def measure(self, model: Pipeline) -> None:
        """Estimate how many tokens each example has, from the bytes of its texts; reads the records once."""
        for dataset in self.datasets:
            if not dataset.streaming:
                dataset.sizes = estimate_tokens(dataset, model)

    def __len__(self) -> int:
        return sum(map(len, self.datasets))

    def __getitem__(self, key: Key) -> Example:
        number, index, cycle = key
        return self.datasets[number].example(index, (self.seed, number, cycle, index))


def open_data(configs: Sequence[DataConfig], seed: int = 0) -> Mixture:
    """Open datasets; files that are new are read once, to note where their lines are.

    Raises:
        StorageError: A file is missing.
        BadValueError: A row is malformed; the message names file and line.
        ConfigError: Keys do not go together.
    """
    return Mixture([_open(config) for config in configs], seed)


def _open(config: DataConfig) -> Dataset:
    records = open_records(config)
    folder = config.source if Path(config.source).is_dir() else None
    corpus = config.corpus or folder
    queries = config.queries or (corpus if corpus and Path(corpus).is_dir() else None)
    if not isinstance(records, Stream) and not len(records):
        raise BadValueError(f"{config.source}: it has no examples")
    return Dataset(
        records,
        config,
        TextStore(queries, "queries") if queries else None,
        TextStore(corpus) if corpus else None,
        judgments(config),
    )
