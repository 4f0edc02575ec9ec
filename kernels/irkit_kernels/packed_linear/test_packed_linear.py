"""The packed linear layer agrees with its definition, with the dot product instruction and without."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from irkit_kernels._jit import Target, compiling_for, cpu_features
from irkit_kernels.packed_linear import (
    ACTIVATIONS,
    Kind,
    PackedLinear,
    has_fast,
    pack_weight,
    packed_linear,
)
from irkit_kernels.packed_linear import cpu_kernel as cpu
from irkit_kernels.packed_linear.reference import (
    bfloat16_reference,
    int8_reference,
    quantize_rows,
    quantize_weight,
)

ULP = 2.0**-24  # half the distance of float32 numbers around 1

sizes = st.tuples(st.integers(0, 20), st.integers(1, 150), st.integers(1, 150), st.integers(0, 2**31))


@pytest.fixture(params=["native", "portable"], scope="module", autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "native" and not has_fast("int8"):
        pytest.skip("this CPU lacks AVX512-VNNI")
    # Compiled for this CPU, the code could still have its instructions.
    x86 = "avx2" in cpu_features()
    portable = Target(frozenset({"avx2"}), "haswell") if x86 else Target(cpu_features())
    with compiling_for(None if request.param == "native" else portable):
        yield request.param


def packed(linear: nn.Linear, kind: Kind, **options: Any) -> PackedLinear:
    return PackedLinear(linear, kind=kind, **options)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(0, 255))
def test_sums_are_exact(size, zero):
    m, k, n, seed = size
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (m, k + 2), generator=generator)
    x[:, -2:] = torch.tensor([0, 255])  # a span of 255 makes the scale 1 and the zero point `zero`
    weight = torch.randint(-127, 128, (n, k + 2), generator=generator)
    weight[:, 0] = 127
    packed = pack_weight(weight.float())
    y = packed_linear((x - zero).float(), packed, n)
    assert torch.equal(y.long(), (x - zero) @ weight.T)

    ties = (x - zero + 0.5).float().clamp(max=255 - zero)
    ties[:, -2:] = torch.tensor([0.0, 255.0]) - zero
    expected = int8_reference(ties, *quantize_weight(weight.float()))
    assert torch.equal(packed_linear(ties, packed, n).double(), expected)


@settings(max_examples=60, deadline=None)
@given(sizes, st.booleans(), st.floats(-20, 20))
def test_against_the_definition(size, with_bias, magnitude):
    m, k, n, seed = size
    x = random(m, k, seed=seed) * 10.0 ** (magnitude + random(m, 1, seed=seed + 1))
    x[::5] = 0
    weight, bias = random(n, k, seed=seed + 2), random(n, seed=seed + 3) if with_bias else None
    q, scale = quantize_weight(weight)
    expected = int8_reference(x, q, scale, bias)
    product = expected if bias is None else expected - bias
    packed = pack_weight(weight, bias)
    y = packed_linear(x, packed, n)
    # one rounding each of the sum, the product of the scales, and multiply-add
    assert ((y - expected).abs() <= 3 * ULP * product.abs() + ULP * expected.abs() + 1e-37).all()

    curved = packed_linear(x, packed, n, "gelu")
    assert ((curved - F.gelu(y.double())).abs() <= 3e-5 + 4e-7 * y.abs()).all()  # as documented


@settings(max_examples=40, deadline=None)
@given(sizes, st.booleans(), st.sampled_from(list(ACTIVATIONS)), st.floats(-3, 3))
@example((1, 1, 1, 2), False, "gelu", 1.0)  # GELU of a number so low that it is almost 0
def test_gates_against_the_definition(size, with_bias, activation, magnitude):
    m, k, n, seed = size
    x = random(m, k, seed=seed) * 10.0**magnitude
    weight, bias = random(2 * n, k, seed=seed + 2), random(2 * n, seed=seed + 3) if with_bias else None
    y = packed_linear(x, pack_weight(weight, bias, gated=True), n, activation, gated=True)
    active, gate = packed_linear(x, pack_weight(weight, bias), 2 * n).double().chunk(2, 1)
    error = 3e-5 + 1e-6 * active.abs()
    assert ((y - ACTIVATIONS[activation](active) * gate).abs() <= error * gate.abs() + 1e-30).all()
    expected = int8_reference(x, *quantize_weight(weight), bias, activation, gated=True)
    # an activation may be off by 3e-5 where it is almost 0, so the gates set the scale as well
    scale = torch.maximum(expected.abs(), gate.abs()).amax() if y.numel() else 0
    assert ((y - expected).abs() <= 1e-4 * scale + 1e-30).all()


@settings(max_examples=30, deadline=None)
@given(sizes)
def test_rounding_error_is_bounded(size):
    m, k, n, seed = size
    x, weight = random(m, k, seed=seed) ** 3, random(n, k, seed=seed + 1)
    _, x_step, _ = quantize_rows(x)  # a number is off by up to 1 step: its own rounding and the zero point's
    _, w_step = quantize_weight(weight)
    x_error, w_error = x_step.double()[:, None].expand(m, k), w_step.double()[:, None].expand(n, k) / 2
    bound = x.double().abs() @ w_error.T + x_error @ (weight.double().abs() + w_error).T
    error = (packed_linear(x, pack_weight(weight), n) - x.double() @ weight.double().T).abs()
    assert (error <= bound * (1 + 1e-5)).all()


@settings(max_examples=60, deadline=None)
@given(sizes, st.booleans(), st.sampled_from(list(ACTIVATIONS)), st.booleans(), st.floats(-8, 8))
def test_bfloat16_against_the_definition(size, with_bias, activation, gated, magnitude):
    m, k, n, seed = size
    rows = 2 * n if gated else n
    x = random(m, k, seed=seed) * 10.0**magnitude
    weight, bias = random(rows, k, seed=seed + 2), random(rows, seed=seed + 3) if with_bias else None
    packed = pack_weight(weight, bias, gated, "bfloat16")
    y = packed_linear(x, packed, n, activation, gated)
    expected = bfloat16_reference(x, weight, bias, activation, gated)
    # sums in float32: an error for each product and sum, relative to the sum of their absolute values
    size_of = x.bfloat16().double().abs() @ weight.bfloat16().double().abs().T + 1
    error = (k + 2) * 2 * ULP * size_of
    if gated:
        parts, errors = bfloat16_reference(x, weight, bias).abs().chunk(2, 1), error.chunk(2, 1)
        error = (errors[0] + 1e-4) * (parts[1] + errors[1]) + errors[1] * (parts[0] + 1)
    assert ((y - expected).abs() <= 2 * error + 1e-4 + 1e-6 * expected.abs()).all()


@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
def test_bfloat16_goes_in_and_comes_out(kind):
    x, layer = random(53, 77, seed=0).bfloat16(), nn.Linear(77, 128)
    with torch.no_grad():
        whole, half = (packed(layer, kind, writes_half=half)(x) for half in (False, True))
        assert (whole.dtype, half.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(half, whole.bfloat16())
        assert torch.equal(whole, packed(layer, kind)(x.float()))
        assert packed(layer, kind, writes_half=True)(x[:0]).shape == (0, 128)


def test_gelu_on_a_dense_grid():
    x = torch.linspace(-12, 12, 96001)
    packed = pack_weight(torch.zeros(len(x), 1), x)  # the bias alone, which is exact
    y = packed_linear(torch.zeros(1, 1), packed, len(x), "gelu")[0]
    assert (y - F.gelu(x.double())).abs().max() < 3e-5


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_activations_on_a_dense_grid(activation):
    x = torch.cat([torch.linspace(-12, 12, 96001), torch.tensor([-1e38, -1e4, -88, -87, 87, 88, 1e4, 1e38])])
    packed = pack_weight(torch.zeros(len(x), 1), x)
    y = packed_linear(torch.zeros(1, 1), packed, len(x), activation)[0]
    expected = ACTIVATIONS[activation](x.double())
    assert ((y - expected).abs() <= 2e-6 * (1 + expected.abs())).all()


@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
def test_rows_do_not_depend_on_each_other(kind):
    x, packed = random(101, 77, seed=0), pack_weight(random(70, 77, seed=1), random(70, seed=2), kind=kind)
    together = packed_linear(x, packed, 70, "gelu")
    alone = torch.cat([packed_linear(row[None], packed, 70, "gelu") for row in x])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 17, 64, 98])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_not_a_number_stays_in_its_row(bad, column, activation):
    x, weight = random(9, 99, seed=0), random(3, 99, seed=1)
    packed = pack_weight(weight)
    clean = packed_linear(x, packed, 3, activation)
    x[4, column] = bad
    y = packed_linear(x, packed, 3, activation)
    assert y[4].isnan().all()
    assert torch.equal(y[[0, 1, 2, 3, 5, 6, 7, 8]], clean[[0, 1, 2, 3, 5, 6, 7, 8]])
    assert int8_reference(x, *quantize_weight(weight), None, activation)[4].isnan().all()


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1])
def test_every_nan_stays_one_in_bfloat16(bits):
    x, packed = random(9, 99, seed=0), pack_weight(random(3, 99, seed=1), kind="bfloat16")
    clean = packed_linear(x, packed, 3)
    x.view(torch.int32)[4, 17] = bits
    y = packed_linear(x, packed, 3)
    assert y[4].isnan().all()
    assert torch.equal(y[[0, 1, 2, 3, 5, 6, 7, 8]], clean[[0, 1, 2, 3, 5, 6, 7, 8]])


def test_extremes():
    weight = torch.ones(2, 3)
    packed = pack_weight(weight, torch.tensor([1.0, 2.0]))
    x = torch.tensor(
        [[3e38, -3e38, 0], [1e38, -1e38, 1e38], [1e-31, -1e-32, 0], [1e-45, 0, 0], [-5, -5, -5], [7, 7, 7]]
    )
    y = packed_linear(x, packed, 2)
    assert y[0].isnan().all()  # a span above the largest float32
    assert y[1].tolist() == pytest.approx([1e38, 1e38], abs=3 * 2e38 / 255)  # three numbers, a step each
    assert y[2:4].tolist() == [[1, 2], [1, 2]]
    assert y[4].tolist() == pytest.approx([-14, -13])
    assert y[5].tolist() == pytest.approx([22, 23])


@pytest.mark.parametrize("sign", [1, -1])
def test_largest_sums_fit(sign):
    packed = pack_weight(torch.full((2, cpu.MAX_K), 1.0))
    x = torch.full((1, cpu.MAX_K), 255.0 * sign)
    assert packed_linear(x, packed, 2).tolist() == [pytest.approx([255.0 * cpu.MAX_K * sign] * 2, rel=1e-6)]


def test_threads_and_forks_change_nothing(path):
    if path == "portable":
        pytest.skip("slow, and shares rows in the same way")
    x, packed = random(601, 250, seed=0), pack_weight(random(900, 250, seed=1))
    assert x.numel() * 900 >= 4 * cpu._MIN_WORK
    expected, threads = packed_linear(x, packed, 900), torch.get_num_threads()
    try:
        for count in (2, 3, 4):
            torch.set_num_threads(count)
            assert torch.equal(packed_linear(x, packed, 900), expected)
        child = multiprocessing.get_context("fork").Process(target=_compare, args=(x, packed, expected))
        child.start()
        child.join(60)
        child.kill()
        assert child.exitcode == 0
    finally:
        torch.set_num_threads(threads)
    with ThreadPoolExecutor(4) as pool:
        for y in pool.map(lambda _: packed_linear(x, packed, 900), range(16)):
            assert torch.equal(y, expected)


def _compare(x: Tensor, packed: Tensor, expected: Tensor) -> None:  # torch.equal would hang in a fork
    if not np.array_equal(packed_linear(x, packed, 900).numpy(), expected.numpy()):
        raise SystemExit(1)


def test_any_leading_shape_and_stride():
    x, packed = random(5, 4, 30, seed=0), pack_weight(random(10, 30, seed=1))
    y = packed_linear(x, packed, 10)
    assert torch.equal(y.flatten(0, 1), packed_linear(x.flatten(0, 1), packed, 10))
    assert torch.equal(y.transpose(0, 1), packed_linear(x.transpose(0, 1), packed, 10))
    assert torch.equal(y[2, 3], packed_linear(x[2, 3], packed, 10))
    assert packed_linear(x[:0], packed, 10).shape == (0, 4, 10)


def test_opcheck_and_compile():
    x, packed = random(7, 30, seed=0), pack_weight(random(10, 30, seed=1))
    torch.library.opcheck(torch.ops.irkit.packed_linear.default, (x, packed, 10, "gelu"))
    halves = pack_weight(random(10, 30, seed=1), gated=True)
    torch.library.opcheck(torch.ops.irkit.packed_linear.default, (x, halves, 5, "silu", True))
    wide = pack_weight(random(64, 30, seed=1), kind="bfloat16")
    torch.library.opcheck(torch.ops.irkit.packed_linear.default, (x, wide, 64, "none", False, True))
    compiled = torch.compile(
        lambda x: packed_linear(x + 1, packed, 10), backend="aot_eager", fullgraph=True, dynamic=True
    )
    for rows in (7, 3):
        assert torch.equal(compiled(x[:rows]), packed_linear(x[:rows] + 1, packed, 10))


@pytest.mark.parametrize("bias", [True, False])
def test_module(bias):
    linear = nn.Linear(20, 6, bias=bias)
    layer = (
        PackedLinear(linear, activation="gelu").to(torch.bfloat16).to(torch.float32)
    )  # casts leave it alone
    x = random(3, 5, 20, seed=0)
    with torch.no_grad():
        assert torch.equal(
            layer(x), packed_linear(x, pack_weight(linear.weight, linear.bias), 6, activation="gelu")
        )
        assert torch.allclose(layer(x), F.gelu(linear(x)), atol=0.05)
    assert "20, 6, activation='gelu'" in str(layer)


def test_errors():
    x, packed = torch.randn(2, 8), pack_weight(torch.randn(5, 8))
    with pytest.raises(TypeError, match=r"float64.*expected float32 or bfloat16"):
        packed_linear(x.double(), packed, 5)
    with pytest.raises(TypeError, match=r"packed torch\.float32"):
        packed_linear(x, x, 5)
    with pytest.raises(ValueError, match="do not fit"):
        packed_linear(torch.randn(2, 9), packed, 5)
    with pytest.raises(ValueError, match="do not fit"):
        packed_linear(x, packed, 65)
    with pytest.raises(ValueError, match="do not fit"):
        packed_linear(torch.tensor(1.0), packed, 5)
    with pytest.raises(ValueError, match="runs on the CPU, got x on meta"):
        packed_linear(x.to("meta"), packed, 5)
    with pytest.raises(ValueError, match="'tanh' is unknown"):
        packed_linear(x, packed, 5, "tanh")
    with pytest.raises(ValueError, match="got 5 features, expected an even number"):
        pack_weight(torch.randn(5, 8), gated=True)
    for gated, n in ((True, 5), (False, 5), (False, 10)):  # 1 panel of 64 features, or of 32 and their gates
        other = pack_weight(torch.randn(10, 8), gated=not gated)
        with pytest.raises(ValueError, match=f"out_features {n} and gated={gated} do not fit"):
            packed_linear(x, other, n, gated=gated)
    with pytest.raises(RuntimeError, match="no gradient"):
        packed_linear(x.requires_grad_(), packed, 5)
    for shape in [(8,), (0, 8), (5, 0), (1, cpu.MAX_K + 1)]:
        with pytest.raises(ValueError, match="got a weight of shape"):
            pack_weight(torch.zeros(shape))
    with pytest.raises(ValueError, match="got a bias of shape"):
        pack_weight(torch.zeros(5, 8), torch.zeros(8))
    with pytest.raises(ValueError, match="NaN or infinity"):
        pack_weight(torch.full((5, 8), math.nan))
    with pytest.raises(ValueError, match="kind 'int4' is unknown"):
        pack_weight(torch.randn(5, 8), kind="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="half=True and out_features 5, expected a multiple of 64"):
        packed_linear(x.detach(), packed, 5, half=True)
