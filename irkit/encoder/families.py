"""Which encoder a Hugging Face ``config.json`` describes, and where its weights go.

A family is two functions: from the keys of ``config.json`` to an `EncoderConfig`, and from that to the map
``our name -> names in the checkpoint``. Several names for one of ours are stacked on top of each other:
query, key and value are one matrix here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from irkit.encoder.config import MOST_LAYERS, Activation, EncoderConfig, LayerConfig, Pooling
from irkit.errors import ConfigError

__all__ = ["FAMILIES", "Family", "NameMap", "activation", "encoder_config", "schedule_settings"]

NameMap = dict[str, tuple[str, ...]]
Settings = Mapping[str, Any]

_POSITIONS = "pooled_positions"  # key of a TITE that irkit wrote, see `Pooling`
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


class Family(NamedTuple):
    """One family of checkpoints.

    Attributes:
        config: Reads ``config.json``; raises ConfigError for what the encoder cannot do.
        names: Gives the name map.
        prefixes: What may stand before every name of the encoder.
        heads: Prefixes of weights that belong to task heads; kept and saved again, never an error.
    """

    config: Callable[[Settings], EncoderConfig]
    names: Callable[[EncoderConfig], NameMap]
    prefixes: tuple[str, ...]
    heads: tuple[str, ...]


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
        layers=(layer,) * _number_of_layers(settings),
        learned_positions=settings["max_position_embeddings"],
        position_offset=((1 if pad is None else pad) + 1) if roberta else 0,
        token_types=settings["type_vocab_size"],
        norm_eps=settings.get("layer_norm_eps", 1e-12),
        activation=activation(settings.get("hidden_act", "gelu")),
        embedding_dropout=settings.get("hidden_dropout_prob", 0.1),
        attention_dropout=settings.get("attention_probs_dropout_prob", 0.1),
        hidden_dropout=settings.get("hidden_dropout_prob", 0.1),
    )


def _bert_names(config: EncoderConfig) -> NameMap:
    names = _embedding_names("embeddings.word_embeddings", "embeddings.LayerNorm")
    names["embeddings.position.weight"] = ("embeddings.position_embeddings.weight",)
    names["embeddings.token_type.weight"] = ("embeddings.token_type_embeddings.weight",)
    for i in range(len(config.layers)):
        old = f"encoder.layer.{i}"
        names |= _layer_names(
            config,
            i,
            attention_norm=f"{old}.attention.output.LayerNorm",
            qkv=tuple(f"{old}.attention.self.{part}" for part in ("query", "key", "value")),
            out=f"{old}.attention.output.dense",
            mlp_norm=f"{old}.output.LayerNorm",
            up=f"{old}.intermediate.dense",
            down=f"{old}.output.dense",
        )
    return names


def _distilbert_config(settings: Settings) -> EncoderConfig:
    layer = LayerConfig(
        hidden_size=settings["dim"],
        num_heads=settings["n_heads"],
        intermediate_size=settings["hidden_dim"],
    )
    return EncoderConfig(
        vocab_size=settings["vocab_size"],
        layers=(layer,) * _number_of_layers(settings, "n_layers"),
        learned_positions=settings["max_position_embeddings"],
        activation=activation(settings.get("activation", "gelu")),
        embedding_dropout=settings.get("dropout", 0.1),
        attention_dropout=settings.get("attention_dropout", 0.1),
        hidden_dropout=settings.get("dropout", 0.1),
    )


def _distilbert_names(config: EncoderConfig) -> NameMap:
    names = _embedding_names("embeddings.word_embeddings", "embeddings.LayerNorm")
    names["embeddings.position.weight"] = ("embeddings.position_embeddings.weight",)
    for i in range(len(config.layers)):
        old = f"transformer.layer.{i}"
        names |= _layer_names(
            config,
            i,
            attention_norm=f"{old}.sa_layer_norm",
            qkv=tuple(f"{old}.attention.{part}_lin" for part in ("q", "k", "v")),
            out=f"{old}.attention.out_lin",
            mlp_norm=f"{old}.output_layer_norm",
            up=f"{old}.ffn.lin1",
            down=f"{old}.ffn.lin2",
        )
    return names


def _modernbert_config(settings: Settings) -> EncoderConfig:
    count = _number_of_layers(settings)
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


def _modernbert_names(config: EncoderConfig) -> NameMap:
    names = _embedding_names("embeddings.tok_embeddings", "embeddings.norm", config.norm_bias)
    names |= _both("final_norm", ("final_norm",), config.norm_bias)
    for i in range(len(config.layers)):
        old = f"layers.{i}"
        names |= _layer_names(
            config,
            i,
            attention_norm=f"{old}.attn_norm",
            qkv=(f"{old}.attn.Wqkv",),
            out=f"{old}.attn.Wo",
            mlp_norm=f"{old}.mlp_norm",
            up=f"{old}.mlp.Wi",
            down=f"{old}.mlp.Wo",
        )
    return names


def _tite_config(settings: Settings) -> EncoderConfig:
    count = _number_of_layers(settings)

    def each(key: str, default: Any = None) -> list[Any]:
        value = settings.get(key, default)
        if not isinstance(value, list | tuple):
            return [value] * count
        if len(value) != count:
            raise ConfigError(f"{len(value)} {key} for {count} layers")
        return list(value)

    sizes = each("hidden_sizes", 768)
    relative = settings.get("relative_positional_embedding_type", "rotary")
    learned = settings.get("absolute_positional_embedding_type") == "learned"
    old = settings.get("positional_embedding_type")  # of the first checkpoints
    if old is not None:
        learned, relative = old == "absolute", None if old == "absolute" else old
    location = settings.get("norm_location", "pre")
    if relative not in (None, "rotary") or location not in ("pre", "qkv", "post"):
        raise ConfigError(f"positions {relative!r} with norm_location {location!r}")
    how = {
        "location": settings.get("pooling_location", "intra"),
        "positions": settings.get(_POSITIONS, "kernel"),  # theirs; irkit says which its own models have
    }
    windows = zip(each("kernel_sizes"), each("strides"), strict=True)
    shapes = zip(
        sizes, each("num_attention_heads", 12), each("intermediate_sizes", 3072), windows, strict=True
    )
    layers = tuple(
        LayerConfig(
            hidden_size=size,
            num_heads=heads,
            intermediate_size=inner,
            attention_norm=location != "pre" or i > 0,
            rotary_base=10_000.0 if relative else None,
            pooling=_tite_pooling(*window, how),
        )
        for i, (size, heads, inner, window) in enumerate(shapes)
    )
    gated = settings.get("hidden_act") == "swiglu"
    return EncoderConfig(
        vocab_size=settings["vocab_size"],
        layers=layers,
        embedding_size=sizes[-1] if sizes[:1] != sizes[-1:] else None,
        learned_positions=settings.get("max_position_embeddings", 512) if learned else 0,
        norm=settings.get("norm_type", "rms"),
        norm_location=location,
        norm_eps=settings.get("layer_norm_eps", 1e-12),
        activation="silu" if gated else activation(settings.get("hidden_act", "gelu_pytorch_tanh")),
        gated=gated,
        rotary_interleaved=settings.get("rotary_interleaved", True),
        embedding_dropout=settings.get("dropout_prob", 0.1),
        hidden_dropout=settings.get("dropout_prob", 0.1),
    )


def _tite_pooling(kernel: int | None, stride: int | None, how: Settings) -> Pooling | None:
    if (kernel is None) != (stride is None):
        raise ConfigError(f"kernel size {kernel} with stride {stride} in one layer")
    if kernel is None or kernel == stride == 1:  # no pooling
        return None
    pooling = Pooling.parse({"kernel": kernel, "stride": stride, **how}, "pooling")
    return pooling.model_copy(update={"positions": "stride"}) if kernel == stride else pooling


def _tite_names(config: EncoderConfig) -> NameMap:
    bias = config.norm == "layer"
    names = _embedding_names("embeddings.word_embeddings", "embeddings.norm", bias)
    if config.embedding_size:
        names["embeddings.downscale.weight"] = ("embeddings.downscale.weight",)
    if config.learned_positions:
        names["embeddings.position.weight"] = ("embeddings.position_embeddings.weight",)
    if config.norm_location != "post":
        names |= _both("final_norm", ("encoder.norm",), bias)
    for i in range(len(config.layers)):
        old = f"encoder.layers.{i}"
        names |= _layer_names(
            config,
            i,
            attention_norm=f"{old}.attention.norm",
            qkv=tuple(f"{old}.attention.{part}" for part in ("query", "key", "value")),
            out=f"{old}.attention.dense",
            mlp_norm=f"{old}.mlp.norm",
            up=f"{old}.mlp.intermediate_dense",
            down=f"{old}.mlp.out_dense",
        )
    return names


def encoder_config(settings: Settings) -> EncoderConfig:
    """What the keys of a ``config.json`` describe.

    Beside the family's own keys there may be ``pooling``, a list with what `Pooling` takes, or null, for each
    layer: how an encoder that was trained without pooling pools.

    Raises:
        KeyError: A key of the family is missing.
        ConfigError: It is something that the encoder cannot be.
    """
    config = FAMILIES[str(settings.get("model_type"))].config(settings)
    schedule = settings.get("pooling")
    if schedule is None:
        return config
    if not isinstance(schedule, list) or len(schedule) != len(config.layers):
        raise ConfigError(f"pooling {schedule!r:.60} for {len(config.layers)} layers")
    pairs = zip(config.layers, schedule, strict=True)
    layers = [layer.model_dump() | {"pooling": pooling} for layer, pooling in pairs]
    return EncoderConfig.parse(config.model_dump() | {"layers": layers}, "pooling")


def schedule_settings(family: str, schedule: Sequence[Pooling | None]) -> dict[str, Any]:
    """The keys of ``config.json`` that hold a pooling schedule: TITE has its own.

    Raises:
        ConfigError: A TITE would pool at several locations, or count positions in two ways.
    """
    schedule = list(schedule)
    if not all(pooling is None or isinstance(pooling, Pooling) for pooling in schedule):
        raise ConfigError(f"a pooling schedule has a Pooling or None for each layer, got {schedule!r:.100}")
    if family != "tite":
        return {"pooling": [pooling and pooling.model_dump() for pooling in schedule]}
    locations = {pooling.location for pooling in schedule if pooling}
    if len(locations) > 1:
        raise ConfigError(f"a TITE pools at one location in all layers, got {', '.join(sorted(locations))}")
    positions = {pooling.positions for pooling in schedule if pooling and pooling.kernel != pooling.stride}
    if len(positions) > 1:
        raise ConfigError("a TITE has one kind of positions in all layers, got stride and kernel")
    return {
        _POSITIONS: positions.pop() if positions else "stride",
        "kernel_sizes": [pooling and pooling.kernel for pooling in schedule],
        "strides": [pooling and pooling.stride for pooling in schedule],
        "pooling_location": locations.pop() if locations else "intra",
    }


def _number_of_layers(settings: Settings, key: str = "num_hidden_layers") -> int:
    count = settings[key]
    if type(count) is not int or not 0 < count <= MOST_LAYERS:
        raise ConfigError(f"{key} {count!r:.60}, expected 1 to {MOST_LAYERS},")
    return count


def activation(name: str) -> Activation:
    """The activation that Hugging Face calls ``name``.

    Raises:
        ConfigError: There is none here.
    """
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(f"activation {name!r:.60}")
    return _ACTIVATIONS[name]


def _both(ours: str, theirs: tuple[str, ...], bias: bool) -> NameMap:
    suffixes = ("weight", "bias") if bias else ("weight",)
    return {f"{ours}.{suffix}": tuple(f"{name}.{suffix}" for name in theirs) for suffix in suffixes}


def _embedding_names(word: str, norm: str, bias: bool = True) -> NameMap:
    return {"embeddings.word.weight": (f"{word}.weight",), **_both("embeddings.norm", (norm,), bias)}


def _layer_names(config: EncoderConfig, i: int, **theirs: str | tuple[str, ...]) -> NameMap:
    norm_bias = config.norm_bias and config.norm == "layer"
    biases = {"attention_norm": norm_bias, "mlp_norm": norm_bias}
    biases |= {"qkv": config.attention_bias, "out": config.attention_bias}
    biases |= {"up": config.mlp_bias, "down": config.mlp_bias}
    names: NameMap = {}
    for part, old in theirs.items():
        if part == "attention_norm" and not config.layers[i].attention_norm:
            continue
        names |= _both(f"layers.{i}.{part}", (old,) if isinstance(old, str) else old, biases[part])
    return names


_BERT = Family(
    _bert_config,
    _bert_names,
    ("bert.",),
    ("pooler.", "cls.", "classifier.", "dropout.", "qa_outputs.", "linear."),  # the last is ColBERT's
)
_ROBERTA = Family(
    _bert_config, _bert_names, ("roberta.",), ("pooler.", "lm_head.", "classifier.", "qa_outputs.", "linear.")
)

FAMILIES: dict[str, Family] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": Family(
        _distilbert_config,
        _distilbert_names,
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
    ),
    "modernbert": Family(
        _modernbert_config,
        _modernbert_names,
        ("model.",),
        ("head.", "decoder.", "classifier.", "drop.", "linear."),
    ),
    "tite": Family(_tite_config, _tite_names, ("tite.",), ("heads.", "lm_decoder.", "pooler.", "cls.")),
}
