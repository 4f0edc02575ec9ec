"""The families of decoders: Llama, Mistral, Qwen2, Qwen3, and the text models of Gemma 2 and 3.

They are pre-norm with rotary positions, RMSNorm, gated feed-forward blocks and grouped heads of queries. As
published they are causal. The key ``is_causal`` of config.json, or ``use_bidirectional_attention`` of Gemma
3, lets all tokens attend to all tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from irkit.encoder.encoder_config import EncoderConfig, LayerConfig
from irkit.encoder.family import Family, Settings, activation, count_layers, rotary_settings
from irkit.errors import ConfigError

_WEIGHTS: dict[str, str | tuple[str, ...]] = {
    "embeddings.word": "embed_tokens",
    "final_norm": "norm",
    "layers.attention_norm": "layers.{}.input_layernorm",
    "layers.qkv": tuple(f"layers.{{}}.self_attn.{part}_proj" for part in "qkv"),
    "layers.query_norm": "layers.{}.self_attn.q_norm",
    "layers.key_norm": "layers.{}.self_attn.k_norm",
    "layers.out": "layers.{}.self_attn.o_proj",
    "layers.mlp_norm": "layers.{}.post_attention_layernorm",
    "layers.up": ("layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj"),
    "layers.down": "layers.{}.mlp.down_proj",
}


def _is_causal(settings: Settings) -> bool:
    if settings.get("use_bidirectional_attention"):
        return False
    if "AutoModel" in (settings.get("auto_map") or ()) and settings.get("is_causal") is None:
        raise ConfigError(
            "code of its own (auto_map) that irkit does not run, and without the key is_causal in its "
            "config.json, which says whether tokens attend to later ones,"
        )
    return settings.get("is_causal") is not False


def _decoder_config(settings: Settings, *, local: bool = False, **differences: Any) -> EncoderConfig:
    """Read the keys that all decoders share.

    Args:
        settings: Content of config.json.
        local: Whether layers attend locally if config.json says nothing else and has a ``sliding_window``.
        **differences: Settings of the encoder in which the family differs from Llama.
    """
    # which layers attend within a window
    count, causal = count_layers(settings), _is_causal(settings)
    reach = settings.get("sliding_window")
    kinds = (
        settings.get("layer_types") or ["sliding_attention" if local and reach else "full_attention"] * count
    )
    if len(kinds) != count or not {*kinds} <= {"full_attention", "sliding_attention"}:
        raise ConfigError(f"layer_types {kinds!r:.80} for {count} layers")
    # theirs is the distance that is too far; Gemma 3 counts both directions together
    both = settings.get("use_bidirectional_attention")
    window = None if reach is None else reach // 2 if both else reach - 1 if causal else reach
    # the layers, and what they share
    layers = tuple(
        LayerConfig(
            hidden_size=settings["hidden_size"],
            num_heads=settings["num_attention_heads"],
            key_heads=settings.get("num_key_value_heads"),
            head_dim=settings.get("head_dim"),
            intermediate_size=settings["intermediate_size"],
            window=window if kind == "sliding_attention" else None,
            **rotary_settings(settings, kind),
        )
        for kind in kinds
    )
    values = {
        "embedding_norm": False,
        "norm": "rms",
        "norm_location": "pre",
        "norm_eps": settings.get("rms_norm_eps", 1e-6),
        "attention_bias": settings.get("attention_bias", False),
        "mlp_bias": settings.get("mlp_bias", False),
        "activation": activation(settings.get("hidden_activation") or settings.get("hidden_act", "silu")),
        "gated": True,
        "causal": causal,
        "attention_dropout": settings.get("attention_dropout") or 0.0,
    }
    return EncoderConfig(vocab_size=settings["vocab_size"], layers=layers, **{**values, **differences})


def _qwen_config(settings: Settings, **differences: Any) -> EncoderConfig:
    count, first = count_layers(settings), settings.get("max_window_layers", 28)
    if not settings.get("use_sliding_window"):
        settings = {**settings, "sliding_window": None, "layer_types": None}
    elif not settings.get("layer_types"):
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
        settings = {**settings, "layer_types": kinds}
    return _decoder_config(settings, **differences)


def _gemma_config(settings: Settings, *, pattern: int, **differences: Any) -> EncoderConfig:
    """Read the keys that Gemma 2 and 3 share; every ``pattern``-th layer attends to the whole text."""
    if not settings.get("layer_types"):
        kinds = [
            "sliding_attention" if (i + 1) % pattern else "full_attention"
            for i in range(count_layers(settings))
        ]
        settings = {**settings, "layer_types": kinds}
    return _decoder_config(
        {"head_dim": 256, "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh", **settings},
        embedding_scale=settings["hidden_size"] ** 0.5,
        norm_location="both",
        norm_offset=1.0,
        attention_scale=settings.get("query_pre_attn_scalar", 256) ** -0.5,
        **differences,
    )


def _gemma2_config(settings: Settings) -> EncoderConfig:
    if settings.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention")
    return _gemma_config(settings, pattern=2, softcap=settings.get("attn_logit_softcapping", 50.0))


def _gemma3_config(settings: Settings) -> EncoderConfig:
    pattern = settings.get("sliding_window_pattern") or settings.get("_sliding_window_pattern") or 6
    bases = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
    if "rope_parameters" not in settings:  # keys of the first checkpoints; only whole texts are scaled
        scaling = settings.get("rope_scaling") or {}
        ropes = {
            "full_attention": {
                "rope_theta": settings.get("rope_theta") or bases["full_attention"],
                **scaling,
            },
            "sliding_attention": {
                "rope_theta": settings.get("rope_local_base_freq") or bases["sliding_attention"]
            },
        }
        settings = {**settings, "rope_parameters": ropes, "rope_scaling": None}
    softcap = settings.get("attn_logit_softcapping")
    return _gemma_config(settings, pattern=pattern, head_norm=True, softcap=softcap)


LLAMA = Family(_decoder_config, _WEIGHTS, ("model.",), ("lm_head.", "score."))
MISTRAL = LLAMA._replace(config=partial(_decoder_config, local=True))
QWEN2 = LLAMA._replace(config=partial(_qwen_config, attention_bias=True, out_bias=False))
QWEN3 = LLAMA._replace(config=partial(_qwen_config, head_norm=True))
_GEMMA_WEIGHTS = {
    **_WEIGHTS,
    "layers.attention_out_norm": "layers.{}.post_attention_layernorm",
    "layers.mlp_norm": "layers.{}.pre_feedforward_layernorm",
    "layers.mlp_out_norm": "layers.{}.post_feedforward_layernorm",
}
GEMMA2 = LLAMA._replace(config=_gemma2_config, weights=_GEMMA_WEIGHTS)
GEMMA3 = GEMMA2._replace(config=_gemma3_config)
