"""The families whose attention knows distances: MPNet, the encoders of T5 and mT5, DeBERTa-v2 and v3."""

from __future__ import annotations

from typing import Any

from irkit.encoder.bert_families import BERT
from irkit.encoder.encoder_config import Convolution, Disentangled, EncoderConfig, LayerConfig, RelativeBias
from irkit.encoder.family import Family, MaskedLM, Settings, activation, count_layers, masked_lm_names
from irkit.errors import ConfigError


def _mpnet_config(settings: Settings) -> EncoderConfig:
    bert = BERT.config({**settings, "model_type": "bert", "type_vocab_size": 0})
    buckets = settings.get("relative_attention_num_buckets", 32)
    return bert.model_copy(update={"position_offset": 2, "relative": RelativeBias(buckets=buckets)})


def _mpnet_masked_lm(settings: Settings) -> MaskedLM:
    names = masked_lm_names("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head")
    return MaskedLM("MPNetForMaskedLM", names, "gelu", float(settings.get("layer_norm_eps", 1e-12)))


def _deberta_config(settings: Settings) -> EncoderConfig:
    # which of content and positions attend to each other
    ways = settings.get("pos_att_type") or []
    ways = {way.strip() for way in (ways.lower().split("|") if isinstance(ways, str) else ways)}
    relative = settings.get("relative_attention", False)
    if not ways <= {"c2p", "p2c"} or bool(ways) is not bool(relative):
        raise ConfigError(f"pos_att_type {settings.get('pos_att_type')!r:.60}")
    # a BERT, and where DeBERTa differs from it
    biased = settings.get("position_biased_input", True)
    bert = BERT.config({"type_vocab_size": 0, **settings, "model_type": "bert"})
    size, inner = settings["hidden_size"], settings.get("embedding_size")
    norms = str(settings.get("norm_rel_ebd", "none")).lower().split("|")
    buckets, furthest = settings.get("position_buckets", -1), settings.get("max_relative_positions", -1)
    kernel, values = settings.get("conv_kernel_size", 0), dict[str, Any]()
    if relative:
        values["disentangled"] = Disentangled(
            buckets=buckets if buckets > 0 else None,
            furthest=furthest if furthest > 0 else settings["max_position_embeddings"],
            norm="layer_norm" in [norm.strip() for norm in norms],
            to_positions="c2p" in ways,
            from_positions="p2c" in ways,
            shared=settings.get("share_att_key", False),
        )
        # the mean of the products of tokens, and of tokens and positions
        values["attention_scale"] = ((1 + len(ways)) * bert.layers[0].head_width) ** -0.5
    if kernel > 0:
        values["convolution"] = Convolution(
            kernel=kernel,
            groups=settings.get("conv_groups", 1),
            activation=activation(settings.get("conv_act", "tanh")),
        )
    changes = {
        "embedding_size": inner if inner and inner != size else None,
        "learned_positions": bert.learned_positions if biased else 0,
        "norm_eps": settings.get("layer_norm_eps", 1e-7),
    }
    return EncoderConfig.parse(bert.model_dump() | changes | values, "deberta-v2")


def _deberta_masked_lm(settings: Settings) -> MaskedLM:
    bert = BERT.masked_lm
    assert bert is not None
    head = bert({"layer_norm_eps": 1e-7, **settings})
    return head._replace(architecture="DebertaV2ForMaskedLM")


def _deberta_variant(settings: Settings) -> Family:
    if settings.get("position_biased_input", True):
        return DEBERTA
    # published files hold positions that no code reads
    return DEBERTA._replace(heads=(*DEBERTA.heads, "embeddings.position_embeddings."))


def _t5_config(settings: Settings) -> EncoderConfig:
    how = settings.get("feed_forward_proj", "relu")
    kind = "gelu_new" if how == "gated-gelu" else how.removeprefix("gated-")
    dropout = settings.get("dropout_rate", 0.1)
    layer = LayerConfig(
        hidden_size=settings["d_model"],
        num_heads=settings["num_heads"],
        head_dim=settings["d_kv"],
        intermediate_size=settings["d_ff"],
    )
    return EncoderConfig(
        vocab_size=settings["vocab_size"],
        layers=(layer,) * count_layers(settings, "num_layers"),
        embedding_norm=False,
        norm="rms",
        norm_location="pre",
        norm_eps=settings.get("layer_norm_epsilon", 1e-6),
        relative=RelativeBias(
            buckets=settings.get("relative_attention_num_buckets", 32),
            furthest=settings.get("relative_attention_max_distance", 128),
        ),
        attention_scale=1.0,
        attention_bias=False,
        mlp_bias=False,
        activation=activation(settings.get("dense_act_fn", kind)),
        gated=how.startswith("gated-"),
        embedding_dropout=dropout,
        attention_dropout=dropout,
        hidden_dropout=dropout,
    )


def _t5_variant(settings: Settings) -> Family:
    return _GATED_T5 if str(settings.get("feed_forward_proj", "relu")).startswith("gated-") else _PLAIN_T5


MPNET = Family(
    _mpnet_config,
    {
        **BERT.weights,
        "relative": "encoder.relative_attention_bias",
        "layers.qkv": tuple(f"encoder.layer.{{}}.attention.attn.{part}" for part in "qkv"),
        "layers.out": "encoder.layer.{}.attention.attn.o",
        "layers.attention_norm": "encoder.layer.{}.attention.LayerNorm",
    },
    ("mpnet.",),
    ("pooler.", "lm_head.", "classifier.", "qa_outputs."),
    _mpnet_masked_lm,
)
DEBERTA = Family(
    _deberta_config,
    {
        **BERT.weights,
        "embeddings.downscale": "embeddings.embed_proj",
        "relative": "encoder.rel_embeddings",
        "relative_norm": "encoder.LayerNorm",
        "convolution.conv": "encoder.conv.conv",
        "convolution.norm": "encoder.conv.LayerNorm",
        "layers.position_key": "encoder.layer.{}.attention.self.pos_key_proj",
        "layers.position_query": "encoder.layer.{}.attention.self.pos_query_proj",
        "layers.qkv": tuple(
            f"encoder.layer.{{}}.attention.self.{part}_proj" for part in ("query", "key", "value")
        ),
    },
    ("deberta.",),
    ("pooler.", "cls.", "lm_predictions.", "mask_predictions.", "classifier.", "qa_outputs."),
    _deberta_masked_lm,
    variant=_deberta_variant,
)
_BLOCK = "encoder.block.{}.layer"
_PLAIN_T5 = Family(
    _t5_config,
    {
        "embeddings.word": "shared",
        "relative": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        "final_norm": "encoder.final_layer_norm",
        "layers.qkv": tuple(f"{_BLOCK}.0.SelfAttention.{part}" for part in "qkv"),
        "layers.out": f"{_BLOCK}.0.SelfAttention.o",
        "layers.attention_norm": f"{_BLOCK}.0.layer_norm",
        "layers.up": f"{_BLOCK}.1.DenseReluDense.wi",
        "layers.down": f"{_BLOCK}.1.DenseReluDense.wo",
        "layers.mlp_norm": f"{_BLOCK}.1.layer_norm",
    },
    (),
    ("decoder.", "lm_head.", "encoder.embed_tokens."),
)
_GATED_T5 = _PLAIN_T5._replace(
    weights={
        **_PLAIN_T5.weights,
        "layers.up": (f"{_BLOCK}.1.DenseReluDense.wi_0", f"{_BLOCK}.1.DenseReluDense.wi_1"),
    }
)
T5 = _PLAIN_T5._replace(variant=_t5_variant)
