"""No row of the best is lost, whatever the numbers are, and few other rows are kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit_kernels._jit import Target, compiling_for, cpu_features
from irkit_kernels._threads import forced_threads
from irkit_kernels.dense_scan import encode, find_candidates
from irkit_kernels.dense_scan.reference import candidates


def random(n: int, dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))


@given(
    seed=st.integers(0, 1 << 30),
    dim=st.sampled_from([1, 3, 64, 100]),
    n=st.integers(1, 3000),
    n_q=st.sampled_from([3, 8, 13]),  # 8 at a time are multiplied in another way
    k=st.integers(1, 20),
    size=st.sampled_from([1e-20, 1e-3, 1.0, 1e12]),
    share=st.sampled_from([1.0, 0.5, 0.05]),
    threads=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_the_best_are_among_the_candidates(
    seed: int, dim: int, n: int, n_q: int, k: int, size: float, share: float, threads: int
) -> None:
    rng = np.random.default_rng(seed)
    lengths = torch.tensor(10.0 ** rng.uniform(-1, 1, (n, 1)), dtype=torch.float32)
    values = random(n, dim, seed) * lengths * size
    queries = random(n_q, dim, seed + 1) * size
    keep = None if share == 1 else rng.random(n) < share
    live = n if keep is None else int(keep.sum())
    if not live:
        return
    k = min(k, live)
    with forced_threads(threads):
        found = find_candidates(encode(values), queries, k, keep)
    scores = queries.double() @ values.double().T
    if keep is not None:
        scores[:, ~torch.from_numpy(keep)] = -torch.inf
    for rows, query in zip(found, scores, strict=True):
        if rows is None:  # numbers of 1e-20 say nothing
            assert size != 1
            continue
        assert set(query.topk(k).indices.tolist()) <= set(rows.tolist())
        assert (np.diff(rows) > 0).all()
        assert keep is None or keep[rows].all()


@pytest.mark.parametrize("features", [frozenset[str](), frozenset({"avx2"}), frozenset({"avx512vnni"})])
def test_rows_are_those_of_the_reference(features: frozenset[str]) -> None:
    if not features <= cpu_features():
        pytest.skip(f"needs {', '.join(features)}")
    values, queries = random(20_000, 48), random(21, 48, 1)
    codes = encode(values)
    with compiling_for(Target(features)):  # without features the reference runs
        found = find_candidates(codes, queries, 10)
    for rows, expected in zip(found, candidates(codes, queries, 10), strict=True):
        assert rows is not None
        assert len(set(rows) ^ set(expected.tolist())) <= 1  # float32 rounds a bound
        assert 10 <= len(rows) <= 100


def test_products_beyond_32_bits() -> None:
    values = torch.zeros(48, 140_000)
    values[5], values[7, :70_000] = 1, 1
    for n_q in (1, 8):
        found = find_candidates(encode(values), torch.ones(n_q, 140_000), 1)
        assert all(rows is not None and 5 in rows for rows in found)


def test_what_codes_cannot_tell() -> None:
    same = torch.ones(5000, 8)  # all are the best
    assert find_candidates(encode(same), torch.ones(2, 8), 3) == [None, None]
    few = find_candidates(encode(same[:100]), torch.ones(1, 8), 3)[0]
    assert few is not None
    assert few.tolist() == list(range(100))
    large = torch.full((100, 8), 1e30)
    assert find_candidates(encode(large), large[:1], 3) == [None]
    (rows,) = find_candidates(encode(large / 1e15), large[:1] / 1e20, 3)
    assert rows is not None
    assert find_candidates(encode(same), torch.ones(0, 8), 3) == []


def test_damaged_codes() -> None:
    codes = encode(random(300, 8))
    for name in ("scales", "margins", "norms"):
        damaged = codes._replace(**{name: torch.full((300,), torch.nan)})
        (rows,) = find_candidates(damaged, torch.ones(1, 8), 3)
        assert rows is None or len(rows) <= 300


def test_arrays_that_do_not_fit() -> None:
    codes, queries = encode(random(30, 8)), torch.ones(1, 8)
    for damaged, message in (
        (codes._replace(codes=codes.codes[:, :32]), r"codes are torch.uint8 \(30, 32\)"),
        (codes._replace(scales=codes.scales[:5]), r"scales are torch.float32 \(5,\)"),
        (codes._replace(norms=codes.norms.double()), "norms are torch.float64"),
        (codes._replace(margins=codes.margins.repeat_interleave(2)[::2]), "not contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            find_candidates(damaged, queries, 3)
    with pytest.raises(ValueError, match="queries"):
        find_candidates(codes, torch.ones(1, 65), 3)
    with pytest.raises(ValueError, match="the filter"):
        find_candidates(codes, queries, 3, np.ones(29, bool))


def test_queries_in_any_layout() -> None:
    codes, queries = encode(random(5000, 64)), random(4, 64, 1)
    columns = queries.T.contiguous().T  # column by column
    for found, expected in zip(
        find_candidates(codes, columns, 10), find_candidates(codes, queries, 10), strict=True
    ):
        np.testing.assert_array_equal(found, expected)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the filter is bool .* contiguous"):
        find_candidates(codes, queries, 3, np.ones(10_000, bool)[::2])
