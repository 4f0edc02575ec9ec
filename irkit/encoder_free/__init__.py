"""Models without an encoder: BM25, and term weights or vectors that were computed elsewhere.

Such a model replaces a `irkit.Model` in a `irkit.Retriever`, by name (``"bm25"``, ``"impacts"``,
``"vectors"``) or as an object. The index stores everything that the model needs, so an index is opened
without naming the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from irkit.encoder_free.analyzer import STOP_WORDS, Analyzer, languages
from irkit.encoder_free.base_model import EncoderFreeModel, renumbered
from irkit.encoder_free.bm25 import BM25
from irkit.encoder_free.rm3 import RM3
from irkit.encoder_free.settings import encoder_free_config, encoder_free_index, is_encoder_free
from irkit.encoder_free.vectors import Impacts, Vectors

__all__ = [
    "BM25",
    "RM3",
    "STOP_WORDS",
    "Analyzer",
    "EncoderFreeModel",
    "Impacts",
    "Vectors",
    "encoder_free_index",
    "encoder_free_model",
    "is_encoder_free",
    "languages",
    "renumbered",
]


def encoder_free_model(choice: str | Mapping[str, Any]) -> EncoderFreeModel:
    """Make a model from its name or its configuration.

    Args:
        choice: ``"bm25"``, ``"impacts"``, ``"vectors"``, or keys and values with ``kind``.

    Raises:
        ConfigError: The model or a key is unknown, or a value is invalid.

    Examples:
        >>> encoder_free_model("bm25").config.k1
        0.9
    """
    config = encoder_free_config({"kind": choice} if isinstance(choice, str) else choice)
    models: dict[str, Callable[..., EncoderFreeModel]]
    models = {"bm25": BM25, "impacts": Impacts, "vectors": Vectors}
    return models[config.kind](**config.model_dump(exclude={"kind"}))
