"""Puts stored results into the pages that show them."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import render, table_lines
from benchmarks.search_bars import rows

__all__ = ["fill_pages"]

_PLACE = re.compile(r"(<!-- results:(\w+)(?: kernel=(\w+))? -->\n)(?:.*?\n)??(<!-- end -->)", re.DOTALL)


def fill_pages(write: bool = True) -> list[Path]:
    """Write stored results between the marks of the pages, and return the pages that differed.

    The marks are ``<!-- results:SUITE -->`` and ``<!-- end -->``; ``<!-- results:SUITE kernel=NAME -->``
    takes only the rows of one kernel. Suites without results stay as they are. ``search_bars`` stands for the
    bars of several suites.
    """
    root, changed = Path(__file__).parents[1], []

    def filled(place: re.Match[str]) -> str:
        if place[2] == "search_bars":
            found = rows()
            return "\n".join([place[1], *table_lines([*found[0]], found), "", place[4]])
        stored = (harness.RESULTS / f"{place[2]}.jsonl").exists()
        return f"{place[1]}\n{render(place[2], place[3])}\n\n{place[4]}" if stored else place[0]

    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        old = page.read_text()
        new = _PLACE.sub(filled, old)
        if new != old:
            changed.append(page)
            if write:
                page.write_text(new)
    return changed
