"""Masking: which tokens of a text are hidden, and what is asked for in their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from irkit.config import Config
from irkit.errors import BadValueError, ConfigError
from irkit.ragged import Ragged
from irkit.tokenizer import Piece, Tokenizer

__all__ = ["MaskedBatch", "Masking", "MaskingConfig", "masking_rates"]


class MaskingConfig(Config):
    """Which tokens are hidden, and behind what.

    Attributes:
        rate: Share of the tokens of a text that is hidden, special ones not counted.
        emphasis: How many times as likely a new token is hidden as one that the model knows: lambda of the
            overlap-aware masking curriculum. 1 hides all alike.
        masked: Share of the hidden tokens in whose place there is the mask token.
        random: Share in whose place there is any token; the rest stays as it is, and is asked for all the
            same.

    Source: "Bridging Vocabulary Gaps", sections 4.2.3 and 5.3; for ``masked`` and ``random``, Devlin et al.
    2019, "BERT", section 3.1.
    """

    rate: float = Field(default=0.3, gt=0, le=1)
    emphasis: float = Field(default=2.0, ge=1)
    masked: float = Field(default=0.8, ge=0, le=1)
    random: float = Field(default=0.1, ge=0, le=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        highest = self.rate * self.emphasis
        if highest > 1:
            raise ValueError(
                f"a new token among known ones would be hidden with probability {highest:g}, rate x "
                "emphasis; expected at most 1"
            )
        if self.masked + self.random > 1:
            raise ValueError(f"masked + random is {self.masked + self.random:g}, expected at most 1")
        if not (self.masked or self.random):
            raise ValueError("'masked' and 'random' are both 0, so that nothing would be hidden")
        return self


@dataclass(frozen=True)
class MaskedBatch:
    """Texts with hidden tokens.

    Attributes:
        tokens: Ragged ids ``(total,)``, as the encoder gets them.
        places: ``(m,)`` int64, positions in ``tokens.values`` of what is asked for.
        labels: ``(m,)`` int64, the answers: terms of the head.
    """

    tokens: Ragged
    places: Tensor
    labels: Tensor

    def to(self, device: torch.device | str) -> Self:
        """On another device."""
        return type(self)(self.tokens.to(device), self.places.to(device), self.labels.to(device))


class Masking:
    """Makes a `MaskedBatch` of numbered texts; the number of a text decides what is hidden of it.

    Examples:
        >>> batch = Masking(model.tokenizer, seed=1)([(0, "a text"), (1, "another")])  # doctest: +SKIP
        >>> batch.labels  # doctest: +SKIP
        tensor([3793])
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: MaskingConfig | None = None,
        *,
        is_new: Tensor | None = None,
        labels: Tokenizer | None = None,
        max_length: int | None = None,
        seed: int = 0,
    ) -> None:
        """Prepare.

        Args:
            tokenizer: Of the model.
            config: See there.
            is_new: ``(vocabulary,)`` bool, tokens that get ``emphasis``; None: there are none.
            labels: Of the answers, where they are not tokens of the model: each is asked for at the first
                token that it overlaps (EMLM).
            max_length: Texts are cut there; None is where the tokenizer cuts them.
            seed: Of what is hidden.

        Raises:
            BadValueError: ``is_new`` is not of the vocabulary of the answers.
            ConfigError: The tokenizer has no mask token.

        Source: for ``labels``, Dudek et al. 2023, "Learning Sparse Lexical Representations Over Specified
        Vocabularies for Retrieval".
        """
        self.tokenizer, self.config, self.seed = tokenizer, config or MaskingConfig(), seed
        self.labels, self.max_length = labels, max_length
        answers = tokenizer if labels is None else labels
        size = answers.vocab_size
        if "mask" not in tokenizer.special_ids:
            raise ConfigError(f"masked language modelling: {tokenizer!r} has no mask token")
        if is_new is not None and (is_new.dtype != torch.bool or is_new.dim() != 1 or len(is_new) < size):
            raise BadValueError(
                f"masked language modelling: is_new is {is_new.dtype} {tuple(is_new.shape)}, expected bool "
                f"for each of the {size} tokens"
            )
        self._weights = torch.ones(size if is_new is None else len(is_new), dtype=torch.float64)
        if is_new is not None:
            self._weights[is_new.cpu()] = self.config.emphasis
        self._weights[answers.special_tokens()] = 0.0
        special = set(tokenizer.special_tokens())
        self._ordinary = torch.tensor([i for i in range(tokenizer.vocab_size) if i not in special])

    def __call__(self, texts: Sequence[tuple[int, str]]) -> MaskedBatch:
        """Hide tokens of texts, each with its number."""
        if self.labels is None:
            tokens = self.tokenizer([text for _, text in texts], max_length=self.max_length)
            places, labels = torch.arange(len(tokens.values)), tokens.values
            weights = self._weights[labels]
        else:
            tokens, places, labels = _asked(
                [text for _, text in texts], self.tokenizer, self.labels, self.max_length
            )
            weights = torch.zeros(len(tokens.values), dtype=torch.float64)
            weights.scatter_reduce_(0, places, self._weights[labels], "amax")
        rates = masking_rates(tokens.with_values(weights), self.config.rate)
        draws = [
            np.random.default_rng([self.seed, number]).random((length, 3))
            for (number, _), length in zip(texts, tokens.lengths.tolist(), strict=True)
        ]
        hide, how, which = torch.from_numpy(np.concatenate(draws)).T
        hidden = hide < rates
        values = tokens.values.clone()
        values[hidden & (how < self.config.masked)] = self.tokenizer.special_ids["mask"]
        other = hidden & (how >= self.config.masked) & (how < self.config.masked + self.config.random)
        values[other] = self._ordinary[(which[other] * len(self._ordinary)).long()]
        asked = hidden[places] & (self._weights[labels] > 0)
        return MaskedBatch(tokens.with_values(values), places[asked], labels[asked])


def masking_rates(weights: Ragged, rate: float) -> Tensor:
    """Probabilities proportional to weights, whose mean over the tokens of a text with a weight is ``rate``.

    Args:
        weights: Ragged float64 ``(total,)``; 0 is never hidden.
        rate: Of each text.

    Returns:
        ``(total,)``: ``rate * w / mean(w)``.

    Examples:
        >>> masking_rates(Ragged.from_rows([[0.0, 1.0, 2.0, 1.0]], dtype=torch.float64), 0.25).tolist()
        [0.0, 0.1875, 0.375, 0.1875]

    Source: "Bridging Vocabulary Gaps", section 4.2.3.
    """
    rows, values = weights.row_ids(), weights.values
    sums = torch.zeros(len(weights), dtype=values.dtype).index_add_(0, rows, values)
    counts = torch.zeros(len(weights), dtype=values.dtype).index_add_(0, rows, (values > 0).to(values.dtype))
    return values * (rate * counts / sums.clamp(min=1e-300))[rows]


def _asked(
    texts: Sequence[str], tokenizer: Tokenizer, labels: Tokenizer, max_length: int | None
) -> tuple[Ragged, Tensor, Tensor]:
    """Tokens, and for each token of the answers the first place that it overlaps."""
    rows: list[list[int]] = []
    places: list[int] = []
    answers: list[int] = []
    total = 0
    for text in texts:
        pieces = tokenizer.pieces(text, max_length=max_length)
        rows.append(_ids(tokenizer, pieces))
        spans = [
            (piece.end, piece.start, total + i) for i, piece in enumerate(pieces) if piece.end > piece.start
        ]
        wanted = [piece for piece in labels.pieces(text) if piece.end > piece.start]
        i = 0
        for piece, label in zip(wanted, _ids(labels, wanted), strict=True):
            while i < len(spans) and spans[i][0] <= piece.start:
                i += 1
            if i < len(spans) and spans[i][1] < piece.end:
                places.append(spans[i][2])
                answers.append(label)
        total += len(pieces)
    return (
        Ragged.from_rows(rows, dtype=torch.int64),
        torch.tensor(places).long(),
        torch.tensor(answers).long(),
    )


def _ids(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> list[int]:
    return tokenizer.ids(piece.token for piece in pieces)
