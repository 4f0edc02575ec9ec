"""ModernBERT: a pre-norm encoder with rotary positions, gated feed-forward blocks and local attention."""

from __future__ import annotations

from irkit.encoder.encoder_config import EncoderConfig, LayerConfig
from irkit.encoder.family import Family, MaskedLM, Settings, activation, count_layers, masked_lm_names
from irkit.errors import ConfigError


def _modernbert_config(settings: Settings) -> EncoderConfig:
    count = count_layers(settings)
    every = settings.get("global_attn_every_n_layers", 3)
    default = ["full_attention" if i % every == 0 else "sliding_attention" for i in range(count)]
    kinds = settings.get("layer_types") or default
    ropes = settings.get("rope_parameters") or {}
    for kind, rope in ropes.items():
        if isinstance(rope, dict) and rope.get("rope_type", "default") != "default":
            raise ConfigError(f"rope_type {rope['rope_type']!r} of {kind}")

    def base(kind: str, old_key: str, fallback: float) -> float:
        return float((ropes.get(kind) or {}).get("rope_theta") or settings.get(old_key) or fallback)

    bases = {
        "full_attention": base("full_attention", "global_rope_theta", 160_000.0),
        "sliding_attention": base("sliding_attention", "local_rope_theta", 10_000.0),
    }
    layers = tuple(
        LayerConfig(
            hidden_size=settings["hidden_size"],
            num_heads=settings["num_attention_heads"],
            intermediate_size=settings["intermediate_size"],
            attention_norm=i > 0,
            window=settings.get("local_attention", 128) // 2 if kind == "sliding_attention" else None,
            rotary_base=bases[kind],
        )
        for i, kind in enumerate(kinds)
    )
    return EncoderConfig(
        vocab_size=settings["vocab_size"],
        layers=layers,
        norm_location="pre",
        norm_eps=settings.get("norm_eps", 1e-5),
        norm_bias=settings.get("norm_bias", False),
        attention_bias=settings.get("attention_bias", False),
        mlp_bias=settings.get("mlp_bias", False),
        activation=activation(settings.get("hidden_activation", "gelu")),
        gated=True,
        embedding_dropout=settings.get("embedding_dropout", 0.0),
        attention_dropout=settings.get("attention_dropout", 0.0),
        hidden_dropout=settings.get("mlp_dropout", 0.0),
    )


def _modernbert_masked_lm(settings: Settings) -> MaskedLM:
    has = {
        "layers.0.bias": settings.get("classifier_bias", False),
        "layers.2.bias": settings.get("norm_bias", False),
        "bias": settings.get("decoder_bias", True),
    }
    names = masked_lm_names("head.dense", "head.norm", "decoder")
    names = {ours: theirs for ours, theirs in names.items() if has.get(ours, True)}
    act = activation(settings.get("classifier_activation", "gelu"))
    return MaskedLM("ModernBertForMaskedLM", names, act, float(settings.get("norm_eps", 1e-5)))


MODERNBERT = Family(
    _modernbert_config,
    {
        "embeddings.word": "embeddings.tok_embeddings",
        "embeddings.norm": "embeddings.norm",
        "final_norm": "final_norm",
        "layers.qkv": "layers.{}.attn.Wqkv",
        "layers.out": "layers.{}.attn.Wo",
        "layers.attention_norm": "layers.{}.attn_norm",
        "layers.up": "layers.{}.mlp.Wi",
        "layers.down": "layers.{}.mlp.Wo",
        "layers.mlp_norm": "layers.{}.mlp_norm",
    },
    ("model.",),
    ("head.", "decoder.", "classifier.", "drop.", "linear."),
    _modernbert_masked_lm,
)
