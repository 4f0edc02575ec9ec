"""Run a vocabulary recipe stage by stage; complete stages are not repeated.

DIR/ is the directory of a run, see `irkit.training.run_directory`, with these parts of its own::

    vocabulary_transfer.json   facts of the transfer and the calibration; report.html shows them
    stages/vocabulary/         a tokenizer, if one was trained
    stages/initialized/        the model on the new vocabulary
    stages/adapted/            the model after masked language modelling
    stages/calibrated/         the model after calibration
    stages/fine_tuned/         the model after the training of a retriever, as `irkit train` leaves it
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from irkit.config import as_list, read_json
from irkit.data import Source
from irkit.model import Model
from irkit.model.hub import local_directory
from irkit.tokenizer import Tokenizer
from irkit.training.domain_vocabulary import DomainConfig, fragmentation, train_vocabulary
from irkit.training.model_recipe import SparseModel, make_model
from irkit.training.pretraining.corpus import first_texts, read_corpora
from irkit.training.run_directory import check_directory, finish_directory, prepare_directory, run_stage
from irkit.training.train_run import prepare, run_fine_tuning
from irkit.utils.atomic import write_text
from irkit.vocabulary.adaptation import adapt
from irkit.vocabulary.calibration import CalibrationConfig, calibrate
from irkit.vocabulary.new_head import head_only
from irkit.vocabulary.transfer import FACTS, read_new_tokens, transfer_vocabulary
from irkit.vocabulary.transfer_recipe import VocabularyConfig, VocabularyRecipe
from irkit.vocabulary.transfer_report import write_report

_CALIBRATION = "calibration.json"
_COUNTED, _CUT = 100_000, 1000  # texts: for the frequencies of tokens, for the tokens per word


def check(recipe: VocabularyRecipe, out: str | Path, *, overwrite: bool = False) -> None:
    """Check whether all stages of a recipe can run, and write nothing.

    Args:
        recipe: See `VocabularyRecipe.resolve`.
        out: Directory of the result.
        overwrite: Accept a directory that holds an earlier run.

    Raises:
        ConfigError: Parts of the recipe do not fit each other.
        StorageError: A model or a file is missing, or ``out`` holds something else.
        BadValueError: A file has wrong content.
    """
    check_directory(Path(out), recipe, overwrite)
    recipe.check_files()
    plan = recipe.vocabulary
    corpora = [] if plan is None else [plan.texts]
    with tempfile.TemporaryDirectory() as scratch:  # trainers make directories before they begin
        if recipe.data:
            prepare(recipe.fine_tuning(recipe.model), Path(scratch) / "fine_tuned")
        else:
            make_model(recipe.model)
        if plan is not None and (adaptation := plan.adaptation) is not None:
            adaptation.arguments(Path(scratch) / "adapted", {})
            corpora += [adaptation.texts, as_list(adaptation.validation)]
    for sources in filter(None, corpora):
        first_texts(read_corpora(sources), 1)
    if plan is not None and isinstance(plan.target, str):
        Tokenizer.from_pretrained(local_directory(plan.target))


def run(recipe: VocabularyRecipe, out: str | Path, *, overwrite: bool = False) -> Model:
    """Run all stages of a recipe; an interrupted run resumes with the stage and step that it had reached.

    torchrun and accelerate launch run adaptation and fine-tuning on several devices; the first process alone
    does the rest while the others wait.

    Args:
        recipe: See `VocabularyRecipe.resolve`.
        out: Directory of the result.
        overwrite: Replace what another recipe, or a finished run, left there.

    Returns:
        The model of the last stage.

    Raises:
        ConfigError: Parts of the recipe do not fit each other.
        StorageError: A model or a file is missing, or ``out`` holds something else.
        BadValueError: A file has wrong content, or calibration leaves a dead or a dense model.
        TrainingError: A loss or a gradient became NaN or infinite.

    Examples:
        >>> recipe = VocabularyRecipe.resolve("vocabulary_transfer.yaml")  # doctest: +SKIP
        >>> run(recipe, "scifact-splade").encode_query("gene expression")  # doctest: +SKIP

    Source: "Bridging Vocabulary Gaps", section 4.2, and 6.6 for vocabularies of a domain.
    """
    directory, last = Path(out), None
    check(recipe, directory, overwrite=overwrite)
    stages = directory.absolute() / "stages"  # a resumed run may name `out` in another way
    arguments = recipe.arguments(stages)
    first, is_main = partial(arguments.main_process_first, local=False), arguments.process_index == 0
    with first():
        if is_main:
            prepare_directory(directory, recipe, overwrite)
    if recipe.vocabulary is not None:
        last = _change_vocabulary(recipe.vocabulary, recipe.model, stages, first)
        if is_main:
            _write_facts(stages, directory)
    last = run_fine_tuning(recipe, recipe.model, last, stages)
    with first():
        if is_main:
            finish_directory(directory, last, leave=(FACTS, _CALIBRATION))
    return Model.from_pretrained(directory)


def _change_vocabulary(
    config: VocabularyConfig,
    source: SparseModel,
    stages: Path,
    first: Callable[[], AbstractContextManager[Any]],
) -> Path:
    """Run all stages before fine-tuning, and return the directory of the last one.

    Args:
        config: The stages.
        source: Model on the old vocabulary.
        stages: Directory of the stages.
        first: Makes a context in which the first process is finished before the others begin.
    """
    texts, vocabulary = read_corpora(config.texts), config.target
    with first():
        if isinstance(vocabulary, DomainConfig):
            make_target = partial(train_vocabulary, texts, config=vocabulary)
            target = str(run_stage(stages / "vocabulary", make_target))
        else:
            target = vocabulary
        initialize = partial(_initialize, source=source, target=target, config=config, texts=texts)
        last = run_stage(stages / "initialized", initialize)
    if (adaptation := config.adaptation) is not None:
        before = last

        def adapt_model(folder: Path) -> None:
            terms = Tokenizer.from_pretrained(local_directory(target)) if config.head_only else None
            model, new = Model.from_pretrained(before), read_new_tokens(before)
            adapt(model, adaptation, folder, is_new=new, labels=terms)

        last = run_stage(stages / "adapted", adapt_model, resumes=True)
    if config.calibration is not None:
        calibrate_model = partial(_calibrate, source=last, config=config.calibration, texts=texts)
        with first():
            last = run_stage(stages / "calibrated", calibrate_model)
    return last


def _initialize(
    folder: Path, source: SparseModel, target: str, config: VocabularyConfig, texts: Source[str]
) -> None:
    """Write the model on the new vocabulary, and the facts of the transfer."""
    model = make_model(source.model_copy(update={"queries": None}))
    model.name = source.name
    transfer = transfer_vocabulary(model, target, config.initialization, texts=islice(texts, _COUNTED))
    transfer.facts["fragmentation"] = {
        name: fragmentation(tokenizer, islice(texts, _CUT))
        for name, tokenizer in (("source", model.tokenizer), ("target", transfer.model.tokenizer))
    }
    if config.head_only:
        transfer = replace(transfer, model=head_only(model, transfer.model))
    transfer.save(folder)


def _calibrate(folder: Path, source: Path, config: CalibrationConfig, texts: Source[str]) -> None:
    """Write the calibrated model, and the facts of the calibration."""
    model = Model.from_pretrained(source)
    facts = calibrate(model, texts, config).facts()
    model.save_pretrained(folder)
    (folder / _CALIBRATION).write_text(json.dumps(facts), encoding="utf-8")


def _write_facts(stages: Path, directory: Path) -> None:
    """Write the facts of all stages as JSON and as a page."""
    facts = read_json(stages / "initialized" / FACTS)
    if (calibration := stages / "calibrated" / _CALIBRATION).is_file():
        facts["calibration"] = read_json(calibration)
    write_text(directory / FACTS, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    write_report(facts, directory / "report.html")
