"""The steps of a search agree with their definitions, with the dot product instruction and without."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit_kernels._jit import Target, compiling_for, cpu_features
from irkit_kernels._testing import BYTE_CODE, byte_code
from irkit_kernels.residual_maxsim import (
    Tokens,
    assign,
    collect,
    decode,
    encode,
    exact_maxsim,
    interaction,
    pack_centroids,
    probe,
    query_table,
    reference,
    residual_maxsim,
    train_codebook,
)
from irkit_kernels.residual_maxsim.cpu_tile import Header

# dimensions, bits, and whether codes have 32 bits; few, because each is compiled
PLANS = (
    *((1, 1, True), (6, 8, False), (16, 4, True), (24, 2, False), (100, 1, False), (128, 8, True)),
    *((200, 2, True), (1, 4, False), (6, 2, True), (24, 1, True), (100, 8, True), (128, 4, False)),
)
seeds = st.integers(0, 2**31)


@pytest.fixture(params=[*BYTE_CODE], scope="module", autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with byte_code(request.param) as name:
        yield name


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
    lambda lengths, m, k, plan, seed: corpus(lengths, m, k, *plan[:2], seed, plan[2]),
    st.lists(st.one_of(st.sampled_from([0, 1, 4, 5]), st.integers(0, 30)), min_size=1, max_size=8),
    st.one_of(st.integers(1, 20), st.sampled_from([16, 17, 32, 33, 70])),
    st.one_of(st.integers(1, 40), st.sampled_from([64, 65, 100])),
    st.sampled_from(PLANS),
    seeds,
)


def sizes(x: Corpus) -> list[np.ndarray]:
    """Return the magnitudes of a and b, and the levels of all tokens, in float64."""
    windows = reference.windows(x.tokens.packed, x.query.shape[1], reference.bits_of(x.codebook))
    levels = x.codebook.ravel().astype(np.float64)[windows]
    return [np.abs(part) for part in (*x.tokens.coefficients.astype(np.float64).T, levels)]


def tables(x: Corpus):
    """Return the fast table, and its numbers in the layout of the definition."""
    table = query_table(x.query, pack_centroids(x.centroids))
    m, k = len(x.query), len(x.centroids)
    scale = table.header[:, Header.SCALE, None]
    flat = [
        part.swapaxes(0, 1).reshape(part.shape[1], -1)[:k, :m] for part in (table.scores * scale, table.bytes)
    ]
    return table, reference.CentroidTable(*flat)


@settings(max_examples=20, deadline=None)
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


@settings(max_examples=20, deadline=None)
@given(corpora, st.integers(1, 130), st.one_of(st.integers(1, 9), st.just(10**9)), seeds)
def test_probe(x, nprobe, count, seed):
    table, flat = tables(x)
    keep = np.random.default_rng(seed).random(len(x.offsets) - 1) < 0.8
    got = probe(table, nprobe, x.list_offsets, x.list_documents, keep, count)
    expected = reference.probe_reference(flat, nprobe, x.list_offsets, x.list_documents, keep, count)
    assert np.array_equal(got, expected)
    assert got.dtype == np.int32


def test_probe_of_zeros_finds_nothing():
    x = corpus([3, 4], 2, 5, 8, 4, 0, False)
    keep = np.ones(2, bool)
    zeros = query_table(np.zeros((3, 8), np.float32), pack_centroids(x.centroids))
    assert len(probe(zeros, 5, x.list_offsets, x.list_documents, keep, 9)) == 0
    some = np.concatenate([x.query, np.zeros((1, 8), np.float32)])
    found = [
        probe(query_table(q, pack_centroids(x.centroids)), 1, x.list_offsets, x.list_documents, keep, 9)
        for q in (x.query, some)
    ]
    assert np.array_equal(*found)


def test_damaged_lists_stay_within_their_memory():
    x = corpus([3, 4], 2, 5, 8, 4, 0, False)
    table, keep = tables(x)[0], np.ones(2, bool)
    listed = np.where(x.list_documents == 1, -(2**31), x.list_documents).astype(np.int32)
    offsets = x.list_offsets.copy()
    offsets[0], offsets[-1] = -(2**40), 2**40
    assert probe(table, 5, offsets, listed, keep, 9).tolist() == [0, 1]
    assert len(probe(table, 5, x.list_offsets, x.list_documents, keep[:0], 9)) == 0


@settings(max_examples=20, deadline=None)
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
    a, b, levels = sizes(x)
    size = a[:, None] * np.abs(flat.scores[x.tokens.codes]) + b[:, None] * (levels @ np.abs(x.query.T))
    bound = (len(x.query) + 8) * 2.0**-23 * size.max(0, initial=0).sum()
    assert (np.abs(got[~empty] - expected[~empty]) <= bound).all()


@settings(max_examples=12, deadline=None)
@given(corpora)
def test_scores_are_those_of_the_decoded_tokens(x):
    table, _ = tables(x)
    rows = np.arange(len(x.offsets) - 1, dtype=np.int32)
    decoded = decode(x.tokens, x.centroids, x.codebook).astype(np.float64)
    scores = residual_maxsim(table, x.tokens, x.offsets, x.codebook, rows)
    fine = exact_maxsim(x.query, table, x.centroids, x.tokens, x.offsets, x.codebook, rows)
    # half a step of the query's rounding for each number of both parts, half a step of the centroid's
    a, b, levels = sizes(x)
    q, c = np.abs(x.query.astype(np.float64)), np.abs(x.centroids.astype(np.float64))[x.tokens.codes]
    q_step, c_step = q.max(1) / 254, c.max(1) / 254
    error = a[:, None] * (
        np.outer(c_step, q.sum(1)) + np.outer(c.sum(1), q_step) + q.shape[1] * np.outer(c_step, q_step)
    )
    error += b[:, None] * np.outer(levels.sum(1), q_step)
    for row in rows:
        part = slice(x.offsets[row], x.offsets[row + 1])
        if part.start < part.stop:
            exact = (decoded[part] @ x.query.astype(np.float64).T).max(0).sum()
            assert abs(scores[row] - exact) <= error[part].max(0).sum() * (1 + 1e-3) + 1e-5 * abs(exact)
            size = (a[:, None] * (c @ q.T) + b[:, None] * (levels @ q.T))[part].max(0).sum()
            assert abs(fine[row] - exact) <= 2e-6 * size
        else:
            assert fine[row] == -np.inf


@pytest.mark.parametrize("wide", [False, True])
def test_codes_of_a_damaged_file_are_the_last_centroid(wide):
    x = corpus([20, 7], 9, 6, 16, 4, 1, wide)
    codes, mended = x.tokens.codes.copy(), x.tokens.codes.copy()
    codes[[3, 22]], mended[[3, 22]] = (2**16 - 1, -1 if wide else 6), 5
    table, rows = tables(x)[0], np.array([1, 0], np.int32)
    damaged, whole = (
        (
            residual_maxsim(table, x.tokens._replace(codes=c), x.offsets, x.codebook, rows),
            exact_maxsim(
                x.query, table, x.centroids, x.tokens._replace(codes=c), x.offsets, x.codebook, rows
            ),
            interaction(table, c, x.offsets, rows),
        )
        for c in (codes, mended)
    )
    assert np.array_equal(damaged, whole)


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
    """Code compiled for other CPUs gives the same numbers up to fused products, if this CPU can run it."""
    if platform.machine() != "x86_64" or path not in ("no vnni", "portable"):
        pytest.skip("is for processors without the instruction")
    needed = {"avx512bw", "avx512dq", "avx512vl", "avx512cd"} if cpu == "skylake-avx512" else set()
    if not needed <= cpu_features():
        pytest.skip("this CPU lacks AVX-512")

    def results() -> list[np.ndarray]:
        x = corpus([0, 1, 30, 7], 19, 40, 100, 4, 0, False)
        table, rows = tables(x)[0], np.arange(4, dtype=np.int32)
        codes = assign(x.values, x.centroids)
        tokens = encode(x.values, x.centroids, codes, x.codebook)
        return [
            table.scores,
            table.bytes.astype(np.float32),
            probe(table, 2, x.list_offsets, x.list_documents, np.ones(4, bool), 3),
            interaction(table, x.tokens.codes, x.offsets, rows),
            residual_maxsim(table, x.tokens, x.offsets, x.codebook, rows),
            codes,
            tokens.coefficients,
            tokens.packed,
            decode(tokens, x.centroids, x.codebook),
        ]

    here = results()
    features = frozenset({"sse2"}) if cpu == "x86-64" else cpu_features() - {"avxvnni"}
    with compiling_for(Target(features, cpu)):
        there = results()
    for a, b in zip(here, there, strict=True):
        assert np.allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b[np.isfinite(b)]).max())


@settings(max_examples=12, deadline=None)
@given(corpora, st.integers(1, 5))
def test_exact_scores_do_not_depend_on_other_documents(x, size):
    table, _ = tables(x)
    rows = np.arange(len(x.offsets) - 1, dtype=np.int32)
    documents = x.tokens, x.offsets, x.codebook
    whole = exact_maxsim(x.query, table, x.centroids, *documents, rows)
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    scores = [exact_maxsim(x.query, table, x.centroids, *documents, part) for part in parts]
    assert np.array_equal(np.concatenate([whole[:0], *scores]), whole)


def test_the_exact_maximum_of_tokens_that_8_bits_confuse():
    """Scores of 8 bits rank the tokens of such a document wrongly; exact ones do not."""
    rng = np.random.default_rng(0)
    centroids = rng.standard_normal((4, 64)).astype(np.float32)
    values = centroids[:1] + 0.1 * rng.standard_normal((400, 64)).astype(np.float32)
    codebook = train_codebook(values - centroids[:1], 4)
    tokens = encode(values, centroids, np.zeros(400, np.uint16), codebook)
    query = (centroids[:1] + 0.5 * rng.standard_normal((20, 64))).astype(np.float32)
    table, ends = query_table(query, pack_centroids(centroids)), np.array([0, 400])
    decoded = decode(tokens, centroids, codebook).astype(np.float64) @ query.T.astype(np.float64)
    one = np.zeros(1, np.int32)
    found = exact_maxsim(query, table, centroids, tokens, ends, codebook, one)
    np.testing.assert_allclose(found, decoded.max(0).sum(), rtol=1e-6)
    rough = residual_maxsim(table, tokens, ends, codebook, one)
    assert abs(rough[0] - decoded.max(0).sum()) > 1e-4 * decoded.max(0).sum()


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
    book16 = np.zeros((16, 16), np.int8)
    types = {
        "assign: values .* float32 .* got float64": lambda: assign(v.astype(float), c),
        "pack_centroids: centroids .* 2 dimension": lambda: pack_centroids(c[0]),
        "encode: codes .* int64": lambda: encode(v, c, codes.astype(int), book),
        "collect: counts .* bool": lambda: collect(keep, 1),
        "probe: list_documents .* int64": lambda: probe(table, 1, listed[0], listed[0], keep, 9),
        "interaction: offsets .* int32": lambda: interaction(table, codes, offsets.astype(np.int32), rows),
        "residual.*: coefficients .* float32": lambda: residual_maxsim(table, flat, offsets, book, rows),
        "residual_maxsim: packed .* strides": lambda: residual_maxsim(table, wide, offsets, book, rows),
    }
    values = {
        r"assign: got values of shape \(8, 23\)": lambda: assign(v[:, 1:], c),
        r"assign: got centroids of shape \(0, 24\)": lambda: assign(v, none),
        "train_codebook: got nbits 3": lambda: train_codebook(v, 3),
        "train_codebook: got residuals": lambda: train_codebook(none, 4),
        "encode: got codes 9 to 9 of 6": lambda: encode(v, c, high, book),
        "encode: got 8 vectors but 3 codes": lambda: encode(v, c, codes[:3], book),
        "encode: got a codebook of 8 bits": lambda: encode(v, c, codes, np.zeros((1, 256), np.int8)),
        r"encode: got a codebook of shape \(3, 4\)": lambda: encode(v, c, codes, book[:3]),
        r"decode: .* packed \(8, 8\), expected .* \(8, 12\)": lambda: decode(x.tokens, c, book16),
        "query_table: got a query without tokens": lambda: query_table(none, packed),
        "query_table: .* NaN": lambda: query_table(x.query * np.float32(np.nan), packed),
        "query_table: .* of width 24": lambda: query_table(x.query[:, :3], packed),
        "pack_centroids: .* NaN": lambda: pack_centroids(c * np.float32(np.inf)),
        "probe: got nprobe 0": lambda: probe(table, 0, *listed, keep, 9),
        "collect: got least 0": lambda: collect(np.ones(3, np.uint8), 0),
        "probe: got count 0": lambda: probe(table, 1, *listed, keep, 0),
        "probe: got 6 list_offsets for 6": lambda: probe(table, 1, listed[0][1:], listed[1], keep, 9),
        "interaction: got documents 0 to 2 of 2": lambda: interaction(table, codes, offsets, far),
        "exact_maxsim: got 2 centroids, expected the table's 6": lambda: exact_maxsim(
            x.query, table, c[:2], x.tokens, offsets, book, rows
        ),
        "residual.*: got documents -1 to 0": lambda: residual_maxsim(table, x.tokens, offsets, book, before),
    }
    for error, cases in ((TypeError, types), (ValueError, values)):
        for message, call in cases.items():
            with pytest.raises(error, match=message):
                call()


@settings(deadline=None, max_examples=60)
@given(n=st.integers(0, 300), least=st.sampled_from([1, 2, 128, 255]), seed=st.integers(0, 2**31))
def test_collect(n, least, seed):
    counts = np.random.default_rng(seed).choice([0, 1, 2, 127, 128, 255], n).astype(np.uint8)
    got = collect(counts, least)
    assert got.dtype == np.int32
    assert got.tolist() == np.flatnonzero(counts >= least).tolist()


@pytest.mark.parametrize("count", [40, 40_000])
def test_the_arrays_of_a_table_lie_side_by_side(count):
    generator = np.random.default_rng(0)
    centroids, query = (generator.standard_normal((n, 4), dtype=np.float32) for n in (count, 20))
    table = query_table(query, pack_centroids(centroids))
    arrays = table.bytes, table.scores, table.maxima
    starts = [array.ctypes.data for array in arrays]
    assert starts[1:] == [start + array.nbytes for start, array in zip(starts, arrays, strict=True)][:-1]
    assert count == 40 or starts[0] % (1 << 21) == 0  # a large one has huge pages
