"""A plugin of pytest for the suite ``gpu``: prints outcomes as lines of JSON, skips files by what they need.

Only for machines that lack what the tests need: elsewhere a missing package is an error.
"""

from __future__ import annotations

import json
from collections.abc import Generator

import pytest

from benchmarks.gpu import OURS

_printing = True  # workers of xdist send their reports to the process that prints


def pytest_configure(config: pytest.Config) -> None:
    """Note whether this process prints."""
    global _printing
    _printing = not hasattr(config, "workerinput")


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
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Print what is skipped as a whole, or cannot be collected."""
    if report.skipped and isinstance(report.longrepr, tuple):
        _print(report.nodeid, f"files skipped, {report.longrepr[2].removeprefix('Skipped: ')}")
    elif report.failed:
        _print(report.nodeid, "failed")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print the outcome of a test."""
    if report.when == "call" or not report.passed:
        _print(report.nodeid, report.outcome)


def _print(test: str, outcome: str) -> None:
    if _printing:
        print("\n" + json.dumps({"test": test, "outcome": outcome}), flush=True)
