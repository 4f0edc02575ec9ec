"""Norms of rows agree with their definition, alone and after a sum, at any width and stride."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from irkit_kernels._threads import forced_threads
from irkit_kernels.row_norm import fits_row_norm, row_norm
from irkit_kernels.row_norm.reference import row_norm_reference

shapes = st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(1, 200), st.integers(0, 2**31))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(found: Tensor, expected: Tensor) -> bool:
    """Compare at 1e-5 of the largest number of each row."""
    scale = expected.abs().amax(-1, keepdim=True).clamp(min=1)
    return bool(((found - expected).abs() <= 1e-5 * scale).all())


@settings(max_examples=80, deadline=None)
@given(shapes, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0.0, 1.0]), st.integers(-4, 4))
def test_against_the_definition(shape, rms, with_weight, with_bias, offset, magnitude):
    n, heads, width, seed = shape
    wide = (random(n, heads * width + 7, seed=seed) + 3) * 10.0**magnitude
    x = wide[:, 3 : 3 + heads * width].unflatten(1, (heads, width))  # rows with gaps between them
    weight = random(width, seed=seed + 1) if with_weight else None
    bias = random(width, seed=seed + 2) if with_bias else None
    kinds = {"eps": 1e-3 * 100.0**magnitude, "rms": rms, "offset": offset}
    found = row_norm(x, weight, bias, **kinds)
    assert found.is_contiguous()
    assert near(found, row_norm_reference(x, weight, bias, **kinds))
    with forced_threads(3):
        assert torch.equal(row_norm(x, weight, bias, **kinds), found)


@settings(max_examples=60, deadline=None)
@given(shapes, st.booleans(), st.booleans())
def test_sums(shape, rms, keep_sum):
    n, _, width, seed = shape
    x, added, weight = (
        random(*sizes, seed=seed + i) for i, sizes in enumerate([(n, width)] * 2 + [(width,)])
    )
    fresh, kinds = added.clone(), {"eps": 1e-3, "rms": rms}
    found = row_norm(x, weight, added=fresh, keep_sum=keep_sum, **kinds)
    assert near(found, row_norm_reference(x + added, weight, **kinds))
    assert torch.equal(fresh, x + added if keep_sum else found)
    assert (found is fresh) is not keep_sum


@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_a_number_stays_in_its_row(rms, bad):
    x = random(4, 70, seed=0)
    clean = row_norm(x, eps=1e-6, rms=rms)
    x[2, 65] = bad
    found = row_norm(x, eps=1e-6, rms=rms)
    assert found[2].isnan().any()
    assert torch.equal(found[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("rms", [True, False])
def test_rows_of_one_number(rms):
    assert row_norm(torch.zeros(2, 40), eps=1e-6, rms=rms).eq(0).all()
    expected = 1.0 if rms else 0.0
    assert (
        row_norm(torch.full((2, 40), 5.0), eps=0.0 if rms else 1e-6, rms=rms).sub(expected).abs().max() < 1e-6
    )


def test_errors():
    x, weight = torch.randn(2, 8), torch.randn(8)
    with pytest.raises(TypeError, match=r"float32, torch\.float64; expected float32"):
        row_norm(x, weight.double(), eps=1e-6)
    with pytest.raises(ValueError, match="one CPU or CUDA device"):
        row_norm(x, weight.to("meta"), eps=1e-6)
    for wrong in (x.T, torch.randn(8), torch.randn(2, 0), torch.randn(2, 3, 8)[:, ::2]):
        assert not fits_row_norm(wrong)
        with pytest.raises(ValueError, match=r"expected \(n, d\) or \(n, heads, d\)"):
            row_norm(wrong, eps=1e-6)
    for wrong in (torch.randn(7), torch.randn(16)[::2]):
        with pytest.raises(ValueError, match=r"have shape \(8,\)"):
            row_norm(x, wrong, eps=1e-6)
    with pytest.raises(ValueError, match="of the same shape"):
        row_norm(x, eps=1e-6, added=torch.randn(3, 8))
    with pytest.raises(ValueError, match="of the same shape"):
        row_norm(torch.randn(2, 16)[:, :8], eps=1e-6, added=x)
    with pytest.raises(ValueError, match="keep_sum needs added"):
        row_norm(x, eps=1e-6, keep_sum=True)
    with pytest.raises(RuntimeError, match="no gradient"):
        row_norm(x.requires_grad_(), eps=1e-6)
