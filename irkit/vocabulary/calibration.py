"""Calibration of a sparse model before it is fine-tuned: how many terms have a weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from irkit.config import Config
from irkit.errors import BadValueError
from irkit.heads import SparseHead
from irkit.model import Model
from irkit.tokenizer import strings

__all__ = ["Activations", "Calibration", "CalibrationConfig", "calibrate", "probe"]

_EXCLUDED = -5000.0  # terms with a bias below it are those that never get a weight
_BINS = 50
_TEXTS = 16  # encoded at once


class CalibrationConfig(Config):
    """How a model is calibrated.

    Attributes:
        shift: What is taken from the bias of every term; None finds what gives ``rate``.
        rate: Share of the terms that shall have a weight in the vector of a text, on average. In the paper
            results are level from 0.3 to 0.5, and a shift of 5 gave 0.4.
        texts: Probed, the first of those that are given; 4 bytes are held for each of them and each term.
        max_length: Tokens at which they are cut.
        lowest: Rate below which a model is dead: there is little left that training could change.
        highest: Rate above which it is dense.

    Source: "Bridging Vocabulary Gaps", sections 4.2.3, 5.3 and table 5.
    """

    shift: float | None = None
    rate: float = Field(default=0.4, gt=0, lt=1)
    texts: PositiveInt = 256
    max_length: PositiveInt = 128
    lowest: float = Field(default=0.01, ge=0, lt=1)
    highest: float = Field(default=0.9, gt=0, le=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.lowest <= self.rate <= self.highest:
            raise ValueError(
                f"expected rate {self.rate} between lowest {self.lowest} and highest {self.highest}"
            )
        return self


@dataclass(frozen=True)
class Activations:
    """Weights that a model gives the texts it was probed with.

    Attributes:
        rate: Share of the terms that have a weight in the vector of a text, on average.
        dead: Share of the terms that have one in no text.
        mean: Of the weights that are not 0.
        largest: Weight.
        edges: Of the bins of a histogram of the weights that are not 0, from 0 to the largest.
        counts: Weights in each bin.
    """

    rate: float
    dead: float
    mean: float
    largest: float
    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Calibration:
    """What was done to a model.

    Attributes:
        shift: What was taken from the bias of every term.
        before: What the probed texts got before.
        after: What they get now.
    """

    shift: float
    before: Activations
    after: Activations

    def facts(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"shift": self.shift, "before": vars(self.before), "after": vars(self.after)}


def calibrate(
    model: Model, texts: Iterable[str], config: CalibrationConfig | Mapping[str, Any] | None = None
) -> Calibration:
    """Shift the bias of a sparse model in place, so that a moderate share of its terms has weights.

    A term has a weight in the vector of a text if its highest logit there is above the shift, so the shift
    that gives a rate is a quantile of these, halfway between two of them. Terms that never get weights, such
    as special tokens, are left out of everything. It is the side of documents that is calibrated.

    Args:
        model: Before it is fine-tuned.
        texts: Of the training data.
        config: See there.

    Returns:
        What was done.

    Raises:
        BadValueError: The model would be dead or dense after it, has logits that are no numbers, or is not
            sparse; there are no texts. The model stays as it was.

    Examples:
        >>> calibrate(model, texts, {"rate": 0.3}).after.rate  # doctest: +SKIP
        0.3000128

    Source: "Bridging Vocabulary Gaps", section 4.2.3, activation potential calibration.
    """
    config = _parsed(config)
    head = _head(model)
    highest = _highest_logits(model, texts, config)
    values = highest.flatten().numpy()
    inactive = min(max(1, len(values) - round(config.rate * len(values))), len(values) - 1)
    found = float(np.partition(values, (inactive - 1, inactive))[inactive - 1 : inactive + 1].mean())
    shift = found if config.shift is None else config.shift
    before, after = _activations(highest, head), _activations(highest - shift, head)
    if not config.lowest <= after.rate <= config.highest:
        state = "dead" if after.rate < config.lowest else "dense"
        cure = f"the shift that gives {config.rate:.0%} is {found:.4g}; leave `shift` out to use it"
        if config.shift is None:
            cure = (
                f"their highest logits lie between {values.min():.4g} and {values.max():.4g}, and many are "
                "equal; was the head of the model trained?"
            )
        raise BadValueError(
            f"calibrate: with a shift of {shift:.4g}, {after.rate:.2%} of the terms have a weight in a text, "
            f"expected {config.lowest:.0%} to {config.highest:.0%}: the model would be {state}; {cure}"
        )
    with torch.no_grad():
        if head.bias is None:
            head.bias = nn.Parameter(torch.zeros(head.dim, device=head.weight.device))
        bias: Tensor = head.bias
        bias -= torch.where(_included(head), shift, 0.0)
    return Calibration(shift, before, after)


def probe(
    model: Model, texts: Iterable[str], config: CalibrationConfig | Mapping[str, Any] | None = None
) -> Activations:
    """Weights that a sparse model gives texts, as it is.

    Args:
        model: Stays as it is.
        texts: Any.
        config: ``texts`` and ``max_length`` count.

    Raises:
        BadValueError: The model is not sparse, or has logits that are no numbers; there are no texts.
    """
    return _activations(_highest_logits(model, texts, _parsed(config)), _head(model))


def _parsed(config: CalibrationConfig | Mapping[str, Any] | None) -> CalibrationConfig:
    return (
        config
        if isinstance(config, CalibrationConfig)
        else CalibrationConfig.parse(config or {}, "calibration")
    )


def _head(model: Model) -> SparseHead:
    if not isinstance(model.head, SparseHead):
        raise BadValueError(f"calibrate: the model makes {model.kind} vectors, expected a sparse one")
    return model.head


def _included(head: SparseHead) -> Tensor:
    """``(dim,)`` bool: terms that can have weights."""
    if head.bias is None:
        return torch.ones(head.dim, dtype=torch.bool, device=head.weight.device)
    return head.bias.detach() > _EXCLUDED


@torch.no_grad()
def _highest_logits(model: Model, texts: Iterable[str], config: CalibrationConfig) -> Tensor:
    """``(texts, included terms)`` float32 on the CPU, over the tokens of each text."""
    head, included = _head(model), _included(_head(model))
    chosen = list(islice(strings(texts), config.texts))
    if not chosen:
        raise BadValueError("calibrate: got no texts to probe the model with; expected some, such as 256")
    limit = min(filter(None, (config.max_length, model.tokenizer.max_length)))
    training, rows = model.training, list[Tensor]()
    model.eval()
    for start in range(0, len(chosen), _TEXTS):
        tokens = model.tokenizer(chosen[start : start + _TEXTS], max_length=limit).to(model.device)
        hidden = model.encoder(tokens)
        for states in hidden:
            values = states.to(torch.promote_types(states.dtype, torch.float32))
            for layer in head.layers:
                values = layer(values)
            logits = F.linear(values.to(head.weight.dtype), head.weight, None).float()
            logits = logits if head.bias is None else logits + head.bias.float()
            rows.append(logits.amax(0)[included].cpu())
    model.train(training)
    highest = torch.stack(rows)
    bad = int((~highest.isfinite()).any(1).sum())
    if bad:
        raise BadValueError(
            f"calibrate: the model has logits that are no numbers, in {bad} of {len(chosen)} texts; its "
            "weights are spoiled, go back to an earlier checkpoint"
        )
    return highest


def _activations(highest: Tensor, head: SparseHead) -> Activations:
    """What the head makes of the highest logits; for pooling by sum, of these alone."""
    positive = highest > 0
    weights = highest[positive].double()
    if head.config.activation != "relu":
        weights = weights.log1p()
    if head.config.activation == "log1p_log1p_relu":
        weights = weights.log1p()
    found = weights.numpy()
    largest = float(found.max(initial=0.0))
    counts, edges = np.histogram(found, bins=_BINS, range=(0.0, largest or 1.0))
    mean = float(found.mean()) if len(found) else 0.0
    return Activations(
        rate=float(positive.double().mean()),
        dead=float((~positive.any(0)).double().mean()),
        mean=mean if math.isfinite(mean) else 0.0,
        largest=largest,
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
    )
