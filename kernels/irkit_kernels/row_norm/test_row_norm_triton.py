"""The Triton kernel normalises as the definition does, on CUDA, or interpreted with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit_kernels._testing import DEVICE, TRITON_DTYPES, compiles, needs_no_gpu, on_device, poison
from irkit_kernels.row_norm.reference import row_norm_reference

ROUNDING = {torch.float32: 2**-19, torch.float16: 2**-9, torch.bfloat16: 2**-6}
pytest.importorskip("triton")
_poison = poison  # a fixture of this module


@on_device
@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([0, 1, 7, 40]),
    st.integers(1, 3),
    st.sampled_from([1, 5, 64, 130, 768]),
    st.booleans(),
    st.sampled_from(["alone", "replaced", "kept"]),
    st.sampled_from(TRITON_DTYPES),
    st.integers(0, 2**31),
)
def test_norms_are_the_definition(n, heads, width, rms, added, dtype, seed):
    from irkit_kernels.row_norm.triton_kernel import normalize

    generator = torch.Generator().manual_seed(seed)
    wide = 3 + torch.randn(n, heads * width + 24, generator=generator)
    x = wide.to(DEVICE, dtype)[:, 16 : 16 + heads * width].unflatten(1, (heads, width))  # with gaps
    weight, bias, fresh = (
        torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in (width, width, x.shape)
    )
    x = x if added == "alone" else x.contiguous()
    total = x if added == "alone" else x + fresh
    kinds = {"eps": 1e-3, "rms": rms, "offset": float(seed % 2)}
    parts = weight if seed % 3 else None, bias if seed % 5 else None
    exact = row_norm_reference(total, *parts, **kinds)
    sums = fresh.clone()
    out = sums if added == "replaced" else x.new_empty(x.shape)
    normalize(x, *parts, None if added == "alone" else sums, out, **kinds)
    scale = exact.abs().amax(-1, keepdim=True).clamp(min=1)
    assert ((out.double() - exact).abs() <= ROUNDING[dtype] * scale).all()
    assert torch.equal(sums, {"alone": fresh, "replaced": out, "kept": total}[added])


@needs_no_gpu
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("width", [64, 768, 16384])
def test_compiles_for_gpus(capability, dtype, width):
    from irkit_kernels.row_norm import triton_kernel

    arguments = dict.fromkeys(("x", "weight", "bias", "added", "out"), f"*{dtype}")
    arguments |= dict.fromkeys(("rows", "heads", "stride"), "i32") | {"eps": "fp32", "offset": "fp32"}
    arguments |= dict.fromkeys(("WITH_WEIGHT", "WITH_BIAS", "WITH_ADDED", "KEEP_SUM"), True)
    block = max(64, 1 << (width - 1).bit_length())
    arguments |= {"D": width, "RMS": False, "BLOCK_R": max(1, 4096 // block), "BLOCK_D": block}
    assert compiles(triton_kernel.normalize_rows, arguments | {"num_warps": 8}, capability)
