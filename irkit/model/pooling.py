"""Pooling for encoders that were trained without: choose the layers, and check that a model can pool."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from irkit.arguments import brief
from irkit.config import Config
from irkit.encoder import Encoder, Pooling
from irkit.encoder.families import FAMILIES
from irkit.encoder.inference_free import InferenceFreeEncoder
from irkit.encoder.presets import pooling_schedule
from irkit.errors import BadValueError, ConfigError
from irkit.formats import AnyEncoder
from irkit.heads import Head

Schedule = tuple[Pooling | None, ...]

_LONGEST = 512  # tokens of a text, where nothing cuts them


class PoolingChoice(Config):
    """Which layers of an encoder pool, and how.

    Attributes:
        factor: Number of tokens per hidden state that is left, a power of ``stride``: 4 leaves a quarter.
            None leaves one hidden state of the longest text. Must be None if ``layers`` are numbers.
        layers: ``"late"`` takes the last layers, ``"staggered"`` layers at equal distances, the last among
            them; or numbers of layers from 0, see `irkit.encoder.presets.pooling_schedule`. The earlier the
            layers, the faster the encoder.
        kernel: Number of hidden states in a window.
        stride: Number of hidden states from the start of one window to the start of the next.
        location: See `irkit.encoder.Pooling`.

    Examples:
        >>> [pooling and pooling.stride for pooling in PoolingChoice(factor=4).schedule(6, 512)]
        [None, None, 2, None, None, 2]

    Source: Schlatt et al. 2025 (TITE), section 3.1.
    """

    factor: int | None = Field(None, ge=2)
    layers: Literal["late", "staggered"] | list[int] = "staggered"
    kernel: int = Field(2, ge=2)
    stride: int = Field(2, ge=2)
    location: Literal["pre", "intra", "post"] = "intra"

    def schedule(self, count: int, max_length: int) -> Schedule:
        """Return the pooling of each layer.

        Args:
            count: Number of layers of the encoder.
            max_length: Number of tokens of the longest text.

        Raises:
            ConfigError: There are too few layers, a layer does not exist, or ``factor`` is not a power of
                ``stride``.
        """
        if self.factor is not None:
            if not isinstance(self.layers, str):
                raise ConfigError(
                    f"pooling: got factor {self.factor} and layers {self.layers}; leave one of them out"
                )
            needed = round(math.log(self.factor, self.stride))
            if self.stride**needed != self.factor:
                raise ConfigError(f"pooling: factor {self.factor} is no power of stride {self.stride}")
            max_length = 1
            for _ in range(needed):  # rows that so many layers make one of
                max_length = (max_length - 1) * self.stride + self.kernel
        return pooling_schedule(self.layers, count, self.kernel, self.stride, max_length, self.location)


def pooling_choice(choice: Any) -> PoolingChoice | Schedule | None:
    """Convert a choice of pooling layers, as recipes and callers write it, to checked objects.

    Args:
        choice: A `PoolingChoice` or its keys and values. Or a list with one item per layer: a `Pooling`, its
            keys and values, or None. None instead of a list pools nowhere.

    Raises:
        ConfigError: A key or a value is unknown or impossible.
    """
    if choice is None or isinstance(choice, PoolingChoice):
        return choice
    if isinstance(choice, Mapping):
        return PoolingChoice.parse(choice, "pooling")
    if not isinstance(choice, Sequence) or isinstance(choice, str):
        raise ConfigError(
            f"pooling: got {brief(choice)}, expected keys and values, or a list with one a layer"
        )
    known = (type(None), Pooling)
    return tuple(
        pooling if isinstance(pooling, known) else Pooling.parse(pooling, "pooling") for pooling in choice
    )


def set_pooling(
    encoder: AnyEncoder | InferenceFreeEncoder, head: Head, layers: Any, max_length: int | None
) -> None:
    """Set which layers of an encoder pool, in place, see `irkit.Model.add_pooling_layers`.

    Args:
        encoder: Encoder of the model.
        head: Head of the same model.
        layers: As for `pooling_choice`.
        max_length: Number of tokens at which texts are cut; None if they are never cut.

    Raises:
        ConfigError: The schedule is unknown, or it does not fit the layers.
        BadValueError: The encoder or the head cannot pool.
    """
    choice = pooling_choice(layers)
    if not isinstance(encoder, Encoder):
        raise BadValueError(
            f"add_pooling_layers: irkit does not run the layers of a {encoder.family} itself, expected "
            f"one of {', '.join(sorted(FAMILIES))}"
        )
    count = len(encoder.layers)
    if isinstance(choice, PoolingChoice):
        choice = choice.schedule(count, max_length or _LONGEST)
    schedule = [None] * count if choice is None else choice
    if any(schedule):
        check_pooling(encoder, head)
    encoder.set_pooling_(schedule)


def check_pooling(encoder: AnyEncoder, head: Head) -> None:
    """Check that a head can work on an encoder that pools.

    Raises:
        BadValueError: The head needs a hidden state for each token.
    """
    problem = head.pooling_problem()
    if problem is not None:
        raise BadValueError(f"Model: pooling layers in a {encoder.family} encoder under this head: {problem}")
