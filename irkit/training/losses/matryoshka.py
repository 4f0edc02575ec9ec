"""Matryoshka training: vectors stay useful when they are cut."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator

from irkit.config import Config


class Matryoshka(Config):
    """Sum of all losses over vectors that are cut to each of several widths.

    Attributes:
        dims: Widths, including the full width if it is to be trained.
        weights: Factor of the losses at each width; 1 by default.

    Source: Kusupati et al., Matryoshka Representation Learning, arXiv 2205.13147.
    """

    dims: tuple[int, ...] = Field(min_length=1)
    weights: tuple[float, ...] = Field((), validate_default=True)

    @field_validator("dims")
    @classmethod
    def _check_dims(cls, dims: tuple[int, ...]) -> tuple[int, ...]:
        if min(dims) < 1 or len(set(dims)) < len(dims):
            raise ValueError("dims must be different widths from 1 upwards")
        return dims

    @field_validator("weights")
    @classmethod
    def _check_weights(cls, weights: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        dims = info.data.get("dims", ())
        weights = weights or (1.0,) * len(dims)
        if len(weights) != len(dims) or min(weights, default=1) <= 0:
            raise ValueError(f"weights must be positive, one for each of the {len(dims)} dims")
        return weights
