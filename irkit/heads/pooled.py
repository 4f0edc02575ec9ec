"""One vector a text: pool the tokens, then project and normalise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from irkit.errors import BadValueError
from irkit.heads.base import Head, Side, width_after
from irkit.ragged import Ragged
from irkit.representation import Dense

__all__ = ["POOLINGS", "PooledHead"]

POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


class PooledHead(Head):
    """One vector a text; a text without tokens becomes the pooling of nothing: zeros.

    Pooling and everything after it run in float32 (or float64), however low the precision of the encoder.

    Attributes:
        pooling: Ways of pooling; the results of several stand side by side.
        include_prompt: Whether the tokens of the prompt take part.
        layers: What follows, `Projection` and `Normalize` in any order.
        dim: Width of the result.

    Examples:
        >>> tokens = Ragged.from_rows([[101, 7, 102], [101, 102]])
        >>> hidden = tokens.with_values(torch.ones(5, 4))
        >>> PooledHead(4, "mean")(hidden, tokens).values.tolist()
        [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]

    Source: the Pooling module of sentence-transformers, whose names these are.
    """

    kind: ClassVar[str] = "dense"

    def __init__(
        self,
        hidden_size: int,
        pooling: str | Sequence[str] = "mean",
        layers: Iterable[nn.Module] = (),
        *,
        include_prompt: bool = True,
    ) -> None:
        """Join a pooling and layers.

        Args:
            hidden_size: Width of the hidden states.
            pooling: cls (first token), max, mean, mean_sqrt_len_tokens, weightedmean (token i counts
                i times) or lasttoken; or several.
            layers: Applied to the pooled vectors in turn.
            include_prompt: False leaves the tokens of the prompt out.

        Raises:
            BadValueError: There is no such pooling, or the widths of two layers do not meet.
        """
        super().__init__()
        self.pooling = (pooling,) if isinstance(pooling, str) else tuple(pooling)
        self.include_prompt = include_prompt
        self.layers = nn.ModuleList(layers)
        self.hidden_size = hidden_size
        unknown = sorted(set(self.pooling) - set(POOLINGS))
        if unknown or not self.pooling:
            raise BadValueError(
                f"PooledHead: unknown pooling {', '.join(unknown) or '()'}, expected {', '.join(POOLINGS)}"
            )
        self.dim = width_after(self.layers, hidden_size * len(self.pooling), "PooledHead")

    if TYPE_CHECKING:  # nn.Module's own says Any

        def __call__(  # noqa: D102
            self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
        ) -> Dense: ...

    def forward(
        self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
    ) -> Dense:
        """Pool.

        Args:
            hidden: Ragged ``(total, hidden_size)``; a pooling encoder gives fewer rows than tokens.
            tokens: Ragged ids (of no use to this head).
            prompt_length: Leading tokens of each text that belong to the prompt.
            side: Of no use to this head: only prompts tell queries from documents.

        Returns:
            Dense ``(n, dim)`` float32.
        """
        skipped = 0 if self.include_prompt else prompt_length
        hidden = hidden.with_values(hidden.values.to(torch.promote_types(hidden.values.dtype, torch.float32)))
        if skipped:
            lengths = (hidden.lengths - skipped).clamp(min=0)
            places = hidden.places(hidden.lengths - lengths, lengths)
            hidden = places.with_values(hidden.values[places.values])
        vectors = torch.cat([_pool(mode, hidden, skipped) for mode in self.pooling], dim=1)
        for layer in self.layers:
            vectors = layer(vectors)
        return Dense(vectors)

    def extra_repr(self) -> str:
        """What a printed head says beside its layers."""
        return f"pooling={'+'.join(self.pooling)}, include_prompt={self.include_prompt}"


def _pool(mode: str, hidden: Ragged, skipped: int) -> Tensor:
    """``(total, hidden_size)`` to ``(n, hidden_size)``; rows without tokens give zeros."""
    if mode == "mean_sqrt_len_tokens":
        counts = hidden.offsets.diff().clamp(min=1)
        return _bag("sum", hidden) / counts.sqrt()[:, None]
    if mode == "weightedmean":
        weights = (hidden.positions() + skipped + 1).to(hidden.values.dtype)[:, None]
        total = _bag("sum", hidden.with_values(weights))
        return _bag("sum", hidden.with_values(hidden.values * weights)) / total.clamp(min=1)
    if mode in ("cls", "lasttoken"):
        starts, ends = hidden.offsets[:-1], hidden.offsets[1:]
        zeros = len(hidden.values)  # the place of a row of zeros, added for texts without tokens
        chosen = torch.where(ends > starts, starts if mode == "cls" else ends - 1, zeros)
        return F.pad(hidden.values, (0, 0, 0, 1))[chosen.long()]
    return _bag(mode, hidden)


def _bag(mode: str, rows: Ragged) -> Tensor:
    """Sum, mean or maximum over each row; zeros where it is empty."""
    places = torch.arange(len(rows.values), device=rows.device, dtype=torch.int32)
    return F.embedding_bag(places, rows.values, rows.offsets, mode=mode, include_last_offset=True)
