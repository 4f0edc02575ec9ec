"""The Triton kernel rotates as the definition does, on CUDA, or interpreted with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit_kernels._testing import DEVICE, TRITON_DTYPES, compiles, needs_no_gpu, on_device, poison
from irkit_kernels.rotary.reference import rotary_reference

ROUNDING = {torch.float32: 2**-22, torch.float16: 2**-10, torch.bfloat16: 2**-7}
pytest.importorskip("triton")
_poison = poison  # a fixture of this module


@on_device
@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from([0, 1, 5, 70]),
    st.integers(1, 3),
    st.sampled_from([2, 10, 32, 64, 96]),
    st.booleans(),
    st.sampled_from(TRITON_DTYPES),
    st.integers(0, 2**31),
)
def test_rotations_are_the_definition(tokens, heads, width, interleaved, dtype, seed):
    from irkit_kernels.rotary.triton_kernel import rotate

    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(tokens, heads * width + 24, generator=generator).to(DEVICE, dtype)
    x = wide[:, 16 : 16 + heads * width].unflatten(1, (heads, width))  # tokens with gaps between them
    angles = 7 * torch.randn(tokens, 1, width // 2, generator=generator).to(DEVICE)
    out = x.new_empty(x.shape)
    rotate(x, angles.cos(), angles.sin(), out, interleaved)
    exact = rotary_reference(x.double(), angles.cos().double(), angles.sin().double(), interleaved)
    assert ((out.double() - exact).abs() <= ROUNDING[dtype] * exact.abs().clamp(min=1)).all()


@needs_no_gpu
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_compiles_for_gpus(capability, dtype):
    from irkit_kernels.rotary import triton_kernel

    arguments = {"x": f"*{dtype}", "out": f"*{dtype}", "cos": "*fp32", "sin": "*fp32"}
    arguments |= dict.fromkeys(("tokens", "stride", "heads"), "i32")
    arguments |= {"HALF": 32, "INTERLEAVED": dtype == "fp16", "BLOCK_T": 64, "BLOCK_P": 32}
    assert compiles(triton_kernel.rotate_heads, arguments, capability)
