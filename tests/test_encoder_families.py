"""Model families: keys and names of weights of published checkpoints, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from irkit.core.ragged import Ragged
from irkit.encoder import Encoder
from irkit.encoder.families import encoder_config
from irkit.encoder.family import rotary_settings
from irkit.encoder.rotary import RotaryScaling, frequencies, rotary_table
from irkit.errors import ConfigError, CorruptError

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TOKENS = Ragged.from_rows([[5, 6, 7, 8, 9, 10, 11], [12, 13]])


def save(config: transformers.PretrainedConfig, folder: Path) -> None:
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).save_pretrained(folder)


def rewrite(folder: Path, settings: dict[str, Any], without: tuple[str, ...] = (), prefix: str = "") -> None:
    """Change keys of config.json, and put a prefix before the names of all weights."""
    known = json.loads((folder / "config.json").read_text())
    known = {key: value for key, value in known.items() if key not in without}
    (folder / "config.json").write_text(json.dumps(known | settings))
    tensors = load_file(folder / "model.safetensors")
    save_file({prefix + name: value for name, value in tensors.items()}, folder / "model.safetensors")


def test_the_first_nomic_checkpoints(tmp_path: Path) -> None:
    save(transformers.NomicBertConfig(vocab_size=99, **SIZES), tmp_path)
    expected = Encoder.from_pretrained(tmp_path)(TOKENS).values
    first = {
        **{
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 48,
            "n_positions": 2048,
            "rotary_emb_base": 1000,
        },
        **{"layer_norm_epsilon": 1e-12, "activation_function": "swiglu", "prenorm": False, "causal": False},
        **{"rotary_emb_fraction": 1.0, "rotary_scaling_factor": None, "qkv_proj_bias": False},
        "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
    }
    rewrite(tmp_path, first, without=(*SIZES, "layer_norm_eps", "rope_parameters", "hidden_act", "head_dim"))
    encoder = Encoder.from_pretrained(tmp_path)
    assert torch.equal(encoder(TOKENS).values, expected)
    encoder.save_pretrained(tmp_path / "again")
    assert torch.equal(Encoder.from_pretrained(tmp_path / "again")(TOKENS).values, expected)
    rewrite(tmp_path, {"num_experts": 8, "moe_every_n_layers": 2})
    with pytest.raises(ConfigError, match="8 experts"):
        Encoder.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="prenorm True"):
        encoder_config({"model_type": "nomic_bert", **first, "prenorm": True})


def test_the_first_gte_checkpoints(tmp_path: Path) -> None:
    save(transformers.GteConfig(vocab_size=99, rope_parameters={"rope_theta": 500.0}, **SIZES), tmp_path)
    expected = Encoder.from_pretrained(tmp_path)(TOKENS).values
    first = {
        **{"model_type": "new", "rope_theta": 500.0, "rope_scaling": None, "position_embedding_type": "rope"},
        **{"layer_norm_type": "layer_norm", "pack_qkv": True, "logn_attention_scale": False},
        "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
    }
    rewrite(tmp_path, first, without=("rope_parameters",), prefix="new.")
    encoder = Encoder.from_pretrained(tmp_path)
    assert torch.equal(encoder(TOKENS).values, expected)
    assert encoder.prefix == "new."
    settings = json.loads((tmp_path / "config.json").read_text())
    scaled = encoder_config({**settings, "rope_scaling": {"type": "ntk", "factor": 8.0}}).layers[0]
    assert scaled.rotary_scaling == RotaryScaling(kind="ntk", factor=8.0)
    with pytest.raises(ConfigError, match="position_embedding_type 'absolute'"):
        encoder_config({**settings, "position_embedding_type": "absolute"})


def test_ntk_frequencies() -> None:
    """Written out as in the code that was published with the model ``new``."""
    shares = torch.arange(0, 8, 2) / 8
    expected = 1.0 / ((500.0 * 4.0) ** shares) / 4.0 ** (2 / 8)
    torch.testing.assert_close(frequencies(500.0, 8, RotaryScaling(kind="ntk", factor=4.0)), expected)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 20,
            "beta_slow": 2,
            "mscale": 2,
            "mscale_all_dim": 1,
        },
        {
            **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_scaling_equals_transformers(rope: dict[str, Any]) -> None:
    rope = {"rope_theta": 10_000.0, "original_max_position_embeddings": 64} | rope
    config = transformers.LlamaConfig(head_dim=64, max_position_embeddings=256, rope_parameters=rope)
    wanted, amplitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    found = rotary_settings(config.to_dict())
    got = frequencies(found["rotary_base"], 64, found["rotary_scaling"])
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)
    cos, sin = rotary_table(torch.tensor([3]), 10_000.0, 64, found["rotary_scaling"])
    torch.testing.assert_close((cos**2 + sin**2).sqrt(), torch.full((1, 1, 32), amplitude))
    old = {"rope_theta": 10_000.0, "max_position_embeddings": 256, "rope_scaling": rope}
    assert rotary_settings(old) == found


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_scaling": YARN, "global_rope_theta": 500.0, "local_rope_theta": 100.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"full_attention": YARN | {"rope_theta": 500.0}}, "local_rope_theta": 100.0},
        {"rope_parameters": {"full_attention": {"type": "linear", "factor": 4.0}}},
    ],
    ids=["yarn", "linear", "yarn of whole texts", "old key"],
)
def test_modernbert_with_scaled_positions(tmp_path: Path, settings: dict[str, Any]) -> None:
    kinds = {"local_attention": 8, "global_attn_every_n_layers": 2}
    config = transformers.ModernBertConfig(vocab_size=99, pad_token_id=0, **kinds, **SIZES)
    model = transformers.AutoModel.from_config(config)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    plain = Encoder.from_pretrained(tmp_path)(TOKENS).values
    rewrite(tmp_path, settings, without=("rope_parameters",))
    theirs = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    encoder = Encoder.from_pretrained(tmp_path)
    assert isinstance(encoder, Encoder)
    with torch.no_grad():
        expected = torch.cat([theirs(row[None]).last_hidden_state[0] for row in TOKENS])
        found = encoder(TOKENS).values
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    assert (found - plain).abs().max() > 0.01 * expected.abs().max()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope"},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        {"rope_type": "linear", "factor": "two"},
        {"rope_type": "linear", "factor": 0.5},
        {"rope_type": "llama3", "factor": 2.0},
    ],
    ids=str,
)
def test_unknown_rotary_positions_are_refused(rope: dict[str, Any]) -> None:
    settings = {"model_type": "llama", "vocab_size": 9, "max_position_embeddings": 64, **SIZES}
    with pytest.raises(ConfigError):
        Encoder({**settings, "rope_parameters": rope})


@pytest.mark.parametrize(
    ("model_type", "more", "message"),
    [
        ("qwen3", {"num_key_value_heads": 3}, "4 heads are no multiple of 3"),
        ("qwen3", {"layer_types": ["full_attention"], "use_sliding_window": True}, "for 2 layers"),
        ("mistral", {"layer_types": ["full_attention", "other"]}, "layer_types"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"hidden_activation": "mish"}, "activation 'mish'"),
        ("llama", {"head_dim": 7}, "heads of width 7"),
        ("llama", {"pooling": [None, {"kernel": 2, "stride": 2}]}, "layers that pool"),
        ("mpnet", {"relative_attention_num_buckets": 2}, "buckets"),
        ("deberta-v2", {"relative_attention": True}, "pos_att_type None"),
        ("deberta-v2", {"relative_attention": True, "pos_att_type": "c2p|p2p"}, r"pos_att_type 'c2p\|p2p'"),
        ("deberta-v2", {"conv_kernel_size": 4}, "a convolution over 4 tokens, which has no middle"),
        ("deberta-v2", {"conv_kernel_size": 3, "conv_groups": 3}, "a convolution in 3 groups"),
        ("deberta-v2", {"conv_kernel_size": 3, "conv_act": "mish"}, "activation 'mish'"),
    ],
)
def test_settings_that_no_family_has(model_type: str, more: dict[str, Any], message: str) -> None:
    settings = {"model_type": model_type, "vocab_size": 9, "max_position_embeddings": 64, **SIZES}
    with pytest.raises(ConfigError, match=message):
        Encoder({**settings, **more})


def test_decoders_with_an_output_matrix(tmp_path: Path) -> None:
    """A causal language model's weights have a prefix; its output matrix is kept."""
    config = transformers.Qwen3Config(vocab_size=99, head_dim=8, num_key_value_heads=2, **SIZES)
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    encoder = Encoder.from_pretrained(tmp_path)
    with torch.no_grad():
        wanted = model.model(TOKENS[:1].values[None]).last_hidden_state[0]
        torch.testing.assert_close(encoder(TOKENS[:1]).values, wanted, atol=1e-5, rtol=0)
    encoder.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == load_file(tmp_path / "model.safetensors").keys()
    assert torch.equal(again["lm_head.weight"], model.lm_head.weight)
    rewrite(tmp_path, {"num_key_value_heads": 1})
    with pytest.raises(CorruptError, match=r"q_proj\.weight gives"):
        Encoder.from_pretrained(tmp_path)
