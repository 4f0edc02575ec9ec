"""Building with torch tensors agrees with the definitions, also on the simulated CUDA device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit_kernels._recording import recording
from irkit_kernels.residual_maxsim import (
    reference,
    tensor_assign,
    tensor_build,
    tensor_encode,
    train_codebook,
)
from irkit_kernels.residual_maxsim.tensor_build import Blocks

NBITS = st.sampled_from([1, 2, 4, 8])
seeds = st.integers(0, 2**31)
dims = st.sampled_from([1, 6, 16, 24, 100])


def problem(n: int, k: int, dim: int, nbits: int, seed: int) -> tuple[np.ndarray, ...]:
    """Draw vectors of any norm, some of them zeros or the centroid itself, and a codebook for them."""
    rng = np.random.default_rng(seed)
    values, centroids = (rng.standard_normal((rows, dim)).astype(np.float32) for rows in (n, k))
    centroids[0] *= rng.integers(0, 2)
    values *= 10 ** rng.uniform(-3, 3, (n, 1)).astype(np.float32)
    codes = rng.integers(0, k, n).astype(np.uint16)
    values[::5] = centroids[codes[::5]] * rng.integers(-1, 2, (len(values[::5]), 1))
    codebook = train_codebook(rng.standard_normal((30, dim)).astype(np.float32), nbits)
    return values, centroids, codes, codebook


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 50), st.integers(1, 70), dims, seeds, st.sampled_from([1, 100, 10**9]))
def test_the_nearest_centroid_is_found_block_by_block(n, k, dim, seed, products):
    values, centroids, *_ = problem(n, k, dim, 8, seed)
    blocks = Blocks(products=products)
    got = tensor_assign(torch.from_numpy(values), torch.from_numpy(centroids), blocks=blocks).numpy()
    assert got.shape == (n,)
    scores = values.astype(np.float64) @ centroids.astype(np.float64).T
    rounding = 1e-6 * (np.abs(values) @ np.abs(centroids).T).max(1, initial=0)  # float32
    assert (np.take_along_axis(scores, got[:, None], 1)[:, 0] >= scores.max(1) - rounding).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), dims, NBITS, seeds, st.sampled_from([7, 10**9]))
def test_levels_and_coefficients_are_those_of_the_definition(n, dim, nbits, seed, rows):
    parts = problem(n, 5, dim, nbits, seed)
    got = tensor_encode(*map(torch.from_numpy, parts), blocks=Blocks(rows=rows))
    expected = reference.encode_reference(*parts)
    np.testing.assert_array_equal(got.codes, parts[2])
    assert got.packed.shape == expected.packed.shape
    values, centroids, _, codebook = parts
    errors = [
        np.linalg.norm(values - reference.decode_reference(tokens, centroids, codebook), axis=1)
        for tokens in (reference.Tokens(*(x.numpy() for x in got)), expected)
    ]
    # Steps halfway between two integers may be rounded either way; this and float16 hardly change the error.
    assert (errors[0] <= 1.05 * errors[1] + 2e-3 * np.linalg.norm(values, axis=1)).all()


@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_of_equally_near_levels_the_first_is_taken(nbits):
    rng = np.random.default_rng(nbits)
    codebook = rng.integers(-3, 4, (2 ** (8 - nbits), 2**nbits)).astype(np.int8)  # many are equal
    steps = rng.integers(-4, 5, (40, 19))
    expected = reference.best_path(steps.astype(np.float64), codebook)
    got = tensor_build._best_path(torch.from_numpy(steps).float(), torch.from_numpy(codebook))
    np.testing.assert_array_equal(got, expected)


def test_a_device_is_not_waited_for():
    parts = problem(30, 5, 16, 4, 0)
    expected = tensor_encode(*map(torch.from_numpy, parts))
    with recording() as record:
        there = [torch.from_numpy(x).to(record.device) for x in parts]
        record.clear()
        codes, tokens = tensor_assign(*there[:2]), tensor_encode(*there)
        assert record.waits == []
        assert all(torch.equal(x.cpu(), y) for x, y in zip(tokens, expected, strict=True))
        assert torch.equal(codes.cpu(), tensor_assign(*map(torch.from_numpy, parts[:2])))


def test_errors():
    values, centroids = torch.ones(3, 4), torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"tensor_assign: expected float32 .* \(2, 3\) on cpu"):
        tensor_assign(values, centroids[:, :3])
    with pytest.raises(ValueError, match=r"tensor_encode: expected float32 .*float64 \(3, 4\)"):
        tensor_encode(values.double(), centroids, torch.zeros(3, dtype=torch.int32), torch.ones(1))
    with pytest.raises(ValueError, match=r"tensor_assign: .* \(0, 4\) on cpu"):
        tensor_assign(values, centroids[:0])
