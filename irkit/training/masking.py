"""Batches of texts without labels: which of their tokens are hidden, and what has to be predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from irkit.config import Config
from irkit.core.ragged import Ragged
from irkit.errors import BadValueError, ConfigError
from irkit.tokenizer import Tokenizer
from irkit.training.example import Movable


class MaskingConfig(Config):
    """Which tokens are hidden, and what replaces them.

    Attributes:
        rate: Share of the tokens of a text that are hidden, special tokens not counted.
        emphasis: How many times more often a new token is hidden than a token that the model knows: lambda of
            the overlap-aware masking curriculum. 1 hides all tokens equally often.
        masked: Share of the hidden tokens that the mask token replaces.
        random: Share of the hidden tokens that a random token replaces. The rest stay visible, and are
            predicted all the same.

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
class MaskedBatch(Movable):
    """Texts with hidden tokens.

    Attributes:
        tokens: Ragged ids ``(total,)``, the input of the encoder.
        positions: ``(m,)`` int64, positions in ``tokens.values`` at which tokens are predicted.
        labels: ``(m,)`` int64, the right predictions: terms of the head.
    """

    tokens: Ragged
    positions: Tensor
    labels: Tensor


class Masking:
    """Make a `MaskedBatch` of numbered texts. The number of a text decides which of its tokens are hidden.

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
        """Prepare the rates of all tokens.

        Args:
            tokenizer: Tokenizer of the model.
            config: Rates.
            is_new: ``(vocabulary,)`` bool, tokens that get ``emphasis``; None emphasises none.
            labels: Tokenizer of the labels, if these are not tokens of the model. Each label is then
                predicted at the first token of the model that it overlaps (EMLM).
            max_length: Texts are cut to this number of tokens; None cuts them where the tokenizer does.
            seed: Seed of the draws.

        Raises:
            BadValueError: ``is_new`` has not one entry per label.
            ConfigError: The tokenizer has no mask token.

        Source: for ``labels``, Dudek et al. 2023, "Learning Sparse Lexical Representations Over Specified
        Vocabularies for Retrieval".
        """
        self.tokenizer, self.config, self.seed = tokenizer, config or MaskingConfig(), seed
        self.labels, self.max_length = labels, max_length
        answers = tokenizer if labels is None else labels
        size = answers.highest_id() + 1
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
        """Hide tokens of texts, each given with its number."""
        # the weight of a token is the largest weight of the labels that are predicted there
        strings = [text for _, text in texts]
        if self.labels is None:
            tokens = self.tokenizer(strings, max_length=self.max_length)
            positions, labels = torch.arange(len(tokens.values)), tokens.values
            weights = self._weights[labels]
        else:
            tokens, positions, labels = _align_labels(strings, self.tokenizer, self.labels, self.max_length)
            weights = torch.zeros(len(tokens.values), dtype=torch.float64)
            weights.scatter_reduce_(0, positions, self._weights[labels], "amax")
        # three draws per token decide whether it is hidden, in which of three ways, and behind which token
        rates = masking_rates(tokens.with_values(weights), self.config.rate)
        draws = [
            np.random.default_rng([self.seed, number]).random((length, 3))
            for (number, _), length in zip(texts, tokens.lengths.tolist(), strict=True)
        ]
        hide, way, which = torch.from_numpy(np.concatenate(draws)).T
        hidden = hide < rates
        values = tokens.values.clone()
        values[hidden & (way < self.config.masked)] = self.tokenizer.special_ids["mask"]
        random = hidden & (way >= self.config.masked) & (way < self.config.masked + self.config.random)
        values[random] = self._ordinary[(which[random] * len(self._ordinary)).long()]
        predicted = hidden[positions] & (self._weights[labels] > 0)
        return MaskedBatch(tokens.with_values(values), positions[predicted], labels[predicted])


def masking_rates(weights: Ragged, rate: float) -> Tensor:
    """Compute masking probabilities that are proportional to the weights of tokens.

    Their mean over the tokens of a text with a weight is ``rate``.

    Args:
        weights: Ragged float64 ``(total,)``; tokens of weight 0 are never hidden.
        rate: Mean rate of each text.

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


def _align_labels(
    texts: Sequence[str], tokenizer: Tokenizer, labels: Tokenizer, max_length: int | None
) -> tuple[Ragged, Tensor, Tensor]:
    """Tokenize texts with two tokenizers, and match the tokens of ``labels`` to the tokens of ``tokenizer``.

    Returns:
        The tokens of ``tokenizer``, and two int64 tensors ``(n,)`` with an entry per token of ``labels`` that
        overlaps a token of ``tokenizer``. The first tensor has the position of the first overlapped token in
        the values of the Ragged. The second tensor has the id of the label.
    """
    rows: list[list[int]] = []
    positions: list[int] = []
    answers: list[int] = []
    total = 0
    for text in texts:
        spans = tokenizer.token_spans(text, max_length=max_length)
        rows.append(tokenizer.ids(span.token for span in spans))
        of_text = [(span.end, span.start, total + i) for i, span in enumerate(spans) if span.end > span.start]
        label_spans = [span for span in labels.token_spans(text) if span.end > span.start]
        # both lists are in the order of the text
        i = 0
        for span, label in zip(label_spans, labels.ids(span.token for span in label_spans), strict=True):
            while i < len(of_text) and of_text[i][0] <= span.start:
                i += 1
            if i < len(of_text) and of_text[i][1] < span.end:
                positions.append(of_text[i][2])
                answers.append(label)
        total += len(spans)
    return (
        Ragged.from_rows(rows, dtype=torch.int64),
        torch.tensor(positions).long(),
        torch.tensor(answers).long(),
    )


@dataclass(frozen=True)
class PretrainBatch(MaskedBatch):
    """Texts without labels, for the objectives of pre-training.

    Attributes:
        tokens: Ragged ids ``(total,)``, the input of the encoder; some tokens may be hidden.
        original: Ragged ids of the same shape, without hidden tokens.
        ordinary: ``(total,)`` bool, True for all but special tokens.
        terms: Ragged int64, the distinct ordinary tokens of each original text.
        positions: ``(m,)`` int64, positions of the hidden tokens in ``tokens.values``.
        labels: ``(m,)`` int64, the hidden tokens.
        numbers: ``(n,)`` int64, numbers of the texts, which decide all random draws.
    """

    original: Ragged
    ordinary: Tensor
    terms: Ragged
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
        """Store the tokenizer and the settings of masking.

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
        return PretrainBatch(tokens, positions, labels, original, ordinary, terms, numbers)


def _distinct(tokens: Ragged) -> Ragged:
    """Return the distinct tokens of each row, in the order of ids."""
    size = int(tokens.values.max()) + 1 if len(tokens.values) else 1
    keys = torch.unique(tokens.row_ids() * size + tokens.values)
    return Ragged(keys % size, torch.bincount(keys // size, minlength=len(tokens)))
