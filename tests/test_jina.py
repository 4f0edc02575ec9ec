"""Jina 2: BERT with ALiBi and gated feed-forward blocks, compared with its published definition."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from irkit.core.ragged import Ragged
from irkit.encoder import Encoder
from irkit.encoder.attention import alibi_bias
from irkit.errors import ConfigError, CorruptError

HEADS, SIZE, INNER, LAYERS = 6, 24, 40, 2
SETTINGS = {
    "model_type": "bert",
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
    "vocab_size": 60,
    "hidden_size": SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": 8192,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
}


def slopes(heads: int) -> list[float]:
    """Slopes as the authors of ALiBi compute them."""

    def of_power(count: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(count) - 3)))
        return [start * start**i for i in range(count)]

    if math.log2(heads).is_integer():
        return of_power(heads)
    closest = 2 ** math.floor(math.log2(heads))
    return of_power(closest) + slopes(2 * closest)[0::2][: heads - closest]


def make_weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    names = {
        "embeddings.word_embeddings.weight": (60, SIZE),
        "embeddings.token_type_embeddings.weight": (2, SIZE),
        "embeddings.LayerNorm.weight": (SIZE,),
        "embeddings.LayerNorm.bias": (SIZE,),
    }
    for i in range(LAYERS):
        at = f"encoder.layer.{i}"
        for part in ("attention.self.query", "attention.self.key", "attention.self.value"):
            names |= {f"{at}.{part}.weight": (SIZE, SIZE), f"{at}.{part}.bias": (SIZE,)}
        names |= {
            f"{at}.attention.output.dense.weight": (SIZE, SIZE),
            f"{at}.attention.output.dense.bias": (SIZE,),
            f"{at}.mlp.gated_layers.weight": (2 * INNER, SIZE),
            f"{at}.mlp.wo.weight": (SIZE, INNER),
            f"{at}.mlp.wo.bias": (SIZE,),
        }
        for norm in ("attention.output.LayerNorm", "mlp.layernorm"):
            names |= {f"{at}.{norm}.weight": (SIZE,), f"{at}.{norm}.bias": (SIZE,)}
    return {
        name: torch.randn(shape) * 0.2 + (0.8 if "orm.weight" in name else 0) for name, shape in names.items()
    }


def define(weights: dict[str, Tensor], ids: Tensor, act: Any) -> Tensor:
    """Hidden states of one row, from the definition: JinaBertModel with alibi and a gated MLP, no dropout."""
    w = weights

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (SIZE,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)

    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.token_type_embeddings.weight"][0]
    x, n = norm(x, "embeddings.LayerNorm"), len(ids)
    distance = (torch.arange(n)[None] - torch.arange(n)[:, None]).abs()
    alibi = -torch.tensor(slopes(HEADS), dtype=x.dtype)[:, None, None] * distance
    for i in range(LAYERS):
        at = f"encoder.layer.{i}"
        q, k, v = (
            linear(x, f"{at}.attention.self.{part}").view(n, HEADS, -1).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        scores = q @ k.transpose(1, 2) / math.sqrt(SIZE // HEADS) + alibi
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, SIZE)
        x = norm(linear(mixed, f"{at}.attention.output.dense") + x, f"{at}.attention.output.LayerNorm")
        gated = linear(x, f"{at}.mlp.gated_layers")
        inner = act(gated[:, :INNER]) * gated[:, INNER:]
        x = norm(linear(inner, f"{at}.mlp.wo") + x, f"{at}.mlp.layernorm")
    return x


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    save_file(
        {f"bert.{name}": value for name, value in make_weights().items()}, tmp_path / "model.safetensors"
    )
    return tmp_path


@pytest.mark.parametrize("gate", ["geglu", "reglu"])
@pytest.mark.parametrize("longest", [8, 513, pytest.param(4096, marks=pytest.mark.slow)])
def test_hidden_states_and_gradients(folder: Path, gate: str, longest: int) -> None:
    """Rows of 1 token to the longest, in one batch, and all gradients, are those of the definition."""
    (folder / "config.json").write_text(json.dumps({**SETTINGS, "feed_forward_type": gate}))
    encoder = Encoder.from_pretrained(folder)
    assert isinstance(encoder, Encoder)
    rows = [torch.randint(60, (length,)) for length in (1, 8, longest)]
    weights = {name: value.requires_grad_() for name, value in make_weights().items()}
    expected = torch.cat([define(weights, row, F.gelu if gate == "geglu" else F.relu) for row in rows])
    with torch.no_grad():
        packed = encoder(Ragged.from_rows(rows)).values
    torch.testing.assert_close(packed, expected.detach(), rtol=1e-5, atol=1e-5)
    found = encoder(Ragged.from_rows(rows)).values
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn_like(expected) / len(expected)
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    for name, parts in encoder.names().items():
        ours = encoder.get_parameter(name).grad
        theirs = torch.cat([weights[part].grad for part in parts])
        assert (ours - theirs).abs().max() <= 1e-5 * max(1, float(theirs.abs().max())), name


def test_slopes() -> None:
    for heads in (1, 2, 6, 8, 12, 16):
        assert (-alibi_bias(heads, 2)[:, 0]).tolist() == pytest.approx(slopes(heads))


def test_low_precision_and_saving(folder: Path, tmp_path: Path) -> None:
    tokens = Ragged.from_rows([torch.randint(60, (length,)) for length in (3, 40, 90)])
    encoder = Encoder.from_pretrained(folder)
    with torch.no_grad():
        exact = encoder(tokens)
        encoder.save_pretrained(tmp_path / "again")
        again = Encoder.from_pretrained(tmp_path / "again")
        assert torch.equal(again(tokens).values, exact.values)
        half = Encoder.from_pretrained(folder, dtype=torch.bfloat16)(tokens)
        encoder.quantize_()
        small = encoder(tokens)
    for made, least in ((half, 0.999), (small, 0.99)):
        for ours, whole in zip(made, exact, strict=True):
            assert F.cosine_similarity(ours.float().mean(0), whole.mean(0), dim=0) >= least


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"feed_forward_type": "original"}, ConfigError),
        ({"feed_forward_type": "swiglu"}, ConfigError),
        ({"position_embedding_type": "absolute"}, CorruptError),  # weights of positions are missing
        ({"intermediate_size": 41}, CorruptError),
    ],
)
def test_refused(folder: Path, change: dict[str, Any], error: type[Exception]) -> None:
    (folder / "config.json").write_text(json.dumps(SETTINGS | change))
    with pytest.raises(error):
        Encoder.from_pretrained(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}},
        {"_name_or_path": "jinaai/jina-bert-v2-qk-post-norm"},
    ],
)
def test_norms_of_queries_and_keys_are_refused_by_name(folder: Path, change: dict[str, Any]) -> None:
    """Jina's model for code, whose files are whole: other norms and names than Jina 2 has."""
    (folder / "config.json").write_text(json.dumps(SETTINGS | change))
    with pytest.raises(ConfigError, match="norms of queries and keys"):
        Encoder.from_pretrained(folder)


def test_left_over_norms_are_an_error(folder: Path) -> None:
    """Jina's model for code has norms of queries and keys, which are not computed: it is refused."""
    extra = {"bert.encoder.layer.0.attention.self.layer_norm_q.weight": torch.ones(SIZE)}
    weights = {f"bert.{name}": value for name, value in make_weights().items()}
    save_file(weights | extra, folder / "model.safetensors")
    with pytest.raises(CorruptError, match="layer_norm_q"):
        Encoder.from_pretrained(folder)
