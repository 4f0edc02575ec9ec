"""``irkit study``: train the variants of a recipe with several seeds, and compare them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from irkit.bars import bar
from irkit.cli.options import check_verb, goes_on
from irkit.cli.output import note, show_table
from irkit.errors import BadValueError, IrkitError

if TYPE_CHECKING:
    from irkit.study import Cell, Trial

__all__ = ["study"]


def study(
    file: Annotated[
        Path | None, typer.Argument(metavar="STUDY", help="YAML file that names a recipe and its variants.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of runs and report.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at once; by default one for each GPU.")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of the recipe of all variants."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the recipes, list the runs.")] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Only write the report of this directory again.")
    ] = None,
) -> None:
    """Train and compare variants of a recipe.

    Each is trained with several seeds. The same command again goes on where it stopped: runs that finished
    stay as they are, those that failed are tried again.
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
    with bar("training", "runs", len(runs)) as update:
        update(sum(trial.finished for trial in runs))

        def ended(trial: Trial, seconds: float) -> None:
            said, why = ("failed", f": {trial.failure}") if trial.failure else ("finished", "")
            note(f"{trial.variant}, seed {trial.seed}: {said} in {seconds:,.0f} s{why}")
            update(1)

        with goes_on("study"):
            runs = run_study(config, out, jobs=jobs, progress=ended)
    _show(write_report(out), out)
    if failed := [trial for trial in runs if trial.failure]:
        raise IrkitError(
            f"{len(failed)} of {len(runs)} runs failed, such as {failed[0].variant!r} with seed "
            f"{failed[0].seed}: {failed[0].failure}; see {failed[0].beside('.log')}"
        )


def _show(cells: list[Cell], out: Path) -> None:
    header = ["variant", "measure", "dataset", "seeds", "mean", "deviation", "difference", "p (holm)"]
    rows = [
        [
            *(cell.variant, cell.measure, cell.dataset, len(cell.seeds), cell.mean),
            *(
                "" if value is None else value
                for value in (cell.deviation, cell.difference, cell.corrected_p)
            ),
        ]
        for cell in cells
    ]
    if rows:
        show_table(header, rows)
    note(f"report: {out / 'report.md'}")
