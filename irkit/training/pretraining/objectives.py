"""Objectives of pre-training: each is a configuration; several together are weighted and added.

masked auto-encoding and masked bag-of-words train the vector of a text (TITE); masked language modelling its
tokens; the first and the last together are RetroMAE. Distillation teaches what another model makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn

from irkit.errors import BadValueError
from irkit.heads import PooledHead
from irkit.model import Model
from irkit.training.logit_losses import bag_loss, token_loss
from irkit.training.pretraining.base import (
    BaseObjective,
    Encoded,
    ObjectiveModule,
    PredictionHead,
    Value,
    own_encoder,
)
from irkit.training.pretraining.decoder import Decoder
from irkit.training.pretraining.distillation import Distillation

__all__ = ["BagOfWords", "MaskedAutoEncoding", "MaskedLanguageModeling", "Objective"]


class MaskedAutoEncoding(BaseObjective):
    """Cross-entropy of all tokens of a text, which a decoder tells from its vector and half of the others.

    Attributes:
        mask_rate: Share of the other tokens that the decoder does not see where it tells one.

    Source: Schlatt et al. 2025 (TITE), section 3.3, L_MAE; Xiao et al. 2022, "RetroMAE", section 3.3.
    """

    kind: Literal["masked_auto_encoding"] = "masked_auto_encoding"
    mask_rate: float = Field(default=0.5, ge=0, le=1)

    def prepare(self, model: Model, seed: int = 0) -> ObjectiveModule:
        """The decoder and a head; see `BaseObjective.prepare`."""
        return _seeded(lambda: _AutoEncoding(model, self.mask_rate, seed), model, seed)


class BagOfWords(BaseObjective):
    """Binary cross-entropy of which tokens a text has, told from its vector: the mean over the vocabulary.

    Source: Schlatt et al. 2025 (TITE), section 3.3, L_BOW; Lin et al. 2017, "Focal Loss for Dense Object
    Detection", section 4.1, for the bias that the head begins with.
    """

    kind: Literal["bag_of_words"] = "bag_of_words"

    def prepare(self, model: Model, seed: int = 0) -> ObjectiveModule:
        """A head; see `BaseObjective.prepare`."""
        return _seeded(lambda: _BagOfWords(model), model, seed)


class MaskedLanguageModeling(BaseObjective):
    """Cross-entropy of the tokens that were hidden from the encoder, told from their hidden states.

    Source: Devlin et al. 2019, "BERT", section 3.1.
    """

    kind: Literal["masked_language_modeling"] = "masked_language_modeling"

    def prepare(self, model: Model, seed: int = 0) -> ObjectiveModule:
        """A head; see `BaseObjective.prepare`."""
        return _seeded(lambda: _LanguageModeling(model), model, seed)


Objective: TypeAlias = Annotated[
    BagOfWords | Distillation | MaskedAutoEncoding | MaskedLanguageModeling,
    Field(discriminator="kind"),
]


_PRIOR = 0.01  # of a token to be in a text, as heads begin; else vectors grow alike, as most tokens are not


class _AutoEncoding(ObjectiveModule):
    def __init__(self, model: Model, mask_rate: float, seed: int) -> None:
        super().__init__()
        encoder = own_encoder(model, "masked auto-encoding")
        _check_vectors(model, "masked auto-encoding")
        self.decoder = Decoder(encoder, mask_rate, seed)
        self.head = PredictionHead(encoder)

    def forward(self, encoded: Encoded) -> Value:
        batch = encoded.batch
        assert encoded.vectors is not None
        hidden = self.decoder(encoded.encoder.embeddings, encoded.vectors, batch.original, batch.numbers)
        return _told(self.head, encoded, hidden[batch.ordinary], batch.original.values[batch.ordinary])


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
        return _told(self.head, encoded, encoded.hidden.values[batch.places], batch.labels)


def _told(head: PredictionHead, encoded: Encoded, hidden: Tensor, labels: Tensor) -> Value:
    """Cross-entropy of ``labels (m,)`` given ``hidden (m, hidden_size)``."""
    total, right = token_loss(head(hidden), encoded.encoder.word_embeddings, head.bias, labels)
    return Value(total, len(labels), {"accuracy": right})


def _check_vectors(model: Model, objective: str) -> None:
    """Raise BadValueError unless the model makes one vector a text as wide as hidden states."""
    pooling = model.head.pooling if isinstance(model.head, PooledHead) else ()
    if len(pooling) != 1:
        raise BadValueError(
            f"{objective}: trains the vector of a text, made by one way of pooling; this model makes "
            f"{model.kind} vectors" + (f" by {len(pooling)} ways" if pooling else "")
        )


def _seeded(make: Callable[[], ObjectiveModule], model: Model, seed: int) -> ObjectiveModule:
    """A module whose weights are random as those of encoders, and leave other draws as they are."""
    words = own_encoder(model, "pre-training").word_embeddings
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = make()
        for each in module.modules():
            if isinstance(each, nn.Linear):
                nn.init.normal_(each.weight, std=0.02)
                if each.bias is not None:
                    nn.init.zeros_(each.bias)
    return module.to(words.device, words.dtype)
