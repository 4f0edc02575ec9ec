"""Run a trainer in a directory: resume, train, measure, save; and the log of its steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from irkit.config import Config
from irkit.model import Model
from irkit.training.run_directory import finish_directory, prepare_directory
from irkit.training.trainer import Trainer
from irkit.utils.atomic import explained, write_text


def run_trainer(
    trainer: Trainer,
    recipe: Config,
    directory: Path,
    *,
    overwrite: bool = False,
    measure: Callable[[Model], object] | None = None,
) -> Model:
    """Train to the end and save the model; an interrupted run resumes from its last checkpoint.

    Args:
        trainer: Its checkpoints are in ``directory / "checkpoints"``.
        recipe: Written to ``recipe.yaml``.
        directory: Becomes a model directory, see `irkit.training.run_directory`.
        overwrite: Replace what another recipe, or a finished run, left there.
        measure: Called with the trained model, in the first process, before the model is saved.

    Returns:
        The trained model.

    Raises:
        StorageError: Writing failed.
        TrainingError: A loss or a gradient became NaN or infinite.
    """
    is_main = trainer.args.process_index == 0
    if is_main:
        prepare_directory(directory, recipe, overwrite)
    trainer.accelerator.wait_for_everyone()
    trainer.train(resume_from_checkpoint=True)
    model = trainer.finished_model()
    if is_main:
        if measure is not None:
            measure(model)
        unfinished = directory / "model.part"
        with explained(f"saving the model to {directory}"):
            for leftover in (unfinished, *directory.glob(f".{unfinished.name}-*")):  # of a killed process
                shutil.rmtree(leftover, ignore_errors=True)
            trainer.step.save_pretrained(unfinished)
        finish_directory(directory, unfinished, move=True)
        model.name = str(directory)
    return model


class TrainingLog(transformers.TrainerCallback):
    """Append the trainer's log entries to a file.

    After a resume, entries of repeated steps replace the old ones.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: D102
        if state.is_world_process_zero and self.path.is_file():
            lines = [line for line in self.path.read_text().splitlines() if _step(line) <= state.global_step]
            write_text(self.path, "".join(f"{line}\n" for line in lines) if state.global_step else "")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: D102
        if state.is_world_process_zero:
            with explained(f"writing {self.path}"), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def _step(line: str) -> float:
    """Return the step of a log entry; infinity for a line that a kill cut off."""
    try:
        return int(json.loads(line)["step"])
    except ValueError:
        return float("inf")
