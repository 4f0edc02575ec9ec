"""Curves of recall against speed, and bars of speeds, as SVG, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.harness import Row

__all__ = ["draw_bars", "draw_curves"]

_COLORS = {
    "irkit": "#0072b2",
    "irkit exact": "#56b4e9",
    "pyseismic-lsr": "#d55e00",
    "numba scan": "#8c564b",
    "numpy scan": "#999999",
    "irkit plaid": "#0072b2",
    "irkit plaid, tokens kept": "#003f5c",
    "irkit plaid 2 bits": "#56b4e9",
    "irkit muvera": "#009e73",
    "irkit flat": "#7fc8a9",
    "TACHIOM": "#d55e00",
    "xtr-warp-rs": "#cc79a7",
    "fast-plaid": "#8c564b",
    "exact bfloat16": "#999999",
}
_TEXT, _LINE = "#808080", "#80808055"
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 270, 230, 44, 62, 44  # of a panel, and around it
_TICKS = 5  # of recall
_NAMES = 180  # of what stands left of bars
_CODES = {"irkit": "#0072b2", "authors": "#d55e00", "transformers": "#999999"}


def draw_curves(rows: Sequence[Row], collections: Sequence[str], worst: float = 0.8) -> str:
    """A panel a collection: recall@10 to the right, queries a second upwards, a line a contender.

    A line joins the settings that no other of the same contender beats in both. Below the recall ``worst``
    and of contenders without a color nothing is drawn.
    """
    rows = [row for row in rows if row["contender"] in _COLORS and row["recall@10"] >= worst]
    speeds = [row["queries/s"] for row in rows]
    low, high = math.floor(math.log10(min(speeds))), math.ceil(math.log10(max(speeds)))
    width = _LEFT + len(collections) * (_WIDTH + _GAP)
    height = _TOP + _HEIGHT + 40
    shapes = [*_legend([name for name in _COLORS if any(row["contender"] == name for row in rows)])]
    for place, name in enumerate(collections):
        found = [row for row in rows if row["collection"] == name]
        shapes += _panel(_LEFT + place * (_WIDTH + _GAP), name, found, low, high, worst)
    return _svg(width, height, shapes)


def draw_bars(rows: Sequence[Row], kinds: Sequence[str], precision: str) -> str:
    """A panel a kind of texts: texts a second of each model by each code, with its fastest attention.

    Args:
        rows: With ``texts``, ``precision``, ``model``, ``code`` and ``texts/s``.
        kinds: Of texts.
        precision: Of the rows that are drawn.
    """
    rows = [row for row in rows if row["precision"] == precision]
    names = list(dict.fromkeys((row["model"], row["code"]) for row in rows))
    shapes = []
    for place, kind in enumerate(kinds):
        left = _NAMES + place * (_WIDTH + 2 * _GAP)
        found: dict[tuple[str, str], float] = {}
        for row in rows:
            if row["texts"] == kind:
                who = row["model"], row["code"]
                found[who] = max(row["texts/s"], found.get(who, 0.0))
        shapes.append(f'<text x="{left}" y="14" font-weight="bold">{kind}/s, {precision}</text>')
        for number, (who, speed) in enumerate(found.items()):
            top, length = 24 + 18 * number, speed / max(found.values()) * _WIDTH
            color = _CODES.get(who[1], _TEXT)
            shapes.append(
                f'<rect x="{left}" y="{top}" width="{length:.1f}" height="13" fill="{color}"/>'
                f'<text x="{left + length + 5:.1f}" y="{top + 11}">{speed:.3g}</text>'
            )
            if place == 0:
                label = f"{who[0]} ({who[1]})"
                shapes.append(f'<text x="{left - 6}" y="{top + 11}" text-anchor="end">{label}</text>')
    return _svg(_NAMES + len(kinds) * (_WIDTH + 2 * _GAP), 30 + 18 * len(names), shapes)


def _svg(width: int, height: int, shapes: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'font-family="sans-serif" font-size="11" fill="{_TEXT}">',
            *shapes,
            "</svg>\n",
        ]
    )


def _panel(left: int, name: str, rows: list[Row], low: int, high: int, worst: float) -> Iterator[str]:
    def x(recall: float) -> float:
        return left + (recall - worst) / (1 - worst) * _WIDTH

    def y(speed: float) -> float:
        return _TOP + _HEIGHT * (high - math.log10(speed)) / (high - low)

    bottom = _TOP + _HEIGHT
    yield f'<text x="{left}" y="{_TOP - 8}" font-weight="bold">{name}</text>'
    for power in range(low, high + 1):
        at = y(10**power)
        yield f'<line x1="{left}" x2="{left + _WIDTH}" y1="{at:.1f}" y2="{at:.1f}" stroke="{_LINE}"/>'
        if left == _LEFT:
            yield f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{10**power:g}</text>'
    for recall in np.linspace(worst, 1, _TICKS).tolist():
        yield f'<line x1="{x(recall):.1f}" x2="{x(recall):.1f}" y1="{_TOP}" y2="{bottom}" stroke="{_LINE}"/>'
        yield f'<text x="{x(recall):.1f}" y="{bottom + 15}" text-anchor="middle">{recall:.3g}</text>'
    label = "recall@10, against queries/s of one thread" if left == _LEFT else "recall@10"
    yield f'<text x="{left + _WIDTH / 2}" y="{bottom + 32}" text-anchor="middle">{label}</text>'
    for contender, color in _COLORS.items():
        points = [(row["recall@10"], row["queries/s"]) for row in rows if row["contender"] == contender]
        best = [point for point in points if not any(_beats(other, point) for other in points)]
        line = " ".join(f"{x(recall):.1f},{y(speed):.1f}" for recall, speed in sorted(best))
        yield f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>'
        for recall, speed in points:
            yield f'<circle cx="{x(recall):.1f}" cy="{y(speed):.1f}" r="3" fill="{color}"/>'


def _legend(names: list[str]) -> Iterator[str]:
    for place, name in enumerate(names):
        left, top = _LEFT + place % 5 * 170, 14 + place // 5 * 18
        yield f'<circle cx="{left}" cy="{top - 4}" r="4" fill="{_COLORS[name]}"/>'
        yield f'<text x="{left + 9}" y="{top}">{name}</text>'


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] >= other[0] and one[1] >= other[1]
