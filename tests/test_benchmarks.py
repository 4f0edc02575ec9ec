"""The benchmark harness, and the part of the GPU suite that a CPU can run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_ratios_are_those_of_the_rounds() -> None:
    from benchmarks.harness import ratio

    seconds = {"slow": [2.0, 6.0, 3.0], "fast": [1.0, 2.0, 3.0]}
    assert ratio(seconds, "fast", "slow") == 2.0
    assert ratio(seconds, "slow", "slow") == 1.0


def test_contenders_take_turns() -> None:
    from benchmarks.harness import interleave

    calls: list[str] = []
    seconds = interleave({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=2)
    assert "".join(calls) == "ababba"
    assert [len(times) for times in seconds.values()] == [2, 2]


def test_results_are_stored_with_their_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import harness

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    harness.write_results("made_up", [{"a": 1.23456, "b": None}, {"a": 2, "b": "x"}, {"c": 3}])
    source, rows = harness.read_results("made_up")
    assert rows[0] == {"a": 1.23456, "b": None}
    assert source["versions"]["torch"] == torch.__version__
    table = harness.render("made_up").splitlines()
    assert table[:4] == ["| a | b |", "| --- | --- |", "| 1.235 |  |", "| 2 | x |"]
    assert table[5:8] == ["| c |", "| --- |", "| 3 |"]
    assert json.loads((tmp_path / "made_up.jsonl").read_text().splitlines()[0]) == source


def test_gpu_suite_skips_with_a_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    command = [sys.executable, "-m", "benchmarks", "gpu"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "gpu: skipped, torch sees no CUDA device\n")


@pytest.mark.parametrize("name", ["MiniLM", "ModernBERT"])
def test_encoder_of_the_gpu_suite(name: str) -> None:
    from benchmarks.gpu import SIZES, measure_encoder

    rows = measure_encoder(name, dict(zip(SIZES, (32, 2, 4, 64), strict=True)), "cpu", 40)
    assert [row["contender"] for row in rows] == ["transformers", "irkit sdpa"]
    assert all(row["tokens/s"] > 0 for row in rows)
