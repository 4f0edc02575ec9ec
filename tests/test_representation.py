"""Representations and the definition of relevance, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit import Dense, MultiVector, Ragged, Sparse, score
from irkit.core.representation import Representation, concat, representation_from_arrays
from irkit.core.scoring import score_pairs
from irkit.errors import BadTypeError, BadValueError

KINDS = ["dense", "multi_vector", "sparse"]
lengths_of_rows = st.lists(st.integers(0, 5), max_size=6)


def draw(kind: str, lengths: list[int], seed: int, dim: int = 7) -> Representation:
    generator = torch.Generator().manual_seed(seed)
    if kind == "dense":
        return Dense(torch.randn(len(lengths), dim, generator=generator))
    if kind == "multi_vector":
        return MultiVector(Ragged(torch.randn(sum(lengths), dim, generator=generator), torch.tensor(lengths)))
    rows = [torch.randperm(dim, generator=generator)[:length] for length in lengths]
    weights = torch.rand(sum(lengths), generator=generator) + 0.1
    return Sparse(Ragged.from_rows(rows, dtype=torch.int64), weights, dim)


def oracle(queries: Representation, documents: Representation) -> np.ndarray:
    scores = np.zeros((len(queries), len(documents)))
    for i in range(len(queries)):
        for j in range(len(documents)):
            if isinstance(queries, MultiVector) and isinstance(documents, MultiVector):
                q, d = (side.tokens[at].double().numpy() for side, at in ((queries, i), (documents, j)))
                scores[i, j] = sum((max((float(a @ b) for b in d), default=-np.inf)) for a in q)
            else:
                q, d = (
                    (side.values if isinstance(side, Dense) else side.to_dense())[at].double().numpy()
                    for side, at in ((queries, i), (documents, j))
                )
                scores[i, j] = q @ d
    return scores


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)  # the first call compiles
@given(q=lengths_of_rows, d=lengths_of_rows, seed=st.integers(0, 99))
def test_score_equals_the_definition(kind: str, q: list[int], d: list[int], seed: int) -> None:
    queries, documents = draw(kind, q, seed), draw(kind, d, seed + 1)
    scores = score(queries, documents)
    assert scores.dtype == torch.float32
    np.testing.assert_allclose(scores.numpy(), oracle(queries, documents), rtol=1e-5, atol=1e-5)
    if len(queries) == len(documents):
        np.testing.assert_allclose(score_pairs(queries, documents), scores.diagonal(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@given(lengths=lengths_of_rows, seed=st.integers(0, 99), data=st.data())
def test_selection_storage_and_concat(kind: str, lengths: list[int], seed: int, data: st.DataObject) -> None:
    item = draw(kind, lengths, seed)

    def same(one: Representation, other: Representation) -> bool:
        pairs = zip(one.arrays().items(), other.arrays().items(), strict=True)
        return all(a == b and np.array_equal(x, y) for (a, x), (b, y) in pairs)

    assert same(representation_from_arrays(kind, item.dim, item.arrays()), item)
    cut = data.draw(st.integers(0, len(lengths)))
    assert same(concat([item[:cut], item[cut:]]), item)
    order = torch.randperm(len(lengths))
    assert same(item[order][torch.argsort(order)], item)
    assert same(item.to("cpu", torch.float64).to(dtype=torch.float32), item)


@pytest.mark.parametrize("kind", KINDS)
def test_score_has_gradients(kind: str) -> None:
    queries, documents = draw(kind, [2, 1], 0), draw(kind, [1, 3, 2], 1)
    for side in (queries, documents):
        leaf = (
            side.values
            if isinstance(side, Dense)
            else side.tokens.values
            if isinstance(side, MultiVector)
            else side.weights
        )
        leaf.requires_grad_()
        (gradient,) = torch.autograd.grad(score(queries, documents).sum(), leaf)
        assert gradient.abs().sum() > 0


def test_sparse_round_trip_through_dense() -> None:
    dense = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 3.0]])
    assert torch.equal(Sparse.from_dense(dense).to_dense(), dense)


def test_bad_input_is_named() -> None:
    dense, other = Dense(torch.zeros(2, 3)), Dense(torch.zeros(2, 4))
    many = MultiVector(Ragged(torch.zeros(2, 3), torch.tensor([2])))
    with pytest.raises(BadTypeError, match="queries are Dense and documents are MultiVector"):
        score(dense, many)
    with pytest.raises(BadValueError, match="dimension 3 and documents 4"):
        score(dense, other)
    with pytest.raises(BadValueError, match="2 queries and 1 documents"):
        score_pairs(dense, dense[:1])
    with pytest.raises(BadValueError, match=r"shape \(n, dim\)"):
        Dense(torch.zeros(3))
    with pytest.raises(BadValueError, match="floating point"):
        Dense(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(BadTypeError, match="Dense: got None"):
        Dense(None)
    with pytest.raises(BadTypeError, match="Sparse: weights: got None"):
        Sparse(Ragged.from_rows([[1]]), None, 3)
    with pytest.raises(BadTypeError, match="got terms list and dim 3"):
        Sparse([[1]], torch.ones(1), 3)
    with pytest.raises(BadValueError, match=r"\(1,\) torch.int64"):
        Sparse(Ragged.from_rows([[1]]), torch.ones(1).long(), 3)
    with pytest.raises(BadTypeError, match="Ragged"):
        MultiVector(torch.zeros(2, 3))
    with pytest.raises(BadValueError, match="one kind and width"):
        concat([dense, other])
    with pytest.raises(BadValueError, match="one kind and width"):
        concat([])
    with pytest.raises(BadValueError, match=r"\[0, 3\), got 0\.\.5"):
        Sparse(Ragged.from_rows([[0, 5]]), torch.ones(2), 3)
    with pytest.raises(BadValueError, match="unknown kind"):
        representation_from_arrays("cloud", 3, {})
