"""What every format reads and writes: the parts of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

from irkit.encoder import AnyEncoder
from irkit.encoder.inference_free import InferenceFreeEncoder
from irkit.heads import Head
from irkit.tokenizer import Tokenizer

LoadEncoder = Callable[[Path], AnyEncoder]

SIMILARITIES = {  # by kind of representation, the default first
    "dense": ("cosine", "dot", "euclidean", "manhattan"),
    "multi_vector": ("maxsim", "meanmaxsim"),
    "sparse": ("dot", "cosine", "euclidean", "manhattan"),
}


class SideParts(TypedDict):
    """The arguments of `irkit.model.Model`, for one side."""

    tokenizer: Tokenizer
    encoder: AnyEncoder | InferenceFreeEncoder
    head: Head
    prompts: NotRequired[dict[str, str]]
    default_prompt_name: NotRequired[str | None]
    similarity_name: NotRequired[str | None]
    truncate_dim: NotRequired[int | None]


class Parts(SideParts):
    """The arguments of `irkit.model.Model`; ``query`` holds those for queries if queries have their own."""

    query: NotRequired[SideParts]


class Format(NamedTuple):
    """A kind of model directory.

    Attributes:
        fits: Returns True if a directory is of this kind.
        read: Reads one; None if irkit only writes them.
        write: Writes a model to a new directory; None if irkit only reads them.
        query_side: Whether it can hold a query side of its own.
    """

    fits: Callable[[Path], bool]
    read: Callable[[Path, LoadEncoder], Parts] | None = None
    write: Callable[[Parts, Path], None] | None = None
    query_side: bool = False


def static_parts(tokenizer: Tokenizer, head: Head) -> SideParts:
    """Return a side without an encoder; its tokenizer is a copy that adds no special tokens."""
    return {"tokenizer": tokenizer.without_special_tokens(), "encoder": InferenceFreeEncoder(), "head": head}
