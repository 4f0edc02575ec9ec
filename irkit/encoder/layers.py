"""The parts of the encoder: embeddings, and one transformer layer on rows of different lengths.

In inference on a CPU, oneDNN computes linear maps, and adds bias and activation in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, TypeGuard

import torch
from irkit_kernels.ragged_pool import pooled_lengths, ragged_pool
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from irkit.core.ragged import Ragged
from irkit.encoder.attention import Backend, attend, leading, rotary_table, rotate
from irkit.encoder.encoder_config import Activation, EncoderConfig, LayerConfig, Pooling

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
_FUSED: dict[Activation | None, tuple[str, list[float], str]] = {  # for oneDNN, whose relu hides NaN
    None: ("none", [], ""),
    "gelu": ("gelu", [], "none"),
    "gelu_tanh": ("gelu", [], "tanh"),
    "silu": ("swish", [], ""),
}
_MIN_ROWS = 32  # with fewer rows, laying out the weight for oneDNN takes longer than the product
_DRAWS = 1 << 16  # numbers that a draw of dropout tells apart


def make_norm(config: EncoderConfig, size: int) -> nn.Module:
    """Return a LayerNorm or an RMSNorm over ``size`` features, as configured."""
    if config.norm == "rms":
        return nn.RMSNorm(size, eps=config.norm_eps)
    return nn.LayerNorm(size, eps=config.norm_eps, bias=config.norm_bias)


class Dropout(nn.Dropout):
    """Drops out numbers as torch does, at a quarter of torch's cost on a CPU.

    On a CPU the probability is rounded to a multiple of 1/65536: random bits are drawn 64 at a time, and 16
    bits decide about each number.

    Examples:
        >>> Dropout(0.5).eval()(torch.ones(3))
        tensor([1., 1., 1.])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Set a share ``p`` of the numbers to zero, in training; multiply the others by ``1 / (1 - p)``."""
        if not self.training or not 0 < self.p < 1 or not input.is_cpu or torch.compiler.is_compiling():
            return super().forward(input)
        return _Dropped.apply(input, self.p)  # type: ignore[no-any-return, no-untyped-call]


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        count = x.numel()
        draws = torch.empty(-(-count // 4), dtype=torch.int64, device="cpu").random_(-(2**63), None)
        bits = draws.view(torch.int16)[:count].view(x.shape)
        mask = bits >= round(p * _DRAWS) - _DRAWS // 2
        ctx.save_for_backward(mask)
        ctx.factor = 1 / (1 - p)
        return x * mask.to(x.dtype).mul_(ctx.factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return grad * mask.to(grad.dtype).mul_(ctx.factor), None


class Embeddings(nn.Module):
    """Turns token ids into the sum of word, position and token type embeddings, normalised.

    Only learned positions have embeddings. Every token has the first token type.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size = config.layers[0].hidden_size
        width = config.embedding_size or size
        self.config = config
        self.word = nn.Embedding(config.vocab_size, width)
        self.position = nn.Embedding(config.learned_positions, width) if config.learned_positions else None
        self.token_type = nn.Embedding(config.token_types, width) if config.token_types else None
        self.downscale = nn.Linear(width, size, bias=False) if config.embedding_size else nn.Identity()
        self.norm = make_norm(config, size)
        self.dropout = Dropout(config.embedding_dropout)

    def forward(self, tokens: Ragged) -> Ragged:
        """Embed token ids ``(total,)`` to ``(total, hidden_size)``."""
        x = self.word(tokens.values)
        if self.position is not None:
            x = x + self.position(tokens.positions() + self.config.position_offset)
        if self.token_type is not None:
            x = x + self.token_type.weight[0]
        return tokens.with_values(self.dropout(self.norm(self.downscale(x))))


class Context:
    """Holds what all layers on the same rows need and compute once: key positions and rotary tables.

    Attributes:
        rows: A Ragged with the lengths of the rows, whose values are not used.
        backend: Attention implementation.
        attended: ``(n,)`` number of leading tokens per row that are attended to; None is all.
        pooled: Whether layers with a `Pooling` pool; False switches pooling off.
    """

    def __init__(
        self, rows: Ragged, backend: Backend, attended: Tensor | None = None, pooled: bool = True
    ) -> None:
        self.rows, self.backend, self.attended, self.pooled = rows, backend, attended, pooled
        self._keys = None if attended is None else leading(rows, attended)
        self._rotary: dict[float, tuple[Tensor, Tensor]] = {}

    def seen(self, values: Tensor) -> Ragged:
        """Return the rows of ``values (total, ...)`` without the tokens that are not attended to."""
        if self._keys is None:
            return self.rows.with_values(values)
        return self._keys.with_values(values[self._keys.values])

    def rotary(self, base: float, head_dim: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the rotary angles of all tokens, see `rotary_table`."""
        if base not in self._rotary:
            self._rotary[base] = rotary_table(self.rows.positions(), base, head_dim)
        return self._rotary[base]

    def shorten(self, pooling: Pooling) -> Context:
        """Return the context of the shorter rows after ``pooling``.

        As many leading windows are attended to as pooling makes of the attended tokens alone.
        """
        if self.rows.max_length <= 1:
            return self
        window = pooling.kernel, pooling.stride
        lengths = pooled_lengths(self.rows.lengths, *window)
        rows = Ragged(torch.empty(int(lengths.sum()), 0, device=self.rows.device), lengths)
        attended = None if self.attended is None else pooled_lengths(self.attended, *window)
        return Context(rows, self.backend, attended)


class Layer(nn.Module):
    """Runs attention and a feed-forward block, each with a residual sum and a norm before or after.

    Pooling is linear with weights that add up to one, so it commutes with linear maps. Pooling therefore runs
    before the projection of the queries (``intra``) and before the output projection (``post``), which then
    run on fewer hidden states.
    """

    def __init__(self, config: EncoderConfig, layer: LayerConfig, input_size: int) -> None:
        super().__init__()
        size = layer.hidden_size
        self.config, self.layer = config, layer
        self.added = size - input_size  # columns that this layer adds
        location = config.norm_location
        self.attention_norm: nn.Module = nn.Identity()
        if layer.attention_norm:
            self.attention_norm = make_norm(config, input_size if location == "pre" else size)
        self.qkv: Any = nn.Linear(input_size, 3 * size, bias=config.attention_bias)
        self.out: Any = nn.Linear(size, size, bias=config.attention_bias)
        self.mlp_norm = make_norm(config, size)
        self.up: Any = nn.Linear(
            size, layer.intermediate_size * (2 if config.gated else 1), bias=config.mlp_bias
        )
        self.activation: Activation | None = config.activation  # None where ``up`` does it
        self.down: Any = nn.Linear(layer.intermediate_size, size, bias=config.mlp_bias)
        self.dropout = Dropout(config.hidden_dropout)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Context]:
        """Transform hidden states ``(total, input_size)`` to ``(total', hidden_size)``.

        Args:
            x: Hidden states of all rows, back to back.
            context: Context of the rows.

        Returns:
            Hidden states, fewer if the layer pools; and the context of their rows.
        """
        pooling = self.layer.pooling if context.pooled else None
        if pooling is None or context.rows.max_length <= 1:
            return self.after_attention(x, self._attend(x, x, context, context)), context
        after = context.shorten(pooling)
        windows = context.rows.offsets, pooling.kernel, pooling.stride
        rows: dict[str, Any] = {"pooled_offsets": after.rows.offsets, "total": len(after.rows.values)}
        pooled = ragged_pool(x, *windows, **rows)
        if pooling.location == "pre":
            attended = self._attend(pooled, pooled, after, after)
        elif pooling.location == "intra":
            attended = self._attend(pooled, x, after, context)
        else:
            attended = ragged_pool(self._attend(x, x, context, context), *windows, **rows)
        return self.after_attention(pooled, attended), after

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the projected output of attention to ``x``, then that of the feed-forward block, with norms.

        Args:
            x: ``(total, input_size)``, input of the layer; pooled if the layer pools.
            attended: ``(total, hidden_size)``, output of attention before the output projection.

        Returns:
            ``(total, hidden_size)``, the output of the layer.
        """
        location = self.config.norm_location
        x = F.pad(x, (0, self.added)) if self.added else x
        x = _plus(x, self.dropout(apply_linear(self.out, attended)))
        if location == "post":
            x = self.attention_norm(x)
        x = _plus(x, self.dropout(self._feed_forward(x if location == "post" else self.mlp_norm(x))))
        return self.mlp_norm(x) if location == "post" else x

    def _attend(self, queries: Tensor, keys: Tensor, query_context: Context, key_context: Context) -> Tensor:
        """Project hidden states to queries, keys and values, and compute attention.

        Args:
            queries: Hidden states ``(total', input_size)`` that attend; the same tensor as ``keys`` unless
                the layer pools queries only.
            keys: Hidden states ``(total, input_size)`` to attend to.
            query_context: Context of the queries.
            key_context: Context of the keys.

        Returns:
            ``(total', hidden_size)``, before the output projection.
        """
        heads, base, same = self.layer.num_heads, self.layer.rotary_base, queries is keys
        if key_context.rows.max_length <= 1:  # the softmax over one key is 1
            return self._project(keys, 2, 3)[0]
        if same:
            parts = self._project(keys, 0, 3)
        else:
            parts = (*self._project(queries, 0, 1), *self._project(keys, 1, 3))
        q, k, v = (part.view(len(part), heads, -1) for part in parts)
        pooling = None if same else self.layer.pooling
        if base is not None:
            table = key_context.rotary(base, k.shape[-1])
            k = rotate(k, table, self.config.rotary_interleaved)
            if pooling:
                positions = pooling.rotary_positions(query_context.rows.positions())
                table = rotary_table(positions, base, q.shape[-1])
            q = rotate(q, table, self.config.rotary_interleaved)
        attended = attend(
            query_context.rows.with_values(q),
            key_context.seen(k),
            key_context.seen(v),
            backend=key_context.backend,
            window=self.layer.window,
            dropout=self.config.attention_dropout if self.training else 0.0,
            pooling=pooling,
        )
        return attended.flatten(1)

    def _project(self, x: Tensor, first: int, last: int) -> tuple[Tensor, ...]:
        """Project ``x`` to query (0), key (1) and value (2), and return parts ``first`` to ``last - 1``.

        Each part is ``(total, hidden_size)``.
        """
        size = self.layer.hidden_size
        if self.config.norm_location == "pre":
            x = self.attention_norm(x)
        if isinstance(self.qkv, nn.ModuleList):
            split = tuple(part(x) for part in self.qkv[first:last])
        elif last - first < 3 and is_plain(self.qkv):
            rows = slice(first * size, last * size)
            bias = None if self.qkv.bias is None else self.qkv.bias[rows]
            split = torch.split(linear(x, self.qkv.weight[rows], bias), size, dim=-1)
        else:
            split = torch.split(apply_linear(self.qkv, x), size, dim=-1)[first:last]
        return tuple(map(self.attention_norm, split)) if self.config.norm_location == "qkv" else split

    def quantize_(self) -> None:
        """Replace the linear maps by int8 ones, in place, for inference on the CPU."""
        from irkit_kernels.int8_linear import Int8Linear

        fused = self.config.activation == "gelu" and not self.config.gated
        if fused:
            self.activation = None
        apart = any(self.config.schedule)  # pooled queries are fewer rows than keys and values
        self.qkv = nn.ModuleList(map(Int8Linear, _thirds(self.qkv))) if apart else Int8Linear(self.qkv)
        self.out, self.down = Int8Linear(self.out), Int8Linear(self.down)
        self.up = Int8Linear(self.up, activation="gelu" if fused else "none")

    def _feed_forward(self, x: Tensor) -> Tensor:
        if not self.config.gated:
            return apply_linear(self.down, apply_linear(self.up, x, self.activation))
        x, gate = apply_linear(self.up, x).chunk(2, dim=-1)
        return apply_linear(self.down, ACTIVATIONS[self.config.activation](x) * gate)


def _plus(x: Tensor, fresh: Tensor) -> Tensor:
    """Return ``x + fresh``; without gradients the sum overwrites ``fresh``."""
    alone = torch.is_grad_enabled() or torch.compiler.is_compiling() or x.dtype != fresh.dtype
    return x + fresh if alone else fresh.add_(x)


def _thirds(linear: nn.Linear) -> Iterator[nn.Linear]:
    """Split a linear map that joins query, key and value, and yield the three maps; memory is shared."""
    size = linear.out_features // 3
    for start in range(0, 3 * size, size):
        part = nn.Linear(linear.in_features, size, bias=linear.bias is not None, device="meta")
        part.weight = nn.Parameter(linear.weight[start : start + size])
        if linear.bias is not None:
            part.bias = nn.Parameter(linear.bias[start : start + size])
        yield part


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None) -> Tensor:
    """Return ``activation(x @ weight.T + bias)``.

    On a CPU torch multiplies float32 with MKL and adds bias and activation in separate passes. On processors
    that are not Intel's, MKL reaches three quarters of the speed of oneDNN.

    Args:
        x: ``(total, in_features)``.
        weight: ``(out_features, in_features)``.
        bias: ``(out_features,)``.
        activation: Activation function applied to the result; None applies none.
    """
    if activation in _FUSED and _fits_onednn(x, weight):
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, *_FUSED[activation])
        return y
    y = F.linear(x, weight, bias)
    return y if activation is None else ACTIVATIONS[activation](y)


def apply_linear(layer: nn.Module, x: Tensor, activation: Activation | None = None) -> Tensor:
    """Return ``activation(layer(x))``, by `linear` if the layer is plain; int8, LoRA and hooks still work."""
    if is_plain(layer):
        return linear(x, layer.weight, layer.bias, activation)
    y: Tensor = layer(x)
    return y if activation is None else ACTIVATIONS[activation](y)


def is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True if calling the layer only multiplies by its weight: no hooks, no subclass."""
    return (
        type(layer) is nn.Linear
        and "forward" not in layer.__dict__
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and not (layer._backward_hooks or layer._backward_pre_hooks)
        and not _has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def _fits_onednn(x: Tensor, weight: Tensor) -> bool:
    """Tell whether `linear` can use oneDNN for these tensors.

    There must be enough rows on a CPU, in a dtype that oneDNN has, and no gradients, autocast or compilation.
    """
    return (
        x.is_cpu
        and len(x) >= _MIN_ROWS
        and x.dtype == weight.dtype
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and x.dtype in _onednn_dtypes()
    )


@cache
def _onednn_dtypes() -> tuple[torch.dtype, ...]:
    built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not built or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return ()
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if fast else (torch.float32,)
