"""Other comparisons of token vectors in training: where they start, what trains, what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit import Model, MultiVector, Ragged
from irkit.core.late_interaction import mean_maxsim, xtr_in_batch
from irkit.core.token_selection import temporal_pooling
from irkit.errors import ConfigError, CorruptError, StorageError
from irkit.training.example import Batch
from irkit.training.interaction import (
    MVA,
    XTR,
    MaxSim,
    PooledAttention,
    load_interaction,
    make_interaction,
)
from irkit.training.losses import InfoNCE
from irkit.training.model_recipe import MultiVectorModel, make_model
from irkit.training.train_step import TrainStep

POOLINGS: list[dict[str, Any]] = [
    {},
    {"dim": 5},
    {"pooling": "first_k", "size": 3},
    {"pooling": "multiple_cls", "size": 3},
    {"pooling": "temporal", "size": 2, "dim": 6},
    {"dim": 5, "heads": 2, "query_classes": 2},
]


def vectors(lengths: list[int], seed: int, width: int = 8) -> MultiVector:
    generator = torch.Generator().manual_seed(seed)
    values = torch.nn.functional.normalize(torch.randn(sum(lengths), width, generator=generator), dim=1)
    return MultiVector(Ragged(values, torch.tensor(lengths)))


def model_of(tiny_bert: Path, **options: Any) -> Model:
    torch.manual_seed(0)
    return Model.multi_vector(tiny_bert, {"dim": 8}, {"document_length": 24}, device="cpu", **options)


def batch_of(model: Model) -> Batch:
    queries = ["neural index", "gnu search"]
    documents = ["neural search of tokens", "index of vectors", "text of the gnu", "cab"]
    tokens = [
        model.pipeline(side).tokenize(texts) for texts, side in ((queries, "query"), (documents, "document"))
    ]
    own = torch.tensor([[0, 1], [2, 3]])
    relevant = torch.tensor([[True, False, False, False], [False, False, True, False]])
    return Batch(tokens[0], tokens[1], own, torch.ones(2, dtype=torch.int64), relevant, torch.arange(4))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.integers(0, 2**16),
)
def test_attention_starts_between_the_mean_and_the_maximum(q: list[int], d: list[int], seed: int) -> None:
    queries, documents = vectors(q, seed), vectors(d, seed + 1)
    scores, best = PooledAttention(8, MVA())(queries, documents), mean_maxsim(queries, documents)
    assert (scores <= best + 1e-5).all()
    if all(length == 1 for length in d):  # one token is all there is
        torch.testing.assert_close(scores, best)
    orthogonal = MultiVector(Ragged.from_rows([torch.eye(8)]))
    assert mean_maxsim(orthogonal, orthogonal).item() == 1
    assert PooledAttention(8, MVA())(orthogonal, orthogonal).item() > 0.99


def test_the_sharpness_does_not_depend_on_the_width() -> None:
    tokens = MultiVector(Ragged.from_rows([torch.eye(8)]))
    for options in POOLINGS[:2]:
        attention = PooledAttention(8, MVA(**options))
        keys, values = attention.project_queries(tokens).tokens.values.chunk(2, 1)
        dim = keys.shape[1]
        assert (keys.square().sum(1).mean() / dim**0.5).item() == pytest.approx(20)
        assert values.square().sum(1).mean().item() == pytest.approx(1)


def test_joined_tokens_start_as_their_mean() -> None:
    queries, documents = vectors([3], 0), vectors([4, 5], 1)
    attention = PooledAttention(8, MVA(pooling="temporal", size=2))
    joined = temporal_pooling(documents.tokens, 2)
    means = MultiVector(joined.with_values(joined.values.view(-1, 2, 8).mean(1)))
    torch.testing.assert_close(attention(queries, documents), PooledAttention(8, MVA())(queries, means))


@pytest.mark.parametrize("options", POOLINGS)
def test_without_gradients_memory_is_bounded(options: Any) -> None:
    queries, documents = vectors([3, 0, 6, 1, 2], 0), vectors([4, 0, 5, 9], 1)
    attention = PooledAttention(8, MVA(**options))
    whole = attention(queries, documents)
    attention.max_pairs = 20
    with torch.no_grad():
        torch.testing.assert_close(attention(queries, documents), whole)


@pytest.mark.parametrize("options", POOLINGS)
def test_it_is_trained_saved_and_loaded(options: Any, tiny_bert: Path, tmp_path: Path) -> None:
    model = model_of(tiny_bert)
    model.name = "a model"
    step = TrainStep(model, [InfoNCE()], interaction=make_interaction(MVA(**options), model))
    batch = batch_of(model)
    optimizer = torch.optim.SGD(step.parameters(), 0.05)
    losses = []
    for _ in range(8):
        loss = step(batch)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(weight.grad is not None for weight in step.interaction.parameters())
        optimizer.step()
    assert losses[-1] < losses[0]
    step.save_pretrained(tmp_path / "model")
    again, loaded = Model.from_pretrained(tmp_path / "model"), load_interaction(tmp_path / "model")
    assert (loaded.config, loaded.fingerprint) == (MVA(**options), again.fingerprint)
    assert model.name == "a model"
    queries, documents = (
        again.encode_representation(["neural index", "gnu"], "query"),
        again.encode_representation(["neural search", "a token"], "document"),
    )
    texts = (("query", ["neural index", "gnu"]), ("document", ["neural search", "a token"]))
    wanted = [model.eval().encode_representation(some, side) for side, some in texts]
    torch.testing.assert_close(loaded(queries, documents), step.interaction(*wanted))
    if options.get("pooling") == "multiple_cls":
        ids = again.pipeline("document").tokenize(["gnu"])[0].tolist()
        assert again.tokenizer.tokens(max(ids) + 1)[ids[1]] == "[D_CLS]"
        assert len(set(ids[1:3])) == 1
        assert len(set(ids[:4])) == 3
        assert again.prompts["document"] == model.prompts["document"]
        make_interaction(MVA(**options), again)  # trained further, it does not get more
        assert again.prompts["document"] == model.prompts["document"]
        assert again.max_length("document") == model.max_length("document") == 24 + 2


def test_class_tokens_of_queries_are_what_is_compared(tiny_bert: Path) -> None:
    model = model_of(tiny_bert)
    model.set_length("query", 12)
    attention = make_interaction(MVA(query_classes=3), model)
    assert isinstance(attention, PooledAttention)
    ids = model.pipeline("query").tokenize(["gnu"])[0].tolist()
    first, learned = model.tokenizer.ids(["[CLS]", "[Q_CLS]"])
    assert ids[:3] == [first, learned, learned]
    assert ids.count(learned) == 2
    words = model.encoder.word_embeddings
    assert words[learned].equal(words[first])  # at first
    assert model.max_length("query") == 12 + 2
    assert model.prompts.get("document", "") == ""
    queries = model.encode_representation(["gnu", "neural index of vectors"], "query")
    assert attention.project_queries(queries).tokens.lengths.tolist() == [3, 3]


def test_raw_hidden_states_start_as_a_new_layer_does(tiny_bert: Path, tmp_path: Path) -> None:
    """Without vectors of length 1 there is no MaxSim to begin with; the saved model makes them again."""
    torch.manual_seed(0)
    model = make_model(MultiVectorModel(name=str(tiny_bert), projection=None, normalize=False))
    vectors = model.encode_representation(["neural index"], "document").tokens.values
    assert not torch.allclose(vectors.norm(dim=1), torch.ones(len(vectors)))
    attention = make_interaction(MVA(dim=64, heads=2), model)
    assert isinstance(attention, PooledAttention)
    assert attention.document_key.weight.std().item() == pytest.approx(0.02, rel=0.1)
    model.save_pretrained(tmp_path / "raw")
    again = Model.from_pretrained(tmp_path / "raw").encode_representation(["neural index"], "document")
    torch.testing.assert_close(again.tokens.values, vectors)


def test_class_tokens_take_no_room_from_the_text(tiny_bert: Path) -> None:
    def ordinary(model: Model) -> list[int]:
        ids = model.pipeline("document").tokenize(["neural search of vectors " * 20])[0].tolist()
        return [number for number in ids if number not in model.tokenizer.special_tokens()]

    plain, model = ordinary(model_of(tiny_bert)), model_of(tiny_bert)
    assert len(plain) == 24 - 2
    for size in (1, 4, 6, 2):  # of one training after another
        make_interaction(MVA(pooling="multiple_cls", size=size), model)
        assert ordinary(model) == plain
        assert model.max_length("document") == 24 + size - 1
    model.prompts["document"] += "search "  # which does, as every prompt
    assert len(ordinary(model)) == len(plain)
    assert ordinary(model)[1:] == plain[:-1]
    make_interaction(MVA(pooling="multiple_cls", size=3), model)
    assert ordinary(model)[1:] == plain[:-1]
    with pytest.raises(ConfigError, match=r"58 class tokens more make texts of 84 tokens.* 64 positions"):
        make_interaction(MVA(pooling="multiple_cls", size=61), model)
    assert model.max_length("document") == 26  # nothing was changed


def test_xtr_counts_retrieved_tokens_in_training_alone(tiny_bert: Path, tmp_path: Path) -> None:
    model = model_of(tiny_bert)
    interaction = make_interaction(XTR(k=3), model)
    assert interaction is not None
    queries, documents = vectors([3, 2], 0), vectors([4, 5, 2], 1)
    torch.testing.assert_close(interaction(queries, documents), xtr_in_batch(queries, documents, 3))
    interaction.eval()
    torch.testing.assert_close(interaction(queries, documents), mean_maxsim(queries, documents))
    step = TrainStep(model, [InfoNCE()], interaction=interaction.train())
    step(batch_of(model)).backward()
    assert model.head.layers[0].linear.weight.grad.abs().max() > 0
    step.save_pretrained(tmp_path / "model")
    with pytest.raises(StorageError, match="not trained with attention"):
        load_interaction(tmp_path / "model")


def test_maxsim_needs_nothing(tiny_bert: Path) -> None:
    assert make_interaction(MaxSim(), model_of(tiny_bert)) is None


def test_what_does_not_fit_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    for wrong in (
        {"pooling": "first_k"},
        {"size": 3},
        {"pooling": "max", "size": 3},
        {"dim": 0},
        {"pooling": "temporal", "size": 0},
    ):
        with pytest.raises(ConfigError):
            MVA(**wrong)
    with pytest.raises(ConfigError, match="missing key 'k'"):
        XTR()
    with pytest.warns(UserWarning, match="mean"):
        dense = Model.from_pretrained(tiny_bert)
    for config in (MVA(), XTR(k=2)):
        with pytest.raises(ConfigError, match="the model makes dense ones"):
            make_interaction(config, dense)
    averaged = model_of(tiny_bert)
    averaged.similarity_name = "meanmaxsim"
    with pytest.raises(ConfigError, match="is a mean itself"):
        make_interaction(MVA(), averaged)


def test_damaged_files_are_noticed(tmp_path: Path) -> None:
    PooledAttention(8, MVA(dim=4)).save_pretrained(tmp_path)
    config = tmp_path / "interaction" / "config.json"
    config.write_text(config.read_text().replace('"dim": 4', '"dim": 5'))
    with pytest.raises(CorruptError, match="its weights are not those"):
        load_interaction(tmp_path)
    config.write_text('{"kind": "mva", "dims": 4}')
    with pytest.raises(ConfigError, match="did you mean 'dim'"):
        load_interaction(tmp_path)
    config.unlink()
    with pytest.raises(StorageError):
        load_interaction(tmp_path)
