"""The report of a study: tables in Markdown, a plot per measure, and all numbers as JSON lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from irkit.study.query_scores import SCORES, Scores, write_scores
from irkit.study.results import AVERAGE, GEOMETRIC, Cell, tabulate, tabulate_costs
from irkit.study.study_config import StudyConfig
from irkit.study.trial import Trial, trials
from irkit.training.result_files import COSTS, Results, read_costs, read_results
from irkit.training.validation import EvaluationConfig, parse_collections
from irkit.utils.atomic import write_text
from irkit.utils.figures import draw_svg

FRAGMENTATION = "tokens per word"
_COLORS = {"better": "#0072b2", "worse": "#d55e00", "no significant difference": "#999999"}
_COLUMNS = 3  # of panels
_METHOD = """\
A cell is the mean over the seeds ± their standard deviation, and how many there are where some are missing.
† marks p < 0.05 against the baseline: a two-sided paired t-test over the queries, of means over the
seeds{average}, corrected by Holm's method for the {others} variants tested under the same measure and
dataset. It tells whether the difference would hold on other queries; the deviation tells what another seed
changes."""
_OF_AVERAGE = " (for the average, of the mean over datasets of the mean difference)"


def write_report(out: str | Path, baseline: str | None = None) -> list[Cell]:
    """Write ``report.md``, its plots, ``results.jsonl`` and ``scores.jsonl.gz`` from the finished runs.

    Args:
        out: Directory of a study.
        baseline: Name of the variant that the others are tested against; None takes the baseline of the
            study.

    Returns:
        The cells of the measures and of the costs, see `tabulate` and `tabulate_costs`.

    Raises:
        StorageError: The directory holds no study.
        ConfigError: The study has no variant ``baseline``.
        MissingDependencyError: matplotlib is not installed.
    """
    out = Path(out)
    study = StudyConfig.read(out / "study.yaml")
    if baseline is not None:
        study = StudyConfig.parse(study.model_dump() | {"baseline": baseline}, str(out))
    runs = trials(study, out)
    scores: dict[str, dict[int, Results]] = {name: {} for name in study.changes()}
    costs: dict[str, dict[int, dict[tuple[str, str], float]]] = {name: {} for name in study.changes()}
    for trial in runs:
        if trial.finished:
            scores[trial.variant][trial.seed] = read_results(trial.results)
            if (path := trial.folder / COSTS).exists():
                costs[trial.variant][trial.seed] = read_costs(path)
                if (fragmentation := trial.tokens_per_word) is not None:
                    known = costs[trial.variant][trial.seed]
                    known |= {(FRAGMENTATION, dataset): fragmentation for _, dataset in known}
    collections = _collections(runs)
    measured_on = {dataset for seeds in scores.values() for found in seeds.values() for _, dataset in found}
    groups = _groups(collections, measured_on)
    tested = [config.title for config in collections if config.at_end]  # only finished models are measured
    write_scores(Scores(study.name, study.baseline, groups, scores), out / SCORES)
    measured = tabulate(scores, study.baseline, tested, groups)
    cells = measured + tabulate_costs(costs, study.baseline, tested)
    rows = [cell._asdict() | {"significant": cell.significant()} for cell in cells]
    write_text(out / "results.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    plots: dict[str, str] = {}
    for measure in dict.fromkeys(cell.measure for cell in measured):
        name = re.sub(r"[^A-Za-z0-9]+", "-", measure).strip("-")
        taken = f"{name}.svg" in plots.values()  # by P@5, for P_5
        plots[measure] = f"{name}-{len(plots)}.svg" if taken else f"{name}.svg"
        panel = [cell for cell in measured if cell.measure == measure and cell.dataset != GEOMETRIC]
        write_text(out / plots[measure], draw_study(panel, study.baseline))
    write_text(out / "report.md", "\n".join(_report_lines(study, runs, cells, plots)) + "\n")
    return cells


def _groups(collections: Iterable[EvaluationConfig], datasets: Iterable[str]) -> dict[str, str]:
    """Return the group of each dataset that has one; several heads have datasets ``title/head`` each."""
    by_title = {config.title: config.group for config in collections if config.group}
    groups = {name: by_title[name] for name in datasets if name in by_title}
    for name in {*datasets} - {*groups}:
        title, _, head = name.rpartition("/")
        if title in by_title:
            groups[name] = f"{by_title[title]}/{head}"
    return dict(sorted(groups.items()))


def _collections(runs: Iterable[Trial]) -> list[EvaluationConfig]:
    """Return the collections that any variant is measured on, each name once."""
    by_title: dict[str, EvaluationConfig] = {}
    for variant in {trial.variant: trial for trial in runs}.values():
        for config in parse_collections(variant.recipe.get("evaluation", [])):
            by_title.setdefault(config.title, config)
    return list(by_title.values())


def _report_lines(
    study: StudyConfig, runs: Sequence[Trial], cells: Sequence[Cell], plots: dict[str, str]
) -> Iterator[str]:
    # title, and how far the study is
    finished = sum(trial.finished for trial in runs)
    variants = study.changes()
    yield f"# {study.name}\n"
    seeds = ", ".join(map(str, study.seeds))
    yield f"{len(variants)} variants, seeds {seeds}: {finished} of {len(runs)} runs finished."
    # per measure: a table of means, the plot, and a table of differences
    for measure, plot in plots.items():
        table = {(cell.variant, cell.dataset): cell for cell in cells if cell.measure == measure}
        datasets = list(dict.fromkeys(dataset for _, dataset in table))
        yield f"\n## {measure}\n"
        yield from _header("variant", *datasets)
        best = {name: max(cell.mean for (_, d), cell in table.items() if d == name) for name in datasets}
        for variant in variants:
            row = [table.get((variant, dataset)) for dataset in datasets]
            name = f"{variant} (baseline)" if variant == study.baseline else variant
            yield from _row([name, *(_value(cell, best, study) for cell in row)])
        yield f"\n![{measure} of every run]({plot})\n"
        yield "Difference to the baseline, and corrected p:\n"
        yield from _header("variant", *datasets)
        for variant in variants:
            if variant != study.baseline:
                row = [table.get((variant, dataset)) for dataset in datasets]
                yield from _row([variant, *map(_difference, row)])
    # how the numbers were made
    if plots:
        average = _OF_AVERAGE if any(cell.dataset == AVERAGE for cell in cells) else ""
        yield "\n" + _METHOD.format(
            average=average, others=len({cell.variant for cell in cells if cell.p is not None})
        )
    # what storing and comparing vectors costs
    names = dict.fromkeys(cell.measure for cell in cells if cell.measure not in plots)
    for cost in names:
        table = {(cell.variant, cell.dataset): cell for cell in cells if cell.measure == cost}
        datasets = list(dict.fromkeys(dataset for _, dataset in table))
        yield f"\n## Cost: {cost}\n"
        yield from _header("variant", *datasets)
        for variant in variants:
            row = [table.get((variant, dataset)) for dataset in datasets]
            yield from _row([variant, *("-" if cell is None else f"{cell.mean:,.4g}" for cell in row)])
    # what each variant changes, and what failed
    yield "\n## Variants\n"
    yield from _row(["variant", "changes of the recipe"])
    yield from _row(["---", "---"])
    for variant, changes in variants.items():
        items = [f"`{key}: {json.dumps(value, ensure_ascii=False)}`" for key, value in changes.items()]
        yield from _row([variant, ", ".join(items) or "none"])
    if failed := [trial for trial in runs if trial.failure]:
        yield "\n## Failed\n"
        yield from (f"* {trial.variant}, seed {trial.seed}: {trial.failure}" for trial in failed)


def _header(first: str, *numbers: str) -> Iterator[str]:
    yield from _row([first, *numbers])
    yield from _row(["---", *["---:"] * len(numbers)])


def _row(cells: Sequence[str]) -> Iterator[str]:
    yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(cell: Cell | None, best: dict[str, float], study: StudyConfig) -> str:
    if cell is None:
        return "-"
    mean = f"**{cell.mean:.4f}**" if cell.mean == best[cell.dataset] else f"{cell.mean:.4f}"
    deviation = "" if cell.deviation is None else f" ± {cell.deviation:.4f}"
    count = "" if len(cell.seeds) == len(study.seeds) else f" ({len(cell.seeds)} of {len(study.seeds)})"
    return mean + deviation + ("†" if cell.significant() else "") + count


def _difference(cell: Cell | None) -> str:
    if cell is None or cell.difference is None:
        return "-"
    if cell.corrected_p is None:
        return f"{cell.difference:+.4f}"
    p = f"{cell.corrected_p:.2g}" if cell.corrected_p >= 1e-4 else "<0.0001"
    return f"{cell.difference:+.4f} ({p})"


def draw_study(cells: Sequence[Cell], baseline: str) -> str:
    """Draw one panel per dataset with one row per variant: a ring per seed, and a disc at their mean.

    A dashed line marks the mean of the baseline. Discs are blue if the variant is significantly better than
    the baseline, orange if it is worse, and grey otherwise.

    Args:
        cells: Cells of one measure.
        baseline: Name of the baseline.

    Returns:
        The text of an SVG file.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    variants = list(dict.fromkeys(cell.variant for cell in cells))
    datasets = list(dict.fromkeys(cell.dataset for cell in cells))
    columns = min(len(datasets), _COLUMNS)
    rows = -(-len(datasets) // columns)

    def draw(figure: Any) -> None:
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis in axes.flat[len(datasets) :]:
            axis.set_visible(False)
        for axis, dataset in zip(axes.flat, datasets, strict=False):
            panel = [cell for cell in cells if cell.dataset == dataset]
            for cell in panel:
                _draw_cell(axis, cell, variants.index(cell.variant))
                if cell.variant == baseline:
                    axis.axvline(cell.mean, color="#808080", linestyle="--", linewidth=1, zorder=1)
            axis.set(title=dataset, xlabel=panel[0].measure, ylim=(len(variants) - 0.5, -0.5))
            axis.margins(x=0.05)
            axis.locator_params(axis="x", nbins=4)
            axis.grid(axis="y", visible=False)
            axis.set_yticks(range(len(variants)), variants if axis in axes[:, 0] else [""] * len(variants))
            for label in axis.get_yticklabels():
                label.set_fontweight("bold" if label.get_text() == baseline else "normal")
        handles = [axes[0, 0].scatter([], [], color=color, label=name) for name, color in _COLORS.items()]
        figure.legend(handles=handles, loc="outside upper left", ncols=len(_COLORS), handletextpad=0)

    return draw_svg(draw, max(4.4, 1.2 + 2.4 * columns), 0.4 + rows * (0.7 + 0.22 * len(variants)))


def _draw_cell(axis: Any, cell: Cell, row: int) -> None:
    better, worse, same = _COLORS.values()
    color = same if not cell.significant() else better if (cell.difference or 0) > 0 else worse
    axis.scatter(list(cell.seeds.values()), [row] * len(cell.seeds), 20, facecolors="none", edgecolors=color)
    axis.scatter([cell.mean], [row], 45, color=color)
