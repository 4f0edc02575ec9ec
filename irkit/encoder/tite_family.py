"""TITE: an encoder whose layers pool neighbouring tokens until one vector per text is left.

Source: Schlatt et al. 2025 (TITE), and the configuration of the authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from irkit.encoder.encoder_config import EncoderConfig, LayerConfig, Pooling
from irkit.encoder.family import Family, Settings, activation, count_layers
from irkit.errors import ConfigError

_POSITIONS = "pooled_positions"  # key of a TITE that irkit wrote, see `Pooling`


def _tite_config(settings: Settings) -> EncoderConfig:
    count = count_layers(settings)

    def per_layer(key: str, default: Any = None) -> list[Any]:
        value = settings.get(key, default)
        if not isinstance(value, list | tuple):
            return [value] * count
        if len(value) != count:
            raise ConfigError(f"{len(value)} {key} for {count} layers")
        return list(value)

    # positions and the place of the norms
    sizes = per_layer("hidden_sizes", 768)
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
    # shapes and pooling of each layer
    heads, inner = per_layer("num_attention_heads", 12), per_layer("intermediate_sizes", 3072)
    shapes = zip(sizes, heads, inner, per_layer("kernel_sizes"), per_layer("strides"), strict=True)
    layers = tuple(
        LayerConfig(
            hidden_size=size,
            num_heads=number,
            intermediate_size=width,
            attention_norm=location != "pre" or i > 0,
            rotary_base=10_000.0 if relative else None,
            pooling=_tite_pooling(kernel, stride, how),
        )
        for i, (size, number, width, kernel, stride) in enumerate(shapes)
    )
    # settings of the whole encoder
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


def _tite_schedule(schedule: Sequence[Pooling | None]) -> dict[str, Any]:
    """Return the keys and values for ``config.json`` of a TITE that express a pooling schedule.

    Raises:
        ConfigError: The layers differ in ``location`` or ``positions`` of their `Pooling`.
    """
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


TITE = Family(
    _tite_config,
    {
        "embeddings.word": "embeddings.word_embeddings",
        "embeddings.norm": "embeddings.norm",
        "embeddings.downscale": "embeddings.downscale",
        "embeddings.position": "embeddings.position_embeddings",
        "final_norm": "encoder.norm",
        "layers.qkv": tuple(f"encoder.layers.{{}}.attention.{part}" for part in ("query", "key", "value")),
        "layers.out": "encoder.layers.{}.attention.dense",
        "layers.attention_norm": "encoder.layers.{}.attention.norm",
        "layers.up": "encoder.layers.{}.mlp.intermediate_dense",
        "layers.down": "encoder.layers.{}.mlp.out_dense",
        "layers.mlp_norm": "encoder.layers.{}.mlp.norm",
    },
    ("tite.",),
    ("heads.", "lm_decoder.", "pooler.", "cls."),
    schedule=_tite_schedule,
)
