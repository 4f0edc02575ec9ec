"""Models that were trained without pooling and are given a schedule: vectors, files, explanations, errors."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from irkit import Ragged
from irkit.encoder import Encoder, Pooling
from irkit.errors import BadValueError, ConfigError
from irkit.heads import MultiVectorHead, Normalize
from irkit.heads.multi_vector_head import windows
from irkit.model import Model
from irkit.model.hardware import _SENTENCES, _vectors
from irkit.model.hub import _card
from irkit.model.pooling import PoolingChoice
from irkit.retrieval.explanation import explain
from irkit.retrieval.retriever import Retriever
from irkit.training.interaction import MVA, make_interaction
from irkit.training.model_recipe import PretrainedModel, make_model
from irkit.training.train_recipe import TrainRecipe

TEXTS = [
    "the index of a search model",
    "a token in the text, a vector on the index! neural search?",
    "model",
    "",
    "of the neural model in a text on search, the vector of the token and the index of the text",
]
_TOKENS = {"flat": ("tokens",), "plaid": ("codes", "residuals")}
LENGTHS = [8, 17, 3, 2, 24]  # with [CLS] and [SEP]


def families() -> dict[str, dict[str, Any]]:
    sizes = {"vocab_size": 80, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    common = sizes | {"intermediate_size": 24, "max_position_embeddings": 64}
    return {
        "bert": common | {"type_vocab_size": 2},
        "roberta": common | {"type_vocab_size": 1, "pad_token_id": 1},
        "distilbert": {
            "vocab_size": 80,
            "dim": 16,
            "n_layers": 4,
            "n_heads": 2,
            "hidden_dim": 24,
            "max_position_embeddings": 64,
        },
        "modernbert": common
        | {"local_attention": 8, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0},
    }


@pytest.mark.parametrize("family", families())
def test_every_family_pools_with_its_own_weights(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = Encoder({"model_type": family, **families()[family]}).eval()
    tokens = Ragged.from_rows([list(range(5, 30)), [7], [], [8, 9, 10]])
    before, weights = encoder(tokens).values, {name: w.clone() for name, w in encoder.named_parameters()}
    encoder.set_pooling_([None, Pooling(kernel=2, stride=2), None, Pooling(kernel=3, stride=2)])
    pooled = encoder(tokens)
    assert pooled.lengths.tolist() == [6, 1, 0, 1]
    assert torch.equal(encoder(tokens, pooled=False).values, before)
    assert all(torch.equal(weights[name], weight) for name, weight in encoder.named_parameters())
    encoder.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == f"pooled_{family}"
    again = Encoder.from_pretrained(tmp_path)
    assert isinstance(again, Encoder)
    assert again.family == family
    assert torch.equal(again(tokens).values, pooled.values)
    again.pack_()
    with torch.inference_mode():
        torch.testing.assert_close(again(tokens).values, pooled.values, rtol=1e-5, atol=1e-5)
    encoder.set_pooling_([None] * 4)
    encoder.save_pretrained(tmp_path / "plain")
    saved = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert saved["model_type"] == family
    assert "pooling" not in saved


def test_windows_that_attention_does_not_span_are_refused() -> None:
    """A text of one token would see nothing beside longer texts, and itself alone."""
    encoder = Encoder({"model_type": "modernbert", **families()["modernbert"]}).eval()
    tokens = Ragged.from_rows([list(range(5, 30)), [7]])
    wide = Pooling(kernel=9, stride=2)  # its middle is 4 tokens from its ends, as far as local attention goes
    encoder.set_pooling_([None, wide, None, None])
    torch.testing.assert_close(encoder(tokens)[1], encoder(tokens[[1]])[0])
    with pytest.raises(ConfigError, match="middle of 10 tokens is further from the first than the 4"):
        encoder.set_pooling_([None, Pooling(kernel=10, stride=2), None, None])
    assert encoder.config.schedule[1] == wide


steps = st.tuples(st.integers(1, 4), st.integers(1, 4)).filter(lambda pair: pair[1] <= pair[0] > 1)


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.lists(steps, max_size=3))
def test_windows_are_those_of_pooling_layer_by_layer(lengths: list[int], schedule: list[Any]) -> None:
    """The oracle pools sets of token numbers."""
    rows = [[{place} for place in range(length)] for length in lengths]
    kernel = stride = 1
    for k, s in schedule:
        kernel, stride = kernel + (k - 1) * stride, stride * s
        count = [Pooling(kernel=k, stride=s).shorten(len(row)) for row in rows]
        rows = [
            [set().union(*row[i * s : i * s + k]) for i in range(n)]
            for row, n in zip(rows, count, strict=True)
        ]
    found = windows(Ragged(torch.zeros(sum(lengths)), torch.tensor(lengths)), kernel, stride)
    starts = [0, *accumulate(lengths)]
    for row, spans, first in zip(rows, found, starts, strict=False):
        assert [set(range(a - first, b - first)) for a, b in spans.tolist()] == row


def test_the_head_leaves_out_windows_of_skipped_tokens_alone() -> None:
    head = MultiVectorHead(4, [Normalize()], skip_ids=[9])
    head.window = (2, 2)
    tokens = Ragged.from_rows([[1, 9, 9, 9, 9], [9], [9, 2]])
    pooled = Ragged(torch.randn(5, 4), torch.tensor([3, 1, 1]))
    made = head(pooled, tokens, side="document").tokens
    assert made.lengths.tolist() == [1, 0, 1]
    torch.testing.assert_close(made.values, F.normalize(pooled.values[[0, 4]], dim=1))
    queries = Ragged(torch.randn(8, 4), tokens.lengths)
    assert head(queries, tokens, side="query").tokens.lengths.tolist() == [5, 1, 2]
    with pytest.raises(BadValueError, match="gives 8 vectors of 8 tokens; expected 5, one of each 2 tokens"):
        head(queries, tokens, side="document")


@pytest.mark.parametrize("factor", [2, 4])
def test_documents_of_a_multi_vector_model_cost_less(tiny_bert: Path, tmp_path: Path, factor: int) -> None:
    config = {"query_expansion": {"length": 9}, "skiplist_words": []}
    model = Model.multi_vector(tiny_bert, config=config, device="cpu")
    queries, full = model.encode_query(TEXTS), model.encode_document(TEXTS)
    plain = model.fingerprint
    model.add_pooling_layers({"factor": factor, "layers": "late"})
    documents = model.encode_document(TEXTS)
    assert [len(each) for each in full] == LENGTHS
    assert [len(each) for each in documents] == [-(-length // factor) for length in LENGTHS]
    assert all(map(np.array_equal, model.encode_query(TEXTS), queries))
    assert model.fingerprint != plain
    model.save_pretrained(tmp_path / "model")
    again = Model.from_pretrained(tmp_path / "model", device="cpu")
    assert again.fingerprint == model.fingerprint
    assert all(map(np.array_equal, again.encode_document(TEXTS), documents))
    assert all(map(np.array_equal, again.encode_query(TEXTS), queries))
    model.add_pooling_layers(None)
    assert all(map(np.array_equal, model.encode_document(TEXTS), full))
    assert model.fingerprint == plain


def test_queries_are_pooled_where_the_model_says_so(tiny_bert: Path, tmp_path: Path, peer: Any) -> None:
    model = Model.multi_vector(tiny_bert, config={"pooled_sides": ["query", "document"]}, device="cpu")
    model.add_pooling_layers([None, {"kernel": 2, "stride": 2}])
    lengths = [len(each) for each in model.encode_query(TEXTS)]
    assert lengths == [-(-length // 2) for length in LENGTHS]
    model.save_pretrained(tmp_path / "model")
    again = Model.from_pretrained(tmp_path / "model", device="cpu")
    assert [len(each) for each in again.encode_query(TEXTS)] == lengths
    again.add_pooling_layers(None).save_pretrained(tmp_path / "plain")
    plain = Model.from_pretrained(tmp_path / "plain", device="cpu")
    assert plain.head.config.pooled_sides == ("query", "document")
    theirs = peer.MultiVectorEncoder(str(tmp_path / "plain"), device="cpu").encode_query(TEXTS)
    for ours, wanted in zip(plain.encode_query(TEXTS), theirs, strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-5)


def test_the_card_of_a_pooled_model_names_irkit_alone(
    tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards: list[str] = []

    def upload(_: Any, library_class: str | None, name: str, *__: Any) -> str:
        cards.append(_card(name, library_class))
        return ""

    monkeypatch.setattr("irkit.model.model.upload", upload)
    model = Model.multi_vector(tiny_bert, device="cpu")
    model.push_to_hub("me/mine")
    model.add_pooling_layers({"factor": 2}).push_to_hub("me/mine")
    assert "library_name: sentence-transformers\n" in cards[0]
    assert "from irkit import Model  # or: from sentence_transformers import MultiVectorEncoder\n" in cards[0]
    assert "library_name: irkit\n" in cards[1]
    assert "sentence" not in cards[1].replace("sentence-similarity", "")
    assert "from irkit import Model\n" in cards[1]


@pytest.mark.parametrize("kind", ["flat", "plaid"])
def test_bytes_of_an_index_fall_by_the_factor(kind: str, tiny_bert: Path, tmp_path: Path) -> None:
    model = Model.multi_vector(tiny_bert, "linear", {"skiplist_words": []}, device="cpu")
    words = " ".join([TEXTS[0], "the token in a text on the neural vector index"]).split()
    documents = {str(i): " ".join((words[i % 7 :] + words)[: 4 * (i % 3) + 6]) for i in range(60)}
    bytes_, tokens = {}, {}
    for factor in (1, 4):
        if factor > 1:
            model.add_pooling_layers({"factor": factor})
        with Retriever.build(model, documents, tmp_path / f"{factor}", index=kind) as retriever:
            sizes = retriever.store.sizes()
            bytes_[factor] = sum(size for name, size in sizes.items() if name.startswith(_TOKENS[kind]))
            tokens[factor] = sum(len(each) for each in model.encode_document([*documents.values()]))
            found = retriever.search("neural search", k=60)
        wanted = model.similarity(
            model.encode_query(["neural search"]), model.encode_document([*documents.values()])
        )
        if kind == "flat":
            scores = {hit.id: hit.score for hit in found}
            for number, value in zip(documents, wanted[0].tolist(), strict=True):
                assert scores[number] == pytest.approx(value, abs=1e-2)
    assert tokens[1] == 4 * tokens[4]
    assert bytes_[1] == 4 * bytes_[4]


def test_an_explanation_names_the_window(tiny_bert: Path) -> None:
    model = Model.multi_vector(tiny_bert, config={"skiplist_words": ["."]}, device="cpu")
    model.add_pooling_layers([None, {"kernel": 2, "stride": 2}])
    text = "the index of a search . . . . model"
    _, pieces = model.encode_with_token_spans(text, "document")
    assert [piece.token for piece in pieces] == ["[CLS] the", "index of", "a search", "model [SEP]"]
    assert [text[piece.start : piece.end] for piece in pieces] == ["the", "index of", "a search", "model"]
    explanation = explain(model, "neural search", text)
    assert [match.query.token for match in explanation.matches] == ["[CLS]", "neural", "search", "[SEP]"]
    assert {match.document for match in explanation.matches} <= {*pieces}
    vectors = model.encode_query(["neural search"]), model.encode_document([text])
    assert explanation.score == pytest.approx(model.similarity(*vectors).item(), abs=1e-5)
    assert {match.document.token for match in explanation.words().matches} <= {
        text[p.start : p.end] for p in pieces
    }


def test_token_pooling_works_on_pooled_rows(tiny_bert: Path) -> None:
    model = Model.multi_vector(
        tiny_bert, config={"token_pooling": {"protected_tokens": 0}, "skiplist_words": []}, device="cpu"
    )
    model.add_pooling_layers({"factor": 2})
    assert [len(each) for each in model.encode_document([TEXTS[1], TEXTS[4]])] == [9 // 2, 12 // 2]


def dense(tiny_bert: Path, tmp_path: Path, **pooling: Any) -> Path:
    from irkit.formats import write_model
    from irkit.heads import PooledHead

    with pytest.warns(UserWarning, match="does not say how"):
        model = Model.from_pretrained(tiny_bert, device="cpu")
    parts: Any = {"tokenizer": model.tokenizer, "encoder": model.encoder, "head": PooledHead(32, **pooling)}
    write_model(parts, tmp_path / "dense")
    return tmp_path / "dense"


def test_a_dense_model_pools_is_saved_and_is_refused_elsewhere(
    tiny_bert: Path, tmp_path: Path, peer: Any
) -> None:
    model = Model.from_pretrained(dense(tiny_bert, tmp_path), device="cpu")
    before = model.encode(TEXTS)
    model.add_pooling_layers({"layers": [0], "kernel": 3})
    pooled = model.encode(TEXTS)
    assert model.encoder.config.schedule == (Pooling(kernel=3, stride=2), None)
    assert np.abs(pooled - before).max() > 1e-3
    hidden = model.encoder(model.pipeline("document").tokenize(TEXTS))
    means = torch.stack([row.mean(0) for row in hidden])
    np.testing.assert_allclose(pooled, means.detach().numpy(), atol=1e-5)
    model.save_pretrained(tmp_path / "pooled")
    assert np.array_equal(Model.from_pretrained(tmp_path / "pooled", device="cpu").encode(TEXTS), pooled)
    with pytest.raises(ValueError, match="model type `pooled_bert`"):
        peer.SentenceTransformer(str(tmp_path / "pooled"), device="cpu")
    again = make_model(PretrainedModel(name=str(tmp_path / "pooled"), pooling=[None, None]))
    assert np.array_equal(again.encode(TEXTS), before)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"factor": 8}, "2 layers of kernel 2 and stride 2 do not make one row of 8"),
        ({"factor": 3}, "factor 3 is no power of stride 2"),
        ({"layers": [0, 2]}, r"layers \[0, 2\], expected one or more numbers from 0 to 1"),
        ({"layers": []}, "expected one or more numbers"),
        ({"layers": [1, 1]}, "each once"),
        ({"layers": [1], "factor": 2}, r"got factor 2 and layers \[1\]"),
        ({"kernel": 2, "stride": 3}, "stride 3 over kernel 2"),
        ({"layer": [1]}, "unknown key 'layer'"),
        ({}, "do not make one row of 64"),
        ([{"kernel": 2, "stride": 2}], "pooling"),
        ([None, {"kernel": 1, "stride": 1}], "kernel"),
        ("late", "expected keys and values, or a list"),
    ],
)
def test_schedules_that_cannot_be(tiny_bert: Path, tmp_path: Path, choice: Any, message: str) -> None:
    model = Model.multi_vector(tiny_bert, device="cpu")
    with pytest.raises(ConfigError, match=message):
        model.add_pooling_layers(choice)
    assert not any(model.encoder.config.schedule)


def test_arrangements() -> None:
    def layers(count: int, length: int = 512, **choice: Any) -> list[int]:
        schedule = PoolingChoice(**choice).schedule(count, length)
        return [number for number, pooling in enumerate(schedule, 1) if pooling]

    # Source: Schlatt et al. 2025, section 3.1
    assert layers(12) == [2, 3, 4, 6, 7, 8, 10, 11, 12]
    assert layers(12, kernel=3, stride=3) == [2, 4, 6, 8, 10, 12]
    assert layers(12, layers="late") == [4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert layers(12, layers="late", kernel=3, stride=3) == [7, 8, 9, 10, 11, 12]
    assert layers(6, factor=4) == [3, 6]
    assert layers(6, factor=4, kernel=5, layers="late") == [5, 6]
    assert layers(22, 8192, layers="late") == [*range(10, 23)]


def test_models_that_cannot_pool(tiny_bert: Path, tmp_path: Path) -> None:
    sparse = Model.sparse(tiny_bert, device="cpu")
    with pytest.raises(BadValueError, match="weights of terms need a row for each token"):
        sparse.add_pooling_layers({"factor": 2})
    assert not any(sparse.encoder.config.schedule)
    sparse.add_pooling_layers(None).add_pooling_layers([None, None])  # nowhere
    prompted = Model.from_pretrained(dense(tiny_bert, tmp_path, include_prompt=False), device="cpu")
    with pytest.raises(BadValueError, match="leaves the tokens of the prompt out"):
        prompted.add_pooling_layers({"factor": 2})
    pooled = Model.multi_vector(tiny_bert, device="cpu").add_pooling_layers({"factor": 2})
    pooled.save_pretrained(tmp_path / "pooled")
    with pytest.raises(BadValueError, match="weights of terms need a row for each token"):
        Model.sparse(tmp_path / "pooled", device="cpu")
    with pytest.raises(BadValueError, match="pooling layers"):
        pooled.save_pretrained(tmp_path / "colbert", format="stanford")
    small = Model.multi_vector(tiny_bert, device="cpu", dtype="int8")
    with pytest.raises(BadValueError, match="the weights are int8"):
        small.add_pooling_layers({"factor": 2})


def test_class_tokens_that_would_be_pooled_are_refused(tiny_bert: Path) -> None:
    model = Model.multi_vector(tiny_bert, device="cpu").add_pooling_layers({"factor": 2})
    with pytest.raises(ConfigError, match="multiple_cls needs a vector for each class token"):
        make_interaction(MVA(pooling="multiple_cls", size=4), model)
    assert model.prompts["document"] == ""


def test_an_adapter_cannot_pool(tmp_path: Path, tiny_bert: Path) -> None:
    import shutil

    from transformers import ElectraConfig, ElectraModel

    config = ElectraConfig(
        vocab_size=120,
        embedding_size=16,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
    )
    ElectraModel(config).save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny_bert / file, tmp_path / file)
    model = Model.multi_vector(tmp_path, device="cpu")
    with pytest.raises(
        BadValueError, match="does not run the layers of a electra itself, expected one of bert"
    ):
        model.add_pooling_layers({"factor": 2})


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_lower_precision_costs_pooled_models_no_more(tiny_bert: Path, tmp_path: Path, dtype: str) -> None:
    model, errors = Model.multi_vector(tiny_bert, device="cpu"), []
    for factor in (None, {"factor": 2}):
        model.add_pooling_layers(factor).save_pretrained(tmp_path / "model")
        lower = Model.from_pretrained(tmp_path / "model", device="cpu", dtype=dtype).encode_document(TEXTS)
        pairs = zip(model.encode_document(TEXTS), lower, strict=True)
        errors.append(np.mean([1 - (a * b).sum(1).mean() for a, b in pairs]))
    assert 0 < errors[1] < 2 * errors[0]


def test_recipes_pool(tiny_bert: Path) -> None:
    common = {"data": {"source": "x", "split": "train"}, "losses": {"kind": "infonce"}}
    model = {"kind": "multi_vector", "name": str(tiny_bert), "pooling": {"factor": 2}}
    recipe = TrainRecipe.resolve({"model": model, **common})
    assert make_model(recipe.model).encoder.config.window == (2, 2)
    with pytest.raises(ConfigError, match=r"model\.pooling.*'layer'"):
        TrainRecipe.resolve({"model": {**model, "pooling": {"layer": [1]}}, **common})
    with pytest.raises(ConfigError, match="pooling"):
        TrainRecipe.resolve({"model": {**model, "kind": "sparse"}, **common})


def test_info_shows_the_schedule(tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from irkit.cli.info import info

    model = Model.multi_vector(tiny_bert, device="cpu")
    model.save_pretrained(tmp_path / "model")
    info(tmp_path / "model", as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert not {"pooling", "pooled_sides"} & facts.keys()
    model.add_pooling_layers({"factor": 2}).save_pretrained(tmp_path / "model")
    info(tmp_path / "model", as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert facts["pooling"] == {"layer_1": "kernel 2, stride 2, intra"}
    assert facts["pooled_sides"] == ["document"]


def test_gradients_reach_all_layers_through_the_pooled_head(tiny_bert: Path) -> None:
    model = Model.multi_vector(tiny_bert, device="cpu").add_pooling_layers({"factor": 4})
    tokens = model.pipeline("document").tokenize(TEXTS)
    model(tokens, side="document").tokens.values[:, 0].sum().backward()
    assert all(
        weight.grad is not None and bool(weight.grad.any())
        for name, weight in model.named_parameters()
        if "position" not in name and "token_type" not in name and "key" not in name
    )


def test_precision_is_checked_on_what_pools_and_on_queries(tiny_bert: Path) -> None:
    model = Model.multi_vector(tiny_bert, device="cpu").add_pooling_layers({"factor": 2})
    seen = _vectors(model.encoder, model.head, model.tokenizer)
    parts = [
        model.encode_representation(list(_SENTENCES), side).tokens.values for side in ("document", "query")
    ]
    assert len(parts[0]) < len(parts[1])
    torch.testing.assert_close(seen, parts)
