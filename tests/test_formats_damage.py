"""Model directories whose files do not fit each other are refused when they are loaded, in irkit's words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from irkit import Model
from irkit.encoder import Encoder
from irkit.errors import BadValueError, ConfigError, CorruptError, IrkitError
from irkit.tokenizer import Tokenizer
from irkit.utils.weights import read_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*does not say how a text becomes a vector")


@pytest.fixture
def folder(tiny_bert: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_bert, tmp_path / "model")


def change(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize(
    "weight_map",
    [None, [], "x", {"a": 1}, {"a": ["model.safetensors"]}, {"a": "\0"}, {"a": ""}, {"a": "\ud800"}],
)
def test_maps_of_shards(weight_map: Any, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CorruptError, match=r"weight_map .*, expected a file for each weight"):
        read_weights(folder)


@pytest.mark.parametrize("path", ["a\0b", "\ud800"])
def test_module_paths_that_no_file_can_have(path: str, folder: Path) -> None:
    Model.from_pretrained(folder).save_pretrained(folder)
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = path
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CorruptError, match="no names"):
        Model.from_pretrained(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"vocab_size": 1 << 40},
        {"vocab_size": -1},
        {"hidden_size": 1 << 30},
        {"intermediate_size": 1 << 20},
        {"max_position_embeddings": 1 << 29},
        {"max_position_embeddings": "many"},
        {"num_attention_heads": 0},
        {"num_attention_heads": [2]},
        {"layer_norm_eps": "small"},
        {"hidden_act": ["gelu"]},
        {"initializer_range": {}},
        {"model_type": "roberta", "pad_token_id": 1 << 20},
    ],
)
def test_sizes_that_do_not_fit(settings: dict[str, Any], folder: Path) -> None:
    change(folder / "config.json", **settings)
    with pytest.raises(IrkitError, match="loading"):
        Model.from_pretrained(folder)


def test_ids_beyond_the_embedding(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["unheard"] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for load in (Model.from_pretrained, Model.multi_vector, Model.sparse):
        with pytest.raises(CorruptError, match=r"ids up to 5000, the encoder embeds \d+ tokens"):
            load(folder)


def test_ids_that_only_a_template_has(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"]["special_tokens"]["[CLS]"]["ids"] = [7777]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CorruptError, match="ids up to 7777"):
        Model.from_pretrained(folder)


def test_weights_that_are_no_numbers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.layer.0.output.dense.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptError, match=r"layer\.0\.output\.dense\.weight holds infinite numbers or none"):
        Model.from_pretrained(folder)


def test_weights_that_overflow(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"].fill_(3e38)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = Model.from_pretrained(folder)
    for encode in (
        model.encode,
        model.encode_query,
        lambda text: model.encode_representation([text], "document"),
    ):
        with pytest.raises(BadValueError, match="the model gives NaN or infinite values"):
            encode("text")


def test_panics_of_the_tokenizer_are_errors(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"]["single"][0]["SpecialToken"]["id"] = "[NONE]"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    made = Tokenizer.from_pretrained(folder)
    for use in (lambda: made(["text"]), lambda: made.token_spans("text"), made.highest_id):
        with pytest.raises(IrkitError, match=r"token.*no entry found"):
            use()
    with pytest.raises(CorruptError, match="no entry found"):
        Model.from_pretrained(folder)


@pytest.mark.parametrize("key", ["truncation_side", "cls_token", "model_max_length", "strip_accents"])
def test_settings_of_the_tokenizer(key: str, folder: Path) -> None:
    change(folder / "tokenizer_config.json", **{key: ["x"]})
    with pytest.raises(CorruptError, match="loading the tokenizer of"):
        Tokenizer.from_pretrained(folder)


def test_names_of_prompts(folder: Path) -> None:
    Model.from_pretrained(folder).save_pretrained(folder)
    change(folder / "config_sentence_transformers.json", default_prompt_name=["query"])
    with pytest.raises(ConfigError, match=r"default_prompt_name is .* expected str or null"):
        Model.from_pretrained(folder)


def test_no_memory_is_taken_for_sizes_of_the_configuration(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 1 << 23}
    with torch.device("meta"):  # 2 layers of 2 x 32 x 8M numbers
        assert sum(weight.numel() for weight in Encoder(settings).parameters()) > 1 << 30
    change(folder / "config.json", intermediate_size=1 << 23)
    with pytest.raises(CorruptError, match=r"gives \(\d+, 32\) for layers\.0\.up\.weight"):
        Encoder.from_pretrained(folder)


@pytest.mark.parametrize(
    ("normalizer", "message"),
    [
        ({"type": "Precompiled", "precompiled_charsmap": "/////w=="}, "precompiled_charsmap is cut"),
        ({"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10_000}, "10,000 times as long"),
        (
            {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}] * 4,
            },
            "100,000,000 times as long",
        ),
    ],
)
def test_normalizers_that_end_the_process(normalizer: Any, message: str, folder: Path) -> None:
    """The library aborts where memory ends, so that they must not get there."""
    change(folder / "tokenizer.json", normalizer=normalizer)
    with pytest.raises(CorruptError, match=message):
        Tokenizer.from_pretrained(folder)
