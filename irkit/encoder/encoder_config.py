"""The description of an encoder: one configuration for BERT, RoBERTa, DistilBERT, ModernBERT and TITE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from irkit.config import Config

if TYPE_CHECKING:
    from torch import Tensor

MOST_LAYERS = 1024  # building more takes minutes; no published encoder has that many
_Size = Annotated[int, Field(gt=0, lt=1 << 24)]  # products of two can be counted
_Count = Annotated[int, Field(ge=0, lt=1 << 31)]
_Rate = Annotated[float, Field(ge=0, le=1)]

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]


class Pooling(Config):
    """Settings of a layer that shortens its rows: it averages over windows of neighbouring tokens.

    A window that reaches beyond the end of a row averages over the tokens that exist.

    Attributes:
        kernel: Number of tokens in a window.
        stride: Number of tokens from the start of one window to the start of the next.
        location: Values that are pooled: the input of attention (``pre``), only the queries and the residual
            (``intra``), or the residual sum after attention (``post``).
        positions: Rotary position of a pooled query, for ``intra``: the middle of its window (``stride``);
            or, as in the authors' code, the middle as if windows did not overlap (``kernel``). If windows do
            not overlap, both are equal.

    Source: Schlatt et al. 2025 (TITE), section 3.1.
    """

    kernel: int = Field(ge=2)
    stride: int = Field(ge=1)
    location: Literal["pre", "intra", "post"] = "intra"
    positions: Literal["stride", "kernel"] = "stride"

    @model_validator(mode="after")
    def _covers_every_token(self) -> Self:
        if self.stride > self.kernel:
            raise ValueError(f"stride {self.stride} over kernel {self.kernel} would skip tokens")
        return self

    def shorten(self, length: int) -> int:
        """Return the number of hidden states that are left of a row of ``length`` hidden states."""
        return -(-max(length - self.kernel, 0) // self.stride) + 1 if length else 0

    def centres(self, windows: Tensor) -> Tensor:
        """Return the positions, in tokens, of the middles of windows with the numbers ``windows``.

        A window that reaches beyond the end of its row counts as a whole one.
        """
        return windows * self.stride + (self.kernel - 1) / 2

    def rotary_positions(self, windows: Tensor) -> Tensor:
        """Return the rotary positions of queries pooled from windows with the numbers ``windows``.

        The setting ``positions`` decides. The results may be fractional.
        """
        step = self.kernel if self.positions == "kernel" else self.stride
        return windows * step + (self.kernel - 1) / 2


class LayerConfig(Config):
    """Settings of one transformer layer.

    Attributes:
        hidden_size: Width of the hidden states that the layer returns; not below that of the layer before.
        num_heads: Attention heads.
        intermediate_size: Inner width of the feed-forward block.
        attention_norm: Whether attention has a norm (pre-norm models skip it in the first layer, whose
            input is already normalised).
        window: Tokens further away than this do not attend to each other; None is global attention.
        rotary_base: Base of the rotary position frequencies; None is no rotary positions.
        pooling: How the rows are shortened; None leaves them.
    """

    hidden_size: _Size
    num_heads: _Size
    intermediate_size: _Size
    attention_norm: bool = True
    window: _Count | None = None
    rotary_base: float | None = Field(default=None, gt=0)
    pooling: Pooling | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        width, rest = divmod(self.hidden_size, self.num_heads)
        if rest:
            raise ValueError(f"hidden size {self.hidden_size} is no multiple of {self.num_heads} heads")
        if self.rotary_base is not None and width % 2:
            raise ValueError(f"heads of width {width} are not made of pairs, which rotary positions turn")
        if self.window is not None and self.pooling and self.pooling.kernel // 2 > self.window:
            raise ValueError(
                f"the middle of {self.pooling.kernel} tokens is further from the first than the "
                f"{self.window} that attention reaches"
            )
        return self


class EncoderConfig(Config):
    """Settings of one transformer encoder.

    Attributes:
        vocab_size: Rows of the word embedding.
        layers: Settings of the layers, from the input up; no layer is narrower than the layer before.
        embedding_size: Width of the word and position embeddings, which a linear layer then maps to the width
            of the first layer; an output matrix of this width can share the word embeddings. None: the width
            of the first layer, without a linear layer.
        learned_positions: Rows of the learned position table; 0 is none.
        position_offset: First row of the table that is used (RoBERTa starts after its padding index).
        token_types: Rows of the token type table, of which the first is used; 0 is none.
        norm: LayerNorm or RMSNorm.
        norm_location: ``post`` normalises after each residual sum (BERT), ``pre`` the input of each block,
            ``qkv`` queries, keys and values, and the input of the feed-forward block.
        norm_eps: Added to the variance.
        norm_bias: Whether LayerNorm has a bias.
        attention_bias: Whether the projections of attention have biases.
        mlp_bias: Whether the feed-forward block has biases.
        activation: Activation function of the feed-forward block.
        gated: Whether the activated half of the first feed-forward product multiplies the other half.
        rotary_interleaved: Whether rotary pairs are neighbours (TITE) or the two halves of a head.
        embedding_dropout: Dropout probability of the embeddings, in training.
        attention_dropout: Dropout probability of the attention weights, in training.
        hidden_dropout: Dropout probability of each block's output before the residual sum, in training.
    """

    vocab_size: _Count
    layers: tuple[LayerConfig, ...]
    embedding_size: _Size | None = None
    learned_positions: _Count = 0
    position_offset: _Count = 0
    token_types: _Count = 0
    norm: Literal["layer", "rms"] = "layer"
    norm_location: Literal["pre", "qkv", "post"] = "post"
    norm_eps: float = Field(default=1e-12, ge=0)
    norm_bias: bool = True
    attention_bias: bool = True
    mlp_bias: bool = True
    activation: Activation = "gelu"
    gated: bool = False
    rotary_interleaved: bool = False
    embedding_dropout: _Rate = 0.0
    attention_dropout: _Rate = 0.0
    hidden_dropout: _Rate = 0.0

    @model_validator(mode="after")
    def _widths_grow(self) -> Self:
        sizes = [layer.hidden_size for layer in self.layers]
        if not sizes or sizes != sorted(sizes):
            raise ValueError(f"hidden sizes {sizes} must not fall from layer to layer")
        if 0 < self.learned_positions <= self.position_offset:
            raise ValueError(
                f"{self.learned_positions} positions of which {self.position_offset} are not used"
            )
        return self

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states of the last layer."""
        return self.layers[-1].hidden_size

    @property
    def max_positions(self) -> int | None:
        """Longest row that the learned positions allow; None is any length."""
        return self.learned_positions - self.position_offset if self.learned_positions else None

    @property
    def schedule(self) -> tuple[Pooling | None, ...]:
        """Pooling of each layer, from the input up; None for a layer that does not pool."""
        return tuple(layer.pooling for layer in self.layers)

    @property
    def window(self) -> tuple[int, int]:
        """Kernel and stride, in tokens, of the windows that the hidden states of the last layer stand for."""
        kernel = stride = 1
        for pooling in filter(None, self.schedule):
            kernel, stride = kernel + (pooling.kernel - 1) * stride, stride * pooling.stride
        return kernel, stride
