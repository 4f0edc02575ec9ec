"""The codec agrees with its definition, with the dot product instruction and without."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit_kernels._testing import BYTE_CODE, byte_code
from irkit_kernels._threads import forced_threads
from irkit_kernels.residual_maxsim import (
    Tokens,
    assign,
    assign_near,
    decode,
    encode,
    reference,
    train_codebook,
)

NBITS = st.sampled_from([1, 2, 4, 8])
# dimensions and bits; few, because each is compiled
PLANS = ((1, 1), (6, 8), (16, 4), (24, 2), (100, 1), (128, 8), (200, 2), (1, 4), (6, 2), (128, 4))
seeds = st.integers(0, 2**31)
dims = st.sampled_from([1, 6, 16, 24, 100, 128, 200])  # few, because each is compiled


@pytest.fixture(params=[*BYTE_CODE], scope="module", autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with byte_code(request.param) as name:
        yield name


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
    bound = v.sum(1) * c_step + step * (c.sum(1).max() + dim * c_step)  # rounding of one product
    assert (chosen >= scores.max(1, initial=-np.inf) - 2 * bound * (1 + 1e-5)).all()


def test_assign_takes_the_nearest_of_what_differs_little():
    rng = np.random.default_rng(0)
    centroids = rng.standard_normal((1000, 128)).astype(np.float32)
    centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
    noise = 0.12 * rng.standard_normal((5000, 128)).astype(np.float32)
    values = centroids[rng.integers(0, 1000, 5000)] + noise
    assert (assign(values, centroids) == (values @ centroids.T).argmax(1)).mean() > 0.995


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 120), st.integers(1, 9), st.integers(1, 150), st.integers(1, 3), dims, seeds)
def test_assign_near_takes_the_nearest_of_those_near_the_hub(n, hubs, k, threads, dim, seed):
    rng = np.random.default_rng(seed)
    values, vectors, centroids = (
        rng.standard_normal((rows, dim)).astype(np.float32) for rows in (n, hubs, k)
    )
    near = np.stack([rng.permutation(k)[: 1 + k // 2] for _ in range(hubs)]).astype(np.int32)
    centroids *= np.abs(centroids).max() / np.abs(centroids).max(
        1, keepdims=True
    )  # one scale for any of them
    with forced_threads(threads):
        got = assign_near(values, centroids, vectors, near)
    assert (got.dtype, got.shape) == (np.int32, (n,))
    hub = assign(values, vectors)
    for number in range(hubs):
        rows = hub == number
        expected = near[number][assign(values[rows], centroids[near[number]])]
        np.testing.assert_array_equal(got[rows], expected)
    assert (assign_near(values[::-1], centroids, vectors, near) == got[::-1]).all()  # whatever is beside it


def test_assign_near_refuses_what_does_not_fit():
    values, near = np.zeros((3, 8), np.float32), np.zeros((2, 4), np.int32)
    with pytest.raises(ValueError, match=r"near is int64 \(2, 4\); expected int32 \(2, M\)"):
        assign_near(values, values, values[:2], near.astype(np.int64))
    with pytest.raises(ValueError, match=r"near is int32 \(2, 4\); expected int32 \(3, M\)"):
        assign_near(values, values, values, near)
    for number in (-1, 3):
        near[1, 2] = number
        with pytest.raises(ValueError, match="of 3 centroids"):
            assign_near(values, values, values[:2], near)
    with pytest.raises(ValueError, match="expected vectors of width 8"):
        assign_near(values[:, :4].copy(), values, values[:2], near)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, 3e38, 1e-40])
def test_assign_of_odd_numbers_is_some_centroid(bad):
    centroids = np.random.default_rng(0).standard_normal((70, 20)).astype(np.float32)
    values = np.full((7, 20), bad, np.float32)
    values[1:3, :10] = 1
    codes = assign(values, centroids)
    assert ((codes >= 0) & (codes < 70)).all()
    alone = assign(values[6:], centroids)
    assert codes[6] == alone[0]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 30), st.sampled_from(PLANS), seeds)
def test_encode(n, plan, seed):
    (dim, nbits), rng = plan, np.random.default_rng(seed)
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
    # Numbers halfway between two levels may be rounded either way, which hardly changes the error. float16
    # coefficients and float32 sums are rounded, too.
    assert (errors[0] <= 1.05 * errors[1] + 2e-3 * np.linalg.norm(x, axis=1)).all()
    exact = reference.decode_reference(got, centroids, codebook)
    size = np.abs(got.coefficients.astype(np.float64)) @ [[1], [128]] * max(1, np.abs(c).max(initial=0))
    assert (np.abs(decoded - exact) <= size * 2**-22).all()


@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_encode_finds_what_can_be_expressed(nbits):
    rng = np.random.default_rng(nbits)
    # evenly spread levels, with a root mean square of 32 if all are equally frequent
    levels = np.rint((2 * rng.permutation(256) - 255) * 32 / ((256**2 - 1) / 3) ** 0.5).astype(np.int8)
    codebook = np.arange(-128, 128, dtype=np.int8)[None] if nbits == 8 else levels.reshape(-1, 2**nbits)
    packed = rng.integers(0, 256, (20_000, reference.packed_width(64, nbits))).astype(np.uint8)
    u = codebook.ravel()[reference.windows(packed, 64, nbits)].astype(np.float64)
    size = np.sqrt(np.square(u).mean(1))
    u = u[np.abs(size - np.median(size)) < 0.05][:50]  # their steps are those of the codebook
    u *= 1 if nbits == 8 else 32 / np.sqrt(np.square(u).mean())
    assert len(u) == 50
    centroids = rng.standard_normal((50, 64))
    centroids -= (centroids * u).sum(1, keepdims=True) / np.square(u).sum(1, keepdims=True) * u
    centroids, codes = centroids.astype(np.float32), np.arange(50, dtype=np.int32)
    values = (rng.uniform(0.5, 2, (50, 1)) * centroids + 0.01 * u).astype(np.float32)
    decoded = decode(encode(values, centroids, codes, codebook), centroids, codebook)
    step = 0.01 * np.sqrt(np.square(u).mean(1)) / 32 if nbits == 8 else 0.01  # the step of 8 bits
    assert (np.abs(decoded - values).max(1) <= step + 2**-10 * np.abs(values).max(1)).all()


def test_what_a_vector_has_of_its_centroid_takes_no_bits():
    rng = np.random.default_rng(0)
    centroids, rest = (rng.standard_normal((400, 128)).astype(np.float32) for _ in range(2))
    rest -= (rest * centroids).sum(1, keepdims=True) / np.square(centroids).sum(1, keepdims=True) * centroids
    codes, codebook = np.arange(400, dtype=np.uint16), train_codebook(rest, 2)
    errors = []
    for share in (1, 0.2, -3):
        values = share * centroids + rest
        errors.append(
            np.square(values - decode(encode(values, centroids, codes, codebook), centroids, codebook)).mean()
        )
    assert errors == pytest.approx([errors[0]] * 3, rel=0.02)


def test_encode_of_nothing_and_of_the_centroid_itself():
    centroids = np.array([[1, 2, 3, 4], [0, 0, 0, 0]], np.float32)
    values = np.array([[0, 0, 0, 0], [1, 2, 3, 4], [2, 4, 6, 8], [0, 0, 0, 0], [5, 0, 0, 0]], np.float32)
    codes = np.array([0, 0, 0, 1, 1], np.uint16)
    for nbits in (1, 2, 4, 8):
        codebook = train_codebook(np.eye(4, dtype=np.float32), nbits)
        tokens = encode(values, centroids, codes, codebook)
        assert np.isfinite(tokens.coefficients).all()
        decoded = decode(tokens, centroids, codebook)
        assert decoded[:4] == pytest.approx(values[:4], abs=6 * 2**-11)  # float16 coefficients
        assert decoded[4] == pytest.approx(
            values[4], abs=5 * 2**-5
        )  # a single direction, which 1 bit can represent


def test_coefficients_that_float16_cannot_hold_are_cut():
    centroids, values = np.full((1, 8), 1e-9, np.float32), np.ones((1, 8), np.float32)
    codebook = np.tile(np.array([-32, 32], np.int8), (128, 1))
    tokens = encode(values, centroids, np.zeros(1, np.uint16), codebook)
    assert np.isfinite(tokens.coefficients).all()


def test_coefficients_of_every_finite_float16_are_read_exactly():
    a = np.arange(2**16, dtype=np.uint16).view(np.float16)
    a = a[np.isfinite(a)]
    tokens = Tokens(np.zeros(len(a), np.uint16), np.stack([a, a], 1), np.zeros((len(a), 4), np.uint8))
    zeros = decode(tokens, np.ones((1, 1), np.float32), np.full((128, 2), -1, np.int8))
    assert not zeros.any()  # a * 1 + a * -1
    twice = decode(tokens, np.ones((1, 1), np.float32), np.ones((128, 2), np.int8))[:, 0]
    assert np.array_equal(twice, 2 * a.astype(np.float32))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.integers(1, 70), NBITS, seeds)
def test_windows_are_the_last_eight_bits(n, dim, nbits, seed):
    width, planes = reference.packed_width(dim, nbits), 8 // nbits
    assert width % 4 == 0
    assert width * 8 < dim * nbits + 32
    packed = np.random.default_rng(seed).integers(0, 256, (n, width)).astype(np.uint8)
    got = reference.windows(packed, dim, nbits)
    assert got.shape == (n, dim)
    for row, token in enumerate(packed):
        bits = "0" * 8 + "".join(f"{byte:08b}" for byte in token)
        for j in range(dim):
            plane, byte = divmod(j, width)
            end = 8 + nbits * (byte * planes + plane + 1)
            assert got[row, j] == int(bits[end - 8 : end], 2)


@pytest.mark.parametrize("nbits", [1, 2, 4])
@pytest.mark.parametrize("dim", [16, 27])
def test_no_other_bytes_are_nearer(nbits, dim):
    rng = np.random.default_rng(nbits)
    codebook = rng.integers(-90, 90, 256).astype(np.int8).reshape(-1, 2**nbits)
    steps = np.rint(32 * rng.standard_normal((3, dim)))
    for row, packed in zip(steps, reference.best_path(steps, codebook), strict=True):
        others = np.tile(packed, (20_000, 1))
        for byte in range(len(packed)):  # change each byte alone, and many pairs of neighbours
            others[256 * byte : 256 * (byte + 1), byte] = np.arange(256)
        rest = np.arange(256 * len(packed), 20_000)
        for neighbour in (0, 1):
            others[rest, rest % (len(packed) - 1) + neighbour] = rng.integers(0, 256, len(rest))
        levels = codebook.ravel()[reference.windows(np.vstack([packed, others]), dim, nbits)].astype(float)
        errors = np.square(row - levels).sum(1)
        assert errors[0] == errors.min()


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
    assert codebook.shape == (2 ** (8 - nbits), 2**nbits)
    if nbits == 8:
        assert codebook.ravel().tolist() == list(range(-128, 128))
    assert np.array_equal(codebook, train_codebook(residuals, nbits))


@pytest.mark.parametrize(
    ("nbits", "lloyd_max", "bound"), [(1, 0.3634, 0.25), (2, 0.1175, 0.0625), (4, 0.009497, 2**-8)]
)
def test_error_of_normal_numbers(nbits, lloyd_max, bound):
    """Max 1960 (Quantizing for minimum distortion), table I, has the errors of separate levels per number."""
    rng, origin = np.random.default_rng(0), np.zeros((1, 128), np.float32)
    sample, values = (rng.standard_normal((n, 128)).astype(np.float32) for n in (2000, 500))
    codebook = train_codebook(sample, nbits)
    decoded = decode(encode(values, origin, np.zeros(500, np.uint16), codebook), origin, codebook)
    error = np.square(values - decoded).mean()
    assert bound < error < lloyd_max * {1: 0.82, 2: 0.68, 4: 0.66}[nbits]


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
