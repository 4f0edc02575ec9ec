"""How many tokens examples have, about, without tokenizing all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from irkit.training.data.record import Record
from irkit.training.data.texts import Texts, TextStore

if TYPE_CHECKING:
    from irkit.model.pipeline import Pipeline
    from irkit.training.data.dataset import Dataset

__all__ = ["estimate_tokens"]

Array = np.ndarray[Any, Any]

_SAMPLE = 200
_SPECIAL = 2  # tokens of every text
_WHOLE = 1 << 20

Side = Literal["query", "document"]


def estimate_tokens(dataset: Dataset, model: Pipeline) -> Array:
    """``(n,)`` int64 tokens of the query and the documents of each example: bytes times what a sample has.

    Of an example whose documents are drawn it is their number times the mean of all.
    """
    sample, sides = dataset.sample(_SAMPLE), get_args(Side)
    rates = [_rate(dataset, sample, side, model) for side in sides]
    limits = [model.template(side).max_length or math.inf for side in sides]
    sizes = np.empty(len(dataset), np.int64)
    for row in range(len(sizes)):
        record = dataset.records[row]
        query, documents = (
            np.minimum(_bytes(dataset, record, side) * rate + _SPECIAL, limit)
            for side, rate, limit in zip(sides, rates, limits, strict=True)
        )
        used = min(dataset.config.documents or len(record), len(record))
        sizes[row] = np.ceil(query.sum() + used * documents.mean())
    return sizes


def _bytes(dataset: Dataset, record: Record, side: Side) -> Array:
    """``(n,)`` int64, of the texts of one side of a record; of a file, the lines they are in count."""
    names, store = _names(record, side), _store(dataset, side)
    if _given(record, side) is None and isinstance(store, TextStore):
        return store.sizes(names)
    return np.asarray(
        [len(text.encode(errors="replace")) for text in _texts(dataset, record, side)], np.int64
    )


def _texts(dataset: Dataset, record: Record, side: Side) -> Sequence[str]:
    given, store = _given(record, side), _store(dataset, side)
    return [store[name] for name in _names(record, side)] if given is None else given


def _given(record: Record, side: Side) -> Sequence[str] | None:
    if side == "document":
        return record.documents
    return None if record.query is None else [record.query]


def _names(record: Record, side: Side) -> Sequence[str]:
    return record.document_ids if side == "document" else [record.query_id]


def _store(dataset: Dataset, side: Side) -> Texts:
    return dataset.corpus if side == "document" else dataset.queries


def _rate(dataset: Dataset, sample: list[Record], side: Side, model: Pipeline) -> float:
    """Tokens a byte, without those that every text has."""
    texts = [_texts(dataset, record, side)[0] for record in sample]
    total = sum(float(_bytes(dataset, record, side)[0]) for record in sample)
    lengths = model.of(side).tokenizer(texts, "", _WHOLE).lengths - _SPECIAL
    return float(lengths.sum()) / max(total, 1.0)
