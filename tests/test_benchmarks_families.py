"""The suites of encoders: what is stored, and what is not timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
TINY = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(autouse=True)
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import harness

    monkeypatch.setattr(harness, "RESULTS", tmp_path)


@pytest.mark.parametrize("fast", [True, False])
def test_bfloat16_is_left_out_with_a_reason(fast: bool, monkeypatch: Any, capsys: Any) -> None:
    from benchmarks.encode import precisions

    monkeypatch.setattr("irkit.model.hardware.prefers_bfloat16", lambda device: fast)
    assert ("bfloat16" in precisions("families")) == fast
    assert ("families: no bfloat16; this CPU" in capsys.readouterr().err) != fast


def test_rows_before_a_crash_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import families, harness

    def measured(name: str, kinds: tuple[str, ...]) -> Any:
        yield {"family": name, "not timed": f"{name} differs"}
        if name == "MPNet":
            raise RuntimeError("crash")
        yield {"family": name, "met": "yes"}

    monkeypatch.setattr(families, "measure", measured)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with pytest.raises(RuntimeError, match="crash"):
        families.main()
    assert [row["family"] for row in harness.read_results("families")] == ["BERT", "BERT", "MPNet"]
    monkeypatch.setattr(families, "SHAPES", ["BERT"])
    assert families.main() == "BERT differs"


def test_a_family_has_a_row_for_each_bar_and_wrong_vectors_are_not_timed(
    minilm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sentence_transformers")
    from benchmarks import families

    def compare(kind: str, got: Any, expected: Any) -> str:
        if kind == "int8":
            raise SystemExit("int8 differs")
        return "same"

    monkeypatch.setattr(families, "compare", compare)
    monkeypatch.setattr(families, "ratio", lambda seconds, name, baseline: 1.5)
    monkeypatch.setattr(families, "passages", lambda words, count: ["some words"] * 2)
    monkeypatch.setattr(families, "WORDS", {2: 2})
    monkeypatch.setattr(families, "ROUNDS", 1)
    shapes = dict.fromkeys(("BERT", "other"), ("BertConfig", TINY, "mean"))
    monkeypatch.setattr(families, "SHAPES", shapes)
    rows = [row for name in shapes for row in families.measure(name, ("float32", "bfloat16", "int8"))]
    told = [
        (row["family"], row["contender"], row.get("not timed"), row.get("wanted"), row.get("met"))
        for row in rows
    ]
    assert told == [
        ("BERT", "irkit int8", "int8 differs", None, None),
        ("BERT", "irkit float32", None, "", ""),
        ("BERT", "irkit bfloat16", None, "", ""),
        ("other", "irkit int8", "int8 differs", None, None),
        ("other", "irkit float32", None, ">= 2", "no"),
        ("other", "irkit bfloat16", None, ">= 4", "no"),
    ]


def test_heads_share_a_pass_beside_a_dense_model(minilm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import harness, heads

    monkeypatch.setattr(heads, "precisions", lambda suite: ("float32",))
    found = [("documents", ["a short text"] * 2, False), ("queries", ["no"], True)]
    monkeypatch.setattr(heads, "collections", lambda: found)
    monkeypatch.setattr(heads, "interleave", lambda contenders: {name: [2.0] for name in contenders})
    monkeypatch.setattr(heads, "ratio", lambda seconds, name, baseline: 0.8)
    heads.main()
    rows = harness.read_results("heads")
    assert [(row["texts"], row["heads"], row["wanted"], row["met"]) for row in rows] == [
        ("documents", "dense, multi_vector", "<= 1.15", "no"),
        ("documents", "dense, multi_vector, sparse", "", ""),
    ]
    assert (rows[0]["texts/s"], rows[0]["time, x dense alone"]) == (1, 1.25)


def test_openvino_is_skipped_by_the_names_of_missing_packages(monkeypatch: Any, capsys: Any) -> None:
    from benchmarks import openvino

    absent: set[str] = {"nncf"}
    monkeypatch.setattr(openvino, "find_spec", lambda name: None if name in absent else name)
    monkeypatch.setattr(openvino, "precisions", lambda suite: ("float32", "int8"))
    monkeypatch.setattr(openvino, "collections", lambda: [])
    monkeypatch.setattr(openvino, "network", lambda: None)
    used: list[str] = []
    monkeypatch.setattr(openvino, "compiled", lambda graph, kind: used.append(kind))
    openvino.main()
    assert used == ["float32"]
    assert capsys.readouterr().err == "openvino: no int8; no nncf\n"
    absent.add("openvino")
    with pytest.raises(SystemExit, match="openvino: no openvino; pip install openvino nncf"):
        openvino.main()


def test_openvino_gets_batches_of_texts_of_one_length(minilm: str) -> None:
    from benchmarks.openvino import NAMES, batches

    found = list(batches(["bears", "bears sleep in winter", "bears sleep"], 2))
    assert [rows for rows, _ in found] == [[1, 2], [0]]
    inputs = found[0][1]
    assert list(inputs) == list(NAMES)
    assert inputs["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 1, 0, 0]]
    assert inputs["input_ids"][1].tolist()[-2:] == [0, 0]
    assert not inputs["token_type_ids"].any()


@pytest.mark.parametrize(("speed", "cosine", "met"), [(1.2, 1.0, "yes"), (1.0, 1.0, "no"), (1.2, 0.5, "no")])
def test_openvino_is_beaten_at_no_worse_a_cosine(
    speed: float, cosine: float, met: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import openvino

    vectors = {"int8": cosine, openvino.PEER: 1.0}
    monkeypatch.setattr(openvino, "load", lambda kind, query: lambda texts: np.full((2, 1), vectors[kind]))
    monkeypatch.setattr(openvino, "encode", lambda engine, texts, size: np.full((2, 1), 0.9))
    monkeypatch.setattr(openvino, "interleave", lambda runs, _: {name: [1.0] for name in runs})
    monkeypatch.setattr(openvino, "ratio", lambda seconds, one, other: 1.0 if one == other else speed)
    peer, ours = openvino.measure("queries", ["a", "b"], True, {"int8": None})
    assert (peer["contender"], peer["met"], peer["batch"] in openvino.BATCHES) == ("OpenVINO int8", "", True)
    assert (ours["contender"], ours["x OpenVINO"], ours["wanted"]) == ("irkit int8", speed, ">= 1.1")
    assert ours["met"] == met
