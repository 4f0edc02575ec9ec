"""What every format reads and writes: the parts of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from irkit.encoder import Encoder
from irkit.encoder.adapter import TransformersEncoder
from irkit.encoder.lookup import NoEncoder
from irkit.heads import Head
from irkit.tokenizer import Tokenizer

__all__ = ["SIMILARITIES", "AnyEncoder", "LoadEncoder", "Opened", "Parts", "SideParts"]

AnyEncoder = Encoder | TransformersEncoder
LoadEncoder = Callable[[Path], AnyEncoder]

SIMILARITIES = {  # by kind of representation, the default first
    "dense": ("cosine", "dot", "euclidean", "manhattan"),
    "multi_vector": ("maxsim", "meanmaxsim"),
    "sparse": ("dot", "cosine", "euclidean", "manhattan"),
}


class SideParts(TypedDict):
    """The arguments of `irkit.model.Model`; see there."""

    tokenizer: Tokenizer
    encoder: AnyEncoder | NoEncoder
    head: Head
    prompts: NotRequired[dict[str, str]]
    default_prompt_name: NotRequired[str | None]
    similarity_name: NotRequired[str | None]
    truncate_dim: NotRequired[int | None]


class Parts(SideParts):
    """What a model is made of; queries may have parts of their own."""

    query: NotRequired[SideParts]


@dataclass(frozen=True)
class Opened:
    """A directory of sentence-transformers that is read but for its head.

    Attributes:
        folder: Its path.
        modules: Class name and folder of each module after the Transformer.
        encoder: Of the model.
        tokenizer: Of the model; markers may be added to it.
        settings: config_sentence_transformers.json.
        transformer: sentence_bert_config.json.
    """

    folder: Path
    modules: list[tuple[str, Path]]
    encoder: AnyEncoder
    tokenizer: Tokenizer
    settings: dict[str, Any]
    transformer: dict[str, Any]

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.encoder.hidden_size
