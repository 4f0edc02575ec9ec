"""The families Nomic-BERT and GTE: post-norm with rotary positions and gated feed-forward blocks.

Checkpoints have the keys of transformers, or the keys of the code that was published with the first
checkpoints (``n_embd``; ``model_type: new``). That code is never run.
"""

from __future__ import annotations

from irkit.encoder.encoder_config import EncoderConfig, LayerConfig
from irkit.encoder.family import (
    Family,
    MaskedLM,
    Settings,
    activation,
    count_layers,
    masked_lm_names,
    rotary_settings,
)
from irkit.errors import ConfigError

_NOMIC_KEYS = {  # today's keys by the first
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "resid_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
}
_NOMIC_FIXED = {  # settings of the first checkpoints that irkit has with one value only
    "prenorm": False,
    "causal": False,
    "use_rms_norm": False,
    "parallel_block": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "activation_function": "swiglu",
}


def _nomic_config(settings: Settings) -> EncoderConfig:
    if "n_embd" in settings:
        for key, value in _NOMIC_FIXED.items():
            if key in settings and (settings[key] or False) != (value or False):
                raise ConfigError(f"{key} {settings[key]!r:.60}")
        if settings.get("num_experts") and settings.get("moe_every_n_layers"):
            raise ConfigError(f"{settings['num_experts']} experts")
        new = {today: settings[first] for first, today in _NOMIC_KEYS.items() if first in settings}
        settings = {**settings, **new, "intermediate_size": settings.get("n_inner") or 4 * settings["n_embd"]}
    return _config(settings, "silu", 1000.0, {"attention_bias": False, "mlp_bias": False})


def _gte_config(settings: Settings) -> EncoderConfig:
    if settings["model_type"] == "new":
        fixed = {"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "pack_qkv": True}
        for key, value in {**fixed, "logn_attention_scale": False}.items():
            if settings.get(key, value) != value:
                raise ConfigError(f"{key} {settings[key]!r:.60}")
    base = 10_000.0 if settings["model_type"] == "new" else 160_000.0
    return _config(settings, "gelu", base, {"mlp_bias": False, "down_bias": True, "gate_last": True})


def _config(settings: Settings, act: str, base: float, biases: dict[str, bool]) -> EncoderConfig:
    layer = LayerConfig(
        hidden_size=settings["hidden_size"],
        num_heads=settings["num_attention_heads"],
        head_dim=settings.get("head_dim"),
        intermediate_size=settings["intermediate_size"],
        **rotary_settings(settings, base=base),
    )
    return EncoderConfig(
        vocab_size=settings["vocab_size"],
        layers=(layer,) * count_layers(settings),
        token_types=settings.get("type_vocab_size") or 0,
        norm_eps=settings.get("layer_norm_eps", 1e-12),
        activation=activation(settings.get("hidden_act", act)),
        gated=True,
        embedding_dropout=settings.get("hidden_dropout_prob", 0.0),
        attention_dropout=settings.get("attention_probs_dropout_prob", 0.0),
        hidden_dropout=settings.get("hidden_dropout_prob", 0.0),
        **biases,
    )


def _nomic_masked_lm(settings: Settings) -> MaskedLM:
    head = "cls.predictions"
    inner = f"{head}.transform"
    names = masked_lm_names(f"{inner}.dense", f"{inner}.layer_norm", f"{head}.decoder", head)
    act, eps = activation(settings.get("hidden_act", "silu")), settings.get("layer_norm_eps", 1e-12)
    return MaskedLM("NomicBertForMaskedLM", names, act, float(eps))


def _gte_masked_lm(settings: Settings) -> MaskedLM:
    names = masked_lm_names("lm_head.dense", "lm_head.norm", "lm_head.decoder")
    name = "NewForMaskedLM" if settings["model_type"] == "new" else "GteForMaskedLM"
    return MaskedLM(name, names, "gelu", float(settings.get("layer_norm_eps", 1e-12)))


NOMIC = Family(
    _nomic_config,
    {
        "embeddings.word": "embeddings.word_embeddings",
        "embeddings.token_type": "embeddings.token_type_embeddings",
        "embeddings.norm": "emb_ln",
        "layers.qkv": "encoder.layers.{}.attn.Wqkv",
        "layers.out": "encoder.layers.{}.attn.out_proj",
        "layers.attention_norm": "encoder.layers.{}.norm1",
        "layers.up": ("encoder.layers.{}.mlp.fc12", "encoder.layers.{}.mlp.fc11"),
        "layers.down": "encoder.layers.{}.mlp.fc2",
        "layers.mlp_norm": "encoder.layers.{}.norm2",
    },
    ("nomic_bert.", "bert."),
    ("pooler.", "cls.", "classifier."),
    _nomic_masked_lm,
)
GTE = Family(
    _gte_config,
    {
        "embeddings.word": "embeddings.word_embeddings",
        "embeddings.token_type": "embeddings.token_type_embeddings",
        "embeddings.norm": "embeddings.LayerNorm",
        "layers.qkv": "encoder.layer.{}.attention.qkv_proj",
        "layers.out": "encoder.layer.{}.attention.o_proj",
        "layers.attention_norm": "encoder.layer.{}.attn_ln",
        "layers.up": "encoder.layer.{}.mlp.up_gate_proj",
        "layers.down": "encoder.layer.{}.mlp.down_proj",
        "layers.mlp_norm": "encoder.layer.{}.mlp_ln",
    },
    ("gte.", "new."),
    ("pooler.", "lm_head.", "classifier."),
    _gte_masked_lm,
)
NEW = GTE._replace(prefixes=("new.", "gte."))
