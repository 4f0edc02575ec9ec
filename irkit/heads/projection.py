"""From hidden states to the vectors that are compared: stacks of linear and gated layers, and merging them.

Source: Clavié et al. 2026, "Simple Projection Variants Improve ColBERT Performance", sections 4 and 5.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from itertools import groupby, pairwise, product
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from irkit.arguments import brief, suggest
from irkit.config import Config
from irkit.errors import BadValueError, ConfigError

Residual = Literal["none", "identity", "learned"]
_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
}


class Normalize(nn.Module):
    """Scale vectors to length 1; a zero vector stays zero."""

    def forward(self, vectors: Tensor) -> Tensor:
        """Return ``vectors (n, dim)`` at length 1."""
        return F.normalize(vectors, dim=-1)


class Projection(nn.Module):
    """Computes one layer ``f(x)`` of a projection, and optionally adds the input to the result.

    ``f(x)`` is ``activation(x W + b)`` or, gated, ``(x W + b) * activation(x V + c)``. With a residual the
    result is ``x R + f(x)`` (learned) or ``x R + alpha f(x)`` (identity). ``R`` is a matrix if input and
    output differ in width; otherwise ``x`` is added as it is.

    Source: the Dense module of sentence-transformers and PyLate, which has the same names of parameters; for
    gates and alpha, equations 13 and 17 of the paper.
    """

    alpha: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        activation: nn.Module | None = None,
        gated: bool = False,
        residual: Residual = "none",
    ) -> None:
        """Build a layer of random weights.

        Args:
            in_features: Width of the input.
            out_features: Width of the output.
            bias: Whether the linear layers have a bias (the residual's never has one).
            activation: Applied to the linear layer or, if ``gated``, to the gate; None applies nothing.
            gated: Whether a second linear layer, the gate, multiplies the first.
            residual: ``"learned"``, as in sentence-transformers and PyLate, where R starts at random; or
                ``"identity"``, as in the paper, where R starts as an identity matrix and alpha, 1 at
                first, is learned too.
        """
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias)
        self.activation = nn.Identity() if activation is None else activation
        if gated:
            self.gate = nn.Linear(in_features, out_features, bias)
        if residual != "none" and in_features != out_features:
            self.residual = nn.Linear(in_features, out_features, bias=False)
            if residual == "identity":
                nn.init.eye_(self.residual.weight)
        self.gated, self.use_residual = gated, residual != "none"
        self.register_parameter("alpha", nn.Parameter(torch.ones(())) if residual == "identity" else None)

    def forward(self, vectors: Tensor) -> Tensor:
        """Project ``vectors (n, in_features)`` to ``(n, out_features)``."""
        projected: Tensor = self.linear(vectors)
        if self.gated:
            projected = projected * self.activation(self.gate(vectors))
        else:
            projected = self.activation(projected)
        if not self.use_residual:
            return projected
        skip = self.residual(vectors) if hasattr(self, "residual") else vectors
        result: Tensor = skip + (projected if self.alpha is None else self.alpha * projected)
        return result


class ProjectionConfig(Config):
    """Settings of a projection; by default the single linear layer of ColBERT.

    Layers before the last alternate between widening from the hidden size ``d`` to ``scale * d`` and
    going back to ``d`` (section 4.1). Only these layers have the activation, gate and residual (section 5.1);
    the last layer is linear. One exception: the only layer of a GLU of depth 1 is gated (equation 17).

    Attributes:
        depth: Number of layers.
        scale: Width of a widened layer as a multiple of the hidden size; rho in the paper.
        activation: identity, relu, gelu or silu; with ``glu`` also sigmoid.
        glu: Whether layers are gated; ``activation`` then applies to the gate.
        residual: none; identity (equation 13 and section 4.2.1: the input, widened by a matrix that
            starts as the identity, plus alpha times the layer); or learned (sentence-transformers,
            PyLate: a matrix that starts at random, no alpha).
        dim: Width of the projected vectors.
        bias: Whether linear layers have a bias.

    Examples:
        >>> ProjectionConfig(depth=2, residual="identity").scale
        2.0
    """

    depth: int = Field(default=1, ge=1, le=4)
    scale: float = Field(default=2.0, gt=0)
    activation: Literal["identity", "relu", "gelu", "silu", "sigmoid"] = "identity"
    glu: bool = False
    residual: Residual = "none"
    dim: int = Field(default=128, ge=1)
    bias: bool = False

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if self.activation == "sigmoid" and not self.glu:
            raise ValueError("sigmoid is a gate: set glu, or take identity, relu, gelu or silu")
        if self.depth == 1 and self.activation != "identity" and not self.glu:
            raise ValueError("an activation follows layers before the last: set depth to 2 or more")
        if self.depth == 1 and self.residual != "none":
            raise ValueError("a residual skips layers before the last: set depth to 2 or more")
        return self


def _presets() -> dict[str, ProjectionConfig]:
    tables = [  # gates and activations, depths, scales, residual
        ([(False, "identity"), (True, "sigmoid")], (2, 3, 4), (2,), "identity"),  # table 1
        ([(False, name) for name in list(_ACTIVATIONS)[:4]], (2,), (2,), "identity"),  # table 2
        ([(True, name) for name in _ACTIVATIONS], (2,), (2,), "identity"),
        ([(False, "identity"), (True, "gelu")], (2, 3, 4), (1, 2), "identity"),  # table 3
        ([(False, "identity"), (True, "gelu")], (2, 3), (1, 2), "none"),  # table 4, the rest is in table 3
    ]
    configs = [
        ProjectionConfig(glu=glu, activation=name, depth=depth, scale=scale, residual=residual)
        for layers, depths, scales, residual in tables
        for (glu, name), depth, scale in product(layers, depths, scales)
    ]
    return {"linear": ProjectionConfig()} | {_preset_name(config): config for config in configs}


def _preset_name(config: ProjectionConfig) -> str:
    family = "glu" if config.glu else "ffn"
    end = "-residual" if config.residual == "identity" else ""
    return f"{family}-{config.activation}-depth{config.depth}-scale{config.scale:g}{end}"


PRESETS: Mapping[str, ProjectionConfig] = _presets()
"""Every row of tables 1 to 4, such as ``"ffn-identity-depth2-scale2-residual"``, the best of them."""


def projection_config(choice: str | Mapping[str, Any] | ProjectionConfig) -> ProjectionConfig:
    """Return the configuration that ``choice`` stands for.

    Args:
        choice: A configuration; its keys and values; or a name in `PRESETS`.

    Raises:
        ConfigError: The preset or a key is unknown, or a value is invalid.

    Examples:
        >>> projection_config("glu-gelu-depth2-scale1").activation
        'gelu'
    """
    if isinstance(choice, ProjectionConfig):
        return choice
    if isinstance(choice, Mapping):
        return ProjectionConfig.parse(choice, "projection")
    if isinstance(choice, str) and choice in PRESETS:
        return PRESETS[choice]
    hint = suggest(brief(choice).strip("'"), PRESETS, cutoff=0.3)
    raise ConfigError(f"projection: no preset is named {brief(choice, 100)}; {hint}")


def projection_layers(config: ProjectionConfig, hidden_size: int) -> list[Projection]:
    """Return the layers that ``config`` describes, with random weights.

    Args:
        config: Configuration of the projection.
        hidden_size: Width of the hidden states.

    Examples:
        >>> layers = projection_layers(ProjectionConfig(depth=4, dim=128), 384)
        >>> [layer.linear.out_features for layer in layers]
        [768, 384, 768, 128]
    """
    wide = max(1, round(config.scale * hidden_size))
    inner = [wide if number % 2 == 0 else hidden_size for number in range(config.depth - 1)]
    layers = []
    for number, (before, after) in enumerate(pairwise([hidden_size, *inner, config.dim]), start=1):
        shaped = number < config.depth or config.depth == 1
        layers.append(
            Projection(
                before,
                after,
                bias=config.bias,
                activation=_ACTIVATIONS[config.activation]() if shaped else None,
                gated=config.glu and shaped,
                residual=config.residual if shaped else "none",
            )
        )
    return layers


def merge_runs(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Merge each run of consecutive projections into one, see `merge_projections`; keep other layers."""
    folded: list[nn.Module] = []
    for projections, run in groupby(layers, lambda layer: isinstance(layer, Projection)):
        part = list(run)
        folded += [merge_projections(part)] if projections else part
    return folded


def merge_projections(layers: Iterable[nn.Module]) -> Projection:
    """Merge linear layers, with and without residuals, into one linear layer with the same output.

    The layers are applied in float64, so that outputs agree to the rounding of float32.

    Args:
        layers: `Projection` layers in turn, at least one.

    Returns:
        A layer without residual; with a bias only if one of ``layers`` has a bias.

    Raises:
        BadValueError: A layer is not linear, or no `Projection`.

    Examples:
        >>> layers = projection_layers(ProjectionConfig(depth=3, residual="identity"), 384)
        >>> merge_projections(layers).linear
        Linear(in_features=384, out_features=128, bias=False)

    Source: sections 4.1 and 4.2: such layers together are ``x M + b``, so that zeros give ``b``, and unit
    vectors the rows of ``M + b``.
    """
    parts = [_linear(layer, number) for number, layer in enumerate(layers)]
    if not parts:
        raise BadValueError("merge_projections: got no layers, expected at least one")
    first, last = parts[0].linear, parts[-1].linear
    bias = any(layer.linear.bias is not None for layer in parts)
    folded = Projection(first.in_features, last.out_features, bias=bias).to(first.weight)
    exact = copy.deepcopy(nn.Sequential(*parts)).double()
    with torch.no_grad():
        units = torch.eye(first.in_features, dtype=torch.float64, device=first.weight.device)
        offset = exact(torch.zeros_like(units[:1]))
        folded.linear.weight.copy_((exact(units) - offset).T)
        if bias:
            folded.linear.bias.copy_(offset[0])
    return folded


def _linear(layer: nn.Module, number: int) -> Projection:
    if not isinstance(layer, Projection):
        raise BadValueError(
            f"merge_projections: layer {number} is {type(layer).__name__}, expected a Projection"
        )
    if not layer.gated and isinstance(layer.activation, nn.Identity):
        return layer
    reason = "is gated" if layer.gated else f"has the activation {type(layer.activation).__name__}"
    raise BadValueError(
        f"merge_projections: layer {number} {reason}, so it is no matrix; keep the head as it is"
    )
