"""Plot of the runs of a study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from irkit.study.results import Cell
from irkit.utils.figures import draw_svg

_COLORS = {"better": "#0072b2", "worse": "#d55e00", "no significant difference": "#999999"}
_COLUMNS = 3  # of panels


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
