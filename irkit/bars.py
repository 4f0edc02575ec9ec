"""Progress bars: what is going on, how much of it is done, how fast, and how long it will still take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["bar", "stage_bar"]


@contextmanager
def bar(action: str, unit: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a bar while the block runs, if stderr is a terminal or a notebook.

    Args:
        action: What is going on, such as ``"indexing"``.
        unit: What is counted, such as ``"documents"``.
        total: How many there are, if known.

    Yields:
        A function to be called with the number of those done since its last call.
    """
    with stage_bar(unit) as report:
        report(action, 0, total)
        yield lambda count: report(action, count, total)


@contextmanager
def stage_bar(unit: str, **totals: int | None) -> Iterator[Callable[[str, int, int | None], None]]:
    """As `bar`, for work of several stages: each has a bar of its own.

    Args:
        unit: What is counted.
        totals: By stage, where the caller knows more than those who report.

    Yields:
        An `irkit.index.StageProgress`: called with the stage, the number done since the last call, and how
        many there are in all, None where that is not known.
    """
    if not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        yield lambda stage, count, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
    times = (
        TextColumn("for"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[still]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, *times, console=Console(stderr=True), transient=True) as shown:
        current, waiting, last = "", 0, 0.0

        def report(stage: str, count: int, total: int | None) -> None:
            nonlocal current, waiting, last
            total = totals.get(stage, total)
            if stage != current:
                for old in shown.task_ids:
                    shown.remove_task(old)
                shown.add_task(stage, total=total, state="", still="")
                current, waiting, last = stage, 0, 0.0
            waiting, now = waiting + count, time.monotonic()
            if now - last > 0.1:  # drawing takes longer than reading a line
                task = shown.tasks[0]
                still = "" if total is None else "still"  # without one nobody knows
                shown.update(task.id, advance=waiting, total=total, still=still)
                shown.update(task.id, state=_state(task.completed, task.total, task.speed, unit))
                waiting, last = 0, now

        yield report


def _state(done: float, total: float | None, speed: float | None, unit: str) -> str:
    if not done and total is None:  # nothing is counted
        return ""
    of = "" if total is None else f"/{total:,.0f}"
    return f"{done:,.0f}{of} {unit}" + (f", {speed:,.0f}/s" if speed else "")
