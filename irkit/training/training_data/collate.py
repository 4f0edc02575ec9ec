"""Batches of examples: texts to token ids, every document once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from irkit.core.ragged import Ragged
from irkit.errors import BadValueError
from irkit.model import Model
from irkit.training.example import Batch, Example
from irkit.training.training_data.caching import hash_of


class Collator:
    """Join examples to a `Batch`.

    Examples with the same query share the documents that are relevant to it. Documents with the same text are
    one document of the batch.

    Args:
        model: The model whose tokenizers, prompts and lengths are used.
        texts: Whether batches keep the texts.

    Examples:
        >>> batch = Collator(model)([Example("a query", ("relevant", "not"))])  # doctest: +SKIP
    """

    def __init__(self, model: Model, texts: bool = False) -> None:
        self.model, self.texts = model, texts

    def __call__(self, examples: Sequence[Example]) -> Batch:
        """Join examples.

        Raises:
            BadValueError: There are no examples, or only some have scores.
        """
        scored = sum(example.scores is not None for example in examples)
        if not examples or scored not in (0, len(examples)):
            raise BadValueError(
                f"batch: {scored} of {len(examples)} examples have scores; expected all or none"
            )
        # number the documents by their texts
        rows: dict[str, int] = {}
        own = _pad(
            [[rows.setdefault(text, len(rows)) for text in example.documents] for example in examples], -1
        )
        queries, documents = [example.query for example in examples], list(rows)
        # names by which another process knows which documents of this one are relevant
        names, known = torch.zeros(len(rows), dtype=torch.int64), []
        for example, row in zip(examples, own.tolist(), strict=True):
            ids = [hash_of(name) for name in example.ids or example.documents]
            names[row[: len(ids)]] = torch.tensor(ids)
            known.append([*ids[: example.positives], *map(hash_of, example.relevant)])
        model = self.model
        return Batch(
            model.pipeline("query").tokenize(queries),
            model.pipeline("document").tokenize(documents),
            own,
            torch.tensor([example.positives for example in examples]),
            _relevant(examples, own, len(rows)),
            torch.tensor([hash_of(text) for text in documents]),
            _pad([example.scores or () for example in examples], math.nan).float() if scored else None,
            (queries, documents) if self.texts else None,
            names,
            Ragged.from_rows(known, dtype=torch.int64),
        )


def _relevant(examples: Sequence[Example], own: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``(b, d)`` bool: which documents are relevant; equal queries have equal rows."""
    known: dict[str, set[int]] = {example.query: set() for example in examples}
    numbers: dict[str, set[int]] = {}  # of the documents by name; a name may have two texts, and two a text
    for example, row in zip(examples, own.tolist(), strict=True):
        known[example.query].update(row[: example.positives])
        for name, number in zip(example.ids or example.documents, row, strict=False):
            numbers.setdefault(name, set()).add(number)
    for example in examples:
        for name in example.relevant & numbers.keys():
            known[example.query] |= numbers[name]
    relevant = torch.zeros(len(examples), width, dtype=torch.bool)
    for row, example in zip(relevant, examples, strict=True):
        row[list(known[example.query])] = True
    return relevant


def _pad(rows: Sequence[Sequence[float]], filler: float) -> torch.Tensor:
    """Return ``(n, longest)``: float64, or int64 if all numbers are integers."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])
