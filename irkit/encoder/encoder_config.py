"""The description of an encoder: one configuration for all families of `irkit.encoder.families`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from irkit.config import Config
from irkit.encoder.rotary import RotaryScaling

if TYPE_CHECKING:
    from torch import Tensor

MOST_LAYERS = 1024  # building more takes minutes; no published encoder has that many
_Size = Annotated[int, Field(gt=0, lt=1 << 24)]  # products of two can be counted
_Count = Annotated[int, Field(ge=0, lt=1 << 31)]
_Rate = Annotated[float, Field(ge=0, le=1)]

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh"]


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
        hidden_size: Width of the hidden states that the layer returns; at least the width of the layer
            before.
        num_heads: Attention heads.
        key_heads: Heads of keys and values, each for as many heads of queries; None is one for each.
        head_dim: Width of a head; None divides the hidden size by the heads.
        intermediate_size: Inner width of the feed-forward block.
        attention_norm: Whether attention has a norm (pre-norm models skip it in the first layer, whose
            input is already normalised).
        window: Tokens further away than this do not attend to each other; None is global attention.
        rotary_base: Base of the rotary position frequencies; None for layers without rotary positions.
        rotary_scaling: How the frequencies are slowed down for long rows; None leaves them.
        pooling: How the rows are shortened; None leaves them.
    """

    hidden_size: _Size
    num_heads: _Size
    key_heads: _Size | None = None
    head_dim: _Size | None = None
    intermediate_size: _Size
    attention_norm: bool = True
    window: _Count | None = None
    rotary_base: float | None = Field(default=None, gt=0)
    rotary_scaling: RotaryScaling | None = None
    pooling: Pooling | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(f"hidden size {self.hidden_size} is no multiple of {self.num_heads} heads")
        if self.num_heads % (self.key_heads or 1):
            raise ValueError(f"{self.num_heads} heads are no multiple of {self.key_heads} heads of keys")
        if self.rotary_base is not None and self.head_width % 2:
            raise ValueError(
                f"heads of width {self.head_width} are not made of pairs, which rotary positions turn"
            )
        if self.window is not None and self.pooling and self.pooling.kernel // 2 > self.window:
            raise ValueError(
                f"the middle of {self.pooling.kernel} tokens is further from the first than the "
                f"{self.window} that attention reaches"
            )
        return self

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def projections(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values, with all of their heads."""
        keys = (self.key_heads or self.num_heads) * self.head_width
        return self.num_heads * self.head_width, keys, keys


class RelativeBias(Config):
    """Settings of learned numbers that are added to attention scores, one per head and bucket of distances.

    Attributes:
        buckets: Number of buckets, half of them for each direction. Near distances have a bucket each, and
            buckets grow with the distance.
        furthest: Distances from here on share the last bucket.

    Source: Raffel et al. 2020 (T5), section 2.1.
    """

    buckets: int = Field(default=32, ge=4, lt=1 << 20)
    furthest: int = Field(default=128, ge=2)


class Disentangled(Config):
    """Settings of attention scores between tokens and relative positions, one way or both (DeBERTa).

    Attributes:
        buckets: Number of buckets for each direction. Near distances have a bucket each, and buckets grow
            with the distance. None: every distance has a bucket.
        furthest: Distances from here on share the last bucket.
        norm: Whether the embeddings of relative positions are normalised.
        to_positions: Whether queries of tokens meet keys of positions.
        from_positions: Whether queries of positions meet keys of tokens.
        shared: Whether positions are projected as tokens are; otherwise by projections of their own.

    Source: He et al. 2021 (DeBERTa), section 3.1; He et al. 2023 (DeBERTaV3); buckets as in DeBERTa-v2.
    """

    buckets: int | None = Field(default=None, ge=4)
    furthest: int = Field(ge=2, lt=1 << 20)
    norm: bool = False
    to_positions: bool = True
    from_positions: bool = True
    shared: bool = True

    @property
    def span(self) -> int:
        """Number of buckets for each direction."""
        return self.buckets or self.furthest

    @model_validator(mode="after")
    def _buckets_fit(self) -> Self:
        if self.buckets and self.furthest <= self.buckets // 2 + 1:
            raise ValueError(f"{self.buckets} buckets for distances below {self.furthest}")
        if not (self.to_positions or self.from_positions):
            raise ValueError("relative positions without scores")
        return self


class Convolution(Config):
    """Settings of a convolution over neighbouring embeddings, added to the output of the first layer.

    Attributes:
        kernel: Number of tokens that a result depends on, an odd number.
        groups: Number of groups of features, each with a convolution of its own.
        activation: Activation function of the results.

    Source: DeBERTa-v2.
    """

    kernel: int = Field(ge=1, lt=1 << 10)
    groups: _Size = 1
    activation: Activation = "tanh"

    @model_validator(mode="after")
    def _has_a_middle(self) -> Self:
        if self.kernel % 2 == 0:
            raise ValueError(f"a convolution over {self.kernel} tokens, which has no middle")
        return self


class EncoderConfig(Config):
    """Settings of one transformer encoder.

    Attributes:
        vocab_size: Rows of the word embedding.
        layers: Settings of the layers, from the input up; no layer is narrower than the layer before.
        embedding_size: Width of the word and position embeddings, which a linear layer then maps to the width
            of the first layer; an output matrix of this width can share the word embeddings. None: the width
            of the first layer, without a linear layer.
        learned_positions: Rows of the learned position table; 0 for an encoder without one.
        position_offset: First row of the table that is used (RoBERTa starts after its padding index).
        token_types: Rows of the token type table, of which the first is used; 0 for an encoder without one.
        embedding_scale: Factor of the word embeddings.
        embedding_norm: Whether the embeddings are normalised.
        norm: LayerNorm or RMSNorm.
        norm_location: ``post`` normalises after each residual sum (BERT), ``pre`` the input of each block,
            ``both`` input and output of each block (Gemma), ``qkv`` queries, keys and values, and the input
            of the feed-forward block.
        norm_eps: Added to the variance.
        norm_bias: Whether LayerNorm has a bias.
        norm_offset: Added to the weights of RMSNorm (Gemma stores them less 1).
        causal: Whether no token attends to tokens after it.
        relative: Biases of attention scores by distance; None has none.
        disentangled: Scores between tokens and relative positions; None has none.
        convolution: Convolution over embeddings beside the first layer; None has none.
        alibi: Whether attention scores fall with the distance, at a rate per head, see `alibi_bias`.
        head_norm: Whether each head of queries and keys is normalised (Qwen3).
        attention_scale: Factor of the attention scores; None is one over the root of the width of a head.
        softcap: Limit to which attention scores are bent; None leaves them.
        attention_bias: Whether the projections to queries, keys and values have biases.
        out_bias: Whether the projection after attention has a bias; None is as ``attention_bias``.
        mlp_bias: Whether the first map of the feed-forward block has a bias.
        down_bias: Whether its second map has a bias; None is as ``mlp_bias``.
        activation: Activation function of the feed-forward block.
        gated: Whether the activated half of the first feed-forward product multiplies the other half.
        gate_last: Whether the second half is the activated half.
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
    embedding_scale: float = Field(default=1.0, gt=0)
    embedding_norm: bool = True
    norm: Literal["layer", "rms"] = "layer"
    norm_location: Literal["pre", "both", "qkv", "post"] = "post"
    norm_eps: float = Field(default=1e-12, ge=0)
    norm_bias: bool = True
    norm_offset: float = 0.0
    causal: bool = False
    relative: RelativeBias | None = None
    disentangled: Disentangled | None = None
    convolution: Convolution | None = None
    alibi: bool = False
    head_norm: bool = False
    attention_scale: float | None = Field(default=None, gt=0)
    softcap: float | None = Field(default=None, gt=0)
    attention_bias: bool = True
    out_bias: bool | None = None
    mlp_bias: bool = True
    down_bias: bool | None = None
    activation: Activation = "gelu"
    gated: bool = False
    gate_last: bool = False
    rotary_interleaved: bool = False
    embedding_dropout: _Rate = 0.0
    attention_dropout: _Rate = 0.0
    hidden_dropout: _Rate = 0.0

    @model_validator(mode="after")
    def _widths_grow(self) -> Self:
        sizes = [layer.hidden_size for layer in self.layers]
        if not sizes or sizes != sorted(sizes):
            raise ValueError(f"hidden sizes {sizes} must not fall from layer to layer")
        positioned = self.causal or self.relative or self.alibi or self.disentangled
        if any(self.schedule) and (positioned or self.convolution):
            raise ValueError("layers that pool, and causal attention, biases by distance or a convolution")
        groups = self.convolution.groups if self.convolution else 1
        if any(size % groups for size in sizes[:1]) or (self.convolution and sizes[0] != self.hidden_size):
            raise ValueError(f"hidden sizes {sizes} and a convolution in {groups} groups")
        if (self.relative or self.disentangled) and len({layer.num_heads for layer in self.layers}) > 1:
            raise ValueError("one table of biases, and layers with other numbers of heads")
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
