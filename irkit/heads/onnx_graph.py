"""An ONNX graph in the making, and the operations that encoders and heads share.

Source: operators of ONNX, opset 17.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from irkit.errors import BadValueError
from irkit.heads.projection import Normalize, Projection

OPSET = 17
NEVER = -1e9  # a score whose weight is 0 in float32
_SIMPLE = {nn.ReLU: "Relu", nn.Sigmoid: "Sigmoid", nn.Tanh: "Tanh"}


class Graph:
    """Nodes and constants of an ONNX graph in the making. Values are known by their names.

    Calling the graph adds an operation: ``graph("Relu", x)``. `irkit.heads.Head.to_onnx` gets a graph.
    """

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
        """Give a value the name under which it is an output of the graph."""
        self.nodes.append(self._helper.make_node("Identity", [value], [name]))

    def constant(self, array: Any) -> str:
        """Add a constant and return its name; floats become float32. Equal small ones are stored once."""
        values = np.ascontiguousarray(array.detach().float().cpu() if isinstance(array, Tensor) else array)
        values = values.astype(np.float32) if values.dtype.kind == "f" else values
        key = (values.dtype.str, values.shape, values.tobytes()) if values.size < 16 else len(self.constants)
        if key not in self._known:
            self._known[key] = f"constant_{len(self.constants)}"
            self.constants.append(self._numpy.from_array(values, self._known[key]))
        return self._known[key]

    def shape(self, value: str, axis: int) -> str:
        """Add the size ``(1,)`` of one dimension of a value and return its name."""
        return str(self("Slice", self("Shape", value), self.ints(axis), self.ints(axis + 1)))

    def ints(self, *numbers: int) -> str:
        """Add a constant row of int64 and return its name."""
        return self.constant(np.array(numbers, np.int64))

    def floats(self, number: float) -> str:
        """Add a float32 constant without dimensions and return its name."""
        return self.constant(np.array(number, np.float32))

    def reshape(self, value: str, *sizes: int) -> str:
        """Add a value in another shape and return its name; a size of 0 keeps the dimension."""
        return str(self("Reshape", value, self.ints(*sizes)))

    def linear(self, x: str, weight: Tensor, bias: Tensor | None) -> str:
        """Add ``x W^T + b`` and return its name."""
        product = self("MatMul", x, self.constant(weight.detach().float().T))
        return str(product if bias is None else self("Add", product, self.constant(bias)))


def add_norm(graph: Graph, norm: nn.Module, x: str) -> str:
    """Add a norm over the last dimension."""
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


def activate(graph: Graph, name: str, x: str) -> str:
    """Add an activation function by irkit's name."""
    if name in ("relu", "tanh"):
        return str(graph(name.capitalize(), x))
    if name == "silu":
        return str(graph("Mul", x, graph("Sigmoid", x)))
    half = graph("Mul", x, graph.floats(0.5))
    if name == "gelu":
        inner = graph("Erf", graph("Div", x, graph.floats(2**0.5)))
    else:
        cubed = graph("Mul", graph("Mul", graph("Mul", x, x), x), graph.floats(0.044715))
        inner = graph("Tanh", graph("Mul", graph("Add", x, cubed), graph.floats((2 / np.pi) ** 0.5)))
    return str(graph("Mul", half, graph("Add", inner, graph.floats(1))))


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
    output = graph.linear(x, layer.linear.weight, layer.linear.bias)
    if layer.gated:
        output = graph("Mul", output, _head_layer(graph, layer.activation, _head_layer(graph, layer.gate, x)))
    else:
        output = _head_layer(graph, layer.activation, output)
    if not layer.use_residual:
        return str(output)
    skip = _head_layer(graph, layer.residual, x) if hasattr(layer, "residual") else x
    output = output if layer.alpha is None else graph("Mul", output, graph.constant(layer.alpha))
    return str(graph("Add", skip, output))
