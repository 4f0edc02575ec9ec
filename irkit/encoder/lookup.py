"""The encoder of a model that has none: token ids pass through to a head that only looks them up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from irkit.ragged import Ragged

__all__ = ["NoEncoder"]


class NoEncoder(nn.Module):
    """Stands where a model has no encoder, so that texts cost their tokenization and a look-up each.

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
        """Token ids as they are."""
        return tokens

    def save_pretrained(self, directory: str | Path) -> None:
        """Write nothing."""
