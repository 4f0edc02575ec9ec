"""``irkit study``: train variants of a recipe with several seeds, and compare them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from irkit.cli.output import note, show_table
from irkit.cli.recipe_files import check_verb, hint_resume
from irkit.cli.shared_options import set_option
from irkit.errors import BadValueError, IrkitError
from irkit.utils.progress import progress_bar

if TYPE_CHECKING:
    from irkit.study import Cell, Trial


def study(
    file: Annotated[
        Path | None, typer.Argument(metavar="STUDY", help="YAML file that names a recipe and its variants.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory to write runs and report to.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Number of runs at a time; default: one per GPU.")
    ] = None,
    override: Annotated[list[str] | None, set_option("Set a key of the recipe, for all variants.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the recipes and list the runs.")] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the report of this directory anew, and stop.")
    ] = None,
) -> None:
    """Train and compare variants of a recipe.

    Each variant is trained with several seeds. After an interruption, the same command resumes: it keeps
    finished runs and repeats failed ones.
    """
    from irkit.study import StudyConfig, check_study, run_study, write_report

    if report is not None:
        if file is not None or out is not None:
            raise BadValueError("irkit study: --report DIR goes alone, without a study and --out")
        _show(write_report(report), report)
        return
    if file is None or out is None:
        raise BadValueError("irkit study: expected STUDY.yaml --out DIR, or --report DIR")
    check_verb(file, "study")
    config = StudyConfig.resolve(file, override or ())
    runs = check_study(config, out)
    if dry_run:
        rows = [[trial.variant, trial.seed, "finished" if trial.finished else "to do"] for trial in runs]
        show_table(["variant", "seed", "state"], rows)
        return
    with progress_bar("training", "runs", len(runs)) as update:
        update(sum(trial.finished for trial in runs))

        def report_end(trial: Trial, seconds: float) -> None:
            result, reason = ("failed", f": {trial.failure}") if trial.failure else ("finished", "")
            note(f"{trial.variant}, seed {trial.seed}: {result} in {seconds:,.0f} s{reason}")
            update(1)

        with hint_resume(" to go on with this study"):
            runs = run_study(config, out, jobs=jobs, progress=report_end)
    _show(write_report(out), out)
    if failed := [trial for trial in runs if trial.failure]:
        raise IrkitError(
            f"{len(failed)} of {len(runs)} runs failed, such as {failed[0].variant!r} with seed "
            f"{failed[0].seed}: {failed[0].failure}; see {failed[0].beside('.log')}"
        )


def _show(cells: list[Cell], out: Path) -> None:
    header = ["variant", "measure", "dataset", "seeds", "mean", "deviation", "difference", "p (holm)"]
    rows = []
    for cell in cells:
        optional = (cell.deviation, cell.difference, cell.corrected_p)
        values = ("" if value is None else value for value in optional)
        rows.append([cell.variant, cell.measure, cell.dataset, len(cell.seeds), cell.mean, *values])
    if rows:
        show_table(header, rows)
    note(f"report: {out / 'report.md'}")
