"""Run a training recipe: check everything, then train, measure and save in one directory.

`run_trainer` and `TrainingLog` serve all runs that train.
What the directory holds, and how it resumes, is in `irkit.training.run_directory`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from irkit.config import Config
from irkit.core.scoring import score
from irkit.errors import ConfigError
from irkit.evaluation.measures import evaluate
from irkit.heads.expected_heads import as_multi_vector_head
from irkit.index import check_index
from irkit.model import Model
from irkit.training.interaction import MVA, make_interaction
from irkit.training.measuring import FUSION, Measured, measure
from irkit.training.model_recipe import ModelRecipe, make_model
from irkit.training.result_files import COSTS, write_costs, write_results
from irkit.training.run_directory import check_directory, finish_directory, prepare_directory, run_stage
from irkit.training.several_step import SeveralStep
from irkit.training.train_recipe import StagedRecipe, TrainRecipe
from irkit.training.train_step import TrainStep
from irkit.training.trainer import Trainer
from irkit.training.training_arguments import TrainingArguments
from irkit.training.training_data import Mixture, check, open_data
from irkit.training.validation import JudgedCollection, open_collections, summarize
from irkit.utils.atomic import explained, write_text


@dataclass(frozen=True)
class Prepared:
    """A recipe with its parts, which fit each other; nothing is written yet.

    Attributes:
        recipe: The recipe.
        step: Model and losses.
        trainer: Trains the step.
        examples: Data that the step is trained on.
        counts: Counts of the data by name, see `irkit.training.training_data.check`.
        collections: Collections that the model is measured on.
    """

    recipe: TrainRecipe
    step: TrainStep
    trainer: Trainer
    examples: Mixture
    counts: Mapping[str, int]
    collections: list[JudgedCollection]


def prepare(recipe: TrainRecipe, out: str | Path, *, overwrite: bool = False) -> Prepared:
    """Make all parts of a recipe, and check everything that can be checked before the first step.

    Args:
        recipe: See `TrainRecipe.resolve`.
        out: Directory of the result.
        overwrite: Accept a directory that holds an earlier training.

    Raises:
        ConfigError: Parts of the recipe do not fit each other.
        StorageError: A file is missing, or ``out`` holds something else.
        BadValueError: A file has wrong content.
    """
    directory = Path(out)
    check_directory(directory, recipe, overwrite)
    recipe.check_files()
    # model and losses
    arguments = recipe.arguments(directory / "checkpoints")
    transformers.set_seed(arguments.seed)  # it decides the weights of new heads
    model = make_model(recipe.model)
    step = _make_step(recipe, model, arguments.gradient_cache_size)
    # training data and evaluation
    examples = open_data(recipe.data, arguments.seed)
    counts = check(examples, needs=step.needs)
    _check_learnable(recipe, counts)
    if arguments.max_steps <= 0 and examples.streaming:
        raise ConfigError("train.max_steps: a streamed dataset has no end; say how many steps to take")
    _check_evaluations(model, recipe)
    collections = open_collections(recipe.evaluation)
    during = [collection for collection in collections if not collection.config.at_end]
    _check_metric(arguments, during, [*step.heads, FUSION] if isinstance(step, SeveralStep) else [])

    def evaluation(model: Model) -> dict[str, float]:
        return _summarize(_measure(model, trainer.whole_step, during), during)

    trainer = Trainer(
        step,
        arguments,
        examples,
        evaluation=evaluation if during else None,
        callbacks=[TrainingLog(directory / "log.jsonl")],
    )
    for created in (directory / "checkpoints", directory):  # by the trainer; nothing is written yet
        with suppress(OSError):
            created.rmdir()
    return Prepared(recipe, step, trainer, examples, counts, collections)


def _make_step(recipe: TrainRecipe, model: Model, gradient_cache_size: int | None) -> TrainStep:
    """Make the step of a model with one head, or with several.

    Raises:
        ConfigError: The recipe has keys for the other.
    """
    several = model.kind == "several"
    if several:
        unused: dict[str, Any] = {"regularizers": recipe.regularizers, "matryoshka": recipe.matryoshka}
        unused["interaction"] = recipe.interaction.kind != "maxsim"
    else:
        unused = {"heads": recipe.heads, "self_distillation": recipe.self_distillation}
    if wrong := [name for name, value in unused.items() if value]:
        what = "several heads" if several else f"one head, of {model.kind} vectors"
        raise ConfigError(f"{wrong[0]}: the model has {what}; leave it out")
    if several:
        return SeveralStep(
            model,
            recipe.losses,
            recipe.heads,
            distillation=recipe.self_distillation,
            gradient_cache_size=gradient_cache_size,
        )
    return TrainStep(
        model,
        recipe.losses,
        regularizers=recipe.regularizers,
        matryoshka=recipe.matryoshka,
        interaction=make_interaction(recipe.interaction, model),
        gradient_cache_size=gradient_cache_size,
    )


def train(
    recipe: TrainRecipe | Mapping[str, Any] | str | Path,
    out: str | Path,
    *,
    overrides: Iterable[str] = (),
    overwrite: bool = False,
) -> Model:
    """Train a model by a recipe; an interrupted training resumes from its last checkpoint.

    Args:
        recipe: A YAML or JSON file, its keys and values, or a `TrainRecipe`.
        out: Directory of the model, see `irkit.training.run_directory`.
        overrides: Changes of the recipe such as ``"train.learning_rate=2e-5"``.
        overwrite: Replace what another recipe, or a finished training, left there.

    Returns:
        The trained model, the best one if the recipe says ``load_best_model_at_end``.

    Raises:
        ConfigError: The recipe has an unknown key, an impossible value, or parts that do not fit.
        StorageError: A file is missing, ``out`` holds something else, or the training there has finished.
        BadValueError: A file has wrong content.
        TrainingError: A loss or a gradient became NaN or infinite.

    Examples:
        >>> model = train("recipe.yaml", "model", overrides=["train.seed=1"])  # doctest: +SKIP
        >>> model.encode_query("bears in winter")  # doctest: +SKIP
    """
    prepared = prepare(TrainRecipe.resolve(recipe, overrides), out, overwrite=overwrite)
    return run_recipe(prepared, out, overwrite=overwrite)


def run_recipe(prepared: Prepared, out: str | Path, *, overwrite: bool = False) -> Model:
    """Train, measure and save the model of a prepared recipe; arguments and errors as for `train`."""
    directory = Path(out)

    def measure_finished(model: Model) -> None:
        if prepared.collections:
            results = _measure(model, prepared.trainer.whole_step, prepared.collections)
            write_costs({title: result.costs for title, result in results.items()}, directory / COSTS)
            evaluations = {title: result.evaluation for title, result in results.items()}
            write_results(evaluations, directory / "evaluation.jsonl")

    return run_trainer(
        prepared.trainer, prepared.recipe, directory, overwrite=overwrite, measure=measure_finished
    )


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
            trainer.whole_step.save_pretrained(unfinished)
        finish_directory(directory, unfinished, move=True)
        model.name = str(directory)
    return model


def run_fine_tuning(recipe: StagedRecipe, model: ModelRecipe, last: Path | None, stages: Path) -> Path:
    """Run the last stage of a recipe that trains a model in stages, the fine-tuning, if the recipe has data.

    Args:
        recipe: Recipe of all stages.
        model: The model that it begins with.
        last: Directory of the stage before; None if fine-tuning is the only one.
        stages: Directory of the stages.

    Returns:
        The directory of the last stage.
    """
    if recipe.data:
        tuning = recipe.fine_tuning(model, last)
        last = run_stage(stages / "fine_tuned", lambda folder: train(tuning, folder), resumes=True)
    assert last is not None  # such a recipe has data or an earlier stage
    return last


def _measure(model: Model, step: TrainStep, collections: list[JudgedCollection]) -> dict[str, Measured]:
    """Measure a model on each collection, by the scores that ``step`` trains; return results by title."""
    training = step.training
    step.eval()
    compare: Any = step.interaction or score
    distillation = step.distillation if isinstance(step, SeveralStep) else None
    try:
        return measure(model, collections, compare, distillation.weights if distillation else None)
    finally:
        step.train(training)


def _summarize(results: Mapping[str, Measured], collections: list[JudgedCollection]) -> dict[str, float]:
    by_title = {collection.config.title: collection.config.group for collection in collections}
    groups = {title: by_title.get(title) or by_title.get(title.rpartition("/")[0], "") for title in results}
    return summarize({title: result.evaluation for title, result in results.items()}, groups)


def _check_evaluations(model: Model, recipe: TrainRecipe) -> None:
    """Raise an error if a collection has token pooling, or an index, that does not suit the model."""
    for config in recipe.evaluation:
        if config.token_pooling is not None:
            as_multi_vector_head(model.head, f"evaluation.token_pooling of {config.title}")
        if config.index is None:
            continue
        if isinstance(recipe.interaction, MVA):
            raise ConfigError(
                f"evaluation.index: {config.title} is searched by the scores of the model, and attention "
                "(kind mva) is trained; leave index out"
            )
        check_index(config.index, model.encode_representation([], "document"))


def _check_learnable(recipe: TrainRecipe, counts: Mapping[str, int]) -> None:
    """Raise ConfigError if all losses compare the documents of a query, but each query has only one."""
    alone = [loss for loss in recipe.losses if not loss.needs & {"in_batch", "vectors"}]
    alone = [loss for loss in alone if loss.kind != "score_mse"]
    if counts["documents"] == 1 and len(alone) == len(recipe.losses):
        raise ConfigError(
            f"losses: {alone[0].kind} compares the documents of a query, and examples have one each; raise "
            "data.documents, mine negatives (irkit mine), or take infonce, which compares those of the batch"
        )


def _check_metric(
    arguments: TrainingArguments, collections: list[JudgedCollection], parts: list[str]
) -> None:
    """Raise ConfigError if the best model is to be chosen by a measure that is not computed.

    Args:
        arguments: Of the training.
        collections: The collections that are measured during the training.
        parts: Names of the representations that are measured, for a model with several heads.
    """
    one: Any = {"q": {"d": 1}}
    evaluations, groups = {}, {}
    for config in [collection.config for collection in collections]:
        for title in [f"{config.title}/{part}" for part in parts] or [config.title]:
            evaluations[title], groups[title] = evaluate(one, one, config.measures), config.group
    measured = summarize(evaluations, groups)
    metric = (arguments.metric_for_best_model or "").removeprefix("eval_")
    if metric and metric not in measured:
        raise ConfigError(
            f"train.metric_for_best_model: {metric} is not measured; expected "
            + (", ".join(measured) or "nothing, or `evaluation` beside it")
        )


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
