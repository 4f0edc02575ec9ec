"""Batches of pre-training: texts without labels, some of whose tokens may be hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from irkit.core.ragged import Ragged
from irkit.tokenizer import Tokenizer
from irkit.training.example import Movable
from irkit.training.masking import Masking, MaskingConfig


@dataclass(frozen=True)
class PretrainBatch(Movable):
    """Texts without labels.

    Attributes:
        tokens: Ragged ids ``(total,)``, the input of the encoder; some tokens may be hidden.
        original: Ragged ids of the same shape, without hidden tokens.
        ordinary: ``(total,)`` bool, True for all but special tokens.
        terms: Ragged int64, the distinct ordinary tokens of each original text.
        positions: ``(m,)`` int64, positions of the hidden tokens in ``tokens.values``.
        labels: ``(m,)`` int64, the hidden tokens.
        numbers: ``(n,)`` int64, numbers of the texts, which decide all random draws.
    """

    tokens: Ragged
    original: Ragged
    ordinary: Tensor
    terms: Ragged
    positions: Tensor
    labels: Tensor
    numbers: Tensor

    def __len__(self) -> int:
        return len(self.numbers)


class PretrainCollator:
    """Make a `PretrainBatch` of numbered texts. The number of a text decides which of its tokens are hidden.

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
            tokenizer: Tokenizer of the model.
            masking: Which tokens are hidden from the encoder; None hides none.
            max_length: Texts are cut to this number of tokens; None cuts them where the tokenizer does.
            seed: Seed of the hidden tokens.

        Raises:
            ConfigError: Tokens are to be hidden, but the tokenizer has no mask token.
        """
        self.tokenizer, self.max_length = tokenizer, max_length
        self.masking = (
            None if masking is None else Masking(tokenizer, masking, max_length=max_length, seed=seed)
        )
        self._special = torch.tensor(sorted(tokenizer.special_tokens()), dtype=torch.int64)

    def __call__(self, texts: Sequence[tuple[int, str]]) -> PretrainBatch:
        """Tokenize texts, each given with its number, and hide some of their tokens."""
        if self.masking is None:
            tokens = original = self.tokenizer([text for _, text in texts], max_length=self.max_length)
            positions = labels = torch.zeros(0, dtype=torch.int64)
        else:
            masked = self.masking(texts)
            tokens, positions, labels = masked.tokens, masked.positions, masked.labels
            original = tokens.with_values(tokens.values.index_put((positions,), labels))
        ordinary = ~torch.isin(original.values, self._special)
        terms = _distinct(original.where(ordinary))
        numbers = torch.tensor([number for number, _ in texts], dtype=torch.int64)
        return PretrainBatch(tokens, original, ordinary, terms, positions, labels, numbers)


def _distinct(tokens: Ragged) -> Ragged:
    """Return the distinct tokens of each row, in the order of ids."""
    size = int(tokens.values.max()) + 1 if len(tokens.values) else 1
    keys = torch.unique(tokens.row_ids() * size + tokens.values)
    return Ragged(keys % size, torch.bincount(keys // size, minlength=len(tokens)))
