"""Batches of pre-training: texts as they are, and as the encoder gets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from irkit.ragged import Ragged
from irkit.tokenizer import Tokenizer
from irkit.training.masking import Masking, MaskingConfig

__all__ = ["PretrainBatch", "PretrainCollator"]


@dataclass(frozen=True)
class PretrainBatch:
    """Texts without labels.

    Attributes:
        tokens: Ragged ids ``(total,)``, as the encoder gets them: some of them hidden, if that was asked for.
        original: Ragged ids of the same shape, with nothing hidden.
        ordinary: ``(total,)`` bool, what is no special token.
        terms: Ragged int64, the ordinary tokens of each original text, each once.
        places: ``(m,)`` int64, positions in ``tokens.values`` of what was hidden.
        labels: ``(m,)`` int64, what was there.
        numbers: ``(n,)`` int64 of the texts, which decide about every draw.
    """

    tokens: Ragged
    original: Ragged
    ordinary: Tensor
    terms: Ragged
    places: Tensor
    labels: Tensor
    numbers: Tensor

    def to(self, device: torch.device | str) -> Self:
        """On another device."""
        return type(self)(**{each.name: getattr(self, each.name).to(device) for each in fields(self)})

    def __len__(self) -> int:
        return len(self.numbers)


class PretrainCollator:
    """Makes a `PretrainBatch` of numbered texts; the number of a text decides what is hidden of it.

    Examples:
        >>> collate = PretrainCollator(model.tokenizer, max_length=512)  # doctest: +SKIP
        >>> collate([(0, "a text"), (1, "another")]).tokens  # doctest: +SKIP
        Ragged(2 rows, values (7,) torch.int64 cpu)
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        masking: MaskingConfig | None = None,
        max_length: int | None = None,
        seed: int = 0,
    ) -> None:
        """Prepare.

        Args:
            tokenizer: Of the model.
            masking: Which tokens are hidden from the encoder; None hides none.
            max_length: Texts are cut there; None is where the tokenizer cuts them.
            seed: Of what is hidden.

        Raises:
            ConfigError: Tokens shall be hidden, and the tokenizer has no mask token.
        """
        self.tokenizer, self.max_length = tokenizer, max_length
        self.masking = (
            None if masking is None else Masking(tokenizer, masking, max_length=max_length, seed=seed)
        )
        self._special = torch.tensor(sorted(tokenizer.special_tokens()), dtype=torch.int64)

    def __call__(self, texts: Sequence[tuple[int, str]]) -> PretrainBatch:
        """Tokenize texts, each with its number, and hide some of their tokens."""
        if self.masking is None:
            tokens = original = self.tokenizer([text for _, text in texts], max_length=self.max_length)
            places = labels = torch.zeros(0, dtype=torch.int64)
        else:
            masked = self.masking(texts)
            tokens, places, labels = masked.tokens, masked.places, masked.labels
            original = tokens.with_values(tokens.values.index_put((places,), labels))
        ordinary = ~torch.isin(original.values, self._special)
        numbers = torch.tensor([number for number, _ in texts], dtype=torch.int64)
        return PretrainBatch(
            tokens, original, ordinary, _distinct(original.where(ordinary)), places, labels, numbers
        )


def _distinct(tokens: Ragged) -> Ragged:
    """Each token of a row once, in the order of ids."""
    size = int(tokens.values.max()) + 1 if len(tokens.values) else 1
    keys = torch.unique(tokens.row_ids() * size + tokens.values)
    return Ragged(keys % size, torch.bincount(keys // size, minlength=len(tokens)))
