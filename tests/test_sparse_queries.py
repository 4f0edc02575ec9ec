"""Queries of sparse models that have a side of their own: lexical, weighed tokens, another encoder."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from irkit import Model, Ragged, Retriever, Sparse, score
from irkit.encoder.inference_free import InferenceFreeEncoder
from irkit.errors import BadTypeError, BadValueError, ConfigError, CorruptError, StorageError
from irkit.heads import SparseConfig
from irkit.heads.static_head import StaticHead
from irkit.model import idf_weights
from irkit.model.queries import query_config
from irkit.tokenizer import Tokenizer

TEXTS = [
    "a search, text text",
    "zzz [SEP] token!",
    "",
    "neural model of a token index 42",
    "Text of the MODEL",
]
CORPUS = {"1": "search of the index", "2": "a neural model of text", "3": "vector token", "4": ""}


def masked_lm(directory: Path, tiny_bert: Path, seed: int) -> Path:
    """A BertForMaskedLM of random weights with the tokenizer of ``tiny_bert``."""
    from transformers import BertConfig, BertForMaskedLM

    shutil.copytree(tiny_bert, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(seed)
    BertForMaskedLM(BertConfig.from_pretrained(tiny_bert)).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def splade(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return masked_lm(tmp_path_factory.mktemp("splade") / "model", tiny_bert, 1)


@pytest.fixture(scope="module")
def other(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return masked_lm(tmp_path_factory.mktemp("other") / "model", tiny_bert, 2)


@pytest.fixture(scope="module")
def modules(peer: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sentence_transformers.sparse_encoder.modules as modules
    return modules


@pytest.fixture
def tokenizer(tiny_bert: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(tiny_bert)


@pytest.fixture(scope="module")
def saved_router(
    peer: Any, modules: Any, splade: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """An inference-free model of sentence-transformers, and where it is saved."""
    path = tmp_path_factory.mktemp("saved") / "router"
    document = peer.base.modules.Transformer(str(splade), transformer_task="fill-mask")
    torch.manual_seed(3)
    weight = torch.rand(len(document.tokenizer.get_vocab())) + 0.1
    weight[7] = 0.0
    static = modules.SparseStaticEmbedding(document.tokenizer, weight=weight)
    pooling = modules.SpladePooling("max", "log1p_relu")
    model = peer.SparseEncoder(
        modules=[peer.base.modules.Router.for_query_document([static], [document, pooling])], device="cpu"
    )
    model.save_pretrained(str(path))
    return model, path


@pytest.fixture
def router(saved_router: tuple[Any, Path], tmp_path: Path) -> tuple[Any, Path]:
    """The same, with a directory of the test."""
    return saved_router[0], shutil.copytree(saved_router[1], tmp_path / "router")


def assert_same_outputs(model: Model, peer_model: Any, **options: Any) -> None:
    for method in ("encode_query", "encode_document", "encode"):
        ours = getattr(model, method)(TEXTS, convert_to_sparse_tensor=False, **options)
        theirs = getattr(peer_model, method)(TEXTS, **options).to_dense()
        assert ours.count_nonzero() > 0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    queries, documents = model.encode_query(TEXTS), model.encode_document(TEXTS)
    assert queries.is_sparse
    torch.testing.assert_close(
        model.similarity(queries, documents),
        peer_model.similarity(peer_model.encode_query(TEXTS), peer_model.encode_document(TEXTS)),
        rtol=1e-5,
        atol=1e-4,
    )


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


# ---- weights of tokens ----


@given(
    rows=st.lists(st.lists(st.integers(0, 5), max_size=8), max_size=5),
    weight=st.lists(st.floats(-2, 2, width=32), min_size=6, max_size=6),
    most=st.none() | st.integers(1, 4),
)
def test_a_row_is_its_distinct_tokens_with_their_weights(
    rows: list[list[int]], weight: list[float], most: int | None
) -> None:
    head = StaticHead(torch.tensor(weight), 9, frozen=True)
    found = head.look_up(Ragged.from_rows(rows, dtype=torch.int64), most)
    assert found.dim == 9
    assert len(found) == len(rows)
    for terms, row, start in zip(found.terms, rows, found.terms.offsets.tolist(), strict=False):
        distinct = sorted(token for token in set(row) if weight[token] != 0)
        best = sorted(distinct, key=lambda token: (-abs(weight[token]), token))[:most]
        assert terms.tolist() == sorted(best)
        values = found.weights[start : start + len(terms)]
        assert values.tolist() == [weight[token] for token in sorted(best)]


def test_tokens_without_a_dimension_weigh_nothing() -> None:
    head = StaticHead(torch.ones(4), 3)
    assert head.look_up(Ragged.from_rows([[0, 3, 2], [9]])).to_dense().tolist() == [[1, 0, 1], [0, 0, 0]]


def test_learned_weights_get_the_gradients_of_the_peer(router: tuple[Any, Path]) -> None:
    peer_model, path = router
    model = Model.from_pretrained(path)
    tokens = model.pipeline("query").tokenize(TEXTS)
    found = model(tokens, side="query")
    assert isinstance(found, Sparse)
    torch.manual_seed(4)
    upstream = torch.randn(len(TEXTS), model.dim)
    (found.to_dense() * upstream).sum().backward()
    features = peer_model.preprocess(TEXTS, task="query")
    (peer_model(features, task="query")["sentence_embedding"] * upstream).sum().backward()
    ours = model.query_model.head.weight.grad
    theirs = dict(peer_model.named_parameters())["0.sub_modules.query.0.weight"].grad
    assert theirs[7] != 0  # also of a weight that is 0
    torch.testing.assert_close(ours, theirs)
    assert all(weight.grad is None for weight in model.encoder.parameters())


def test_frozen_weights_get_no_gradients(splade: Path) -> None:
    model = Model.from_pretrained(splade).set_queries({"kind": "static", "frozen": True})
    tokens = model.pipeline("query").tokenize(TEXTS)
    assert not model(tokens, side="query").weights.requires_grad
    assert model(tokens, side="document").weights.requires_grad


@pytest.mark.parametrize("weight", [torch.tensor([1.0, math.nan]), torch.ones(2, 2), torch.ones(2).long()])
def test_weights_are_a_row_of_finite_numbers(weight: torch.Tensor) -> None:
    with pytest.raises(BadValueError, match="a row of finite numbers"):
        StaticHead(weight)


# ---- lexical queries ----


def test_lexical_queries_are_binary_and_without_special_tokens(splade: Path, tokenizer: Tokenizer) -> None:
    model = Model.from_pretrained(splade).set_queries("lexical")
    found = model.encode_representation(["text text a [SEP] [MASK] ☃", ""], "query")
    assert isinstance(found, Sparse)
    assert found.terms[0].tolist() == sorted(tokenizer.ids(["a", "text"]))
    assert found.weights.tolist() == [1.0, 1.0]
    assert found.terms[1].tolist() == []
    assert found.dim == model.dim


def test_lexical_scores_add_up_weights_of_documents(splade: Path, tokenizer: Tokenizer) -> None:
    model = Model.from_pretrained(splade).set_queries("lexical")
    documents = model.encode_representation(list(CORPUS.values()), "document")
    found = score(model.encode_representation(["index of text"], "query"), documents)
    assert isinstance(documents, Sparse)
    expected = documents.to_dense()[:, tokenizer.ids(["index", "of", "text"])].sum(1)
    torch.testing.assert_close(found[0], expected)


def test_no_encoder_runs_for_queries(splade: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model.from_pretrained(splade).set_queries("lexical")
    retriever = Retriever.build(model, CORPUS, tmp_path / "index")

    def never(*inputs: Any) -> None:
        raise AssertionError("the encoder ran")

    model.encoder.register_forward_hook(never)
    assert [hit.id for hit in retriever.search("vector", k=4)]
    assert isinstance(model.query_model, Model)
    assert isinstance(model.query_model.encoder, InferenceFreeEncoder)
    model.encode_query(TEXTS, device=["cpu", "cpu"])
    model(model.pipeline("query").tokenize(TEXTS), side="query")
    with pytest.raises(AssertionError, match="the encoder ran"):
        model.encode_document(TEXTS)


def test_queries_over_words(splade: Path, tmp_path: Path) -> None:
    words = ["index", "neural", "retrieval", "text"]
    model = Model.sparse(splade, vocabulary=words, queries="lexical")
    queries = model.encode_representation(["Text, retrieval of text - unheard", "neural"], "query")
    assert isinstance(queries, Sparse)
    assert queries.to_dense().tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    weighed = {"kind": "static", "weights": {"index": 2.0, "text": 0.5}}
    model.set_queries(weighed)
    assert model.encode_query("text index neural").to_dense().tolist() == [2.0, 0.0, 0.0, 0.5]
    with pytest.warns(UserWarning, match="sentence-transformers cannot open it"):
        model.save_pretrained(tmp_path / "saved")
    loaded = Model.from_pretrained(tmp_path / "saved")
    assert loaded.vocabulary == words
    assert loaded.encode_query("text index neural").to_dense().tolist() == [2.0, 0.0, 0.0, 0.5]


# ---- IDF ----


def test_idf_of_a_corpus(tokenizer: Tokenizer) -> None:
    weights = idf_weights(iter(CORPUS.values()), tokenizer)
    # 3 texts hold a token: "of" is in 2 of them, "search" in 1
    assert weights["of"] == pytest.approx(math.log(1 + 1.5 / 2.5))
    assert weights["search"] == pytest.approx(math.log(1 + 2.5 / 1.5))
    assert weights.keys() == {
        "search",
        "of",
        "the",
        "index",
        "a",
        "neural",
        "model",
        "text",
        "vector",
        "token",
    }
    assert idf_weights(["text text"], tokenizer).keys() == {"text"}


def test_idf_counts_whole_texts(tokenizer: Tokenizer) -> None:
    tokenizer.max_length = 4
    assert "index" in idf_weights(["a a a a a a index"], tokenizer)
    assert tokenizer.max_length == 4


def test_idf_needs_texts(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadValueError, match="no text holds a token"):
        idf_weights(["", ""], tokenizer)
    with pytest.raises(BadTypeError, match="text 1 is int"):
        idf_weights(["a", 3], tokenizer)  # type: ignore[list-item]


def test_idf_json_of_a_directory(peer: Any, modules: Any, splade: Path, tmp_path: Path) -> None:
    path = tmp_path / "opensearch"
    shutil.copytree(splade, path)
    tokenizer = Tokenizer.from_pretrained(splade)
    table = idf_weights(CORPUS.values(), tokenizer) | {"[SEP]": 0.7}
    (path / "idf.json").write_text(json.dumps(table))
    model = Model.from_pretrained(path)
    document = peer.base.modules.Transformer(str(path), transformer_task="fill-mask")
    static = modules.SparseStaticEmbedding.from_json(str(path / "idf.json"), document.tokenizer)
    peer_model = peer.SparseEncoder(
        modules=[
            peer.base.modules.Router.for_query_document([static], [document, modules.SpladePooling("max")])
        ],
        device="cpu",
    )
    assert_same_outputs(model, peer_model)
    same = Model.from_pretrained(splade).set_queries({"kind": "static", "weights": str(path)})
    assert same.query_fingerprint == model.query_fingerprint
    weighed = Model.from_pretrained(splade).set_queries({"kind": "static", "weights": table})
    assert weighed.query_fingerprint == model.query_fingerprint


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"search": 1.0, "abracadabra": 2.0}, "1 of 2 tokens are not in the vocabulary.*'abracadabra'"),
        ({"search": -0.5}, "token 'search' has weight -0.5, expected a number >= 0"),
        ({"search": math.nan}, "token 'search' has weight nan"),
        ({"search": math.inf}, "token 'search' has weight inf"),
        ({"search": "much"}, "token 'search' has weight 'much'"),
        ({"search": None}, "token 'search' has weight None"),
        ({"search": True}, "token 'search' has weight True"),
        ([1.0, 2.0], "expected a JSON object, got list"),
        ({}, "there are no weights"),
    ],
)
def test_impossible_idf_json(splade: Path, tmp_path: Path, table: Any, message: str) -> None:
    path = tmp_path / "model"
    shutil.copytree(splade, path)
    (path / "idf.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=message) as caught:
        Model.from_pretrained(path)
    assert "idf.json" in str(caught.value)


# ---- configuration ----


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("lexcial", "got 'lexcial', expected 'lexical', 'static' or keys and values with a kind"),
        (3, "got 3, expected"),
        ({"weights": "idf.json"}, "expected 'lexical', 'static' or keys and values with a kind"),
        ({"kind": "static", "wieghts": None}, "unknown key 'wieghts'; did you mean 'weights'"),
        ({"kind": "encoder"}, "missing key 'model'"),
    ],
)
def test_impossible_configurations(choice: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        query_config(choice)


def test_only_sparse_models_have_query_sides(tiny_bert: Path, splade: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="mean of its tokens"):
        dense = Model.from_pretrained(tiny_bert)
    with pytest.raises(BadValueError, match="a lexical side is for sparse models, this one makes dense"):
        dense.set_queries("lexical")
    dense.save_pretrained(tmp_path / "dense")
    model = Model.from_pretrained(splade)
    with pytest.raises(BadValueError, match="queries become dense of width 32, documents sparse of width"):
        model.set_queries({"kind": "encoder", "model": str(tmp_path / "dense")})
    with pytest.raises(StorageError, match=r"idf\.json"):
        model.set_queries({"kind": "static", "weights": str(splade)})
    with pytest.raises(StorageError, match=r"missing-idf\.json.*No such file"):
        model.set_queries({"kind": "static", "weights": "missing-idf.json"})
    assert model.query_model is None


def test_a_path_is_as_good_as_its_name(splade: Path) -> None:
    assert query_config({"kind": "encoder", "model": splade}).model == str(splade)
    assert query_config({"kind": "static", "weights": splade}).weights == str(splade)


def test_documents_without_a_term_of_the_query_are_no_results(splade: Path, tmp_path: Path) -> None:
    model = Model.sparse(splade, {"document_max_active_dims": 12}, queries="lexical")
    documents = model.encode_representation(list(CORPUS.values()), "document")
    scores = score(model.encode_representation(["token"], "query"), documents)[0]
    expected = {str(row + 1) for row in scores.nonzero().flatten().tolist()}
    assert 0 < len(expected) < len(CORPUS)
    for index in ("inverted", "flat"):
        retriever = Retriever.build(model, CORPUS, tmp_path / index, index=index)
        assert {hit.id for hit in retriever.search("token", k=10)} == expected
        assert retriever.search("", k=2) == []


def test_none_gives_queries_back_to_the_encoder(splade: Path) -> None:
    model = Model.from_pretrained(splade)
    before = model.encode_query(TEXTS).to_dense()
    model.set_queries("lexical")
    assert not torch.equal(model.encode_query(TEXTS).to_dense(), before)
    assert torch.equal(model.set_queries(None).encode_query(TEXTS).to_dense(), before)


# ---- Router ----


def test_router_of_the_peer_and_back(peer: Any, router: tuple[Any, Path], tmp_path: Path) -> None:
    peer_model, path = router
    model = Model.from_pretrained(path)
    assert_same_outputs(model, peer_model)
    assert_same_outputs(model, peer_model, max_active_dims=2)
    assert isinstance(model.query_model, Model)
    assert not model.query_model.head.frozen
    model.save_pretrained(tmp_path / "saved")
    assert_same_outputs(model, peer.SparseEncoder(str(tmp_path / "saved"), device="cpu"))
    model.save_pretrained(tmp_path / "saved")  # over itself
    loaded = Model.from_pretrained(tmp_path / "saved")
    assert_same_outputs(loaded, peer_model)
    assert (loaded.fingerprint, loaded.query_fingerprint) == (model.fingerprint, model.query_fingerprint)


@pytest.mark.parametrize(
    "choice", ["lexical", "static", {"kind": "static", "weights": {"text": 1.5, "a": 1}, "frozen": True}]
)
def test_what_is_made_here_opens_there(peer: Any, splade: Path, tmp_path: Path, choice: Any) -> None:
    model = Model.sparse(splade, {"document_max_active_dims": 3}, queries=choice)
    model.prompts["query"] = "search: "
    with pytest.warns(UserWarning, match="one limit for both"):
        model.save_pretrained(tmp_path / "saved")
    assert_same_outputs(Model.from_pretrained(tmp_path / "saved"), model)
    model.head.config = SparseConfig()
    model.save_pretrained(tmp_path / "saved")
    peer_model = peer.SparseEncoder(str(tmp_path / "saved"), device="cpu")
    assert_same_outputs(model, peer_model)
    assert peer_model[0].sub_modules["query"][0].frozen == (choice != "static")


def test_long_queries_are_cut_as_by_the_peer(peer: Any, router: tuple[Any, Path], tmp_path: Path) -> None:
    peer_model, path = router
    text = "z " * 63 + "a search"  # of which 64 tokens stay
    model = Model.from_pretrained(path)
    expected = peer_model.encode_query(text).to_dense()
    assert torch.equal(model.encode_query(text).to_dense(), expected)
    fresh = Model.from_pretrained(path).set_queries("lexical")
    fresh.save_pretrained(tmp_path / "saved")
    expected = peer.SparseEncoder(str(tmp_path / "saved"), device="cpu").encode_query(text).to_dense()
    assert torch.equal(fresh.encode_query(text).to_dense(), expected)


def test_a_length_of_queries_alone_is_saved(splade: Path, tmp_path: Path) -> None:
    model = Model.from_pretrained(splade).set_queries("lexical")
    length = model.max_length("document")
    model.set_length("query", 3)
    model.save_pretrained(tmp_path / "saved")
    for each in (model, Model.from_pretrained(tmp_path / "saved")):
        assert (each.max_length("query"), each.max_length("document")) == (3, length)
        assert each.encode_query("a text index model search").to_dense().count_nonzero() == 3


@pytest.mark.parametrize("choice", ["lexical", "static", "encoder", None])
@pytest.mark.parametrize("before", [None, "lexical", "encoder"])
def test_another_query_side_keeps_the_length(
    splade: Path, other: Path, tmp_path: Path, before: str | None, choice: str | None
) -> None:
    def chosen(kind: str | None) -> Any:
        return {"kind": "encoder", "model": str(other)} if kind == "encoder" else kind

    model = Model.from_pretrained(splade).set_queries(chosen(before))
    model.set_length("query", 5)
    model.set_queries(chosen(choice)).save_pretrained(tmp_path / "saved")
    for each in (model, Model.from_pretrained(tmp_path / "saved")):
        assert (each.max_length("query"), each.max_length("document")) == (5, 64)


def test_a_query_side_that_brings_a_length_has_it(splade: Path, other: Path, tmp_path: Path) -> None:
    theirs = Model.from_pretrained(other)
    theirs.set_length("query", 7)
    theirs.save_pretrained(tmp_path / "other")
    model = Model.from_pretrained(splade)
    model.set_length("query", 5)
    model.set_queries({"kind": "encoder", "model": str(tmp_path / "other")})
    assert model.max_length("query") == 7


def test_a_length_too_short_for_what_queries_become_changes_nothing(splade: Path) -> None:
    model = Model.from_pretrained(splade).set_queries("lexical")
    model.set_length("query", 2)  # with [CLS] and [SEP] nothing would be left of a text
    queries = model.query_model
    with pytest.raises(BadValueError, match="query_length 2 leaves no room"):
        model.set_queries(None)
    assert (model.query_model, model.max_length("query")) == (queries, 2)
    assert not model.head.lengths


def test_lengths_of_a_model_without_any_encoder_are_saved(splade: Path, tmp_path: Path) -> None:
    queries = Model.from_pretrained(splade).set_queries("static").query_model
    assert queries is not None
    model = Model(queries.tokenizer, queries.encoder, queries.head)
    model.set_length("query", 3)
    model.set_length("document", 9)
    model.save_pretrained(tmp_path / "saved")
    saved = Model.from_pretrained(tmp_path / "saved")
    assert (saved.max_length("query"), saved.max_length("document")) == (3, 9)
    assert saved.encode_query("a text index model search").to_dense().count_nonzero() == 3  # type: ignore[union-attr]
    file = tmp_path / "saved" / "sentence_bert_config.json"
    file.write_text(json.dumps({"query_length": "3"}))
    with pytest.raises(ConfigError, match=r"lengths of .*, expected numbers of tokens by side"):
        Model.from_pretrained(tmp_path / "saved")


def test_legacy_router(router: tuple[Any, Path], tmp_path: Path) -> None:
    """As version 5 wrote it; and with the Transformer in the directory itself, as OpenSearch has it."""
    peer_model, path = router
    old = tmp_path / "old"
    shutil.copytree(path, old)
    (old / "document_0_Transformer").rename(old / "document_0_MLMTransformer")
    settings = {"max_seq_length": 64, "do_lower_case": False}
    (old / "document_0_MLMTransformer" / "sentence_bert_config.json").write_text(json.dumps(settings))
    home = "sentence_transformers.sparse_encoder.models"
    types = {
        "query_0_SparseStaticEmbedding": f"{home}.SparseStaticEmbedding.SparseStaticEmbedding",
        "document_0_MLMTransformer": f"{home}.MLMTransformer.MLMTransformer",
        "document_1_SpladePooling": f"{home}.SpladePooling.SpladePooling",
    }
    structure = {"query": [next(iter(types))], "document": list(types)[1:]}
    content = {"types": types, "structure": structure, "parameters": {"default_route": "document"}}
    (old / "router_config.json").unlink()
    (old / "config.json").write_text(json.dumps(content))  # its name before version 5
    assert_same_outputs(Model.from_pretrained(old), peer_model)
    root = tmp_path / "root"
    shutil.copytree(path, root)
    for file in (root / "document_0_Transformer").iterdir():
        shutil.move(file, root / file.name)
    (root / "document_0_Transformer").rmdir()

    def move(content: dict[str, Any]) -> None:
        content["types"][""] = content["types"].pop("document_0_Transformer")
        content["structure"]["document"][0] = ""

    edit(root / "router_config.json", move)
    assert_same_outputs(Model.from_pretrained(root), peer_model)


def test_weights_in_a_json_file_of_the_module(router: tuple[Any, Path]) -> None:
    peer_model, path = router
    place = path / "query_0_SparseStaticEmbedding"
    tokens = Tokenizer.from_pretrained(place).tokens(peer_model.get_embedding_dimension())
    weights = peer_model[0].sub_modules["query"][0].weight.tolist()
    (place / "idf.json").write_text(json.dumps(dict(zip(tokens, weights, strict=True))))
    (place / "model.safetensors").unlink()
    edit(place / "config.json", lambda content: content.update(path="idf.json"))
    assert_same_outputs(Model.from_pretrained(path), peer_model)


def test_two_encoders(peer: Any, modules: Any, splade: Path, other: Path, tmp_path: Path) -> None:
    parts = [
        [
            peer.base.modules.Transformer(str(path), transformer_task="fill-mask"),
            modules.SpladePooling(pooling),
        ]
        for path, pooling in ((other, "sum"), (splade, "max"))
    ]
    peer_model = peer.SparseEncoder(
        modules=[peer.base.modules.Router.for_query_document(*parts)], device="cpu"
    )
    peer_model.save_pretrained(str(tmp_path / "peer"))
    model = Model.from_pretrained(tmp_path / "peer")
    assert isinstance(model.query_model, Model)
    assert_same_outputs(model, peer_model)
    model.save_pretrained(tmp_path / "saved")
    assert_same_outputs(model, peer.SparseEncoder(str(tmp_path / "saved"), device="cpu"))
    assert_same_outputs(Model.from_pretrained(tmp_path / "saved"), peer_model)
    made = Model.from_pretrained(splade).set_queries({"kind": "encoder", "model": str(other)})
    assert torch.equal(made.encode_document(TEXTS).to_dense(), model.encode_document(TEXTS).to_dense())
    made.set_queries({"kind": "encoder", "model": str(tmp_path / "saved")})
    assert made.query_fingerprint == model.query_fingerprint


def test_two_dense_encoders(peer: Any, splade: Path, other: Path, tmp_path: Path) -> None:
    """The same Router serves dense models: an encoder for questions, another for passages."""
    home = peer.sentence_transformer.modules
    parts = [[home.Transformer(str(path)), home.Pooling(32, "mean")] for path in (other, splade)]
    peer_model = peer.SentenceTransformer(modules=[home.Router.for_query_document(*parts)], device="cpu")
    peer_model.save_pretrained(str(tmp_path / "peer"))
    model = Model.from_pretrained(tmp_path / "peer")
    model.save_pretrained(tmp_path / "saved")
    for ours in (model, peer.SentenceTransformer(str(tmp_path / "saved"), device="cpu")):
        for method in ("encode_query", "encode_document"):
            expected = getattr(peer_model, method)(TEXTS)
            torch.testing.assert_close(getattr(ours, method)(TEXTS), expected, rtol=0, atol=1e-5)
    with pytest.raises(BadValueError, match="no place for a query side"):
        model.save_pretrained(tmp_path / "colbert", format="stanford")


def test_naver_directory_with_a_query_encoder(splade: Path, other: Path, tmp_path: Path) -> None:
    path = tmp_path / "naver"
    shutil.copytree(splade, path)
    shutil.copytree(other, path / "query", ignore=shutil.ignore_patterns("tokenizer*"))
    model, documents, queries = (Model.from_pretrained(each) for each in (path, splade, other))
    assert torch.equal(model.encode_query(TEXTS).to_dense(), queries.encode_query(TEXTS).to_dense())
    assert torch.equal(model.encode_document(TEXTS).to_dense(), documents.encode_document(TEXTS).to_dense())
    assert model.fingerprint == documents.fingerprint
    model.save_pretrained(path)  # in place of the directory that it was
    loaded = Model.from_pretrained(path)
    assert torch.equal(loaded.encode_query(TEXTS).to_dense(), queries.encode_query(TEXTS).to_dense())


def test_the_same_way_for_both_sides_is_one_model(router: tuple[Any, Path]) -> None:
    path = router[1]

    def join(content: dict[str, Any]) -> None:
        content["structure"]["query"] = content["structure"]["document"]
        del content["types"]["query_0_SparseStaticEmbedding"]

    edit(path / "router_config.json", join)
    model = Model.from_pretrained(path)
    assert model.query_model is None
    assert torch.equal(model.encode_query(TEXTS).to_dense(), model.encode_document(TEXTS).to_dense())


def test_route_mappings(peer: Any, router: tuple[Any, Path]) -> None:
    peer_model, path = router

    def rename(content: dict[str, Any]) -> None:
        structure = content["structure"]
        content["structure"] = {"fast": structure["query"], "slow": structure["document"]}
        rules = {"('query', 'text')": "fast", "(None, 'text')": "slow"}
        content["parameters"] = {"default_route": "slow", "route_mappings": rules}

    edit(path / "router_config.json", rename)
    assert_same_outputs(Model.from_pretrained(path), peer_model)
    assert_same_outputs(Model.from_pretrained(path), peer.SparseEncoder(str(path), device="cpu"))


def set_key(*keys: str, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda content: content.pop("types"), ConfigError, "router_config.json: missing key 'types'"),
        (set_key("structure", value=[]), ConfigError, "router_config.json: structure"),
        (
            set_key("structure", "query", value=[]),
            CorruptError,
            "route 'query' runs \\[\\], expected some of",
        ),
        (set_key("structure", "query", value=["gone"]), CorruptError, r"route 'query' runs \['gone'\]"),
        (set_key("structure", "image", value=["document_1_SpladePooling"]), ConfigError, "routes 'image'"),
        (
            lambda content: content["structure"].pop("query"),
            ConfigError,
            "a Router without a route for a query, it has 'document'",
        ),
        (
            set_key("parameters", "route_mappings", value={"query": "query"}),
            CorruptError,
            "route_mappings 'query', no task and input",
        ),
        (
            set_key("types", "query_0_SparseStaticEmbedding", value="my.code.Static"),
            ConfigError,
            "module my.code.Static is code of its own",
        ),
        (
            set_key("types", "query_0_SparseStaticEmbedding", value="sentence_transformers.models.BoW"),
            ConfigError,
            "starts with BoW, expected Transformer",
        ),
        (
            set_key(
                "structure", "query", value=["query_0_SparseStaticEmbedding", "document_1_SpladePooling"]
            ),
            ConfigError,
            "starts with SparseStaticEmbedding, expected Transformer",
        ),
        (set_key("types", "../x", value="sentence_transformers.models.BoW"), ConfigError, "leads out"),
    ],
)
def test_routers_that_cannot_run(
    router: tuple[Any, Path], change: Any, error: type[Exception], message: str
) -> None:
    path = router[1]
    edit(path / "router_config.json", change)
    with pytest.raises(error, match=message):
        Model.from_pretrained(path)


def test_a_router_without_its_file(router: tuple[Any, Path]) -> None:
    (router[1] / "router_config.json").unlink()
    with pytest.raises(StorageError, match=r"reading .*config\.json"):
        Model.from_pretrained(router[1])


@pytest.mark.parametrize(
    "tensors",
    [{"weight": torch.ones(3)}, {}, {"weight": torch.full((101,), math.nan)}, {"w": torch.ones(101)}],
)
def test_damaged_weights(router: tuple[Any, Path], tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    place = router[1] / "query_0_SparseStaticEmbedding"
    save_file(tensors, place / "model.safetensors")
    with pytest.raises(CorruptError, match="query_0_SparseStaticEmbedding"):
        Model.from_pretrained(router[1])


def test_sides_must_share_a_vocabulary(
    splade: Path, other: Path, router: tuple[Any, Path], tmp_path: Path
) -> None:
    words = ["alpha", "beta"]
    model = Model.sparse(splade, vocabulary=words)
    with pytest.raises(
        BadValueError, match="queries become sparse of width 101, documents sparse of width 2"
    ):
        model.set_queries({"kind": "encoder", "model": str(other)})
    path = router[1] / "query_0_SparseStaticEmbedding" / "tokenizer.json"

    def swap(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary["search"], vocabulary["index"] = vocabulary["index"], vocabulary["search"]

    edit(path, swap)
    with pytest.raises(BadValueError, match=r"term \d+ is 'index' for queries and 'search' for documents"):
        Model.from_pretrained(router[1])


def test_a_model_of_weights_alone(peer: Any, modules: Any, router: tuple[Any, Path], tmp_path: Path) -> None:
    static = router[0][0].sub_modules["query"][0]
    peer_model = peer.SparseEncoder(modules=[static], device="cpu")
    peer_model.save_pretrained(str(tmp_path / "peer"))
    model = Model.from_pretrained(tmp_path / "peer", dtype="auto")
    assert_same_outputs(model, peer_model)
    model.save_pretrained(tmp_path / "saved")
    assert_same_outputs(model, peer.SparseEncoder(str(tmp_path / "saved"), device="cpu"))


# ---- ids with a gap ----


def test_every_word_weighs_where_ids_have_a_gap(gapped_bert: Path, tmp_path: Path) -> None:
    texts = ["a index", "b search"]
    tokenizer = Tokenizer.from_pretrained(gapped_bert)
    assert (tokenizer.vocab_size, tokenizer.highest_id()) == (9, 9)
    idf = idf_weights([*texts, "a"], tokenizer)
    assert {word: idf[word] == idf["index"] for word in idf} == {
        "a": False,
        "b": True,
        "search": True,
        "index": True,
    }
    for queries in ("lexical", "static", {"kind": "static", "weights": idf}):
        model = Model.sparse(gapped_bert, queries=queries, device="cpu")
        assert [terms.tolist() for terms in model.encode_representation(texts, "query").terms] == [
            [5, 9],
            [7, 8],
        ]
    model.save_pretrained(tmp_path / "model")
    loaded = Model.from_pretrained(tmp_path / "model", device="cpu")
    assert torch.equal(loaded.encode_query(texts).to_dense(), model.encode_query(texts).to_dense())
    # sentence-transformers gives a weight to as many ids as there are tokens
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(9)}, tmp_path / "model/query_0_SparseStaticEmbedding/model.safetensors")
    shorter = Model.from_pretrained(tmp_path / "model", device="cpu")
    assert shorter.encode_query("a b search").to_dense().nonzero().flatten().tolist() == [5, 7, 8]


# ---- indexes ----


def test_an_index_notices_another_query_side(splade: Path, other: Path, tmp_path: Path) -> None:
    model = Model.from_pretrained(splade).set_queries("lexical")
    model.save_pretrained(tmp_path / "model")
    built = Retriever.build(Model.from_pretrained(tmp_path / "model"), CORPUS, tmp_path / "index")
    hits = built.search("neural text")
    assert Retriever.load(tmp_path / "index").search("neural text") == hits  # by the name of the model
    assert Retriever.load(tmp_path / "index", model).search("neural text") == hits
    weighed = Model.from_pretrained(splade).set_queries({"kind": "static", "weights": {"text": 2.0}})
    with pytest.warns(UserWarning, match="makes something else of queries"):
        changed = Retriever.load(tmp_path / "index", weighed)
    assert changed.search("neural text")[0].score != hits[0].score
    siamese = Model.from_pretrained(splade)
    with pytest.warns(UserWarning, match="makes something else of queries"):
        Retriever.load(tmp_path / "index", siamese)
    with pytest.raises(BadValueError, match="was built with"):
        Retriever.load(tmp_path / "index", Model.from_pretrained(other).set_queries("lexical"))


def test_fingerprints(splade: Path) -> None:
    model = Model.from_pretrained(splade)
    documents, queries = model.fingerprint, model.query_fingerprint
    model.prompts["query"] = "query: "
    assert (model.fingerprint, model.query_fingerprint == queries) == (documents, False)
    model.prompts["document"] = "passage: "
    assert model.fingerprint != documents
    model.prompts = {"query": "", "document": ""}
    lexical = model.set_queries("lexical").query_fingerprint
    static = model.set_queries("static").query_fingerprint
    assert len({queries, lexical, static}) == 2  # "static" starts as lexical queries are
    with torch.no_grad():
        model.query_model.head.weight[9] += 1
    assert model.query_fingerprint != static
    assert model.fingerprint == documents


def test_int8_is_for_the_encoders_alone(router: tuple[Any, Path], tmp_path: Path) -> None:
    exact, rough = (Model.from_pretrained(router[1], dtype=dtype) for dtype in ("float32", "int8"))
    assert (rough.fingerprint, rough.query_fingerprint) == (exact.fingerprint, exact.query_fingerprint)
    assert torch.equal(rough.encode_query(TEXTS).to_dense(), exact.encode_query(TEXTS).to_dense())
    with pytest.raises(BadValueError, match="the weights are int8"):
        rough.save_pretrained(tmp_path / "saved")


def test_limits_of_a_side(splade: Path) -> None:
    config = SparseConfig(query_max_active_dims=2, document_max_active_dims=5)
    table = {"kind": "static", "weights": {"a": 1.0, "text": 3.0, "index": 2.0}}
    model = Model.sparse(splade, config, queries=table)
    found = model.encode_representation(["a text index"], "query")
    assert isinstance(found, Sparse)
    assert sorted(found.weights.tolist()) == [2.0, 3.0]
    assert model.encode_query("a text index", max_active_dims=1).to_dense().count_nonzero() == 1
    assert model.encode_representation(["a text index"], "document").terms.lengths.tolist() == [5]  # type: ignore[union-attr]
