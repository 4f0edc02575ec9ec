"""Training the runs of a study, each in a process of its own, several at once where there are devices."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from irkit.errors import BadValueError, ConfigError, IrkitError, LockedError
from irkit.files import check_folder, explained, write_text
from irkit.study.config import StudyConfig
from irkit.study.parts import check_parts
from irkit.study.report import write_report
from irkit.study.trial import Trial, trials

if TYPE_CHECKING:
    from irkit.training.recipe import TrainRecipe

__all__ = ["check_study", "run_study"]

IRKIT = [sys.executable, "-m", "irkit"]  # then a verb, the recipe, --out and a folder
_POLL = 0.05  # seconds


class _Process(NamedTuple):
    trial: Trial
    process: subprocess.Popen[bytes]
    slot: dict[str, str]
    start: float
    log_start: int  # where in the log its output begins


def check_study(study: StudyConfig, out: Path) -> list[Trial]:
    """Check everything that can be known before a training.

    Args:
        study: What to run.
        out: Where; may exist.

    Returns:
        All runs, those included that have finished.

    Raises:
        ConfigError: The recipe of a variant is wrong, or another one than what was begun there.
        StorageError: The directory cannot be written to.
    """
    check_folder(out, f"study: {out}")
    found = trials(study, out)
    for trial in found:
        try:
            recipe = _resolved(trial)
        except ConfigError as error:
            raise ConfigError(f"variant {trial.variant!r}: {error}") from error
        if not recipe.evaluation:
            raise ConfigError(f"variant {trial.variant!r}: nothing to compare; give the recipe an evaluation")
        trial.check()
    return found


def run_study(
    study: StudyConfig | Mapping[str, Any] | str | Path,
    out: str | Path,
    *,
    jobs: int | None = None,
    overrides: Iterable[str] = (),
    progress: Callable[[Trial, float], None] | None = None,
) -> list[Trial]:
    """Train every run that has not finished, and write the report after each.

    Before the first one, the models, data and collections of all variants are opened, each once; if no
    variant can be trained, none is started. Runs that were killed go on at their last checkpoint, those that
    failed are tried again. A failure does not stop the others.

    Args:
        study: What to run, see `StudyConfig`; or keys and values, or a YAML file.
        out: Directory of recipes, logs, models, results and report.
        jobs: Runs at once, by default one for each GPU. Each gets a GPU, or its share of the processor.
        overrides: ``"train.max_steps=10"``, changes of the recipe that all variants share.
        progress: Called with every run that ends, and the seconds it took.

    Returns:
        All runs; ask them whether they `finished`, and for their `failure`.

    Raises:
        ConfigError: The study or the recipe of a variant is wrong; nothing has run.
        IrkitError: No variant can be trained, as of a model or a file that is missing; nothing has run.
        LockedError: A run of an earlier call still goes on.

    Examples:
        >>> from irkit.study import run_study
        >>> run_study("examples/studies/local.yaml", "study", jobs=2)  # doctest: +SKIP
    """
    study, out = StudyConfig.resolve(study, overrides), Path(out)
    slots = _slots(jobs)
    found = check_study(study, out)
    waiting = [trial for trial in found if not trial.finished]
    _check_first(waiting)
    with explained(f"study: making {out}"):
        out.mkdir(parents=True, exist_ok=True)
    settings = yaml.safe_dump(study.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    write_text(out / "study.yaml", settings)
    running: list[_Process] = []
    try:
        while waiting or running:
            while waiting and slots:
                running.append(_start(waiting.pop(0), slots.pop(0)))
            ended = [each for each in running if each.process.poll() is not None]
            for each in ended:
                running.remove(each)
                slots.append(each.slot)
                _finish(each, study.keep_models)
                write_report(out)
                if progress is not None:
                    progress(each.trial, time.monotonic() - each.start)
            if not ended:
                time.sleep(_POLL)
    finally:  # of an interruption: nobody would look at what goes on
        for each in running:
            each.process.terminate()
        for each in running:
            each.process.wait()
    write_report(out)
    return found


def _resolved(trial: Trial) -> TrainRecipe:
    from irkit.training.pretraining.recipe import PretrainRecipe
    from irkit.training.recipe import TrainRecipe
    from irkit.vocabulary.recipe import VocabularyRecipe

    kinds = {"train": TrainRecipe, "pretrain": PretrainRecipe, "transfer-vocab": VocabularyRecipe}
    return kinds[_verb(trial)].resolve(trial.recipe)


def _check_first(waiting: Iterable[Trial]) -> None:
    """Raise where all runs would fail; name the variants that would where others can be trained."""
    recipes = {trial.variant: _resolved(trial) for trial in waiting}
    failures = check_parts(recipes)
    if failures and len(failures) == len(recipes):
        raise IrkitError(
            f"study: no variant can be trained, none was started: {next(iter(failures.values()))}"
        )
    for variant, error in failures.items():
        warnings.warn(f"study: variant {variant!r} cannot be trained: {error}", stacklevel=3)


def _slots(jobs: int | None) -> list[dict[str, str]]:
    """What each of the runs at once finds in its environment: a GPU, a share of the cores."""
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
        shared | ({"CUDA_VISIBLE_DEVICES": gpus[place % len(gpus)]} if gpus else {}) for place in range(jobs)
    ]


def _verb(trial: Trial) -> str:
    """Of the command that carries the recipe out; a key that is null leaves out a stage, for comparison."""
    verbs = {"pretraining": "pretrain", "vocabulary": "transfer-vocab"}
    return next((verb for key, verb in verbs.items() if key in trial.recipe), "train")


def _start(trial: Trial, slot: dict[str, str]) -> _Process:
    recipe = trial.write_recipe()
    trial.beside(".failed").unlink(missing_ok=True)
    path = trial.beside(".log")
    with explained(f"writing {path}"), path.open("ab") as log:
        try:  # the process inherits the lock with its output: it lasts as long as the process does
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(
                f"study: {trial.folder} is still being trained by an earlier call; wait for it, or end it"
            ) from None
        command = [*IRKIT, _verb(trial), str(recipe), "--out", str(trial.folder)]
        process = subprocess.Popen(
            command, env=slot, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        return _Process(trial, process, slot, time.monotonic(), log.tell())


def _finish(ended: _Process, keep_model: bool) -> None:
    trial, code = ended.trial, ended.process.returncode
    if code == 0 and trial.finished:
        if not keep_model:
            trial.drop_model()
        return
    with trial.beside(".log").open("rb") as log:
        log.seek(ended.log_start)
        lines = log.read().decode("utf-8", "replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    reason = said[-1].removeprefix("irkit: error: ") if said else "it said nothing"
    write_text(trial.beside(".failed"), f"exit code {code}: {reason}")
