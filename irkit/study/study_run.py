"""Train the runs of a study, each in a process of its own, several at once if there are several GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from irkit.errors import BadValueError, ConfigError, IrkitError, LockedError, require
from irkit.study.study_config import StudyConfig
from irkit.study.study_report import write_report
from irkit.study.trial import Trial, trials
from irkit.utils.atomic import check_folder, explained, write_text
from irkit.utils.locks import try_lock

if TYPE_CHECKING:
    from irkit.training.train_recipe import TrainRecipe

IRKIT = [sys.executable, "-m", "irkit"]
"""Command that trains a run; a verb, the recipe, --out and a folder follow."""
_POLL = 0.05  # seconds


class _Process(NamedTuple):
    trial: Trial
    process: subprocess.Popen[bytes]
    slot: dict[str, str]
    start: float
    log_start: int  # position in the log where its output begins


def check_study(study: StudyConfig, out: Path) -> list[Trial]:
    """Check recipes, directory and packages of a study before any run starts.

    Args:
        study: The study.
        out: Directory of the study; it may exist.

    Returns:
        All runs, finished ones included.

    Raises:
        ConfigError: The recipe of a variant is wrong, or a run in the directory has another recipe.
        StorageError: The directory cannot be written to.
        MissingDependencyError: matplotlib, which draws the report, is not installed.
    """
    check_folder(out, f"study: {out}")
    require("matplotlib", "plots", "The report of a study")
    runs = trials(study, out)
    for trial in runs:
        try:
            recipe = _resolve(trial)
        except ConfigError as error:
            raise ConfigError(f"variant {trial.variant!r}: {error}") from error
        if not recipe.evaluation:
            raise ConfigError(f"variant {trial.variant!r}: nothing to compare; give the recipe an evaluation")
        trial.check()
    return runs


def run_study(
    study: StudyConfig | Mapping[str, Any] | str | Path,
    out: str | Path,
    *,
    jobs: int | None = None,
    overrides: Iterable[str] = (),
    progress: Callable[[Trial, float], None] | None = None,
) -> list[Trial]:
    """Train every run that has not finished, and write the report after each.

    Before the first run, the models, data and collections of all variants are opened once; if no variant can
    be trained, no run starts. Killed runs resume from their last checkpoint, failed runs are tried again. A
    failure does not stop the other runs.

    Args:
        study: A `StudyConfig`, its keys and values, or a YAML file.
        out: Directory of recipes, logs, models, results and report.
        jobs: Number of runs at once; None is one per GPU, or 1 without a GPU. Each run gets a GPU, if there
            is one, and an equal share of the CPU cores.
        overrides: Changes of the recipe of all variants, such as ``"train.max_steps=10"``.
        progress: Called after each run, with the run and the seconds that it took.

    Returns:
        All runs; their attributes `finished` and `failure` say how they ended.

    Raises:
        ConfigError: The study or the recipe of a variant is wrong; nothing has run.
        IrkitError: No variant can be trained, because a model or a file is missing; nothing has run.
        LockedError: A run of an earlier call is still running.

    Examples:
        >>> from irkit.study import run_study
        >>> run_study("examples/studies/local.yaml", "study", jobs=2)  # doctest: +SKIP
    """
    study, out = StudyConfig.resolve(study, overrides), Path(out)
    slots = _slots(jobs)
    runs = check_study(study, out)
    waiting = [trial for trial in runs if not trial.finished]
    _check_parts_of(waiting)
    with explained(f"study: making {out}"):
        out.mkdir(parents=True, exist_ok=True)
    write_text(out / "study.yaml", study.to_yaml())
    # a run per free slot; the report is written again after each
    running: list[_Process] = []
    try:
        while waiting or running:
            while waiting and slots:
                running.append(_start(waiting.pop(0), slots.pop(0)))
            ended = [run for run in running if run.process.poll() is not None]
            for run in ended:
                running.remove(run)
                slots.append(run.slot)
                _finish(run, study.keep_models)
                try:
                    write_report(out)
                except IrkitError as error:  # two runs cannot be compared; the others go on
                    warnings.warn(f"study: no report is written: {error}", stacklevel=2)
                if progress is not None:
                    progress(run.trial, time.monotonic() - run.start)
            if not ended:
                time.sleep(_POLL)
    finally:  # an interruption ends the runs, too
        for run in running:
            run.process.terminate()
        for run in running:
            run.process.wait()
    write_report(out)
    return runs


def _resolve(trial: Trial) -> TrainRecipe:
    from irkit.training.pretraining.pretrain_recipe import PretrainRecipe
    from irkit.training.train_recipe import TrainRecipe
    from irkit.vocabulary.transfer_recipe import VocabularyRecipe

    kinds = {"train": TrainRecipe, "pretrain": PretrainRecipe, "transfer-vocab": VocabularyRecipe}
    return kinds[_verb(trial)].resolve(trial.recipe)


def _check_parts_of(waiting: Iterable[Trial]) -> None:
    """Open the parts of all recipes (see `check_parts`), and warn about each variant that cannot be trained.

    Raises:
        IrkitError: No variant can be trained.
    """
    recipes = {trial.variant: _resolve(trial) for trial in waiting}
    failures = check_parts(recipes)
    if failures and len(failures) == len(recipes):
        raise IrkitError(
            f"study: no variant can be trained, none was started: {next(iter(failures.values()))}"
        )
    for variant, error in failures.items():
        warnings.warn(f"study: variant {variant!r} cannot be trained: {error}", stacklevel=3)


def check_parts(recipes: Mapping[str, TrainRecipe]) -> dict[str, IrkitError]:
    """Open the models, data, texts and collections of recipes, to find errors before any training.

    A part that several recipes name is opened once.

    Args:
        recipes: Recipes by variant.

    Returns:
        For each variant that cannot be trained, its first error.
    """
    errors: dict[str, IrkitError | None] = {}
    failures: dict[str, IrkitError] = {}
    for variant, recipe in recipes.items():
        try:
            recipe.check_files()
        except IrkitError as error:
            failures[variant] = error
            continue
        for kind, setting, open_part in _parts(recipe):
            key = f"{kind} {setting!r}"
            if key not in errors:
                errors[key] = None
                try:
                    open_part(setting)
                except IrkitError as error:
                    errors[key] = error
            if (failure := errors[key]) is not None:
                failures.setdefault(variant, failure)
    return failures


def _parts(recipe: TrainRecipe) -> Iterator[tuple[str, Any, Callable[[Any], object]]]:
    """List the parts that a recipe names: models, tokenizers, texts, data and evaluations.

    Yields:
        The kind of a part, such as ``"model"``; its value in the recipe; and a function that opens the part
        when it is called with this value.
    """
    from irkit.model.hub import local_directory
    from irkit.tokenizer import Tokenizer
    from irkit.training.model_recipe import make_model
    from irkit.training.pretraining.corpus import first_texts, read_corpora
    from irkit.training.pretraining.pretrain_recipe import PretrainRecipe
    from irkit.training.training_data import check, open_data
    from irkit.training.validation import open_collections
    from irkit.vocabulary.transfer_recipe import VocabularyRecipe

    corpora: list[str | None] = []
    if isinstance(recipe, PretrainRecipe) and recipe.pretraining is not None:
        corpora = [*recipe.pretraining.texts, recipe.pretraining.validation]
    if isinstance(recipe, VocabularyRecipe) and (plan := recipe.vocabulary) is not None:
        corpora = list(plan.texts)
        if plan.adaptation is not None:
            corpora += [*plan.adaptation.texts, plan.adaptation.validation]
        if isinstance(plan.target, str):
            yield "tokenizer", plan.target, lambda name: Tokenizer.from_pretrained(local_directory(name))
    # a model whose vocabulary must be trained first cannot be made yet
    if not (isinstance(recipe, PretrainRecipe) and recipe.trained_vocabulary is not None):
        yield "model", recipe.model, make_model
    for corpus in filter(None, corpora):
        yield "texts", corpus, lambda source: first_texts(read_corpora([source]), 1)
    for data in recipe.data:
        yield "data", data, lambda config: check(open_data([config]))
    for collection in recipe.evaluation:
        yield "evaluation", collection, lambda config: open_collections([config])


def _slots(jobs: int | None) -> list[dict[str, str]]:
    """Return the environment variables for each of ``jobs`` slots; a slot runs one process after another.

    The variables give each slot a GPU, which several slots share if there are more slots than GPUs, and an
    equal share of the CPU cores. ``jobs`` None makes as many slots as GPUs, or one without a GPU.

    Raises:
        BadValueError: ``jobs`` is below 1.
    """
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    gpus = visible.split(",")[:count] if visible else [str(number) for number in range(count)]
    jobs = max(1, len(gpus)) if jobs is None else jobs
    if jobs < 1:
        raise BadValueError(f"study: got {jobs} jobs, expected 1 or more")
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    shared = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    return [
        shared | ({"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}) for slot in range(jobs)
    ]


def _verb(trial: Trial) -> str:
    """Return the subcommand of ``irkit`` for the recipe: ``train``, ``pretrain`` or ``transfer-vocab``.

    The keys ``pretraining`` and ``vocabulary`` decide, even if their value is null: in this way a variant may
    leave a stage out.
    """
    verbs = {"pretraining": "pretrain", "vocabulary": "transfer-vocab"}
    return next((verb for key, verb in verbs.items() if key in trial.recipe), "train")


def _start(trial: Trial, slot: dict[str, str]) -> _Process:
    """Start the process of a run, after its recipe is written; the process writes to the run's ``.log``.

    Args:
        trial: Run to start.
        slot: Environment variables of the process, see `_slots`.

    Raises:
        LockedError: An earlier process of the run is still alive.
    """
    recipe = trial.write_recipe()
    trial.beside(".failed").unlink(missing_ok=True)
    path = trial.beside(".log")
    with explained(f"writing {path}"), path.open("ab") as log:
        # the process inherits the lock with its output: the lock lasts as long as the process does
        if not try_lock(log):
            raise LockedError(
                f"study: {trial.folder} is still being trained by an earlier call; wait for it, or end it"
            )
        command = [*IRKIT, _verb(trial), str(recipe), "--out", str(trial.folder)]
        process = subprocess.Popen(
            command, env=slot, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        return _Process(trial, process, slot, time.monotonic(), log.tell())


def _finish(ended: _Process, keep_model: bool) -> None:
    """Handle the end of a run's process.

    If the run failed, write the exit code and the last line of its output to its ``.failed`` file. If the run
    succeeded and ``keep_model`` is False, delete its model.
    """
    trial, code = ended.trial, ended.process.returncode
    if code == 0 and trial.finished:
        if not keep_model:
            trial.drop_model()
        return
    with trial.beside(".log").open("rb") as log:
        log.seek(ended.log_start)
        lines = log.read().decode("utf-8", "replace").split("\n")
    output = [line.strip() for line in lines if line.strip()]
    reason = output[-1].removeprefix("irkit: error: ") if output else "it said nothing"
    write_text(trial.beside(".failed"), f"exit code {code}: {reason}")
