"""Next-sentence prediction by the scores of a retriever: does a document follow a query sentence?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from irkit.core.ragged import Ragged
from irkit.core.representation import Representation
from irkit.errors import BadValueError
from irkit.heads import Side
from irkit.model import Model
from irkit.training.masking import MaskingConfig, PretrainBatch, PretrainCollator
from irkit.training.pretraining.pretrain_step import BaseObjective, Encoded, ObjectiveModule, Value
from irkit.training.train_step import comparable, compare_all

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_SIDES: tuple[Side, Side] = ("query", "document")


class NextSentence(BaseObjective):
    """Binary cross-entropy of whether a document follows a query, by the score of the model.

    A query is a sentence. It is compared with the sentences that follow it, and with the sentences that
    follow the query of the next text of the batch. The probability is the logistic function of the score,
    times a learned factor, plus a learned bias. Attention (kind mva) is trained with the model.

    Source: Multi-Vector Attention Models for Deep Re-ranking, sections 2.3 and 3; Devlin et al. 2019,
    "BERT", section 3.1. Neither says how two separate encoders predict: the score and the equal number of
    right and wrong pairs are this implementation's.
    """

    kind: Literal["next_sentence"] = "next_sentence"

    def prepare(self, model: Model, seed: int = 0) -> ObjectiveModule:
        """Make the factor and the bias; see `BaseObjective.prepare`."""
        return _NextSentence(model)


class _NextSentence(ObjectiveModule):
    def __init__(self, model: Model) -> None:
        super().__init__()
        if model.kind == "several" or model.query_model is not None:
            raise BadValueError(
                "next-sentence prediction: got a model with several heads or with an encoder of its own for "
                "queries; expected one encoder and one head"
            )
        if model.head.window != (1, 1) and not all(model.head.pools(side) for side in _SIDES):
            raise BadValueError(
                "next-sentence prediction: the encoder pools the texts of one side; expected one that pools "
                "all texts, or none"
            )
        if getattr(model.head.config, "query_expansion", None) is not None:
            raise BadValueError(
                "next-sentence prediction: the model fills queries with mask tokens, as hidden tokens are; "
                "leave model.config.query_expansion out"
            )
        self.factor = nn.Parameter(torch.ones((), device=model.device))
        self.bias = nn.Parameter(torch.zeros((), device=model.device))

    def forward(self, encoded: Encoded) -> Value:
        half = len(encoded.batch) // 2
        rows = {"query": slice(0, half), "document": slice(half, None)}
        queries, documents = (_represent(encoded, rows[side], side) for side in _SIDES)
        with torch.autocast(encoded.batch.tokens.device.type, enabled=False):
            scores = compare_all(encoded.model, encoded.interaction, queries, documents)
            right = scores.diagonal()
            # a batch of one text has no other text as the wrong sentence
            wrong = scores.roll(-1, 1).diagonal() if half > 1 else right[:0]
            logits = self.factor * torch.cat([right, wrong]) + self.bias
            targets = torch.zeros_like(logits)
            targets[:half] = 1.0
            total = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
        correct = ((logits > 0) == (targets > 0)).sum()
        return Value(total, len(logits), {"accuracy": correct})


def _represent(encoded: Encoded, rows: slice, side: Side) -> Representation:
    """Return the representations of some rows, as a search compares texts of this side."""
    model = encoded.model
    prompt_length = model.pipeline(side).prompt_length
    representation = model.head.for_training(
        encoded.hidden[rows], encoded.batch.tokens[rows], prompt_length, side
    )
    return comparable(model, representation, None, side)


class PairCollator:
    """Make a `PretrainBatch` of ``2 n`` rows of ``n`` numbered texts: a sentence of each, then what follows.

    The number of a text decides which of its sentences is taken, and which tokens are hidden. A text of one
    sentence is cut in its middle. Rows are cut at the lengths of queries and documents of the model, and
    begin with its prompts.

    Attributes:
        max_length: Number of tokens of both rows of a text together.

    Examples:
        >>> collate = PairCollator(model, MaskingConfig(rate=0.15))  # doctest: +SKIP
        >>> len(collate([(0, "A sentence. Another one."), (1, "One. Two. Three.")]))  # doctest: +SKIP
        4
    """

    def __init__(
        self, model: Model, masking: MaskingConfig | None = None, max_length: int = 512, seed: int = 0
    ) -> None:
        """Store tokenizer, prompts and lengths.

        Args:
            model: Model to train.
            masking: Which tokens are hidden from the encoder; None hides none.
            max_length: Rows are cut to this number of tokens, or to a smaller one that the model has.
            seed: Seed of the sentences and the hidden tokens.

        Raises:
            ConfigError: Tokens are to be hidden, but the tokenizer has no mask token.
        """
        pipelines = [model.pipeline(side) for side in _SIDES]
        self._prompts = [pipeline.prompt for pipeline in pipelines]
        lengths = [min(filter(None, (max_length, pipeline.max_length))) for pipeline in pipelines]
        self._collate = [PretrainCollator(model.tokenizer, masking, length, seed) for length in lengths]
        self.max_length: int | None = sum(lengths)
        self.seed = seed

    def __call__(self, texts: Sequence[tuple[int, str]]) -> PretrainBatch:
        """Cut texts in pairs, tokenize both parts, and hide some of their tokens."""
        pairs = [split_text(text, np.random.default_rng([self.seed, number])) for number, text in texts]
        numbered = list(zip(texts, pairs, strict=True))
        queries, documents = (
            collate([(2 * number + row, prompt + pair[row]) for (number, _), pair in numbered])
            for row, (collate, prompt) in enumerate(zip(self._collate, self._prompts, strict=True))
        )
        return PretrainBatch(
            tokens=Ragged.concat([queries.tokens, documents.tokens]),
            positions=torch.cat([queries.positions, documents.positions + len(queries.tokens.values)]),
            labels=torch.cat([queries.labels, documents.labels]),
            original=Ragged.concat([queries.original, documents.original]),
            ordinary=torch.cat([queries.ordinary, documents.ordinary]),
            terms=Ragged.concat([queries.terms, documents.terms]),
            numbers=torch.cat([queries.numbers, documents.numbers]),
        )


def split_text(text: str, draws: np.random.Generator) -> tuple[str, str]:
    """Return a sentence of a text, and all that follows; any but the last sentence is drawn.

    Args:
        text: Sentences end in ``.``, ``!`` or ``?`` and white space.
        draws: Draws the sentence.

    Examples:
        >>> split_text("One two three four", np.random.default_rng(0))
        ('One two', 'three four')
    """
    sentences = [part for part in _SENTENCE_END.split(text.strip()) if part]
    if len(sentences) > 1:
        chosen = int(draws.integers(len(sentences) - 1))
        return sentences[chosen], " ".join(sentences[chosen + 1 :])
    words = text.split()
    half = (len(words) + 1) // 2
    return " ".join(words[:half]), " ".join(words[half:])
