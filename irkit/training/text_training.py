"""Training on texts without labels: from the step and its batches to a model directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from irkit.config import Config
from irkit.model import Model
from irkit.training.arguments import TrainingArguments
from irkit.training.model_step import ModelStep
from irkit.training.running import TrainingLog, begin_place, publish_model
from irkit.training.texts import Corpus, text_loader
from irkit.training.trainer import Trainer

__all__ = ["text_trainer", "train_on_texts"]


def text_trainer(
    step: ModelStep,
    arguments: TrainingArguments,
    texts: Sequence[str],
    collate: Callable[[Sequence[tuple[int, str]]], Any],
    evaluation: Callable[[Any], Mapping[str, float]] | None = None,
) -> Trainer:
    """Make the trainer, which logs beside the folder of its checkpoints.

    Args:
        step: Model and objective.
        arguments: Of the trainer.
        texts: Corpora, read in turn.
        collate: Makes a batch of numbered texts.
        evaluation: Values of the step as it stands, by name.

    Raises:
        ConfigError: Arguments do not fit the model.
        StorageError: There is no such corpus.
        BadValueError: One can be read only once.
    """
    corpora = [Corpus(source) for source in texts]
    for corpus in corpora:
        corpus.check()
    loader = text_loader(
        corpora,
        collate,
        batch_size=None if arguments.tokens_per_batch else arguments.per_device_train_batch_size,
        tokens_per_batch=arguments.tokens_per_batch,
        seed=arguments.seed,
        share=(arguments.process_index, arguments.world_size),
        workers=arguments.dataloader_num_workers,
    )
    if arguments.dataloader_prefetch_factor is not None:
        loader.prefetch_factor = arguments.dataloader_prefetch_factor
    log = Path(str(arguments.output_dir)).parent / "log.jsonl"
    return Trainer(step, arguments, loader, evaluation=evaluation, callbacks=[TrainingLog(log)])


def train_on_texts(trainer: Trainer, config: Config, place: Path) -> Model:
    """Train to the end and save; what was interrupted goes on from its last checkpoint.

    Args:
        trainer: See `text_trainer`.
        config: What is noted in ``recipe.yaml``.
        place: Becomes a model directory, whose ``modules.json`` comes last.

    Returns:
        The trained model.

    Raises:
        StorageError: Writing failed.
        TrainingError: A loss or a gradient became NaN or infinite.
    """
    main = trainer.args.process_index == 0
    if main:
        begin_place(place, config, False)
    trainer.accelerator.wait_for_everyone()
    trainer.train(resume_from_checkpoint=True)
    model = trainer.finished_model()
    if main:
        publish_model(trainer.step, place)
        model.name = str(place)
    trainer.accelerator.wait_for_everyone()
    return model
