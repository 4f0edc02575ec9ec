"""The LLVM modules of all CPU kernels are those that ``_emitted.txt`` lists."""

from __future__ import annotations

from pathlib import Path

from irkit_kernels._emitted import hashes


def test_modules_are_unchanged() -> None:
    """If a change is intended, renew the list as `_emitted` says."""
    expected = Path(__file__).with_name("_emitted.txt").read_text().splitlines()
    assert hashes() == expected
