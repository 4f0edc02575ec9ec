"""Figures as SVG files that are readable on light and dark pages, drawn by matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

from irkit.errors import require

_TEXT, _LINE = "#808080", "#80808055"
_STYLE = {
    "svg.fonttype": "none",  # texts stay texts
    "svg.hashsalt": "irkit",  # the same figure gives the same file
    "font.size": 8,
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.edgecolor": _LINE,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": "medium",
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    "grid.color": _LINE,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    **{f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")},
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def draw_svg(draw: Callable[[Any], object], width: float, height: float) -> str:
    """Draw a figure as SVG.

    Args:
        draw: Function that draws; it is called with an empty `matplotlib.figure.Figure`.
        width: Width in inches. Pages scale the picture down if they are narrower.
        height: Height in inches.

    Returns:
        The text of an SVG file.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    matplotlib = require("matplotlib", "plots", "Drawing a plot")
    figures = require("matplotlib.figure", "plots", "Drawing a plot")
    text = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure = figures.Figure(figsize=(width, height))
        draw(figure)
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return re.sub(r"[ \t]+$", "", text.getvalue(), flags=re.MULTILINE)  # so that it can be committed
