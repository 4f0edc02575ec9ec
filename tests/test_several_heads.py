"""Models with several heads on one encoder: one pass, files of our own and of BGE-M3, wrong input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from irkit import Model, Ragged, Retriever, Sparse
from irkit.core.representation import Dense, MultiVector, Several, concat, representation_from_arrays
from irkit.errors import BadTypeError, BadValueError, ConfigError, CorruptError, IrkitError, StorageError
from irkit.heads import PooledHead, SeveralHeads, TokenWeightHead

TEXTS = ["search the index index", "", "a neural model of text in the vector index", "token <mask>"]
HEADS = {
    "dense": {"pooling": "cls"},
    "sparse": {"head": "token_weight"},
    "multi_vector": {"projection": {"dim": 8}, "similarity": "meanmaxsim"},
}


@pytest.fixture
def model(tiny_bert: Path) -> Model:
    torch.manual_seed(0)
    return Model.several(tiny_bert, HEADS, device="cpu")


@pytest.fixture(scope="module")
def bge_m3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BGE-M3's files with random weights: XLM-RoBERTa, Pooling, Normalize and two linear layers."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import XLMRobertaConfig, XLMRobertaModel

    path = tmp_path_factory.mktemp("bge-m3") / "model"
    path.mkdir()
    words = [
        "a",
        "an",
        "the",
        "of",
        "in",
        "on",
        "search",
        "index",
        "vector",
        "token",
        "model",
        "neural",
        "text",
    ]
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *words, "<mask>"]
    tokenizer = Tokenizer(
        models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 30, "mask_token": "<mask>"}
    about |= {f"{role}_token": token for role, token in names.items()}
    (path / "tokenizer_config.json").write_text(json.dumps(about))
    torch.manual_seed(1)
    config = XLMRobertaConfig(
        vocab_size=len(pieces),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=34,
        initializer_range=0.3,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    XLMRobertaModel(config, add_pooling_layer=False).save_pretrained(path)
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" * bool(i),
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 30}))
    (path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (path / "2_Normalize").mkdir()
    torch.save(torch.nn.Linear(32, 32).state_dict(), path / "colbert_linear.pt")
    torch.save(torch.nn.Linear(32, 1).state_dict(), path / "sparse_linear.pt")
    return path


def by_transformers(path: Path, text: str) -> tuple[torch.Tensor, dict[int, float], torch.Tensor]:
    """The outputs of BGE-M3 in plain transformers and torch: dense, weights by token id, token vectors."""
    from transformers import AutoTokenizer, XLMRobertaModel

    tokenizer = AutoTokenizer.from_pretrained(path)
    encoder = XLMRobertaModel.from_pretrained(path, add_pooling_layer=False).eval()
    sparse, colbert = torch.nn.Linear(32, 1), torch.nn.Linear(32, 32)
    sparse.load_state_dict(torch.load(path / "sparse_linear.pt", weights_only=True))
    colbert.load_state_dict(torch.load(path / "colbert_linear.pt", weights_only=True))
    batch = tokenizer([text], return_tensors="pt")
    with torch.no_grad():
        hidden = encoder(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        dense = F.normalize(hidden[0, 0], dim=0)
        vectors = F.normalize(colbert(hidden[0, 1:]), dim=1)
        weights = torch.relu(sparse(hidden[0]))[:, 0].tolist()
    by_id: dict[int, float] = {}
    for token, weight in zip(batch["input_ids"][0].tolist(), weights, strict=True):
        if token not in (0, 1, 2, 3):  # <s>, <pad>, </s>, <unk>
            by_id[token] = max(by_id.get(token, 0.0), weight)
    return dense, {token: weight for token, weight in by_id.items() if weight > 0}, vectors


def assert_same(model: Model, path: Path) -> None:
    made = model.encode_representation(TEXTS, "document")
    assert isinstance(made, Several)
    dense, sparse, tokens = (made.parts[name] for name in ("dense", "sparse", "multi_vector"))
    assert isinstance(dense, Dense)
    assert isinstance(sparse, Sparse)
    assert isinstance(tokens, MultiVector)
    for row, text in enumerate(TEXTS):
        vector, weights, vectors = by_transformers(path, text)
        torch.testing.assert_close(dense.values[row], vector, atol=1e-6, rtol=0)
        terms, values = sparse.terms[row].tolist(), sparse[row : row + 1].weights.tolist()
        assert dict(zip(terms, values, strict=True)) == pytest.approx(weights, abs=1e-6)
        torch.testing.assert_close(tokens.tokens[row], vectors, atol=1e-6, rtol=0)


def test_bge_m3_is_what_transformers_and_torch_compute(bge_m3: Path, tmp_path: Path) -> None:
    model = Model.from_pretrained(bge_m3, device="cpu")
    assert list(model.heads) == ["dense", "sparse", "multi_vector"]
    assert_same(model, bge_m3)
    # written as BGE-M3, it is the same there and here; written as ours, it is the same here
    model.save_pretrained(tmp_path / "theirs", format="bge-m3")
    assert_same(Model.from_pretrained(tmp_path / "theirs", device="cpu"), tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours")
    again = Model.from_pretrained(tmp_path / "ours", device="cpu")
    assert_same(again, bge_m3)
    assert again.fingerprint == model.fingerprint
    # a query is compared with a passage as FlagEmbedding does: inner products, and the mean over query tokens
    query, passage = (by_transformers(bge_m3, text) for text in (TEXTS[0], TEXTS[2]))
    scores = {
        name: head.similarity(head.encode_query(TEXTS[0]), head.encode_document(TEXTS[2])).item()
        for name, head in model.heads.items()
    }
    expected = {
        "dense": (query[0] @ passage[0]).item(),
        "sparse": sum(weight * passage[1].get(token, 0.0) for token, weight in query[1].items()),
        "multi_vector": (query[2] @ passage[2].T).max(1).values.mean().item(),
    }
    assert scores == pytest.approx(expected, abs=1e-6)


def test_bge_m3_from_its_files_to_a_hybrid_search_and_back(bge_m3: Path, tmp_path: Path) -> None:
    """Hits of an index of all three outputs have the fused scores of plain transformers and torch."""
    weights = {"dense": 0.4, "sparse": 0.2, "multi_vector": 0.4}
    notes = [{"_id": f"d{i}", "text": text} for i, text in enumerate(TEXTS) if text]
    query = "search the neural index"
    q = by_transformers(bge_m3, query)
    expected = {}
    for note in notes:
        d = by_transformers(bge_m3, note["text"])
        parts = {
            "dense": (q[0] @ d[0]).item(),
            "sparse": sum(weight * d[1].get(token, 0.0) for token, weight in q[1].items()),
            "multi_vector": (q[2] @ d[2].T).max(1).values.mean().item(),
        }
        expected[note["_id"]] = sum(weights[name] * value for name, value in parts.items())

    def check(directory: Path, index: Path) -> None:
        model = Model.from_pretrained(directory, device="cpu")
        with Retriever.build(model, notes, index) as retriever:
            hits = retriever.search(query, k=5, fuse=weights)
        assert {hit.id: hit.score for hit in hits} == pytest.approx(expected, abs=1e-6)
        assert [hit.id for hit in hits] == sorted(expected, key=expected.__getitem__, reverse=True)
        with Retriever.load(index, model) as again:
            assert [hit.score for hit in again.search(query, k=5, fuse=weights)] == [h.score for h in hits]
            assert len(again.search(query, k=5)) == len(notes)  # by ranks
        model.save_pretrained(tmp_path / "back", format="bge-m3")

    check(bge_m3, tmp_path / "index")
    check(tmp_path / "back", tmp_path / "index of what was saved")


def test_bge_m3_in_safetensors_and_without_modules(bge_m3: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "model"
    shutil.copytree(bge_m3, path)
    for stem in ("colbert_linear", "sparse_linear"):
        save_file(torch.load(path / f"{stem}.pt", weights_only=True), path / f"{stem}.safetensors")
        (path / f"{stem}.pt").unlink()
    (path / "modules.json").unlink()
    assert_same_as = Model.from_pretrained(bge_m3, device="cpu").encode_representation(TEXTS, "query")
    made = Model.from_pretrained(path, device="cpu").encode_representation(TEXTS, "query")
    for name, array in assert_same_as.arrays().items():
        np.testing.assert_array_equal(array, made.arrays()[name])


def test_settings_of_the_dense_vectors_of_bge_m3(bge_m3: Path, tmp_path: Path) -> None:
    shutil.copytree(bge_m3, tmp_path / "model")
    file = tmp_path / "model" / "config_sentence_transformers.json"
    file.write_text(json.dumps({"similarity_fn_name": "dot"}))
    model = Model.from_pretrained(tmp_path / "model", device="cpu")
    model.save_pretrained(tmp_path / "saved", format="bge-m3")
    for read in (model, Model.from_pretrained(tmp_path / "saved", device="cpu")):
        assert read.heads["dense"].similarity_name == "dot"
        assert read.heads["multi_vector"].similarity_name == "meanmaxsim"
    file.write_text(json.dumps({"truncate_dim": 8}))
    with pytest.raises(ConfigError, match="truncate_dim 8, expected none"):
        Model.from_pretrained(tmp_path / "model", device="cpu")


def break_file(name: str, content: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        if content is None:
            (path / name).unlink()
        else:
            torch.save(content, path / name)

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            break_file("sparse_linear.pt", None),
            StorageError,
            "a part of BGE-M3 is missing, expected sparse_lin",
        ),
        (
            break_file("colbert_linear.pt", {"weight": torch.ones(4, 7)}),
            CorruptError,
            r"weight \('dim', 32\)",
        ),
        (break_file("sparse_linear.pt", [1]), CorruptError, "a list, expected tensors by name"),
        (
            break_file("sparse_linear.pt", {"weight": torch.full((1, 32), torch.nan)}),
            CorruptError,
            "infinite",
        ),
        (break_file("sparse_linear.pt", Path("code")), CorruptError, "sparse_linear.pt"),
    ],
)
def test_damaged_files_of_bge_m3_are_refused(
    bge_m3: Path, tmp_path: Path, change: Callable[[Path], None], error: type[IrkitError], message: str
) -> None:
    shutil.copytree(bge_m3, tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(error, match=message):
        Model.from_pretrained(tmp_path / "model", device="cpu")


def test_one_pass_of_the_encoder_gives_what_each_head_gives_alone(model: Model) -> None:
    calls = []
    handle = model.encoder.register_forward_hook(lambda *_: calls.append(1))
    made = model.encode_document(TEXTS)
    handle.remove()
    assert len(calls) == 1
    for name, head in model.heads.items():
        alone = head.encode_document(TEXTS)
        if name == "dense":
            np.testing.assert_array_equal(made[name], alone)
        elif name == "sparse":
            assert torch.equal(made[name].to_dense(), alone.to_dense())
        else:
            assert all(np.array_equal(one, other) for one, other in zip(made[name], alone, strict=True))
    assert [*model.encode_query("text", heads=["sparse"])] == ["sparse"]
    assert model.encode("the text")["dense"].shape == (32,)


@pytest.mark.filterwarnings("ignore:bfloat16 on cpu")
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "auto"])
def test_every_precision(tiny_bert: Path, dtype: str) -> None:
    torch.manual_seed(0)
    with torch.random.fork_rng():
        whole = Model.several(tiny_bert, HEADS, device="cpu")
    torch.manual_seed(0)
    rounded = Model.several(tiny_bert, HEADS, device="cpu", dtype=dtype)
    assert rounded.fingerprint == whole.fingerprint
    first, second = (each.encode_document(TEXTS[:1])["dense"] for each in (whole, rounded))
    assert F.cosine_similarity(torch.tensor(first), torch.tensor(second)).item() > 0.98


def test_saved_and_loaded_it_is_the_same(model: Model, tmp_path: Path) -> None:
    model.prompts["query"] = "search "
    model.set_length("document", 12)
    for _ in range(2):  # the second time over the first
        model.save_pretrained(tmp_path / "model")
    again = Model.from_pretrained(tmp_path / "model", device="cpu")
    assert again.fingerprint == model.fingerprint
    assert repr(again.head) == repr(model.head)
    assert again.max_length("document") == 12
    for side in ("query", "document"):
        first, second = (each.encode_representation(TEXTS, side).arrays() for each in (model, again))
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[name], second[name]) for name in first)


def test_a_masked_language_model_and_other_names(tmp_path: Path, tiny_bert: Path) -> None:
    heads = {"whole": "dense", "terms": "sparse", "tokens": {"head": "multi_vector"}}
    model = Model.several(tiny_bert, heads, device="cpu")
    model.save_pretrained(tmp_path / "model")
    again = Model.from_pretrained(tmp_path / "model", device="cpu")
    assert [*again.heads] == [*heads]
    terms = [each.heads["terms"].encode(TEXTS).to_dense() for each in (model, again)]
    assert torch.equal(*terms)


def test_sentence_transformers_opens_the_first_head(model: Model, peer: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    theirs = peer.SentenceTransformer(str(tmp_path / "model"), device="cpu").encode(TEXTS[:1])
    np.testing.assert_allclose(model.encode(TEXTS[:1])["dense"], theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "error", "message"),
    [
        ({"dense": {}}, BadValueError, "expected two or more heads"),
        ({"dense": {}, "Other-One": "dense"}, BadValueError, "words in lower case"),
        (
            {"dense": {}, "other": {}},
            ConfigError,
            "head 'other' of 'other', expected one of dense, multi_vector",
        ),
        ({"dense": {}, "sparse": {"head": "static"}}, ConfigError, "head 'static'"),
        ({"dense": {"similarity": "maxsim"}, "sparse": {}}, BadValueError, "similarity 'maxsim' of 'dense'"),
        ({"dense": {"pools": 1}, "sparse": {}}, ConfigError, "pools"),
        (
            {"dense": {}, "multi_vector": {"query_expansion": {"length": 8}}},
            BadValueError,
            "fills queries up",
        ),
        ({"dense": {}, "multi_vector": {"document_length": 8}}, BadValueError, "expected one length"),
    ],
)
def test_wrong_heads_are_refused(
    tiny_bert: Path, heads: dict[str, Any], error: type[IrkitError], message: str
) -> None:
    with pytest.raises(error, match=message):
        Model.several(tiny_bert, heads, device="cpu")


def test_wrong_calls_are_refused(model: Model, tiny_dense: Path, tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match=r"got \['other'\], expected one or more of dense, sparse, multi"):
        model.encode("text", heads=["other"])
    with pytest.raises(BadValueError, match=r"heads .* of a model with one head"):
        Model.from_pretrained(tiny_dense).encode("text", heads=["dense"])
    with pytest.raises(BadValueError, match=r"compare what one of them makes, as in model.heads\['dense'\]"):
        model.similarity([1.0], [1.0])
    with pytest.raises(BadValueError, match="no place for several heads"):
        model.save_pretrained(tmp_path / "model", format="sentence-transformers")
    with pytest.raises(BadValueError, match="no place for another dense vector than the normalised first"):
        model.save_pretrained(tmp_path / "model", format="bge-m3")
    with pytest.raises(BadValueError, match="this one has one"):
        Model.from_pretrained(tiny_dense).save_pretrained(tmp_path / "model", format="several-heads")
    with pytest.raises(BadValueError, match="several heads need the hidden states"):
        model.add_pooling_layers({"factor": 2})
    with pytest.raises(BadValueError, match="is for sparse models"):
        model.set_queries("lexical")
    with pytest.raises(BadValueError, match=r"widths .* expected one width"):
        SeveralHeads({"one": PooledHead(4), "two": TokenWeightHead(8, 3)})
    with pytest.raises(BadValueError, match=r"head 'one' holds the heads dense, .* give these instead"):
        SeveralHeads({"one": model.head, "two": PooledHead(32)})
    assert not (tmp_path / "model").exists()


def test_damaged_directories_are_refused(model: Model, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "heads" / "sparse")
    with pytest.raises(CorruptError, match="of head 'sparse' is missing"):
        Model.from_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "heads.json"
    for content, message in (
        ({"heads": ["dense"]}, "expected settings by name"),
        ({"heads": {"dense": {"similarity": "maxsim"}, "sparse": {}}}, "similarity 'maxsim' of dense"),
        ({"heads": {"dense": {}, "sparse": {}}}, "head 'sparse' lacks 'modules'"),
        ({"heads": {"dense": {}}}, "two or more heads"),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(CorruptError, match=message):
            Model.from_pretrained(tmp_path / "model")


@given(rows=st.lists(st.lists(st.integers(0, 6), max_size=6), min_size=1, max_size=4), seed=st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_token_weights_are_the_highest_of_each_token(rows: list[list[int]], seed: int) -> None:
    torch.manual_seed(seed)
    tokens = Ragged.from_rows([torch.tensor(row, dtype=torch.int64) for row in rows])
    hidden = tokens.with_values(torch.randn(len(tokens.values), 3))
    head = TokenWeightHead(3, 7).eval()
    head.special_ids = torch.tensor([0])
    with torch.no_grad():
        made = head(hidden, tokens).to_dense()
        weights = torch.relu(head.layers[0](hidden.values))[:, 0]
    expected = torch.zeros(len(rows), 7)
    for row, token, weight in zip(tokens.row_ids().tolist(), tokens.values.tolist(), weights, strict=True):
        if token != 0:
            expected[row, token] = max(expected[row, token], weight)
    assert torch.equal(made, expected)
    trained = head(hidden, tokens)
    trained.to_dense().sum().backward()
    limited = head.limited(1)(hidden, tokens)
    assert limited.terms.lengths.tolist() == trained.terms.lengths.clamp(max=1).tolist()


def test_tokens_of_a_vocabulary_with_a_gap_stay_in_their_text(gapped_bert: Path, tmp_path: Path) -> None:
    path = shutil.copytree(gapped_bert, tmp_path / "bge")
    torch.save(torch.nn.Linear(32, 32).state_dict(), path / "colbert_linear.pt")
    torch.save(
        {"weight": torch.zeros(1, 32), "bias": torch.ones(1)},
        path / "sparse_linear.pt",
    )
    bge = Model.from_pretrained(path, device="cpu").heads["sparse"]
    alone = Model.with_head("token_weight", gapped_bert, device="cpu")
    alone.head.load_state_dict(bge.head.state_dict())
    for model in (bge, alone):
        made = model.encode_representation(["a index", "b search"], "document")
        assert [terms.tolist() for terms in made.terms] == [[5, 9], [7, 8]]


def test_several_representations_pass_as_rows() -> None:
    dense = Dense(torch.arange(6.0).view(3, 2))
    tokens = MultiVector(Ragged(torch.arange(8.0).view(4, 2), torch.tensor([1, 0, 3])))
    rows = Several({"one": dense, "two": tokens})
    assert (len(rows), rows.dim) == (3, 4)
    joined = concat([rows[:1], rows[[1, 2]]])  # type: ignore[list-item]
    again = representation_from_arrays("several", joined.dim, joined.arrays())
    for name, array in rows.arrays().items():
        assert np.array_equal(array, again.arrays()[name])
    with pytest.raises(BadValueError, match=r"parts of .* rows"):
        Several({"one": dense, "two": tokens[:1]})
    with pytest.raises(BadTypeError, match="expected Dense, MultiVector or Sparse by name"):
        Several({"one": torch.zeros(1)})  # type: ignore[dict-item]
    with pytest.raises(BadValueError, match="concat"):
        concat([rows, dense])  # type: ignore[list-item]
