"""Gated products are the definition, on CUDA or interpreted with TRITON_INTERPRET=1; bad input is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit_kernels._testing import DEVICE, TRITON_DTYPES, compiles, needs_no_gpu, on_device, poison
from irkit_kernels.gated_product import gated_product
from irkit_kernels.gated_product.reference import ACTIVATIONS, gated_product_reference

ROUNDING = {torch.float32: 2**-20, torch.float16: 2**-10, torch.bfloat16: 2**-7}
pytest.importorskip("triton")
_poison = poison  # a fixture of this module


@on_device
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter: the logistic of -100
@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from([0, 1, 7]),
    st.sampled_from([1, 5, 64, 1152]),
    st.sampled_from([*ACTIVATIONS]),
    st.booleans(),
    st.sampled_from(TRITON_DTYPES),
    st.integers(0, 2**31),
)
def test_products_are_the_definition(n, d, activation, gate_last, dtype, seed):
    from irkit_kernels.gated_product.triton_kernel import multiply

    generator = torch.Generator().manual_seed(seed)
    x = (3 * torch.randn(n, 2 * d, generator=generator)).to(DEVICE, dtype)
    out = x.new_empty(n, d)
    multiply(x, out, activation, gate_last)
    exact = gated_product_reference(x.double(), activation, gate_last)
    assert ((out.double() - exact).abs() <= ROUNDING[dtype] * exact.abs().clamp(min=1)).all()


def test_errors():
    with pytest.raises(ValueError, match=r"float32 \(2, 8\) with strides \(8, 1\) on cpu and .* 'gelu'"):
        gated_product(torch.randn(2, 8), "gelu")
    with pytest.raises(RuntimeError, match="has no gradient"):
        gated_product(torch.randn(2, 8, requires_grad=True), "gelu")


@needs_no_gpu
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_compiles_for_gpus(capability, activation):
    from irkit_kernels.gated_product import triton_kernel

    arguments = {"x": "*bf16", "out": "*bf16", "D": 1152, "BLOCK": 1024}
    arguments |= {"ACTIVATION": activation, "GATE_LAST": activation == "silu"}
    assert compiles(triton_kernel.gate, arguments, capability)
