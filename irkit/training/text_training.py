"""Training on texts without labels: what pre-training and adaptation to a vocabulary share."""

from __future__ import annotations

from collections.abc import Sequence
from operator import methodcaller
from pathlib import Path
from typing import Annotated, Any, Protocol, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from irkit.config import Config, as_list
from irkit.errors import ConfigError
from irkit.training.masking import MaskingConfig
from irkit.training.model_step import TextStep
from irkit.training.pretraining.corpus import first_texts, open_texts, read_corpora
from irkit.training.train_run import TrainingLog
from irkit.training.trainer import Trainer
from irkit.training.training_arguments import TrainingArguments, first_evaluating

_VALIDATED = 32  # texts per batch


class Collate(Protocol):
    """Makes a batch of numbered texts, which are cut at ``max_length`` tokens."""

    max_length: int | None

    def __call__(self, texts: Sequence[tuple[int, str]]) -> Any:
        """Make a batch."""
        ...


class TextTrainingConfig(Config):
    """Training on texts without labels.

    Attributes:
        texts: One corpus or several, see `irkit.training.pretraining.corpus.read_texts`.
        validation: Corpus whose loss is measured during training; None measures nothing.
        validation_texts: Number of texts of ``validation`` that are used, the first ones.
        max_length: Texts are cut to this number of tokens.
        masking: Which tokens are hidden from the encoder; None hides none.
        train: Arguments by the names of `irkit.training.TrainingArguments`.
    """

    texts: Annotated[list[str], BeforeValidator(as_list), Field(min_length=1)]
    validation: str | None = None
    validation_texts: PositiveInt = 500
    max_length: PositiveInt = 512
    masking: MaskingConfig | None = None
    train: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_train(self) -> Self:
        values = TrainingArguments.check(self.train)
        if self.validation is None and (name := first_evaluating(values)):
            raise ConfigError(f"train.{name} needs texts to evaluate on; give `validation`")
        if values.get("gradient_cache_size") is not None:
            raise ConfigError(
                "train.gradient_cache_size does nothing for texts without queries; leave it out"
            )
        for name in ("dataloader_drop_last", "dataloader_persistent_workers"):
            if values.get(name):
                raise ConfigError(f"train.{name} does nothing for texts, which have no end; leave it out")
        return self

    def evaluation_defaults(self) -> dict[str, Any]:
        """Return arguments of the trainer that make it validate regularly; none without ``validation``."""
        return {} if self.validation is None else {"eval_steps": 0.1, "eval_on_start": True}


def text_trainer(
    step: TextStep,
    config: TextTrainingConfig,
    arguments: TrainingArguments,
    collate: Collate,
    collate_validation: Collate,
) -> Trainer:
    """Make the trainer of a step; it logs to ``log.jsonl`` beside the folder of its checkpoints.

    Args:
        step: Model and objective.
        config: Texts and validation.
        arguments: Arguments of the trainer.
        collate: Makes a batch of numbered texts.
        collate_validation: Makes a batch of numbered texts of the validation, and hides the same tokens for
            every seed.

    Raises:
        ConfigError: Arguments do not fit the model.
        StorageError: A corpus does not exist.
        BadValueError: A corpus can be read only once.
    """
    evaluation = None
    if config.validation is not None:
        texts = list(enumerate(first_texts(read_corpora([config.validation]), config.validation_texts)))
        starts = range(0, len(texts), _VALIDATED)
        evaluation = methodcaller(
            "validate", [collate_validation(texts[start : start + _VALIDATED]) for start in starts]
        )
    data = open_texts(config.texts, collate.max_length)
    log = TrainingLog(Path(str(arguments.output_dir)).parent / "log.jsonl")
    return Trainer(step, arguments, data, evaluation=evaluation, callbacks=[log], data_collator=collate)
