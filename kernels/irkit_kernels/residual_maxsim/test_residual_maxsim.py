"""The codec and the search against their definitions, with the dot product instruction and without."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit_kernels import _jit
from irkit_kernels.residual_maxsim import (
    Tokens,
    assign,
    cpu_build,
    cpu_kernel,
    decode,
    encode,
    interaction,
    pack_centroids,
    probe,
    query_table,
    reference,
    residual_maxsim,
    train_codebook,
)
from irkit_kernels.residual_maxsim.cpu_tile import Header

NBITS = st.sampled_from([1, 2, 4, 8])
seeds = st.integers(0, 2**31)
dims = st.sampled_from([1, 6, 16, 24, 100, 128, 200])  # a dim is a compilation
COMPILED = [cpu_kernel._table, cpu_kernel.probe, cpu_kernel.interaction]
COMPILED += [cpu_kernel.residual_maxsim, cpu_build._assign, cpu_build._encode, cpu_build._decode]


@pytest.fixture(params=["vnni", "portable"], scope="module", autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "vnni" and not cpu_kernel.has_vnni():
        pytest.skip("this CPU lacks AVX512-VNNI")
    with pytest.MonkeyPatch.context() as patch:
        for module in (cpu_kernel, cpu_build):
            patch.setattr(module, "has_vnni", lambda: request.param == "vnni")
        yield request.param


class Corpus(NamedTuple):
    query: np.ndarray
    centroids: np.ndarray
    values: np.ndarray
    offsets: np.ndarray
    tokens: Tokens
    codebook: np.ndarray
    list_offsets: np.ndarray
    list_documents: np.ndarray


def corpus(lengths: list[int], m: int, k: int, dim: int, nbits: int, seed: int, wide: bool) -> Corpus:
    rng = np.random.default_rng(seed)
    query, centroids, values = (
        (rng.standard_normal((n, dim)) * 10 ** rng.uniform(-1, 1, (n, 1))).astype(np.float32)
        for n in (m, k, sum(lengths))
    )
    codes = rng.integers(0, k, len(values)).astype(np.int32 if wide else np.uint16)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    codebook = train_codebook(rng.standard_normal((50, dim)).astype(np.float32), nbits)
    tokens = reference.encode_reference(values, centroids, codes, codebook)
    documents = np.repeat(np.arange(len(lengths)), lengths)
    order = np.unique(codes.astype(np.int64) * 2**32 + documents)
    starts = np.searchsorted(order >> 32, np.arange(k + 1)).astype(np.int64)
    return Corpus(query, centroids, values, offsets, tokens, codebook, starts, order.astype(np.int32))


corpora = st.builds(
    corpus,
    st.lists(st.one_of(st.sampled_from([0, 1, 4, 5]), st.integers(0, 30)), min_size=1, max_size=8),
    st.one_of(st.integers(1, 20), st.sampled_from([16, 17, 32, 33, 70])),
    st.one_of(st.integers(1, 40), st.sampled_from([64, 65, 100])),
    dims,
    NBITS,
    seeds,
    st.booleans(),
)


def tables(x: Corpus):
    """The fast table, and the same numbers as the definition lays them out."""
    table = query_table(x.query, pack_centroids(x.centroids))
    m, k = len(x.query), len(x.centroids)
    scale = table.header[:, Header.SCALE, None]
    flat = [
        part.swapaxes(0, 1).reshape(part.shape[1], -1)[:k, :m] for part in (table.scores * scale, table.bytes)
    ]
    return table, reference.CentroidTable(*flat)


@settings(max_examples=40, deadline=None)
@given(corpora)
def test_query_table(x):
    _, got = tables(x)
    expected = reference.centroid_table_reference(x.query, x.centroids)
    assert np.array_equal(got.scores, expected.scores)  # sums of integers, and two products
    lengths = [np.linalg.norm(v.astype(np.float64), axis=1).max() for v in (x.query, x.centroids)]
    steps = (got.scores.astype(np.float64) / (lengths[0] * lengths[1]) - reference.FLOOR) * 255
    exact = np.clip(steps / (reference.CEILING - reference.FLOOR), 0, 255)
    assert (np.abs(got.bytes - exact) <= 0.5 + 255 * 2**-20).all()  # half a step, and float32's own error
    # half a step of rounding on either side of each product
    q, c = (np.abs(v).astype(np.float64) for v in (x.query, x.centroids))
    q_step, c_step = q.max(1) / 254, c.max(1) / 254
    bound = c_step[:, None] * q.sum(1) + c.sum(1)[:, None] * q_step + c.shape[1] * np.outer(c_step, q_step)
    assert (np.abs(got.scores - x.centroids.astype(np.float64) @ x.query.T) <= bound * (1 + 1e-5)).all()


@settings(max_examples=40, deadline=None)
@given(corpora, st.integers(1, 130), seeds)
def test_probe(x, nprobe, seed):
    table, flat = tables(x)
    keep = np.random.default_rng(seed).random(len(x.offsets) - 1) < 0.8
    got = probe(table, nprobe, x.list_offsets, x.list_documents, keep)
    expected = reference.probe_reference(flat, nprobe, x.list_offsets, x.list_documents, keep)
    assert np.array_equal(got, expected)
    assert got.dtype == np.int32


def test_probe_of_zeros_finds_nothing():
    x = corpus([3, 4], 2, 5, 8, 4, 0, False)
    keep = np.ones(2, bool)
    zeros = query_table(np.zeros((3, 8), np.float32), pack_centroids(x.centroids))
    assert len(probe(zeros, 5, x.list_offsets, x.list_documents, keep)) == 0
    some = np.concatenate([x.query, np.zeros((1, 8), np.float32)])
    found = [
        probe(query_table(q, pack_centroids(x.centroids)), 1, x.list_offsets, x.list_documents, keep)
        for q in (x.query, some)
    ]
    assert np.array_equal(*found)


def test_damaged_lists_stay_within_their_memory():
    x = corpus([3, 4], 2, 5, 8, 4, 0, False)
    table, keep = tables(x)[0], np.ones(2, bool)
    listed = np.where(x.list_documents == 1, -(2**31), x.list_documents).astype(np.int32)
    offsets = x.list_offsets.copy()
    offsets[0], offsets[-1] = -(2**40), 2**40
    assert probe(table, 5, offsets, listed, keep).tolist() == [0, 1]
    assert len(probe(table, 5, x.list_offsets, x.list_documents, keep[:0])) == 0


@settings(max_examples=40, deadline=None)
@given(corpora, seeds)
def test_scores(x, seed):
    table, flat = tables(x)
    documents = len(x.offsets) - 1
    rows = np.random.default_rng(seed).integers(0, documents, 2 * documents).astype(np.int32)
    rough = interaction(table, x.tokens.codes, x.offsets, rows)
    assert np.array_equal(rough, reference.interaction_reference(flat, x.tokens.codes, x.offsets, rows))

    got = residual_maxsim(table, x.tokens, x.offsets, x.codebook, rows)
    expected = reference.residual_maxsim_reference(x.query, flat, x.tokens, x.offsets, x.codebook, rows)
    empty = np.diff(x.offsets)[rows] == 0
    assert np.array_equal(got == -np.inf, empty)
    assert np.array_equal(expected == -np.inf, empty)
    # the size of what is added up, and a rounding error for each operation that makes a score and the sum
    a, b = np.abs(x.tokens.coefficients.astype(np.float64)).T
    levels = np.abs(
        x.codebook.astype(np.float64)[reference.unpack_levels(x.tokens.packed, x.query.shape[1], nbits_of(x))]
    )
    size = a[:, None] * np.abs(flat.scores[x.tokens.codes]) + b[:, None] * (levels @ np.abs(x.query.T))
    bound = (len(x.query) + 8) * 2.0**-23 * size.max(0, initial=0).sum()
    assert (np.abs(got[~empty] - expected[~empty]) <= bound).all()


def nbits_of(x: Corpus) -> int:
    return len(x.codebook).bit_length() - 1


@settings(max_examples=20, deadline=None)
@given(corpora)
def test_scores_are_those_of_the_decoded_tokens(x):
    table, _ = tables(x)
    rows = np.arange(len(x.offsets) - 1, dtype=np.int32)
    decoded = decode(x.tokens, x.centroids, x.codebook).astype(np.float64)
    scores = residual_maxsim(table, x.tokens, x.offsets, x.codebook, rows)
    # half a step of the query's rounding for each number of both parts, half a step of the centroid's
    a, b = np.abs(x.tokens.coefficients.astype(np.float64)).T
    q, c = np.abs(x.query.astype(np.float64)), np.abs(x.centroids.astype(np.float64))[x.tokens.codes]
    q_step, c_step = q.max(1) / 254, c.max(1) / 254
    levels = np.abs(
        x.codebook.astype(np.float64)[reference.unpack_levels(x.tokens.packed, q.shape[1], nbits_of(x))]
    )
    error = a[:, None] * (
        np.outer(c_step, q.sum(1)) + np.outer(c.sum(1), q_step) + q.shape[1] * np.outer(c_step, q_step)
    )
    error += b[:, None] * np.outer(levels.sum(1), q_step)
    for row in rows:
        part = slice(x.offsets[row], x.offsets[row + 1])
        if part.start < part.stop:
            exact = (decoded[part] @ x.query.astype(np.float64).T).max(0).sum()
            assert abs(scores[row] - exact) <= error[part].max(0).sum() * (1 + 1e-3) + 1e-5 * abs(exact)


def test_codes_of_a_damaged_file_are_the_last_centroid():
    for wide in (False, True):
        x = corpus([20, 7], 9, 6, 16, 4, 1, wide)
        codes = x.tokens.codes.copy()
        codes[3], codes[22] = 2**16 - 1, -1 if wide else 6
        table, rows = tables(x)[0], np.array([1, 0], np.int32)
        mended = codes.copy()
        mended[[3, 22]] = 5
        exact, rough = (
            [
                residual_maxsim(table, x.tokens._replace(codes=c), x.offsets, x.codebook, rows),
                interaction(table, c, x.offsets, rows),
            ]
            for c in (codes, mended)
        )
        assert all(np.array_equal(a, b) for a, b in zip(exact, rough, strict=True))


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
    values = centroids[rng.integers(0, 1000, 5000)] + 0.12 * rng.standard_normal((5000, 128)).astype(
        np.float32
    )
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
    steps = reference.steps_of(np.random.default_rng(1).standard_gamma(2, (200, 30)).astype(np.float32))
    values = np.sort(steps.ravel().astype(np.float64))
    errors = [values[:i].var() * i + values[i:].var() * (len(values) - i) for i in range(1, len(values))]
    codebook = train_codebook(np.random.default_rng(1).standard_gamma(2, (200, 30)).astype(np.float32), 1)
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


def test_queries_in_parallel():
    x = corpus([50] * 40, 12, 64, 32, 4, 3, False)
    packed, rows = pack_centroids(x.centroids), np.arange(40, dtype=np.int32)

    def search(i: int) -> np.ndarray:
        table = query_table(np.roll(x.query, i, 1), packed)
        return residual_maxsim(table, x.tokens, x.offsets, x.codebook, rows)

    expected = [search(i) for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for i, scores in enumerate(pool.map(search, [*range(8)] * 3)):
            assert np.array_equal(scores, expected[i % 8])


@pytest.mark.parametrize("cpu", ["x86-64", "haswell", "skylake-avx512"])
def test_other_processors(cpu, path):
    """Code for other processors, as far as this one runs it, gives the same numbers up to fused products."""
    if platform.machine() != "x86_64" or path == "vnni":
        pytest.skip("is for processors without the instruction")
    if (
        cpu == "skylake-avx512"
        and not {"avx512bw", "avx512dq", "avx512vl", "avx512cd"} <= _jit.cpu_features()
    ):
        pytest.skip("this CPU lacks AVX-512")

    def results() -> list[np.ndarray]:
        x = corpus([0, 1, 30, 7], 19, 40, 100, 4, 0, False)
        table, rows = tables(x)[0], np.arange(4, dtype=np.int32)
        codes = assign(x.values, x.centroids)
        tokens = encode(x.values, x.centroids, codes, x.codebook)
        return [
            table.scores,
            table.bytes.astype(np.float32),
            probe(table, 2, x.list_offsets, x.list_documents, np.ones(4, bool)),
            interaction(table, x.tokens.codes, x.offsets, rows),
            residual_maxsim(table, x.tokens, x.offsets, x.codebook, rows),
            codes,
            tokens.coefficients,
            tokens.packed,
            decode(tokens, x.centroids, x.codebook),
        ]

    here = results()
    with pytest.MonkeyPatch.context() as patch:
        for module in (cpu_kernel, cpu_build):
            patch.setattr(module, "compile_ir", partial(_jit.compile_ir, cpu=cpu))
        for compiled in COMPILED:
            compiled.cache_clear()
        there = results()
    for compiled in COMPILED:
        compiled.cache_clear()
    for a, b in zip(here, there, strict=True):
        assert np.allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b[np.isfinite(b)]).max())


def test_memory_maps_and_slices(tmp_path):
    x = corpus([5, 3], 4, 6, 24, 2, 0, False)
    table, rows = tables(x)[0], np.array([0, 1], np.int32)
    expected = residual_maxsim(table, x.tokens, x.offsets, x.codebook, rows)
    for name, part in x.tokens._asdict().items():
        np.save(tmp_path / f"{name}.npy", part)
    mapped = Tokens(*(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in Tokens._fields))
    assert np.array_equal(residual_maxsim(table, mapped, x.offsets, x.codebook, rows), expected)
    assert np.array_equal(decode(mapped, x.centroids, x.codebook), decode(x.tokens, x.centroids, x.codebook))
    last = Tokens(*(part[5:] for part in x.tokens))
    alone = residual_maxsim(table, last, np.array([0, 3]), x.codebook, np.array([0], np.int32))
    assert alone[0] == expected[1]
    strided = np.asfortranarray(x.values)
    assert np.array_equal(assign(strided, x.centroids[::-1]), assign(x.values, x.centroids[::-1].copy()))


def test_errors():
    x = corpus([5, 3], 4, 6, 24, 2, 0, False)
    packed = pack_centroids(x.centroids)
    table, rows, keep = query_table(x.query, packed), np.array([0, 1], np.int32), np.ones(2, bool)
    none = np.zeros((0, 24), np.float32)
    codes, offsets, listed = x.tokens.codes, x.offsets, (x.list_offsets, x.list_documents)
    v, c, book = x.values, x.centroids, x.codebook
    far, before, high = np.array([0, 2], np.int32), np.array([0, -1], np.int32), np.array([9] * 8, np.uint16)
    flat, wide = x.tokens._replace(coefficients=v), x.tokens._replace(packed=x.tokens.packed[:, ::2])
    cases = [
        (TypeError, "assign: values .* float32 .* got float64", lambda: assign(v.astype(float), c)),
        (ValueError, r"assign: got values of shape \(8, 23\)", lambda: assign(v[:, 1:], c)),
        (ValueError, r"assign: got centroids of shape \(0, 24\)", lambda: assign(v, none)),
        (TypeError, "pack_centroids: centroids .* 2 dimension", lambda: pack_centroids(c[0])),
        (ValueError, "train_codebook: got nbits 3", lambda: train_codebook(v, 3)),
        (ValueError, "train_codebook: got residuals", lambda: train_codebook(none, 4)),
        (ValueError, "encode: got codes 9 to 9 of 6", lambda: encode(v, c, high, book)),
        (ValueError, "encode: got 8 vectors but 3 codes", lambda: encode(v, c, codes[:3], book)),
        (TypeError, "encode: codes .* int64", lambda: encode(v, c, codes.astype(int), book)),
        (ValueError, "encode: got a codebook of 3 levels", lambda: encode(v, c, codes, book[:3])),
        (
            ValueError,
            r"decode: .* packed \(8, 8\), expected .* \(8, 12\)",
            lambda: decode(x.tokens, c, np.arange(16, dtype=np.int8)),
        ),
        (ValueError, "query_table: got a query without tokens", lambda: query_table(none, packed)),
        (ValueError, "query_table: .* NaN", lambda: query_table(x.query * np.float32(np.nan), packed)),
        (ValueError, "pack_centroids: .* NaN", lambda: pack_centroids(c * np.float32(np.inf))),
        (ValueError, "query_table: .* of width 24", lambda: query_table(x.query[:, :3], packed)),
        (ValueError, "probe: got nprobe 0", lambda: probe(table, 0, *listed, keep)),
        (
            ValueError,
            "probe: got 6 list_offsets for 6",
            lambda: probe(table, 1, listed[0][1:], listed[1], keep),
        ),
        (TypeError, "probe: list_documents .* int64", lambda: probe(table, 1, listed[0], listed[0], keep)),
        (
            ValueError,
            "interaction: got documents 0 to 2 of 2",
            lambda: interaction(table, codes, offsets, far),
        ),
        (
            TypeError,
            "interaction: offsets .* int32",
            lambda: interaction(table, codes, offsets.astype(np.int32), rows),
        ),
        (
            ValueError,
            "residual_maxsim: got documents -1 to 0",
            lambda: residual_maxsim(table, x.tokens, offsets, book, before),
        ),
        (
            TypeError,
            "residual_maxsim: coefficients .* float32",
            lambda: residual_maxsim(table, flat, offsets, book, rows),
        ),
        (
            TypeError,
            "residual_maxsim: packed .* strides",
            lambda: residual_maxsim(table, wide, offsets, book, rows),
        ),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
