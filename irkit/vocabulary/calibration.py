"""Activation potential calibration: how many terms of a sparse model have a weight before it is fine-tuned.

A masked language model gives nearly every term a positive logit, so nearly every term of a text would have a
weight. The head computes the weight of a term from the highest logit of the term over the tokens of the text.
A term whose highest logit is below 0 gets no weight. Calibration subtracts one shift from the bias of all
terms. The shift that leaves a share ``rate`` of the terms is the ``1 - rate`` quantile of these highest
logits over a sample of texts.

Source: "Bridging Vocabulary Gaps", section 4.2.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from irkit.config import Config
from irkit.core.ragged import Ragged
from irkit.errors import BadValueError
from irkit.heads import as_sparse_head
from irkit.model import Model
from irkit.tokenizer import strings
from irkit.vocabulary.sparse_alignment import highest_logits

_BINS = 50
_TEXTS = 16  # texts encoded at once


class CalibrationConfig(Config):
    """Calibration of a sparse model.

    Attributes:
        shift: Number that is subtracted from the bias of every term; None computes it from ``rate``.
        rate: Share of the terms that have a weight in a text afterwards, on average. In the paper, results
            are level from 0.3 to 0.5, and a shift of 5 gave 0.4.
        texts: Number of texts in the sample, the first ones; 4 bytes per text and term are held in memory.
        max_length: Texts are cut to this number of tokens.
        lowest: Share of terms with a weight below which a model counts as dead: nothing is left that training
            could change.
        highest: Share of terms with a weight above which a model counts as dense.

    Source: "Bridging Vocabulary Gaps", sections 4.2.3, 5.3 and table 5.
    """

    shift: float | None = Field(default=None, ge=-1e30, le=1e30)  # weights stay finite
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
    """Weights that a model gives to a sample of texts.

    Attributes:
        rate: Share of the terms that have a weight in a text, on average.
        dead: Share of the terms that have no weight in any text.
        mean: Mean of the weights that are not 0.
        largest: Largest weight.
        edges: Edges of a histogram of the weights that are not 0, from 0 to the largest.
        counts: Number of weights in each bin.
    """

    rate: float
    dead: float
    mean: float
    largest: float
    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Calibration:
    """Result of a calibration.

    Attributes:
        shift: Number that was subtracted from the bias of every term.
        before: Weights that the model gave to the sample before the calibration.
        after: Weights that the model gives to the sample after the calibration.
    """

    shift: float
    before: Activations
    after: Activations

    def facts(self) -> dict[str, Any]:
        """Return shift and weights as dictionaries, lists and numbers that JSON can hold."""
        return {"shift": self.shift, "before": vars(self.before), "after": vars(self.after)}


def calibrate(
    model: Model, texts: Iterable[str], config: CalibrationConfig | Mapping[str, Any] | None = None
) -> Calibration:
    """Shift the bias of a sparse model in place, so that a moderate share of its terms has weights.

    Terms that can never have a weight, such as special tokens, do not count. Texts without any token do not
    count, either. The document side is calibrated: texts get the prompt of documents.

    Args:
        model: Model before fine-tuning.
        texts: Texts of the training data.
        config: Rate and sample.

    Returns:
        The shift, and the weights before and after.

    Raises:
        BadValueError: The model would be dead or dense, has logits that are not finite, or is not sparse; or
            no text has a token. The model is unchanged then.

    Examples:
        >>> calibrate(model, texts, {"rate": 0.3}).after.rate  # doctest: +SKIP
        0.3000128
    """
    config = CalibrationConfig.of(config, "calibration")
    head = as_sparse_head(model.head, "calibrate")
    highest = _highest_logits(model, texts, config)
    # the shift lies halfway between the two highest logits around the quantile
    values = highest.flatten().numpy()
    inactive = min(max(1, len(values) - round(config.rate * len(values))), len(values) - 1)
    quantile = float(np.partition(values, (inactive - 1, inactive))[inactive - 1 : inactive + 1].mean())
    shift = quantile if config.shift is None else config.shift
    before, after = _activations(highest, head.config), _activations(highest - shift, head.config)
    if not config.lowest <= after.rate <= config.highest:
        state = "dead" if after.rate < config.lowest else "dense"
        cure = f"the shift that gives {config.rate:.0%} is {quantile:.4g}; leave `shift` out to use it"
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
        bias -= torch.where(head.included(), shift, 0.0)
    return Calibration(shift, before, after)


def probe(
    model: Model, texts: Iterable[str], config: CalibrationConfig | Mapping[str, Any] | None = None
) -> Activations:
    """Measure the weights that a sparse model gives to documents; those without any token do not count.

    Args:
        model: A sparse model.
        texts: Any texts.
        config: Only ``texts`` and ``max_length`` are used.

    Raises:
        BadValueError: The model is not sparse, or has NaN logits; or no text has a token.
    """
    head = as_sparse_head(model.head, "calibrate")
    config = CalibrationConfig.of(config, "calibration")
    return _activations(_highest_logits(model, texts, config), head.config)


@torch.no_grad()
def _highest_logits(model: Model, texts: Iterable[str], config: CalibrationConfig) -> Tensor:
    """Return the highest logits of each text that has tokens, ``(texts, terms)`` float32 on the CPU."""
    head = as_sparse_head(model.head, "calibrate")
    included = head.included()
    sample = list(islice(strings(texts), config.texts))
    limit = min(filter(None, (config.max_length, model.tokenizer.max_length)))
    training, rows, prompt = model.training, list[Tensor](), model.prompts["document"]
    model.eval()
    for start in range(0, len(sample), _TEXTS):
        tokens = model.tokenizer(sample[start : start + _TEXTS], prompt, limit)
        tokens = Ragged(tokens.values, tokens.lengths[tokens.lengths > 0]).to(model.device)
        rows += (logits[included].cpu() for logits in highest_logits(model, tokens))
    model.train(training)
    if not rows:
        raise BadValueError("calibrate: got no texts to probe the model with; expected some, such as 256")
    highest = torch.stack(rows)
    bad = int((~highest.isfinite()).any(1).sum())
    if bad:
        raise BadValueError(
            f"calibrate: the model has NaN or infinite logits, in {bad} of {len(rows)} texts; its "
            "weights are spoiled, go back to an earlier checkpoint"
        )
    return highest


def _activations(highest: Tensor, config: Any) -> Activations:
    """Summarise the highest logits after the activation of the head; see `Activations`.

    For a head that sums over tokens, the weight at the highest logit is an approximation.
    """
    positive = highest > 0
    weights = highest[positive].double()
    if config.activation != "relu":
        weights = weights.log1p()
    if config.activation == "log1p_log1p_relu":
        weights = weights.log1p()
    values = weights.numpy()
    largest = float(values.max(initial=0.0))
    counts, edges = np.histogram(values, bins=_BINS, range=(0.0, largest or 1.0))
    return Activations(
        rate=float(positive.double().mean()),
        dead=float((~positive.any(0)).double().mean()),
        mean=float(values.mean()) if len(values) else 0.0,
        largest=largest,
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
    )
