"""Adaptation to a new vocabulary: masked language modelling with frozen layers, or a teacher's logits."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PositiveInt
from torch import Tensor

from irkit.heads import as_sparse_head
from irkit.model import Model
from irkit.tokenizer import Tokenizer
from irkit.training.masked_lm_step import MaskedLMStep
from irkit.training.masking import Masking, MaskingConfig
from irkit.training.run_directory import check_directory
from irkit.training.text_training import Collate, TextTrainingConfig, text_trainer
from irkit.training.train_run import run_trainer
from irkit.training.training_arguments import TrainingArguments
from irkit.vocabulary.sparse_alignment import AlignmentCollator, AlignmentStep

_BATCH = 2048  # texts per step, in all processes
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


class AdaptationConfig(TextTrainingConfig):
    """Masked language modelling after a change of the vocabulary.

    Attributes:
        texts: One corpus or several, see `irkit.training.pretraining.corpus.read_texts`.
        validation: Corpus whose loss is measured during training; None measures nothing.
        validation_texts: Number of texts of ``validation`` that are used, the first ones.
        preset: Schedule of the paper: ``"20k"`` steps, or ``"500"`` with the same share of warm-up. A step
            has 2,048 texts; the number of batches per step follows from the batch size.
        max_length: Texts are cut to this number of tokens.
        masking: Which tokens are hidden.
        train_head: Whether the layers and the bias of the head are trained, too. If not, only the embeddings
            of tokens are, as the paper says.
        teacher: Name or directory of a sparse model on the new vocabulary. If given, all of the model learns
            the teacher's logits instead of hidden tokens (SAP), see
            `irkit.vocabulary.sparse_alignment.AlignmentStep`; ``masking`` and ``train_head`` do nothing.
        train: Arguments by the names of `irkit.training.TrainingArguments`; they override the preset.
            ``gradient_accumulation_steps`` changes the number of texts per step. ``learning_rates`` override
            the freezing of everything but word embeddings and head: ``{"encoder.layers": 1e-5}`` trains
            layers, too.

    Source: "Bridging Vocabulary Gaps", sections 4.2.3, 5.3 and 6.3.
    """

    preset: Annotated[Literal["500", "20k"], BeforeValidator(str)] = "500"  # YAML reads 500 as a number
    max_length: PositiveInt = 128
    masking: MaskingConfig = MaskingConfig()
    train_head: bool = True
    teacher: str | None = None

    def arguments(self, output_dir: str | Path, frozen: Mapping[str, float]) -> TrainingArguments:
        """Make the arguments of the trainer.

        Args:
            output_dir: Directory of the checkpoints.
            frozen: Learning rates by regular expression, such as 0 for frozen parameters. Rates in ``train``
                take precedence.

        Raises:
            ConfigError: A name is unknown, or a value is impossible.
        """
        values = self.evaluation_defaults() | _ALWAYS | _PRESETS[self.preset] | self.train
        batch = int(values["per_device_train_batch_size"]) * int(os.environ.get("WORLD_SIZE", "1"))
        values.setdefault("gradient_accumulation_steps", max(1, _BATCH // max(1, batch)))
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
    """Train word embeddings, and the head, of a sparse model to predict hidden tokens; the rest is frozen.

    With ``teacher`` in the configuration, the whole model learns the logits of that model instead.

    An interrupted training resumes from its last checkpoint.

    Args:
        model: Model that `irkit.vocabulary.transfer_vocabulary` made; it is trained in place.
        config: Texts, masking and schedule.
        out: Directory of the result, see `irkit.training.run_directory`.
        is_new: ``(vocabulary,)`` bool, tokens that are hidden more often; None hides all tokens equally
            often.
        labels: Tokenizer of the terms of the head, if these are not tokens of the model, see
            `irkit.vocabulary.new_head`. Only the head is trained then, or without ``train_head`` its matrix.

    Returns:
        The model.

    Raises:
        ConfigError: A key or a value is unknown or impossible.
        BadValueError: The model is not sparse, ``is_new`` does not fit its terms, or a text is malformed.
        StorageError: A corpus is missing, or ``out`` holds something else.
        TrainingError: A loss or a gradient became NaN or infinite.

    Examples:
        >>> transfer = transfer_vocabulary(source, target)  # doctest: +SKIP
        >>> new = transfer.alignment.is_new  # doctest: +SKIP
        >>> adapt(transfer.model, {"texts": "wikipedia.jsonl"}, "adapted", is_new=new)  # doctest: +SKIP
    """
    config = AdaptationConfig.of(config, "adaptation")
    directory = Path(out)
    check_directory(directory, config)
    length = min(filter(None, (config.max_length, model.tokenizer.max_length)))
    model.tokenizer.check_length(length, "adaptation.max_length")
    # trainer
    step: MaskedLMStep | AlignmentStep
    if config.teacher is None:
        step, frozen = MaskedLMStep(model), _frozen(model, config.train_head, labels is not None)
        arguments = config.arguments(directory / "checkpoints", frozen)
        options: dict[str, Any] = {"labels": labels, "max_length": length}
        masking: Collate = Masking(
            model.tokenizer, config.masking, is_new=is_new, seed=arguments.seed, **options
        )
        fixed: Collate = Masking(model.tokenizer, config.masking, **options)
    else:
        teacher = Model.sparse(config.teacher, device="cpu")
        step, arguments = AlignmentStep(model, teacher), config.arguments(directory / "checkpoints", {})
        masking = fixed = AlignmentCollator(model, teacher, length)
    trainable = {name: parameter.requires_grad for name, parameter in step.named_parameters()}
    trainer = text_trainer(step, config, arguments, masking, fixed)
    # training, after which the same parameters are trainable as before
    trained = run_trainer(trainer, config, directory)
    trainer.accelerator.wait_for_everyone()  # the next stage reads what the first process has saved
    for name, parameter in step.named_parameters():
        parameter.requires_grad_(trainable[name])
    return trained


def _frozen(model: Model, train_head: bool, head_only: bool) -> dict[str, float]:
    """Return a learning rate of 0 for each parameter that is not trained, by regular expression of its name.

    The output matrix is trained, with ``train_head`` all of the head, and the word embeddings unless
    ``head_only`` is set.
    """
    matrix = as_sparse_head(model.head, "adaptation").weight
    trained = set(map(id, model.head.parameters() if train_head else [matrix]))
    if not head_only:
        trained.add(id(model.encoder.word_embeddings))
    names = [name for name, parameter in model.named_parameters() if id(parameter) not in trained]
    return {f"^{re.escape(name)}$": 0.0 for name in names}
