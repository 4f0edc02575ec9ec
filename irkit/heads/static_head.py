"""Queries without an encoder: each token has one weight, whatever stands around it.

Source: for idf.json the model directories of opensearch-project.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from irkit.config import read_json
from irkit.core.ragged import Ragged
from irkit.core.representation import Sparse
from irkit.encoder import AnyEncoder
from irkit.errors import BadValueError, ConfigError, CorruptError
from irkit.heads.head import Side
from irkit.heads.layer_modules import Module, write_json
from irkit.heads.term_head import SparseConfig, TermHead, read_limits
from irkit.tokenizer import Tokenizer, read_optional
from irkit.utils.weights import read_weights, write_weights


class StaticHead(TermHead):
    """Turns a text into its distinct tokens, each with the weight that a table gives the token.

    With a weight of 1 for each token the results are lexical (binary) queries. With weights of
    `irkit.model.idf_weights` or of training they are the inference-free queries of learned sparse retrieval.
    A token that occurs twice in a text counts once.

    Attributes:
        weight: Weight of each token, ``(tokens,)``; trained unless ``frozen``.
        dim: Size of the vocabulary of the result. A token whose id is not below ``dim`` and
            ``len(weight)`` weighs nothing.
        frozen: Whether training leaves the weights as they are.
        config: Its limits say how many weights of a text are kept, the largest absolute values; its other
            settings are not used.

    Examples:
        >>> head = StaticHead(torch.tensor([0.5, 2.0, 1.0]))
        >>> queries = head.look_up(Ragged.from_rows([[1, 0, 1], [2]]))
        >>> queries.to_dense().tolist()
        [[0.5, 2.0, 0.0], [0.0, 0.0, 1.0]]

    Source: SparseStaticEmbedding of sentence-transformers 6.2; Geng et al. 2024 (arXiv 2411.04403).
    """

    transformer_type: ClassVar[str] = "sentence_transformers.sparse_encoder.models.SparseStaticEmbedding"

    def __init__(
        self,
        weight: Tensor,
        dim: int | None = None,
        config: SparseConfig | None = None,
        *,
        frozen: bool = False,
    ) -> None:
        """Make a head of ``weight (tokens,)`` over a vocabulary of ``dim`` terms; None is ``len(weight)``.

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
            settings: Content of config_sentence_transformers.json, with the numbers of weights to keep.

        Raises:
            ConfigError: The configuration in the folder is invalid.
            CorruptError: The weights are not one finite number for each token.
        """
        config = SparseConfig.parse(read_limits(settings), f"loading {folder.parent}")
        static = read_optional(folder / "config.json")
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
            sizes = (tokenizer.highest_id() + 1,), (tokenizer.vocab_size,)  # the peer counts tokens
            if tensors or weight.shape not in sizes or not bool(weight.isfinite().all()):
                raise CorruptError(
                    f"loading {folder}: weights of shape {tuple(weight.shape)} beside {sorted(tensors)}, "
                    f"expected 'weight' alone with a finite number for each of {tokenizer.vocab_size} tokens"
                )
        return cls(weight.float(), None, config, frozen=frozen)

    def save_encoder(self, encoder: AnyEncoder, folder: Path) -> None:
        """Write the head as a SparseStaticEmbedding, which stands for an encoder and a head."""
        write_json(folder / "config.json", {"frozen": self.frozen})
        write_weights(folder, {"weight": self.weight})

    def to_modules(self, encoder: AnyEncoder) -> list[Module]:
        """Return no modules: `save_encoder` writes the head."""
        return []

    def match_width(self, dim: int) -> None:
        """Set ``dim``, unless a token with a higher id has a weight."""
        if not bool(self.weight[dim:].any()):
            self.dim = dim

    def forward(
        self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
    ) -> Sparse:
        """Return the weights of the distinct tokens of each text, its prompt included.

        Only ``tokens`` and ``side`` are used. The limits of ``config`` for ``side`` apply, see `look_up`.
        """
        return self.look_up(tokens, self.config.max_active_dims(side))

    if TYPE_CHECKING:  # nn.Module's own says Any
        __call__ = forward

    def look_up(self, tokens: Ragged, most: int | None = None) -> Sparse:
        """Return the distinct tokens of each row, ids ascending, with their weights.

        A weight of 0 is left out, unless it is being trained.

        Args:
            tokens: Ragged int64 ids.
            most: Keep this many weights of each row, the largest absolute values; None is all.

        Returns:
            Sparse over ``dim`` terms, float32. Gradients flow through the weights.
        """
        ids = tokens.values.cpu().numpy()  # a query is too short to be worth kernels of torch
        rows = np.repeat(np.arange(len(tokens)), tokens.lengths.numpy())
        keys = np.unique((rows * self.dim + ids)[ids < min(len(self.weight), self.dim)])
        rows, terms = np.divmod(keys, max(1, self.dim))
        weights = self.weight[torch.from_numpy(terms).to(self.weight.device)]
        if most is not None or not weights.requires_grad:
            amounts = weights.detach().abs().cpu().numpy()
            positions = np.arange(len(rows)) if weights.requires_grad else np.flatnonzero(amounts)
            if most is not None:
                best = positions[np.lexsort((positions, -amounts[positions], rows[positions]))]
                ranks = np.arange(len(best)) - np.searchsorted(rows[best], rows[best])
                positions = np.sort(best[ranks < most])
            rows, terms = rows[positions], terms[positions]
            weights = weights[torch.from_numpy(positions).to(weights.device)]
        lengths = torch.from_numpy(np.bincount(rows, minlength=len(tokens)))
        return Sparse(Ragged(torch.from_numpy(terms).to(weights.device), lengths), weights, self.dim)

    def extra_repr(self) -> str:
        """Return the text between the parentheses of a printed head."""
        return f"{len(self.weight)} weights, dim={self.dim}, {self.config!r}"


def token_weights(weights: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> Tensor:
    """Return weights by token id; a token that is not given weighs 0.

    Args:
        weights: Token -> weight, each at least 0.
        tokenizer: Tokenizer whose vocabulary has the tokens.
        source: Where the weights come from, for the message.

    Returns:
        ``(highest id of the tokenizer + 1,)`` float32.

    Raises:
        ConfigError: The table is empty, the tokenizer lacks a token, or a weight is not a finite number of at
            least 0.
    """
    if not weights:
        raise ConfigError(f"{source}: there are no weights, expected one for each token that counts")
    result = torch.zeros(tokenizer.highest_id() + 1, device="cpu")
    unknown = []
    for token, weight in weights.items():
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"{source}: token {token!r} has weight {weight!r:.60}, expected a number >= 0")
        token_id = tokenizer.backend.token_to_id(token)
        if token_id is None:
            unknown.append(token)
        else:
            result[token_id] = weight
    if unknown:
        raise ConfigError(
            f"{source}: {len(unknown)} of {len(weights)} tokens are not in the vocabulary of the tokenizer, "
            f"such as {', '.join(map(repr, unknown[:3]))}; expected weights for the tokens of {tokenizer!r}"
        )
    return result


def read_idf(file: Path, tokenizer: Tokenizer) -> Tensor:
    """Return weights by token id from a JSON object ``{token: weight}``, see `token_weights`."""
    return token_weights(read_json(file), tokenizer, f"reading {file}")
