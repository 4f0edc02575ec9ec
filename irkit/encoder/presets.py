"""Make the ``config.json`` of a TITE by the name of a published model, in any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field

from irkit.config import Config
from irkit.encoder.encoder_config import Pooling
from irkit.encoder.families import schedule_settings
from irkit.errors import BadValueError, ConfigError

Location = Literal["pre", "intra", "post"]


class Preset(NamedTuple):
    """The settings in which the TITE models of Table 3 of the paper differ.

    Attributes:
        arrangement: Which layers pool, see `pooling_schedule`; None means that no layer pools.
        kernel: Number of tokens in a window. Windows do not overlap: the stride is the same number.
        location: Where in a layer the tokens are pooled, see `Pooling`.
        upscale: Whether hidden states grow to twice their width.
    """

    arrangement: Literal["late", "staggered"] | None
    kernel: int = 2
    location: Location = "intra"
    upscale: bool = False


PRESETS: dict[str, Preset] = {  # in the order of Table 3, which numbers the first seven from 1
    "2-late": Preset("late"),
    "2-staggered": Preset("staggered"),
    "3-late": Preset("late", 3),
    "3-staggered": Preset("staggered", 3),
    "2-late-pre": Preset("late", location="pre"),
    "2-late-post": Preset("late", location="post"),
    "2-late-upscale": Preset("late", upscale=True),
    "bert-base": Preset(None),
}
_NUMBERS = {str(number): name for number, name in enumerate(list(PRESETS)[:7], 1)}
_VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {"absolute_positional_embedding_type": None, "hidden_act": "gelu"},
    "released": {"absolute_positional_embedding_type": "learned", "hidden_act": "gelu_pytorch_tanh"},
}


class EncoderSizes(Config):
    """Sizes of an encoder; the defaults are BERT-base.

    Attributes:
        layers: Number of transformer layers.
        hidden_size: Width of the hidden states; if the width grows, the width of the first layer.
        heads: Number of attention heads; None is one for each 64 of the width.
        intermediate_size: Inner width of the feed-forward blocks; None is four times the width.
        max_length: Number of tokens of the longest text that is pooled to one vector.
    """

    layers: int = Field(default=12, ge=1)
    hidden_size: int = Field(default=768, ge=2)
    heads: int | None = Field(default=None, ge=1)
    intermediate_size: int | None = Field(default=None, ge=1)
    max_length: int = Field(default=512, ge=1)


def pooling_schedule(
    arrangement: Literal["late", "staggered"] | Sequence[int],
    layers: int,
    kernel: int,
    stride: int,
    max_length: int = 512,
    location: Location = "intra",
) -> tuple[Pooling | None, ...]:
    """Choose the layers that pool.

    Args:
        arrangement: ``late`` pools in the last layers. ``staggered`` spreads the layers that do not pool
            evenly, from the first layer on. In both, as many layers pool as turn ``max_length`` hidden states
            into one. A list holds the numbers of the pooling layers, from 0.
        layers: Number of layers of the encoder.
        kernel: Number of tokens in a window.
        stride: Number of tokens from the start of one window to the start of the next.
        max_length: Number of hidden states that become one; 4 with kernel and stride 2 leaves a quarter.
        location: Where in a layer the tokens are pooled, see `Pooling`.

    Returns:
        Pooling of each layer; None for a layer that does not pool.

    Raises:
        ConfigError: The layers are too few, a layer does not exist, or the windows skip tokens.

    Examples:
        >>> schedule = pooling_schedule("staggered", layers=4, kernel=2, stride=2, max_length=8)
        >>> [pooling.stride if pooling else None for pooling in schedule]
        [None, 2, 2, 2]

    Source: Schlatt et al. 2025 (TITE), section 3.1.
    """
    pooling = Pooling(kernel=kernel, stride=stride, location=location)
    # layers named by number
    if not isinstance(arrangement, str):
        chosen = {*arrangement}
        if not chosen or len(chosen) < len(arrangement) or not chosen <= {*range(layers)}:
            raise ConfigError(
                f"pooling: layers {[*arrangement]}, expected one or more numbers from 0 to {layers - 1}, "
                "each once"
            )
        return tuple(pooling if number in chosen else None for number in range(layers))
    if arrangement not in ("late", "staggered"):
        raise ConfigError(
            f"pooling: arrangement {arrangement!r} is unknown; expected late, staggered or the numbers of "
            "layers"
        )
    # count the pooling layers that make one row of the longest text
    needed, length = 0, max_length
    while length > 1 and needed <= layers:
        length = pooling.shorten(length)
        needed += 1
    if length > 1 or needed > layers:
        raise ConfigError(
            f"pooling: {layers} layers of kernel {kernel} and stride {stride} do not make one row of "
            f"{max_length}; take more layers, a larger stride, or a smaller max_length or factor"
        )
    # place the layers that do not pool: the first ones, or spread over all layers
    unpooled = layers - needed
    without = set(range(unpooled))
    if arrangement == "staggered":
        without = {number * layers // unpooled for number in range(unpooled)}
    return tuple(None if number in without else pooling for number in range(layers))


def tite_settings(
    preset: str | int,
    *,
    variant: Literal["paper", "released"] = "paper",
    vocab_size: int = 30_522,
    **sizes: int | None,
) -> dict[str, Any]:
    """Return the ``config.json`` of a TITE, from which `Encoder` builds a TITE of random weights.

    Args:
        preset: A name in `PRESETS` or its number in Table 3: ``2-late`` (1), ``2-staggered`` (2), ``3-late``
            (3), ``3-staggered`` (4), ``2-late-pre`` (5), ``2-late-post`` (6), ``2-late-upscale`` (7); and
            ``bert-base``, which does not pool.
        variant: ``paper`` has rotary positions; ``released``, the published checkpoints, also learned
            ones, and the tanh form of GELU.
        vocab_size: Number of tokens in the vocabulary.
        sizes: Sizes that differ from BERT-base, see `EncoderSizes`. The pooling layers follow from the sizes.

    Returns:
        The keys of a ``config.json``, as the authors' code reads them.

    Raises:
        BadValueError: The preset or the variant is unknown.
        ConfigError: The sizes do not fit each other or the preset.

    Examples:
        >>> tite_settings("2-late", layers=4, hidden_size=128, max_length=8)["strides"]
        [None, 2, 2, 2]

    Source: Schlatt et al. 2025 (TITE), Table 3.
    """
    # look up the preset, and complete the sizes
    name = _NUMBERS.get(str(preset), str(preset))
    if name not in PRESETS or variant not in _VARIANTS:
        raise BadValueError(
            f"tite_settings: got {preset!r} and {variant!r}, expected one of {', '.join(PRESETS)} or its "
            f"number from 1 to {len(_NUMBERS)}, and one of {', '.join(_VARIANTS)}"
        )
    chosen, size = PRESETS[name], EncoderSizes.parse(sizes, "tite_settings")
    heads = size.heads or max(size.hidden_size // 64, 1)
    inner = size.intermediate_size or 4 * size.hidden_size
    if size.hidden_size % heads:
        raise ConfigError(
            f"tite_settings: hidden_size {size.hidden_size} is no multiple of {heads} heads; name heads"
        )
    # choose the layers that pool
    schedule: tuple[Pooling | None, ...] = (None,) * size.layers
    if chosen.arrangement:
        shape = (size.layers, chosen.kernel, chosen.kernel, size.max_length)
        schedule = pooling_schedule(chosen.arrangement, *shape, chosen.location)
    # growth of each layer in thirds of the first width: the last quarter of layers is twice as wide
    growth = [number * 4 // size.layers if chosen.upscale else 0 for number in range(size.layers)]
    if chosen.upscale and (heads % 3 or inner % 3):
        raise ConfigError(
            f"tite_settings: {name} grows by thirds; heads {heads} and intermediate_size {inner} must be "
            "multiples of 3"
        )
    return {
        "model_type": "tite",
        "architectures": ["TiteModel"],
        "vocab_size": vocab_size,
        "num_hidden_layers": size.layers,
        "hidden_sizes": [size.hidden_size // heads * (heads + heads * thirds // 3) for thirds in growth],
        "num_attention_heads": [heads + heads * thirds // 3 for thirds in growth],
        "intermediate_sizes": [inner + inner * thirds // 3 for thirds in growth],
        **schedule_settings("tite", schedule),
        "max_position_embeddings": size.max_length,
        "relative_positional_embedding_type": "rotary",
        "norm_location": "post",
        "norm_type": "layer",
        "layer_norm_eps": 1e-12,
        "dropout_prob": 0.1,
        "initializer_range": 0.02,
        "pad_token_id": 0,
        **_VARIANTS[variant],
    }
