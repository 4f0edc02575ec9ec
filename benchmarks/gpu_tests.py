"""A plugin of pytest for the suite ``gpu``: prints outcomes as lines of JSON, skips files by what they need.

Only for machines that lack what the tests need: elsewhere a missing package is an error.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest

from benchmarks.gpu import OURS

_needed = dict[str, str]()  # what files that are skipped need
_worker = False  # of xdist: its reports go to the process that prints


def pytest_configure(config: pytest.Config) -> None:
    """Note whether this process prints."""
    global _worker
    _worker = hasattr(config, "workeroutput")
    _needed.clear()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file that imports a package which is not there."""
    report = yield
    error = report.call.excinfo.value if report.failed else None
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__  # pytest wraps what an import raises
    missing = str(error.name).partition(".")[0] if error is not None else ""
    if missing and missing not in OURS:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"needs {missing}")
    if report.skipped and isinstance(report.longrepr, tuple):
        _needed[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Print what cannot be collected."""
    if report.failed:
        _print(report.nodeid, "failed")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print the outcome of a test."""
    if report.when == "call" or not report.passed:
        _print(report.nodeid, report.outcome)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over which files a worker has skipped."""
    _needed.update(getattr(node, "workeroutput", {}).get("needed", {}))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Print which files were skipped, and why."""
    if _worker:
        session.config.workeroutput["needed"] = _needed
    for file, needed in _needed.items():
        _print(file, f"files skipped, {needed}")


def _print(test: str, outcome: str) -> None:
    if not _worker:
        print("\n" + json.dumps({"test": test, "outcome": outcome}), flush=True)
