"""The best of chosen rows follow the definition, whatever was chosen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from irkit_kernels._jit import Target, compiling_for
from irkit_kernels._threads import forced_threads
from irkit_kernels.dense_scan import best_of, encode, products, ranking


@pytest.mark.parametrize("dim", [1, 16, 67, 384])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_best_of_chosen_rows(dim: int, threads: int) -> None:
    rng = np.random.default_rng(dim)
    values = rng.integers(-2, 3, (300, dim)).astype(np.float32)  # many scores are equal
    queries = rng.integers(-2, 3, (5, dim)).astype(np.float32)
    chosen = np.stack([rng.permutation(300)[:100] for _ in range(5)])
    chosen[:, 3], chosen[:, 7] = -1, 300
    chosen[4] = -(2**62)
    with forced_threads(threads):
        rows, scores = best_of(values, queries, chosen, 100)
    assert rows[4].tolist() == [-1] * 100
    for query in range(4):
        some = chosen[query][(chosen[query] >= 0) & (chosen[query] < 300)]
        products = values[some] @ queries[query]
        order = np.lexsort((some, -products))
        assert rows[query].tolist() == [*some[order].tolist(), -1, -1]
        assert scores[query].tolist() == [*products[order].tolist(), -np.inf, -np.inf]
        best = best_of(values, queries[query : query + 1], chosen[query : query + 1], 3)
        assert best[0].tolist() == [some[order][:3].tolist()]


def test_numbers_that_are_no_score() -> None:
    values = np.float32([[3e38], [-3e38], [1], [-0.0], [0]])
    rows, scores = best_of(values, np.float32([[3e38]]), np.array([[4, 1, 3, 0, 2]]), 5)
    assert rows.tolist() == [[0, 2, 3, 4, -1]]  # minus infinity is no hit
    assert scores[0, -1] == -np.inf


@pytest.mark.parametrize("converts", [True, False])
@pytest.mark.parametrize("dim", [1, 15, 16, 63, 64, 100, 384])
def test_products_of_rows_in_two_bytes(dim: int, converts: bool) -> None:
    rng = np.random.default_rng(dim)
    values = rng.standard_normal((300, dim)).astype(np.float16)
    values[0], values[1, 0], values[2, -1] = 0, 65504, 2**-24
    rounded = torch.from_numpy(values).bfloat16()
    queries = rng.standard_normal((3, dim)).astype(np.float32)
    chosen = rng.integers(-1, 301, (3, 50))
    for given, exact in (
        (values, values.astype(np.float32)),
        (rounded.view(torch.uint16).numpy(), rounded.float().numpy()),
    ):
        # without features no instruction converts float16
        with compiling_for(None if converts else Target(frozenset())):
            found, wanted = (products(rows, queries, chosen) for rows in (given, exact))
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("dim", [1, 15, 16, 63, 64, 100, 384])
def test_products_of_codes(dim: int) -> None:
    rng = np.random.default_rng(dim)
    given = rng.standard_normal((300, dim)).astype(np.float32) * np.geomspace(1e-30, 1e30, 300)[:, None]
    given[0] = 0
    codes, scales, *_ = encode(torch.from_numpy(given.astype(np.float32)))
    exact = (codes[:, :dim].float() - 128) * scales[:, None]
    queries = rng.standard_normal((3, dim)).astype(np.float32)
    chosen = rng.integers(-1, 301, (3, 50))
    found = products(codes.numpy(), queries, chosen, scales.numpy())
    assert np.array_equal(found, products(exact.numpy(), queries, chosen))


def test_codes_that_do_not_fit() -> None:
    codes, scales, *_ = encode(torch.ones(4, 70))
    queries, chosen = np.ones((1, 70), np.float32), np.zeros((1, 3), np.int64)
    for given, message in (
        ((codes.numpy(), queries, chosen), "uint8; codes in uint8 have scales"),
        ((codes.float().numpy(), queries, chosen, scales.numpy()), "float32; codes in uint8 have scales"),
        ((codes.numpy(), queries, chosen, scales.double().numpy()), r"scales are float64 \(4,\)"),
        (
            (codes.numpy(), queries, chosen, scales[:3].numpy()),
            r"scales are float32 \(3,\), expected .*\(4,\)",
        ),
        ((codes[:, :64].numpy(), queries, chosen, scales.numpy()), r"values are uint8 \(4, 64\), expected"),
    ):
        with pytest.raises(ValueError, match=message):
            products(*given)


def test_arrays_that_do_not_fit() -> None:
    values, queries, chosen = (
        np.ones((4, 2), np.float32),
        np.ones((1, 2), np.float32),
        np.zeros((1, 3), np.int64),
    )
    for given, message in (
        ((values.astype(np.float64), queries, chosen, 3), "values are float64"),
        ((values, queries[:, :1], chosen, 3), r"queries are float32 \(1, 1\), expected float32 \(1, 2\)"),
        ((values, queries, chosen.astype(np.int32), 3), "chosen rows are int32"),
        ((values, queries, chosen, 4), r"rows are int64 \(1, 4\), expected int64 \(1, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            best_of(*given)
    for dtype in (np.float64, np.int16):
        with pytest.raises(ValueError, match=f"values are {np.dtype(dtype)}"):
            products(values.astype(dtype), queries, chosen)
    with pytest.raises(ValueError, match="values are float16"):
        best_of(values.astype(np.float16), queries, chosen, 3)
    out = np.zeros((1, 3), np.int64), np.zeros((1, 6), np.float32)[:, ::2]
    with pytest.raises(ValueError, match="scores are"):
        ranking(values, queries, chosen, *out)
