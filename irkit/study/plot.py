"""Runs of a study as one SVG, readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from irkit.study.results import Cell

__all__ = ["draw_study"]

_TEXT, _LINE = "#808080", "#80808055"
_SAME, _BETTER, _WORSE = "#999999", "#0072b2", "#d55e00"
_WIDTH, _ROW, _GAP = 240, 20, 24  # of a panel, of a variant in it, and between panels
_ABOVE, _BELOW, _LEGEND = 26, 40, 24  # a panel, and above all
_COLUMNS = 3  # of panels
_LETTER = 6.8  # about the width of one


def draw_study(cells: Sequence[Cell], baseline: str) -> str:
    """A panel a dataset, a row a variant: a ring a seed, a disc their mean, a line the baseline's mean.

    Discs are blue where significantly better than the baseline, orange where worse, otherwise grey.

    Args:
        cells: Those of one measure.
        baseline: Name of the variant that the line is of.
    """
    variants = list(dict.fromkeys(cell.variant for cell in cells))
    datasets = list(dict.fromkeys(cell.dataset for cell in cells))
    left = 12 + round(_LETTER * max(map(len, variants)))
    high = _ABOVE + len(variants) * _ROW + _BELOW
    shapes = [*_legend(left)]
    for place, name in enumerate(datasets):
        row, column = divmod(place, _COLUMNS)
        top = _LEGEND + row * high + _ABOVE
        if column == 0:
            shapes += _labels(left - 10, top, variants, baseline)
        found = {cell.variant: cell for cell in cells if cell.dataset == name}
        shapes += _panel(left + column * (_WIDTH + _GAP), top, found, variants, baseline)
    width = left + min(len(datasets), _COLUMNS) * (_WIDTH + _GAP)
    height = _LEGEND + -(-len(datasets) // _COLUMNS) * high
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'font-family="sans-serif" font-size="11" fill="{_TEXT}">',
            *shapes,
            "</svg>\n",
        ]
    )


def _panel(
    left: int, top: int, cells: Mapping[str, Cell], variants: Sequence[str], baseline: str
) -> Iterator[str]:
    values = [value for cell in cells.values() for value in cell.seeds.values()]
    middle, half = (min(values) + max(values)) / 2, max((max(values) - min(values)) * 0.55, 0.001)
    bottom = top + len(variants) * _ROW
    first = next(iter(cells.values()))

    def x(value: float) -> float:
        return left + (value - middle + half) / (2 * half) * _WIDTH

    yield f'<text x="{left}" y="{top - 8}" font-weight="bold">{escape(first.dataset)}</text>'
    for part in (0.1, 0.5, 0.9):
        value = middle + half * (2 * part - 1)
        yield f'<line x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{top}" y2="{bottom}" stroke="{_LINE}"/>'
        yield f'<text x="{x(value):.1f}" y="{bottom + 15}" text-anchor="middle">{value:.4f}</text>'
    center, below = left + _WIDTH / 2, bottom + 30
    yield f'<text x="{center}" y="{below}" text-anchor="middle">{escape(first.measure)}</text>'
    if baseline in cells:
        at = x(cells[baseline].mean)
        yield (
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}" stroke="{_TEXT}" '
            'stroke-dasharray="4 3"/>'
        )
    for row, variant in enumerate(variants):
        if variant not in cells:
            continue
        cell, y = cells[variant], _middle(top, row)
        color = _SAME if not cell.significant() else _BETTER if (cell.difference or 0) > 0 else _WORSE
        for value in cell.seeds.values():
            yield f'<circle cx="{x(value):.1f}" cy="{y}" r="3" fill="none" stroke="{color}"/>'
        yield f'<circle cx="{x(cell.mean):.1f}" cy="{y}" r="4.5" fill="{color}"/>'


def _labels(right: int, top: int, variants: Sequence[str], baseline: str) -> Iterator[str]:
    for row, variant in enumerate(variants):
        weight = ' font-weight="bold"' if variant == baseline else ""
        y = _middle(top, row) + 4
        yield f'<text x="{right}" y="{y}" text-anchor="end"{weight}>{escape(variant)}</text>'


def _legend(left: int) -> Iterator[str]:
    entries = ((_BETTER, "better"), (_WORSE, "worse"), (_SAME, "no significant difference to the baseline"))
    for place, (color, text) in enumerate(entries):
        x = left + place * 70
        yield f'<circle cx="{x}" cy="10" r="4" fill="{color}"/><text x="{x + 8}" y="14">{text}</text>'


def _middle(top: int, row: int) -> int:
    return top + row * _ROW + _ROW // 2
