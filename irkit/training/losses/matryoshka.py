"""Vectors that keep most of their use when they are cut."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from irkit.config import Config

__all__ = ["Matryoshka"]


class Matryoshka(Config):
    """All losses, summed over vectors that are cut to each of several widths.

    Attributes:
        dims: Widths; name the full one, too, if it is to be trained.
        weights: Factor of the losses at each width; by default 1.

    Source: Kusupati et al., Matryoshka Representation Learning, arXiv 2205.13147.
    """

    dims: tuple[int, ...] = Field(min_length=1)
    weights: tuple[float, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if min(self.dims) < 1 or len(set(self.dims)) < len(self.dims):
            raise ValueError("dims must be different widths from 1 upwards")
        if self.weights and (len(self.weights) != len(self.dims) or min(self.weights) <= 0):
            raise ValueError("weights must be positive, one for each of dims")
        return self

    def parts(self) -> list[tuple[int, float]]:
        """Each width with its weight."""
        return list(zip(self.dims, self.weights or [1.0] * len(self.dims), strict=True))
