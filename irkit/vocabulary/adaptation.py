"""Adaptation to a new vocabulary: a short phase of masked language modelling with frozen layers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BeforeValidator, Field, PositiveInt, model_validator
from torch import Tensor

from irkit.config import Config, listed
from irkit.model import Model
from irkit.tokenizer import Tokenizer
from irkit.training.arguments import TrainingArguments, check_text_arguments
from irkit.training.masked_lm import MaskedLMStep
from irkit.training.masking import Masking, MaskingConfig
from irkit.training.running import check_place
from irkit.training.text_training import text_trainer, train_on_texts
from irkit.training.texts import first_texts, read_corpora

__all__ = ["AdaptationConfig", "adapt"]

_BATCH = 2048  # texts of a step, in all processes
_ALWAYS: dict[str, Any] = {
    "learning_rate": 3e-4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.2,
    "per_device_train_batch_size": 64,
}
_PRESETS: dict[str, dict[str, Any]] = {
    "500": {"max_steps": 500, "save_steps": 100, "logging_steps": 10},
    "20k": {"max_steps": 20_000, "save_steps": 1000, "logging_steps": 100},
}


class AdaptationConfig(Config):
    """Masked language modelling after a vocabulary was changed.

    Attributes:
        texts: Corpora, one or several, see `irkit.training.texts.read_texts`.
        validation: Corpus whose loss is measured during training; None measures nothing.
        validation_texts: So many of it, the first.
        preset: Schedule of the paper: ``"20k"`` steps, or ``"500"`` with the same share of warm-up. A step
            has 2,048 texts, put together of as many batches as that takes.
        max_length: Tokens at which texts are cut.
        masking: Which tokens are hidden.
        train: Arguments by the names of `irkit.training.TrainingArguments`, which go before the preset.
            ``gradient_accumulation_steps`` changes the texts of a step. ``learning_rates`` go before the
            freezing, which leaves word embeddings and head: ``{"encoder.layers": 1e-5}`` trains layers too.

    Source: "Bridging Vocabulary Gaps", sections 4.2.3 and 5.3.
    """

    texts: Annotated[list[str], BeforeValidator(listed), Field(min_length=1)]
    validation: str | None = None
    validation_texts: PositiveInt = 500
    preset: Annotated[Literal["500", "20k"], BeforeValidator(str)] = "500"  # YAML makes 500 a number
    max_length: PositiveInt = 128
    masking: MaskingConfig = MaskingConfig()
    train: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_train(self) -> Self:
        check_text_arguments(self.train, self.validation)
        return self

    def arguments(self, output_dir: str | Path, frozen: Mapping[str, float]) -> TrainingArguments:
        """Arguments of the trainer.

        Args:
            output_dir: Where checkpoints go.
            frozen: Learning rates by pattern that come after those that are given.

        Raises:
            ConfigError: A name is unknown, or a value is impossible.
        """
        values: dict[str, Any] = _ALWAYS | _PRESETS[self.preset] | self.train
        if self.validation is not None:
            values = {"eval_steps": 0.1, "eval_on_start": True} | values
        together = int(values["per_device_train_batch_size"]) * int(os.environ.get("WORLD_SIZE", "1"))
        values.setdefault("gradient_accumulation_steps", max(1, _BATCH // max(1, together)))
        values["learning_rates"] = {**values.get("learning_rates", {}), **frozen}
        return TrainingArguments.parse(values, output_dir, "adaptation: train")


def adapt(
    model: Model,
    config: AdaptationConfig | Mapping[str, Any],
    out: str | Path,
    *,
    is_new: Tensor | None = None,
    labels: Tokenizer | None = None,
) -> Model:
    """Train word embeddings and head of a sparse model to predict hidden tokens; the rest is frozen.

    What was interrupted goes on from its last checkpoint. ``out`` becomes a model directory, whose
    ``modules.json`` comes last, with ``recipe.yaml``, ``log.jsonl`` and ``checkpoints/`` beside it.

    Args:
        model: As `irkit.vocabulary.transfer_vocabulary` leaves it; it is trained in place.
        config: See there.
        out: Directory of the result.
        is_new: ``(vocabulary,)`` bool, tokens that are hidden more often; None hides all alike.
        labels: Of the head, where its terms are not tokens of the model, see
            `irkit.vocabulary.new_head`; then the head alone is trained.

    Returns:
        The model.

    Raises:
        ConfigError: A key or a value is unknown or impossible.
        BadValueError: The model is not sparse, ``is_new`` is not of its terms, or a text is malformed.
        StorageError: A corpus is missing, or something else is in ``out``.
        TrainingError: A loss or a gradient became NaN or infinite.

    Examples:
        >>> transfer = transfer_vocabulary(source, target)  # doctest: +SKIP
        >>> new = transfer.alignment.is_new  # doctest: +SKIP
        >>> adapt(transfer.model, {"texts": "wikipedia.jsonl"}, "adapted", is_new=new)  # doctest: +SKIP
    """
    config = config if isinstance(config, AdaptationConfig) else AdaptationConfig.parse(config, "adaptation")
    place, step = Path(out), MaskedLMStep(model)
    check_place(place, config, False)
    arguments = config.arguments(place / "checkpoints", _frozen(model, head_only=labels is not None))
    length = min(filter(None, (config.max_length, model.tokenizer.max_length)))
    model.tokenizer.check_length(length, "adaptation.max_length")
    masking = Masking(
        model.tokenizer,
        config.masking,
        is_new=is_new,
        labels=labels,
        max_length=length,
        seed=arguments.seed,
    )
    trained = {name: each.requires_grad for name, each in step.named_parameters()}
    check = Masking(model.tokenizer, config.masking, labels=labels, max_length=length)
    trainer = text_trainer(step, arguments, config.texts, masking, _validation(config, check))
    made = train_on_texts(trainer, config, place)
    for name, parameter in step.named_parameters():
        parameter.requires_grad_(trained[name])
    return made


def _frozen(model: Model, head_only: bool) -> dict[str, float]:
    """A learning rate of 0 for all but the head, and the word embeddings if its terms are tokens."""
    trained = set(map(id, model.head.parameters()))
    if not head_only:
        trained.add(id(model.encoder.word_embeddings))
    names = [name for name, parameter in model.named_parameters() if id(parameter) not in trained]
    return {f"^{re.escape(name)}$": 0.0 for name in names}


def _validation(config: AdaptationConfig, masking: Masking) -> Callable[[Any], dict[str, float]] | None:
    """Loss and accuracy on the texts of ``config.validation``, of which the same tokens are always hidden."""
    if config.validation is None:
        return None
    texts = list(enumerate(first_texts(read_corpora([config.validation]), config.validation_texts)))
    batches = [masking(texts[start : start + 32]) for start in range(0, len(texts), 32)]

    @torch.no_grad()
    def measure(step: MaskedLMStep) -> dict[str, float]:
        training, total = step.training, {"loss": 0.0, "accuracy": 0.0}
        step.eval()
        for batch in batches:
            count = len(batch.labels)
            total["loss"] += count * float(step(batch.to(step.model.device)))
            total["accuracy"] += count * float(step.parts["accuracy"])
        step.train(training)
        asked = sum(len(batch.labels) for batch in batches)
        return {name: value / max(1, asked) for name, value in total.items()}

    return measure
