"""Weights over a vocabulary, as in SPLADE: which terms a masked language model sees in a text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from irkit.config import Config
from irkit.errors import BadValueError
from irkit.heads.base import Head, Side
from irkit.ragged import Ragged
from irkit.representation import Sparse

__all__ = ["ACTIVATIONS", "SparseConfig", "SparseHead", "transform_layers"]

_NEVER = -1e4  # a bias with which no logit is positive; half precision holds it
ACTIVATIONS: dict[str, nn.Module] = {
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
    "relu": nn.ReLU(),
    "silu": nn.SiLU(),
}


class SparseConfig(Config):
    """How logits of tokens become weights of a text.

    Attributes:
        pooling: Over the tokens of a text: ``"max"`` (SPLADE v2 and later) or ``"sum"`` (the first SPLADE).
        activation: Of a logit: ``"log1p_relu"``, ``log(1 + relu(x))``; ``"log1p_log1p_relu"``, the logarithm
            twice, which makes vectors sparser; or ``"relu"``.
        query_max_active_dims: Keep this many weights of a query, the largest; None keeps all.
        document_max_active_dims: The same for documents.

    Source: Formal et al. 2021, "SPLADE", equation 1, and "SPLADE v2", equation 6; Shen et al. 2025,
    "Exploring l0 Sparsification for Inference-free Sparse Retrievers", section 3.
    """

    pooling: Literal["max", "sum"] = "max"
    activation: Literal["log1p_relu", "log1p_log1p_relu", "relu"] = "log1p_relu"
    query_max_active_dims: PositiveInt | None = None
    document_max_active_dims: PositiveInt | None = None

    def max_active_dims(self, side: Side) -> int | None:
        """Weights kept of a text of ``side``; None is all."""
        return self.query_max_active_dims if side == "query" else self.document_max_active_dims


class SparseHead(Head):
    """A weight for each term of a vocabulary, most of them zero.

    Hidden states go through ``layers``, then through a matrix with a row for each term (often the word
    embeddings of the encoder, the same parameter); logits are activated and pooled over the tokens of the
    text, special tokens included. All but the matrix is float32, however low the precision of the encoder.

    Attributes:
        layers: Before the matrix, see `transform_layers`.
        weight: ``(dim, width)``.
        bias: ``(dim,)`` of logits, or None.
        config: What is done with logits.
        vocabulary: The terms, if they are not the tokens of the tokenizer.
        dim: Number of terms.

    Examples:
        >>> head = SparseHead([], nn.Parameter(torch.eye(3)))
        >>> tokens = Ragged.from_rows([[7, 8]])
        >>> hidden = tokens.with_values(torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, 0.0]]))
        >>> head(hidden, tokens).to_dense().tolist()
        [[1.0986123085021973, 0.0, 0.0]]
    """

    kind: ClassVar[str] = "sparse"

    def __init__(
        self,
        layers: Iterable[nn.Module],
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        config: SparseConfig | None = None,
        *,
        vocabulary: Sequence[str] | None = None,
    ) -> None:
        """Join the parts.

        Raises:
            BadValueError: Shapes do not fit, or the vocabulary has another length or a term twice.
        """
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.weight, self.bias = weight, bias
        self.config = config or SparseConfig()
        self.dim = len(weight)
        self.vocabulary = None if vocabulary is None else tuple(vocabulary)
        if weight.dim() != 2 or (bias is not None and bias.shape != (self.dim,)):
            shapes = [tuple(part.shape) for part in (weight, bias) if part is not None]
            raise BadValueError(
                f"SparseHead: weight and bias of shapes {shapes}, expected (dim, width), (dim,)"
            )
        terms = self.vocabulary
        if terms is not None and not len(set(terms)) == len(terms) == self.dim:
            raise BadValueError(
                f"SparseHead: {len(terms)} terms, {len(set(terms))} of them distinct, for {self.dim} rows; "
                "expected a distinct one for each"
            )

    def exclude_(self, ids: Iterable[int]) -> None:
        """Let these terms never have a weight: their bias becomes -10000, which every format saves.

        `irkit.Model.sparse` does so with special tokens. Models that are loaded stay as they are, because
        sentence-transformers gives weights to special tokens too, and an index may hold them;
        ``model.head.exclude_(model.tokenizer.special_tokens())`` takes them away.

        Raises:
            BadValueError: There is no such term.
        """
        chosen = sorted(set(ids))
        if chosen and not 0 <= chosen[0] <= chosen[-1] < self.dim:
            raise BadValueError(f"exclude_: ids {chosen[0]}..{chosen[-1]}, expected them in [0, {self.dim})")
        if self.bias is None:
            self.bias = nn.Parameter(torch.zeros(self.dim, device=self.weight.device))
        with torch.no_grad():
            self.bias[chosen] = _NEVER

    if TYPE_CHECKING:  # nn.Module's own says Any

        def __call__(  # noqa: D102
            self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
        ) -> Sparse: ...

    def forward(
        self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
    ) -> Sparse:
        """Make weights.

        Args:
            hidden: Ragged ``(total, hidden_size)``, what the encoder makes of ``tokens``.
            tokens: Ragged ids (of no use to this head).
            prompt_length: Of no use to this head: the tokens of a prompt take part.
            side: What the texts are; decides how many weights are kept.

        Returns:
            Sparse over ``dim`` terms, float32; a text without tokens has no weights. Gradients flow through
            its weights.
        """
        most = self.config.max_active_dims(side)
        if torch.is_grad_enabled():
            return Sparse.from_dense(self.pruned(hidden, side))
        from irkit_kernels.splade_pool import splade_pool_sparse

        lengths, terms, weights = splade_pool_sparse(
            *self._inputs(hidden), activation=self.config.activation, pooling=self.config.pooling, top_k=most
        )
        return Sparse(Ragged(terms, lengths), weights, self.dim)

    def dense(self, hidden: Ragged) -> Tensor:
        """All weights before pruning, ``(n, dim)`` float32: what regularisers of training look at."""
        from irkit_kernels.splade_pool import splade_pool

        inputs = self._inputs(hidden)
        return splade_pool(*inputs, activation=self.config.activation, pooling=self.config.pooling)

    def pruned(self, hidden: Ragged, side: Side) -> Tensor:
        """The weights that are kept, ``(n, dim)`` float32, zeros between them: what training compares."""
        values, most = self.dense(hidden), self.config.max_active_dims(side)
        if most is None or most >= self.dim:
            return values
        kept = torch.zeros_like(values, dtype=torch.bool)
        kept.scatter_(1, values.topk(most, dim=1, sorted=False).indices, True)
        return torch.where(kept, values, 0.0)

    def _inputs(self, hidden: Ragged) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What the kernels take: hidden states in the dtype of the matrix, offsets, matrix, bias."""
        values = hidden.values.to(torch.promote_types(hidden.values.dtype, torch.float32))
        for layer in self.layers:
            values = layer(values)
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if weight.dtype == torch.float64:  # which kernels do not know
            weight, bias = weight.float(), None if bias is None else bias.float()
        return values.to(weight.dtype), hidden.offsets, weight, bias

    def extra_repr(self) -> str:
        """What a printed head says beside its layers."""
        if self.vocabulary is None:
            return repr(self.config)
        terms = hashlib.blake2b("\n".join(self.vocabulary).encode("utf-8", "replace"), digest_size=8)
        return f"{self.config!r}, {self.dim} terms {terms.hexdigest()}"


def transform_layers(
    hidden_size: int,
    activation: str = "gelu",
    *,
    width: int | None = None,
    norm_eps: float = 1e-12,
    dense_bias: bool = True,
    norm_bias: bool = True,
) -> list[nn.Module]:
    """What masked language models do before the matrix: a linear layer, an activation, a norm.

    Args:
        hidden_size: Width of the hidden states.
        activation: One of `ACTIVATIONS`.
        width: Of the matrix; None is the same.
        norm_eps: Added to the variance.
        dense_bias: Whether the linear layer has one.
        norm_bias: Whether the norm has one.
    """
    width = hidden_size if width is None else width
    return [
        nn.Linear(hidden_size, width, bias=dense_bias),
        ACTIVATIONS[activation],
        nn.LayerNorm(width, eps=norm_eps, bias=norm_bias),
    ]
