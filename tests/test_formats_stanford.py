"""Checkpoints of Stanford's ColBERT that irkit writes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from irkit import Model
from irkit.errors import BadValueError
from irkit.heads import Normalize, Projection

TEXTS = ["", "the search index", "a neural model of text?", "'in on' the token - 42", "?! ... !"]
CONFIG = {"query_expansion": {"length": 12}, "document_length": 20}
PROJECTION = {"depth": 2, "residual": "identity", "dim": 8}


def colbert(
    tiny_bert: Path, projection: Any = PROJECTION, config: dict[str, Any] = CONFIG, **more: Any
) -> Model:
    torch.manual_seed(0)
    return Model.multi_vector(tiny_bert, projection, config, **{"markers": ("[Q]", "[D]"), **more})


def vectors(model: Any) -> list[Any]:
    return [
        *model.encode_query(TEXTS, convert_to_numpy=True),
        *model.encode_document(TEXTS, convert_to_numpy=True),
    ]


@pytest.mark.parametrize("config", [CONFIG, {**CONFIG, "skiplist_words": ()}], ids=["skipping", "whole"])
def test_folded_heads_are_written_as_linear_weight(
    tiny_bert: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    model = colbert(tiny_bert, config=config)
    expected = vectors(model)
    model.merge_projections().save_pretrained(tmp_path / "colbert", format="stanford")
    weights = load_file(tmp_path / "colbert/model.safetensors")
    assert weights["linear.weight"].shape == (8, 32)
    assert all(name.startswith("bert.") for name in weights if name != "linear.weight")
    assert json.loads((tmp_path / "colbert/config.json").read_text())["architectures"] == ["HF_ColBERT"]
    loaded = Model.from_pretrained(tmp_path / "colbert")
    for ours, before in zip(vectors(loaded), expected, strict=True):
        np.testing.assert_allclose(ours, before, rtol=0, atol=1e-5)
    loaded.save_pretrained(tmp_path / "colbert", format="stanford")  # in its own place
    assert Model.from_pretrained(tmp_path / "colbert").fingerprint == loaded.fingerprint


def test_sentence_transformers_reads_it_alike(peer: Any, tiny_bert: Path, tmp_path: Path) -> None:
    model = colbert(tiny_bert, projection={"dim": 8})
    model.save_pretrained(tmp_path / "colbert", format="stanford")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = peer.MultiVectorEncoder(str(tmp_path / "colbert"), device="cpu")
    for ours, theirs in zip(vectors(model), vectors(other), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_markers_of_pylate_are_tokens_with_a_space(peer: Any, tiny_bert: Path, tmp_path: Path) -> None:
    model = colbert(tiny_bert, projection={"dim": 8}, markers=("[Q] ", "[D] "))
    model.save_pretrained(tmp_path / "colbert", format="stanford")
    written = json.loads((tmp_path / "colbert/artifact.metadata").read_text())
    assert (written["query_token_id"], written["doc_token_id"]) == ("[Q] ", "[D] ")
    loaded = Model.from_pretrained(tmp_path / "colbert")
    assert loaded.fingerprint == model.fingerprint
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = peer.MultiVectorEncoder(str(tmp_path / "colbert"), device="cpu")
    for ours, again, theirs in zip(vectors(model), vectors(loaded), vectors(other), strict=True):
        np.testing.assert_allclose(again, ours, rtol=0, atol=1e-6)
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {},
            "^saving a model: Stanford's ColBERT has no place for other layers than one linear layer without",
        ),
        ({"projection": {"dim": 8, "bias": True}}, "other layers than one linear layer without bias"),
        (
            {"projection": "linear", "markers": None},
            "prompts that are not one token of the vocabulary each, such as .unused0.$",
        ),
        ({"projection": "linear", "config": {}}, "queries that are not filled up with the mask token"),
        (
            {"projection": "linear", "config": {**CONFIG, "skiplist_words": ("a",)}},
            "a skip-list other than the punctuation of documents",
        ),
        ({"projection": "linear", "config": {**CONFIG, "token_pooling": {}}}, "no place for token pooling$"),
    ],
)
def test_what_colbert_cannot_express(
    tiny_bert: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadValueError, match=message):
        colbert(tiny_bert, **options).save_pretrained(tmp_path / "colbert", format="stanford")
    assert not (tmp_path / "colbert").exists()


def test_further_prompts_are_refused(tiny_bert: Path, tmp_path: Path) -> None:
    model = colbert(tiny_bert, projection="linear")
    model.prompts["long"] = "a model "
    with pytest.raises(BadValueError, match=r"no place for prompts of other names than query and document$"):
        model.save_pretrained(tmp_path / "colbert", format="stanford")
    model.prompts["long"] = ""
    model.default_prompt_name = "query"
    with pytest.raises(BadValueError, match=r"no place for a prompt that texts get by default$"):
        model.save_pretrained(tmp_path / "colbert", format="stanford")


@pytest.mark.parametrize(
    "layers",
    [
        [],
        [Normalize()],
        [Projection(32, 8, bias=False)],
        [Projection(32, 8, bias=False, activation=torch.nn.Tanh()), Normalize()],
        [Projection(32, 32, bias=False, residual="learned"), Normalize()],
    ],
)
def test_layers_that_are_not_one_matrix(
    tiny_bert: Path, tmp_path: Path, layers: list[torch.nn.Module]
) -> None:
    model = colbert(tiny_bert)
    model.head.layers = torch.nn.ModuleList(layers)
    with pytest.raises(BadValueError, match="no place for other layers than one linear layer"):
        model.save_pretrained(tmp_path / "colbert", format="stanford")


def test_other_models_are_refused(tiny_bert: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="mean"):
        dense = Model.from_pretrained(tiny_bert)
    with pytest.raises(BadValueError, match="no place for dense vectors"):
        dense.save_pretrained(tmp_path / "colbert", format="stanford")
    with pytest.raises(BadValueError, match=r"format 'onnx', expected .*sentence-transformers or stanford"):
        dense.save_pretrained(tmp_path / "colbert", format="onnx")
