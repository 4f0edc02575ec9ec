"""What is particular to exact search in 8 bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from irkit import Dense, MultiVector, Ragged, Sparse, score
from irkit.errors import BadValueError, ConfigError
from irkit.index import Limits, Store, create_index, index_config, open_index, use_limits

INT8 = {"kind": "flat", "dtype": "int8"}


def texts(n: int, seed: int) -> MultiVector:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, n)
    values = torch.tensor(rng.standard_normal((lengths.sum(), 24)), dtype=torch.float32)
    return MultiVector(Ragged(torch.nn.functional.normalize(values), torch.tensor(lengths)))


def test_nearly_all_of_the_best_in_a_quarter_of_the_bytes(tmp_path: Path) -> None:
    data, queries = texts(2000, 0), texts(50, 1)
    with Store.build(tmp_path) as store:
        index = create_index(store, INT8)
        index.add(data)
        index.finish()
        store.publish()
    index = open_index(Store.open(tmp_path))
    hits = index.search(queries, 10)
    truth = score(queries, data)
    best = truth.topk(10).indices.numpy()
    found = np.mean([np.isin(some, others).mean() for some, others in zip(hits.rows, best, strict=True)])
    assert found > 0.95
    # a token of length 1 is off by half a step of its scale in each dimension, at most
    error = 0.5 * np.sqrt(24) / 127 * queries.tokens.lengths.numpy()[:, None]
    assert (np.abs(hits.scores - truth.gather(1, torch.tensor(hits.rows)).numpy()) <= error).all()
    assert index.stats()["bytes"] == len(data.tokens.values) * (24 + 4) + len(data) * 8


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_rows_that_codes_leave_are_scored_a_few_at_a_time(tmp_path: Path, dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values, queries = (Dense(torch.randn(n, 24, generator=generator)) for n in (3000, 9))
    found = []
    for limits in (Limits(), Limits(scan_scores=900, scan_numbers=4800)):
        with use_limits(limits), Store.build(tmp_path / str(limits.scan_scores)) as store:
            index = create_index(store, {"kind": "flat", "dtype": dtype})
            index.add(values)
            index.finish()
            store.publish()
        found.append(index.search(queries, 30))
    np.testing.assert_array_equal(found[0].rows, found[1].rows)
    np.testing.assert_array_equal(found[0].scores, found[1].scores)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_a_large_share_of_dense_vectors_is_found_exactly(tmp_path: Path, dtype: str) -> None:
    values = torch.randn(1500, 24, generator=torch.Generator().manual_seed(0))
    values = torch.cat([values[:700], values[:800]])  # ties go to the lower row
    with Store.build(tmp_path) as store:
        index = create_index(store, {"kind": "flat", "dtype": dtype})
        index.add(Dense(values))
        index.finish()
        store.publish()
        exact = score(Dense(values[:3]), index.representations(np.arange(1500))).numpy()
        hits = index.search(Dense(values[:3]), 400)
    order = np.argsort(-exact, axis=1, kind="stable")[:, :400]
    np.testing.assert_allclose(hits.scores, np.take_along_axis(exact, order, 1), rtol=1e-5, atol=1e-5)
    assert (hits.rows == order).mean() > 0.98  # rounding may swap neighbours


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    with Store.build(tmp_path) as store:
        index = create_index(store, INT8)
        with pytest.raises(BadValueError, match="holds dense, multi_vector, got sparse"):
            index.add(Sparse.from_dense(torch.eye(3)))
    with pytest.raises(ConfigError, match="dtype"):
        index_config({"kind": "flat", "dtype": "int4"})
