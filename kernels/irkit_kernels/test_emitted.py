"""The LLVM modules of all CPU kernels are those that ``_emitted.txt`` lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from irkit_kernels._emitted import hashes


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 11])
def test_modules_are_unchanged(step: int) -> None:
    """If a change is intended, renew the list as `_emitted` says."""
    expected = Path(__file__).with_name("_emitted.txt").read_text().splitlines()
    assert hashes(step) == expected[::step]
