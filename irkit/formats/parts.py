"""The parts of a model, which every format reads and writes: tokenizer, encoder, head and settings."""

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
    "several": ("by_head",),
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
    """The arguments of `irkit.model.Model`; ``query`` holds the parts of a separate query model."""

    query: NotRequired[SideParts]


class Format(NamedTuple):
    """A kind of model directory.

    Attributes:
        fits: Function that returns True if a directory is of this kind.
        read: Function that reads such a directory; None if irkit only writes this format.
        write: Function that writes a model to a new directory; None if irkit only reads this format.
        query_side: Whether the format can hold a separate query model.
        files: Names of its files that other formats do not have. Saving a model replaces a directory only if
            the names of all files in it are known.
    """

    fits: Callable[[Path], bool]
    read: Callable[[Path, LoadEncoder], Parts] | None = None
    write: Callable[[Parts, Path], None] | None = None
    query_side: bool = False
    files: tuple[str, ...] = ()


def static_parts(tokenizer: Tokenizer, head: Head) -> SideParts:
    """Make a side without an encoder, with a copy of ``tokenizer`` that adds no special tokens."""
    return {"tokenizer": tokenizer.without_special_tokens(), "encoder": InferenceFreeEncoder(), "head": head}
