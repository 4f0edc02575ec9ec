"""Configurations of models without an encoder: a union tagged by ``kind``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from pydantic import Field, field_validator

from irkit.arguments import brief
from irkit.config import Config
from irkit.errors import ConfigError


class BM25Config(Config):
    """Settings of BM25 as in Lucene, but with exact document lengths.

    Attributes:
        k1: Saturation of the term frequency; 0 counts only whether a term occurs.
        b: Normalization by the document length, from 0 (none) to 1 (full).
        language: Name of a stemmer of Snowball; ``"english"`` is stemmed by Porter's algorithm, as in Lucene.
        stemming: Whether words are stemmed.
        stop_words: Words to ignore; None stands for the 33 words of Lucene for English, and for no words
            otherwise.

    Source: Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009; Kamphuis et al., Which BM25
    Do You Mean?, ECIR 2020.
    """

    kind: Literal["bm25"] = "bm25"
    k1: float = Field(0.9, ge=0)
    b: float = Field(0.4, ge=0, le=1)
    language: str = "english"
    stemming: bool = True
    stop_words: tuple[str, ...] | None = None

    @field_validator("stop_words")
    @classmethod
    def _in_order(cls, words: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Sort the words, so that equal sets make equal models."""
        return None if words is None else tuple(sorted({word.lower() for word in words}))


class ImpactsConfig(Config):
    """Settings of `Impacts`, the model of given term weights: no settings besides ``kind``."""

    kind: Literal["impacts"] = "impacts"


class VectorsConfig(Config):
    """Settings of vectors that were computed elsewhere.

    Attributes:
        similarity: ``"dot"``, or ``"cosine"``, which normalizes vectors.
        representation: ``"dense"``, one vector per document, or ``"multi_vector"``, one per token. With None
            the first document decides.
        dim: Width of a vector. With None the first document decides.
    """

    kind: Literal["vectors"] = "vectors"
    similarity: Literal["dot", "cosine"] = "dot"
    representation: Literal["dense", "multi_vector"] | None = None
    dim: int | None = Field(None, ge=1)


EncoderFreeConfig: TypeAlias = BM25Config | ImpactsConfig | VectorsConfig
"""Configuration of a model; its field ``kind`` names the model."""

_KINDS: dict[str, type[EncoderFreeConfig]] = {
    "bm25": BM25Config,
    "impacts": ImpactsConfig,
    "vectors": VectorsConfig,
}


def is_encoder_free(name: object) -> bool:
    """Return True if ``name`` names a model without an encoder."""
    return isinstance(name, str) and name in _KINDS


def encoder_free_index(name: str) -> dict[str, Any]:
    """Return the settings of the default index for a model; the index stores weights and vectors unchanged.

    Search is exact for vectors, and for BM25, whose queries are short.
    """
    if name == "vectors":
        return {"kind": "flat"}
    return {"kind": "inverted", "dtype": "float32", "mode": "exact" if name == "bm25" else "auto"}


def encoder_free_config(data: Mapping[str, Any]) -> EncoderFreeConfig:
    """Parse a configuration.

    Raises:
        ConfigError: A key or a value is unknown.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"model: got {brief(data)}; expected a name or keys and values")
    kind = data.get("kind")
    if not is_encoder_free(kind):
        raise ConfigError(f"model: unknown kind {brief(kind)}; expected one of {', '.join(_KINDS)}")
    return _KINDS[str(kind)].parse(data, str(kind))
