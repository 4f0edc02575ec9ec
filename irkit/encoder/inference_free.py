"""A stand-in for the encoder of a model without one: it passes token ids on to a head that looks them up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from irkit.core.ragged import Ragged


class InferenceFreeEncoder(nn.Module):
    """Stands in for the encoder of a model without one, and passes token ids on to the head.

    A text then costs no more than its tokenization and a look-up of weights.

    Attributes:
        family: ``"none"``.
        hidden_size: 0.
        max_positions: None: rows of any length pass.
    """

    family: ClassVar[str] = "none"
    hidden_size: ClassVar[int] = 0
    max_positions: ClassVar[int | None] = None

    if TYPE_CHECKING:  # nn.Module's own says Any

        def __call__(self, tokens: Ragged, attended: Tensor | None = None) -> Ragged: ...  # noqa: D102

    def forward(self, tokens: Ragged, attended: Tensor | None = None) -> Ragged:
        """Return the token ids unchanged."""
        return tokens

    def save_pretrained(self, directory: str | Path) -> None:
        """Do nothing: the encoder has no weights."""
