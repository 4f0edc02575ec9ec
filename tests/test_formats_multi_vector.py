"""Multi-vector model directories, both ways, against sentence-transformers; PyLate's and Stanford's."""

from __future__ import annotations

import json
import shutil
import string
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import processors

from irkit.errors import CorruptError, StorageError
from irkit.model import Model

TEXTS = [
    "",
    "the search index",
    "a neural model of text?",
    "vector " * 90,
    "x",
    "'in on' the token - 42",
    "?! ... !",
    "straße 日本 unseen",
    "[MASK] of [SEP] text",
]
DENSE = {"module_input_name": "token_embeddings"}


def open_peer(peer: Any, path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peer.MultiVectorEncoder(str(path), device="cpu")


def agree(model: Model, other: Any) -> None:
    """Queries and documents of both have the same vectors, computed in float64: it is not about rounding."""
    model.double()
    other.double()
    for ours, theirs in (
        (model.encode_query(TEXTS), other.encode_query(TEXTS, convert_to_numpy=True)),
        (model.encode_document(TEXTS), other.encode_document(TEXTS, convert_to_numpy=True)),
    ):
        assert [row.shape for row in ours] == [row.shape for row in theirs]
        np.testing.assert_allclose(np.concatenate(ours), np.concatenate(theirs), rtol=1e-6, atol=1e-6)
    model.float()
    other.float()


PLAIN: dict[str, Any] = {}
EXPANDED = {"query_length": 32, "document_length": 40}
SIDES: dict[str, dict[str, Any]] = {
    "nothing": PLAIN,
    "lengths": {"query_length": 6, "document_length": 9},
    "fixed": {**EXPANDED, "query_expansion": {"strategy": "fixed", "length": 12}},
    "fixed, attended": {**EXPANDED, "query_expansion": {"strategy": "fixed", "length": 12, "attend": True}},
    "min": {"query_expansion": {"strategy": "min", "length": 8}},
    "min, attended": {**EXPANDED, "query_expansion": {"strategy": "min", "length": 8, "attend": True}},
    "another token": {"query_expansion": {"strategy": "fixed", "length": 12, "token": "index"}},
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", SIDES)
def test_lengths_and_expansions_both_ways(both_ways, peer, tiny_bert, tmp_path, name):
    torch.manual_seed(1)
    base, own = peer.base.modules, peer.multi_vector_encoder.modules
    theirs = peer.MultiVectorEncoder(
        modules=[
            base.Transformer(str(tiny_bert), **SIDES[name]),
            base.Dense(32, 8, bias=False, activation_function=None, **DENSE),
            own.MultiVectorMask(list(string.punctuation)),
            base.Normalize("token_embeddings"),
        ],
        prompts={"query": "search the ", "document": "text: "},
        device="cpu",
    )
    model = both_ways(theirs, tmp_path, agree)
    assert model.dim == 8
    assert model.prompts == {"query": "search the ", "document": "text: "}


def test_projections_skip_lists_and_pooling_both_ways(both_ways, peer, tiny_bert, tmp_path):
    torch.manual_seed(1)
    base, own = peer.base.modules, peer.multi_vector_encoder.modules
    theirs = peer.MultiVectorEncoder(
        modules=[
            base.Transformer(str(tiny_bert), max_seq_length=30),
            base.Dense(32, 48, **DENSE),
            base.Dense(48, 48, bias=False, activation_function=torch.nn.GELU(), use_residual=True, **DENSE),
            base.Dense(48, 16, activation_function=None, use_residual=True, **DENSE),
            own.MultiVectorMask(["?", "the", "nonsense"], skiplist_tasks=["query", "document"]),
            base.Normalize("token_embeddings"),
            own.HierarchicalTokenPooling(2.5, num_protected_tokens=2, normalize_embeddings=False),
        ],
        similarity_fn_name="meanmaxsim",
        device="cpu",
    )
    model = both_ways(theirs, tmp_path, agree)
    queries, documents = model.encode_query(TEXTS), model.encode_document(TEXTS)
    assert len(documents[3]) == 2 + int(28 / 2.5) != len(queries[3])
    chosen = [0, 1, 2, 3]  # the peer has no score of a text without vectors
    scores = theirs.similarity(
        [torch.tensor(queries[i]) for i in chosen], [torch.tensor(documents[i]) for i in chosen]
    )
    ours = model.similarity([queries[i] for i in chosen], [documents[i] for i in chosen])
    torch.testing.assert_close(ours, scores, rtol=1e-5, atol=1e-6)


def test_no_projection_no_mask_no_norm_both_ways(both_ways, peer, tiny_bert, tmp_path):
    base = peer.base.modules
    expansion = {"strategy": "fixed", "length": 12}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peer.MultiVectorEncoder(
            modules=[base.Transformer(str(tiny_bert), query_expansion=expansion, query_length=12)],
            device="cpu",
        )
    model = both_ways(theirs, tmp_path, agree)
    assert model.head.config.query_expansion is None  # nobody sees the added tokens
    assert model.dim == 32


# ---- PyLate ------------------------------------------------------------------------------------


def write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


def change(path: Path, **values: Any) -> None:
    write(path, json.loads(path.read_text()) | values)


def pylate(tiny_bert: Path, path: Path, **settings: Any) -> Path:
    """A directory as PyLate 1.6 writes it: two added tokens, Dense modules, and its settings in one file."""
    from transformers import AutoModel, AutoTokenizer

    torch.manual_seed(3)
    tokenizer, encoder = AutoTokenizer.from_pretrained(tiny_bert), AutoModel.from_pretrained(tiny_bert)
    tokenizer.add_tokens(["[Q] ", "[D] "])
    tokenizer.pad_token = "[MASK]"
    encoder.resize_token_embeddings(len(tokenizer))
    tokenizer.save_pretrained(path)
    encoder.save_pretrained(path)
    write(path / "sentence_bert_config.json", {"max_seq_length": 30, "do_lower_case": False})
    kinds = ["sentence_transformers.models.Transformer", *["pylate.models.Dense.Dense"] * 2]
    places = ["", "1_Dense", "2_Dense"]
    modules = [{"idx": i, "name": str(i), "path": places[i], "type": kinds[i]} for i in range(3)]
    write(path / "modules.json", modules)
    identity = "torch.nn.modules.linear.Identity"
    for place, width, residual in (("1_Dense", 48, True), ("2_Dense", 8, False)):
        shape = {"in_features": 32 if width == 48 else 48, "out_features": width, "bias": False}
        write(
            path / place / "config.json",
            {**shape, "activation_function": identity, "use_residual": residual},
        )
        weights = {"linear.weight": torch.randn(width, shape["in_features"]) / 5}
        if residual:
            weights["residual.weight"] = torch.randn(width, shape["in_features"]) / 5
        save_file(weights, path / place / "model.safetensors")
    write(
        path / "config_sentence_transformers.json",
        {
            "__version__": {"sentence_transformers": "5.3.0", "transformers": "5.3.0", "pytorch": "2.9.0"},
            "model_type": "ColBERT",
            "prompts": {"query": "", "document": ""},
            "default_prompt_name": None,
            "similarity_fn_name": "MaxSim",
            "query_prefix": "[Q] ",
            "document_prefix": "[D] ",
            "query_length": 12,
            "document_length": 20,
            "attend_to_expansion_tokens": False,
            "skiplist_words": list(string.punctuation),
            "do_query_expansion": True,
            **settings,
        },
    )
    return path


PYLATE: dict[str, dict[str, Any]] = {
    "as saved": {},
    "attended": {"attend_to_expansion_tokens": True},
    "not expanded": {"do_query_expansion": False},
    "other words": {"skiplist_words": ["the", "token", "unheard-of"]},
    "prompts": {"prompts": {"query": "search ", "document": "text of "}},
    "no markers": {"query_prefix": "", "document_prefix": ""},
    "nulls": {"skiplist_words": None, "query_length": None, "attend_to_expansion_tokens": None},
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", PYLATE)
def test_pylate_directories(peer, tiny_bert, tmp_path, name):
    folder = pylate(tiny_bert, tmp_path / "pylate", **PYLATE[name])
    model = Model.from_pretrained(folder, device="cpu")
    agree(model, open_peer(peer, folder))
    assert (model.dim, model.similarity_name) == (8, "maxsim")
    model.save_pretrained(tmp_path / "ours")
    agree(model, open_peer(peer, tmp_path / "ours"))
    agree(Model.from_pretrained(tmp_path / "ours", device="cpu"), model)
    if name in ("as saved", "attended"):
        model.merge_projections().save_pretrained(tmp_path / "stanford", format="stanford")
        assert Model.from_pretrained(tmp_path / "stanford", device="cpu").fingerprint == model.fingerprint
        model = Model.from_pretrained(folder, device="cpu")
    # the model may be saved where it was loaded from
    model.save_pretrained(folder)
    assert Model.from_pretrained(folder, device="cpu").fingerprint == model.fingerprint


def test_markers_are_one_token_right_after_the_first(tiny_bert, tmp_path):
    model = Model.from_pretrained(pylate(tiny_bert, tmp_path / "pylate"), device="cpu")
    _, pieces = model.encode_with_token_spans("The text", "query")
    assert [piece.token for piece in pieces[:5]] == ["[CLS]", "[Q] ", "the", "text", "[SEP]"]
    assert [piece.token for piece in pieces[5:]] == ["[MASK]"] * 7
    assert ["The text"[piece.start : piece.end] for piece in pieces[:4]] == ["", "", "The", "text"]


@pytest.mark.parametrize("marker", ["[X] ", "search: "])
def test_markers_that_the_vocabulary_lacks_are_text(peer, tiny_bert, tmp_path, marker):
    """Their tokens would have no embedding."""
    folder = pylate(tiny_bert, tmp_path / "pylate", query_prefix=marker)
    model = Model.from_pretrained(folder, device="cpu")
    agree(model, open_peer(peer, folder))
    assert model.tokenizer.vocab_size == len(model.encoder.embeddings.word.weight)
    folder = stanford(tiny_bert, tmp_path / "stanford", query_token_id="[nowhere]")
    agree(Model.from_pretrained(folder, device="cpu"), open_peer(peer, folder))


def test_unknown_words_of_the_skip_list_do_not_hide_unknown_words_of_documents(tiny_bert, tmp_path):
    folder = pylate(tiny_bert, tmp_path / "pylate", skiplist_words=["unheard-of", "?"])
    model = Model.from_pretrained(folder, device="cpu")
    _, pieces = model.encode_with_token_spans("日本?", "document")
    assert [piece.token for piece in pieces] == ["[CLS]", "[D] ", "[UNK]", "[UNK]", "[SEP]"]


def test_pylate_directories_of_early_versions_do_not_name_their_type(peer, tiny_bert, tmp_path):
    folder = pylate(tiny_bert, tmp_path / "pylate")
    settings = json.loads((folder / "config_sentence_transformers.json").read_text())
    del settings["model_type"], settings["do_query_expansion"]
    write(folder / "config_sentence_transformers.json", settings | {"similarity_fn_name": "cosine"})
    agree(Model.from_pretrained(folder, device="cpu"), open_peer(peer, folder))


@pytest.fixture(scope="module")
def tiny_modernbert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ModernBERT of random weights with local attention, and a byte-level tokenizer with a mask token."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import ModernBertConfig, ModernBertModel, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("modernbert")
    backend = ByteLevelBPETokenizer()
    special = ["[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]"]
    backend.train_from_iterator(TEXTS * 3, vocab_size=320, special_tokens=special)
    backend._tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    roles = {f"{role}_token": f"[{role.upper()}]" for role in ("cls", "sep", "pad", "unk", "mask")}
    PreTrainedTokenizerFast(
        tokenizer_object=backend._tokenizer, model_max_length=64, **roles
    ).save_pretrained(path)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    ids = {"pad_token_id": 2, "cls_token_id": 0, "sep_token_id": 1, "bos_token_id": 0, "eos_token_id": 1}
    config = ModernBertConfig(
        vocab_size=320, max_position_embeddings=64, local_attention=16, initializer_range=0.3, **shape, **ids
    )
    ModernBertModel(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ["as saved", "attended", "prompts"])
def test_pylate_directories_of_modernbert(peer, tiny_modernbert, tmp_path, name):
    folder = pylate(tiny_modernbert, tmp_path / "pylate", **PYLATE[name])
    model = Model.from_pretrained(folder, device="cpu")
    agree(model, open_peer(peer, folder))
    _, pieces = model.encode_with_token_spans("the text", "document")
    assert [piece.token for piece in pieces][:2] == ["[CLS]", "[D] "]
    model.save_pretrained(tmp_path / "ours")
    agree(model, open_peer(peer, tmp_path / "ours"))


def test_tokens_listed_by_transformers_4_stay_markers(peer, tiny_bert, tmp_path):
    """It wrote added tokens to tokenizer_config.json too, as plain text that a lower-caser would break."""
    folder = pylate(tiny_bert, tmp_path / "pylate")
    state = json.loads((folder / "tokenizer.json").read_text())
    listed = {str(token.pop("id")): token for token in state["added_tokens"]}
    assert [token["normalized"] for token in listed.values()][-2:] == [True, True]
    change(folder / "tokenizer_config.json", added_tokens_decoder=listed)
    model = Model.from_pretrained(folder, device="cpu")
    agree(model, open_peer(peer, folder))
    assert len(model.encode_with_token_spans("the text", "query")[1]) == 12
    model.save_pretrained(tmp_path / "ours")
    agree(model, open_peer(peer, tmp_path / "ours"))


def test_pooling_of_early_versions_does_not_normalise(peer, tiny_bert, tmp_path):
    Model.multi_vector(tiny_bert, None, {"token_pooling": {}}, device="cpu").save_pretrained(tmp_path)
    (tmp_path / "3_HierarchicalTokenPooling/config.json").write_text(
        '{"pool_factor": 3, "num_protected_tokens": 2}'
    )
    model = Model.from_pretrained(tmp_path, device="cpu")
    agree(model, open_peer(peer, tmp_path))
    assert min(np.linalg.norm(row, axis=1).min() for row in model.encode_document(TEXTS)) < 0.99


# ---- Stanford ----------------------------------------------------------------------------------


def stanford(tiny_bert: Path, path: Path, **metadata: Any) -> Path:
    """A checkpoint as colbert-ai 0.2.22 writes it, with a vocabulary that has its markers."""
    from transformers import AutoModel

    path.mkdir()
    torch.manual_seed(4)
    state = json.loads((tiny_bert / "tokenizer.json").read_text())
    words = [*state["model"]["vocab"], "[unused0]", "[unused1]"]
    (path / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    shutil.copyfile(tiny_bert / "tokenizer_config.json", path / "tokenizer_config.json")
    encoder = AutoModel.from_pretrained(tiny_bert)
    encoder.resize_token_embeddings(len(words))
    weights = {f"bert.{name}": value for name, value in encoder.state_dict().items()}
    save_file(
        {**weights, "linear.weight": torch.randn(8, 32) / 5}, path / "model.safetensors", {"format": "pt"}
    )
    encoder.config.architectures = ["HF_ColBERT"]
    encoder.config.save_pretrained(path)
    known = {
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "query_token": "[Q]",
        "doc_token": "[D]",
        "dim": 8,
        "query_maxlen": 12,
        "doc_maxlen": 20,
        "mask_punctuation": True,
        "attend_to_mask_tokens": False,
        "interaction": "colbert",
        "similarity": "cosine",
        "nbits": 1,
        "checkpoint": "/somewhere",
        "meta": {"version": "colbert-v0.4"},
    }
    write(path / "artifact.metadata", known | metadata)
    return path


STANFORD: dict[str, dict[str, Any]] = {
    "as saved": {},
    "attended": {"attend_to_mask_tokens": True},
    "with punctuation": {"mask_punctuation": False},
    "version 2": {"query_maxlen": 32, "doc_maxlen": 60},
}


@pytest.mark.parametrize("name", STANFORD)
def test_stanford_checkpoints(peer, tiny_bert, tmp_path, name):
    folder = stanford(tiny_bert, tmp_path / "stanford", **STANFORD[name])
    model = Model.from_pretrained(folder, device="cpu")
    agree(model, open_peer(peer, folder))
    _, pieces = model.encode_with_token_spans("the text", "query")
    assert [piece.token for piece in pieces[:6]] == ["[CLS]", "[unused0]", "the", "text", "[SEP]", "[MASK]"]
    model.save_pretrained(tmp_path / "ours")
    agree(model, open_peer(peer, tmp_path / "ours"))
    assert Model.from_pretrained(tmp_path / "ours", device="cpu").fingerprint == model.fingerprint
    assert "linear.weight" not in load_file(tmp_path / "ours/model.safetensors")


def test_stanford_checkpoints_with_pickled_weights(peer, tiny_bert, tmp_path):
    folder = stanford(tiny_bert, tmp_path / "stanford")
    exact = Model.from_pretrained(folder, device="cpu")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert Model.from_pretrained(folder, device="cpu").fingerprint == exact.fingerprint


def test_stanford_checkpoints_without_metadata_have_the_defaults(tiny_bert, tmp_path):
    folder = stanford(tiny_bert, tmp_path / "stanford")
    (folder / "artifact.metadata").unlink()
    with pytest.warns(UserWarning, match="no artifact.metadata") as caught:
        model = Model.from_pretrained(folder, device="cpu")
    assert caught[0].filename == __file__
    assert model.prompts == {"query": "[unused0] ", "document": "[unused1] "}
    assert (model.max_length("query"), model.head.config.document_length) == (32, 220)
    assert model.max_length("document") == 64  # positions of the encoder


def test_stanford_checkpoints_that_are_damaged(tiny_bert, tmp_path):
    folder = stanford(tiny_bert, tmp_path / "stanford")
    weights = load_file(folder / "model.safetensors")
    wrong = {**weights, "linear.weight": torch.zeros(8, 31)}
    save_file(wrong, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CorruptError, match=r"linear.weight of shape \(dim, 32\), found \(8, 31\)"):
        Model.from_pretrained(folder, device="cpu")
    del weights["linear.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CorruptError, match=r"linear.weight of shape \(dim, 32\), found none"):
        Model.from_pretrained(folder, device="cpu")


def test_the_oldest_checkpoints_are_refused(tmp_path):
    torch.save({"model_state_dict": {}}, tmp_path / "colbert.dnn")
    with pytest.raises(StorageError, match=r"ColBERT's first version \(.dnn\).*; convert it there"):
        Model.from_pretrained(tmp_path)
    with pytest.raises(StorageError, match=r"colbert.dnn: it is a file; expected the directory of a model"):
        Model.from_pretrained(tmp_path / "colbert.dnn")
