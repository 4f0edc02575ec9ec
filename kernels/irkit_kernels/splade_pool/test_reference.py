"""The definition of pooling has the values and the gradients of plain torch."""

from __future__ import annotations

import math

import pytest
import torch

from irkit_kernels.splade_pool import ACTIVATIONS, POOLINGS, splade_pool_reference
from irkit_kernels.splade_pool.reference import activate


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_reference_is_what_autograd_says(activation, pooling):
    generator = torch.Generator().manual_seed(0)
    shapes = (8, 5), (6, 5), (6,)
    hidden, weight, bias = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    bias[0] = -100  # a term that no sequence has
    offsets = torch.tensor([0, 3, 3, 4, 8], dtype=torch.int32)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]

    def ours(hidden, weight, bias):
        return splade_pool_reference(hidden, offsets, weight, bias, activation=activation, pooling=pooling)

    def plain(hidden, weight, bias):
        logs = activation.count("log1p")
        weights = (hidden @ weight.T + bias).relu()
        for _ in range(logs):
            weights = weights.log1p()
        parts = weights.split(offsets.diff().tolist())
        pooled = [part.amax(0) if pooling == "max" else part.sum(0) for part in parts if len(part)]
        return torch.stack([*pooled[:1], torch.zeros(6, dtype=weights.dtype), *pooled[1:]])

    assert torch.autograd.gradcheck(ours, leaves)
    results = [function(*leaves) for function in (ours, plain)]
    torch.testing.assert_close(*results)
    grad = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pairs = zip(*(torch.autograd.grad(result, leaves, grad) for result in results), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs)
    assert results[0][:, 0].eq(0).all()
    assert torch.autograd.grad(ours(*leaves).sum(), weight)[0][0].eq(0).all()


def test_activations():
    x = torch.tensor([-1.0, 0.0, math.e - 1, math.inf])
    assert activate(x.clone(), "relu").tolist() == pytest.approx([0, 0, math.e - 1, math.inf])
    assert activate(x.clone(), "log1p_relu").tolist() == pytest.approx([0, 0, 1, math.inf])
    assert activate(x.clone(), "log1p_log1p_relu").tolist() == pytest.approx([0, 0, math.log(2), math.inf])
