"""Which model without weights an index is made with: a tagged union by ``kind``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator

from irkit.arguments import shown
from irkit.config import Config
from irkit.errors import ConfigError

__all__ = [
    "BM25Config",
    "ImpactsConfig",
    "LexicalConfig",
    "VectorsConfig",
    "is_lexical",
    "lexical_config",
    "lexical_index",
]


class BM25Config(Config):
    """BM25 as Lucene computes it, but for document lengths, which Lucene rounds.

    Attributes:
        k1: How much it counts how often a term occurs; 0 asks only whether it does.
        b: How far long documents are held back, from 0 (not at all) to 1.
        language: Name of a stemmer of Snowball; ``"english"`` is stemmed by Porter's algorithm, as in Lucene.
        stemming: Whether words are stemmed.
        stop_words: Words that count for nothing; None is the 33 of Lucene for English, and none otherwise.

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
        """Equal sets of words make equal models."""
        return None if words is None else tuple(sorted({word.lower() for word in words}))


class ImpactsConfig(Config):
    """Weights by term that were computed elsewhere."""

    kind: Literal["impacts"] = "impacts"


class VectorsConfig(Config):
    """Vectors computed elsewhere.

    Attributes:
        similarity: ``"dot"``, or ``"cosine"`` of vectors that are made as long as each other.
        representation: What a document has: one vector, or one a token; None is not known yet.
        dim: Numbers of a vector; None is not known yet.
    """

    kind: Literal["vectors"] = "vectors"
    similarity: Literal["dot", "cosine"] = "dot"
    representation: Literal["dense", "multi_vector"] | None = None
    dim: int | None = Field(None, ge=1)


LexicalConfig: TypeAlias = Annotated[BM25Config | ImpactsConfig | VectorsConfig, Field(discriminator="kind")]
"""Configuration of any such model; the field ``kind`` tells which."""

_KINDS: dict[str, type[BM25Config | ImpactsConfig | VectorsConfig]] = {
    "bm25": BM25Config,
    "impacts": ImpactsConfig,
    "vectors": VectorsConfig,
}


def is_lexical(name: object) -> bool:
    """Whether ``name`` is that of such a model, rather than of a directory or repository."""
    return isinstance(name, str) and name in _KINDS


def lexical_index(name: str) -> dict[str, Any]:
    """The index for such a model unless another one is asked for: it keeps weights and vectors as they are.

    It is exact for BM25, whose queries are short, and for vectors.
    """
    if name == "vectors":
        return {"kind": "flat"}
    return {"kind": "inverted", "dtype": "float32", "mode": "exact" if name == "bm25" else "auto"}


def lexical_config(data: Mapping[str, Any]) -> LexicalConfig:
    """Undo ``model_dump``.

    Raises:
        ConfigError: A key or a value is unknown.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"model: got {shown(data)}; expected a name or keys and values")
    kind = data.get("kind")
    if not is_lexical(kind):
        raise ConfigError(f"model: unknown kind {shown(kind)}; expected one of {', '.join(_KINDS)}")
    return _KINDS[str(kind)].parse(data, str(kind))
