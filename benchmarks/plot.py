"""Curves of recall against speed, and bars of speeds, as SVG files for the docs.

``python -m benchmarks.plot`` draws all pictures of measurements in the docs again, from the stored results.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, read_results
from irkit.study.results import Cell
from irkit.study.study_report import draw_study
from irkit.utils.figures import draw_svg

__all__ = ["draw_bars", "draw_curves"]

_COLORS = {
    "irkit": "#0072b2",
    "irkit exact": "#56b4e9",
    "irkit float16": "#0072b2",
    "irkit int8": "#56b4e9",
    "irkit none": "#7b61c4",
    "FAISS IVF, PQ": "#d55e00",
    "FAISS IVF, RaBitQ": "#e69f00",
    "FAISS HNSW": "#cc79a7",
    "hnswlib": "#a9705a",
    "usearch": "#999999",
    "ScaNN": "#009e73",
    "pyseismic-lsr": "#d55e00",
    "numba scan": "#a9705a",
    "numpy scan": "#999999",
    "irkit plaid": "#0072b2",
    "irkit plaid, tokens kept": "#7b61c4",
    "irkit plaid 2 bits": "#56b4e9",
    "irkit muvera": "#009e73",
    "irkit flat": "#7fc8a9",
    "TACHIOM": "#d55e00",
    "xtr-warp-rs": "#cc79a7",
    "fast-plaid": "#a9705a",
    "exact bfloat16": "#999999",
}
_CODES = {"irkit": "#0072b2", "authors": "#d55e00", "transformers": "#999999"}
_DOCS = Path(__file__).parents[1] / "docs"


def draw_curves(rows: Sequence[Row], collections: Sequence[str], worst: float = 0.8) -> str:
    """Draw a panel per collection, a line per contender: queries per second over recall@10.

    A line joins the settings that no other setting of the same contender beats in both. Settings with a
    recall below ``worst``, and contenders without a color, are left out.
    """
    rows = [row for row in rows if row["contender"] in _COLORS and row["recall@10"] >= worst]
    contenders = [name for name in _COLORS if any(row["contender"] == name for row in rows)]
    lines = -(-len(collections) // 3)
    columns = -(-len(collections) // lines)

    def draw(figure: Any) -> None:
        axes = figure.subplots(lines, columns, sharey=True, squeeze=False)
        for axis, collection in zip(axes.flat, collections, strict=True):
            for name in contenders:
                points = [
                    (row["recall@10"], row["queries/s"])
                    for row in rows
                    if (row["collection"], row["contender"]) == (collection, name)
                ]
                best = sorted(one for one in points if not any(_beats(other, one) for other in points))
                axis.plot(*zip(*best, strict=True), color=_COLORS[name]) if best else None
                axis.scatter(*zip(*points, strict=True), 16, color=_COLORS[name]) if points else None
            axis.set(title=collection, xlabel="recall@10", xlim=(worst, 1 + (1 - worst) / 50), yscale="log")
            axis.locator_params(axis="x", nbins=5)
        for axis in axes[:, 0]:
            axis.set_ylabel("queries/s of one thread")
        handles = [axes[0, 0].scatter([], [], color=_COLORS[name], label=name) for name in contenders]
        figure.legend(handles=handles, loc="outside upper left", ncols=5, handletextpad=0)

    return draw_svg(draw, 7.4, 0.5 + 2.7 * lines)


def draw_bars(rows: Sequence[Row], kinds: Sequence[str], precision: str) -> str:
    """Draw a panel per kind of texts: texts per second by model and code, with the fastest attention.

    Args:
        rows: Rows with ``texts``, ``precision``, ``model``, ``code`` and ``texts/s``.
        kinds: Kinds of texts.
        precision: Precision of the rows that are drawn.
    """
    rows = [row for row in rows if row["precision"] == precision]
    names = list(dict.fromkeys((row["model"], row["code"]) for row in rows))

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
        for axis, kind in zip(axes, kinds, strict=True):
            speeds = dict.fromkeys(names, 0.0)
            for row in rows:
                if row["texts"] == kind:
                    name = row["model"], row["code"]
                    speeds[name] = max(speeds[name], row["texts/s"])
            bars = axis.barh(
                [f"{model} ({code})" for model, code in names],
                list(speeds.values()),
                color=[_CODES[code.partition(",")[0]] for _, code in names],
            )
            axis.bar_label(bars, [f"{speed:.3g}" for speed in speeds.values()], padding=3)
            axis.set(title=f"{kind}/s, {precision}", xticks=[], ylim=(len(names) - 0.5, -0.5))
            axis.margins(x=0.15)
            axis.grid(visible=False)

    return draw_svg(draw, 1.8 + 2.6 * len(kinds), 0.4 + 0.2 * len(names))


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] >= other[0] and one[1] >= other[1]


def main() -> None:
    """Draw the pictures of the docs from the stored results."""
    for name, worst in (("dense", 0.9), ("multi_vector", 0.8), ("sparse", 0.9)):
        rows = read_results(f"{name}_curves")
        single = [row for row in rows if "how" not in row["settings"]]
        drawn = [row for row in single if row["contender"] in _COLORS and row["recall@10"] >= worst]
        collections = importlib.import_module(f"benchmarks.{name}").COLLECTIONS
        collections = [one for one in collections if any(row["collection"] == one for row in drawn)]
        (_DOCS / f"{name}.svg").write_text(draw_curves(single, collections, worst))
    rows = read_results("tite_all")
    (_DOCS / "tite.svg").write_text(
        draw_bars(rows, list(dict.fromkeys(row["texts"] for row in rows)), "bfloat16")
    )
    rows = read_results("study_projections")
    cells = [
        Cell(
            variant=row["variant"],
            measure="nDCG@10",
            dataset="SciFact",
            seeds=dict(enumerate(map(float, row["seeds"].split(",")))),
            mean=row["nDCG@10"],
            deviation=row["deviation over 3 seeds"],
            difference=row["difference"],
            corrected_p=row["corrected p"],
        )
        for row in rows
    ]
    (_DOCS / "study_projections.svg").write_text(draw_study(cells, "Linear"))


if __name__ == "__main__":
    main()
