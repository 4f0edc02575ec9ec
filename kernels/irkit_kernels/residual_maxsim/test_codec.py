"""The codec against its definition, with the dot product instruction and without."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit_kernels.residual_maxsim import (
    Tokens,
    assign,
    cpu_build,
    cpu_kernel,
    decode,
    encode,
    reference,
    train_codebook,
)

NBITS = st.sampled_from([1, 2, 4, 8])
seeds = st.integers(0, 2**31)
dims = st.sampled_from([1, 6, 16, 24, 100, 128, 200])  # a dim is a compilation


@pytest.fixture(params=["vnni", "portable"], scope="module", autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "vnni" and not cpu_kernel.has_vnni():
        pytest.skip("this CPU lacks AVX512-VNNI")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_build, "has_vnni", lambda: request.param == "vnni")
        yield request.param


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 120), st.one_of(st.integers(1, 70), st.sampled_from([128, 200])), dims, seeds)
def test_assign(n, k, dim, seed):
    rng = np.random.default_rng(seed)
    values, centroids = (rng.standard_normal((rows, dim)).astype(np.float32) for rows in (n, k))
    values *= 10 ** rng.uniform(-3, 3, (n, 1)).astype(np.float32)
    got = assign(values, centroids)
    assert got.dtype == np.int32
    assert got.shape == (n,)
    scores = values.astype(np.float64) @ centroids.astype(np.float64).T
    chosen = np.take_along_axis(scores, got[:, None].astype(np.int64), 1)[:, 0]
    v, c = np.abs(values).astype(np.float64), np.abs(centroids).astype(np.float64)
    step, c_step = v.max(1) / 254, c.max() / 254
    bound = v.sum(1) * c_step + step * (c.sum(1).max() + dim * c_step)  # of the rounding of one product
    assert (chosen >= scores.max(1, initial=-np.inf) - 2 * bound * (1 + 1e-5)).all()


def test_assign_takes_the_nearest_of_what_differs_little():
    rng = np.random.default_rng(0)
    centroids = rng.standard_normal((1000, 128)).astype(np.float32)
    centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
    noise = 0.12 * rng.standard_normal((5000, 128)).astype(np.float32)
    values = centroids[rng.integers(0, 1000, 5000)] + noise
    assert (assign(values, centroids) == (values @ centroids.T).argmax(1)).mean() > 0.995


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, 3e38, 1e-40])
def test_assign_of_odd_numbers_is_some_centroid(bad):
    centroids = np.random.default_rng(0).standard_normal((70, 20)).astype(np.float32)
    values = np.full((7, 20), bad, np.float32)
    values[1:3, :10] = 1
    codes = assign(values, centroids)
    assert ((codes >= 0) & (codes < 70)).all()
    alone = assign(values[6:], centroids)
    assert codes[6] == alone[0]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 30), dims, NBITS, seeds)
def test_encode(n, dim, nbits, seed):
    rng = np.random.default_rng(seed)
    centroids, values = (rng.standard_normal((rows, dim)).astype(np.float32) for rows in (7, n))
    codes = rng.integers(0, 7, n).astype(np.uint16)
    values[::3] += centroids[codes[::3]]
    codebook = train_codebook(rng.standard_normal((30, dim)).astype(np.float32), nbits)
    got = encode(values, centroids, codes, codebook)
    expected = reference.encode_reference(values, centroids, codes, codebook)
    assert got.codes is codes
    assert got.packed.shape == (n, reference.packed_width(dim, nbits))
    decoded = decode(got, centroids, codebook)
    x, c = values.astype(np.float64), centroids[codes].astype(np.float64)
    errors = [
        np.linalg.norm(x - reference.decode_reference(t, centroids, codebook), axis=1)
        for t in (got, expected)
    ]
    # levels that lie between two may be rounded either way, which changes the error by little; float16
    # coefficients and float32 sums round
    assert (errors[0] <= 1.05 * errors[1] + 2e-3 * np.linalg.norm(x, axis=1)).all()
    exact = reference.decode_reference(got, centroids, codebook)
    size = np.abs(got.coefficients.astype(np.float64)) @ [[1], [128]] * max(1, np.abs(c).max(initial=0))
    assert (np.abs(decoded - exact) <= size * 2**-22).all()


@pytest.mark.parametrize("nbits", [1, 2, 4])
def test_encode_finds_what_can_be_expressed(nbits):
    rng, count = np.random.default_rng(nbits), 2**nbits
    # levels evenly spread, of a root mean square of 32 where each occurs as often
    codebook = np.rint((2 * np.arange(count) - count + 1) * 32 / ((count**2 - 1) / 3) ** 0.5).astype(np.int8)
    levels = rng.permuted(np.tile(np.arange(count), (50, 64 // count)), axis=1)
    centroids = rng.standard_normal((3, 64)).astype(np.float32)
    centroids -= centroids.mean(1, keepdims=True)
    codes = rng.integers(0, 3, 50).astype(np.int32)
    values = (centroids[codes] + 0.01 * codebook[levels]).astype(np.float32)
    tokens = encode(values, centroids, codes, codebook)
    assert np.array_equal(reference.unpack_levels(tokens.packed, 64, nbits), levels)
    assert np.abs(tokens.coefficients - [1, 0.01]).max() <= 2**-11


def test_encode_of_nothing_and_of_the_centroid_itself():
    centroids = np.array([[1, 2, 3, 4], [0, 0, 0, 0]], np.float32)
    values = np.array([[0, 0, 0, 0], [1, 2, 3, 4], [2, 4, 6, 8], [0, 0, 0, 0], [5, 0, 0, 0]], np.float32)
    codes = np.array([0, 0, 0, 1, 1], np.uint16)
    for nbits in (1, 2, 4, 8):
        codebook = train_codebook(np.eye(4, dtype=np.float32), nbits)
        tokens = encode(values, centroids, codes, codebook)
        assert np.isfinite(tokens.coefficients).all()
        decoded = decode(tokens, centroids, codebook)
        assert decoded[:4] == pytest.approx(values[:4], abs=6 * 2**-11)  # of float16 coefficients
        assert decoded[4] == pytest.approx(values[4], abs=5 * 2**-5)  # one direction, well in reach of 1 bit


def test_coefficients_that_float16_cannot_hold_are_cut():
    centroids, values = np.full((1, 8), 1e-9, np.float32), np.ones((1, 8), np.float32)
    tokens = encode(values, centroids, np.zeros(1, np.uint16), np.array([-32, 32], np.int8))
    assert np.isfinite(tokens.coefficients).all()


def test_coefficients_of_every_finite_float16_are_read_exactly():
    a = np.arange(2**16, dtype=np.uint16).view(np.float16)
    a = a[np.isfinite(a)]
    tokens = Tokens(np.zeros(len(a), np.uint16), np.stack([a, a], 1), np.zeros((len(a), 4), np.uint8))
    zeros = decode(tokens, np.ones((1, 1), np.float32), np.array([-1, 1], np.int8))
    assert not zeros.any()  # a * 1 + a * -1
    twice = decode(tokens, np.ones((1, 1), np.float32), np.array([1, 2], np.int8))[:, 0]
    assert np.array_equal(twice, 2 * a.astype(np.float32))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.integers(1, 70), NBITS, seeds)
def test_levels_are_packed_in_planes(n, dim, nbits, seed):
    levels = np.random.default_rng(seed).integers(0, 2**nbits, (n, dim)).astype(np.uint8)
    packed = reference.pack_levels(levels, nbits)
    width = packed.shape[1]
    assert width % 4 == 0
    assert width * 8 < dim * nbits + 32
    assert np.array_equal(reference.unpack_levels(packed, dim, nbits), levels)
    for j in range(dim):
        plane, byte = divmod(j, width)
        assert ((packed[:, byte] >> (plane * nbits) & (2**nbits - 1)) == levels[:, j]).all()


@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["normal", "equal", "zeros", "two", "outliers"])
def test_codebook(nbits, kind):
    rng = np.random.default_rng(0)
    residuals = {
        "normal": rng.standard_normal((300, 20)),
        "equal": np.ones((5, 3)),
        "zeros": np.zeros((4, 3)),
        "two": np.array([[1.0, -1.0]]),
        "outliers": rng.standard_cauchy((300, 20)),
    }[kind].astype(np.float32)
    codebook = train_codebook(residuals, nbits)
    assert codebook.dtype == np.int8
    assert len(codebook) == 2**nbits
    assert (np.diff(codebook.astype(int)) > 0).all()
    if nbits == 8:
        assert codebook.tolist() == list(range(-128, 128))
    if kind == "two":
        assert {-32, 32} <= set(codebook.tolist())


def test_codebook_of_one_bit_is_the_best_of_all():
    residuals = np.random.default_rng(1).standard_gamma(2, (200, 30)).astype(np.float32)
    values = np.sort(reference.steps_of(residuals).ravel().astype(np.float64))
    errors = [values[:i].var() * i + values[i:].var() * (len(values) - i) for i in range(1, len(values))]
    codebook = train_codebook(residuals, 1)
    error = np.square(values[:, None] - codebook).min(1).sum()
    assert error <= min(errors) + len(values) / 4  # the means are rounded to integers
    best = 1 + int(np.argmin(errors))
    assert codebook.tolist() == [round(values[:best].mean()), round(values[best:].mean())]


def test_lloyd_max_levels_of_normal_numbers():
    codebook = train_codebook(np.random.default_rng(0).standard_normal((1000, 500)).astype(np.float32), 2)
    # Max 1960 (Quantizing for minimum distortion), table I, 4 levels; cuts and levels are whole steps here
    assert codebook / 32 == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=1 / 32)


def test_threads_change_nothing():
    rng = np.random.default_rng(0)
    centroids, values = (rng.standard_normal((n, 96)).astype(np.float32) for n in (300, 12_000))
    codebook = train_codebook(values, 4)
    codes = assign(values, centroids)
    tokens = encode(values, centroids, codes, codebook)
    decoded = decode(tokens, centroids, codebook)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert np.array_equal(assign(values, centroids), codes)
            again = encode(values, centroids, codes, codebook)
            assert all(np.array_equal(x, y) for x, y in zip(again, tokens, strict=True))
            assert np.array_equal(decode(tokens, centroids, codebook), decoded)
    finally:
        torch.set_num_threads(threads)
