"""Batches of examples: texts to token ids, every document once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from irkit.errors import BadValueError
from irkit.ragged import Ragged
from irkit.training.data.caching import hash_of
from irkit.training.example import Batch, Example

if TYPE_CHECKING:
    from irkit.model.pipeline import Pipeline

__all__ = ["Collator"]


class Collator:
    """Makes a `Batch` of examples.

    Two examples of one query share what is known to be relevant to it, and two documents of one text are one.

    Args:
        model: Its tokenizers, prompts and lengths are used.
        texts: Whether batches keep the texts.

    Examples:
        >>> batch = Collator(model)([Example("a query", ("relevant", "not"))])  # doctest: +SKIP
    """

    def __init__(self, model: Pipeline, texts: bool = False) -> None:
        self.model, self.texts = model, texts

    def __call__(self, examples: Sequence[Example]) -> Batch:
        """Join examples.

        Raises:
            BadValueError: There are none, or only some have scores.
        """
        scored = sum(example.scores is not None for example in examples)
        if not examples or scored not in (0, len(examples)):
            raise BadValueError(
                f"batch: {scored} of {len(examples)} examples have scores; expected all or none"
            )
        rows: dict[str, int] = {}
        own = _filled(
            [[rows.setdefault(text, len(rows)) for text in example.documents] for example in examples], -1
        )
        scores = [example.scores or () for example in examples]
        queries, documents = [example.query for example in examples], list(rows)
        model = self.model
        return Batch(
            model.tokenize(queries, model.template("query")),
            model.tokenize(documents, model.template("document")),
            own,
            torch.tensor([example.positives for example in examples]),
            _relevant(examples, own, len(rows)),
            torch.tensor([hash_of(text) for text in documents]),
            _filled(scores, math.nan).float() if scored else None,
            (queries, documents) if self.texts else None,
            *_names(examples, own, len(rows)),
        )


def _relevant(examples: Sequence[Example], own: torch.Tensor, width: int) -> torch.Tensor:
    """``(b, d)`` bool; queries of one text know the same."""
    known: dict[str, set[int]] = {example.query: set() for example in examples}
    names: dict[str, set[int]] = {}  # of a document by id or text; two ids may have one text
    for example, row in zip(examples, own.tolist(), strict=True):
        known[example.query].update(row[: example.positives])
        for name, place in zip(example.ids or example.documents, row, strict=False):
            names.setdefault(name, set()).add(place)
    for example in examples:
        for name in example.relevant & names.keys():
            known[example.query] |= names[name]
    relevant = torch.zeros(len(examples), width, dtype=torch.bool)
    for number, example in enumerate(examples):
        relevant[number, list(known[example.query])] = True
    return relevant


def _names(examples: Sequence[Example], own: torch.Tensor, width: int) -> tuple[torch.Tensor, Ragged]:
    """What `Batch` calls ``names`` and ``known``: by these another process knows what is relevant here."""
    names, known = torch.zeros(width, dtype=torch.int64), []
    for example, row in zip(examples, own.tolist(), strict=True):
        ids = [hash_of(name) for name in example.ids or example.documents]
        names[row[: len(ids)]] = torch.tensor(ids)
        known.append([*ids[: example.positives], *map(hash_of, example.relevant)])
    return names, Ragged.from_rows(known, dtype=torch.int64)


def _filled(rows: Sequence[Sequence[float]], filler: float) -> torch.Tensor:
    """``(n, longest)``, float64 or, of whole numbers, int64."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])
