"""Run a pre-training recipe stage by stage; complete stages are not repeated.

DIR/ is the directory of a run, see `irkit.training.run_directory`, with these parts of its own::

    pretraining.jsonl      log of the pre-training and of its validation
    stages/tokenizer/      a tokenizer, if one was trained
    stages/pretrained/     the pre-trained model
    stages/fine_tuned/     the model after the training of a retriever, as `irkit train` leaves it
"""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path

import transformers

from irkit.model import Model
from irkit.training.domain_vocabulary import train_vocabulary
from irkit.training.interaction import MVA, Interaction, make_interaction
from irkit.training.masking import PretrainCollator
from irkit.training.model_recipe import ModelRecipe, make_model
from irkit.training.pretraining.corpus import first_texts, read_corpora
from irkit.training.pretraining.next_sentence import NextSentence, PairCollator
from irkit.training.pretraining.pretrain_recipe import PretrainingConfig, PretrainRecipe
from irkit.training.pretraining.pretrain_step import PretrainStep
from irkit.training.run_directory import check_directory, finish_directory, prepare_directory, run_stage
from irkit.training.text_training import text_trainer
from irkit.training.train_run import prepare, run_fine_tuning, run_trainer
from irkit.training.trainer import Trainer
from irkit.utils.atomic import explained

_PROBED = 100  # texts that a vocabulary is trained on for a check


def check(recipe: PretrainRecipe, out: str | Path, *, overwrite: bool = False) -> Model:
    """Check whether all stages of a recipe can run, and write nothing.

    Args:
        recipe: See `PretrainRecipe.resolve`.
        out: Directory of the result.
        overwrite: Accept a directory that holds an earlier run.

    Returns:
        The model before training; if its vocabulary must be trained, with a vocabulary of a few texts.

    Raises:
        ConfigError: Parts of the recipe do not fit each other.
        StorageError: A model or a file is missing, or ``out`` holds something else.
        BadValueError: A file has wrong content, or an objective does not fit the model.
    """
    check_directory(Path(out), recipe, overwrite)
    recipe.check_files()
    plan, model = recipe.pretraining, recipe.model
    with tempfile.TemporaryDirectory() as scratch:  # trainers make directories before they begin
        folder = Path(scratch)
        if plan is not None and recipe.trained_vocabulary is not None:
            texts = first_texts(read_corpora(plan.texts), _PROBED)
            train_vocabulary(texts, folder / "tokenizer", recipe.trained_vocabulary)
            model = _with_tokenizer(model, folder / "tokenizer")
        start = make_model(model)
        if plan is not None:
            first_texts(read_corpora(plan.texts), 1)
            _make_trainer(start, plan, folder / "pretrained", recipe.interaction)
        if recipe.data:
            prepare(recipe.fine_tuning(model), folder / "fine_tuned")
    return start


def run(recipe: PretrainRecipe, out: str | Path, *, overwrite: bool = False) -> Model:
    """Run all stages of a recipe; an interrupted run resumes with the stage and step that it had reached.

    torchrun and accelerate launch run it on several devices.

    Args:
        recipe: See `PretrainRecipe.resolve`.
        out: Directory of the result.
        overwrite: Replace what another recipe, or a finished run, left there.

    Returns:
        The model of the last stage.

    Raises:
        ConfigError: Parts of the recipe do not fit each other.
        StorageError: A model or a file is missing, or ``out`` holds something else.
        BadValueError: A file has wrong content, or an objective does not fit the model.
        TrainingError: A loss or a gradient became NaN or infinite.

    Examples:
        >>> recipe = PretrainRecipe.resolve("tite_pretraining.yaml")  # doctest: +SKIP
        >>> run(recipe, "tite").encode_query("gene expression")  # doctest: +SKIP
    """
    directory, plan, model = Path(out), recipe.pretraining, recipe.model
    check(recipe, directory, overwrite=overwrite)
    stages = directory.absolute() / "stages"  # a resumed run may name `out` in another way
    arguments = (recipe if plan is None else plan).arguments(stages)
    is_main = arguments.process_index == 0
    # vocabulary: the first process trains it while the others wait
    with arguments.main_process_first(local=False):
        if is_main:
            prepare_directory(directory, recipe, overwrite)
        if plan is not None and recipe.trained_vocabulary is not None:
            texts, config = read_corpora(plan.texts), recipe.trained_vocabulary
            tokenizer = run_stage(stages / "tokenizer", partial(train_vocabulary, texts, config=config))
            model = _with_tokenizer(model, tokenizer)
    # pre-training
    last = None
    if plan is not None:

        def pretrain_model(folder: Path) -> None:
            transformers.set_seed(arguments.seed)  # it decides all new weights
            pretrain(make_model(model), plan, folder, recipe.interaction)

        last = run_stage(stages / "pretrained", pretrain_model, resumes=True)
    # fine-tuning, and the result
    last = run_fine_tuning(recipe, model, last, stages)
    with arguments.main_process_first(local=False):
        if is_main:
            if plan is not None:
                with explained(f"writing {directory / 'pretraining.jsonl'}"):
                    shutil.copyfile(stages / "pretrained" / "log.jsonl", directory / "pretraining.jsonl")
            finish_directory(directory, last)
    return Model.from_pretrained(directory)


def pretrain(
    model: Model, config: PretrainingConfig, out: str | Path, interaction: Interaction | None = None
) -> Model:
    """Train a model by objectives that need only texts.

    An interrupted training resumes from its last checkpoint.

    Args:
        model: Trained in place.
        config: Texts, objectives and arguments of the trainer.
        out: Directory of the result, see `irkit.training.run_directory`.
        interaction: How next-sentence prediction compares token vectors; attention (kind mva) is trained, and
            saved with the model. Other objectives do without.

    Returns:
        The model, without the modules that objectives trained beside it.

    Raises:
        ConfigError: A value is impossible.
        BadValueError: An objective does not fit the model, or a text is malformed.
        StorageError: A corpus is missing, or ``out`` holds something else.
        TrainingError: A loss or a gradient became NaN or infinite.

    Examples:
        >>> config = PretrainingConfig(
        ...     texts=["corpus.jsonl"], objectives=[{"kind": "bag_of_words"}], train={"max_steps": 1000}
        ... )
        >>> pretrain(model, config, "pretrained")  # doctest: +SKIP
    """
    directory = Path(out)
    check_directory(directory, config)
    trainer = _make_trainer(model, config, directory, interaction)
    trained = run_trainer(trainer, config, directory)
    trainer.accelerator.wait_for_everyone()  # the next stage reads what the first process has saved
    return trained


def _make_trainer(
    model: Model, config: PretrainingConfig, directory: Path, interaction: Interaction | None
) -> Trainer:
    arguments = config.arguments(directory / "checkpoints")
    length = min(filter(None, (config.max_length, model.tokenizer.max_length)))
    model.tokenizer.check_length(length, "pretraining.max_length")
    pairs = any(isinstance(objective, NextSentence) for objective in config.objectives)
    attention = make_interaction(interaction, model) if pairs and isinstance(interaction, MVA) else None
    seeded, fixed = (
        PairCollator(model, config.masking, length, seed)
        if pairs
        else PretrainCollator(model.tokenizer, config.masking, max_length=length, seed=seed)
        for seed in (arguments.seed, 0)
    )
    step = PretrainStep(model, config.objectives, seed=arguments.seed, interaction=attention)
    return text_trainer(step, config, arguments, seeded, fixed)


def _with_tokenizer(model: ModelRecipe, folder: Path) -> ModelRecipe:
    return model.model_copy(update={"tokenizer": str(folder)})
