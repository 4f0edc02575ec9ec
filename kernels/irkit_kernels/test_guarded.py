"""No kernel reads or writes outside of its arrays: each array ends, or begins, at a page without access."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from irkit_kernels import dense_scan, dense_search
from irkit_kernels._testing import guarded, guarded_memory, in_child
from irkit_kernels.maxsim import maxsim, maxsim_int8, maxsim_stored, quantize_rows
from irkit_kernels.packed_linear import pack_weight, packed_linear
from irkit_kernels.ragged_attention import ragged_attention
from irkit_kernels.ragged_pool import ragged_pool
from irkit_kernels.residual_maxsim import (
    Tokens,
    assign,
    assign_near,
    decode,
    encode,
    exact_maxsim,
    interaction,
    pack_centroids,
    probe,
    query_table,
    residual_maxsim,
    train_codebook,
)
from irkit_kernels.rotary import rotary
from irkit_kernels.row_norm import row_norm
from irkit_kernels.sparse_search import Effort, Searcher, Thresholds, build
from irkit_kernels.splade_pool import splade_pool, splade_pool_sparse

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = ((1,), (3, 0, 5), (17, 1, 33, 2), (64, 67))


def offsets_of(lengths: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=dtype)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def check(operation: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Assert that an operation gives the same result on guarded memory as on ordinary memory."""
    expected = flat(operation(*arguments, **options))
    for before in (False, True):
        with guarded_memory(before):
            copies = [guarded(x, before) if isinstance(x, Tensor | np.ndarray) else x for x in arguments]
            actual = flat(operation(*copies, **options))
        for first, second in zip(expected, actual, strict=True):
            np.testing.assert_array_equal(first, second)


def forked(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a forked child: a failure is a signal, which would end pytest."""

    @functools.wraps(test)
    def run(**parameters: Any) -> None:
        in_child(lambda: test(**parameters))

    return run


def flat(result: Any) -> list[Any]:
    if isinstance(result, tuple):
        return [array for part in result for array in flat(part)]
    return [result.detach().float().numpy().copy() if isinstance(result, Tensor) else np.array(result)]


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_reads_beyond_the_border_are_seen(before: bool) -> None:
    array = guarded(np.arange(5, dtype=np.int32), before)
    assert array.tolist() == [0, 1, 2, 3, 4]
    outside = array.ctypes.data + (-1 if before else array.nbytes)
    with pytest.raises(AssertionError, match="SIGSEGV"):
        in_child(lambda: ctypes.string_at(outside, 1))

    def reads_scratch() -> None:
        with guarded_memory(before):
            for array in (np.empty(7, np.uint8), np.zeros((3, 5)), torch.empty(3).numpy()):
                assert array.nbytes
            tensor = torch.zeros(1).new_empty(2, 3, dtype=torch.bfloat16)
        ctypes.string_at(tensor.data_ptr() + (-1 if before else 12), 1)

    with pytest.raises(AssertionError, match="SIGSEGV"):
        in_child(reads_scratch)


@pytest.mark.sampled
@pytest.mark.parametrize("dim", [1, 4, 7, 17, 48, 129])
@forked
def test_maxsim(dim: int) -> None:
    for number, lengths in enumerate(LENGTHS):
        queries = LENGTHS[(number + 1) % len(LENGTHS)]
        sides = [(random(sum(texts), dim), offsets_of(texts)) for texts in (queries, lengths)]
        (q, q_offsets), (d, d_offsets) = sides
        pairs = torch.tensor([[len(queries) - 1, len(lengths) - 1], [0, 0]])
        for dtype in FLOATS:
            check(maxsim, q.to(dtype), q_offsets, d.to(dtype), d_offsets)
            check(maxsim, q.to(dtype), q_offsets, d.to(dtype), d_offsets, pairs)
        check(gradients_of_maxsim, q, q_offsets, d, d_offsets)
        small = *quantize_rows(q), q_offsets, *quantize_rows(d), d_offsets
        check(maxsim_int8, *small)
        check(maxsim_int8, *small, pairs)
        check(maxsim_stored, q, q_offsets, d.half(), d_offsets)
        check(maxsim_stored, q, q_offsets, small[3], d_offsets, small[4], pairs)


def gradients_of_maxsim(q: Tensor, q_offsets: Tensor, d: Tensor, d_offsets: Tensor) -> Any:
    q, d = q.requires_grad_(), d.requires_grad_()
    scores = maxsim(q, q_offsets, d, d_offsets)
    return torch.autograd.grad(scores[scores.isfinite()].sum(), (q, d), allow_unused=True)


@forked
def test_packed_linear() -> None:
    for m, k, n in ((1, 1, 1), (3, 5, 7), (6, 64, 33), (17, 66, 130)):
        check(pack_weight, random(n, k), random(n))
        for activation in ("none", "gelu", "silu"):
            check(packed_linear, random(m, k), pack_weight(random(n, k)), n, activation)
        check(packed_linear, random(m, k), pack_weight(random(2 * n, k), gated=True), n, "gelu_tanh", True)


@forked
def test_row_norm() -> None:
    for width in (1, 16, 63, 130):
        for rms in (False, True):
            check(row_norm, random(3, width), random(width), random(width), eps=1e-6, rms=rms)
            for keep_sum in (False, True):
                check(summed_norm, random(3, width), random(3, width), rms, keep_sum)
        check(row_norm, random(3, 2, width), eps=1e-6)


def summed_norm(x: Tensor, added: Tensor, rms: bool, keep_sum: bool) -> tuple[Tensor, Tensor]:
    """Add in a copy, because the sum or the result overwrites it; it is guarded, as `clone` would not be."""
    added = torch.empty(added.shape).copy_(added)
    return row_norm(x, eps=1e-6, rms=rms, added=added, keep_sum=keep_sum), added


@pytest.mark.parametrize("heads", [1, 3])
@forked
def test_rotary(heads: int) -> None:
    check(rotary, random(5, heads, 64), random(5, 1, 32), random(5, 1, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 40, 64])
@forked
def test_ragged_attention(head_dim: int, dtype: torch.dtype) -> None:
    for lengths in LENGTHS:
        tokens, offsets = (sum(lengths), 2, head_dim), offsets_of(lengths)
        q, k, v = (random(*tokens, dtype=dtype) for _ in range(3))
        check(ragged_attention, q, k, v, offsets, offsets)
        check(ragged_attention, q, k, v, offsets, offsets, window=3)
        check(gradients_of_attention, q, k, v, offsets)


def gradients_of_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Any:
    sides = [x.requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(ragged_attention(*sides, offsets, offsets).float().sum(), sides)


@forked
def test_ragged_pool() -> None:
    for dim, dtype, lengths in product((1, 7, 33, 64), FLOATS, LENGTHS):
        for kernel, stride in ((1, 1), (3, 2), (5, 5)):
            values = random(sum(lengths), dim, dtype=dtype)
            check(ragged_pool, values, offsets_of(lengths), kernel, stride)


@forked
def test_splade_pool() -> None:
    for (dim, vocabulary), lengths in product(((1, 1), (7, 33), (33, 130), (64, 1000)), LENGTHS[1:3]):
        for dtype, pooling in product(FLOATS, ("max", "sum")):
            hidden, weight = random(sum(lengths), dim, dtype=dtype), random(vocabulary, dim, dtype=dtype)
            arguments = hidden, offsets_of(lengths), weight, random(vocabulary, dtype=dtype)
            check(splade_pool, *arguments, pooling=pooling)
            check(splade_pool_sparse, *arguments, pooling=pooling, top_k=3)


@pytest.mark.parametrize(
    ("dim", "tokens", "nbits"),
    [(3, 1, 8), (7, 40, 4), (48, 33, 1), (129, 2, 2)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in ((3, 1, 1), (7, 40, 2), (48, 33, 4), (129, 2, 8))
    ],
)
@forked
def test_residual_maxsim(dim: int, tokens: int, nbits: int) -> None:
    values, centroids = random(sum(LENGTHS[2]), dim).numpy(), random(21, dim).numpy()
    codes = assign(values, centroids)
    check(assign, values, centroids)
    near = np.arange(20, dtype=np.int32).reshape(5, 4)
    check(assign_near, values, centroids, centroids[:5].copy(), near)
    codebook = train_codebook(values - centroids[codes], nbits)
    check(train_codebook, values - centroids[codes], nbits)
    for kind in (np.uint16, np.int32):
        own = codes.astype(kind)
        check(encode, values, centroids, own, codebook)
        encoded = encode(values, centroids, own, codebook)
        check(lambda *x: decode(Tokens(*x[:3]), *x[3:]), *encoded, centroids, codebook)
        starts = np.arange(len(centroids) + 1) * 2
        documents = np.arange(2 * len(centroids), dtype=np.int32) % len(LENGTHS[2])
        offsets = offsets_of(LENGTHS[2], torch.int64).numpy()
        query = random(tokens, dim).numpy()
        check(search, query, centroids, *encoded, codebook, offsets, starts, documents)


def search(
    query: Any, centroids: Any, codes: Any, coefficients: Any, packed: Any, codebook: Any, *index: Any
) -> Any:
    """Call every step of a search of compressed tokens."""
    offsets, starts, lists = index
    table, n = query_table(query, pack_centroids(centroids)), len(offsets) - 1
    candidates = probe(table, 3, starts, lists, guarded(np.ones(n, np.bool_)), 2)
    rows = guarded(np.arange(n, dtype=np.int32)[::-1])
    tokens = Tokens(codes, coefficients, packed)
    rough = interaction(table, codes, offsets, rows)
    scores = residual_maxsim(table, tokens, offsets, codebook, rows)
    return candidates, rough, scores, exact_maxsim(query, table, centroids, tokens, offsets, codebook, rows)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("weights", "terms"),
    [
        *((weights, np.uint16) for weights in (np.float32, np.float16, np.uint16, np.uint8)),
        *((weights, np.uint32) for weights in (np.float32, np.uint8)),
    ],
)
@forked
def test_sparse_search(weights: Any, terms: Any) -> None:
    rng = np.random.default_rng(0)
    two_ranges = 16384 + 129, 9, 0
    for n, dim, few, survey in (
        (1, 1, 4096, 0),
        (37, 65, 4096, 0),
        (700, 130, 0, 0),
        (*two_ranges, 0),
        (*two_ranges, 1 << 40),
    ):
        rows = [np.sort(rng.choice(dim, rng.integers(0, min(dim, 9) + 1), replace=False)) for _ in range(n)]
        values = np.concatenate(rows).astype(terms)
        amounts = (1 + 100 * rng.random(len(values))).astype(weights)
        scales = rng.random(n).astype(np.float32) if np.dtype(weights).kind == "u" else None
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
        keep = rng.random(n) < 0.7
        check(searches, offsets, values, amounts, scales, keep, dim, Thresholds(few, survey=survey))


def searches(
    offsets: Any, terms: Any, weights: Any, scales: Any, keep: Any, dim: int, thresholds: Thresholds
) -> Any:
    """Exact and approximate searches, with a filter and without, of a batch and of one query."""
    forward, results = (offsets, terms, weights, scales), []
    searcher = Searcher(build(forward, dim), forward, thresholds)
    asked = guarded(np.arange(dim, dtype=np.int32)[:7])
    queries = guarded(np.array([0, len(asked), len(asked)])), asked, guarded(np.ones(len(asked), np.float32))
    n = len(offsets) - 1
    for effort in (None, Effort(3, 0.5, 20)):
        for filtered in (None, keep):
            for k in (1, min(n, 40)):
                results.append(searcher.find(queries, k, filtered, effort))
    for k in (1, min(n, 40)):
        results.append(searcher.single(k)(torch.from_numpy(asked), torch.ones(len(asked))) or ())
    return tuple(results)


@pytest.mark.parametrize(
    ("nbits", "metric"),
    [(1, "inner_product"), (4, "euclidean")]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "euclidean"), (4, "inner_product"))],
)
@forked
def test_dense_search(nbits: int, metric: str) -> None:
    rng = np.random.default_rng(0)
    for n, dim, n_lists in ((1, 1, 1), (70, 67, 3), (1500, 64, 600)):
        vectors, centroids = random(n, dim).numpy(), random(n_lists, dim).numpy()
        check(dense_search.assign, vectors, centroids)
        rotation = dense_search.make_rotation(dim)
        codes = dense_search.Encoder(
            centroids, rotation, nbits, euclidean=metric == "euclidean", keep_int8=True
        ).encode(vectors)
        segment, queries = dense_search.arrange(codes, n_lists), random(2, dim).numpy()
        for name in ("none", "int8", "float16", "float32"):
            kept = {"none": None, "int8": codes["kept"]}.get(
                name, vectors.astype(name.replace("none", "int8"))
            )
            scales = codes["kept_scales"] if name == "int8" else None
            for keep in (None, rng.random(n) < 0.5):
                given = queries, keep, kept, scales, centroids, *rotation, *segment.values()
                check(dense_searches, *given, names=[*segment], metric=metric)


def dense_searches(
    queries: Any, keep: Any, kept: Any, scales: Any, centroids: Any, *arrays: Any, names: Any, metric: str
) -> Any:
    """Search with few candidates and with many."""
    segment = dict(zip(names, arrays[2:], strict=True))
    n = len(segment["rows"])
    searcher = dense_search.Searcher(
        centroids,
        dense_search.Rotation(*arrays[:2]),
        [segment],
        n,
        metric=metric,
        kept=kept,
        kept_scales=scales,
    )
    efforts = (
        dense_search.Effort(1, 1, 1),
        dense_search.Effort(9, 20, 10),
        dense_search.Effort(len(centroids), n, n),
    )
    return tuple(part for effort in efforts for part in searcher.find(queries, 7, effort, keep))


@forked
def test_dense_scan() -> None:
    for n, dim in ((1, 1), (16, 64), (3001, 67)):
        values, keep = random(n, dim), np.random.default_rng(0).random(n) < 0.5
        keep[0] = True
        codes = dense_scan.encode(values)
        for allowed in (None, keep):
            check(dense_scans, random(3, dim), allowed, *codes)


def dense_scans(queries: Tensor, keep: Any, *codes: Tensor) -> Any:
    found = dense_scan.find_candidates(dense_scan.Codes(*codes), queries, 1, keep)
    return tuple(rows for rows in found if rows is not None)
