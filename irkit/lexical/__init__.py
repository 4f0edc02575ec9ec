"""Retrieval without a neural network: BM25, and weights of terms or vectors that were computed elsewhere.

Such a model takes the place of a `irkit.Model` in a `irkit.Retriever`, by name (``"bm25"``, ``"impacts"``,
``"vectors"``) or as an object. The index holds all it needs, so that it is opened without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from irkit.lexical.analyzer import STOP_WORDS, Analyzer, languages
from irkit.lexical.bm25 import BM25
from irkit.lexical.config import (
    BM25Config,
    ImpactsConfig,
    LexicalConfig,
    VectorsConfig,
    is_lexical,
    lexical_config,
    lexical_index,
)
from irkit.lexical.impacts import Impacts
from irkit.lexical.model import LexicalModel
from irkit.lexical.vectors import Vectors

__all__ = [
    "BM25",
    "STOP_WORDS",
    "Analyzer",
    "BM25Config",
    "Impacts",
    "ImpactsConfig",
    "LexicalConfig",
    "LexicalModel",
    "Vectors",
    "VectorsConfig",
    "is_lexical",
    "languages",
    "lexical_index",
    "lexical_model",
]


def lexical_model(choice: str | Mapping[str, Any]) -> LexicalModel:
    """A model by its name or its configuration.

    Args:
        choice: ``"bm25"``, ``"impacts"``, ``"vectors"``, or keys and values with ``kind``.

    Raises:
        ConfigError: There is no such model, key or value.

    Examples:
        >>> lexical_model("bm25").config.k1
        0.9
    """
    config = lexical_config({"kind": choice} if isinstance(choice, str) else choice)
    settings = config.model_dump(exclude={"kind"})
    if isinstance(config, BM25Config):
        return BM25(**settings)
    return Vectors(**settings) if isinstance(config, VectorsConfig) else Impacts()
