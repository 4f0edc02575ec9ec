"""BERT, RoBERTa and DistilBERT: post-norm encoders with learned positions."""

from __future__ import annotations

from irkit.encoder.encoder_config import EncoderConfig, LayerConfig
from irkit.encoder.family import Family, MaskedLM, Settings, activation, count_layers, masked_lm_names
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


def _bert_masked_lm(settings: Settings) -> MaskedLM:
    head = "cls.predictions"
    names = masked_lm_names(
        f"{head}.transform.dense", f"{head}.transform.LayerNorm", f"{head}.decoder", f"{head}.decoder", head
    )
    act = activation(settings.get("hidden_act", "gelu"))
    return MaskedLM("BertForMaskedLM", names, act, float(settings.get("layer_norm_eps", 1e-12)))


def _roberta_masked_lm(settings: Settings) -> MaskedLM:
    names = masked_lm_names(
        "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.decoder", "lm_head"
    )
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


BERT = Family(
    _bert_config,
    _BERT_WEIGHTS,
    ("bert.",),
    ("pooler.", "cls.", "classifier.", "dropout.", "qa_outputs.", "linear."),  # the last is ColBERT's
    _bert_masked_lm,
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
