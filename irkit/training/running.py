"""A recipe carried out: everything is checked first, then trained, measured and saved in one directory.

DIR/ is a model directory, which ``modules.json`` completes at the end, and beside the model it holds::

    recipe.yaml        the whole recipe
    checkpoints/       the newest checkpoints, from which the same call goes on after a kill
    log.jsonl          losses, learning rates and measures, an object for each logged step
    evaluation.jsonl   measures of the finished model, an object for each collection, measure and query
    replaced/          the model that was there before, until the new one is complete
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
import yaml

from irkit.bars import bar
from irkit.config import Config, read_mapping
from irkit.errors import ConfigError, StorageError
from irkit.evaluation import Evaluation, evaluate
from irkit.files import check_folder, explained, write_text
from irkit.model import Model
from irkit.scoring import score
from irkit.training.arguments import TrainingArguments
from irkit.training.data import check, open_data
from irkit.training.interaction import make_interaction
from irkit.training.model_recipe import make_model
from irkit.training.model_step import ModelStep
from irkit.training.recipe import TrainRecipe
from irkit.training.step import TrainStep
from irkit.training.trainer import Trainer
from irkit.training.validation import (
    JudgedCollection,
    evaluate_model,
    open_collections,
    summarize,
    write_results,
)

__all__ = [
    "Prepared",
    "TrainingLog",
    "begin_place",
    "carry_out",
    "check_place",
    "end_place",
    "prepare",
    "publish_model",
    "train",
]

_RECIPE, _DONE, _REPLACED = "recipe.yaml", "modules.json", "replaced"


@dataclass(frozen=True)
class Prepared:
    """A recipe whose parts were made and found to fit each other; nothing is written yet.

    Attributes:
        recipe: The recipe.
        step: Model and losses.
        trainer: What trains them.
        counts: What the check of the data counted, by name.
        collections: What the model is measured on.
    """

    recipe: TrainRecipe
    step: TrainStep
    trainer: Trainer
    counts: Mapping[str, int]
    collections: list[JudgedCollection]


def prepare(recipe: TrainRecipe, out: str | Path, *, overwrite: bool = False) -> Prepared:
    """Make everything that a recipe names, and check all that can be checked before the first step.

    Args:
        recipe: See `TrainRecipe.resolve`.
        out: Directory of the result.
        overwrite: Whether what an earlier training left there may be replaced.

    Raises:
        ConfigError: Parts of the recipe do not fit each other.
        StorageError: A file is missing, or something else is in ``out``.
        BadValueError: A file does not hold what it should.
    """
    place = Path(out)
    check_place(place, recipe, overwrite)
    arguments = recipe.arguments(place / "checkpoints")
    transformers.set_seed(arguments.seed)  # new heads start from it
    model = make_model(recipe.model)
    step = TrainStep(
        model,
        recipe.losses,
        regularizers=recipe.regularizers,
        matryoshka=recipe.matryoshka,
        interaction=make_interaction(recipe.interaction, model),
        gradient_cache_size=arguments.gradient_cache_size,
    )
    examples = open_data(recipe.data, arguments.seed)
    counts = check(examples, needs=step.needs)
    _check_learnable(recipe, counts)
    if arguments.max_steps <= 0 and examples.streaming:
        raise ConfigError("train.max_steps: a streamed dataset has no end; say how many steps to take")
    collections = open_collections(recipe.evaluation)
    during = [each for each in collections if not each.config.at_end]
    _check_metric(arguments, during)
    trainer = Trainer(
        step,
        arguments,
        examples,
        evaluation=(lambda model: summarize(_measure(model, step, during))) if during else None,
        callbacks=[TrainingLog(place / "log.jsonl")],
    )
    for made in (place / "checkpoints", place):  # by the trainer
        with suppress(OSError):
            made.rmdir()
    return Prepared(recipe, step, trainer, counts, collections)


def train(
    recipe: TrainRecipe | Mapping[str, Any] | str | Path,
    out: str | Path,
    *,
    overrides: Iterable[str] = (),
    overwrite: bool = False,
) -> Model:
    """Train a model by a recipe; what was interrupted goes on from its last checkpoint.

    Args:
        recipe: A YAML or JSON file, its keys and values, or a `TrainRecipe`.
        out: Directory of the model and of what else training leaves, see `irkit.training.running`.
        overrides: ``"key=value"``, such as ``"train.learning_rate=2e-5"``, that go before.
        overwrite: Replace what another recipe, or a training that has finished, left there.

    Returns:
        The trained model, the best one if the recipe says ``load_best_model_at_end``.

    Raises:
        ConfigError: The recipe has an unknown key, an impossible value, or parts that do not fit.
        StorageError: A file is missing, something else is in ``out``, or the training there has finished.
        BadValueError: A file does not hold what it should.
        TrainingError: A loss or a gradient became NaN or infinite.

    Examples:
        >>> model = train("recipe.yaml", "model", overrides=["train.seed=1"])  # doctest: +SKIP
        >>> model.encode_query("bears in winter")  # doctest: +SKIP
    """
    prepared = prepare(TrainRecipe.resolve(recipe, overrides), out, overwrite=overwrite)
    return carry_out(prepared, out, overwrite=overwrite)


def carry_out(prepared: Prepared, out: str | Path, *, overwrite: bool = False) -> Model:
    """Train, measure and save what `prepare` made; arguments and errors as of `train`."""
    place, trainer = Path(out), prepared.trainer
    main = trainer.args.process_index == 0
    if main:
        begin_place(place, prepared.recipe, overwrite)
    trainer.accelerator.wait_for_everyone()
    trainer.train(resume_from_checkpoint=True)
    model = trainer.finished_model()
    if main:
        if prepared.collections:
            results = _measure(model, prepared.step, prepared.collections)
            write_results(results, place / "evaluation.jsonl")
        publish_model(prepared.step, place)
        end_place(place)
        model.name = str(place)
    return model


class TrainingLog(transformers.TrainerCallback):
    """Appends what the trainer logs to a file; of steps that are done again the first time does not count."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: D102
        if state.is_world_process_zero and self.path.is_file():
            kept = [line for line in self.path.read_text().splitlines() if _step(line) <= state.global_step]
            write_text(self.path, "".join(f"{line}\n" for line in kept) if state.global_step else "")

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: D102
        if state.is_world_process_zero:
            with explained(f"writing {self.path}"), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **given["logs"]}) + "\n")


def _step(line: str) -> float:
    """Of a line of the log; the last one may have been cut off by a kill."""
    try:
        return int(json.loads(line)["step"])
    except ValueError:
        return float("inf")


def _measure(model: Model, step: TrainStep, collections: list[JudgedCollection]) -> dict[str, Evaluation]:
    """Measures of a model by the name of the collection, with the scores that are trained."""
    results: dict[str, Evaluation] = {}
    compare: Any = step.interaction or score
    training = step.training
    step.eval()
    for collection in collections:
        title = collection.config.title
        with bar(f"evaluating on {title}", "documents", collection.total) as update:
            results[title] = evaluate_model(model, collection, compare, update)
    step.train(training)
    return results


def check_place(place: Path, recipe: Config, overwrite: bool) -> None:
    """Refuse a directory that holds anything but an unfinished training by the same recipe.

    Raises:
        StorageError: It does, or cannot be written to.
    """
    check_folder(place, f"training into {place}")
    if not _holds_files(place):
        return
    if not (place / _RECIPE).is_file():
        found = ", ".join(sorted(path.name for path in place.iterdir())[:3])
        raise StorageError(
            f"training into {place}: the directory holds other files ({found}); choose a new or an empty one"
        )
    if overwrite:
        return
    if (place / _DONE).is_file():
        raise StorageError(
            f"training into {place}: it holds a trained model; choose another directory or --overwrite"
        )
    if not _is_begun(place, recipe):
        raise StorageError(
            f"training into {place}: what was begun there has another recipe, {place / _RECIPE}; go on with "
            "that one, choose another directory or --overwrite"
        )


def _holds_files(place: Path) -> bool:
    """Whether there is more than what a trainer, or a kill, leaves before the recipe is written."""
    return any(path.is_file() and path.suffix != ".part" for path in place.rglob("*"))


def _is_begun(place: Path, recipe: Config) -> bool:
    """Whether there is an unfinished training by the same recipe."""
    if not (place / _RECIPE).is_file() or (place / _DONE).is_file():
        return False
    begun: object = read_mapping(place / _RECIPE)
    same: bool = begun == yaml.safe_load(recipe.to_yaml())
    return same


def _check_learnable(recipe: TrainRecipe, counts: Mapping[str, int]) -> None:
    """Refuse losses over the documents of a query where each has only one."""
    alone = [loss for loss in recipe.losses if not loss.needs & {"in_batch", "vectors"}]
    alone = [loss for loss in alone if loss.kind != "score_mse"]
    if counts["documents"] == 1 and len(alone) == len(recipe.losses):
        raise ConfigError(
            f"losses: {alone[0].kind} compares the documents of a query, and examples have one each; raise "
            "data.documents, mine negatives (irkit mine), or take infonce, which compares those of the batch"
        )


def _check_metric(arguments: TrainingArguments, collections: list[JudgedCollection]) -> None:
    """Refuse to look for the best model by what is not measured."""
    one: Any = {"q": {"d": 1}}
    measured = summarize(
        {each.config.title: evaluate(one, one, each.config.measures) for each in collections}
    )
    wanted = (arguments.metric_for_best_model or "").removeprefix("eval_")
    if wanted and wanted not in measured:
        raise ConfigError(
            f"train.metric_for_best_model: {wanted} is not measured; expected "
            + (", ".join(measured) or "nothing, or `evaluation` beside it")
        )


def begin_place(place: Path, recipe: Config, overwrite: bool) -> None:
    """Leave nothing in a directory but the recipe, what the same one has begun, and a model that it replaces.

    Raises:
        StorageError: It cannot be written to.
    """
    with explained(f"training into {place}"):
        if overwrite and place.exists() and not _is_begun(place, recipe):
            _clear(place)
        place.mkdir(parents=True, exist_ok=True)
        for left in place.glob(".*.part"):  # by a kill
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        if not (place / _RECIPE).exists():
            write_text(place / _RECIPE, recipe.to_yaml())


def _clear(place: Path) -> None:
    """Put a model aside until `end_place`; delete what is unfinished."""
    aside, finished = place / _REPLACED, (place / _DONE).is_file()
    if finished and (aside / _DONE).is_file():
        shutil.rmtree(aside)
    last = [_DONE, _RECIPE]  # so that, killed between two, the same call goes on
    for path in sorted(place.iterdir(), key=lambda path: path.name in last and last.index(path.name) + 1):
        if path != aside and finished:
            aside.mkdir(exist_ok=True)
            path.replace(aside / path.name)
        elif path != aside:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def end_place(place: Path) -> None:
    """Delete the model that the one in a directory replaces."""
    with explained(f"training into {place}"):
        if (place / _REPLACED).is_dir():
            shutil.rmtree(place / _REPLACED)


def publish_model(step: ModelStep, place: Path) -> None:
    """Put the files of the model into the directory, the one that makes it a model last.

    Raises:
        StorageError: Writing failed.
    """
    aside = place / "model.part"
    with explained(f"saving the model to {place}"):
        for left in (aside, *place.glob(f".{aside.name}-*")):  # by a kill
            shutil.rmtree(left, ignore_errors=True)
        step.save_pretrained(aside)
        for part in sorted(aside.iterdir(), key=lambda path: path.name == _DONE):
            target = place / part.name
            if target.is_dir():
                shutil.rmtree(target)
            part.replace(target)
        aside.rmdir()
