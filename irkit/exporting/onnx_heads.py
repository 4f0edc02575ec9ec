"""The heads of irkit as ONNX operations, on hidden states ``(batch, length, width)``."""

from __future__ import annotations

import numpy as np
from torch import nn

from irkit.errors import BadValueError
from irkit.exporting.onnx_graph import NEVER, Graph, activate, add_norm
from irkit.heads import MultiVectorHead, Normalize, PooledHead, SparseHead, TokenWeightHead
from irkit.heads.projection import Projection

_SIMPLE = {nn.ReLU: "Relu", nn.Sigmoid: "Sigmoid", nn.Tanh: "Tanh"}


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
            lowered = graph("Mul", graph("Sub", graph.floats(1), seen), graph.floats(NEVER))
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


def weigh_tokens(graph: Graph, head: TokenWeightHead, hidden: str, ids: str, mask: str) -> str:
    """Add a head of token weights; return the weights of all terms ``(batch, dim)``."""
    weights = graph("Squeeze", graph("Relu", add_layers(graph, head.layers, hidden)), graph.ints(2))
    counted = np.ones(head.dim, np.float32)
    counted[head.special_ids.numpy()] = 0
    seen = graph("Mul", graph("Cast", mask, to=1), graph("Gather", graph.constant(counted), ids))
    weights = graph("Mul", weights, seen)
    # each token gets the highest weight of all that are equal: then the order of writing does not matter
    equal = graph("Equal", graph("Unsqueeze", ids, graph.ints(2)), graph("Unsqueeze", ids, graph.ints(1)))
    rows = graph("Mul", graph("Cast", equal, to=1), graph("Unsqueeze", weights, graph.ints(1)))
    highest = graph("ReduceMax", rows, axes=[2], keepdims=0)
    sizes = graph("Concat", graph.shape(ids, 0), graph.ints(head.dim), axis=0)
    empty = graph("Expand", graph.floats(0), sizes)
    return str(graph("ScatterElements", empty, ids, highest, axis=1))


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
        return add_norm(graph, layer, x)
    if type(layer) in _SIMPLE:
        return str(graph(_SIMPLE[type(layer)], x))
    if isinstance(layer, nn.GELU | nn.SiLU):
        tanh = getattr(layer, "approximate", "none") == "tanh"
        return activate(graph, "silu" if isinstance(layer, nn.SiLU) else "gelu_tanh" if tanh else "gelu", x)
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
