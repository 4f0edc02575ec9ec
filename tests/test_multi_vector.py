"""Multi-vector models: the head, what is done to queries and documents, and the whole way to a search."""

from __future__ import annotations

import json
import string
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from torch.nn import functional as F
from typer.testing import CliRunner

from irkit.cli import app
from irkit.core.ragged import Ragged
from irkit.core.representation import MultiVector, concat
from irkit.core.scoring import score
from irkit.errors import BadTypeError, BadValueError, ConfigError, StorageError
from irkit.heads import MultiVectorConfig, MultiVectorHead, Normalize, Projection
from irkit.heads.projection import PRESETS
from irkit.heads.token_pooling import pool_tokens
from irkit.model import Model
from irkit.retrieval.retriever import Retriever

WORDS = [
    "search",
    "the index",
    "a model of text",
    "",
    "vector " * 30,
    "neural?",
    "?!",
    "日本 the",
    "[MASK] a",
]
EXPANDED = {"query_length": 32, "document_length": 20, "query_expansion": {"length": 8, "strategy": "min"}}


@pytest.fixture(scope="module")
def tiny(tiny_bert: Path) -> Model:
    torch.manual_seed(0)
    return Model.multi_vector(tiny_bert, {"dim": 8}, EXPANDED, markers=("[Q] ", "[D] "), device="cpu")


# ---- head --------------------------------------------------------------------------------------


def test_vectors_are_projected_normalised_and_left_out():
    torch.manual_seed(0)
    projection = Projection(4, 3)
    head = MultiVectorHead(4, [projection, Normalize()], skip_ids=[9, 8])
    tokens = Ragged.from_rows([[1, 9, 2], [], [8, 9], [9, 3]])
    hidden = tokens.with_values(torch.randn(7, 4).bfloat16())
    vectors = head(hidden, tokens).tokens
    assert vectors.lengths.tolist() == [2, 0, 0, 1]
    assert vectors.values.dtype == torch.float32
    exact = F.normalize(projection(hidden.values[[0, 2, 6]].float()), dim=1)
    torch.testing.assert_close(vectors.values, exact)
    assert head(hidden, tokens, side="query").tokens.lengths.tolist() == [3, 0, 2, 2]


@pytest.mark.parametrize(
    "preset", ["linear", "ffn-gelu-depth2-scale2-residual", "glu-silu-depth2-scale2-residual"]
)
@pytest.mark.parametrize("pooling", [None, {"pool_factor": 2, "normalize": False}])
def test_gradients_of_the_head(preset, pooling):
    from irkit.heads.projection import projection_layers

    torch.manual_seed(0)
    config = MultiVectorConfig.parse({"token_pooling": pooling})
    layers = projection_layers(PRESETS[preset].model_copy(update={"dim": 3}), 4)
    head = MultiVectorHead(4, [*layers, Normalize()], config, skip_ids=[9]).double()
    tokens = Ragged.from_rows([[1, 9, 2, 5, 6, 9], [4], [9]])
    hidden = torch.randn(8, 4, dtype=torch.double, requires_grad=True)
    # clusters are the same all around the point
    assert torch.autograd.gradcheck(lambda h: head(tokens.with_values(h), tokens).tokens.values, hidden)


@given(st.lists(st.integers(0, 12), max_size=6), st.integers(1, 10), st.booleans())
def test_expansion_fills_every_query_up(sizes, length, attend):
    config = MultiVectorConfig.parse({"query_expansion": {"length": length, "attend": attend}})
    head = MultiVectorHead(4, [], config, expansion_id=77)
    tokens = Ragged(torch.arange(sum(sizes)), torch.tensor(sizes, dtype=torch.int64))
    longer, attended = head.expand(tokens, "query")
    assert longer.lengths.tolist() == [max(size, length) for size in sizes]
    for row, given_row in zip(longer, tokens, strict=True):
        assert row.tolist() == given_row.tolist() + [77] * (len(row) - len(given_row))
    if attend:
        assert attended is None
    else:  # a text without any token of its own can only see what was added
        assert attended.tolist() == [size or length for size in sizes]
    assert head.expand(tokens, "document") == (tokens, None)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), st.floats(1, 5), st.integers(0, 3), st.integers(0, 2**31))
def test_token_pooling_averages_clusters(n, factor, protected, seed):
    vectors = F.normalize(torch.randn(n, 3, generator=torch.Generator().manual_seed(seed)), dim=1)
    pooled = pool_tokens(vectors, factor, protected)
    rest = max(0, n - protected)
    wanted = max(int(rest // factor), 1) if rest else 0
    assert len(pooled) == n - rest + min(rest, wanted)
    assert torch.equal(pooled[: n - rest], vectors[: n - rest])
    # a mean of vectors of length 1 is no longer than 1
    assert bool((pooled.norm(dim=1) <= 1 + 1e-6).all())


def test_token_pooling_joins_what_is_alike():
    near, far = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])
    rows = torch.stack([far, near, far, near, F.normalize(near + 0.01 * far, dim=0), far])
    pooled = pool_tokens(rows, 2.5, 1)
    assert torch.equal(pooled[0], far)
    means = sorted(pooled[1:].tolist())
    np.testing.assert_allclose(means, sorted([far.tolist(), rows[[1, 3, 4]].mean(0).tolist()]), atol=1e-6)


def test_heads_and_configurations_that_cannot_be():
    with pytest.raises(
        BadValueError, match=r"MultiVectorHead: a projection takes vectors of width 5, but .* 4"
    ):
        MultiVectorHead(4, [Projection(5, 2)])
    expansion = {"query_expansion": {"token": "<fill>"}}
    with pytest.raises(BadValueError, match="query_expansion with <fill>, which the vocabulary lacks"):
        MultiVectorHead(4, [], MultiVectorConfig.parse(expansion))
    with pytest.raises(
        ConfigError, match="query_length 8 is under the 32 tokens that queries are expanded to"
    ):
        MultiVectorConfig.parse({"query_length": 8, "query_expansion": {}})
    with pytest.raises(ConfigError, match="unknown key 'skiplist'; did you mean 'skiplist_words'"):
        MultiVectorConfig.parse({"skiplist": ["a"]})
    with pytest.raises(ConfigError, match="pool_factor"):
        MultiVectorConfig.parse({"token_pooling": {"pool_factor": 0.5}})
    head = MultiVectorHead(4)
    tokens = Ragged.from_rows([[1, 2, 3]])
    with pytest.raises(BadValueError, match="gives 2 vectors of 3 tokens"):
        head(Ragged(torch.zeros(2, 4), torch.tensor([2])), tokens)


# ---- model -------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.sampled_from(WORDS), max_size=10),
    budget=st.integers(1, 80),
    size=st.integers(1, 5),
    side=st.sampled_from(["query", "document"]),
)
def test_vectors_do_not_depend_on_their_batch(tiny, texts, budget, size, side):
    tiny.tokens_per_step = budget
    together = concat(list(tiny.stream_representations(texts, side, chunk_size=size)))
    tiny.tokens_per_step = None
    assert isinstance(together, MultiVector)
    assert len(together) == len(texts)
    for text, row in zip(texts, together.tokens, strict=True):
        alone = tiny.encode_representation([text], side).tokens.values
        torch.testing.assert_close(row, alone, rtol=0, atol=1e-6)


def test_lengths_of_either_side(tiny):
    queries, documents = tiny.encode_query(WORDS), tiny.encode_document(WORDS)
    assert {row.shape[1] for row in queries + documents} == {8}
    #            search, the index, a model of text, "", 30 vectors, neural?, ?!, unknown, mask
    assert [len(row) for row in queries] == [8, 8, 8, 8, 32, 8, 8, 8, 8]
    assert [len(row) for row in documents] == [4, 5, 7, 3, 20, 4, 3, 6, 5]  # less ? and !
    np.testing.assert_allclose(np.linalg.norm(np.concatenate(queries), axis=1), 1, atol=1e-6)


def test_cut_texts_keep_their_last_token(tiny):
    for side, length in (("query", 32), ("document", 20)):
        _, pieces = tiny.encode_with_token_spans("vector " * 30, side)
        assert len(pieces) == length
        assert [piece.token for piece in pieces[:3]] == ["[CLS]", f"[{side[0].upper()}] ", "vector"]
        assert pieces[-1].token == "[SEP]"


@pytest.mark.parametrize("side", ["query", "document"])
def test_vectors_with_their_tokens(tiny, side):
    for text in WORDS:
        row, pieces = tiny.encode_with_token_spans(text, side)
        torch.testing.assert_close(
            row.tokens.values, tiny.encode_representation([text], side).tokens.values, rtol=0, atol=1e-6
        )
        assert len(pieces) == len(row.tokens.values)
        for token, start, end in pieces:
            if start < end and token != "[UNK]":
                assert text[start:end] == token.removeprefix("##")
        if side == "document":
            assert not {piece.token for piece in pieces} & set(string.punctuation)


def test_a_model_joined_by_hand_leaves_out_what_it_does_once_saved(tiny: Model, tmp_path: Path):
    config = MultiVectorConfig(skiplist_words=("!", "text", "no such token"))
    model = Model(tiny.tokenizer, tiny.encoder, MultiVectorHead(32, [Normalize()], config))
    model.save_pretrained(tmp_path / "saved")
    saved = Model.from_pretrained(tmp_path / "saved", device="cpu")
    found = [each.encode_document("a text, an index!") for each in (model, saved)]
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    assert len(found[0]) == len(model.token_spans("a text, an index!", "document")) - 2


def test_a_dense_model_has_no_vectors_of_tokens(tiny_bert):
    with pytest.warns(UserWarning, match="mean of its tokens"):
        dense = Model.from_pretrained(tiny_bert, device="cpu")
    with pytest.raises(BadValueError, match="makes dense vectors, expected one per token"):
        dense.encode_with_token_spans("text", "query")


def test_what_is_no_text_has_no_tokens(tiny):
    with pytest.raises(BadTypeError, match="text 0 is int, expected a string"):
        tiny.encode_with_token_spans(3, "query")


def test_what_is_added_to_queries_is_not_seen_unless_attended_to(tiny, tiny_bert):
    plain = Model(tiny.tokenizer, tiny.encoder, MultiVectorHead(32, tiny.head.layers), prompts=tiny.prompts)
    config = MultiVectorConfig.parse({"query_expansion": {"length": 8, "attend": True}})
    head = MultiVectorHead(32, tiny.head.layers, config, expansion_id=tiny.head.expansion_id)
    attended = Model(tiny.tokenizer, tiny.encoder, head, prompts=tiny.prompts)
    short, filled, seen = (model.encode_query("the index") for model in (plain, tiny, attended))
    np.testing.assert_allclose(filled[: len(short)], short, atol=1e-6)
    assert np.abs(seen[: len(short)] - short).max() > 0.01
    assert len(filled) == len(seen) == 8


def test_encode_returns_what_was_asked_for(tiny):
    documents = tiny.encode_document(["the index", "text"])
    np.testing.assert_allclose(tiny.encode_document("the index"), documents[0], atol=1e-6)
    plain = tiny.encode(["the index", "text"])  # a document without its marker, as in sentence-transformers
    assert [len(row) for row in plain] == [len(row) - 1 for row in documents] == [4, 3]
    np.testing.assert_allclose(tiny.encode("text", prompt_name="document"), documents[1], atol=1e-6)
    assert isinstance(tiny.encode_query("text", convert_to_tensor=True), torch.Tensor)
    tensors = tiny.encode_query(["text"], convert_to_numpy=False)
    assert isinstance(tensors[0], torch.Tensor)
    assert tiny.encode_document([]) == []
    prompted = tiny.encode_query("text", prompt="")
    assert np.abs(prompted[1] - tiny.encode_query("text")[1]).max() > 0.01


def test_similarities(tiny):
    queries, documents = tiny.encode_query(WORDS), tiny.encode_document(WORDS)
    exact = [[(q.astype(float) @ d.T.astype(float)).max(1).sum() for d in documents] for q in queries]
    np.testing.assert_allclose(tiny.similarity(queries, documents), exact, rtol=1e-5)
    np.testing.assert_allclose(tiny.similarity_pairwise(queries, documents), np.diag(exact), rtol=1e-5)
    np.testing.assert_allclose(tiny.similarity(queries[0], documents[2]), [[exact[0][2]]], rtol=1e-5)
    whole = tiny.encode_representation(WORDS, "query"), tiny.encode_representation(WORDS, "document")
    np.testing.assert_allclose(tiny.similarity(*whole), exact, rtol=1e-5)
    np.testing.assert_allclose(score(*whole), exact, rtol=1e-5)
    assert tiny.similarity([], documents).shape == (0, len(WORDS))
    mean = Model(tiny.tokenizer, tiny.encoder, tiny.head, prompts=tiny.prompts, similarity_name="meanmaxsim")
    means = np.array(exact) / np.array([[len(q)] for q in queries])
    np.testing.assert_allclose(mean.similarity(queries, documents), means, rtol=1e-5)
    np.testing.assert_allclose(
        score(mean.encode_representation(WORDS, "query"), mean.encode_representation(WORDS, "document")),
        means,
        rtol=1e-5,
    )
    np.testing.assert_allclose(mean.similarity_pairwise(queries, documents), np.diag(means), rtol=1e-5)
    with pytest.raises(BadValueError, match="dimension"):
        tiny.similarity(queries, [np.zeros((2, 5), np.float32)])
    with pytest.raises(BadValueError, match=r"array \(tokens, dim\)"):
        tiny.similarity(queries, [np.zeros(5, np.float32)])
    for wrong in ("texts", ["text"], [None], 3, None):
        with pytest.raises(
            BadTypeError, match=r"similarity: got .*, expected an array \(tokens, dim\) a text"
        ):
            tiny.similarity(queries, wrong)
    with pytest.raises(BadValueError, match="similarity 'cosine', expected one of maxsim, meanmaxsim"):
        Model(tiny.tokenizer, tiny.encoder, tiny.head, similarity_name="cosine")


def test_leading_dimensions_of_pooled_tokens_keep_their_length(tiny_bert):
    pooling = {"pool_factor": 2, "normalize": False}
    model = Model.multi_vector(tiny_bert, None, {"token_pooling": pooling}, device="cpu")
    cuts = model.encode_document(WORDS, truncate_dim=8)
    for whole, cut in zip(model.encode_document(WORDS), cuts, strict=True):
        lengths = np.linalg.norm(whole, axis=1)
        np.testing.assert_allclose(np.linalg.norm(cut, axis=1), lengths, rtol=1e-5)
    assert lengths.min() < 0.999


def test_leading_dimensions_are_scaled_to_length_1_again(tiny, tmp_path):
    whole = tiny.encode_document(WORDS)
    cut = tiny.encode_document(WORDS, truncate_dim=3)
    for long, short in zip(whole, cut, strict=True):
        np.testing.assert_allclose(
            short, long[:, :3] / np.linalg.norm(long[:, :3], axis=1, keepdims=True), atol=1e-6
        )
    model = Model(tiny.tokenizer, tiny.encoder, tiny.head, prompts=tiny.prompts, truncate_dim=3)
    assert model.dim == model.encode_representation(["text"], "query").dim == 3
    row, _ = model.encode_with_token_spans("text", "query")
    torch.testing.assert_close(
        row.tokens.values, model.encode_representation(["text"], "query").tokens.values
    )
    model.save_pretrained(tmp_path / "model")
    assert Model.from_pretrained(tmp_path / "model", device="cpu").dim == 3
    with pytest.raises(BadValueError, match="truncate_dim is 0; expected a whole number from 1 to"):
        tiny.encode_query("text", truncate_dim=0)
    with pytest.raises(BadValueError, match="truncate_dim is 0; expected a whole number from 1 to"):
        Model(tiny.tokenizer, tiny.encoder, tiny.head, truncate_dim=0)


@pytest.mark.parametrize("side", ["query", "document"])
def test_gradients_flow_into_every_weight(tiny_bert, side):
    model = Model.multi_vector(
        tiny_bert, {"dim": 8}, EXPANDED, markers=("[Q] ", "[D] "), device="cpu"
    ).train()
    tokens = model.pipeline(side).tokenize(["the index", "neural?"])
    vectors = model(tokens, side=side).tokens
    assert vectors.lengths.tolist() == ([8, 8] if side == "query" else [5, 4])
    vectors.values[:, 0].sum().backward()
    unused = {name for name, weight in model.named_parameters() if weight.grad is None}
    assert unused == set()
    marker = model.tokenizer.ids([f"[{side[0].upper()}] "])
    assert model.encoder.embeddings.word.weight.grad[marker].abs().sum() > 0


SETTINGS: dict[str, dict[str, Any]] = {
    "query_length": {"query_length": 31},
    "document_length": {"document_length": 19},
    "expansion": {"query_expansion": {"length": 9, "strategy": "min"}},
    "attend": {"query_expansion": {"length": 8, "strategy": "min", "attend": True}},
    "words": {"skiplist_words": ["a"]},
    "sides": {"skiplist_sides": ["query", "document"]},
    "pooling": {"token_pooling": {}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_fingerprint_stands_for_every_setting(tiny, tiny_bert, name):
    def fingerprint(**given: Any) -> str:
        torch.manual_seed(0)
        config = {**EXPANDED, **given}
        return Model.multi_vector(
            tiny_bert, {"dim": 8}, config, markers=("[Q] ", "[D] "), device="cpu"
        ).fingerprint

    assert fingerprint() == tiny.fingerprint != fingerprint(**SETTINGS[name])
    other = Model(tiny.tokenizer, tiny.encoder, tiny.head, prompts={**tiny.prompts, "query": "query: "})
    assert other.fingerprint != tiny.fingerprint


def test_a_name_is_a_string():
    for name in (None, 3):
        for make in ("multi_vector", "sparse", "from_pretrained"):
            with pytest.raises(
                BadTypeError, match=f"Model.{make}: got {name}, expected a directory or a name"
            ):
                getattr(Model, make)(name)


def test_new_markers_start_as_the_mean(tiny, tiny_bert):
    words = tiny.encoder.embeddings.word.weight
    old = len(words) - 2
    torch.testing.assert_close(words[old:], words[:old].mean(0).expand(2, -1))
    assert tiny.encoder.settings["vocab_size"] == len(words) == tiny.tokenizer.vocab_size
    again = Model.multi_vector(tiny_bert, markers=("index", "[D] "), device="cpu")  # the first is a word
    assert len(again.encoder.embeddings.word.weight) == old + 1


def test_models_that_cannot_be(tiny_bert, tmp_path):
    with pytest.raises(BadValueError, match="expanded to 65 tokens, but the encoder has 64 positions"):
        Model.multi_vector(tiny_bert, None, {"query_expansion": {"length": 65}}, device="cpu")
    with pytest.raises(ConfigError, match="no preset is named 'linaer'; did you mean 'linear'"):
        Model.multi_vector(tiny_bert, "linaer", device="cpu")
    with pytest.raises(ConfigError, match="multi-vector model: unknown key 'query_len'"):
        Model.multi_vector(tiny_bert, None, {"query_len": 3}, device="cpu")
    with pytest.raises(BadValueError, match="document_length 2 leaves no room beside 2 special tokens"):
        Model.multi_vector(tiny_bert, None, {"document_length": 2}, device="cpu")
    with pytest.raises(BadValueError, match="query_length 2 leaves no room"):
        Model.multi_vector(tiny_bert, None, {"query_expansion": {"length": 2}}, device="cpu")
    for markers in ("[Q] ", ("[Q] ",), (1, 2), 3):
        with pytest.raises(
            BadTypeError, match=r"markers are .*, expected one of queries and one of documents"
        ):
            Model.multi_vector(tiny_bert, markers=markers, device="cpu")


# ---- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["glu-gelu-depth2-scale1", "ffn-relu-depth2-scale2-residual"])
def test_projections_that_only_irkit_has(tiny_bert, tmp_path, preset):
    model = Model.multi_vector(tiny_bert, preset, device="cpu")
    with pytest.warns(UserWarning, match="sentence-transformers cannot open it") as caught:
        model.save_pretrained(tmp_path / "model")
    assert caught[0].filename == __file__
    again = Model.from_pretrained(tmp_path / "model", device="cpu")
    assert again.fingerprint == model.fingerprint
    np.testing.assert_array_equal(again.encode_document("the text"), model.encode_document("the text"))
    (tmp_path / "model/1_Projection/model.safetensors").unlink()
    with pytest.raises(StorageError, match="1_Projection"):
        Model.from_pretrained(tmp_path / "model", device="cpu")


def test_linear_projections_fold_into_one_that_everybody_has(peer, tiny_bert, tmp_path):
    torch.manual_seed(0)
    model = Model.multi_vector(tiny_bert, "ffn-identity-depth3-scale2-residual", device="cpu")
    before = model.encode_document(WORDS)
    model.merge_projections()
    model.save_pretrained(tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peer.MultiVectorEncoder(str(tmp_path / "model"), device="cpu")
    for one, two, three in zip(
        before, model.encode_document(WORDS), theirs.encode_document(WORDS), strict=True
    ):
        np.testing.assert_allclose(two, one, atol=1e-5)
        np.testing.assert_allclose(three.numpy(), two, atol=1e-5)


@pytest.mark.parametrize(
    ("file", "change", "problem"),
    [
        ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [3]}, "keep_only_token_ids is for images"),
        ("2_MultiVectorMask/config.json", {"skiplist_tasks": ["passage"]}, "skiplist_sides"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "longest"}}, "strategy"),
        (
            "sentence_bert_config.json",
            {"query_expansion": {"token": "[FILL]"}},
            r"with \[FILL\], which the voc",
        ),
        ("sentence_bert_config.json", {"document_length": -3}, "document_length"),
        (
            "1_Normalize/config.json",
            {"module_input_name": "sentence_embedding"},
            "expected 'token_embeddings'",
        ),
        ("config_sentence_transformers.json", {"similarity_fn_name": "cosine"}, "expected one of maxsim"),
    ],
)
def test_files_that_cannot_be_honoured(tiny_bert, tmp_path, file, change, problem):
    Model.multi_vector(tiny_bert, device="cpu").save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises((BadValueError, ConfigError), match=problem):
        Model.from_pretrained(tmp_path / "model", device="cpu")


def test_a_skip_list_of_no_side_is_saved(tiny_bert, tmp_path):
    model = Model.multi_vector(tiny_bert, config={"skiplist_sides": []}, device="cpu")
    model.save_pretrained(tmp_path / "model")
    loaded = Model.from_pretrained(tmp_path / "model", device="cpu")
    assert loaded.head.config.skiplist_sides == ()
    assert [len(each.encode_document("a search, index.")) for each in (model, loaded)] == [7, 7]
    path = tmp_path / "model/2_MultiVectorMask/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"skiplist_tasks": None}))
    assert Model.from_pretrained(tmp_path / "model", device="cpu").head.config.skiplist_sides == ("document",)


@pytest.mark.filterwarnings("ignore:.*Cython:")
def test_without_a_mask_token_the_end_token_fills_queries_up(peer, tiny_bert, tmp_path):
    config = {"query_expansion": {"length": 8, "attend": True}}
    Model.multi_vector(tiny_bert, config=config, device="cpu").save_pretrained(tmp_path / "model")
    for name, names in (
        ("tokenizer_config.json", {"eos_token": "[END]", "pad_token": "[PAD]", "unk_token": "[UNK]"}),
        ("special_tokens_map.json", None),
    ):
        path = tmp_path / "model" / name
        if names is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    path = tmp_path / "model/tokenizer.json"
    path.write_text(path.read_text().replace("[SEP]", "[END]").replace("[MASK]", "[OTHER]"))
    model = Model.from_pretrained(tmp_path / "model", device="cpu")
    assert model.head.expansion_id == model.tokenizer.end_id == model.tokenizer.ids(["[END]"])[0]
    theirs = peer.MultiVectorEncoder(str(tmp_path / "model"), device="cpu")
    np.testing.assert_allclose(
        theirs.encode_query("a search").numpy(), model.encode_query("a search"), atol=1e-5
    )
    model.tokenizer.lowercase()  # its files are written from memory then
    model.save_pretrained(tmp_path / "again")
    again = Model.from_pretrained(tmp_path / "again", device="cpu")
    assert again.head.expansion_id == model.head.expansion_id


def test_modules_in_an_order_that_means_nothing(tiny_bert, tmp_path):
    config = {"token_pooling": {}}
    Model.multi_vector(tiny_bert, None, config, device="cpu").save_pretrained(tmp_path / "model")
    path = tmp_path / "model/modules.json"
    modules = json.loads(path.read_text())
    path.write_text(json.dumps([*modules[:1], modules[3], *modules[1:3]]))
    with pytest.raises(ConfigError, match="module Normalize follows token pooling"):
        Model.from_pretrained(tmp_path / "model", device="cpu")
    modules[1]["type"] = "sentence_transformers.models.Pooling"
    path.write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="module Pooling at '1_Normalize', expected Dense"):
        Model.from_pretrained(tmp_path / "model", device="cpu")


# ---- the real thing ----------------------------------------------------------------------------

DOCUMENTS = {
    "b": "Bears sleep in winter.",
    "c": "Copper conducts electricity.",
    "e": "",
    "p": "?!",
}


@pytest.fixture(scope="module")
def saved(minilm: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("multi-vector") / "model"
    Model.multi_vector(minilm, device="cpu").save_pretrained(path)
    return path


def test_minilm_equals_sentence_transformers(peer, saved):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peer.MultiVectorEncoder(str(saved), device="cpu")
    model = Model.from_pretrained(saved, device="cpu")
    texts = [*DOCUMENTS.values(), "What conducts electricity? " * 30, "Łódź, naïve façade: 東京 🙂"]
    for ours, other in (
        (model.encode_query(texts), theirs.encode_query(texts)),
        (model.encode_document(texts), theirs.encode_document(texts)),
    ):
        for one, two in zip(ours, other, strict=True):
            np.testing.assert_allclose(one, two.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "auto"])
@pytest.mark.filterwarnings("ignore:bfloat16 on cpu:UserWarning")
def test_lower_precision_keeps_vectors_and_fingerprint(saved, dtype):
    exact = Model.from_pretrained(saved, device="cpu")
    model = Model.from_pretrained(saved, device="cpu", dtype=dtype)
    one, two = (each.encode_document(list(DOCUMENTS.values())) for each in (exact, model))
    cosines = [(a * b).sum(1).min() for a, b in zip(one, two, strict=True)]
    assert min(cosines) >= (0.98 if dtype == "int8" else 0.999)
    assert model.fingerprint == exact.fingerprint


@pytest.mark.slow
def test_several_devices(tiny):
    parts = list(tiny.stream_representations(WORDS, "query", chunk_size=2, device=["cpu", "cpu"]))
    assert [len(part) for part in parts] == [2, 2, 2, 2, 1]
    whole, exact = concat(parts), tiny.encode_representation(WORDS, "query")
    assert whole.tokens.lengths.tolist() == exact.tokens.lengths.tolist()
    torch.testing.assert_close(whole.tokens.values, exact.tokens.values, rtol=0, atol=1e-6)


def test_retriever(saved, tmp_path):
    model = Model.from_pretrained(saved, device="cpu")
    retriever = Retriever.build(model, DOCUMENTS, tmp_path / "index")
    hits = retriever.search("Which metal conducts?", k=4)
    assert hits[0].id == "c"
    exact = model.similarity(
        model.encode_query(["Which metal conducts?"]), model.encode_document(DOCUMENTS["c"])
    )
    assert hits[0].score == pytest.approx(float(exact[0, 0]), rel=1e-6)
    retriever.remove(["c"])
    retriever.add({"d": "Silver is the best conductor of all metals."})
    retriever.close()
    again = Retriever.load(tmp_path / "index")
    assert again.search("Which metal conducts?", k=1)[0].id == "d"
    with pytest.raises(BadValueError, match="it was built with"):
        Retriever.load(
            tmp_path / "index", Model.multi_vector(saved, None, {"document_length": 9}, device="cpu")
        )


def test_command_line(saved, tmp_path):
    lines = [json.dumps({"_id": name, "text": text}) for name, text in DOCUMENTS.items() if text]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    run = CliRunner().invoke

    def irkit(*arguments: object) -> str:
        result = run(app, [str(argument) for argument in arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    facts = json.loads(irkit("info", saved, "--json"))
    assert (facts["kind"], facts["dim"], facts["similarity"]) == ("multi_vector", 384, "maxsim")
    assert facts["query_length"] is None
    irkit("index", saved, tmp_path / "corpus.jsonl", "--out", tmp_path / "index", "--dtype", "float32")
    assert "Copper" in irkit("search", tmp_path / "index", "--text", "metal", "--k", "1")
    irkit(
        "encode", saved, tmp_path / "corpus.jsonl", "--out", tmp_path / "v.safetensors", "--dtype", "float32"
    )
    arrays = load_file(tmp_path / "v.safetensors")
    wanted = Model.from_pretrained(saved, device="cpu").encode_representation(
        [*DOCUMENTS.values()][:2], "document"
    )
    assert arrays["lengths"][:2].tolist() == wanted.tokens.lengths.tolist()
    np.testing.assert_allclose(arrays["values"][: len(wanted.tokens.values)], wanted.tokens.values, atol=1e-6)
