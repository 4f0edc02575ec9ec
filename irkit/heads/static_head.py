"""Queries without an encoder: each token has one weight, whatever stands around it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from irkit.core.ragged import Ragged
from irkit.core.representation import Sparse
from irkit.errors import BadValueError, ConfigError, CorruptError
from irkit.heads.head import Head, Side
from irkit.heads.layer_modules import optional, write_json
from irkit.heads.sparse_config import SparseConfig, read_limits, write_limits
from irkit.heads.token_weights import read_idf
from irkit.tokenizer import Tokenizer
from irkit.utils.weights import read_weights, write_weights


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

    Examples:
        >>> head = StaticHead(torch.tensor([0.5, 2.0, 1.0]))
        >>> queries = head.look_up(Ragged.from_rows([[1, 0, 1], [2]]))
        >>> queries.to_dense().tolist()
        [[0.5, 2.0, 0.0], [0.0, 0.0, 1.0]]

    Source: SparseStaticEmbedding of sentence-transformers 6.2; Geng et al. 2024 (arXiv 2411.04403).
    """

    config: SparseConfig
    kind: ClassVar[str] = "sparse"
    model_type: ClassVar[str] = "SparseEncoder"
    transformer_type: ClassVar[str] = "sentence_transformers.sparse_encoder.models.SparseStaticEmbedding"

    def __init__(
        self,
        weight: Tensor,
        dim: int | None = None,
        config: SparseConfig | None = None,
        *,
        frozen: bool = False,
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
        self.layers = nn.ModuleList()

    @classmethod
    def from_folder(cls, folder: Path, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> Self:
        """Read the folder of a SparseStaticEmbedding.

        Args:
            folder: Path of the folder.
            tokenizer: Tokenizer of the folder.
            settings: config_sentence_transformers.json, which has the limits.

        Raises:
            ConfigError: The configuration in the folder is invalid.
            CorruptError: The weights are not one finite number for each token.
        """
        config = SparseConfig.parse(read_limits(settings), f"loading {folder.parent}")
        static = optional(folder / "config.json")
        frozen, path = static.get("frozen", False), static.get("path")
        if not isinstance(frozen, bool) or not isinstance(path, str | None):
            raise ConfigError(
                f"loading {folder}: frozen {frozen!r:.60} and path {path!r:.60}, expected a boolean and a "
                "name"
            )
        if path is not None:
            weight = read_idf(folder / Path(path).name, tokenizer)
        else:
            tensors = read_weights(folder)
            weight = tensors.pop("weight", torch.empty(0, device="cpu"))
            if tensors or weight.shape != (tokenizer.vocab_size,) or not bool(weight.isfinite().all()):
                raise CorruptError(
                    f"loading {folder}: weights of shape {tuple(weight.shape)} beside {sorted(tensors)}, "
                    f"expected 'weight' alone with a finite number for each of {tokenizer.vocab_size} tokens"
                )
        return cls(weight.float(), None, config, frozen=frozen)

    def save(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Write the folder of a SparseStaticEmbedding, with its tokenizer as it is in memory."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", {"frozen": self.frozen})
        write_weights(folder, {"weight": self.weight})
        tokenizer.save_as_it_is(folder)
        if self.lengths:
            write_json(folder / "sentence_bert_config.json", self.transformer_settings())

    def directory_settings(self, queries: Head) -> dict[str, Any]:
        """Return the limits of both sides."""
        return write_limits(self.config, queries)

    def limited(self, max_active_dims: int) -> Self:
        """Return a copy that shares all weights and keeps that many weights per text."""
        twin = copy.copy(self)
        twin.config = self.config.limited(max_active_dims)
        return twin

    def match_width(self, dim: int) -> None:
        """Take the width of document vectors if no token beyond it has a weight."""
        if not bool(self.weight[dim:].any()):
            self.dim = dim

    def forward(
        self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
    ) -> Sparse:
        """Return `look_up` of the tokens, including the prompt's; ``hidden`` is ignored."""
        return self.look_up(tokens, self.config.max_active_dims(side))

    if TYPE_CHECKING:  # nn.Module's own says Any
        __call__ = forward

    def look_up(self, tokens: Ragged, most: int | None = None) -> Sparse:
        """Return the distinct tokens of each row in ascending order, with their weights.

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
            positions = _largest(amounts, rows, most, keep_zeros=weights.requires_grad)
            rows, terms = rows[positions], terms[positions]
            weights = weights[torch.from_numpy(positions).to(weights.device)]
        lengths = torch.from_numpy(np.bincount(rows, minlength=len(tokens)))
        return Sparse(Ragged(torch.from_numpy(terms).to(weights.device), lengths), weights, self.dim)

    def extra_repr(self) -> str:
        """Return what a printed head says."""
        return f"{len(self.weight)} weights, dim={self.dim}, {self.config!r}"


def _largest(
    amounts: np.ndarray[Any, Any], rows: np.ndarray[Any, Any], most: int | None, keep_zeros: bool
) -> np.ndarray[Any, Any]:
    """Places, ascending, of the ``most`` largest amounts of each of the ascending ``rows``."""
    positions = np.arange(len(rows)) if keep_zeros else np.flatnonzero(amounts)
    if most is None:
        return positions
    best = positions[np.lexsort((positions, -amounts[positions], rows[positions]))]
    ranks = np.arange(len(best)) - np.searchsorted(rows[best], rows[best])
    return np.sort(best[ranks < most])
