"""Rotations agree with their definition, for any number of heads and stride."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit_kernels._threads import forced_threads
from irkit_kernels.rotary import fits_rotary, rotary
from irkit_kernels.rotary.reference import rotary_reference


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(1, 4), st.integers(1, 5), st.integers(0, 20), st.integers(0, 2**31))
def test_against_the_definition(n, heads, blocks, gap, seed):
    generator, width = torch.Generator().manual_seed(seed), 32 * blocks
    wide = torch.randn(n, heads * width + gap, generator=generator)
    x = wide[:, gap:].unflatten(1, (heads, width))
    cos, sin = (torch.randn(n, 1, width // 2, generator=generator) for _ in range(2))
    found = rotary(x, cos, sin)
    assert found.is_contiguous()
    torch.testing.assert_close(found, rotary_reference(x, cos, sin), rtol=1e-6, atol=1e-6)
    with forced_threads(3):
        assert torch.equal(rotary(x, cos, sin), found)


def test_a_quarter_turn_swaps_the_halves():
    x, quarter = torch.randn(3, 2, 64), torch.full((3, 1, 32), torch.pi / 2, dtype=torch.float64)
    found = rotary(x, quarter.cos().float(), quarter.sin().float())
    a, b = x.chunk(2, dim=-1)
    torch.testing.assert_close(found, torch.cat([-b, a], dim=-1), rtol=0, atol=1e-6)


def test_errors():
    x, angles = torch.randn(2, 3, 32), torch.randn(2, 1, 16)
    assert fits_rotary(x)
    for wrong in (
        torch.randn(2, 3, 40),
        torch.randn(2, 32),
        x.transpose(0, 1),
        torch.randn(2, 3, 64)[..., ::2],
    ):
        assert not fits_rotary(wrong)
        with pytest.raises(ValueError, match=r"expected \(n, heads, d\)"):
            rotary(wrong, angles, angles)
    with pytest.raises(TypeError, match=r"float32, torch\.float64 and"):
        rotary(x, angles.double(), angles)
    for wrong in (torch.randn(3, 1, 16), torch.randn(2, 1, 32)[..., ::2], angles.to("meta")):
        with pytest.raises(ValueError, match=r"have shape \(2, 1, 16\)"):
            rotary(x, wrong, angles)
    with pytest.raises(RuntimeError, match="no gradient"):
        rotary(x.requires_grad_(), angles, angles)
