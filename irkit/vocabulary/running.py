"""A vocabulary recipe carried out, stage by stage; what is complete is not done again.

DIR/ is a model directory, which ``modules.json`` completes at the end, and beside the model it holds::

    recipe.yaml                the whole recipe
    vocabulary_transfer.json   what was done to the vocabulary; report.html shows it
    evaluation.jsonl           measures of the fine-tuned model
    stages/vocabulary/         a tokenizer, if one was trained
    stages/initialized/        the model on the new vocabulary
    stages/adapted/            after masked language modelling
    stages/calibrated/         after calibration
    stages/fine_tuned/         after the training of a retriever, as `irkit train` leaves it
"""

from __future__ import annotations

import json
import os
import tempfile
from itertools import islice
from pathlib import Path

from irkit.config import read_json
from irkit.errors import ConfigError, StorageError
from irkit.model import Model
from irkit.model.hub import local_directory
from irkit.tokenizer import Tokenizer
from irkit.training.model_recipe import SparseModel, make_model
from irkit.training.running import begin_place, check_place, end_place, prepare, train
from irkit.training.stages import DONE, publish_stage, stage, stage_model
from irkit.training.texts import first_texts, read_corpora
from irkit.vocabulary.adaptation import adapt
from irkit.vocabulary.calibration import calibrate
from irkit.vocabulary.domain import DomainConfig, fragmentation, train_vocabulary
from irkit.vocabulary.recipe import VocabularyConfig, VocabularyRecipe
from irkit.vocabulary.report import write_report
from irkit.vocabulary.transferring import FACTS, read_new_tokens, transfer_vocabulary

__all__ = ["check", "run"]

_CALIBRATION = "calibration.json"
_COUNTED, _CUT = 100_000, 10_000  # texts: for the frequencies of tokens, for the pieces of words


def check(recipe: VocabularyRecipe, out: str | Path, *, overwrite: bool = False) -> None:
    """Find out whether all stages of a recipe can be carried out, of which nothing is written.

    Args:
        recipe: See `VocabularyRecipe.resolve`.
        out: Directory of the result.
        overwrite: Whether what is there may be replaced.

    Raises:
        ConfigError: Parts of the recipe do not fit each other.
        StorageError: A model or a file is missing, or something else is in ``out``.
        BadValueError: A file does not hold what it should.
    """
    check_place(Path(out), recipe, overwrite)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "vocabulary recipe: got one of several processes, expected the only one; leave out data, and "
            "train what comes of it with irkit train"
        )
    plan = recipe.vocabulary
    with tempfile.TemporaryDirectory() as scratch:  # for what trainers make before they begin
        if recipe.data:
            prepare(recipe.fine_tuning(recipe.model), Path(scratch) / "fine_tuned")
        else:
            make_model(recipe.model)
        if plan is not None and plan.adaptation is not None:
            plan.adaptation.arguments(Path(scratch) / "adapted", {})
            first_texts(read_corpora(plan.adaptation.texts), 1)
            if plan.adaptation.validation is not None:
                first_texts(read_corpora([plan.adaptation.validation]), 1)
    if plan is None:
        return
    if isinstance(plan.target, str):
        Tokenizer.from_pretrained(local_directory(plan.target))
    first_texts(read_corpora(plan.texts), 1)


def run(recipe: VocabularyRecipe, out: str | Path, *, overwrite: bool = False) -> Model:
    """Carry out a recipe; what was interrupted goes on with the stage, and the step, it had come to.

    Args:
        recipe: See `VocabularyRecipe.resolve`.
        out: Directory of the result.
        overwrite: Replace what another recipe, or one that has finished, left there.

    Returns:
        The model of the last stage.

    Raises:
        ConfigError: Parts of the recipe do not fit each other.
        StorageError: A model or a file is missing, or something else is in ``out``.
        BadValueError: A file does not hold what it should, or calibration leaves a dead or a dense model.
        TrainingError: A loss or a gradient became NaN or infinite.

    Examples:
        >>> recipe = VocabularyRecipe.resolve("vocabulary_transfer.yaml")  # doctest: +SKIP
        >>> run(recipe, "scifact-splade").encode_query("gene expression")  # doctest: +SKIP

    Source: "Bridging Vocabulary Gaps", section 4.2, and 6.6 for vocabularies of a domain.
    """
    place = Path(out)
    check(recipe, place, overwrite=overwrite)
    begin_place(place, recipe, overwrite)
    stages, model = place.absolute() / "stages", recipe.model  # the same when it goes on, however out is said
    last = stages / "fine_tuned"
    if recipe.vocabulary is not None:
        last = _change_vocabulary(recipe.vocabulary, model, stages)
        _report(stages, place)
    if recipe.data:
        start = model if recipe.vocabulary is None else stage_model(model, last)
        last = stages / "fine_tuned"
        if not (last / DONE).is_file():
            train(recipe.fine_tuning(start), last)
    publish_stage(last, place, (FACTS, _CALIBRATION))
    end_place(place)
    return Model.from_pretrained(place)


def _change_vocabulary(config: VocabularyConfig, source: SparseModel, stages: Path) -> Path:
    """Carry out all stages before fine-tuning; the directory of the last one."""
    texts, target = read_corpora(config.texts), config.target
    if isinstance(target, DomainConfig):
        with stage(stages / "vocabulary") as aside:
            if aside is not None:
                train_vocabulary(texts, aside, target)
        target = str(stages / "vocabulary")
    last = stages / "initialized"
    with stage(last) as aside:
        if aside is not None:
            model = make_model(source.model_copy(update={"queries": None}))
            model.name = source.name
            moved = transfer_vocabulary(model, target, config.initialization, texts=islice(texts, _COUNTED))
            moved.facts["fragmentation"] = {
                side: fragmentation(each.tokenizer, islice(texts, _CUT))
                for side, each in (("source", model), ("target", moved.model))
            }
            moved.save(aside)
    if config.adaptation is not None:
        adapted = stages / "adapted"
        if not (adapted / DONE).is_file():
            adapt(Model.from_pretrained(last), config.adaptation, adapted, is_new=read_new_tokens(last))
        last = adapted
    if config.calibration is not None:
        calibrated = stages / "calibrated"
        with stage(calibrated) as aside:
            if aside is not None:
                model = Model.from_pretrained(last)
                facts = calibrate(model, texts, config.calibration).facts()
                model.save_pretrained(aside)
                (aside / _CALIBRATION).write_text(json.dumps(facts), encoding="utf-8")
        last = calibrated
    return last


def _report(stages: Path, place: Path) -> None:
    """Write what the stages say about themselves, as JSON and as a page."""
    facts = read_json(stages / "initialized" / FACTS)
    if (calibration := stages / "calibrated" / _CALIBRATION).is_file():
        facts["calibration"] = read_json(calibration)
    try:
        text = json.dumps(facts, indent=1, ensure_ascii=False)
        (place / FACTS).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"writing {place / FACTS}: {error.strerror}") from error
    write_report(facts, place / "report.html")
