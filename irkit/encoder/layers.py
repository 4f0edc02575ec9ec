"""The parts of the encoder: embeddings, and one transformer layer on rows of different lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from irkit.encoder.attention import Backend, attend, rotary_table, rotate
from irkit.encoder.config import Activation, EncoderConfig, LayerConfig
from irkit.encoder.dropout import Dropout
from irkit.ragged import Ragged

__all__ = ["ACTIVATIONS", "Embeddings", "Layer", "make_norm"]

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def make_norm(config: EncoderConfig, size: int) -> nn.Module:
    """LayerNorm or RMSNorm over ``size`` features, as configured."""
    if config.norm == "rms":
        return nn.RMSNorm(size, eps=config.norm_eps)
    return nn.LayerNorm(size, eps=config.norm_eps, bias=config.norm_bias)


class Embeddings(nn.Module):
    """Word, learned position and token type embeddings, summed and normalised."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size = config.layers[0].hidden_size
        self.config = config
        self.word = nn.Embedding(config.vocab_size, size)
        self.position = nn.Embedding(config.learned_positions, size) if config.learned_positions else None
        self.token_type = nn.Embedding(config.token_types, size) if config.token_types else None
        self.norm = make_norm(config, size)
        self.dropout = Dropout(config.embedding_dropout)

    def forward(self, tokens: Ragged) -> Ragged:
        """Embed token ids ``(total,)`` to ``(total, hidden_size)``."""
        x = self.word(tokens.values)
        if self.position is not None:
            x = x + self.position(tokens.positions() + self.config.position_offset)
        if self.token_type is not None:
            x = x + self.token_type.weight[0]
        return tokens.with_values(self.dropout(self.norm(x)))


class Layer(nn.Module):
    """Attention and a feed-forward block, each with a residual sum and a norm before or after it."""

    def __init__(self, config: EncoderConfig, layer: LayerConfig, input_size: int) -> None:
        super().__init__()
        size = layer.hidden_size
        self.config, self.layer = config, layer
        self.pre = config.norm_location == "pre"
        self.attention_norm: nn.Module = nn.Identity()
        if layer.attention_norm:
            self.attention_norm = make_norm(config, input_size if self.pre else size)
        self.qkv = nn.Linear(input_size, 3 * size, bias=config.attention_bias)
        self.out = nn.Linear(size, size, bias=config.attention_bias)
        self.mlp_norm = make_norm(config, size)
        self.up = nn.Linear(size, layer.intermediate_size * (2 if config.gated else 1), bias=config.mlp_bias)
        self.activation: Callable[[Tensor], Tensor] = ACTIVATIONS[config.activation]
        self.down = nn.Linear(layer.intermediate_size, size, bias=config.mlp_bias)
        self.dropout = Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden: Ragged,
        backend: Backend,
        rotary: dict[float, tuple[Tensor, Tensor]],
        keys: Ragged | None = None,
    ) -> Ragged:
        """Transform ``(total, input_size)`` to ``(total, hidden_size)``.

        Args:
            hidden: Ragged hidden states.
            backend: Attention implementation.
            rotary: Cosines and sines of the positions in ``hidden``, by base; filled when needed.
            keys: Places of the tokens that are attended to, a row each; None is all.
        """
        x = hidden.values
        attended = self._attend(
            hidden.with_values(self.attention_norm(x)) if self.pre else hidden, backend, rotary, keys
        )
        return hidden.with_values(self.after_attention(x, attended))

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """What is done with each token by itself.

        Args:
            x: ``(total, input_size)``, input of the layer.
            attended: ``(total, hidden_size)``, what its attention gives.
        """
        x = x + self.dropout(self.out(attended))
        if not self.pre:
            x = self.attention_norm(x)
        x = x + self.dropout(self._feed_forward(self.mlp_norm(x) if self.pre else x))
        return x if self.pre else self.mlp_norm(x)

    def _attend(
        self,
        hidden: Ragged,
        backend: Backend,
        rotary: dict[float, tuple[Tensor, Tensor]],
        keys: Ragged | None,
    ) -> Tensor:
        heads, base = self.layer.num_heads, self.layer.rotary_base
        q, k, v = self.qkv(hidden.values).unflatten(-1, (3, heads, -1)).unbind(1)
        if base is not None:
            if base not in rotary:
                rotary[base] = rotary_table(hidden.positions(), base, q.shape[-1])
            q, k = (rotate(part, rotary[base], self.config.rotary_interleaved) for part in (q, k))
        rows = hidden
        if keys is not None:
            rows, k, v = keys, k[keys.values], v[keys.values]
        attended = attend(
            hidden.with_values(q),
            rows.with_values(k),
            rows.with_values(v),
            backend=backend,
            window=self.layer.window,
            dropout=self.config.attention_dropout if self.training else 0.0,
        )
        return attended.flatten(1)

    def quantize_(self) -> None:
        """Replace the linear maps by int8 ones for inference on the CPU."""
        from irkit_kernels.int8_linear import Int8Linear

        fused = self.config.activation == "gelu" and not self.config.gated
        if fused:
            self.activation = nn.Identity()
        for name in ("qkv", "out", "up", "down"):
            activation = "gelu" if fused and name == "up" else "none"
            setattr(self, name, Int8Linear(getattr(self, name), activation=activation))

    def _feed_forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.config.gated:
            x, gate = x.chunk(2, dim=-1)
            return self.down(self.activation(x) * gate)  # type: ignore[no-any-return]
        return self.down(self.activation(x))  # type: ignore[no-any-return]
