"""The encoder of irkit and its heads as a graph of ONNX operations, on rows padded to one length.

`encode` writes what `irkit.encoder.Encoder` computes, from the same configuration; `pool_dense`,
`project_tokens` and `weigh_terms` write what the heads compute. Weights become float32 constants.

Source: operators of ONNX, opset 17.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from irkit.encoder import Encoder, EncoderConfig, LayerConfig
from irkit.encoder.attention import alibi_bias, relative_bias
from irkit.encoder.rotary import frequencies
from irkit.errors import BadValueError
from irkit.heads import MultiVectorHead, Normalize, PooledHead, SparseHead
from irkit.heads.projection import Projection

OPSET = 17
_NEVER = -1e9  # a score whose weight is 0 in float32
_SIMPLE = {nn.ReLU: "Relu", nn.Sigmoid: "Sigmoid", nn.Tanh: "Tanh"}


class Graph:
    """Nodes and constants of an ONNX graph in the making; values are known by their names."""

    def __init__(self) -> None:
        from onnx import helper, numpy_helper

        self._helper, self._numpy = helper, numpy_helper
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._known: dict[Any, str] = {}

    def __call__(self, operation: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add an operation; return the name of its result, or the names of several."""
        names = [f"{operation.lower()}_{len(self.nodes)}_{number}" for number in range(outputs)]
        self.nodes.append(self._helper.make_node(operation, [*inputs], names, **attributes))
        return names[0] if outputs == 1 else names

    def name(self, value: str, name: str) -> None:
        """Give a value a name, under which it is an output."""
        self.nodes.append(self._helper.make_node("Identity", [value], [name]))

    def constant(self, array: Any) -> str:
        """Return the name of a constant; floats become float32. Equal small ones are stored once."""
        values = np.ascontiguousarray(array.detach().float().cpu() if isinstance(array, Tensor) else array)
        values = values.astype(np.float32) if values.dtype.kind == "f" else values
        key = (values.dtype.str, values.shape, values.tobytes()) if values.size < 16 else len(self.constants)
        if key not in self._known:
            self._known[key] = f"constant_{len(self.constants)}"
            self.constants.append(self._numpy.from_array(values, self._known[key]))
        return self._known[key]

    def shape(self, value: str, axis: int) -> str:
        """Return the size ``(1,)`` of one dimension."""
        return str(self("Slice", self("Shape", value), self.ints(axis), self.ints(axis + 1)))

    def ints(self, *numbers: int) -> str:
        """Return a constant row of whole numbers."""
        return self.constant(np.array(numbers, np.int64))

    def floats(self, number: float) -> str:
        """Return a constant number."""
        return self.constant(np.array(number, np.float32))

    def reshape(self, value: str, *sizes: int) -> str:
        """Return a value in another shape; 0 keeps a dimension."""
        return str(self("Reshape", value, self.ints(*sizes)))

    def linear(self, x: str, weight: Tensor, bias: Tensor | None) -> str:
        """Return ``x W^T + b``."""
        product = self("MatMul", x, self.constant(weight.detach().float().T))
        return str(product if bias is None else self("Add", product, self.constant(bias)))


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
    scores = _masks(graph, encoder, mask, apart)
    tables: dict[Any, Any] = {}
    for layer, settings in zip(encoder.layers, config.layers, strict=True):
        x = _layer(graph, layer, config, settings, x, places, scores, tables)
    return x if config.norm_location == "post" else _norm(graph, encoder.final_norm, x)


def _scalar(graph: Graph, row: str) -> str:
    return str(graph("Cast", graph("Squeeze", row), to=1))


def _embed(graph: Graph, encoder: Encoder, ids: str, places: str) -> str:
    parts, config = encoder.embeddings, encoder.config
    x = graph("Gather", graph.constant(parts.word.weight), ids)
    if config.embedding_scale != 1:
        x = graph("Mul", x, graph.floats(config.embedding_scale))
    if parts.position is not None:
        rows = parts.position.weight[config.position_offset :]
        x = graph("Add", x, graph("Gather", graph.constant(rows), graph("Cast", places, to=7)))
    if parts.token_type is not None:
        x = graph("Add", x, graph.constant(parts.token_type.weight[0]))
    if isinstance(parts.downscale, nn.Linear):
        x = graph.linear(x, parts.downscale.weight, None)
    return _norm(graph, parts.norm, x)


def _norm(graph: Graph, norm: nn.Module, x: str) -> str:
    if isinstance(norm, nn.Identity):
        return x
    if isinstance(norm, nn.LayerNorm):
        bias = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
        inputs = x, graph.constant(norm.weight), graph.constant(bias)
        return str(graph("LayerNormalization", *inputs, axis=-1, epsilon=norm.eps))
    assert isinstance(norm, nn.RMSNorm)
    square = graph("ReduceMean", graph("Mul", x, x), axes=[-1], keepdims=1)
    root = graph("Sqrt", graph("Add", square, graph.floats(norm.eps or 0.0)))
    weight = norm.weight.detach() + float(getattr(norm, "offset", 0.0))
    return str(graph("Mul", graph("Div", x, root), graph.constant(weight)))


def _masks(graph: Graph, encoder: Encoder, mask: str, apart: str) -> dict[int | None, str]:
    """Return what is added to the scores, by window: a large negative number where nothing is attended to."""
    config = encoder.config
    seen = graph.reshape(graph("Cast", mask, to=1), 0, 1, 1, -1)
    common = graph("Mul", graph("Sub", graph.floats(1), seen), graph.floats(_NEVER))
    if config.causal:
        later = graph("Cast", graph("Greater", apart, graph.floats(0)), to=1)
        common = graph("Add", common, graph("Mul", later, graph.floats(_NEVER)))
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
        masks[window] = graph("Add", common, graph("Mul", graph("Cast", far, to=1), graph.floats(_NEVER)))
    return masks


def _layer(
    graph: Graph,
    layer: Any,
    config: EncoderConfig,
    settings: LayerConfig,
    x: str,
    places: str,
    masks: dict[int | None, str],
    tables: dict[Any, Any],
) -> str:
    location = config.norm_location
    fresh = _attend(graph, layer, config, settings, x, places, masks, tables)
    fresh = graph.linear(fresh, layer.out.weight, layer.out.bias)
    fresh = _norm(graph, layer.attention_out_norm, fresh) if location == "both" else fresh
    if layer.added:
        x = graph("Pad", x, graph.ints(0, 0, 0, 0, 0, layer.added))
    x = graph("Add", x, fresh)
    x = _norm(graph, layer.attention_norm, x) if location == "post" else x
    inner = x if location == "post" else _norm(graph, layer.mlp_norm, x)
    inner = graph.linear(inner, layer.up.weight, layer.up.bias)
    if config.gated:
        first, second = graph("Split", inner, axis=-1, outputs=2)
        active, gate = (second, first) if config.gate_last else (first, second)
        inner = graph("Mul", _activate(graph, config.activation, active), gate)
    else:
        inner = _activate(graph, config.activation, inner)
    fresh = graph.linear(inner, layer.down.weight, layer.down.bias)
    fresh = _norm(graph, layer.mlp_out_norm, fresh) if location == "both" else fresh
    x = graph("Add", x, fresh)
    return _norm(graph, layer.mlp_norm, x) if location == "post" else x


def _attend(
    graph: Graph,
    layer: Any,
    config: EncoderConfig,
    settings: LayerConfig,
    x: str,
    places: str,
    masks: dict[int | None, str],
    tables: dict[Any, Any],
) -> str:
    width, heads = settings.head_width, settings.num_heads
    x = _norm(graph, layer.attention_norm, x) if config.norm_location in ("pre", "both") else x
    joined = graph.linear(x, layer.qkv.weight, layer.qkv.bias)
    parts = graph("Split", joined, graph.ints(*layer.widths), axis=-1, outputs=3)
    if config.norm_location == "qkv":
        parts = [_norm(graph, layer.attention_norm, part) for part in parts]
    q, k, v = (graph.reshape(part, 0, 0, -1, width) for part in parts)
    if config.head_norm:
        q, k = _norm(graph, layer.query_norm, q), _norm(graph, layer.key_norm, k)
    q, k, v = (graph("Transpose", part, perm=[0, 2, 1, 3]) for part in (q, k, v))
    if settings.rotary_base is not None:
        table = settings.rotary_base, width, settings.rotary_scaling
        if table not in tables:
            tables[table] = _angles(graph, places, *table)
        q, k = (_rotate(graph, part, tables[table], width, config.rotary_interleaved) for part in (q, k))
    times = heads // (settings.key_heads or heads)
    if times > 1:  # a copy of each head for each head of queries
        k, v = (
            graph.reshape(
                graph("Tile", graph("Unsqueeze", part, graph.ints(2)), graph.ints(1, 1, times, 1, 1)),
                0, heads, -1, width,
            )
            for part in (k, v)
        )  # fmt: skip
    scale = width**-0.5 if config.attention_scale is None else config.attention_scale
    scores = graph("MatMul", graph("Mul", q, graph.floats(scale)), graph("Transpose", k, perm=[0, 1, 3, 2]))
    if config.softcap is not None:
        limit = graph.floats(config.softcap)
        scores = graph("Mul", graph("Tanh", graph("Div", scores, limit)), limit)
    weights = graph("Softmax", graph("Add", scores, masks[settings.window]), axis=-1)
    mixed = graph("Transpose", graph("MatMul", weights, v), perm=[0, 2, 1, 3])
    return graph.reshape(mixed, 0, 0, heads * width)


def _angles(graph: Graph, places: str, base: float, width: int, scaling: Any) -> tuple[str, str]:
    """Return cosines and sines ``(1, 1, length, width / 2)``."""
    steps = graph.constant(frequencies(base, width, scaling)[None])
    angles = graph.reshape(graph("Mul", graph.reshape(places, -1, 1), steps), 1, 1, -1, width // 2)
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


def _activate(graph: Graph, name: str, x: str) -> str:
    if name == "relu":
        return str(graph("Relu", x))
    if name == "silu":
        return str(graph("Mul", x, graph("Sigmoid", x)))
    half = graph("Mul", x, graph.floats(0.5))
    if name == "gelu":
        inner = graph("Erf", graph("Div", x, graph.floats(2**0.5)))
    else:
        cubed = graph("Mul", graph("Mul", graph("Mul", x, x), x), graph.floats(0.044715))
        inner = graph("Tanh", graph("Mul", graph("Add", x, cubed), graph.floats((2 / np.pi) ** 0.5)))
    return str(graph("Mul", half, graph("Add", inner, graph.floats(1))))


# ---- heads -------------------------------------------------------------------------------------


def pool_dense(graph: Graph, head: PooledHead, hidden: str, mask: str) -> str:
    """Add a dense head; return vectors ``(batch, dim)``."""
    seen = graph("Unsqueeze", graph("Cast", mask, to=1), graph.ints(2))
    count = graph("ReduceSum", seen, graph.ints(1), keepdims=0)
    least = graph("Max", count, graph.floats(1))
    inside = graph("Mul", hidden, seen)
    vectors = []
    for mode in head.pooling:
        if mode in ("cls", "lasttoken"):
            last = graph("Cast", graph("Sub", least, graph.floats(1)), to=7)
            place = last if mode == "lasttoken" else graph("Mul", last, graph.ints(0))
            row = graph("GatherND", inside, place, batch_dims=1)
        elif mode == "max":
            lowered = graph("Mul", graph("Sub", graph.floats(1), seen), graph.floats(_NEVER))
            row = graph("ReduceMax", graph("Add", inside, lowered), axes=[1], keepdims=0)
        else:
            weights = seen
            if mode == "weightedmean":
                weights = graph("Mul", graph("CumSum", seen, graph.constant(np.array(1))), seen)
            total = graph("ReduceSum", graph("Mul", inside, weights), graph.ints(1), keepdims=0)
            divisor = graph("Max", graph("ReduceSum", weights, graph.ints(1), keepdims=0), graph.floats(1))
            row = graph("Div", total, graph("Sqrt", least) if "sqrt" in mode else divisor)
        vectors.append(row)
    joined = vectors[0] if len(vectors) == 1 else graph("Concat", *vectors, axis=-1)
    return add_layers(graph, head.layers, joined)


def project_tokens(graph: Graph, head: MultiVectorHead, hidden: str) -> str:
    """Add a multi-vector head; return token vectors ``(batch, length, dim)``.

    Raises:
        BadValueError: The head pools tokens.
    """
    if head.config.token_pooling is not None:
        raise BadValueError(
            "exporting to ONNX: the head pools tokens by clusters, which the graph cannot; expected a head "
            "without token_pooling"
        )
    return add_layers(graph, head.layers, hidden)


def weigh_terms(graph: Graph, head: SparseHead, hidden: str, mask: str) -> str:
    """Add a sparse head; return the weights of all terms ``(batch, dim)``."""
    logits = graph.linear(add_layers(graph, head.layers, hidden), head.weight, head.bias)
    weights = graph("Relu", logits)
    for _ in range(head.config.activation.count("log1p")):
        weights = graph("Log", graph("Add", weights, graph.floats(1)))
    weights = graph("Mul", weights, graph("Unsqueeze", graph("Cast", mask, to=1), graph.ints(2)))
    if head.config.pooling == "sum":
        return str(graph("ReduceSum", weights, graph.ints(1), keepdims=0))
    return str(graph("ReduceMax", weights, axes=[1], keepdims=0))


def add_layers(graph: Graph, layers: nn.ModuleList, x: str) -> str:
    """Add the layers of a head, on the last dimension.

    Raises:
        BadValueError: There is another layer than linear ones, norms and the activations of irkit.
    """
    for layer in layers:
        x = _head_layer(graph, layer, x)
    return x


def _head_layer(graph: Graph, layer: nn.Module, x: str) -> str:
    if isinstance(layer, Normalize):
        length = graph("ReduceL2", x, axes=[-1], keepdims=1)
        return str(graph("Div", x, graph("Max", length, graph.floats(1e-12))))
    if isinstance(layer, nn.Linear):
        return graph.linear(x, layer.weight, layer.bias)
    if isinstance(layer, nn.Identity | nn.Dropout):
        return x
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return _norm(graph, layer, x)
    if type(layer) in _SIMPLE:
        return str(graph(_SIMPLE[type(layer)], x))
    if isinstance(layer, nn.GELU | nn.SiLU):
        tanh = getattr(layer, "approximate", "none") == "tanh"
        return _activate(graph, "silu" if isinstance(layer, nn.SiLU) else "gelu_tanh" if tanh else "gelu", x)
    if not isinstance(layer, Projection):
        raise BadValueError(
            f"exporting to ONNX: the head has a {type(layer).__name__}; expected linear layers, norms, ReLU, "
            "GELU, SiLU, Sigmoid and Tanh"
        )
    made = graph.linear(x, layer.linear.weight, layer.linear.bias)
    if layer.gated:
        made = graph("Mul", made, _head_layer(graph, layer.activation, _head_layer(graph, layer.gate, x)))
    else:
        made = _head_layer(graph, layer.activation, made)
    if not layer.use_residual:
        return str(made)
    skip = _head_layer(graph, layer.residual, x) if hasattr(layer, "residual") else x
    made = made if layer.alpha is None else graph("Mul", made, graph.constant(layer.alpha))
    return str(graph("Add", skip, made))
