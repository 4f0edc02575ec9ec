"""The head of learned sparse models: weights and gradients against plain torch, and the models it makes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from irkit.core.ragged import Ragged
from irkit.core.representation import Sparse
from irkit.core.scoring import score
from irkit.errors import BadTypeError, BadValueError, ConfigError
from irkit.heads import SparseConfig, SparseHead
from irkit.heads.masked_lm_parts import transform_layers
from irkit.model import Model
from irkit.retrieval.retriever import Retriever

POOLINGS = ["max", "sum"]
ACTIVATIONS = {
    "relu": torch.relu,
    "log1p_relu": lambda x: torch.relu(x).log1p(),
    "log1p_log1p_relu": lambda x: torch.relu(x).log1p().log1p(),
}
TEXTS = ["a neural search index", "", "the text of a model, in a vector", "index index text"]


def make(
    lengths: list[int], dim: int = 37, config: SparseConfig | None = None
) -> tuple[SparseHead, Ragged, Ragged]:
    """A head of random weights, hidden states (which want gradients) and ids."""
    torch.manual_seed(len(lengths) + dim)
    layers = transform_layers(8, width=6)
    weight, bias = nn.Parameter(torch.randn(dim, 6)), nn.Parameter(torch.randn(dim))
    nn.init.normal_(layers[2].bias)
    hidden = Ragged(torch.randn(sum(lengths), 8, requires_grad=True), torch.tensor(lengths))
    ids = hidden.with_values(torch.arange(sum(lengths)))
    return SparseHead(layers, weight, bias, config), hidden, ids


def naive(head: SparseHead, hidden: Ragged) -> torch.Tensor:
    values = hidden.values
    for layer in head.layers:
        values = layer(values)
    weights = ACTIVATIONS[head.config.activation](F.linear(values, head.weight, head.bias))
    rows = [weights[a:b] for a, b in zip(hidden.offsets[:-1], hidden.offsets[1:], strict=True)]
    if head.config.pooling == "sum":
        return torch.stack([row.sum(0) for row in rows])
    return torch.stack([row.amax(0) if len(row) else row.sum(0) for row in rows])


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_weights_and_gradients_equal_plain_torch(activation: str, pooling: str) -> None:
    config = SparseConfig(activation=activation, pooling=pooling)
    head, hidden, ids = make([3, 0, 1, 20], config=config)
    wanted = naive(head, hidden)
    result = head(hidden, ids)
    assert result.weights.requires_grad
    torch.testing.assert_close(result.to_dense(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(head.dense(hidden), wanted, rtol=1e-5, atol=1e-6)
    assert result.terms.lengths.tolist() == (wanted != 0).sum(1).tolist()

    upstream = torch.randn(wanted.shape)
    inputs = [hidden.values, *head.parameters()]
    expected = torch.autograd.grad((wanted * upstream).sum(), inputs)
    got = torch.autograd.grad((result.to_dense() * upstream).sum(), inputs)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@given(
    lengths=st.lists(st.integers(0, 9), max_size=6),
    dim=st.integers(1, 70),
    most=st.none() | st.integers(1, 80),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    pooling=st.sampled_from(POOLINGS),
)
@settings(deadline=None, max_examples=60)
def test_inference_gives_what_training_does(
    lengths: list[int], dim: int, most: int | None, activation: str, pooling: str
) -> None:
    config = SparseConfig(activation=activation, pooling=pooling, document_max_active_dims=most)
    head, hidden, ids = make(lengths, dim, config)
    trained = head(hidden, ids)
    with torch.inference_mode():
        inferred = head(hidden, ids)
    assert inferred.terms.lengths.tolist() == trained.terms.lengths.tolist()
    torch.testing.assert_close(inferred.to_dense(), trained.to_dense(), rtol=1e-5, atol=1e-6)
    assert (inferred.weights > 0).all()
    assert not len(inferred) or inferred.terms.max_length <= min(most or dim, dim)


def test_each_side_keeps_its_largest_weights() -> None:
    config = SparseConfig(query_max_active_dims=2, document_max_active_dims=5)
    head, hidden, ids = make([4, 7, 0], config=config)
    whole = head.dense(hidden).detach()
    for side, most in (("query", 2), ("document", 5)):
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                kept = head(hidden, ids, side=side).to_dense()
            for row, all_of_it in zip(kept.detach(), whole, strict=True):
                wanted = torch.zeros_like(row).scatter(
                    0, all_of_it.topk(most).indices, all_of_it.topk(most).values
                )
                torch.testing.assert_close(row, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("biased", [True, False])
def test_excluded_terms_have_neither_weights_nor_gradients(biased: bool) -> None:
    head, hidden, ids = make([4, 7])
    if not biased:
        head.bias = None
    before = head.dense(hidden).detach()
    head.exclude_([3, 0, 3])
    after = head(hidden, ids).to_dense()
    assert (before[:, [0, 3]] > 0).any()
    assert (after[:, [0, 3]] == 0).all()
    rest = [term for term in range(37) if term not in (0, 3)]
    torch.testing.assert_close(after[:, rest], before[:, rest])
    after.sum().backward()
    assert head.weight.grad is not None
    assert (head.weight.grad[[0, 3]] == 0).all()
    assert (head.weight.grad[rest] != 0).any()
    with pytest.raises(BadValueError, match=r"ids 5\.\.37, expected them in \[0, 37\)"):
        head.exclude_([5, 37])
    head.exclude_([])


def test_shapes_and_vocabularies_that_do_not_fit() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    with pytest.raises(BadValueError, match=r"weight and bias of shapes \[\(3, 2\), \(2,\)\]"):
        SparseHead([], weight, nn.Parameter(torch.ones(2)))
    with pytest.raises(BadValueError, match="2 terms, 2 of them distinct, for 3 rows"):
        SparseHead([], weight, vocabulary=["a", "b"])
    with pytest.raises(BadValueError, match="3 terms, 2 of them distinct, for 3 rows"):
        SparseHead([], weight, vocabulary=["a", "b", "a"])
    with pytest.raises(BadValueError, match="4 terms, 3 of them distinct, for 3 rows"):
        SparseHead([], weight, vocabulary=["a", "b", "c", "a"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pooling": "mean"}, "pooling: Input should be 'max' or 'sum', got 'mean'"),
        ({"activation": "gelu"}, "activation: Input should be 'log1p_relu'"),
        ({"query_max_active_dims": 0}, "query_max_active_dims: Input should be greater than 0"),
        ({"max_active_dims": 3}, "unknown key 'max_active_dims'; did you mean"),
    ],
)
def test_configurations_that_make_no_sense(tiny_bert: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Model.sparse(tiny_bert, given)


# ---- models ------------------------------------------------------------------------------------


def test_a_new_head_weighs_the_words_of_a_text_and_no_special_tokens(tiny_bert: Path) -> None:
    model = Model.sparse(tiny_bert, device="cpu")
    assert model.kind == "sparse"
    assert model.similarity_name == "dot"
    assert model.dim == len(model.vocabulary) == model.tokenizer.vocab_size
    assert model.vocabulary[:6] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]
    weights = model.encode(TEXTS).to_dense()
    assert (weights[:, :5] == 0).all()
    assert (weights[1] > 0).any()  # special tokens take part: an empty text is [CLS] [SEP]
    own = model.tokenizer.ids(["index", "text"])
    assert weights[3, own].mean() > 2 * weights[3].mean()  # the layer starts as the identity


def test_a_head_shares_the_word_embeddings_in_training(tiny_bert: Path) -> None:
    model = Model.sparse(tiny_bert, device="cpu").train()
    names = [name for name, _ in model.named_parameters()]
    assert "head.weight" not in names  # one parameter, which is that of the encoder
    assert model.head.weight is model.encoder.word_embeddings
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.head.weight.detach().clone()
    model(model.tokenizer(TEXTS)).weights.sum().backward()
    used = sorted(set(model.tokenizer(TEXTS).values.tolist()))
    gradient = model.head.weight.grad
    assert (gradient[used] != 0).any()
    assert (gradient != 0).any(1).sum() > len(used)  # terms that no text has: through the matrix
    optimizer.step()
    assert model.head.weight is model.encoder.word_embeddings
    assert not torch.equal(model.head.weight, before)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.encoder.word_embeddings


def test_a_growing_vocabulary_does_not_part_them(tiny_bert: Path) -> None:
    model = Model.sparse(tiny_bert, device="cpu")
    size = model.dim
    model.encoder.grow_(size + 2)
    assert model.head.weight is model.encoder.word_embeddings
    assert model.head.weight.shape == (size + 2, 32)
    torch.testing.assert_close(model.head.weight[size], model.head.weight[:size].mean(0))


@pytest.mark.parametrize(("dtype", "tied"), [("bfloat16", True), ("int8", True), ("auto", True)])
@pytest.mark.filterwarnings("ignore:bfloat16 on cpu")
def test_lower_precision_keeps_the_vectors(tiny_bert: Path, dtype: str, tied: bool) -> None:
    exact = Model.sparse(tiny_bert, device="cpu")
    model = Model.sparse(tiny_bert, device="cpu", dtype=dtype)
    assert (model.head.weight is model.encoder.word_embeddings) is tied
    ours, wanted = (each.encode(TEXTS).to_dense() for each in (model, exact))
    assert ours.dtype == torch.float32
    assert F.cosine_similarity(ours, wanted).min() > 0.99
    assert model.fingerprint == exact.fingerprint


def test_a_vocabulary_of_its_own(tiny_bert: Path) -> None:
    terms = ["neural search", "index", 'x "y"\n', "text"]
    plain = Model.sparse(tiny_bert, device="cpu")
    model = Model.sparse(tiny_bert, vocabulary=terms, device="cpu")
    assert model.vocabulary == terms
    assert model.dim == 4
    ids = model.tokenizer.ids(["neural", "search", "index"])
    torch.testing.assert_close(model.head.weight[0], plain.head.weight[ids[:2]].mean(0))
    whole = plain.encode(TEXTS).to_dense()
    torch.testing.assert_close(model.encode(TEXTS).to_dense()[:, 1], whole[:, ids[2]])
    other = Model.sparse(tiny_bert, vocabulary=[*terms[:3], "texts"], device="cpu")
    assert len({each.fingerprint for each in (plain, model, other)}) == 3


@pytest.mark.parametrize(
    ("vocabulary", "error", "message"),
    [
        (["a", ""], BadValueError, "the vocabulary has ''"),
        ([], BadValueError, "the vocabulary has no terms"),
        (["a", "a"], BadValueError, "2 terms, 1 of them distinct"),
        (["a", 3], BadTypeError, "text 1 is int"),
        ("abc", BadTypeError, "expected several strings"),
        ({"a": "b"}, BadTypeError, "expected several strings, got dict"),
    ],
)
def test_vocabularies_that_are_none(
    tiny_bert: Path, vocabulary: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Model.sparse(tiny_bert, vocabulary=vocabulary)


def test_options_of_encode(tiny_bert: Path) -> None:
    model = Model.sparse(tiny_bert, {"document_max_active_dims": 9, "query_max_active_dims": 4}, device="cpu")
    whole = model.encode(TEXTS)
    assert whole.is_sparse
    assert whole.shape == (4, model.dim)
    assert whole.is_coalesced()
    dense = whole.to_dense()
    assert dense.count_nonzero(1).tolist() == [9] * 4
    assert model.encode_query(TEXTS).to_dense().count_nonzero(1).tolist() == [4] * 4
    for most in (3, 20):  # more than the model says, too
        assert model.encode(TEXTS, max_active_dims=most).to_dense().count_nonzero(1).max() == most
    assert model.head.config.document_max_active_dims == 9
    rows = model.encode(TEXTS, convert_to_tensor=False)
    assert isinstance(rows, list)
    assert all(row.is_sparse for row in rows)
    assert torch.equal(torch.stack(rows).to_dense(), dense)
    plain = model.encode(TEXTS, convert_to_sparse_tensor=False)
    assert not plain.is_sparse
    assert torch.equal(plain, dense)
    one = model.encode(TEXTS[0])
    assert one.shape == (model.dim,)
    torch.testing.assert_close(one.to_dense(), dense[0], rtol=1e-5, atol=1e-6)
    assert model.encode([]).shape == (0, model.dim)
    for option in ("normalize_embeddings", "convert_to_numpy"):
        with pytest.raises(BadValueError, match=f"{option} does nothing for a sparse model"):
            model.encode(TEXTS, **{option: True})
    for most in (0, True, "3"):
        with pytest.raises(BadValueError, match="max_active_dims is"):
            model.encode(TEXTS, max_active_dims=most)


def test_what_only_sparse_models_have(tiny_bert: Path) -> None:
    with pytest.warns(UserWarning, match="mean of its tokens"):
        dense = Model.from_pretrained(tiny_bert)
    with pytest.raises(BadValueError, match="max_active_dims does nothing for a dense model"):
        dense.encode(TEXTS, max_active_dims=3)
    with pytest.raises(BadValueError, match="dense vectors, whose dimensions have no names"):
        _ = dense.vocabulary
    model = Model.sparse(tiny_bert)
    with pytest.raises(BadValueError, match="truncate_dim 8 of a sparse model"):
        Model(model.tokenizer, model.encoder, model.head, truncate_dim=8)
    with pytest.raises(BadValueError, match="similarity 'maxsim', expected one of dot, cosine"):
        Model(model.tokenizer, model.encoder, model.head, similarity_name="maxsim")


@pytest.mark.parametrize("name", ["dot", "cosine", "euclidean", "manhattan"])
def test_similarities(tiny_bert: Path, name: str) -> None:
    parts = Model.sparse(tiny_bert, device="cpu")
    model = Model(parts.tokenizer, parts.encoder, parts.head, similarity_name=name)
    a, b = model.encode_query(TEXTS[:3]), model.encode_document(TEXTS[1:])
    x, y = a.to_dense(), b.to_dense()
    wanted = {
        "dot": x @ y.T,
        "cosine": F.cosine_similarity(x[:, None], y[None], dim=2),
        "euclidean": -torch.linalg.vector_norm(x[:, None] - y[None], dim=2),
        "manhattan": -(x[:, None] - y[None]).abs().sum(2),
    }[name]
    for left, right in ((a, b), (x, b), (list(a), y), (x.tolist(), b), (a, y.numpy())):
        torch.testing.assert_close(model.similarity(left, right), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            model.similarity_pairwise(left, right), wanted.diagonal(), rtol=1e-4, atol=1e-4
        )
    torch.testing.assert_close(model.similarity(a[0], b), wanted[:1], rtol=1e-4, atol=1e-4)
    if name in ("dot", "cosine"):
        represented = [
            model.encode_representation(TEXTS[:3], "query"),
            model.encode_representation(TEXTS[1:], "document"),
        ]
        torch.testing.assert_close(score(*represented), wanted, rtol=1e-4, atol=1e-4)
    else:
        with pytest.raises(BadValueError, match="no inner product"):
            model.encode_representation(TEXTS, "query")


def test_push_to_hub_names_the_class_that_opens_it(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("irkit.model.model.upload", lambda *args: calls.append(args) or "address")
    assert Model.sparse(tiny_bert).push_to_hub("me/mine") == "address"
    assert calls[0][1:3] == ("SparseEncoder", "me/mine")


def test_search_end_to_end(tiny_bert: Path, tmp_path: Path) -> None:
    config = {"document_max_active_dims": 30, "query_max_active_dims": 10}
    model = Model.sparse(tiny_bert, config, device="cpu")
    documents = {"1": "a neural index", "2": "search text in a vector", "3": "the model of the token"}
    retriever = Retriever.build(model, documents, tmp_path / "index", index="flat")
    (hits,) = retriever.search(["text vector"], k=3)
    queries, rows = (
        model.encode_representation(["text vector"], "query"),
        model.encode_representation(documents.values(), "document"),
    )
    assert isinstance(rows, Sparse)
    assert rows.terms.max_length == 30
    scores = score(queries, rows)[0]
    order = scores.argsort(descending=True).tolist()
    assert [hit.id for hit in hits] == [list(documents)[place] for place in order]
    torch.testing.assert_close(torch.tensor([hit.score for hit in hits]), scores[order])
