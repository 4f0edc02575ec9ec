"""Layers in one pass, with sums and norms, give the numbers of one operation after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from irkit_kernels._threads import forced_threads
from irkit_kernels.packed_linear import (
    ACTIVATIONS,
    PackedLinear,
    packed_add_norm,
    packed_feed_forward,
)
from irkit_kernels.packed_linear.test_packed_linear import packed, path, random, sizes
from irkit_kernels.row_norm import row_norm

__all__ = ["path"]  # a fixture


@settings(max_examples=30, deadline=None)
@given(
    sizes,
    st.integers(1, 90),
    st.sampled_from(list(ACTIVATIONS)),
    st.booleans(),
    st.sampled_from(["int8", "bfloat16"]),
)
def test_two_layers_give_the_numbers_of_one_after_the_other(size, hidden, activation, gated, kind):
    m, k, n, seed = size
    torch.manual_seed(seed)
    up = packed(nn.Linear(k, hidden * (2 if gated else 1)), kind, activation=activation, gated=gated)
    down = packed(nn.Linear(hidden, n), kind)
    x = torch.randn(5 * m, k)
    assert torch.equal(packed_feed_forward(x, up, down), down(up(x)))


@settings(max_examples=30, deadline=None)
@given(sizes, st.integers(1, 90), st.sampled_from(["int8", "bfloat16"]))
def test_sums_and_norms_give_the_numbers_of_row_norm(size, hidden, kind):
    m, k, n, seed = size
    torch.manual_seed(seed)
    one, up = packed(nn.Linear(k, n), kind), packed(nn.Linear(k, hidden), kind, activation="gelu")
    down, norm = packed(nn.Linear(hidden, n), kind), nn.LayerNorm(n, eps=1e-3)
    x, added = torch.randn(5 * m, k), torch.randn(5 * m, n)
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
        for layers, y in (([one], one(x)), ([up, down], down(up(x)))):
            expected = row_norm(added, norm.weight, norm.bias, eps=1e-3, added=y)
            with forced_threads(2):
                assert torch.equal(packed_add_norm(x, layers, added, norm), expected)
        half = packed_add_norm(x.bfloat16(), [one], added, norm)
        assert torch.equal(half, packed_add_norm(x.bfloat16().float(), [one], added, norm))


def test_errors_of_sums_and_norms():
    layers, x, added = [packed(nn.Linear(8, 6), "int8")], torch.randn(2, 8), torch.randn(2, 6)
    norm = nn.LayerNorm(6)
    with torch.no_grad():
        for bad in (nn.LayerNorm(5), nn.LayerNorm(6, bias=False), nn.LayerNorm(6, elementwise_affine=False)):
            with pytest.raises(ValueError, match="expected a LayerNorm over them with weight and bias"):
                packed_add_norm(x, layers, added, bad)
        with pytest.raises(ValueError, match=r"added \(3, 6\) for 6 features"):
            packed_add_norm(x, layers, torch.randn(3, 6), norm)
        for wrong in (added.double(), added.bfloat16()):
            with pytest.raises(TypeError, match="in float32"):
                packed_add_norm(x, layers, wrong, norm)
        wide = [packed(nn.Linear(8, 64), "int8", writes_half=True)]
        with pytest.raises(TypeError, match="in float32"):
            packed_add_norm(x, wide, torch.randn(2, 64), nn.LayerNorm(64))
        for many in ([], layers * 3):
            with pytest.raises(ValueError, match=f"got {len(many)} layers, expected one or two"):
                packed_add_norm(x, many, added, norm)
        with pytest.raises(ValueError, match="packed_add_norm: the second layer"):
            packed_add_norm(x, layers * 2, added, norm)
    with pytest.raises(RuntimeError, match="packed_add_norm: has no gradient"):
        packed_add_norm(x, layers, added.requires_grad_(), norm)


def test_two_layers_share_rows_among_threads_and_compile():
    up, down = PackedLinear(nn.Linear(40, 70), activation="gelu"), PackedLinear(nn.Linear(70, 9))
    x = random(2, 101, 40, seed=0)
    expected = down(up(x))
    with forced_threads(3):
        assert torch.equal(packed_feed_forward(x, up, down), expected)
    compiled = torch.compile(
        lambda x: packed_feed_forward(x + 1, up, down), backend="aot_eager", fullgraph=True, dynamic=True
    )
    assert torch.equal(compiled(x), packed_feed_forward(x + 1, up, down))


def test_errors_of_two_layers():
    up, down = PackedLinear(nn.Linear(8, 6)), PackedLinear(nn.Linear(6, 4))
    with pytest.raises(ValueError, match=r"PackedLinear\(8, 6.*expected in_features 4"):
        packed_feed_forward(torch.randn(2, 6), down, up)
    for other in (packed(nn.Linear(6, 4), "int8", activation="gelu"), packed(nn.Linear(6, 4), "bfloat16")):
        with pytest.raises(ValueError, match="no activation, no gate, and kind='int8'"):
            packed_feed_forward(torch.randn(2, 8), up, other)
    with pytest.raises(TypeError, match=r"got x torch\.bfloat16, expected float32"):
        packed_feed_forward(torch.randn(2, 8).bfloat16(), up, down)
    with pytest.raises(ValueError, match=r"packed_feed_forward: x .* do not fit"):
        packed_feed_forward(torch.randn(2, 9), up, down)
    with pytest.raises(TypeError, match=r"packed_feed_forward.*float64"):
        packed_feed_forward(torch.randn(2, 8).double(), up, down)
    with pytest.raises(RuntimeError, match="packed_feed_forward: has no gradient"):
        packed_feed_forward(torch.randn(2, 8, requires_grad=True), up, down)
