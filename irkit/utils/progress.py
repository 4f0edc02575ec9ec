"""Progress bars: the action, the number of items done, their rate, elapsed and remaining time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(action: str, unit: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a bar while the block runs, if stderr is a terminal or a notebook.

    Args:
        action: Label of the bar, such as ``"indexing"``.
        unit: Unit that is counted, such as ``"documents"``.
        total: Number of units, if known.

    Yields:
        A function to call with the number of units done since its last call.
    """
    with stage_progress_bar(unit) as report:
        report(action, 0, total)
        yield lambda count: report(action, count, total)


@contextmanager
def stage_progress_bar(unit: str, **totals: int | None) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a progress bar for each stage in turn, as `progress_bar` does for one action.

    Args:
        unit: Unit that is counted, such as ``"documents"``.
        totals: Number of units by name of the stage; overrides the total that the function is called with.

    Yields:
        An `irkit.index.StageProgress`: a function to call with the stage, the number of units done since its
        last call, and the total number or None.
    """
    if not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        yield lambda stage, count, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    left = TextColumn("{task.fields[left]}")  # empty without a total
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
    times = (TimeElapsedColumn(), TextColumn("elapsed"), TimeRemainingColumn(), left)
    with Progress(*columns, *times, console=Console(stderr=True), transient=True) as bars:
        current, pending, drawn_at = "", 0, 0.0

        def report(stage: str, count: int, total: int | None) -> None:
            nonlocal current, pending, drawn_at
            total = totals.get(stage, total)
            if stage != current:
                for old in bars.task_ids:
                    bars.remove_task(old)
                bars.add_task(stage, total=total, state="", left="")
                current, pending, drawn_at = stage, 0, 0.0
            pending, now = pending + count, time.monotonic()
            if now - drawn_at > 0.1:  # drawing takes longer than reading a line
                task = bars.tasks[0]
                bars.update(task.id, advance=pending, total=total, left="" if total is None else "left")
                bars.update(task.id, state=_state(task.completed, task.total, task.speed, unit))
                pending, drawn_at = 0, now

        yield report


def _state(done: float, total: float | None, speed: float | None, unit: str) -> str:
    if not done and total is None:  # the stage does not count
        return ""
    of = "" if total is None else f"/{total:,.0f}"
    return f"{done:,.0f}{of} {unit}" + (f", {speed:,.0f}/s" if speed else "")
