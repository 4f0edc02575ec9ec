"""Weights of the tokens of a text, each from its hidden state: learned lexical matching without expansion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from irkit.config import Config
from irkit.core.ragged import Ragged, to_device
from irkit.core.representation import Sparse
from irkit.encoder import AnyEncoder
from irkit.heads.head import Head, Side
from irkit.heads.onnx_graph import Graph, add_layers
from irkit.heads.projection import Projection
from irkit.heads.term_head import SparseConfig, TermHead
from irkit.tokenizer import Tokenizer


class TokenWeightHead(TermHead):
    """Gives each distinct token of a text the weight ``relu(w h + b)`` of its hidden state ``h``.

    A token that stands in a text twice has the higher of both weights. Special tokens weigh nothing, except
    the mask token, as in FlagEmbedding. Only terms in the text get a weight; `SparseHead` also weighs others.

    Attributes:
        layers: One `Projection` to width 1.
        dim: Size of the vocabulary: its highest id + 1.
        config: Its limits say how many weights of a text are kept; its other settings are not used.

    Examples:
        >>> head = TokenWeightHead(2, 10)
        >>> _ = head.layers[0].linear.weight.data.copy_(torch.tensor([[1.0, 0.0]]))
        >>> _ = head.layers[0].linear.bias.data.zero_()
        >>> tokens = Ragged.from_rows([[3, 7, 3]])
        >>> hidden = tokens.with_values(torch.tensor([[1.0, 0.0], [-1.0, 5.0], [2.0, 0.0]]))
        >>> with torch.no_grad():
        ...     made = head(hidden, tokens)
        >>> made.terms.values.tolist(), made.weights.tolist()
        ([3], [2.0])

    Source: Lin and Ma 2021, "A Few Brief Notes on DeepImpact, COIL, and a Conceptual Framework" (uniCOIL);
    Chen et al. 2024, "BGE M3-Embedding", section 3.2 (lexical retrieval).
    """

    model_type: ClassVar[str] = Head.model_type  # no class of sentence-transformers opens it

    def __init__(self, hidden_size: int, dim: int, config: SparseConfig | None = None) -> None:
        """Make a head of random weights for hidden states of ``hidden_size`` and a vocabulary of ``dim``."""
        super().__init__()
        self.layers = torch.nn.ModuleList([Projection(hidden_size, 1)])
        self.dim = dim
        self.config = config or SparseConfig()
        self.special_ids = torch.empty(0, dtype=torch.int64, device="cpu")

    @classmethod
    def create(
        cls, encoder: AnyEncoder, tokenizer: Tokenizer, config: Mapping[str, Any] | Config | None = None
    ) -> Self:
        """Make a head of random weights; ``config`` is a `SparseConfig` or its keys and values."""
        if not isinstance(config, SparseConfig):
            config = SparseConfig.parse(dict(config or {}), "token weights")
        return cls(encoder.hidden_size, tokenizer.highest_id() + 1, config)

    def settings(self) -> dict[str, Any]:
        """Return the keys and values of `config`."""
        return self.config.model_dump()

    def directory_settings(self, queries: Head) -> dict[str, Any]:
        """Return nothing: `settings` has the limits."""
        return {}

    def pooling_problem(self) -> str | None:
        """Return why the head cannot work on an encoder that pools; never None."""
        return "weights of tokens need a row for each token"

    def look_up_words(self, tokenizer: Tokenizer) -> None:
        """Look up the ids of special tokens."""
        weightless = {*tokenizer.special_tokens()} - {tokenizer.special_ids.get("mask")}
        self.special_ids = torch.tensor(sorted(weightless), dtype=torch.int64, device="cpu")

    def forward(
        self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
    ) -> Sparse:
        """Return the weights of the distinct tokens of each text, ids ascending, float32; zeros are left out.

        In training, weights of 0 stay, because a token could get a weight again.

        Args:
            hidden: Ragged ``(total, hidden_size)``.
            tokens: Ragged ids, one per hidden state.
            prompt_length: Ignored: the tokens of a prompt get weights, too.
            side: Side of the texts, which decides how many weights are kept.
        """
        host = tokens.host()
        keys, positions = torch.unique(host.row_ids() * self.dim + host.values, return_inverse=True)
        weights = torch.relu(self.apply_layers(hidden.values)).squeeze(1)
        highest = weights.new_zeros(len(keys)).scatter_reduce(
            0, to_device(positions, weights.device), weights, "amax"
        )
        # special tokens weigh nothing
        has_weight = ~torch.isin(keys % self.dim, self.special_ids)
        if not highest.requires_grad:
            has_weight &= (highest > 0).cpu()
        chosen = has_weight.nonzero().squeeze(1)
        keys, highest = keys[chosen], highest[to_device(chosen, weights.device)]
        lengths = torch.bincount(keys // self.dim, minlength=len(tokens))
        terms = Ragged(to_device(keys % self.dim, weights.device), lengths)
        return keep_largest(Sparse(terms, highest, self.dim), self.config.max_active_dims(side))

    if TYPE_CHECKING:  # nn.Module's own says Any
        __call__ = forward

    def to_onnx(self, graph: Graph, hidden: str, ids: str, mask: str) -> str:
        """Add the head to an ONNX graph; return the name of the weights of all tokens ``(batch, dim)``."""
        weights = graph("Squeeze", graph("Relu", add_layers(graph, self.layers, hidden)), graph.ints(2))
        counted = np.ones(self.dim, np.float32)
        counted[self.special_ids.numpy()] = 0
        seen = graph("Mul", graph("Cast", mask, to=1), graph("Gather", graph.constant(counted), ids))
        weights = graph("Mul", weights, seen)
        # each token gets the highest weight of all equal tokens: then the order of writing does not matter
        equal = graph("Equal", graph("Unsqueeze", ids, graph.ints(2)), graph("Unsqueeze", ids, graph.ints(1)))
        rows = graph("Mul", graph("Cast", equal, to=1), graph("Unsqueeze", weights, graph.ints(1)))
        highest = graph("ReduceMax", rows, axes=[2], keepdims=0)
        sizes = graph("Concat", graph.shape(ids, 0), graph.ints(self.dim), axis=0)
        empty = graph("Expand", graph.floats(0), sizes)
        return str(graph("ScatterElements", empty, ids, highest, axis=1))

    def extra_repr(self) -> str:
        """Return what a printed head says beside its layers."""
        return f"dim={self.dim}, {self.config!r}"


def keep_largest(rows: Sparse, most: int | None) -> Sparse:
    """Return rows with their ``most`` largest weights each, in the order of the terms; None keeps all.

    Examples:
        >>> rows = Sparse(Ragged.from_rows([[1, 4, 6], [2]]), torch.tensor([3.0, 1.0, 2.0, 5.0]), 8)
        >>> kept = keep_largest(rows, 2)
        >>> kept.terms.values.tolist(), kept.weights.tolist()
        ([1, 6, 2], [3.0, 2.0, 5.0])
    """
    if most is None or len(rows.weights) == 0 or int(rows.terms.lengths.max()) <= most:
        return rows
    row_ids: Tensor = rows.terms.row_ids()
    order = torch.argsort(-rows.weights.detach(), stable=True)
    order = order[torch.argsort(row_ids[order], stable=True)]
    ranks = rows.terms.positions()  # of each element of the sorted rows in its row
    chosen = torch.sort(order[ranks < most]).values
    terms = Ragged(rows.terms.values[chosen], rows.terms.lengths.clamp(max=most))
    return Sparse(terms, rows.weights[chosen], rows.dim)
