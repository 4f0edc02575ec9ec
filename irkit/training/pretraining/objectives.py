"""Objectives of pre-training: each is a configuration; several are weighted and added.

Masked auto-encoding and masked bag-of-words train the vector of a text (TITE), masked language modelling its
tokens. Masked auto-encoding and masked language modelling together are RetroMAE. Distillation learns from
another model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn

from irkit.errors import BadValueError
from irkit.model import Model
from irkit.training.logit_losses import bag_loss, token_loss
from irkit.training.pretraining.decoder import Decoder
from irkit.training.pretraining.distillation_objectives import Distillation
from irkit.training.pretraining.next_sentence import NextSentence
from irkit.training.pretraining.pretrain_step import (
    BaseObjective,
    Encoded,
    ObjectiveModule,
    PredictionHead,
    Value,
    own_encoder,
)
from irkit.utils.kinds import KindOf, own_kinds
from irkit.utils.plugins import Registry


class MaskedAutoEncoding(BaseObjective):
    """Cross-entropy of all tokens of a text, predicted from the vector of the text and other tokens.

    Attributes:
        mask_rate: Share of the other tokens that the decoder, which makes the predictions, does not see.
        average: ``"texts"`` takes the mean over the tokens of each text, then over texts, as the equation
            does; ``"tokens"`` takes the mean over all tokens, in which long texts weigh more.

    Source: Schlatt et al. 2025 (TITE), section 3.3, L_MAE; Xiao et al. 2022, "RetroMAE", section 3.3.
    """

    kind: Literal["masked_auto_encoding"] = "masked_auto_encoding"
    mask_rate: float = Field(default=0.5, ge=0, le=1)
    average: Literal["texts", "tokens"] = "tokens"

    def prepare(self, model: Model, seed: int = 0) -> ObjectiveModule:
        """Make the decoder and a head; see `BaseObjective.prepare`."""
        return _seeded(lambda: _AutoEncoding(model, self, seed), model, seed)


class BagOfWords(BaseObjective):
    """Binary cross-entropy of the set of tokens of a text, predicted from the vector of the text.

    Source: Schlatt et al. 2025 (TITE), section 3.3, L_BOW; Lin et al. 2017, "Focal Loss for Dense Object
    Detection", section 4.1, for the initial bias of the head.
    """

    kind: Literal["bag_of_words"] = "bag_of_words"

    def prepare(self, model: Model, seed: int = 0) -> ObjectiveModule:
        """Make a head; see `BaseObjective.prepare`."""
        return _seeded(lambda: _BagOfWords(model), model, seed)


class MaskedLanguageModeling(BaseObjective):
    """Cross-entropy of the tokens that were hidden from the encoder, predicted from their hidden states.

    Source: Devlin et al. 2019, "BERT", section 3.1.
    """

    kind: Literal["masked_language_modeling"] = "masked_language_modeling"

    def prepare(self, model: Model, seed: int = 0) -> ObjectiveModule:
        """Make a head; see `BaseObjective.prepare`."""
        return _seeded(lambda: _LanguageModeling(model), model, seed)


OBJECTIVES: Registry[type[BaseObjective]] = Registry(
    "irkit.objectives",
    BaseObjective,
    own_kinds(BagOfWords, Distillation, MaskedAutoEncoding, MaskedLanguageModeling, NextSentence),
)
"""All objectives by their kind; other packages add some by entry points of this group."""

Objective: TypeAlias = Annotated[BaseObjective, KindOf(OBJECTIVES)]
"""Field of a configuration that holds any objective of the table."""


_PRIOR = 0.01  # initial probability of each token: most tokens are not in a text, and heads start knowing it


class _AutoEncoding(ObjectiveModule):
    def __init__(self, model: Model, config: MaskedAutoEncoding, seed: int) -> None:
        super().__init__()
        encoder = own_encoder(model, "masked auto-encoding")
        _check_vectors(model, "masked auto-encoding")
        self.decoder, self.average = Decoder(encoder, config.mask_rate, seed), config.average
        self.head = PredictionHead(encoder)

    def forward(self, encoded: Encoded) -> Value:
        batch = encoded.batch
        assert encoded.vectors is not None
        hidden = self.decoder(encoded.encoder.embeddings, encoded.vectors, batch.original, batch.numbers)
        labels, hidden = batch.original.values[batch.ordinary], hidden[batch.ordinary]
        if self.average == "tokens":
            return _prediction_loss(self.head, encoded, hidden, labels)
        rows = batch.original.row_ids()[batch.ordinary]
        lengths = torch.bincount(rows, minlength=len(batch))
        value = _prediction_loss(self.head, encoded, hidden, labels, 1 / lengths[rows])
        count = int((lengths > 0).sum())
        value.parts["accuracy"] = (
            value.parts["accuracy"] * count / max(1, value.count)
        )  # a share of the tokens nevertheless
        return replace(value, count=count)


class _BagOfWords(ObjectiveModule):
    def __init__(self, model: Model) -> None:
        super().__init__()
        _check_vectors(model, "masked bag-of-words")
        self.head = PredictionHead(own_encoder(model, "masked bag-of-words"))
        nn.init.constant_(self.head.bias, math.log(_PRIOR / (1 - _PRIOR)))

    def forward(self, encoded: Encoded) -> Value:
        assert encoded.vectors is not None
        words, terms = encoded.encoder.word_embeddings, encoded.batch.terms
        return Value(bag_loss(self.head(encoded.vectors), words, self.head.bias, terms), len(encoded.batch))


class _LanguageModeling(ObjectiveModule):
    def __init__(self, model: Model) -> None:
        super().__init__()
        encoder = own_encoder(model, "masked language modelling")
        if any(encoder.config.schedule):
            raise BadValueError(
                "masked language modelling: the encoder pools, so that tokens have no hidden states of their "
                "own; expected one without pooling, or another objective"
            )
        self.head = PredictionHead(encoder)

    def forward(self, encoded: Encoded) -> Value:
        batch = encoded.batch
        return _prediction_loss(self.head, encoded, encoded.hidden.values[batch.positions], batch.labels)


def _prediction_loss(
    head: PredictionHead, encoded: Encoded, hidden: Tensor, labels: Tensor, factors: Tensor | None = None
) -> Value:
    """Return the cross-entropy of ``labels (m,)`` given ``hidden (m, width)``, times ``factors (m,)``."""
    words = encoded.encoder.word_embeddings
    total, right = token_loss(head(hidden), words, head.bias, labels, factors=factors)
    return Value(total, len(labels), {"accuracy": right})


def _check_vectors(model: Model, objective: str) -> None:
    """Raise BadValueError unless a model makes one vector per text by one way of pooling."""
    pooling = getattr(model.head, "pooling", ())
    if len(pooling) != 1:
        raise BadValueError(
            f"{objective}: trains the vector of a text, made by one way of pooling; this model makes "
            f"{model.kind} vectors" + (f" by {len(pooling)} ways" if pooling else "")
        )


def _seeded(make: Callable[[], ObjectiveModule], model: Model, seed: int) -> ObjectiveModule:
    """Initialise a module as BERT does: normal weights of standard deviation 0.02, biases 0.

    The module gets the device and the dtype of the model. The state of torch's generator stays as it is.
    """
    words = own_encoder(model, "pre-training").word_embeddings
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = make()
        for part in module.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=0.02)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
    return module.to(words.device, words.dtype)
