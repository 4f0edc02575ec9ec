"""What an encoder is made of: one description that covers BERT, RoBERTa, DistilBERT, ModernBERT and TITE."""

from __future__ import annotations

from typing import Literal

from irkit.config import Config

__all__ = ["Activation", "EncoderConfig", "LayerConfig"]

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]


class LayerConfig(Config):
    """One transformer layer.

    Attributes:
        hidden_size: Width of what the layer returns; at least that of the layer before.
        num_heads: Attention heads.
        intermediate_size: Inner width of the feed-forward block.
        attention_norm: Whether attention has a norm (pre-norm models skip it in the first layer, whose
            input is already normalised).
        window: Tokens further away than this do not attend to each other; None is global attention.
        rotary_base: Base of the rotary position frequencies; None is no rotary positions.
    """

    hidden_size: int
    num_heads: int
    intermediate_size: int
    attention_norm: bool = True
    window: int | None = None
    rotary_base: float | None = None


class EncoderConfig(Config):
    """One transformer encoder.

    Attributes:
        vocab_size: Rows of the word embedding.
        layers: The layers, from the input up.
        learned_positions: Rows of the learned position table; 0 is none.
        position_offset: First row of the table that is used (RoBERTa starts behind its padding index).
        token_types: Rows of the token type table, of which the first is used; 0 is none.
        norm: LayerNorm or RMSNorm.
        norm_location: ``post`` normalises after each residual sum (BERT), ``pre`` the input of each block.
        norm_eps: Added to the variance.
        norm_bias: Whether LayerNorm has a bias.
        attention_bias: Whether the projections of attention have biases.
        mlp_bias: Whether the feed-forward block has biases.
        activation: Of the feed-forward block.
        gated: Whether the activated half of the first feed-forward product multiplies the other half.
        rotary_interleaved: Whether rotary pairs are neighbours (TITE) or the two halves of a head.
        embedding_dropout: Probability, in training.
        attention_dropout: Probability for attention weights, in training.
        hidden_dropout: Probability for what each block adds, in training.
    """

    vocab_size: int
    layers: tuple[LayerConfig, ...]
    learned_positions: int = 0
    position_offset: int = 0
    token_types: int = 0
    norm: Literal["layer", "rms"] = "layer"
    norm_location: Literal["pre", "post"] = "post"
    norm_eps: float = 1e-12
    norm_bias: bool = True
    attention_bias: bool = True
    mlp_bias: bool = True
    activation: Activation = "gelu"
    gated: bool = False
    rotary_interleaved: bool = False
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0

    @property
    def hidden_size(self) -> int:
        """Width of the output."""
        return self.layers[-1].hidden_size

    @property
    def max_positions(self) -> int | None:
        """Longest row that the learned positions allow; None is any length."""
        return self.learned_positions - self.position_offset if self.learned_positions else None
