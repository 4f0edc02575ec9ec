"""The families BERT, RoBERTa and DistilBERT, post-norm with learned positions; ModernBERT and NeoBERT.

ModernBERT and NeoBERT are pre-norm and have rotary positions and gated feed-forward blocks; ModernBERT has
local attention. The code that was published with NeoBERT is never run.
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

_EMBEDDINGS = {
    "embeddings.word": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.token_type": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
}
_BERT_WEIGHTS: dict[str, str | tuple[str, ...]] = {
    **_EMBEDDINGS,
    "layers.qkv": tuple(f"encoder.layer.{{}}.attention.self.{part}" for part in ("query", "key", "value")),
    "layers.out": "encoder.layer.{}.attention.output.dense",
    "layers.attention_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "layers.up": "encoder.layer.{}.intermediate.dense",
    "layers.down": "encoder.layer.{}.output.dense",
    "layers.mlp_norm": "encoder.layer.{}.output.LayerNorm",
}
_GATES = {"geglu": "gelu", "reglu": "relu"}  # activations by feed_forward_type
_ROBERTAS = {
    "roberta": "RobertaForMaskedLM",
    "xlm-roberta": "XLMRobertaForMaskedLM",
    "camembert": "CamembertForMaskedLM",
}


def _bert_config(settings: Settings) -> EncoderConfig:
    roberta = settings["model_type"] != "bert"
    if settings.get("position_embedding_type", "absolute") != "absolute":
        raise ConfigError(f"position_embedding_type {settings['position_embedding_type']!r}")
    if settings.get("is_decoder") or settings.get("add_cross_attention"):
        raise ConfigError("a decoder")
    layer = LayerConfig(
        hidden_size=settings["hidden_size"],
        num_heads=settings["num_attention_heads"],
        intermediate_size=settings["intermediate_size"],
    )
    pad = settings.get("pad_token_id")
    return EncoderConfig(
        vocab_size=settings["vocab_size"],
        layers=(layer,) * count_layers(settings),
        learned_positions=settings["max_position_embeddings"],
        position_offset=((1 if pad is None else pad) + 1) if roberta else 0,
        token_types=settings["type_vocab_size"],
        norm_eps=settings.get("layer_norm_eps", 1e-12),
        activation=activation(settings.get("hidden_act", "gelu")),
        embedding_dropout=settings.get("hidden_dropout_prob", 0.1),
        attention_dropout=settings.get("attention_probs_dropout_prob", 0.1),
        hidden_dropout=settings.get("hidden_dropout_prob", 0.1),
    )


def _jina_config(settings: Settings) -> EncoderConfig:
    """Read a BERT with ALiBi and gated feed-forward blocks, as Jina's second embedding models are."""
    sources = (settings.get("_name_or_path"), *(settings.get("auto_map") or {}).values())
    if any("qk-post-norm" in str(source) for source in sources):
        raise ConfigError("norms of queries and keys (jina-bert-v2-qk-post-norm)")
    gate = settings.get("feed_forward_type", "original")
    if gate not in _GATES:
        raise ConfigError(f"position_embedding_type 'alibi' and feed_forward_type {gate!r:.60}")
    bert = _bert_config({**settings, "position_embedding_type": "absolute", "hidden_act": _GATES[gate]})
    changes = {"learned_positions": 0, "alibi": True, "gated": True, "mlp_bias": False, "down_bias": True}
    return bert.model_copy(update=changes)


def _bert_variant(settings: Settings) -> Family:
    return JINA if settings.get("position_embedding_type") == "alibi" else BERT


def _bert_masked_lm(settings: Settings) -> MaskedLM:
    head = "cls.predictions"
    inner = f"{head}.transform"
    names = masked_lm_names(f"{inner}.dense", f"{inner}.LayerNorm", f"{head}.decoder", head)
    act = activation(settings.get("hidden_act", "gelu"))
    return MaskedLM("BertForMaskedLM", names, act, float(settings.get("layer_norm_eps", 1e-12)))


def _roberta_masked_lm(settings: Settings) -> MaskedLM:
    names = masked_lm_names("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head")
    architecture = _ROBERTAS[settings["model_type"]]
    return MaskedLM(architecture, names, "gelu", float(settings.get("layer_norm_eps", 1e-12)))


def _distilbert_config(settings: Settings) -> EncoderConfig:
    layer = LayerConfig(
        hidden_size=settings["dim"],
        num_heads=settings["n_heads"],
        intermediate_size=settings["hidden_dim"],
    )
    return EncoderConfig(
        vocab_size=settings["vocab_size"],
        layers=(layer,) * count_layers(settings, "n_layers"),
        learned_positions=settings["max_position_embeddings"],
        activation=activation(settings.get("activation", "gelu")),
        embedding_dropout=settings.get("dropout", 0.1),
        attention_dropout=settings.get("attention_dropout", 0.1),
        hidden_dropout=settings.get("dropout", 0.1),
    )


def _distilbert_masked_lm(settings: Settings) -> MaskedLM:
    names = masked_lm_names("vocab_transform", "vocab_layer_norm", "vocab_projector")
    return MaskedLM("DistilBertForMaskedLM", names, activation(settings.get("activation", "gelu")), 1e-12)


def _modernbert_config(settings: Settings) -> EncoderConfig:
    count = count_layers(settings)
    # which layers attend to the whole text: named by layer, or every n-th
    interval = settings.get("global_attn_every_n_layers", 3)
    default = ["full_attention" if i % interval == 0 else "sliding_attention" for i in range(count)]
    kinds = settings.get("layer_types") or default
    # rotary positions by kind of layer; rope_scaling counts for both kinds, as in transformers
    bases = {
        "full_attention": settings.get("global_rope_theta") or 160_000.0,
        "sliding_attention": settings.get("local_rope_theta") or 10_000.0,
    }
    given, scaling = settings.get("rope_parameters") or {}, settings.get("rope_scaling") or {}
    ropes = {
        kind: {"rope_theta": base, **(given.get(kind) or {"rope_type": "default"}), **scaling}
        for kind, base in bases.items()
    }
    settings = {**settings, "rope_parameters": ropes, "rope_scaling": None}
    rotary = {kind: rotary_settings(settings, kind, base) for kind, base in bases.items()}
    # layers: a window for those that attend locally
    layers = tuple(
        LayerConfig(
            hidden_size=settings["hidden_size"],
            num_heads=settings["num_attention_heads"],
            intermediate_size=settings["intermediate_size"],
            attention_norm=i > 0,
            window=settings.get("local_attention", 128) // 2 if kind == "sliding_attention" else None,
            **rotary[kind],
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


def _neobert_config(settings: Settings) -> EncoderConfig:
    for key, value in {"rope": True, "hidden_act": "swiglu", "swiglu_packed": True}.items():
        if settings.get(key, value) != value:
            raise ConfigError(f"{key} {settings[key]!r:.60}")
    layer = LayerConfig(
        hidden_size=settings["hidden_size"],
        num_heads=settings["num_attention_heads"],
        intermediate_size=-(-(2 * settings["intermediate_size"] // 3) // 8) * 8,  # two thirds, in eights
        rotary_base=10_000.0,
    )
    dropout = settings.get("dropout", 0.0)
    return EncoderConfig(
        vocab_size=settings["vocab_size"],
        layers=(layer,) * count_layers(settings),
        embedding_norm=False,
        norm="rms" if settings.get("rms_norm", True) else "layer",
        norm_location="pre",
        norm_eps=settings.get("norm_eps", 1e-6),
        attention_bias=False,
        mlp_bias=False,
        activation="silu",
        gated=True,
        rotary_interleaved=True,
        attention_dropout=dropout,
        hidden_dropout=dropout,
    )


BERT = Family(
    _bert_config,
    _BERT_WEIGHTS,
    ("bert.",),
    ("pooler.", "cls.", "classifier.", "dropout.", "qa_outputs.", "linear."),  # the last is ColBERT's
    _bert_masked_lm,
    variant=_bert_variant,
)
JINA = BERT._replace(
    config=_jina_config,
    weights={
        **_BERT_WEIGHTS,
        "layers.up": "encoder.layer.{}.mlp.gated_layers",
        "layers.down": "encoder.layer.{}.mlp.wo",
        "layers.mlp_norm": "encoder.layer.{}.mlp.layernorm",
    },
)
ROBERTA = Family(
    _bert_config,
    _BERT_WEIGHTS,
    ("roberta.",),
    ("pooler.", "lm_head.", "classifier.", "qa_outputs.", "linear."),
    _roberta_masked_lm,
)
DISTILBERT = Family(
    _distilbert_config,
    {
        **_EMBEDDINGS,
        "layers.qkv": tuple(f"transformer.layer.{{}}.attention.{part}_lin" for part in ("q", "k", "v")),
        "layers.out": "transformer.layer.{}.attention.out_lin",
        "layers.attention_norm": "transformer.layer.{}.sa_layer_norm",
        "layers.up": "transformer.layer.{}.ffn.lin1",
        "layers.down": "transformer.layer.{}.ffn.lin2",
        "layers.mlp_norm": "transformer.layer.{}.output_layer_norm",
    },
    ("distilbert.",),
    (
        "vocab_transform.",
        "vocab_layer_norm.",
        "vocab_projector.",
        "pre_classifier.",
        "classifier.",
        "qa_outputs.",
        "linear.",
    ),
    _distilbert_masked_lm,
)
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
NEOBERT = Family(
    _neobert_config,
    {
        "embeddings.word": "encoder",
        "final_norm": "layer_norm",
        "layers.qkv": "transformer_encoder.{}.qkv",
        "layers.out": "transformer_encoder.{}.wo",
        "layers.attention_norm": "transformer_encoder.{}.attention_norm",
        "layers.up": "transformer_encoder.{}.ffn.w12",
        "layers.down": "transformer_encoder.{}.ffn.w3",
        "layers.mlp_norm": "transformer_encoder.{}.ffn_norm",
    },
    ("model.",),
    ("decoder.", "classifier.", "dense."),
    alternating=True,
)
