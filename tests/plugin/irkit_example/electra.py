"""A model family: ELECTRA, whose checkpoints have the layers of a BERT under other names."""

from __future__ import annotations

from irkit.encoder.bert_families import BERT
from irkit.encoder.encoder_config import EncoderConfig
from irkit.encoder.family import Family, Settings
from irkit.errors import ConfigError

__all__ = ["ELECTRA"]


def _config(settings: Settings) -> EncoderConfig:
    if settings["embedding_size"] != settings["hidden_size"]:
        raise ConfigError("embeddings of another width than the layers")
    return BERT.config({**settings, "model_type": "bert"})


ELECTRA = Family(
    config=_config,
    weights=BERT.weights,
    prefixes=("electra.",),
    heads=("discriminator_predictions.", "generator_predictions.", "generator_lm_head.", "classifier."),
)
