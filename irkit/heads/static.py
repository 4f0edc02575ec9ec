"""Queries without an encoder: each token has one weight, whatever stands around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from irkit.errors import BadValueError
from irkit.heads.base import Head, Side
from irkit.heads.sparse import SparseConfig
from irkit.ragged import Ragged
from irkit.representation import Sparse

__all__ = ["StaticHead"]


class StaticHead(Head):
    """A text becomes its distinct tokens with a weight each: what inference-free sparse queries are.

    With a weight of 1 for each token these are lexical (binary) queries; with those of
    `irkit.model.idf_weights` or of training they are the inference-free queries of learned sparse retrieval.
    A token that comes twice counts once.

    Attributes:
        weight: ``(tokens,)``, trained unless ``frozen``.
        dim: Size of the vocabulary of the result; a token beyond ``weight`` or ``dim`` weighs nothing.
        frozen: Whether training leaves the weights as they are.
        config: How many weights of a text are kept, the largest by amount; the rest of it is of no use here.
        vocabulary: What the dimensions stand for, if not for the tokens of the tokenizer.

    Examples:
        >>> head = StaticHead(torch.tensor([0.5, 2.0, 1.0]))
        >>> queries = head.look_up(Ragged.from_rows([[1, 0, 1], [2]]))
        >>> queries.to_dense().tolist()
        [[0.5, 2.0, 0.0], [0.0, 0.0, 1.0]]

    Source: SparseStaticEmbedding of sentence-transformers 6.2; Geng et al. 2024 (arXiv 2411.04403).
    """

    kind: ClassVar[str] = "sparse"

    def __init__(
        self,
        weight: Tensor,
        dim: int | None = None,
        config: SparseConfig | None = None,
        *,
        frozen: bool = False,
        vocabulary: Sequence[str] | None = None,
    ) -> None:
        """Take ``weight (tokens,)`` over a vocabulary of ``dim``, by default as many as there are weights.

        Raises:
            BadValueError: The weights are not a row of finite numbers.
        """
        super().__init__()
        if weight.dim() != 1 or not weight.is_floating_point() or not bool(weight.isfinite().all()):
            raise BadValueError(
                f"StaticHead: got weights {tuple(weight.shape)} {weight.dtype}, expected a row of finite "
                "numbers, one for each token"
            )
        self.weight = nn.Parameter(weight.detach().float().clone(), requires_grad=not frozen)
        self.dim = len(weight) if dim is None else dim
        self.frozen = frozen
        self.config = config or SparseConfig()
        self.vocabulary = None if vocabulary is None else tuple(vocabulary)
        self.layers = nn.ModuleList()

    if TYPE_CHECKING:  # nn.Module's own says Any

        def __call__(  # noqa: D102
            self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
        ) -> Sparse: ...

    def forward(
        self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
    ) -> Sparse:
        """`look_up` the tokens, those of the prompt too; hidden states are of no use to this head."""
        return self.look_up(tokens, self.config.max_active_dims(side))

    def look_up(self, tokens: Ragged, most: int | None = None) -> Sparse:
        """The distinct tokens of each row in ascending order, with their weights.

        A weight of 0 is left out, unless it is being trained.

        Args:
            tokens: Ragged int64 ids.
            most: Keep this many weights of each row, the largest by amount; None is all.

        Returns:
            Float32 weights, which gradients reach.
        """
        ids = tokens.values.cpu().numpy()  # a query is too short to be worth kernels of torch
        rows = np.repeat(np.arange(len(tokens)), tokens.lengths.numpy())
        keys = np.unique((rows * self.dim + ids)[ids < min(len(self.weight), self.dim)])
        rows, terms = np.divmod(keys, max(1, self.dim))
        weights = self.weight[torch.from_numpy(terms).to(self.weight.device)]
        if most is not None or not weights.requires_grad:
            amounts = weights.detach().abs().cpu().numpy()
            kept = _kept(amounts, rows, most, keep_zeros=weights.requires_grad)
            rows, terms = rows[kept], terms[kept]
            weights = weights[torch.from_numpy(kept).to(weights.device)]
        lengths = torch.from_numpy(np.bincount(rows, minlength=len(tokens)))
        return Sparse(Ragged(torch.from_numpy(terms).to(weights.device), lengths), weights, self.dim)

    def extra_repr(self) -> str:
        """What a printed head says."""
        return f"{len(self.weight)} weights, dim={self.dim}, {self.config!r}"


def _kept(
    amounts: np.ndarray[Any, Any], rows: np.ndarray[Any, Any], most: int | None, keep_zeros: bool
) -> np.ndarray[Any, Any]:
    """Places, ascending, of the ``most`` largest amounts of each of the ascending ``rows``."""
    kept = np.arange(len(rows)) if keep_zeros else np.flatnonzero(amounts)
    if most is None:
        return kept
    best = kept[np.lexsort((kept, -amounts[kept], rows[kept]))]
    ranks = np.arange(len(best)) - np.searchsorted(rows[best], rows[best])
    return np.sort(best[ranks < most])
