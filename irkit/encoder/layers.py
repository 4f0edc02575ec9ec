"""The parts of the encoder: embeddings, and one transformer layer on rows of different lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from irkit_kernels.gated_product import fits_gated_product, gated_product
from irkit_kernels.packed_linear import ACTIVATIONS as FUSED_ACTIVATIONS
from irkit_kernels.packed_linear import Kind, PackedLinear, has_fast, packed_add_norm, packed_feed_forward
from irkit_kernels.ragged_pool import pooled_lengths, ragged_pool
from torch import Tensor, nn
from torch.nn import functional as F

from irkit.core.ragged import Ragged
from irkit.encoder.attention import Backend, PositionTerms, attend, leading
from irkit.encoder.dropout import Dropout
from irkit.encoder.encoder_config import Activation, EncoderConfig, LayerConfig, Pooling
from irkit.encoder.inference import is_inference
from irkit.encoder.linear import ACTIVATIONS, apply_linear, is_hooked, is_plain, linear, pack_
from irkit.encoder.norms import add_norm, make_norm, plus
from irkit.encoder.rotary import RotaryScaling, rotary_table, rotate


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
        self.norm = make_norm(config, size) if config.embedding_norm else nn.Identity()
        self.dropout = Dropout(config.embedding_dropout)

    def forward(self, tokens: Ragged) -> Ragged:
        """Embed token ids ``(total,)`` to ``(total, hidden_size)``."""
        x = self.word(tokens.values)
        if self.config.embedding_scale != 1:
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)
        if self.position is not None:
            x = x + self.position(tokens.positions() + self.config.position_offset)
        if self.token_type is not None:
            x = x + self.token_type.weight[0]
        return tokens.with_values(self.dropout(self.norm(self.downscale(x))))


class Context:
    """Holds what all layers on the same rows need and compute once: key positions, rotary tables, biases.

    Attributes:
        rows: A Ragged with the lengths of the rows, whose values are not used.
        backend: Attention implementation.
        attended: ``(n,)`` number of leading tokens per row that are attended to; None is all.
        pooled: Whether layers with a `Pooling` pool; False switches pooling off.
        bias: Biases of attention scores by distance, see `attend`; None has none.
        relative: Embeddings of relative positions, and their rows by distance, see `PositionTerms`.
    """

    def __init__(
        self,
        rows: Ragged,
        backend: Backend,
        attended: Tensor | None = None,
        pooled: bool = True,
        bias: Tensor | None = None,
        relative: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.rows, self.backend, self.attended, self.pooled = rows, backend, attended, pooled
        self.bias, self.relative = bias, relative
        self._keys = None if attended is None else leading(rows, attended)
        self._rotary: dict[tuple[float, RotaryScaling | None], tuple[Tensor, Tensor]] = {}

    def seen(self, values: Tensor) -> Ragged:
        """Return the rows of ``values (total, ...)`` without the tokens that are not attended to."""
        if self._keys is None:
            return self.rows.with_values(values)
        return self._keys.with_values(values[self._keys.values])

    def rotary(
        self, base: float, head_dim: int, scaling: RotaryScaling | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the rotary angles of all tokens, see `rotary_table`."""
        if (base, scaling) not in self._rotary:
            self._rotary[base, scaling] = rotary_table(self.rows.positions(), base, head_dim, scaling)
        return self._rotary[base, scaling]

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
        location, self.widths = config.norm_location, layer.projections
        self.attention_norm: nn.Module = nn.Identity()
        if layer.attention_norm:
            self.attention_norm = make_norm(config, input_size if location in ("pre", "both") else size)
        if config.head_norm:
            self.query_norm, self.key_norm = (make_norm(config, layer.head_width) for _ in range(2))
        out_bias = config.attention_bias if config.out_bias is None else config.out_bias
        self.qkv: Any = nn.Linear(input_size, sum(self.widths), bias=config.attention_bias)
        self.out: Any = nn.Linear(self.widths[0], size, bias=out_bias)
        self.mlp_norm = make_norm(config, size)
        if location == "both":
            self.attention_out_norm, self.mlp_out_norm = (make_norm(config, size) for _ in range(2))
        self.up: Any = nn.Linear(
            size, layer.intermediate_size * (2 if config.gated else 1), bias=config.mlp_bias
        )
        self.activation: Activation | None = config.activation  # None where ``up`` does it
        down_bias = config.mlp_bias if config.down_bias is None else config.down_bias
        self.down: Any = nn.Linear(layer.intermediate_size, size, bias=down_bias)
        self.dropout = Dropout(config.hidden_dropout)
        self.quantized = False  # by `quantize_`
        apart = config.disentangled
        if apart and not apart.shared and apart.to_positions:
            self.position_key = nn.Linear(input_size, self.widths[1])
        if apart and not apart.shared and apart.from_positions:
            self.position_query = nn.Linear(input_size, self.widths[0])

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
        """Add to ``x`` the projected output of attention, then the feed-forward block, with norms.

        Args:
            x: ``(total, input_size)``, input of the layer; pooled if the layer pools.
            attended: ``(total, hidden_size)``, output of attention before the output projection.

        Returns:
            ``(total, hidden_size)``, the output of the layer.
        """
        location = self.config.norm_location
        x = F.pad(x, (0, self.added)) if self.added else x
        if location == "post" and self.quantized and self._in_one_pass(x):
            x = packed_add_norm(attended, [self.out], x, cast(nn.LayerNorm, self.attention_norm))
            return packed_add_norm(x, [self.up, self.down], x, cast(nn.LayerNorm, self.mlp_norm))
        fresh = apply_linear(self.out, attended)
        fresh = self.attention_out_norm(fresh) if location == "both" else fresh
        if location == "post":
            x = add_norm(x, self.dropout(fresh), self.attention_norm)[1]
            return add_norm(x, self.dropout(self._feed_forward(x)), self.mlp_norm)[1]
        x, normed = add_norm(x, self.dropout(fresh), self.mlp_norm, keep_sum=True)
        fresh = self._feed_forward(normed)
        fresh = self.mlp_out_norm(fresh) if location == "both" else fresh
        return plus(x, self.dropout(fresh))

    def _in_one_pass(self, x: Tensor) -> bool:
        """Tell whether the packed linear maps may take in what follows them: residual sums and norms."""
        parts = self.out, self.up, self.down, self.attention_norm, self.mlp_norm
        norms = [norm for norm in parts[3:] if isinstance(norm, nn.LayerNorm) and norm.bias is not None]
        return (
            self.activation is None
            and len(norms) == 2
            and all(part.dtype == torch.float32 for part in (x, *(norm.weight for norm in norms)))
            and not (self.training or torch.is_grad_enabled() or any(map(is_hooked, parts)))
        )

    def _attend(self, queries: Tensor, keys: Tensor, query_context: Context, key_context: Context) -> Tensor:
        """Project hidden states to queries, keys and values, and compute attention.

        Args:
            queries: Hidden states ``(total', input_size)`` that attend; the same tensor as ``keys`` unless
                the layer pools queries only.
            keys: Hidden states ``(total, input_size)`` to attend to.
            query_context: Context of the queries.
            key_context: Context of the keys.

        Returns:
            ``(total', heads * head_dim)``, before the output projection.
        """
        layer, same = self.layer, queries is keys
        if key_context.rows.max_length <= 1 and not self.quantized:  # the softmax over one key is 1
            (v,) = self._project(keys, 2, 3)
            times = self.widths[0] // self.widths[2]
            if times == 1:
                return v
            return torch.unflatten(v, 1, (-1, layer.head_width)).repeat_interleave(times, 1).flatten(1)
        # queries, keys and values per head
        if same:
            parts = self._project(keys, 0, 3)
        else:
            parts = (*self._project(queries, 0, 1), *self._project(keys, 1, 3))
        q, k, v = (torch.unflatten(part, 1, (-1, layer.head_width)) for part in parts)
        if self.config.head_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        # rotary positions; a pooled query stands in the middle of its tokens or at their start
        pooling = None if same else layer.pooling
        if layer.rotary_base is not None:
            rotary = layer.rotary_base, layer.head_width, layer.rotary_scaling
            table = key_context.rotary(*rotary)
            k = rotate(k, table, self.config.rotary_interleaved)
            if pooling:
                positions = pooling.rotary_positions(query_context.rows.positions())
                table = rotary_table(positions, *rotary)
            q = rotate(q, table, self.config.rotary_interleaved)
        # attention
        terms = self._positions(key_context)
        if (factor := self._scale()) != 1:
            q = q * factor
        attended = attend(
            query_context.rows.with_values(q),
            key_context.seen(k),
            key_context.seen(v),
            backend=key_context.backend,
            window=layer.window,
            causal=self.config.causal,
            bias=key_context.bias,
            positions=terms,
            softcap=self.config.softcap,
            dropout=self.config.attention_dropout if self.training else 0.0,
            pooling=pooling,
            rough=self.quantized,
        )
        return attended.flatten(1)

    def _scale(self) -> float:
        """Return the factor of queries that makes the scale of `attend` the configured one."""
        scale, root = self.config.attention_scale, self.layer.head_width**0.5
        return 1.0 if scale is None or scale == 1 / root else scale * root

    def _positions(self, context: Context) -> PositionTerms | None:
        """Project the relative positions to keys and queries; queries are scaled as for tokens."""
        apart = self.config.disentangled
        if context.relative is None or apart is None:
            return None
        table, rows = self.dropout(context.relative[0]), context.relative[1]
        k = q = None
        if not apart.shared:
            k = apply_linear(self.position_key, table) if apart.to_positions else None
            q = apply_linear(self.position_query, table) if apart.from_positions else None
        elif apart.to_positions and apart.from_positions:
            q, k = self._project(table, 0, 2)
        elif apart.to_positions:
            (k,) = self._project(table, 1, 2)
        else:
            (q,) = self._project(table, 0, 1)
        width, scale = self.layer.head_width, self._scale()
        return PositionTerms(
            None if k is None else torch.unflatten(k, 1, (-1, width)),
            None if q is None else torch.unflatten(q, 1, (-1, width)) * scale,
            rows,
        )

    def _project(self, x: Tensor, first: int, last: int) -> tuple[Tensor, ...]:
        """Project ``x`` to query (0), key (1) and value (2), and return parts ``first`` to ``last - 1``.

        Each part is ``(total, heads * head_dim)`` wide.
        """
        location, widths = self.config.norm_location, [*self.widths[first:last]]
        if location in ("pre", "both"):
            x = self.attention_norm(x)
        if isinstance(self.qkv, nn.ModuleList):
            split = tuple(part(x) for part in self.qkv[first:last])
        elif last - first < 3 and is_plain(self.qkv) and not self.qkv.weight.is_mkldnn:
            start = sum(self.widths[:first])
            rows = slice(start, start + sum(widths))
            bias = None if self.qkv.bias is None else self.qkv.bias[rows]
            split = torch.split(linear(x, self.qkv.weight[rows], bias), widths, dim=-1)
        else:
            split = torch.split(apply_linear(self.qkv, x), [*self.widths], dim=-1)[first:last]
        return tuple(map(self.attention_norm, split)) if location == "qkv" else split

    def quantize_(self, kind: Kind) -> None:
        """Replace the linear maps by int8 or bfloat16 ones, in place, for inference on the CPU.

        Attention is rounded to bfloat16 then, which adds less to the error than int8 maps.
        """
        # the feed-forward block activates and multiplies the halves where the product is computed
        activation, gated = self.config.activation, self.config.gated
        fused = activation in FUSED_ACTIVATIONS
        if fused:
            self.activation = None
            if gated and self.config.gate_last:  # the first half is activated
                self.up = _swap_halves(self.up)
        pack = partial(PackedLinear, kind=kind)
        self.up = pack(self.up, activation=activation if fused else "none", gated=fused and gated)
        apart = any(self.config.schedule)  # pooled queries are fewer rows than keys and values
        if apart:
            self.qkv = nn.ModuleList(map(pack, _parts(self.qkv, self.widths)))
        else:
            self.qkv = pack(self.qkv, writes_half=self._halves())
        self.out, self.down = pack(self.out), pack(self.down)
        self.quantized = True

    def _halves(self) -> bool:
        """Tell whether queries, keys and values go to attention as they are, which may round them anyway."""
        config = self.config
        return (
            has_fast("bfloat16")
            and not (config.head_norm or config.disentangled or config.norm_location == "qkv")
            and self.layer.rotary_base is None
            and self._scale() == 1
            and sum(self.widths) % 64 == 0
        )

    def pack_(self) -> None:
        """Lay out weights for inference on the CPU, in place, except weights used in parts."""
        pack_(self.out)
        pack_(self.down)
        if not any(self.config.schedule):
            pack_(self.qkv)
        if not self.config.gated:
            pack_(self.up)

    def _feed_forward(self, x: Tensor) -> Tensor:
        if self.quantized and self.activation is None and not (is_hooked(self.up) or is_hooked(self.down)):
            return packed_feed_forward(x, self.up, self.down)
        if not self.config.gated or self.activation is None:
            return apply_linear(self.down, apply_linear(self.up, x, self.activation))
        return apply_linear(self.down, self._gated(x))

    def _gated(self, x: Tensor) -> Tensor:
        """Return the activated half of the first product times the other half."""
        act, last = self.config.activation, self.config.gate_last
        if x.is_cpu and not torch.is_grad_enabled() and is_plain(self.up):  # two products: one activates
            weights = self.up.weight.chunk(2)
            biases = (None, None) if self.up.bias is None else self.up.bias.chunk(2)
            active, gate = (
                linear(x, weight, bias, act if (i == 1) is last else None)
                for i, (weight, bias) in enumerate(zip(weights, biases, strict=True))
            )
            return active.mul_(gate)
        x = apply_linear(self.up, x)
        if is_inference() and fits_gated_product(x, act):
            return gated_product(x, act, last)
        x, gate = x.chunk(2, dim=-1)
        return ACTIVATIONS[act](gate) * x if last else ACTIVATIONS[act](x) * gate


def _swap_halves(linear: nn.Linear) -> nn.Linear:
    """Return a linear map whose two halves of features are in the other order."""
    swapped = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    swapped.weight = nn.Parameter(torch.cat(linear.weight.chunk(2)[::-1]))
    if linear.bias is not None:
        swapped.bias = nn.Parameter(torch.cat(linear.bias.chunk(2)[::-1]))
    return swapped


def _parts(linear: nn.Linear, widths: Sequence[int]) -> Iterator[nn.Linear]:
    """Split a linear map that joins query, key and value, and yield the three maps; memory is shared."""
    biases = [None] * len(widths) if linear.bias is None else torch.split(linear.bias, [*widths])
    for weight, bias in zip(torch.split(linear.weight, [*widths]), biases, strict=True):
        part = nn.Linear(linear.in_features, len(weight), bias=bias is not None, device="meta")
        part.weight = nn.Parameter(weight)
        if bias is not None:
            part.bias = nn.Parameter(bias)
        yield part
