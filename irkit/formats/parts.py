"""What every format reads and writes: the parts of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NotRequired, TypedDict

from irkit.encoder import Encoder
from irkit.encoder.adapter import TransformersEncoder
from irkit.heads import PooledHead
from irkit.tokenizer import Tokenizer

__all__ = ["AnyEncoder", "LoadEncoder", "Parts"]

AnyEncoder = Encoder | TransformersEncoder
LoadEncoder = Callable[[Path], AnyEncoder]


class Parts(TypedDict):
    """The arguments of `irkit.model.Model`; see there."""

    tokenizer: Tokenizer
    encoder: AnyEncoder
    head: PooledHead
    prompts: NotRequired[dict[str, str]]
    default_prompt_name: NotRequired[str | None]
    similarity_name: NotRequired[str]
    truncate_dim: NotRequired[int | None]
