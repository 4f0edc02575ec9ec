"""What all heads have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from irkit.errors import BadValueError
from irkit.heads.projection import Projection
from irkit.ragged import Ragged
from irkit.representation import Representation

__all__ = ["Head", "Normalize", "Side", "width_after"]

Side = Literal["query", "document"]


class Normalize(nn.Module):
    """Scale vectors to length 1; a zero vector stays zero."""

    def forward(self, vectors: Tensor) -> Tensor:
        """``(n, dim)`` to ``(n, dim)``."""
        return F.normalize(vectors, dim=-1)


class Head(nn.Module):
    """Hidden states of tokens in, one representation of each text out.

    Attributes:
        kind: Of its representations: ``"dense"``, ``"multi_vector"`` or ``"sparse"``.
        dim: Width of a vector, or size of the vocabulary.
        layers: What is done with vectors, `Projection` and `Normalize` in any order.
        lengths: Tokens at which texts of a side are cut, special tokens included, where that is not where
            the tokenizer cuts them; of a multi-vector head its configuration says it.
    """

    kind: ClassVar[str]
    dim: int
    layers: nn.ModuleList
    lengths: Mapping[Side, int] = MappingProxyType({})

    def max_length(self, side: Side) -> int | None:
        """Tokens at which texts of ``side`` are cut; None is where the tokenizer cuts them."""
        return self.lengths.get(side)

    def expand(self, tokens: Ragged, side: Side) -> tuple[Ragged, Tensor | None]:
        """Token ids as the encoder gets them, and how many of each row it attends to; None is all."""
        return tokens, None

    def pools(self, side: Side) -> bool:
        """Whether the pooling layers of an encoder, if it has any, work on texts of ``side``."""
        return True

    if TYPE_CHECKING:  # nn.Module's own says Any

        def __call__(  # noqa: D102
            self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
        ) -> Representation: ...

    def forward(
        self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
    ) -> Representation:
        """Make representations.

        Args:
            hidden: Ragged ``(total, hidden_size)``, what the encoder makes of ``tokens``; fewer rows than
                tokens where it pools.
            tokens: Ragged ids, as `expand` gives them.
            prompt_length: Leading tokens of each text that belong to the prompt.
            side: What the texts are.
        """
        raise NotImplementedError


def width_after(layers: Iterable[nn.Module], width: int, name: str) -> int:
    """Width of vectors of ``width`` after ``layers``.

    Raises:
        BadValueError: The widths of two layers do not meet; the message names the head, ``name``.
    """
    for layer in layers:
        if isinstance(layer, Projection):
            if layer.linear.in_features != width:
                raise BadValueError(
                    f"{name}: a projection takes vectors of width {layer.linear.in_features}, "
                    f"but what precedes it gives {width}"
                )
            width = layer.linear.out_features
    return width
