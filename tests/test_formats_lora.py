"""LoRA adapters of PEFT load as the model that PEFT merges them into."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from irkit import Model
from irkit.errors import ConfigError, CorruptError
from irkit.formats.lora import merged_model

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not say how a text becomes a vector:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft asks for it
    pytest.mark.filterwarnings("ignore:.*a config file in:UserWarning"),  # of peft, which looks for the hub's
]
TEXTS = ["search the index", "a neural model", "vector"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRKIT_CACHE", str(tmp_path / "cache"))


def adapted(base: Path, folder: Path, **options: Any) -> Any:
    """Save a random adapter of a BERT in ``folder``; return the model of transformers with the adapter."""
    from transformers import AutoModel

    torch.manual_seed(0)
    config = peft.LoraConfig(**{"r": 2, "target_modules": ["query", "dense"], **options})
    model = peft.get_peft_model(AutoModel.from_pretrained(base), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model.eval()


def edit(folder: Path, **settings: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "lora_alpha": 3, "bias": "lora_only"},
        {"alpha_pattern": {"layer.0.*query": 5}, "rank_pattern": {"layer.1.*query": 4}},
        {"target_modules": ["word_embeddings", "key"], "modules_to_save": ["token_type_embeddings"]},
    ],
)
def test_hidden_states_are_those_of_peft(tiny_bert: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    theirs = adapted(tiny_bert, tmp_path / "lora", **options)
    ours = Model.from_pretrained(tmp_path / "lora", device="cpu")
    base = Model.from_pretrained(tiny_bert, device="cpu")
    ids = ours.tokenizer(TEXTS[:1])[0]
    with torch.no_grad():
        expected = theirs(torch.as_tensor(ids).long()[None]).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(ours.encode(TEXTS[0]), expected, atol=1e-5)
    assert not np.allclose(ours.encode(TEXTS[0]), base.encode(TEXTS[0]), atol=1e-2)


def test_a_model_directory_around_an_adapter(peer: Any, tiny_bert: Path, tmp_path: Path) -> None:
    """sentence-transformers saves modules, tokenizer and adapter, but not the weights of the model."""
    Model.from_pretrained(tiny_bert, device="cpu").save_pretrained(tmp_path / "base")
    theirs = peer.SentenceTransformer(str(tmp_path / "base"), device="cpu")
    theirs.add_adapter(peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False))
    theirs.save_pretrained(str(tmp_path / "lora"), create_model_card=False)
    ours = Model.from_pretrained(tmp_path / "lora", device="cpu")
    np.testing.assert_allclose(ours.encode(TEXTS), theirs.encode(TEXTS), atol=1e-5)
    # the adapter alone takes the modules of its model
    (tmp_path / "alone").mkdir()
    for file in (tmp_path / "lora").glob("adapter_*"):
        shutil.copy(file, tmp_path / "alone")
    alone = Model.from_pretrained(tmp_path / "alone", device="cpu")
    np.testing.assert_array_equal(alone.encode(TEXTS), ours.encode(TEXTS))
    # it begins a training, and is saved, as any other model
    Model.multi_vector(tmp_path / "lora", {"dim": 8}).save_pretrained(tmp_path / "new")
    assert not list((tmp_path / "new").rglob("adapter_*"))


def test_only_the_adapter_that_runs_is_merged(tiny_bert: Path, tmp_path: Path) -> None:
    """Checkpoints of a training, and an adapter beside the merged weights, are not part of a model."""
    bare, whole = tmp_path / "bare", tmp_path / "whole"
    shutil.copytree(tiny_bert, bare)
    Model.from_pretrained(tiny_bert, device="cpu").save_pretrained(whole)
    for folder in (bare, whole):
        adapted(tiny_bert, folder / "checkpoint-5")
        assert merged_model(folder, Path) == folder
    # where modules.json names its folder it runs
    expected = Model.from_pretrained(bare / "checkpoint-5", device="cpu").encode(TEXTS)
    shutil.move(whole / "checkpoint-5", whole / "0_Transformer")
    modules = json.loads((whole / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (whole / "modules.json").write_text(json.dumps(modules))
    found = Model.from_pretrained(whole, device="cpu").encode(TEXTS)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_what_cannot_be_merged_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lora"
    adapted(tiny_bert, folder)
    for settings, error, message in (
        ({"peft_type": "IA3"}, ConfigError, r"type 'IA3', expected LORA; merge both"),
        ({"use_dora": True}, ConfigError, "no adapter with use_dora True"),
        ({"alora_invocation_tokens": [5]}, ConfigError, r"no adapter with alora_invocation_tokens \[5\]"),
        ({"init_lora_weights": "pissa"}, ConfigError, "init_lora_weights 'pissa'"),
        ({"init_lora_weights": "lora_ga"}, ConfigError, "init_lora_weights 'lora_ga'"),
        ({"base_model_name_or_path": None}, ConfigError, "does not name its model"),
        ({"base_model_name_or_path": str(folder)}, ConfigError, "is an adapter itself"),
        ({"lora_alpha": "much"}, CorruptError, "could not convert string"),
    ):
        before = (folder / "adapter_config.json").read_text()
        edit(folder, **settings)
        with pytest.raises(error, match=message):
            Model.from_pretrained(folder)
        (folder / "adapter_config.json").write_text(before)


def test_the_revision_of_the_model_is_asked_for(tiny_bert: Path, tmp_path: Path) -> None:
    folder, asked = tmp_path / "lora", list[str]()
    adapted(tiny_bert, folder)

    def find(name: str) -> Path:
        asked.append(name)
        return tiny_bert

    edit(folder, base_model_name_or_path="someone/model", revision="v1")
    merged_model(folder, find)
    edit(folder, base_model_name_or_path=str(tiny_bert))
    merged_model(folder, find)
    edit(folder, base_model_name_or_path="someone/model", revision=None)
    merged_model(folder, find)
    assert asked == ["someone/model@v1", str(tiny_bert), "someone/model"]


def test_an_adapter_of_another_model_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lora"
    adapted(tiny_bert, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    first = next(name for name in tensors if "query.lora_A" in name)
    for change, message in (
        ({first: torch.ones(2, 5)}, r"changes \S+ by \(\d+, 5\), the model has"),
        ({first: torch.ones(3, 5)}, "factors"),
        ({first.replace("query", "quarry"): tensors[first].clone()}, "of which the model has 0"),
        ({first: torch.full_like(tensors[first], torch.nan)}, "infinite numbers or none"),
    ):
        save_file(tensors | change, folder / "adapter_model.safetensors")
        with pytest.raises(CorruptError, match=message):
            Model.from_pretrained(folder)
    assert not list((tmp_path / "cache").glob("*"))  # nothing half made is left
