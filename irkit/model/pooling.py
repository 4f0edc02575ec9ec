"""Pooling layers for encoders that were trained without: which layers pool, and which models can."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from irkit.config import Config
from irkit.encoder import Pooling
from irkit.errors import BadValueError, ConfigError
from irkit.formats import AnyEncoder
from irkit.heads import Head, PooledHead

__all__ = ["PoolingChoice", "Schedule", "check_pooling", "pooling_choice"]

Schedule = tuple[Pooling | None, ...]


class PoolingChoice(Config):
    """Which layers of an encoder pool, and how.

    Attributes:
        factor: How many times fewer rows than tokens are left, a power of ``stride``; None is as many as it
            takes to leave one row of the longest text. Not given where ``layers`` are numbers.
        layers: ``"late"`` takes the last layers, ``"staggered"`` layers at equal distances, the last among
            them; or numbers of layers from 0. The earlier, the faster.
        kernel: Rows of a window.
        stride: Rows from the start of a window to that of the next.
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
        """How each layer pools.

        Args:
            count: Layers of the encoder.
            max_length: Tokens of the longest text.

        Raises:
            ConfigError: There are too few layers, or ``factor`` is no power of ``stride``.
        """
        pooling = Pooling.parse(self.model_dump(include={"kernel", "stride", "location"}), "pooling")
        chosen = self.layers if isinstance(self.layers, list) else self._placed(pooling, count, max_length)
        if not chosen or len({*chosen}) < len(chosen) or not all(0 <= layer < count for layer in chosen):
            raise ConfigError(
                f"pooling: layers {chosen}, expected one or more numbers from 0 to {count - 1}, each once"
            )
        if isinstance(self.layers, list) and self.factor not in (None, self.stride ** len(chosen)):
            raise ConfigError(
                f"pooling: {len(chosen)} layers of stride {self.stride} pool by "
                f"{self.stride ** len(chosen)}, got factor {self.factor}; leave one of them out"
            )
        return tuple(pooling if layer in chosen else None for layer in range(count))

    def _placed(self, pooling: Pooling, count: int, max_length: int) -> list[int]:
        if self.factor is None:
            needed, length = 0, max_length
            while length > 1:
                needed, length = needed + 1, pooling.shorten(length)
        else:
            needed = round(math.log(self.factor, self.stride))
            if self.stride**needed != self.factor:
                raise ConfigError(f"pooling: factor {self.factor} is no power of stride {self.stride}")
        if needed > count:
            raise ConfigError(
                f"pooling: takes {needed} layers of stride {self.stride}, the encoder has {count}; give a "
                "smaller factor or a larger stride"
            )
        if self.layers == "late":
            return list(range(count - needed, count))
        return [-(-number * count // needed) - 1 for number in range(1, needed + 1)]


def pooling_choice(given: Any) -> PoolingChoice | list[Pooling | None] | None:
    """What a recipe or a caller may say of pooling.

    Args:
        given: Keys and values of a `PoolingChoice`; or a list with a `Pooling`, its keys and values, or None
            for each layer; None pools nowhere.

    Raises:
        ConfigError: A key or a value is unknown or impossible.
    """
    if given is None or isinstance(given, PoolingChoice):
        return given
    if isinstance(given, Mapping):
        return PoolingChoice.parse(given, "pooling")
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigError(f"pooling: got {given!r:.60}, expected keys and values, or a list with one a layer")
    known = (type(None), Pooling)
    return [each if isinstance(each, known) else Pooling.parse(each, "pooling") for each in given]


def check_pooling(encoder: AnyEncoder, head: Head) -> None:
    """Find out whether a head can work on an encoder that pools.

    Raises:
        BadValueError: The head needs a row for each token.
    """
    if head.kind == "sparse":
        problem = "weights of terms need a row for each token"
    elif isinstance(head, PooledHead) and not head.include_prompt:
        problem = "its head leaves the tokens of the prompt out, which pooled rows hold together with others"
    else:
        return
    raise BadValueError(f"Model: pooling layers in a {encoder.family} encoder under this head: {problem}")
