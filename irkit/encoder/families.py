"""The table of model families: which encoder a Hugging Face ``config.json`` describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from irkit.encoder.bert_families import BERT, DISTILBERT, MODERNBERT, NEOBERT, ROBERTA
from irkit.encoder.decoder_families import GEMMA2, GEMMA3, LLAMA, MISTRAL, QWEN2, QWEN3
from irkit.encoder.encoder_config import EncoderConfig, Pooling
from irkit.encoder.family import Family, MaskedLM, Settings
from irkit.encoder.gated_families import GTE, NEW, NOMIC
from irkit.encoder.relative_families import DEBERTA, MPNET, T5
from irkit.encoder.tite_family import TITE
from irkit.errors import ConfigError
from irkit.utils.plugins import Registry

FAMILIES: Registry[Family] = Registry(
    "irkit.families",
    Family,
    {
        "bert": BERT,
        "roberta": ROBERTA,
        "xlm-roberta": ROBERTA,
        "camembert": ROBERTA,
        "distilbert": DISTILBERT,
        "modernbert": MODERNBERT,
        "neobert": NEOBERT,
        "tite": TITE,
        "mpnet": MPNET,
        "deberta-v2": DEBERTA,
        "nomic_bert": NOMIC,
        "gte": GTE,
        "new": NEW,
        "llama": LLAMA,
        "mistral": MISTRAL,
        "qwen2": QWEN2,
        "qwen3": QWEN3,
        "gemma2": GEMMA2,
        "gemma3_text": GEMMA3,
        "t5": T5,
        "mt5": T5,
    },
)
"""Families by the ``model_type`` of config.json; other packages add theirs as entry points."""


def family_of(settings: Settings) -> Family:
    """Return the family that a ``config.json`` belongs to, which must be one of `FAMILIES`."""
    family = FAMILIES[str(settings.get("model_type"))]
    return family if family.variant is None else family.variant(settings)


def encoder_config(settings: Settings) -> EncoderConfig:
    """Return the configuration of the encoder that a ``config.json`` describes.

    The key ``pooling`` is irkit's own. It is a list with one item per layer: the settings of a `Pooling`, or
    null. Families with their own keys for pooling, such as TITE, do not need it.

    Raises:
        KeyError: A key of the family is missing.
        ConfigError: The settings describe an architecture that `irkit.encoder.Encoder` does not have.
    """
    config = family_of(settings).config(settings)
    schedule = settings.get("pooling")
    if schedule is None:
        return config
    if not isinstance(schedule, list) or len(schedule) != len(config.layers):
        raise ConfigError(f"pooling {schedule!r:.60} for {len(config.layers)} layers")
    pairs = zip(config.layers, schedule, strict=True)
    layers = [layer.model_dump() | {"pooling": pooling} for layer, pooling in pairs]
    return EncoderConfig.parse(config.model_dump() | {"layers": layers}, "pooling")


def masked_lm(settings: Settings) -> MaskedLM | None:
    """Describe the head of masked language modelling that belongs to a ``config.json``.

    Returns:
        Class, weight names and settings of the head; None for families without such a head, as TITE.

    Raises:
        ConfigError: irkit does not know the activation function of the head.
    """
    name = str(settings.get("model_type"))
    family = FAMILIES.get(name)
    if family is None or family.masked_lm is None:
        return None
    try:
        return family.masked_lm(settings)
    except ConfigError as error:
        raise ConfigError(f"masked language model: a {name} with {error} is not supported") from error


def schedule_settings(family: str, schedule: Sequence[Pooling | None]) -> dict[str, Any]:
    """Return the keys and values for ``config.json`` that express a pooling schedule.

    Args:
        family: Name of the family, the ``model_type`` of ``config.json``.
        schedule: Pooling per layer, from the input up; None does not pool.

    Raises:
        ConfigError: The keys of the family cannot express the schedule.
    """
    if not all(pooling is None or isinstance(pooling, Pooling) for pooling in schedule):
        raise ConfigError(
            f"a pooling schedule has a Pooling or None for each layer, got {[*schedule]!r:.100}"
        )
    if (own := FAMILIES[family].schedule) is not None:
        return own(schedule)
    return {"pooling": [pooling and pooling.model_dump() for pooling in schedule]}
