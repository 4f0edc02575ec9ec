"""A pre-training recipe carried out, stage by stage; what is complete is not done again.

DIR/ is a model directory, which ``modules.json`` completes at the end, and beside the model it holds::

    recipe.yaml            the whole recipe
    pretraining.jsonl      losses of the pre-training and of its validation, an object for each logged step
    log.jsonl              the same of the last stage
    evaluation.jsonl       measures of the fine-tuned model
    stages/tokenizer/      a tokenizer, if one was trained
    stages/pretrained/     the pre-trained model, with its recipe.yaml, log.jsonl and checkpoints/
    stages/fine_tuned/     after the training of a retriever, as `irkit train` leaves it
"""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path

import transformers

from irkit.errors import StorageError
from irkit.model import Model
from irkit.training.model_recipe import ModelRecipe, make_model
from irkit.training.new_model import NewModel
from irkit.training.pretraining.batches import PretrainCollator
from irkit.training.pretraining.recipe import PretrainingConfig, PretrainRecipe
from irkit.training.pretraining.step import PretrainStep, validate
from irkit.training.running import begin_place, check_place, end_place, prepare, train
from irkit.training.stages import DONE, publish_stage, stage, stage_model
from irkit.training.text_training import text_trainer, train_on_texts
from irkit.training.texts import first_texts, read_corpora
from irkit.training.trainer import Trainer
from irkit.vocabulary.domain import DomainConfig, train_vocabulary

__all__ = ["check", "pretrain", "run"]

_PROBED = 100  # texts that a vocabulary is trained on for a check
_VALIDATED = 32  # texts at once


def check(recipe: PretrainRecipe, out: str | Path, *, overwrite: bool = False) -> Model:
    """Find out whether all stages of a recipe can be carried out, of which nothing is written.

    Args:
        recipe: See `PretrainRecipe.resolve`.
        out: Directory of the result.
        overwrite: Whether what is there may be replaced.

    Returns:
        The model as it begins; with a vocabulary of a few texts, if one is still to be trained.

    Raises:
        ConfigError: Parts of the recipe do not fit each other.
        StorageError: A model or a file is missing, or something else is in ``out``.
        BadValueError: A file does not hold what it should, or an objective is not for such a model.
    """
    check_place(Path(out), recipe, overwrite)
    plan, model = recipe.pretraining, recipe.model
    with tempfile.TemporaryDirectory() as scratch:  # for what trainers make before they begin
        folder = Path(scratch)
        if plan is not None:
            sample = first_texts(read_corpora(plan.texts), _PROBED)
            if recipe.trained_vocabulary is not None:
                model = _with_vocabulary(model, sample, recipe.trained_vocabulary, folder / "tokenizer")
            made = make_model(model)
            _trainer(made, plan, folder / "pretrained")
        else:
            made = make_model(model)
        if recipe.data:
            prepare(recipe.fine_tuning(model), folder / "fine_tuned")
    return made


def run(recipe: PretrainRecipe, out: str | Path, *, overwrite: bool = False) -> Model:
    """Carry out a recipe; what was interrupted goes on with the stage, and the step, it had come to.

    torchrun and accelerate launch start it on several devices.

    Args:
        recipe: See `PretrainRecipe.resolve`.
        out: Directory of the result.
        overwrite: Replace what another recipe, or one that has finished, left there.

    Returns:
        The model of the last stage.

    Raises:
        ConfigError: Parts of the recipe do not fit each other.
        StorageError: A model or a file is missing, or something else is in ``out``.
        BadValueError: A file does not hold what it should, or an objective is not for such a model.
        TrainingError: A loss or a gradient became NaN or infinite.

    Examples:
        >>> recipe = PretrainRecipe.resolve("tite_pretraining.yaml")  # doctest: +SKIP
        >>> run(recipe, "tite").encode_query("gene expression")  # doctest: +SKIP
    """
    place, plan, model = Path(out), recipe.pretraining, recipe.model
    check(recipe, place, overwrite=overwrite)
    stages = place.absolute() / "stages"  # the same when it goes on, however out is said
    arguments = (recipe if plan is None else plan).arguments(stages)
    main = arguments.process_index == 0
    with arguments.main_process_first(local=False):
        if main:
            begin_place(place, recipe, overwrite)
        if plan is not None and recipe.trained_vocabulary is not None:
            with stage(stages / "tokenizer") as aside:
                if aside is not None:
                    train_vocabulary(read_corpora(plan.texts), aside, recipe.trained_vocabulary)
            model = _with_tokenizer(model, stages / "tokenizer")
    last = stages / "pretrained"
    if plan is not None:
        if not (last / DONE).is_file():
            transformers.set_seed(arguments.seed)  # what is new starts from it
            pretrain(make_model(model), plan, last)
        model = stage_model(model, last)
    if recipe.data:
        last = stages / "fine_tuned"
        if not (last / DONE).is_file():
            train(recipe.fine_tuning(model), last)
    with arguments.main_process_first(local=False):
        if main:
            if plan is not None:
                _copy_log(stages / "pretrained" / "log.jsonl", place / "pretraining.jsonl")
            publish_stage(last, place)
            end_place(place)
    return Model.from_pretrained(place)


def pretrain(model: Model, config: PretrainingConfig, out: str | Path) -> Model:
    """Train a model by objectives that need texts alone.

    What was interrupted goes on from its last checkpoint. ``out`` becomes a model directory, whose
    ``modules.json`` comes last, with ``recipe.yaml``, ``log.jsonl`` and ``checkpoints/`` beside it.

    Args:
        model: It is trained in place.
        config: On what, and how.
        out: Directory of the result.

    Returns:
        The model, without what objectives trained beside it.

    Raises:
        ConfigError: A value is impossible.
        BadValueError: An objective is not for such a model, or a text is malformed.
        StorageError: A corpus is missing, or something else is in ``out``.
        TrainingError: A loss or a gradient became NaN or infinite.

    Examples:
        >>> config = PretrainingConfig(
        ...     texts=["corpus.jsonl"], objectives=[{"kind": "bag_of_words"}], train={"max_steps": 1000}
        ... )
        >>> pretrain(model, config, "pretrained")  # doctest: +SKIP
    """
    place = Path(out)
    check_place(place, config, False)
    return train_on_texts(_trainer(model, config, place), config, place)


def _trainer(model: Model, config: PretrainingConfig, place: Path) -> Trainer:
    """Everything that the pre-training is made of."""
    arguments = config.arguments(place / "checkpoints")
    length = min(filter(None, (config.max_length, model.tokenizer.max_length)))
    model.tokenizer.check_length(length, "pretraining.max_length")
    collate = PretrainCollator(model.tokenizer, config.masking, max_length=length, seed=arguments.seed)
    evaluation = None
    if config.validation is not None:
        fixed = PretrainCollator(model.tokenizer, config.masking, max_length=length)  # whatever the seed
        texts = list(enumerate(first_texts(read_corpora([config.validation]), config.validation_texts)))
        starts = range(0, len(texts), _VALIDATED)
        evaluation = partial(validate, batches=[fixed(texts[start : start + _VALIDATED]) for start in starts])
    step = PretrainStep(model, config.objectives, seed=arguments.seed)
    return text_trainer(step, arguments, config.texts, collate, evaluation)


def _copy_log(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise StorageError(f"writing {target}: {error.strerror}") from error


def _with_vocabulary(model: ModelRecipe, texts: list[str], config: DomainConfig, folder: Path) -> ModelRecipe:
    train_vocabulary(texts, folder, config)
    return _with_tokenizer(model, folder)


def _with_tokenizer(model: ModelRecipe, folder: Path) -> ModelRecipe:
    assert isinstance(model, NewModel)
    return model.model_copy(update={"tokenizer": str(folder)})
