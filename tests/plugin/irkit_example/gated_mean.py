"""A head: the mean of the tokens of a text, in which each token has a learned weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from irkit.core.ragged import Ragged
from irkit.core.representation import Dense
from irkit.heads import Head, Side
from irkit.heads.onnx_graph import Graph

__all__ = ["GatedMeanHead"]


class GatedMeanHead(Head):
    """Pool the tokens of a text into one vector, weighted by a sigmoid of a linear layer."""

    kind = "dense"

    def __init__(self, hidden_size: int, bias: bool = True) -> None:
        """Build a head of random weights.

        Args:
            hidden_size: Width of the hidden states.
            bias: Whether the linear layer has a bias.
        """
        super().__init__()
        self.dim, self.bias, self.layers = hidden_size, bias, nn.ModuleList()
        self.gate = nn.Linear(hidden_size, 1, bias)

    def settings(self) -> dict[str, Any]:
        """Return the settings that `create` makes the head from again."""
        return {"bias": self.bias}

    def forward(
        self, hidden: Ragged, tokens: Ragged, prompt_length: int = 0, side: Side = "document"
    ) -> Dense:
        """Return one vector per text; a text without tokens becomes zeros."""
        values = hidden.values.float()
        weights = torch.sigmoid(self.gate(values))
        rows = hidden.row_ids()
        sums = values.new_zeros(len(hidden), self.dim).index_add(0, rows, values * weights)
        totals = values.new_zeros(len(hidden), 1).index_add(0, rows, weights)
        return Dense(sums / totals.clamp(min=1e-6))

    def to_onnx(self, graph: Graph, hidden: str, ids: str, mask: str) -> str:
        """Add the operations of `forward` to an ONNX graph, where rows are padded."""
        weights = graph("Sigmoid", graph.linear(hidden, self.gate.weight, self.gate.bias))
        weights = graph("Mul", weights, graph("Unsqueeze", graph("Cast", mask, to=1), graph.ints(2)))
        sums = graph("ReduceSum", graph("Mul", hidden, weights), graph.ints(1), keepdims=0)
        totals = graph("ReduceSum", weights, graph.ints(1), keepdims=0)
        return str(graph("Div", sums, graph("Max", totals, graph.floats(1e-6))))
