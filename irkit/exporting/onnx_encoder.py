"""The encoder of irkit as a graph of ONNX operations, on rows padded to one length.

`encode` writes what `irkit.encoder.Encoder` computes, from the same configuration. Weights become float32
constants.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from irkit.encoder import Encoder, EncoderConfig, LayerConfig
from irkit.encoder.attention import alibi_bias, distance_rows, relative_bias
from irkit.encoder.convolution import ConvolutionBlock
from irkit.encoder.rotary import frequencies
from irkit.errors import BadValueError
from irkit.heads.onnx_graph import NEVER, Graph, activate, add_norm


def encode(graph: Graph, encoder: Encoder, ids: str, mask: str) -> str:
    """Add an encoder; return its hidden states ``(batch, length, width)``.

    Args:
        graph: Gets the operations.
        encoder: In float32.
        ids: ``(batch, length)`` int64.
        mask: ``(batch, length)`` int64, 1 for tokens that others attend to.

    Raises:
        BadValueError: Layers pool, or weights are not in float32.
    """
    config = encoder.config
    if any(config.schedule):
        raise BadValueError(
            "exporting to ONNX: layers of this encoder pool tokens, which the graph cannot; expected an "
            "encoder whose layers do not pool"
        )
    if any(not isinstance(layer.qkv, nn.Linear) for layer in encoder.layers):
        raise BadValueError("exporting to ONNX: the encoder is in int8; load it with dtype='float32'")
    length = graph.shape(ids, 1)
    places = graph("Range", graph.floats(0), _scalar(graph, length), graph.floats(1))
    x = _embed(graph, encoder, ids, places)
    apart = graph("Sub", graph.reshape(places, 1, -1), graph.reshape(places, -1, 1))  # key - query
    shared = _Shared(places, _masks(graph, encoder, mask, apart), {}, _positions(graph, encoder, apart))
    embedded = x
    for number, (layer, settings) in enumerate(zip(encoder.layers, config.layers, strict=True)):
        x = _layer(graph, layer, config, settings, x, shared)
        if encoder.convolution is not None and number == 0:
            x = _convolve(graph, encoder.convolution, embedded, x, mask)
    return x if config.norm_location == "post" else add_norm(graph, encoder.final_norm, x)


def _convolve(graph: Graph, block: ConvolutionBlock, embedded: str, x: str, mask: str) -> str:
    seen = graph("Unsqueeze", graph("Cast", mask, to=1), graph.ints(2))
    inputs = graph("Transpose", graph("Mul", embedded, seen), perm=[0, 2, 1])
    weights = graph.constant(block.conv.weight), graph.constant(block.conv.bias)
    settings: dict[str, Any] = {
        "group": block.settings.groups,
        "pads": [block.gap] * 2,
        "kernel_shape": [block.settings.kernel],
    }
    convolved = graph("Transpose", graph("Conv", inputs, *weights, **settings), perm=[0, 2, 1])
    return add_norm(graph, block.norm, graph("Add", x, activate(graph, block.settings.activation, convolved)))


def _scalar(graph: Graph, row: str) -> str:
    return str(graph("Cast", graph("Squeeze", row), to=1))


def _embed(graph: Graph, encoder: Encoder, ids: str, positions: str) -> str:
    parts, config = encoder.embeddings, encoder.config
    x = graph("Gather", graph.constant(parts.word.weight), ids)
    if config.embedding_scale != 1:
        x = graph("Mul", x, graph.floats(config.embedding_scale))
    if parts.position is not None:
        rows = parts.position.weight[config.position_offset :]
        x = graph("Add", x, graph("Gather", graph.constant(rows), graph("Cast", positions, to=7)))
    if parts.token_type is not None:
        x = graph("Add", x, graph.constant(parts.token_type.weight[0]))
    if isinstance(parts.downscale, nn.Linear):
        x = graph.linear(x, parts.downscale.weight, None)
    return add_norm(graph, parts.norm, x)


def _masks(graph: Graph, encoder: Encoder, mask: str, apart: str) -> dict[int | None, str]:
    """Return what is added to the scores, by window: a large negative number where nothing is attended to."""
    config = encoder.config
    seen = graph.reshape(graph("Cast", mask, to=1), 0, 1, 1, -1)
    common = graph("Mul", graph("Sub", graph.floats(1), seen), graph.floats(NEVER))
    if config.causal:
        later = graph("Cast", graph("Greater", apart, graph.floats(0)), to=1)
        common = graph("Add", common, graph("Mul", later, graph.floats(NEVER)))
    if config.relative is not None and encoder.relative is not None:
        furthest = config.relative.furthest  # from here on all distances share a bucket
        table = relative_bias(encoder.relative.weight, furthest, furthest + 1)
        near = graph("Clip", apart, graph.floats(-furthest), graph.floats(furthest))
        rows = graph("Cast", graph("Add", near, graph.floats(furthest)), to=7)
        common = graph("Add", common, graph("Gather", graph.constant(table), rows, axis=1))
    if config.alibi:
        slopes = alibi_bias(config.layers[0].num_heads, 2)[:, :1, None]
        common = graph("Add", common, graph("Mul", graph("Abs", apart), graph.constant(slopes)))
    masks: dict[int | None, str] = {None: common}
    for window in {layer.window for layer in config.layers} - {None}:
        far = graph("Greater", graph("Abs", apart), graph.floats(float(window or 0)))
        masks[window] = graph("Add", common, graph("Mul", graph("Cast", far, to=1), graph.floats(NEVER)))
    return masks


class _Shared(NamedTuple):
    """What all layers need and the graph computes once.

    Attributes:
        places: Position of each token of a row.
        masks: What is added to the scores, by window.
        tables: Cosines and sines of rotary positions, by settings.
        positions: Embeddings of relative positions, and the row of each query and key; None has none.
    """

    places: str
    masks: dict[int | None, str]
    tables: dict[Any, Any]
    positions: tuple[Tensor, str] | None


def _positions(graph: Graph, encoder: Encoder, apart: str) -> tuple[Tensor, str] | None:
    settings = encoder.config.disentangled
    if settings is None or (relative := encoder.relative_positions(settings.furthest + 1)) is None:
        return None
    far = settings.furthest
    near = graph("Clip", graph("Neg", apart), graph.floats(-far), graph.floats(far))
    rows = graph("Cast", graph("Add", near, graph.floats(far)), to=7)
    return relative[0].detach(), graph(
        "Gather", graph.constant(distance_rows(settings, far + 1).numpy()), rows
    )


def _position_scores(graph: Graph, layer: Any, q: str, k: str, scale: float, shared: _Shared) -> str:
    """Return the products of tokens and relative positions, see `irkit.encoder.attention.PositionTerms`."""
    assert shared.positions is not None
    (table, rows), width, apart = shared.positions, layer.layer.head_width, layer.config.disentangled
    sizes = graph("Slice", graph("Shape", q), graph.ints(0), graph.ints(3))
    sizes = graph("Concat", sizes, graph.shape(q, 2), axis=0)
    # queries and keys of positions, by the projections of tokens or by projections of their own
    weights, biases = (torch.split(x, [*layer.widths]) for x in (layer.qkv.weight, layer.qkv.bias))
    scores = []
    for part_number, name, used in ((1, "key", apart.to_positions), (0, "query", apart.from_positions)):
        if not used:
            continue
        own = None if apart.shared else getattr(layer, f"position_{name}")
        projection = (weights[part_number], biases[part_number]) if own is None else (own.weight, own.bias)
        heads = torch.unflatten(nn.functional.linear(table, *projection), 1, (-1, width)).permute(1, 2, 0)
        tokens = q if name == "key" else k
        products = graph("MatMul", tokens, graph.constant(heads * scale))
        chosen = rows if name == "key" else graph("Transpose", rows, perm=[1, 0])
        part = graph("GatherElements", products, graph("Expand", chosen, sizes), axis=3)
        scores.append(part if name == "key" else graph("Transpose", part, perm=[0, 1, 3, 2]))
    return str(scores[0] if len(scores) == 1 else graph("Add", *scores))


def _layer(
    graph: Graph, layer: Any, config: EncoderConfig, settings: LayerConfig, x: str, shared: _Shared
) -> str:
    location = config.norm_location
    fresh = _attend(graph, layer, config, settings, x, shared)
    fresh = graph.linear(fresh, layer.out.weight, layer.out.bias)
    fresh = add_norm(graph, layer.attention_out_norm, fresh) if location == "both" else fresh
    if layer.added:
        x = graph("Pad", x, graph.ints(0, 0, 0, 0, 0, layer.added))
    x = graph("Add", x, fresh)
    x = add_norm(graph, layer.attention_norm, x) if location == "post" else x
    inner = x if location == "post" else add_norm(graph, layer.mlp_norm, x)
    inner = graph.linear(inner, layer.up.weight, layer.up.bias)
    if config.gated:
        first, second = graph("Split", inner, axis=-1, outputs=2)
        active, gate = (second, first) if config.gate_last else (first, second)
        inner = graph("Mul", activate(graph, config.activation, active), gate)
    else:
        inner = activate(graph, config.activation, inner)
    fresh = graph.linear(inner, layer.down.weight, layer.down.bias)
    fresh = add_norm(graph, layer.mlp_out_norm, fresh) if location == "both" else fresh
    x = graph("Add", x, fresh)
    return add_norm(graph, layer.mlp_norm, x) if location == "post" else x


def _attend(
    graph: Graph, layer: Any, config: EncoderConfig, settings: LayerConfig, x: str, shared: _Shared
) -> str:
    width, heads = settings.head_width, settings.num_heads
    # query, key and value: (batch, heads, length, width)
    x = add_norm(graph, layer.attention_norm, x) if config.norm_location in ("pre", "both") else x
    joined = graph.linear(x, layer.qkv.weight, layer.qkv.bias)
    parts = graph("Split", joined, graph.ints(*layer.widths), axis=-1, outputs=3)
    if config.norm_location == "qkv":
        parts = [add_norm(graph, layer.attention_norm, part) for part in parts]
    q, k, v = (graph.reshape(part, 0, 0, -1, width) for part in parts)
    if config.head_norm:
        q, k = add_norm(graph, layer.query_norm, q), add_norm(graph, layer.key_norm, k)
    q, k, v = (graph("Transpose", part, perm=[0, 2, 1, 3]) for part in (q, k, v))
    # rotary positions, and keys and values for each head of queries
    if settings.rotary_base is not None:
        table = settings.rotary_base, width, settings.rotary_scaling
        if table not in shared.tables:
            shared.tables[table] = _angles(graph, shared.places, *table)
        angles = shared.tables[table]
        q, k = (_rotate(graph, part, angles, width, config.rotary_interleaved) for part in (q, k))
    times = heads // (settings.key_heads or heads)
    if times > 1:  # a copy of each head for each head of queries
        k, v = (
            graph.reshape(
                graph("Tile", graph("Unsqueeze", part, graph.ints(2)), graph.ints(1, 1, times, 1, 1)),
                0, heads, -1, width,
            )
            for part in (k, v)
        )  # fmt: skip
    # scores, masked, to weights; then the mean of the values
    scale = width**-0.5 if config.attention_scale is None else config.attention_scale
    scores = graph("MatMul", graph("Mul", q, graph.floats(scale)), graph("Transpose", k, perm=[0, 1, 3, 2]))
    if shared.positions is not None:
        scores = graph("Add", scores, _position_scores(graph, layer, q, k, scale, shared))
    if config.softcap is not None:
        limit = graph.floats(config.softcap)
        scores = graph("Mul", graph("Tanh", graph("Div", scores, limit)), limit)
    weights = graph("Softmax", graph("Add", scores, shared.masks[settings.window]), axis=-1)
    mixed = graph("Transpose", graph("MatMul", weights, v), perm=[0, 2, 1, 3])
    return graph.reshape(mixed, 0, 0, heads * width)


def _angles(graph: Graph, positions: str, base: float, width: int, scaling: Any) -> tuple[str, str]:
    """Return cosines and sines ``(1, 1, length, width / 2)``."""
    steps = graph.constant(frequencies(base, width, scaling)[None])
    angles = graph.reshape(graph("Mul", graph.reshape(positions, -1, 1), steps), 1, 1, -1, width // 2)
    factor = graph.floats(1.0 if scaling is None else scaling.amplitude)
    return graph("Mul", graph("Cos", angles), factor), graph("Mul", graph("Sin", angles), factor)


def _rotate(graph: Graph, x: str, table: tuple[str, str], width: int, interleaved: bool) -> str:
    cos, sin = table
    if interleaved:
        pairs = graph.reshape(x, 0, 0, 0, width // 2, 2)
        a, b = (graph("Squeeze", part, graph.ints(4)) for part in graph("Split", pairs, axis=4, outputs=2))
    else:
        a, b = graph("Split", x, axis=-1, outputs=2)
    first = graph("Sub", graph("Mul", a, cos), graph("Mul", b, sin))
    second = graph("Add", graph("Mul", b, cos), graph("Mul", a, sin))
    if not interleaved:
        return str(graph("Concat", first, second, axis=-1))
    stacked = (graph("Unsqueeze", part, graph.ints(4)) for part in (first, second))
    return graph.reshape(graph("Concat", *stacked, axis=4), 0, 0, 0, width)
