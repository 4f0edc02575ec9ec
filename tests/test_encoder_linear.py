"""Linear maps of the encoder in inference: what oneDNN gives is what torch gives, where it may be used."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from irkit.encoder.layers import ACTIVATIONS, apply_linear, linear
from irkit.encoder.linear import pack_
from irkit.encoder.rotary import rotary_table, rotate

ACTIVE = st.sampled_from([None, *ACTIVATIONS])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([0, 1, 31, 32, 100]),
    st.sampled_from([1, 7, 64]),
    ACTIVE,
    DTYPES,
    st.booleans(),
    st.booleans(),
)
def test_error_is_at_most_twice_that_of_torch(rows, width, activation, dtype, bias, cut):
    torch.manual_seed(rows + width)
    layer = nn.Linear(24, width, bias=bias).to(dtype)
    x = torch.randn(rows, 48).to(dtype)[:, ::2] if cut else torch.randn(rows, 24).to(dtype)

    def act(y):
        return y if activation is None else ACTIVATIONS[activation](y)

    with torch.inference_mode():
        got, plain = apply_linear(layer, x, activation), act(layer(x))
        exact = act(nn.functional.linear(x.double(), *(p.double() for p in layer.parameters())))
    assert got.dtype == dtype
    errors = [(y.double() - exact).square().sum().sqrt() for y in (got, plain)]
    assert errors[0] <= 2 * errors[1] + 1e-6 * exact.square().sum().sqrt()


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_what_is_no_number_is_seen(activation):
    layer = nn.Linear(8, 8)
    with torch.no_grad():
        layer.weight[3] = torch.nan
        seen = apply_linear(layer, torch.randn(64, 8), activation).isnan()
    assert seen.any(0).tolist() == [place == 3 for place in range(8)]


def test_changed_weights_are_used_at_once():
    layer, x = nn.Linear(8, 8), torch.randn(64, 8)
    with torch.no_grad():
        before = apply_linear(layer, x)
        layer.weight.data.mul_(2)
        layer.bias.data.mul_(2)
        torch.testing.assert_close(apply_linear(layer, x), 2 * before)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_gradients_autocast_and_float64_are_left_to_torch(activation):
    layer, x = nn.Linear(8, 8), torch.randn(64, 8, requires_grad=True)
    expected = layer(x) if activation is None else ACTIVATIONS[activation](layer(x))
    got = apply_linear(layer, x, activation)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(y.square().sum(), layer.weight)[0] for y in (got, expected))
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert apply_linear(layer, x, activation).dtype == torch.bfloat16
    with torch.no_grad():
        wide = apply_linear(layer.double(), x.double(), activation)
        assert wide.dtype == torch.float64
        with pytest.raises(RuntimeError, match="dtype"):
            linear(x, layer.weight, layer.bias)


def test_what_is_more_than_a_linear_map_is_called():
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    layer, x, seen = nn.Linear(8, 8), torch.randn(64, 8), []
    twice = Twice(8, 8)
    twice.load_state_dict(layer.state_dict())
    with torch.no_grad():
        once = apply_linear(layer, x)
        torch.testing.assert_close(apply_linear(twice, x), 2 * once)
        layer.register_forward_hook(lambda _, inputs, output: seen.append(output))
        torch.testing.assert_close(apply_linear(layer, x, "relu"), once.relu())
    torch.testing.assert_close(seen[0], once)


def test_hooks_of_all_modules_and_a_forward_put_in_its_place_are_respected():
    layer, x, seen = nn.Linear(8, 8), torch.randn(64, 8), []
    with torch.no_grad():
        once = apply_linear(layer, x)
        for register in (
            torch.nn.modules.module.register_module_forward_hook,
            torch.nn.modules.module.register_module_forward_pre_hook,
        ):
            hook = register(lambda module, *_: seen.append(module))
            torch.testing.assert_close(apply_linear(layer, x), once)
            hook.remove()
            apply_linear(layer, x)
        assert seen == [layer, layer]
        layer.forward = lambda x: 2 * nn.functional.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(apply_linear(layer, x), 2 * once)
        del layer.forward
        torch.testing.assert_close(apply_linear(layer, x), once)


def test_hooks_of_gradients_are_respected():
    layer, seen = nn.Linear(8, 8), []
    layer.register_full_backward_hook(lambda _, inputs, outputs: seen.append(outputs[0]))
    apply_linear(layer, torch.randn(64, 8, requires_grad=True)).sum().backward()
    assert torch.equal(seen[0], torch.ones(64, 8))


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([0, 1, 127, 128, 300]), st.sampled_from([2, 6, 64]), DTYPES, st.booleans())
def test_rotation_in_place_is_the_one_with_gradients(rows, width, dtype, interleaved):
    parts = torch.randn(rows, 3, 2, width).to(dtype)  # query, key and value side by side
    table = rotary_table(torch.arange(rows) % 70, 10_000.0, width)
    expected = rotate(parts[:, 1], table, interleaved)
    others = parts[:, ::2].clone()
    with torch.no_grad():
        got = rotate(parts[:, 1], table, interleaved)
    assert torch.equal(got, expected)
    assert torch.equal(parts[:, ::2], others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_packed_weights_give_the_same(activation, dtype):
    layer = nn.Linear(24, 40).to(dtype)
    inputs = [torch.randn(rows, 24).to(dtype) for rows in (0, 1, 8, 40)]
    inputs.append(torch.randn(9, 48).to(dtype)[:, ::2])
    with torch.inference_mode():
        expected = [apply_linear(layer, x, activation) for x in inputs]
    before = layer.weight.detach().clone()
    pack_(layer)
    pack_(layer)  # changes nothing
    assert torch.equal(layer.weight.to_dense() if layer.weight.is_mkldnn else layer.weight, before)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    with torch.inference_mode():
        for x, y in zip(inputs, expected, strict=True):
            torch.testing.assert_close(apply_linear(layer, x, activation), y, **tolerance)
        if dtype == torch.float32:
            assert apply_linear(layer, torch.full((8, 24), torch.nan), activation).isnan().all()
