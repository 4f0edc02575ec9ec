"""Several heads on one encoder: one forward pass gives dense, sparse and multi-vector representations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self, get_args

from torch import nn

from irkit.arguments import brief
from irkit.core.ragged import Ragged
from irkit.core.representation import Several
from irkit.errors import BadValueError
from irkit.heads.head import Head, Side
from irkit.tokenizer import Tokenizer

_NAME = re.compile(r"[a-z]+(_[a-z]+)*")  # part of the names of files of an index


class SeveralHeads(Head):
    """Gives the hidden states of the encoder to several heads, and returns what each makes of them.

    All heads see the same tokens, so they cut texts at the same length, and none of them fills queries up.

    Attributes:
        heads: The heads by name.
        dim: Sum of the widths of all heads.

    Source: Chen et al. 2024, "BGE M3-Embedding" (arXiv 2402.03216), section 3.2.
    """

    kind: ClassVar[str] = "several"

    def __init__(self, heads: Mapping[str, Head], similarities: Mapping[str, str] | None = None) -> None:
        """Make one head of several.

        Args:
            heads: Two or more heads by name; names are words in lower case, such as ``"multi_vector"``.
            similarities: See the class.

        Raises:
            BadValueError: There are fewer than two heads; a name is not made of words in lower case; a head
                holds heads itself or fills queries up; hidden sizes or lengths of heads differ; or a
                similarity belongs to no head.
        """
        super().__init__()
        check_names_of_heads(heads)
        self.heads: Any = nn.ModuleDict(heads)
        self.similarities = dict(similarities or {})
        self.layers = nn.ModuleList()
        self.dim = sum(head.dim for head in heads.values())
        if unknown := self.similarities.keys() - heads.keys():
            raise BadValueError(
                f"SeveralHeads: similarities of {sorted(unknown)}, expected some of {[*heads]}"
            )
        # heads that cannot share tokens with others
        lengths: dict[Side, int] = {}
        for name, head in heads.items():
            if head.parts:
                raise BadValueError(
                    f"SeveralHeads: head {name!r} holds the heads {', '.join(head.parts)}; give these instead"
                )
            if getattr(head.config, "query_expansion", None) is not None:
                raise BadValueError(
                    f"SeveralHeads: head {name!r} fills queries up (query_expansion), but all heads see the "
                    "same tokens; leave query_expansion out"
                )
        # hidden sizes and lengths, which all heads share
        sizes = {name: size for name, head in heads.items() if (size := _hidden_size(head)) is not None}
        if len(set(sizes.values())) > 1:
            raise BadValueError(
                f"SeveralHeads: heads for hidden states of widths {sizes}, expected one width"
            )
        for side in get_args(Side):
            limits = {name: head.max_length(side) for name, head in heads.items()}
            if len(set(limits.values())) > 1:
                raise BadValueError(
                    f"SeveralHeads: heads cut texts of side {side} at {limits} tokens, expected one length "
                    "for all; None is the length of the tokenizer"
                )
            if (length := next(iter(limits.values()))) is not None:
                lengths[side] = length
        self.lengths = lengths

    @property
    def parts(self) -> Mapping[str, Head]:
        """Return the heads by name."""
        return dict(self.heads.items())

    def chosen(self, names: Iterable[str]) -> Self:
        """Return a head of some of these heads, see `Head.chosen`."""
        selected = [names] if isinstance(names, str) else list(names)
        unknown = [name for name in selected if name not in self.heads]
        if unknown or not selected:
            raise BadValueError(
                f"heads: got {brief(unknown or selected)}, expected one or more of {', '.join(self.heads)}"
            )
        twin = type(self).__new__(type(self))
        nn.Module.__init__(twin)
        twin.heads = nn.ModuleDict({name: self.heads[name] for name in selected})
        twin.similarities = {name: self.similarities[name] for name in selected if name in self.similarities}
        twin.layers, twin.lengths = nn.ModuleList(), self.lengths
        twin.dim = sum(head.dim for head in twin.heads.values())
        return twin.train(self.training)

    def set_length(self, side: Side, length: int) -> None:
        """Cut texts of ``side`` at ``length`` tokens, for all heads."""
        super().set_length(side, length)
        for head in self.heads.values():
            head.set_length(side, length)

    def look_up_words(self, tokenizer: Tokenizer) -> None:
        """Look up the words that the configurations of the heads name, see `Head.look_up_words`."""
        for head in self.heads.values():
            head.look_up_words(tokenizer)

    def pooling_problem(self) -> str | None:
        """Return why the head cannot work on an encoder that pools; never None."""
        return "several heads need the hidden states of the same tokens"

    def forward(self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document") -> Any:
        """Return a `irkit.core.representation.Several` with what each head makes, see `Head.forward`."""
        return Several({name: head(hidden, tokens, prompt_length, side) for name, head in self.heads.items()})

    def extra_repr(self) -> str:
        """Return what a printed head says beside its heads."""
        return f"similarities={self.similarities}, lengths={dict(self.lengths)}"


def check_names_of_heads(heads: Mapping[str, object]) -> None:
    """Check the names of heads of one model.

    Raises:
        BadValueError: There are fewer than two heads, or a name is not made of words in lower case.
    """
    if not isinstance(heads, Mapping) or len(heads) < 2:
        raise BadValueError(f"several heads: got {brief(heads)}, expected two or more heads by name")
    for name in heads:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise BadValueError(
                f"several heads: a head is named {brief(name)}, expected words in lower case, such as "
                "'multi_vector'"
            )


def _hidden_size(head: Head) -> int | None:
    """Return the width of the hidden states that a head takes; None if any width will do."""
    first = next(iter(head.layers), None)
    size = getattr(head, "hidden_size", None) or getattr(getattr(first, "linear", None), "in_features", None)
    return None if size is None else int(size)
