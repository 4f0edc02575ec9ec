"""Run a training recipe: check everything, then train, measure and save in one directory.

What the directory holds, and how it resumes, is in `irkit.training.run_directory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from irkit.core.scoring import score
from irkit.errors import ConfigError
from irkit.evaluation.measures import Evaluation, evaluate
from irkit.model import Model
from irkit.training.interaction import make_interaction
from irkit.training.model_recipe import make_model
from irkit.training.result_files import write_results
from irkit.training.run_directory import check_directory
from irkit.training.runner import TrainingLog, run_trainer
from irkit.training.train_recipe import TrainRecipe
from irkit.training.train_step import TrainStep
from irkit.training.trainer import Trainer
from irkit.training.training_arguments import TrainingArguments
from irkit.training.training_data import check, open_data
from irkit.training.validation import JudgedCollection, evaluate_model, open_collections, summarize
from irkit.utils.progress import progress_bar


@dataclass(frozen=True)
class Prepared:
    """A recipe with its parts, which fit each other; nothing is written yet.

    Attributes:
        recipe: The recipe.
        trainer: Trains the model by the losses.
        counts: Counts of the data by name, see `irkit.training.training_data.check`.
        collections: Collections that the model is measured on.
    """

    recipe: TrainRecipe
    trainer: Trainer
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
    # model and losses
    arguments = recipe.arguments(directory / "checkpoints")
    transformers.set_seed(arguments.seed)  # it decides the weights of new heads
    model = make_model(recipe.model)
    step = TrainStep(
        model,
        recipe.losses,
        regularizers=recipe.regularizers,
        matryoshka=recipe.matryoshka,
        interaction=make_interaction(recipe.interaction, model),
        gradient_cache_size=arguments.gradient_cache_size,
    )
    # training data and evaluation
    examples = open_data(recipe.data, arguments.seed)
    counts = check(examples, needs=step.needs)
    _check_learnable(recipe, counts)
    if arguments.max_steps <= 0 and examples.streaming:
        raise ConfigError("train.max_steps: a streamed dataset has no end; say how many steps to take")
    collections = open_collections(recipe.evaluation)
    during = [collection for collection in collections if not collection.config.at_end]
    _check_metric(arguments, during)
    trainer = Trainer(
        step,
        arguments,
        examples,
        evaluation=(lambda model: summarize(_measure(model, step, during))) if during else None,
        callbacks=[TrainingLog(directory / "log.jsonl")],
    )
    for created in (directory / "checkpoints", directory):  # by the trainer; nothing is written yet
        with suppress(OSError):
            created.rmdir()
    return Prepared(recipe, trainer, counts, collections)


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
    """Train, measure and save what `prepare` made; arguments and errors as for `train`."""
    directory = Path(out)

    def measure(model: Model) -> None:
        if prepared.collections:
            results = _measure(model, prepared.trainer.step, prepared.collections)
            write_results(results, directory / "evaluation.jsonl")

    return run_trainer(prepared.trainer, prepared.recipe, directory, overwrite=overwrite, measure=measure)


def _measure(model: Model, step: TrainStep, collections: list[JudgedCollection]) -> dict[str, Evaluation]:
    """Measure a model on each collection, by title, with the scores that are trained."""
    results: dict[str, Evaluation] = {}
    compare: Any = step.interaction or score
    training = step.training
    step.eval()
    for collection in collections:
        title = collection.config.title
        with progress_bar(f"evaluating on {title}", "documents", collection.total) as update:
            results[title] = evaluate_model(model, collection, compare, update)
    step.train(training)
    return results


def _check_learnable(recipe: TrainRecipe, counts: Mapping[str, int]) -> None:
    """Raise ConfigError if all losses compare the documents of a query, but each query has only one."""
    alone = [loss for loss in recipe.losses if not loss.needs & {"in_batch", "vectors"}]
    alone = [loss for loss in alone if loss.kind != "score_mse"]
    if counts["documents"] == 1 and len(alone) == len(recipe.losses):
        raise ConfigError(
            f"losses: {alone[0].kind} compares the documents of a query, and examples have one each; raise "
            "data.documents, mine negatives (irkit mine), or take infonce, which compares those of the batch"
        )


def _check_metric(arguments: TrainingArguments, collections: list[JudgedCollection]) -> None:
    """Raise ConfigError if the best model is to be chosen by a measure that is not computed."""
    one: Any = {"q": {"d": 1}}
    configs = [collection.config for collection in collections]
    measured = summarize({config.title: evaluate(one, one, config.measures) for config in configs})
    metric = (arguments.metric_for_best_model or "").removeprefix("eval_")
    if metric and metric not in measured:
        raise ConfigError(
            f"train.metric_for_best_model: {metric} is not measured; expected "
            + (", ".join(measured) or "nothing, or `evaluation` beside it")
        )
