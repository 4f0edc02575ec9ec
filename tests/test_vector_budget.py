"""A fixed number of vectors a document: the clusters, their gradients, and models that have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from irkit import Model
from irkit.core.ragged import Ragged
from irkit.core.representation import MultiVector
from irkit.errors import ConfigError, CorruptError
from irkit.heads.multi_vector_config import TokenPooling
from irkit.heads.token_pooling import pool_rows
from irkit.heads.vector_budget import attention_clusters

TEXTS = ["a neural model of text in the vector index", "", "search", "the token of the index in the text"]


def define(states: Tensor, vectors: Tensor, query: Tensor, most: int) -> Tensor:
    """The clusters of one row, token by token."""
    if len(states) <= most:
        return vectors
    scores = states @ (states.mean(0) + query) / states.shape[1] ** 0.5
    weights = scores.softmax(0)
    chosen = sorted(scores.argsort(descending=True)[:most].tolist())
    sums, totals = torch.zeros(most, vectors.shape[1]), torch.zeros(most)
    for token in range(len(states)):
        cluster = int((vectors[chosen] @ vectors[token]).argmax())
        cluster = chosen.index(token) if token in chosen else cluster
        sums[cluster] += weights[token].detach() * vectors[token]
        totals[cluster] += weights[token].detach()
    return sums / totals[:, None]


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    most=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_clusters_are_those_of_the_definition(lengths: list[int], most: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    states = Ragged(torch.randn(sum(lengths), 5, generator=generator), torch.tensor(lengths))
    vectors = states.with_values(torch.randn(sum(lengths), 3, generator=generator))
    query = torch.randn(5, generator=generator)
    found = attention_clusters(states, vectors, query, most)
    assert found.lengths.tolist() == [min(length, most) for length in lengths]
    for got, row, tokens in zip(found, states, vectors, strict=True):
        torch.testing.assert_close(got, define(row, tokens, query, most), rtol=1e-4, atol=1e-5)


def test_gradients_reach_the_vectors_and_what_attends() -> None:
    torch.manual_seed(0)
    states = Ragged(torch.randn(9, 4), torch.tensor([7, 2]))
    vectors, query = torch.randn(9, 4, requires_grad=True), torch.zeros(4, requires_grad=True)
    attention_clusters(states, states.with_values(vectors), query, 3).values.square().sum().backward()
    assert (vectors.grad.abs().sum(1) > 0).all()
    assert query.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_in_bfloat16_finds_the_same_clusters(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    states = Ragged(torch.randn(60, 5).to(dtype), torch.tensor([40, 3, 17]))
    vectors = states.with_values(torch.nn.functional.normalize(torch.randn(60, 6)).to(dtype))
    query = torch.randn(5)
    expected = attention_clusters(states, vectors, query, 4), pool_rows(vectors, 2, most=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention_clusters(states, vectors, query, 4), pool_rows(vectors, 2, most=4)
    for got, wanted in zip(found, expected, strict=True):
        assert got.values.dtype == dtype
        torch.testing.assert_close(got.values, wanted.values, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:saving a model:UserWarning")
@pytest.mark.parametrize("method", ["attention", "ward"])
def test_models_with_a_budget(method: str, tiny_bert: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    pooling = {"method": method, "vectors": 3}
    model = Model.multi_vector(
        tiny_bert, {"dim": 8}, config={"token_pooling": pooling, "skiplist_words": []}, device="cpu"
    )
    rows = model.encode_representation(TEXTS, "document")
    assert isinstance(rows, MultiVector)
    assert all(len(row) <= 3 for row in rows.tokens)
    assert len(rows.tokens[0]) == 3
    torch.testing.assert_close(rows.tokens.values.norm(dim=1), torch.ones(len(rows.tokens.values)))
    queries = model.encode_representation(TEXTS, "query")
    assert isinstance(queries, MultiVector)
    assert len(queries.tokens[0]) > 3
    if method == "attention":  # as training leaves it
        model.head.attending.data.normal_()
        rows = model.encode_representation(TEXTS, "document")
        learned = model.head.attending.clone()
        for vectors in (2, 3):  # as an evaluation measures it with another budget
            model.head.pool_tokens(TokenPooling(method="attention", vectors=vectors))
            assert torch.equal(model.head.attending, learned)
    model.save_pretrained(tmp_path / "model")
    again = Model.from_pretrained(tmp_path / "model", device="cpu")
    assert again.head.config.token_pooling == model.head.config.token_pooling
    found: Any = again.encode_representation(TEXTS, "document")
    assert torch.equal(found.tokens.values, rows.tokens.values)
    if method == "attention":
        weights = next((tmp_path / "model").glob("*TokenPooling/model.safetensors"))
        weights.unlink()
        with pytest.raises((CorruptError, Exception), match="TokenPooling"):
            Model.from_pretrained(tmp_path / "model", device="cpu")


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ({"method": "attention"}, "needs vectors"),
        ({"vectors": 1}, "no more than the 1 protected_tokens"),
        ({"vectors": 0}, "vectors"),
        ({"method": "other", "vectors": 3}, "method"),
    ],
)
def test_refused(pooling: dict[str, Any], message: str, tiny_bert: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Model.multi_vector(tiny_bert, {"dim": 8}, config={"token_pooling": pooling}, device="cpu")
