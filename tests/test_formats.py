"""Model directories, both ways, against sentence-transformers; and directories that must be refused."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from irkit.errors import BadTypeError, BadValueError, ConfigError, CorruptError, StorageError
from irkit.formats import sentence_transformers as layout
from irkit.heads import Normalize, PooledHead, Projection
from irkit.model import Model, hub
from irkit.training.teachers import load_teacher

TEXTS = ["", "the search index", "a neural model of text?", "vector " * 90, "x", "'in on' the token - 42"]


def open_peer(peer: Any, path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peer.SentenceTransformer(str(path), device="cpu")


def difference(a: Any, b: Any) -> float:
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


def agree(model: Model, other: Any) -> None:
    """All three entry points of both give the same vectors."""
    assert difference(model.encode(TEXTS), other.encode(TEXTS)) <= 1e-5
    assert difference(model.encode_query(TEXTS), other.encode_query(TEXTS)) <= 1e-5
    assert difference(model.encode_document(TEXTS), other.encode_document(TEXTS)) <= 1e-5


POOLED = {
    "mean": {"pooling_mode": "mean"},
    "cls": {"pooling_mode": "cls"},
    "max": {"pooling_mode": "max"},
    "lasttoken": {"pooling_mode": "lasttoken"},
    "sqrt": {"pooling_mode": "mean_sqrt_len_tokens"},
    "weighted": {"pooling_mode": "weightedmean", "include_prompt": False},
    "without prompt": {"pooling_mode": "mean", "include_prompt": False},
    "cls without prompt": {"pooling_mode": "cls", "include_prompt": False},
    "two": {"pooling_mode": ("cls", "mean")},
    "two in another order": {"pooling_mode": ("mean", "cls")},
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", POOLED)
def test_every_pooling_both_ways(both_ways, peer, tiny_bert, tmp_path, name):
    modules = peer.sentence_transformer.modules
    pooling = modules.Pooling(32, **POOLED[name])
    theirs = peer.SentenceTransformer(
        modules=[modules.Transformer(str(tiny_bert)), pooling],
        prompts={"query": "search the index ", "document": "text of "},
        device="cpu",
    )
    both_ways(theirs, tmp_path, agree)


DECODERS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {  # in the form of published models
    "Qwen3-Embedding": (
        "Qwen3Config",
        {"num_key_value_heads": 2, "head_dim": 8},
        {"query": "Instruct: search the index\nQuery:", "document": ""},
    ),
    "EmbeddingGemma": (
        "Gemma3TextConfig",
        {
            **{"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2},
            "use_bidirectional_attention": True,
        },
        {"query": "task: search | query: ", "document": "title: none | text: ", "Clustering": "task: on | "},
    ),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_with_their_pooling_and_prompts_both_ways(both_ways, peer, tiny_bert, tmp_path, name, side):
    import transformers
    from sentence_transformers.base.modules import Dense
    from sentence_transformers.base.modules import Normalize as TheirNormalize

    kind, keys, prompts = DECODERS[name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_bert)
    tokenizer.padding_side = tokenizer.truncation_side = side
    tokenizer.save_pretrained(str(tmp_path / "plain"))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = getattr(transformers, kind)(vocab_size=len(tokenizer), pad_token_id=0, **sizes, **keys)
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "plain")
    modules = peer.sentence_transformer.modules
    parts = [modules.Transformer(str(tmp_path / "plain"), max_seq_length=24)]
    if name == "EmbeddingGemma":
        layers = [
            Dense(32, 64, bias=False, activation_function=None),
            Dense(64, 32, activation_function=None),
        ]
        parts += [modules.Pooling(32, "mean"), *layers]
    else:
        parts += [modules.Pooling(32, "lasttoken")]
    theirs = peer.SentenceTransformer(modules=[*parts, TheirNormalize()], prompts=prompts, device="cpu")
    model = both_ways(theirs, tmp_path, agree)
    assert type(model.encoder).__name__ == "Encoder"


@pytest.mark.parametrize("lengths", [{"query_length": 5, "document_length": 9}, {"query_length": 60}])
def test_lengths_of_either_side_both_ways(both_ways, peer, tiny_bert, tmp_path, lengths):
    modules = peer.sentence_transformer.modules
    theirs = peer.SentenceTransformer(
        modules=[modules.Transformer(str(tiny_bert), max_seq_length=20, **lengths), modules.Pooling(32)],
        device="cpu",
    )
    model = both_ways(theirs, tmp_path, agree)
    before = model.fingerprint
    model.set_length("query", 4)  # changes nothing that an index holds
    assert (model.fingerprint == before, model.max_length("query")) == (True, 4)
    model.set_length("document", 8)
    assert model.fingerprint != before
    with pytest.raises(BadValueError, match="query_length 2 leaves no room beside 2 special tokens"):
        model.set_length("query", 2)
    with pytest.raises(BadTypeError, match="query_length is '8'; expected a whole number"):
        model.set_length("query", "8")
    with pytest.raises(BadValueError, match="set_length: side 'queries', expected query or document"):
        model.set_length("queries", 8)


def test_projections_normalisation_and_settings_both_ways(both_ways, peer, tiny_bert, tmp_path):
    modules = peer.sentence_transformer.modules
    from sentence_transformers.base.modules import Dense
    from sentence_transformers.base.modules import Normalize as TheirNormalize

    torch.manual_seed(1)
    theirs = peer.SentenceTransformer(
        modules=[
            modules.Transformer(str(tiny_bert), max_seq_length=20),
            modules.Pooling(32, "mean"),
            modules.Dropout(0.5),
            Dense(32, 48),
            Dense(48, 48, bias=False, activation_function=torch.nn.GELU(), use_residual=True),
            Dense(48, 16, activation_function=None, use_residual=True),
            TheirNormalize(),
        ],
        prompts={"query": "search ", "odd": "vector "},
        default_prompt_name="odd",
        similarity_fn_name="dot",
        truncate_dim=12,
        device="cpu",
    )
    model = both_ways(theirs, tmp_path, agree)
    assert model.tokenizer.max_length == 20
    assert (model.similarity_name, model.dim) == ("dot", 12)
    assert model.prompts == {"query": "search ", "odd": "vector ", "document": ""}
    assert difference(model.encode(TEXTS, prompt_name="query"), theirs.encode_query(TEXTS)) <= 1e-5
    opened = open_peer(peer, tmp_path / "ours")
    assert (opened.max_seq_length, opened.similarity_fn_name, opened.truncate_dim) == (20, "dot", 12)
    assert (opened.prompts, opened.default_prompt_name) == (model.prompts, "odd")


def legacy(tiny_bert: Path, path: Path) -> Path:
    """A directory as version 1 wrote them: modules in folders, booleans, pickled weights, no settings."""
    shutil.copytree(tiny_bert, path / "0_Transformer")
    write(path / "0_Transformer/sentence_roberta_config.json", {"max_seq_length": 16, "do_lower_case": True})
    modes = {
        "pooling_mode_cls_token": False,
        "pooling_mode_max_tokens": True,
        "pooling_mode_mean_tokens": True,
    }
    write(path / "1_Pooling/config.json", {"word_embedding_dimension": 32, **modes})
    tanh = "torch.nn.modules.activation.Tanh"
    write(
        path / "2_Dense/config.json",
        {"in_features": 64, "out_features": 8, "bias": True, "activation_function": tanh},
    )
    weights = torch.nn.Linear(64, 8, dtype=torch.float16).state_dict()
    torch.save(
        {f"linear.{name}": value for name, value in weights.items()}, path / "2_Dense/pytorch_model.bin"
    )
    (path / "3_Normalize").mkdir()
    names = ["0_Transformer", "1_Pooling", "2_Dense", "3_Normalize"]
    kinds = [f"sentence_transformers.models.{name[2:]}" for name in names]
    modules = [{"idx": i, "name": str(i), "path": names[i], "type": kinds[i]} for i in range(4)]
    write(path / "modules.json", modules)
    return path


def test_legacy_layout(peer, tiny_bert, tmp_path):
    path = legacy(tiny_bert, tmp_path / "old")
    model = Model.from_pretrained(path, device="cpu")
    agree(model, open_peer(peer, path))
    assert model.tokenizer.max_length == 16
    model.save_pretrained(tmp_path / "new")
    agree(model, open_peer(peer, tmp_path / "new"))


def test_bare_encoder_takes_the_mean_and_says_so(peer, tiny_bert):
    with pytest.warns(UserWarning, match="taking the mean"):
        model = Model.from_pretrained(tiny_bert, device="cpu")
    agree(model, open_peer(peer, tiny_bert))


def test_classifiers_are_refused(tiny_bert, tmp_path):
    import transformers

    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tiny_bert, num_labels=1)
    classifier.save_pretrained(tmp_path / "classifier")
    shutil.copyfile(tiny_bert / "tokenizer.json", tmp_path / "classifier" / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"BertForSequenceClassification.* teacher .* cross-encoder:"):
        Model.from_pretrained(tmp_path / "classifier")


def test_code_that_comes_with_a_model_is_not_run(tiny_bert, tmp_path, monkeypatch):
    shutil.copytree(tiny_bert, tmp_path / "custom")
    config = json.loads((tiny_bert / "config.json").read_text())
    code = {
        "AutoConfig": "own.Config",
        "AutoModel": "own.Model",
        "AutoModelForSequenceClassification": "own.Model",
    }
    names = {"model_type": "own", "architectures": ["Model"], "auto_map": code}
    write(tmp_path / "custom" / "config.json", config | names)
    (tmp_path / "custom" / "own.py").write_text("raise AssertionError")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run it"))
    with pytest.raises(ConfigError, match=r"code of its own \(auto_map\); irkit runs no code"):
        Model.from_pretrained(tmp_path / "custom")
    with pytest.raises(StorageError, match="custom code"):
        load_teacher(f"cross-encoder:{tmp_path / 'custom'}")


def test_passage_and_corpus_are_names_of_the_document_prompt(peer, tiny_bert, tmp_path):
    for name in ("passage", "corpus"):
        path = legacy(tiny_bert, tmp_path / name)
        write(
            path / "config_sentence_transformers.json", {"prompts": {"query": "search ", name: "the text "}}
        )
        model = Model.from_pretrained(path, device="cpu")
        assert difference(model.encode_document(TEXTS), model.encode(TEXTS, prompt="the text ")) == 0
        model.save_pretrained(tmp_path / "saved")
        agree(model, open_peer(peer, tmp_path / "saved"))


def test_an_empty_document_prompt_beside_another_is_kept(peer, tiny_bert, tmp_path):
    path = legacy(tiny_bert, tmp_path / "model")
    prompts = {"query": "search ", "document": "", "passage": "the text "}
    write(path / "config_sentence_transformers.json", {"prompts": prompts})
    model = Model.from_pretrained(path, device="cpu")
    assert model.prompts["document"] == "the text "
    model.prompts["document"] = ""
    model.save_pretrained(tmp_path / "saved")
    again = Model.from_pretrained(tmp_path / "saved", device="cpu")
    assert again.prompts == prompts
    agree(again, open_peer(peer, tmp_path / "saved"))
    again.prompts["document"] = "the "
    again.save_pretrained(tmp_path / "saved")
    assert Model.from_pretrained(tmp_path / "saved", device="cpu").prompts["document"] == "the "


# ---- without the peer --------------------------------------------------------------------------


@pytest.fixture
def saved(tiny_bert, tmp_path) -> Path:
    """A complete model directory."""
    with pytest.warns(UserWarning, match="taking the mean"):
        model = Model.from_pretrained(tiny_bert, device="cpu")
    torch.manual_seed(0)
    model.head = PooledHead(32, "mean", [Projection(32, 8), Normalize()])
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_what_is_written(saved):
    assert sorted(path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file()) == [
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
        "3_Normalize/config.json",
        "config.json",
        "config_sentence_transformers.json",
        "model.safetensors",
        "modules.json",
        "sentence_bert_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((saved / "1_Pooling/config.json").read_text()) == {
        "word_embedding_dimension": 32,
        "include_prompt": True,
        "pooling_mode_cls_token": False,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_mean_sqrt_len_tokens": False,
        "pooling_mode_weightedmean_tokens": False,
        "pooling_mode_lasttoken": False,
    }
    assert list(saved.parent.iterdir()) == [saved]  # nothing left beside it


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("sentence_transformers.models.LSTM", "module LSTM"),
        ("sentence_transformers.models.Pooling", "module Pooling"),
        ("somebody.models.Dense.Dense", "somebody.models.Dense.Dense is code of its own"),
    ],
)
def test_unknown_modules_are_named(saved, kind, found):
    modules = json.loads((saved / "modules.json").read_text())
    modules[2]["type"] = kind
    write(saved / "modules.json", modules)
    with pytest.raises(ConfigError, match=found):
        Model.from_pretrained(saved)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("SparseEncoder", "does feature-extraction .* expected fill-mask that gives logits"),
        ("CrossEncoder", "a CrossEncoder; irkit loads SentenceTransformer"),
    ],
)
def test_other_kinds_of_model_are_named(saved, kind, message):
    write(saved / "config_sentence_transformers.json", {"model_type": kind})
    with pytest.raises(ConfigError, match=message):
        Model.from_pretrained(saved)


@pytest.mark.parametrize(
    ("file", "change", "problem"),
    [
        ("2_Dense/config.json", {"activation_function": "os.system"}, "expected an activation of torch.nn"),
        (
            "2_Dense/config.json",
            {"activation_function": "torch.nn.init.ones_"},
            "'torch.nn.init.ones_', expected",
        ),
        (
            "2_Dense/config.json",
            {"activation_function": "torch.nn.Linear"},
            "expected an activation of torch",
        ),
        ("2_Dense/config.json", {"activation_function": "torch.nn.ModuleList"}, "expected an activation of"),
        ("2_Dense/config.json", {"activation_function": 3}, "activation_function 3, expected"),
        ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "module_input_name is 'token_emb"),
        ("2_Dense/config.json", {"in_features": 16}, "Projection: size mismatch"),
        ("2_Dense/config.json", {"in_features": "32"}, "2_Dense: "),
        ("1_Pooling/config.json", {"word_embedding_dimension": 99}, "expects width 99, the encoder gives 32"),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "unknown pooling median"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "does fill-mask"),
        ("sentence_bert_config.json", {"modality_config": {"image": {}}}, "takes image"),
        (
            "sentence_bert_config.json",
            {"config_kwargs": {"is_causal": False}},
            r"config_kwargs of sentence_bert_config\.json has is_causal False, which irkit does not pass",
        ),
        (
            "sentence_bert_config.json",
            {"model_args": {"num_hidden_layers": 1}},
            "model_args of .* num_hidden_l",
        ),
        (
            "sentence_bert_config.json",
            {"tokenizer_args": {"do_lower_case": False}},
            "has do_lower_case False",
        ),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"text": {"max_length": 8}}},
            r"processing_kwargs\.text of .* has max_length 8, .* to max_seq_length",
        ),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"common": {"truncation": False}}},
            "truncation Fa",
        ),
        ("sentence_bert_config.json", {"query_length": "8"}, "lengths of .*, expected numbers of tokens"),
        ("sentence_bert_config.json", {"document_length": 2}, "document_length 2 leaves no room"),
        (
            "config_sentence_transformers.json",
            {"similarity_fn_name": "hamming"},
            "similarity_fn_name 'hamming'",
        ),
        ("config_sentence_transformers.json", {"similarity_fn_name": 3}, "similarity_fn_name '3'"),
        ("config_sentence_transformers.json", {"model_type": ["a"]}, "irkit loads SentenceTransformer"),
        ("config_sentence_transformers.json", {"default_prompt_name": "odd"}, "no prompt is named 'odd'"),
        ("config_sentence_transformers.json", {"prompts": ["a"]}, r"prompts \['a'\] .*, expected texts by"),
        ("config_sentence_transformers.json", {"prompts": {"query": 3}}, "expected texts by name"),
        (
            "config_sentence_transformers.json",
            {"truncate_dim": "8"},
            "Model: truncate_dim is '8'; expected a whole number from 1 to",
        ),
    ],
)
def test_settings_that_cannot_be_honoured(saved, file, change, problem):
    write(saved / file, json.loads((saved / file).read_text()) | change)
    with pytest.raises((ConfigError, CorruptError, BadValueError), match=problem):
        Model.from_pretrained(saved)


def test_arguments_of_transformers_that_change_no_vector(saved):
    expected, file = Model.from_pretrained(saved).encode(TEXTS), saved / "sentence_bert_config.json"
    harmless = {
        "model_kwargs": {"attn_implementation": "sdpa", "torch_dtype": "float16", "add_pooling_layer": False},
        "config_args": {"use_cache": False, "trust_remote_code": True, "label2id": {}},
        "tokenizer_args": {"padding_side": "left"},
        "processing_kwargs": {"text": {"truncation": True, "padding": True}, "chat_template": {"a": 1}},
    }
    write(file, json.loads(file.read_text()) | harmless)
    assert np.array_equal(Model.from_pretrained(saved).encode(TEXTS), expected)


@pytest.mark.parametrize("path", ["../../etc", "/etc", "2_Dense/../../elsewhere"])
def test_module_paths_stay_inside(saved, path):
    modules = json.loads((saved / "modules.json").read_text())
    modules[2]["path"] = path
    write(saved / "modules.json", modules)
    with pytest.raises(ConfigError, match="leads out of the directory"):
        Model.from_pretrained(saved)


@pytest.mark.parametrize(
    ("content", "error", "problem"),
    [
        ("[", CorruptError, "not a list of modules"),
        ("{}", ConfigError, "starts with nothing"),
        ('[{"idx": 0}]', CorruptError, "not a list of modules"),
        ('[{"type": null, "path": ""}]', CorruptError, "type None, path '': no names"),
        (
            '[{"type": "sentence_transformers.models.CLIPModel", "path": ""}]',
            ConfigError,
            "starts with CLIPModel",
        ),
        (
            '[{"type": "sentence_transformers.models.Transformer", "path": ""}]',
            ConfigError,
            "followed by nothing, expected Pooling; config_sentence_transformers.json is missing",
        ),
    ],
)
def test_modules_json_is_not_what_it_should_be(saved, content, error, problem):
    (saved / "modules.json").write_text(content)
    (saved / "config_sentence_transformers.json").unlink()
    with pytest.raises(error, match=problem):
        Model.from_pretrained(saved)


def test_damaged_weights(saved):
    weights = saved / "2_Dense/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CorruptError, match=r"2_Dense/model\.safetensors"):
        Model.from_pretrained(saved)


def test_no_model_there(tmp_path):
    with pytest.raises(StorageError, match="not a model directory"):
        Model.from_pretrained(tmp_path)
    with pytest.raises(StorageError, match="no such directory"):
        Model.from_pretrained(tmp_path / "absent")
    with pytest.raises(StorageError, match="no such directory"):
        Model.from_pretrained("./absent")


# ---- saving ------------------------------------------------------------------------------------


def test_saving_over_a_model_keeps_its_readme(saved):
    model = Model.from_pretrained(saved, device="cpu")
    (saved / "README.md").write_text("my card")
    (saved / "4_Dense").mkdir()
    (saved / "4_Dense/config.json").write_text("{}")
    model.save_pretrained(saved)
    assert (saved / "README.md").read_text() == "my card"
    assert not (saved / "4_Dense").exists()
    assert Model.from_pretrained(saved).fingerprint == model.fingerprint


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model-00001-of-00002.bin",
        "model.safetensors.index.json",
        "sentencepiece.bpe.model",
        "spiece.model",
        "generation_config.json",
        "sentence_roberta_config.json",
        ".gitattributes",
    ],
)
def test_saving_replaces_what_other_libraries_write(saved, name):
    model = Model.from_pretrained(saved, device="cpu")
    (saved / name).write_text("{}")
    model.save_pretrained(saved)
    assert Model.from_pretrained(saved, device="cpu").fingerprint == model.fingerprint


def test_saving_destroys_nothing_else(saved, tmp_path):
    model = Model.from_pretrained(saved, device="cpu")
    (saved / "checkpoint-500").mkdir()
    with pytest.raises(StorageError, match="would delete checkpoint-500"):
        model.save_pretrained(saved)
    (saved / "checkpoint-500").rmdir()
    for name in ("notes.txt", "results.json", "thesis.md", "optimizer.bin"):
        (saved / name).write_text("mine")
        with pytest.raises(StorageError, match=f"would delete {name}; move that away"):
            model.save_pretrained(saved)
        assert (saved / name).read_text() == "mine"
        (saved / name).unlink()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/data.json").write_text("{}")
    with pytest.raises(StorageError, match="neither empty nor a model's"):
        model.save_pretrained(tmp_path / "notes")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="a file is in the way"):
        model.save_pretrained(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    model.save_pretrained(tmp_path / "empty")
    model.save_pretrained(tmp_path / "deep/er")
    assert Model.from_pretrained(tmp_path / "deep/er").fingerprint == model.fingerprint


def test_a_save_that_fails_leaves_the_old_model(saved, monkeypatch):
    model = Model.from_pretrained(saved, device="cpu")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(layout, "write_weights", full)
    with pytest.raises(StorageError, match="No space left"):
        model.save_pretrained(saved)
    assert list(saved.parent.iterdir()) == [saved]
    assert Model.from_pretrained(saved).fingerprint == model.fingerprint


# ---- hub ---------------------------------------------------------------------------------------


def test_push_to_hub(saved, monkeypatch):
    import huggingface_hub

    calls: list[Any] = []

    class Api:
        def __init__(self, token: str | None) -> None:
            calls.append(token)

        def create_repo(self, repo_id: str, **options: Any) -> Any:
            calls.append((repo_id, options))
            return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

        def create_branch(self, repo_id: str, **options: Any) -> None:
            calls.append((repo_id, options))

        def file_exists(self, *_: Any, **__: Any) -> bool:
            return False

        def upload_folder(self, *, repo_id: str, folder_path: Path, **options: Any) -> Any:
            files = {path.name for path in folder_path.iterdir()}
            calls.append((repo_id, options, Model.from_pretrained(folder_path).fingerprint))
            assert {"README.md", "model.safetensors", "modules.json"} <= files
            assert repo_id in (folder_path / "README.md").read_text()
            return type("Commit", (), {"commit_url": "https://huggingface.co/me/mine/commit/1"})

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    model = Model.from_pretrained(saved, device="cpu")
    model.name = ""
    url = model.push_to_hub("me/mine", token="secret", private=True, revision="try")
    assert (url, model.name) == ("https://huggingface.co/me/mine/commit/1", "me/mine@try")
    assert calls == [
        "secret",
        ("me/mine", {"private": True, "exist_ok": True}),
        ("me/mine", {"branch": "try", "exist_ok": True}),
        ("me/mine", {"commit_message": "Upload model", "revision": "try"}, model.fingerprint),
    ]


def test_hub_names_are_fetched(saved, monkeypatch):
    import huggingface_hub

    asked: list[tuple[str, list[str]]] = []
    revisions: list[str | None] = []

    def snapshot(name: str, *, allow_patterns: list[str], revision: str | None, **_: Any) -> str:
        asked.append((name, allow_patterns))
        revisions.append(revision)
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    model = Model.from_pretrained("someone/model", device="cpu")
    assert model.name == "someone/model"
    assert [name for name, _ in asked] == ["someone/model"]
    assert "*.bin" not in asked[0][1]
    pinned = Model.from_pretrained("someone/model", revision="refs/pr/1", device="cpu")
    assert pinned.name == "someone/model@refs/pr/1"  # what an index would name
    Model.from_pretrained(pinned.name, device="cpu")
    assert revisions == [None, "refs/pr/1", "refs/pr/1"]
    assert {name for name, _ in asked} == {"someone/model"}
    for weights in list(saved.rglob("*.safetensors")):
        weights.unlink()
    with pytest.raises(StorageError, match="found neither"):
        Model.from_pretrained("someone/model")
    assert "*.bin" in asked[-1][1]


def test_pickled_weights_are_fetched_where_a_folder_has_no_others(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    def fetched(*files: str) -> list[str]:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"

        def snapshot(name: str, *, revision: str | None, **patterns: Any) -> str:
            for file in filter_repo_objects(files, **patterns):
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).touch()
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        assert hub.local_directory("someone/model") == folder
        return [file for file in files if (folder / file).exists()]

    common = ["config.json", "modules.json", "1_Pooling/config.json"]
    dense = ["2_Dense/config.json", "2_Dense/pytorch_model.bin"]
    assert fetched(*common, "model.safetensors", "pytorch_model.bin", *dense) == [
        *common,
        "model.safetensors",
        *dense,
    ]
    safe = ["2_Dense/config.json", "2_Dense/model.safetensors"]
    assert fetched(*common, "pytorch_model.bin", *safe, "2_Dense/pytorch_model.bin") == [
        *common,
        "pytorch_model.bin",
        *safe,
    ]
    for suffix in ("pt", "safetensors"):
        layers = [f"colbert_linear.{suffix}", f"sparse_linear.{suffix}"]
        bge_m3 = [*common, "pytorch_model.bin", *layers]
        assert fetched(*bge_m3, "onnx/model.onnx", "openvino/openvino_model.bin") == bge_m3


def test_a_name_is_not_what_a_model_is_made_of():
    with pytest.raises(BadTypeError, match=r"loaded by Model\.from_pretrained\('someone/model'\)"):
        Model("someone/model")


def test_hub_out_of_reach():
    with pytest.raises(StorageError, match="someone/model@v1: no such directory here"):
        hub.local_directory("someone/model@v1")
    with pytest.raises(StorageError, match=r"/nowhere/model@v1: no such directory$"):
        hub.local_directory("/nowhere/model@v1")
    with pytest.raises(StorageError, match="someone/model: no such directory here, and the Hugging Face hub"):
        hub.local_directory("someone/model")


@pytest.mark.filterwarnings("ignore:.*taking the mean:UserWarning")
def test_an_encoder_that_was_saved_without_its_decoder(tiny_bert: Path, tmp_path: Path) -> None:
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    shutil.copytree(tiny_bert, tmp_path / "t5")
    config = T5Config(vocab_size=200, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    theirs = T5EncoderModel(config).eval()
    theirs.save_pretrained(tmp_path / "t5")
    model = Model.from_pretrained(tmp_path / "t5", device="cpu")
    with torch.inference_mode():
        rows = [theirs(input_ids=row[None]).last_hidden_state[0].mean(0) for row in model.tokenizer(TEXTS)]
    assert difference(model.encode(TEXTS), torch.stack(rows)) <= 1e-5
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved/config.json").read_text().count("T5EncoderModel") == 1
    again = Model.from_pretrained(tmp_path / "saved", device="cpu")
    np.testing.assert_array_equal(again.encode(TEXTS), model.encode(TEXTS))
    assert len(Model.multi_vector(tmp_path / "t5", device="cpu").encode(TEXTS)) == len(TEXTS)
