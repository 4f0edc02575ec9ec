"""Progress bars: what they show, and where they show nothing."""

from __future__ import annotations

import io
import re
import sys
from types import SimpleNamespace

import pytest

from irkit.utils.progress import progress_bar, stage_progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("reports", "parts"),
    [
        ([("encoding", 1000, None)] * 3, ["encoding", "3,000/4,000 documents, 500/s", "0:00:02"]),
        ([("encoding", 9, None), ("training", 0, None)], ["training"]),
        ([("training", 0, None), ("adding", 7, 9)], ["adding", "7/9 documents"]),
        ([("reading", 7, None)], ["reading", "7 documents"]),
        ([("reading", 700, None)] * 3, ["reading", "2,100 documents, 350/s"]),
        ([("reading", 7, None)] * 2 + [("reading", 7, 28)], ["21/28 documents", "0:00:04 elapsed", "left"]),
    ],
)
def test_last_stage_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, reports: list[tuple[str, int, int | None]], parts: list[str]
) -> None:
    screen, now = Terminal(), [0.0]
    monkeypatch.setattr(sys, "stderr", screen)
    # not `time.monotonic` itself: by that clock the server of other tests may be asleep
    monkeypatch.setattr("irkit.utils.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("rich.console.monotonic", lambda: now[0])
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with stage_progress_bar("documents", encoding=4000) as report:
        for values in reports:
            now[0] += 2.0
            report(*values)
    last = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", screen.getvalue()).strip().splitlines()[-1]
    assert all(part in last for part in parts), last
    assert ("left" in last) == bool(re.search(r"\d/\d", last)), last  # nobody knows without a total


def test_nothing_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("reading", "lines", 3) as update:
        update(3)
    assert capsys.readouterr() == ("", "")
