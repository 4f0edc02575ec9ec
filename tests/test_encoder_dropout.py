"""Dropout of the encoder: what torch's does, from fewer random bits."""

from __future__ import annotations

import pytest
import torch

from irkit.encoder.dropout import Dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_share_is_dropped_and_the_rest_grows(p, dtype):
    torch.manual_seed(0)
    x = torch.full((999, 1001), 2.0, dtype=dtype, requires_grad=True)
    out = Dropout(p)(x)
    grown = torch.tensor(2 / (1 - p), dtype=dtype)
    assert set(out.unique().tolist()) == {0.0, grown.item()}
    kept = (out > 0).double()
    deviation = (p * (1 - p)) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 5 * deviation / 1000 + 2**-17
    for axis in (0, 1):
        assert (kept.mean(axis) - (1 - p)).abs().max() < 5 * deviation / 999**0.5
    out.backward(torch.ones_like(out))
    assert torch.equal(x.grad * 2, out.detach())  # the gradient passes where the number did


def test_the_generator_of_torch_decides():
    x, dropout = torch.ones(7, 5), Dropout(0.3)
    torch.manual_seed(1)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(1)
    assert torch.equal(dropout(x), first)
    assert not torch.equal(first, second)


def test_where_nothing_is_dropped():
    x = torch.randn(4, 3)
    assert Dropout(0.5).eval()(x) is x
    assert torch.equal(Dropout(0.0)(x), x)
    assert torch.equal(Dropout(1.0)(x), torch.zeros(4, 3))
    assert Dropout(0.5)(torch.empty(0, 3)).shape == (0, 3)
    assert Dropout(0.5)(torch.full((100,), torch.inf)).isnan().any()  # 0 x inf, as in torch


def test_strides_do_not_matter():
    torch.manual_seed(0)
    x = torch.randn(6, 4).T.requires_grad_()
    out = Dropout(0.5)(x)
    assert torch.equal(out != 0, out / x == 2)


def test_compiles():
    compiled = torch.compile(Dropout(0.5), fullgraph=True, backend="eager")
    out = compiled(torch.ones(1000))
    assert 300 < (out == 0).sum() < 700
