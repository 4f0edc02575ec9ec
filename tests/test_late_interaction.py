"""Interactions against loops written from the papers, peers, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from irkit import Dense, MultiVector, Ragged, score
from irkit.core.late_interaction import (
    MultiVectorAttention,
    mean_maxsim,
    xtr,
    xtr_in_batch,
    xtr_ranking,
)
from irkit.core.token_selection import first_tokens, prepend, temporal_pooling
from irkit.errors import BadTypeError, BadValueError, CorruptError, StorageError

WIDTH = 4
sizes = st.lists(st.integers(0, 5), min_size=1, max_size=5)
seeds = st.integers(0, 2**16)


def vectors(lengths: list[int], seed: int, width: int = WIDTH) -> MultiVector:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), width, generator=generator, dtype=torch.float64)
    return MultiVector(Ragged(values, torch.tensor(lengths)))


def retrieved(queries: MultiVector, documents: MultiVector, k: int) -> list[list[list[tuple[float, int]]]]:
    """Per query and token: the best k (similarity, document), best first."""
    tokens = [(token, row) for row, document in enumerate(documents.tokens) for token in document]
    return [
        [
            sorted(((float(token @ other), row) for other, row in tokens), key=lambda pair: -pair[0])[:k]
            for token in query
        ]
        for query in queries.tokens
    ]


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, st.integers(1, 30), seeds)
def test_xtr_is_what_the_paper_says(q: list[int], d: list[int], k: int, seed: int) -> None:
    queries, documents = vectors(q, seed), vectors(d, seed + 1)
    found = retrieved(queries, documents, k)
    imputed, trained = (np.zeros((len(q), len(d))) for _ in range(2))
    for i, tokens in enumerate(found):
        for j in range(len(d)):
            best = [max((s for s, row in hits if row == j), default=None) for hits in tokens]
            lowest = [hits[-1][0] if hits else 0.0 for hits in tokens]
            there = [b for b in best if b is not None]
            if q[i] and not d[j]:
                imputed[i, j] = trained[i, j] = -math.inf
            elif q[i]:
                filled = [low if b is None else b for b, low in zip(best, lowest, strict=True)]
                imputed[i, j] = sum(filled) / q[i]
                trained[i, j] = sum(there) / max(len(there), 1)
    np.testing.assert_allclose(xtr(queries, documents, k).numpy(), imputed, rtol=1e-9)
    np.testing.assert_allclose(xtr_in_batch(queries, documents, k).numpy(), trained, rtol=1e-9)


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, seeds)
def test_xtr_that_retrieves_everything_is_mean_maxsim(q: list[int], d: list[int], seed: int) -> None:
    queries, documents = vectors(q, seed), vectors(d, seed + 1)
    everything = max(1, sum(d))
    expected = mean_maxsim(queries, documents).double()
    torch.testing.assert_close(xtr(queries, documents, everything), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(xtr_in_batch(queries, documents, everything), expected, rtol=1e-5, atol=1e-5)
    lengths = queries.tokens.lengths.clamp(min=1)[:, None]
    torch.testing.assert_close(score(queries, documents), (expected * lengths).float(), rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), sizes, st.integers(1, 12), seeds)
def test_xtr_ranking_of_what_an_index_finds(q: int, d: list[int], k: int, seed: int) -> None:
    queries, documents = vectors([q], seed), vectors(d, seed + 1)
    similarity = queries.tokens.values @ documents.tokens.values.T
    values, places = similarity.topk(min(k, similarity.shape[1]), dim=1)
    owners = documents.tokens.row_ids()[places]
    nothing = torch.full((q, 2), -1)  # an index that found fewer than were asked for
    ids, scores = xtr_ranking(
        torch.cat([values, nothing.double() * math.inf], dim=1), torch.cat([owners, nothing], dim=1)
    )
    assert sorted(ids.tolist()) == sorted(set(owners.flatten().tolist()))
    torch.testing.assert_close(scores, xtr(queries, documents, k)[0][ids], rtol=1e-12, atol=0)
    assert scores.tolist() == sorted(scores.tolist(), reverse=True)


def test_xtr_ranking_breaks_ties_by_document() -> None:
    ids, scores = xtr_ranking(torch.tensor([[0.5, 0.5, 0.25]]), torch.tensor([[9, 4, 6]]))
    assert (ids.tolist(), scores.tolist()) == ([4, 9, 6], [0.5, 0.5, 0.25])


def test_xtr_in_batch_agrees_with_sentence_transformers() -> None:
    peer = pytest.importorskip("sentence_transformers.multi_vector_encoder.scoring.xtr")
    queries, documents = vectors([3, 3], 0), vectors([4, 4, 4, 4], 1)
    padded = documents.tokens.values.reshape(2, 2, 4, WIDTH)
    expected = peer.xtr_scores(queries.tokens.values.reshape(2, 3, WIDTH), padded, top_k=5)
    torch.testing.assert_close(xtr_in_batch(queries, documents, 5).float(), expected)


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, seeds)
def test_attention_is_what_the_paper_says(q: list[int], d: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    attention = MultiVectorAttention(WIDTH, dim=3).double()
    queries, documents = vectors(q, seed), vectors(d, seed + 1)
    expected = torch.zeros(len(q), len(d), dtype=torch.float64)
    for i, x in enumerate(queries.tokens):
        for j, y in enumerate(documents.tokens):
            if len(x) and not len(y):
                expected[i, j] = -math.inf
            elif len(x):
                keys = torch.softmax(
                    attention.query_key(x) @ attention.document_key(y).T / math.sqrt(3), dim=1
                )
                expected[i, j] = (
                    (attention.query_value(x) * (keys @ attention.document_value(y))).sum(1).mean()
                )
    torch.testing.assert_close(attention(queries, documents), expected, rtol=1e-9, atol=1e-12)


def test_heads_attend_on_their_own_and_are_added(tmp_path: Path) -> None:
    attention = MultiVectorAttention(WIDTH, dim=3, heads=2)
    queries, documents = (
        side.to(dtype=torch.float32) for side in (vectors([2, 0, 4], 0), vectors([3, 5], 1))
    )
    expected = torch.zeros(3, 2)
    for head in range(2):
        one = MultiVectorAttention(WIDTH, dim=3)
        rows = slice(3 * head, 3 * head + 3)
        one.load_state_dict({name: weight[rows] for name, weight in attention.state_dict().items()})
        expected += one(queries, documents)
    torch.testing.assert_close(attention(queries, documents), expected)
    attention.save_pretrained(tmp_path)
    again = MultiVectorAttention.from_pretrained(tmp_path, heads=2)
    torch.testing.assert_close(again(queries, documents), expected)
    with pytest.raises(BadValueError, match="heads is 0"):
        MultiVectorAttention(WIDTH, heads=0)


def test_attention_does_not_overflow() -> None:
    attention = MultiVectorAttention(WIDTH)
    queries, documents = vectors([2], 0), vectors([3], 1)
    big = MultiVector(queries.tokens.with_values(queries.tokens.values.float() * 1e4))
    assert attention(big, documents.to(dtype=torch.float32)).isfinite().all()


@pytest.mark.parametrize(
    "interaction",
    [
        lambda q, d: xtr(q, d, 3),
        lambda q, d: xtr_in_batch(q, d, 3),
        MultiVectorAttention(WIDTH, dim=2).double(),
        lambda q, d: attention_on_pooled(q, d),
    ],
    ids=["xtr", "xtr_in_batch", "attention", "pooled"],
)
def test_gradients(interaction: Callable[[MultiVector, MultiVector], Tensor]) -> None:
    queries, documents = vectors([2, 3], 0), vectors([3, 1, 4], 1)
    weights = torch.randn(2, 3, dtype=torch.float64)

    def loss(q: Tensor, d: Tensor) -> Tensor:
        scores = interaction(
            MultiVector(queries.tokens.with_values(q)), MultiVector(documents.tokens.with_values(d))
        )
        return scores * weights

    q = queries.tokens.values.requires_grad_()
    d = documents.tokens.values.requires_grad_()
    assert torch.autograd.gradcheck(loss, (q, d))


def attention_on_pooled(queries: MultiVector, documents: MultiVector) -> Tensor:
    torch.manual_seed(3)
    attention = MultiVectorAttention(WIDTH, dim=2, document_width=2 * WIDTH).double()
    return attention(queries, MultiVector(temporal_pooling(first_tokens(documents.tokens, 3), 2)))


def test_gradients_of_the_projections() -> None:
    attention = MultiVectorAttention(WIDTH, dim=2).double()
    names, values = zip(*attention.named_parameters(), strict=True)
    queries, documents = vectors([2, 1], 0), vectors([3, 2], 1)

    def output(*weights: Tensor) -> Tensor:
        parameters = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(attention, parameters, (queries, documents))

    assert len(values) == 4
    assert torch.autograd.gradcheck(output, values)


def test_only_retrieved_tokens_are_trained() -> None:
    documents = MultiVector(
        Ragged.from_rows([torch.tensor([[1.0, 0], [0.5, 0]]), torch.tensor([[0.8, 0.0]])])
    )
    values = documents.tokens.values.requires_grad_()
    queries = MultiVector(Ragged.from_rows([torch.tensor([[1.0, 0]])]))
    xtr_in_batch(queries, documents, 2).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1, 0], [0, 0], [1, 0]]


def test_attention_is_trained_stored_and_loaded(tmp_path: Path) -> None:
    attention = MultiVectorAttention(WIDTH, dim=2, document_width=2 * WIDTH)
    attention.save_pretrained(tmp_path / "a")
    loaded = MultiVectorAttention.from_pretrained(tmp_path / "a")
    queries = vectors([2, 3], 0).to(dtype=torch.float32)
    documents = MultiVector(temporal_pooling(vectors([4, 1], 1).tokens, 2)).to(dtype=torch.float32)
    assert torch.equal(loaded(queries, documents), attention(queries, documents))
    stored = loaded.project_documents(documents)
    assert stored.dim == 4
    assert torch.equal(loaded.attend(loaded.project_queries(queries), stored), attention(queries, documents))


def test_attention_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="found neither"):
        MultiVectorAttention.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(CorruptError):
        MultiVectorAttention.from_pretrained(tmp_path)
    other = MultiVectorAttention(2)
    del other.query_key
    other.save_pretrained(tmp_path)
    with pytest.raises(CorruptError, match=r"no MultiVectorAttention.*query_key"):
        MultiVectorAttention.from_pretrained(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="saving"):
        MultiVectorAttention(2).save_pretrained(tmp_path / "file")


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 4), seeds)
def test_poolings(lengths: list[int], k: int, seed: int) -> None:
    rows = vectors(lengths, seed).tokens
    for row, first, joined in zip(rows, first_tokens(rows, k), temporal_pooling(rows, k), strict=True):
        assert torch.equal(first, row[:k])
        flat = joined.flatten()
        assert len(joined) == math.ceil(len(row) / k)
        assert torch.equal(flat[: row.numel()], row.flatten())
        assert not flat[row.numel() :].any()
    cls = torch.randn(k, WIDTH, dtype=torch.float64)
    longer = prepend(rows, cls)
    assert all(torch.equal(new, torch.cat([cls, row])) for new, row in zip(longer, rows, strict=True))
    assert all(torch.equal(row, cls) for row in first_tokens(longer, k))


def test_embeddings_put_before_every_row_are_trained() -> None:
    cls = torch.zeros(2, WIDTH, dtype=torch.float64, requires_grad=True)
    prepend(vectors([1, 0, 2], 0).tokens, cls).values.sum().backward()
    assert cls.grad is not None
    assert cls.grad.tolist() == [[3.0] * WIDTH] * 2


def test_what_is_refused() -> None:
    queries, documents = vectors([1], 0), vectors([2], 0)
    with pytest.raises(BadTypeError, match="xtr: got Dense and MultiVector"):
        xtr(Dense(torch.eye(4)), documents, 1)  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="dimension 4 and documents 5"):
        mean_maxsim(queries, vectors([1], 0, width=5))
    with pytest.raises(BadValueError, match="MultiVectorAttention: got vectors of width 4, expected 5"):
        MultiVectorAttention(5)(queries, documents)
    with pytest.raises(BadTypeError, match="MultiVectorAttention: got Dense and MultiVector"):
        MultiVectorAttention(WIDTH)(Dense(torch.eye(4)), documents)  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="k is 0, expected 1"):
        xtr(queries, documents, 0)
    with pytest.raises(BadValueError, match="k is 0, expected 1"):
        first_tokens(queries.tokens, 0)
    with pytest.raises(BadValueError, match="factor is 0, expected 1"):
        temporal_pooling(queries.tokens, 0)
    with pytest.raises(BadValueError, match=r"prepend: values have shape \(1, 5\), expected \(k, \*\(4,\)\)"):
        prepend(queries.tokens, torch.zeros(1, 5))
    for count in ("3", 2.5, True):
        with pytest.raises(BadTypeError, match=f"xtr: k is {count!r}, expected a whole number"):
            xtr(queries, documents, count)  # type: ignore[arg-type]
    with pytest.raises(BadTypeError, match=r"temporal_pooling: factor is 1\.5, expected a whole number"):
        temporal_pooling(queries.tokens, 1.5)  # type: ignore[arg-type]
    assert xtr(queries, documents, np.int64(1)).shape == (1, 1)  # type: ignore[arg-type]
    for name, sizes in (("width", (0,)), ("dim", (4, 0)), ("dim", (4, -1)), ("document_width", (4, 2, 0))):
        with pytest.raises(BadValueError, match=f"MultiVectorAttention: {name} is {sizes[-1]}, expected 1"):
            MultiVectorAttention(*sizes)
    with pytest.raises(BadTypeError, match="xtr_ranking: got list and list, expected two tensors"):
        xtr_ranking([[1.0]], [[1]])  # type: ignore[arg-type]
    with pytest.raises(BadTypeError, match=r"documents are torch\.float32, expected integers"):
        xtr_ranking(torch.zeros(1, 1), torch.zeros(1, 1))
    with pytest.raises(BadValueError, match="two equal shapes"):
        xtr_ranking(torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.int64))
