"""NeoBERT, whose code comes with its checkpoints: the map of its weights against the definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from irkit.core.ragged import Ragged
from irkit.encoder import Encoder
from irkit.errors import ConfigError

HEADS, SIZE, INNER, LAYERS, WORDS = 3, 24, 48, 2, 60
SETTINGS = {
    "model_type": "neobert",
    "architectures": ["NeoBERTLMHead"],
    "auto_map": {"AutoConfig": "model.NeoBERTConfig", "AutoModel": "model.NeoBERT"},
    "vocab_size": WORDS,
    "hidden_size": SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 70,  # two thirds are 46, and in eights 48
    "dim_head": SIZE // HEADS,
    "norm_eps": 1e-5,
    "max_length": 4096,
    "pad_token_id": 0,
}


def make_weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"encoder.weight": (WORDS, SIZE), "layer_norm.weight": (SIZE,)}
    for i in range(LAYERS):
        at = f"transformer_encoder.{i}"
        shapes |= {f"{at}.qkv.weight": (3 * SIZE, SIZE), f"{at}.wo.weight": (SIZE, SIZE)}
        shapes |= {f"{at}.ffn.w12.weight": (2 * INNER, SIZE), f"{at}.ffn.w3.weight": (SIZE, INNER)}
        shapes |= {f"{at}.attention_norm.weight": (SIZE,), f"{at}.ffn_norm.weight": (SIZE,)}
    return {name: torch.randn(shape) * 0.3 + (0.8 if "norm" in name else 0) for name, shape in shapes.items()}


def define(weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Hidden states of one row: Le Breton et al. 2025 (NeoBERT, arXiv 2502.19587), section 3.1."""
    w, n, width = weights, len(ids), SIZE // HEADS

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]

    angles = torch.arange(n)[:, None] * (1 / 10_000 ** (torch.arange(0, width, 2) / width))
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]  # neighbours are a complex number
    x = w["encoder.weight"][ids]
    for i in range(LAYERS):
        at = f"transformer_encoder.{i}"
        joined = norm(x, f"{at}.attention_norm") @ w[f"{at}.qkv.weight"].T
        q, k, v = joined.view(n, HEADS, 3 * width).chunk(3, -1)  # alternating head by head
        q, k = (
            torch.view_as_real(torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * turn)
            for part in (q, k)
        )
        q, k, v = (part.reshape(n, HEADS, width).transpose(0, 1) for part in (q, k, v))
        mixed = (q @ k.mT / width**0.5).softmax(-1) @ v
        x = x + mixed.transpose(0, 1).reshape(n, SIZE) @ w[f"{at}.wo.weight"].T
        first, second = (norm(x, f"{at}.ffn_norm") @ w[f"{at}.ffn.w12.weight"].T).chunk(2, -1)
        x = x + (F.silu(first) * second) @ w[f"{at}.ffn.w3.weight"].T
    return norm(x, "layer_norm")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    heads = {"decoder.weight": torch.randn(WORDS, SIZE), "decoder.bias": torch.randn(WORDS)}
    weights = {f"model.{name}": value for name, value in make_weights().items()}
    save_file(weights | heads, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("longest", [8, 513, pytest.param(4096, marks=pytest.mark.slow)])
def test_hidden_states_and_gradients(folder: Path, longest: int, tmp_path: Path) -> None:
    """Rows of 1 token to the longest, in one batch, and all gradients, are those of the definition."""
    encoder = Encoder.from_pretrained(folder)
    assert isinstance(encoder, Encoder)
    rows = [torch.randint(WORDS, (length,)) for length in (1, 8, longest)]
    weights = {name: value.requires_grad_() for name, value in make_weights().items()}
    expected = torch.cat([define(weights, row) for row in rows])
    scale = max(1.0, float(expected.detach().abs().max()))
    with torch.no_grad():
        assert (encoder(Ragged.from_rows(rows)).values - expected).abs().max() <= 1e-5 * scale
    found = encoder(Ragged.from_rows(rows)).values
    assert (found - expected).abs().max() <= 1e-5 * scale
    upstream = torch.randn_like(expected) / len(expected)
    found.backward(upstream)
    expected.backward(upstream)
    encoder.head_weights = {}
    for parameter in encoder.parameters():
        parameter.data = parameter.grad
    encoder.save_pretrained(tmp_path / "gradients")
    gradients = load_file(tmp_path / "gradients" / "model.safetensors")
    assert gradients.keys() == {f"model.{name}" for name in weights}
    for name, weight in weights.items():
        largest = max(1.0, float(weight.grad.abs().max()))
        assert (gradients[f"model.{name}"] - weight.grad).abs().max() <= 1e-5 * largest, name


def test_saving_and_low_precision(folder: Path, tmp_path: Path) -> None:
    encoder = Encoder.from_pretrained(folder)
    encoder.save_pretrained(tmp_path / "again")
    before, after = (load_file(at / "model.safetensors") for at in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    rows = Ragged.from_rows([torch.randint(WORDS, (length,)) for length in (3, 40, 17)])

    def vectors(encoder: Encoder) -> Tensor:
        return torch.stack([row.float().mean(0) for row in encoder(rows)])

    with torch.inference_mode():
        wanted = vectors(encoder)
        encoder.quantize_()
        assert F.cosine_similarity(vectors(encoder), wanted).min() >= 0.99
        half = Encoder.from_pretrained(folder, dtype=torch.bfloat16)
        assert F.cosine_similarity(vectors(half), wanted).min() >= 0.999


@pytest.mark.parametrize(
    "change", [{"rope": False}, {"hidden_act": "gelu"}, {"swiglu_packed": False}], ids=str
)
def test_refused(folder: Path, change: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps({**SETTINGS, **change}))
    with pytest.raises(ConfigError, match=next(iter(change))):
        Encoder.from_pretrained(folder)
