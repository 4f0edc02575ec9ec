"""The benchmark harness, and the part of the GPU suite that a CPU can run."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
from xml.etree import ElementTree

import numpy as np
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
    rows = harness.read_results("made_up")
    source = rows[0].pop("provenance")
    assert rows[0] == {"a": 1.23456, "b": None}
    assert source["versions"]["torch"] == torch.__version__
    table = harness.render("made_up").splitlines()
    assert table[:4] == ["| a | b |", "| --- | --- |", "| 1.235 |  |", "| 2 | x |"]
    assert table[5:8] == ["| c |", "| --- |", "| 3 |"]
    assert json.loads((tmp_path / "made_up.jsonl").read_text().splitlines()[0]) == source

    harness.write_results("made_up", [{"kernel": "one", "ms": 1}, {"kernel": "two", "ns": 2}])
    assert harness.render("made_up", "two").splitlines()[:3] == ["| ns |", "| --- |", "| 2 |"]
    assert harness.render("made_up", "three") == "Not measured yet."


def test_rows_that_were_kept_keep_their_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import harness

    def place(commit: str) -> None:
        about = {
            "date": "today",
            "commit": commit,
            "cpu": "a CPU",
            "cores": 2,
            "gpu": None,
            "versions": {"x": "1"},
        }
        monkeypatch.setattr(harness, "provenance", lambda: about)

    def written(rows: list[dict[str, Any]]) -> list[str]:
        harness.write_results("made_up", rows)
        return harness.render("made_up").splitlines()

    def about(commit: str) -> str:
        return f"today, commit {commit}, a CPU, 2 cores, x 1."

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    place("one")
    assert written([{"index": name, "size": size} for name in "ab" for size in (1, 2)])[-2:] == [
        "",
        about("one"),
    ]
    place("two")
    a1, a2, b1, _ = harness.read_results("made_up")
    lines = written([a1, {"index": "b", "size": 1}, a2, {"index": "b", "size": 2}])
    assert lines[2:6] == ["| a | 1 |", "| b | 1 |", "| a | 2 |", "| b | 2 |"]
    assert lines[6:] == ["", f"a: {about('one')}", "", f"b: {about('two')}"]
    stored = map(json.loads, (tmp_path / "made_up.jsonl").read_text().splitlines())
    assert [row.get("commit") for row in stored] == ["one", None, "two", None, "one", None, "two", None]
    assert written([a1, a2, b1, {"index": "b", "size": 2}])[6:] == [
        *("", f"b 2: {about('two')}"),  # the first column does not tell the rows apart
        *("", f"Other rows: {about('one')}"),
    ]
    assert written([a1, {"other": 3}])[3:] == [
        "",
        about("one"),
        "",
        "| other |",
        "| --- |",
        "| 3 |",
        "",
        about("two"),
    ]


def test_predictions_are_from_the_largest_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import harness, scale

    def place(cpu: str) -> None:
        about = {"date": "2026-01-02 03:04 UTC", "cpu": cpu, "cores": 2, "versions": {}}
        monkeypatch.setattr(harness, "provenance", lambda: about)
        monkeypatch.setattr(scale, "provenance", lambda: about)

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(scale.costs, "__file__", str(tmp_path / "costs.py"))
    monkeypatch.setattr(scale, "KINDS", ("bm25", "flat"))
    place("old")
    rows = [row for row in scale.costs.read_costs()["rows"] if row["index"] in scale.KINDS]
    harness.write_results("scale", rows)
    kept = [row for row in harness.read_results("scale") if row["index"] == "bm25"]
    place("new")
    rows = [*kept, *(row for row in rows if row["index"] == "flat")]
    harness.write_results("scale", rows)
    scale.store(rows)
    costs = json.loads((tmp_path / "costs.json").read_text())
    assert costs["measured"] == "measured 2026-01-02 on old, 2 cores and 2026-01-02 on new, 2 cores"
    assert all("provenance" not in row for row in costs["rows"])
    found = harness.read_results("plan")
    sources = {
        (row.get("predicted"), row.get("index")): row["provenance"]["cpu"]
        for row in found
        if "cost" not in row
    }
    assert {name: cpu for (name, _), cpu in sources.items()} == {"bm25": "old", "flat": "new"}
    assert {row["provenance"]["cpu"] for row in found if row.get("index") == "bm25"} == {"old"}


def test_every_bench_of_a_kernel_is_found() -> None:
    from benchmarks.kernels import benches

    found = benches()
    assert {
        "dense_scan",
        "dense_search",
        "packed_linear",
        "maxsim",
        "ragged_attention",
        "ragged_pool",
        "rotary",
        "row_norm",
        "sparse_search",
        "splade_pool",
    } <= set(found)
    assert all(callable(bench.run) for bench in found.values())


def test_benches_of_some_kernels_keep_the_rows_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import harness, kernels

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    names = [*kernels.benches()]
    bench = SimpleNamespace(run=lambda: [{"ms": 1.0}])
    monkeypatch.setattr(kernels, "benches", lambda only: dict.fromkeys(only, bench))
    old = {**harness.provenance(), "commit": "old"}
    rows = [{"kernel": name, "ms": 2.0, "provenance": old} for name in (names[0], names[2], "renamed since")]
    harness.write_results("kernels", rows)
    kernels.main(only=[names[1], names[2]])
    found = [
        (row["kernel"], row["ms"], row["provenance"]["commit"]) for row in harness.read_results("kernels")
    ]
    now = harness.provenance()["commit"]
    assert found == [(names[0], 2.0, "old"), (names[1], 1.0, now), (names[2], 1.0, now)]
    with pytest.raises(SystemExit, match="kernels: no bench of maxsin; expected some of dense_scan, "):
        kernels.main(only=["maxsin"])


def curve(contender: str, recall: float, speed: float) -> dict[str, object]:
    return {
        "collection": "generated 10k",
        "contender": contender,
        "recall@10": recall,
        "queries/s": speed,
        "x exact bfloat16": speed / 10,
    }


CURVES = [
    curve("exact bfloat16", 1.0, 10.0),
    curve("irkit plaid", 0.95, 1000.0),
    curve("irkit plaid", 0.97, 600.0),
    curve("irkit plaid", 0.99, 200.0),
    curve("TACHIOM", 0.94, 400.0),
    curve("TACHIOM", 0.94, 100.0),
    curve("xtr-warp-rs", 0.8, 100.0),
    curve("xtr-warp-rs", 0.96, 300.0),
]


def test_speeds_are_compared_at_the_recall_that_both_reach() -> None:
    from benchmarks.multi_vector_bars import bars, speeds

    build = {"collection": "generated 10k", "build CPU s": 2.0, "bytes/token": 80.0}
    builds = [
        build | {"contender": "irkit plaid"},
        build | {"contender": "xtr-warp-rs", "build CPU s": 20.0, "bytes/token": 40.0},
        build | {"contender": "fast-plaid", "build CPU s": None},
    ]
    found = {row["irkit plaid"]: (row["is"], row["met"]) for row in bars(CURVES, builds)}
    assert found == {
        "recall@10 with every document scored by its codes": (0.99, "yes"),
        "queries/s at recall 0.96 / exact bfloat16": (60.0, "yes"),
        "queries/s at recall 0.96 / TACHIOM at its 0.940": (1.5, "no"),
        "queries/s / xtr-warp-rs at its recall, the least of its settings": (2.0, "no"),
        "processor time of the build / xtr-warp-rs": (0.1, ""),
        "bytes / xtr-warp-rs": (2.0, "no"),
    }
    cells = [row["generated 10k"] for row in speeds(CURVES)]
    assert cells == ["10 (1.000)", "600 (0.970)", "400 (0.940)", "300 (0.960)"]


def test_curves_are_drawn_where_they_belong() -> None:
    from benchmarks.plot import draw_curves

    svg = ElementTree.fromstring(draw_curves(CURVES, ["generated 10k"]))
    axes = next(group for group in svg.iter() if group.get("id") == "axes_1")
    dots = [
        (use.get("style", ""), float(use.get("x", "")), float(use.get("y", "")))
        for group in axes.iter()
        if group.get("id", "").startswith("PathCollection")
        for use in group.iter("{http://www.w3.org/2000/svg}use")
    ]
    assert len(dots) == len(CURVES)
    ours = [(x, y) for style, x, y in dots if "#0072b2" in style]  # more recall is further right, and lower
    assert len(ours) > 1
    assert ours == sorted(ours)
    assert [y for _, y in ours] == sorted(y for _, y in ours)


def test_engines_of_token_vectors_find_what_is_exact(tmp_path: Path) -> None:
    from benchmarks.engines import ENGINES
    from benchmarks.token_vectors import generate, read
    from benchmarks.worker import build
    from irkit import MultiVector, Ragged, score

    generate(60, 50).write(tmp_path / "vectors")
    vectors = read(tmp_path / "vectors")
    documents = MultiVector(Ragged(torch.tensor(vectors.tokens).float(), np.diff(vectors.offsets)))
    for engine, options in (("exact", {"dtype": "float32"}), ("irkit", {"kind": "flat"})):
        built = build(ENGINES[engine], options, vectors, tmp_path / engine)
        assert built["bytes"] == 0 or built["bytes"] >= vectors.tokens.nbytes
        search = ENGINES[engine].open(vectors, tmp_path / engine, options)
        for number, hits in enumerate(search(5, {})):
            query = np.array(vectors.query(number))
            best = score(MultiVector(Ragged.from_rows([query])), documents)[0].topk(10).indices.tolist()
            assert hits == best == vectors.exact[number, :10].tolist()


def test_engines_of_dense_vectors_find_what_is_exact(tmp_path: Path) -> None:
    from benchmarks.dense_engines import ENGINES
    from benchmarks.dense_vectors import generate, read
    from benchmarks.worker import build

    generate(300, 16).write(tmp_path / "vectors")
    vectors = read(tmp_path / "vectors")
    best = np.argsort(-(vectors.queries[:5] @ vectors.values.T), 1)[:, :10]
    build(ENGINES["irkit"], {"keep": "float32"}, vectors, tmp_path / "irkit")  # few are scanned
    search = ENGINES["irkit"].open(vectors, tmp_path / "irkit", {})
    assert search(5, {"probes": 3}) == best.tolist() == vectors.exact[:5].tolist()


def test_what_is_wanted_of_dense_engines() -> None:
    from benchmarks.dense_bars import bars, speeds

    def curve(contender: str, recall: float, speed: float) -> dict[str, Any]:
        row = sparse_curve(contender, recall, speed)
        return row | {"documents": 200_000, "dimensions": 384, "is default": contender == "irkit float16"}

    curves = [curve("irkit float16", 0.992, 900.0), curve("irkit none", 0.96, 1600.0)]
    curves += [curve("hnswlib", 0.96, 400.0), curve("ScaNN", 0.995, 500.0)]
    build = {"collection": "SciFact", "build CPU s": 2.0, "memory of the build MB": 1.0}
    builds = [build | {"contender": "irkit none", "bytes/document": 210.0}]
    found = {row["irkit"]: (row["is"], row["met"]) for row in bars(curves, builds)}
    assert found == {
        "queries/s at recall 0.95 / ScaNN": (3.2, "yes"),
        "queries/s at recall 0.99 / ScaNN": (1.8, "no"),
        "recall@10 with default settings, float16": (0.992, "yes"),
        "bytes of a document beyond d/2, keep: none": (18.0, "no"),
    }
    assert [row[">= 0.99"] for row in speeds(curves)] == ["1111.1", "", "", "2000.0"]


def sparse_curve(contender: str, recall: float, speed: float, **settings: object) -> dict[str, object]:
    return {
        "collection": "SciFact",
        "contender": contender,
        "settings": settings,
        "recall@10": recall,
        "queries/s": speed,
        "us/query": 1e6 / speed,
    }


SPARSE = [
    sparse_curve("numpy scan", 1.0, 100.0),
    sparse_curve("numba scan", 1.0, 1000.0),
    sparse_curve("numba scan", 1.0, 10000.0, how="together"),
    sparse_curve("irkit", 0.93, 5000.0),
    sparse_curve("irkit", 0.97, 3000.0),
    sparse_curve("irkit exact", 0.9996, 2000.0),
    sparse_curve("irkit exact", 0.9996, 9000.0, how="together"),
    sparse_curve("pyseismic-lsr", 0.95, 4000.0),
    sparse_curve("pyseismic-lsr", 0.9985, 2500.0),
    sparse_curve("irkit BM25", 1.0, 900.0),
    sparse_curve("irkit BM25", 1.0, 1500.0, how="together"),
    sparse_curve("bm25s", 1.0, 1000.0),
    sparse_curve("bm25s", 1.0, 1200.0, how="together"),
]


def test_speeds_of_sparse_engines_are_compared_at_the_same_recall() -> None:
    from benchmarks.sparse_bars import bars, bm25, exact, speeds

    build = {"collection": "SciFact", "build CPU s": 2.0, "bytes/posting": 9.0}
    builds = [
        build | {"contender": "irkit"},
        build | {"contender": "pyseismic-lsr", "build CPU s": 4.0, "bytes/posting": 6.0},
        build | {"contender": "bm25s", "build CPU s": None},
    ]
    found = {row["irkit"]: (row["is"], row["met"]) for row in bars(SPARSE, builds)}
    assert found == {
        "queries/s at recall 0.92 / pyseismic-lsr": (1.25, "yes"),
        "queries/s at recall 0.96 / pyseismic-lsr": (1.2, "yes"),
        "queries/s at recall 0.98 / pyseismic-lsr": (
            0.8,
            "no",
        ),  # only the exact search of ours finds so much
        "queries/s at recall 0.995 / pyseismic-lsr": (0.8, "no"),
        "queries/s, exact, one by one / numpy scan": (20.0, "yes"),
        "queries/s, exact, one by one / numba scan": (2.0, "yes"),
        "queries/s, exact, together / numba scan": (0.9, "no"),
        "BM25 queries/s one by one / bm25s": (0.9, "no"),
        "BM25 queries/s together / bm25s": (1.25, "yes"),
        "processor time of the build / pyseismic-lsr": (0.5, "yes"),
        "bytes / pyseismic-lsr": (1.5, "no"),
    }
    table = {row["us/query at recall@10 of"]: list(row.values())[2:] for row in speeds(SPARSE)}
    assert table["irkit"] == ["200", "333", "", "", ""]
    assert table["pyseismic-lsr"] == ["250", "400", "400", "400", ""]
    assert [list(row.values())[1:] for row in exact(SPARSE)] == [
        ["one by one", 10000.0, 1000.0, 500.0],
        ["together", None, 100.0, 111.11],
    ]
    assert [(row["BM25"], row["queries/s"], row["together"]) for row in bm25(SPARSE)] == [
        ("irkit BM25", 900.0, 1500.0),
        ("bm25s", 1000.0, 1200.0),
    ]


@pytest.mark.slow  # compiles the generator
def test_generated_sparse_vectors_are_always_the_same() -> None:
    from benchmarks.sparse_generator import make

    offsets, terms, weights, *queries = make(300, 4, 200, 123)  # compared with the script it comes from
    assert (offsets[-1], terms.sum(dtype=int)) == (33235, 510490693)
    assert weights.sum(dtype=float) == pytest.approx(29333.591798087582, rel=1e-12)
    assert queries[0].tolist() == [0, 50, 78, 118, 155]
    assert queries[1].sum(dtype=int) == 2449480
    assert queries[2].sum(dtype=float) == pytest.approx(49.045344937592745, rel=1e-12)


def made_up_texts(documents: int, queries: int) -> list[list[list[int]]]:
    random = np.random.default_rng(0)
    return [
        [(random.zipf(1.3, length) % 500).tolist() for length in random.integers(1, longest, count)]
        for longest, count in ((60, documents), (8, queries))
    ]


def test_engines_of_sparse_vectors_find_what_is_exact(tmp_path: Path) -> None:
    from benchmarks.sparse_engines import ENGINES
    from benchmarks.sparse_vectors import BM25, lexical, read, recall
    from benchmarks.worker import build

    lexical(*made_up_texts(3000, 40), 500).write(tmp_path / "vectors")
    vectors = read(tmp_path / "vectors")
    exact = {"kind": "inverted", "mode": "exact", "dtype": "float32"}
    for engine, options in (
        ("numpy", {}),
        ("numba", {}),
        ("irkit", exact),
        ("irkit", exact | {"bm25": BM25}),
    ):
        folder = tmp_path / f"{engine}{len(options)}"
        built = build(ENGINES[engine], options, vectors, folder)
        assert built["bytes"] == 0 or built["bytes"] >= 4 * len(vectors.terms)
        search = ENGINES[engine].open(vectors, folder, options)
        hits = search(40, {})
        assert [len(set(each)) for each in hits] == [10] * 40
        assert recall(hits, vectors) == 1.0
        assert engine == "numpy" or search(40, {"how": "together"}) == hits
        assert engine == "numpy" or "bm25" in options or search(40, {"how": "arrays"}) == hits
    assert recall([each[:-1] for each in hits], vectors) < 1.0


def test_engines_take_turns_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.contest import Contender, measure
    from benchmarks.sparse_vectors import lexical, read, recall

    monkeypatch.delenv("IRKIT_PEERS", raising=False)
    lexical(*made_up_texts(200, 12), 500).write(tmp_path / "vectors")
    known = {
        "numpy scan": Contender("benchmarks.sparse_engines", "numpy", {}, ({}, {"again": True})),
        "bm25s": Contender("benchmarks.sparse_engines", "bm25s", {}, peer="bm25s"),
    }
    builds, hits, times = measure(known, tmp_path / "vectors", queries=12, rounds=2, limit=0.01)
    assert builds["bm25s"] == {"skipped": "IRKIT_PEERS is not set"}
    assert list(hits) == list(times) == [("numpy scan", "{}"), ("numpy scan", '{"again": true}')]
    assert [len(each) for each in times.values()] == [2, 2]
    assert recall(hits["numpy scan", "{}"], read(tmp_path / "vectors")) == 1.0


def test_a_kept_index_of_a_peer_keeps_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import contest
    from benchmarks.sparse_vectors import lexical

    monkeypatch.setenv("IRKIT_PEERS", str(tmp_path))
    lexical(*made_up_texts(200, 12), 500).write(tmp_path / "vectors")
    peer = contest.Contender("benchmarks.sparse_engines", "numpy", {}, peer="json")
    rows = []
    for commit in ("one", "two", "three"):
        monkeypatch.setattr(contest, "provenance", lambda commit=commit: {"commit": commit})
        if commit == "three":  # it was built with other options
            kept = json.loads((tmp_path / "index.json").read_text())
            (tmp_path / "index.json").write_text(json.dumps(kept | {"options": '{"m": 16}'}))
        built = contest._build(peer, tmp_path / "vectors", tmp_path / "index")
        rows.append(contest.build_row("made up", "numpy", built, "document", 200))
    assert rows[1] == rows[0] | {"provenance": {"commit": "one"}}
    assert "provenance" not in rows[2]  # it was built anew


def test_what_is_wanted_of_training() -> None:
    from benchmarks.training import PEER, wanted

    memory = {"training MB": 900.0, "process MB": 1200.0}
    ours = {"model": "sparse", "precision": "float32", f"x {PEER}": 2.4, **memory}
    speed, training, process = wanted([ours, {"training MB": 2000.0, "process MB": 2000.0}])
    assert (speed["is"], speed["wanted"], speed["met"]) == (2.4, ">= 2.5", "no")
    assert (training["is"], training["wanted"], training["met"]) == (0.45, "<= 0.5", "yes")
    assert (process["is"], process["met"]) == (0.6, "no")
    (speed,) = wanted([{**ours, "model": "dense", f"x {PEER}": 1.3}, {}])
    assert speed["met"] == "yes"


def test_losses_of_training_further_apart_than_those_of_two_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import training

    class Worker:
        def __init__(
            self, name: str, kind: str, precision: str, model: Path, *rest: int, short: bool
        ) -> None:
            assert short
            draw, shift = random.Random(f"{name} {rest}"), 0.5 if (name, kind) == ("irkit", "sparse") else 0.0
            self.losses = (shift + 2 - 0.01 * step + draw.gauss(0, 0.1) for step in range(rest[0]))

        def __enter__(self) -> Worker:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def ask(self, steps: int) -> None: ...

        def answer(self) -> dict[str, float]:
            return {"loss": next(self.losses)}

    monkeypatch.setattr(training, "Worker", Worker)
    row = training.compare_curves("dense", "float32", Path())
    assert 0.05 < row["apart"] < 1.5 * row["two seeds of theirs"]
    assert row["last 10"] < row["first 10 losses"]
    with pytest.raises(SystemExit, match="losses of sparse in float32 are further apart than seeds"):
        training.compare_curves("sparse", "float32", Path())


@pytest.mark.data
def test_batches_of_training_hold_no_text_twice(data_dir: Path) -> None:
    pytest.importorskip("transformers")
    from benchmarks.training_worker import BATCH, pairs

    found = pairs(5 * BATCH)
    assert len(found) == 5 * BATCH == len(set(found))
    for start in range(0, len(found), BATCH):
        for texts in zip(*found[start : start + BATCH], strict=True):
            assert len(set(texts)) == BATCH


def test_engines_of_metadata_agree() -> None:
    from benchmarks.filters import measure

    rows = measure(2000)
    assert {row["condition"] for row in rows} == {
        "number",
        "float",
        "string, few values",
        "string, all differ",
    }
    assert all(row["irkit, ms"] > 0 and row["SQLite, ms"] > 0 for row in rows)


def test_the_small_versions_of_the_papers_are_run_and_shown() -> None:
    from benchmarks import studies
    from irkit.study import Cell

    names = studies.twins()
    assert len(names) >= 15
    assert {name for name in names if "_table" not in name} == {
        "mva_pretraining_local",
        "three_heads_local",
        "tite_objectives_local",
        "vector_budget_local",
        "vocabulary_transfer_figure1_local",
    }
    assert all(name.endswith("_local") for name in names)
    with pytest.raises(SystemExit, match="no wrong; expected some of"):
        studies.main(["wrong"])
    cells = [
        Cell("a", "nDCG@10", "d", {1: 0.5, 2: 0.7}, 0.6, 0.1414),
        Cell("b", "nDCG@10", "d", {1: 0.7, 2: 0.7}, 0.7, 0.0, 0.1, 0.04, 0.0412),
        Cell("a", "FLOPS", "d", {1: 1234.56, 2: 1234.56}, 1234.56, 0.0, 0.0),
        Cell("a", "floats", "d", {1: 96.0, 2: 96.0}, 96.0, 0.0, 0.0),
        Cell("a", "ms per query", "d", {1: 2.0}, 2.0, None),
    ]
    tested = {"deviation over 2 seeds": 0.1414, "difference": None, "corrected p": None}
    assert list(studies.rows(cells)) == [
        {"variant": "a", "nDCG@10": 0.6, **tested, "FLOPS": 1235.0, "floats": 96.0},
        {
            "variant": "b",
            "nDCG@10": 0.7,
            "deviation over 2 seeds": 0.0,
            "difference": 0.1,
            "corrected p": 0.041,
        },
    ]
    other = [cell._replace(dataset="e") for cell in cells[:1]]
    assert [row["collection"] for row in studies.rows([*cells, *other])] == ["d", "d", "e"]
    recall = [cell._replace(measure="R@1000", mean=0.9, corrected_p=0.5) for cell in cells[1:2]]
    row = list(studies.rows([*cells, *recall]))[1]
    assert (row["nDCG@10"], row["corrected p of nDCG@10"]) == (0.7, 0.041)
    assert (row["R@1000"], row["corrected p of R@1000"]) == (0.9, 0.5)


def test_a_row_of_two_tables_is_trained_once(tmp_path: Path) -> None:
    from benchmarks import studies
    from irkit.study import Trial

    recipe = {"train": {"seed": 1, "learning_rate": 1e-3}, "model": {"kind": "sparse"}}
    other = {**recipe, "model": {"kind": "dense"}}
    one = [Trial("A", 1, recipe, tmp_path / "one/runs/a/seed-1")]
    two = [
        Trial(name, 1, each, tmp_path / f"two/runs/{name}/seed-1")
        for name, each in (("b", recipe), ("c", other))
    ]
    studies.copy_runs([*one, *two], tmp_path)  # none has finished
    assert not any(trial.folder.exists() for trial in (*one, *two))
    for trial in one:
        trial.write_recipe()
        trial.folder.mkdir()
        trial.results.write_text("values")
        trial.drop_model()
    studies.copy_runs(two, tmp_path)
    assert [trial.finished for trial in two] == [True, False]
    assert two[0].results.read_text() == "values"
    two[0].check()  # has the recipe of the run
    two[0].results.write_text("own")
    studies.copy_runs(two, tmp_path)
    assert two[0].results.read_text() == "own"  # what is there stays


def test_the_cheapest_studies_run_first(tmp_path: Path, monkeypatch: Any) -> None:
    from benchmarks import studies
    from irkit.study import StudyConfig

    model, train = {"model": {"name": "m"}}, {"max_steps": 10, "per_device_train_batch_size": 5, "seed": 1}
    recipe: dict[str, Any] = {**model, "train": train, "evaluation": {"source": "scifact", "documents": 100}}

    def work(**changes: Any) -> float:
        study = {"recipe": recipe | changes, "variants": {"a": {}, "b": {}}, "baseline": "a", "seeds": [1]}
        return studies.work(StudyConfig.parse(study))

    assert work() == 2 * (400 + 3 * 2 * 50 + 100)
    assert work(vocabulary={"adaptation": {"train": train}}) == 2 * (400 + 3 * 3 * 50 + 100)
    assert work(vocabulary=None) == work()
    assert (
        work(evaluation={"source": "scifact"}) > work(evaluation={"source": "s", "run": "bm25.trec"}) > work()
    )
    assert work(model={"sizes": {"hidden_size": 96}}) < work()
    order = studies.twins()
    assert order.index("vocabulary_transfer_table2_local") < order.index("tite_table2_local")
    # with the collection at hand, its judged documents count, of the split that is measured
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scifact" / "qrels").mkdir(parents=True)
    for split, documents in {"train": 500, "test": 130}.items():
        lines = [f"q{query}\td{number}\t{number % 3}" for query in (1, 2) for number in range(documents)]
        text = "\n".join(["query-id\tcorpus-id\tscore", *lines])
        (tmp_path / "scifact" / "qrels" / f"{split}.tsv").write_text(text)
    few = {"source": "scifact", "split": "test", "documents": 100}
    assert work(evaluation=few) == 2 * (400 + 3 * 2 * 50 + 130)
    assert work(evaluation=few | {"documents": 200}) == 2 * (400 + 3 * 2 * 50 + 200)


def test_commands_of_recipes_are_run_with_what_is_here() -> None:
    from benchmarks import studies

    words = list(studies._here("irkit index bm25 scifact --out bm25"))
    assert words == [sys.executable, "-m", "irkit", "index", "bm25", "scifact", "--out", "bm25"]
    program, script = studies._here("python examples/recipes/hide_words.py")
    assert program == sys.executable
    assert Path(script).is_file()


def test_scale_measures_a_kind_and_keeps_the_rows_of_others(tmp_path: Path, monkeypatch: Any) -> None:
    from benchmarks import harness, scale

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(scale, "store", lambda rows: None)
    for time, options in enumerate(({"sizes": [9, 5]}, {"sizes": [5], "only": ["plaid"]})):

        def row(kind: str, size: int, time: int = time) -> dict[str, Any]:
            return {"index": kind, "documents": size, "time": time}

        monkeypatch.setattr(scale, "measure", row)
        scale.main(**options)
    rows = harness.read_results("scale")
    assert [(item["index"], item["documents"]) for item in rows] == [
        (kind, size) for size in (5, 9) for kind in scale.KINDS
    ]
    assert [item["index"] for item in rows if item["time"]] == ["plaid"]
    with pytest.raises(SystemExit, match="scale: unknown kinds plait; expected some of bm25, inverted"):
        scale.main([5], ["plait"])


def test_engines_with_lists_read_and_rank_as_many() -> None:
    from benchmarks.dense import contenders

    known = contenders(143_097, 384)
    products = ["FAISS IVF, PQ", "FAISS IVF, PQ d/2", "FAISS IVF, OPQ", "FAISS IVF, RaBitQ"]
    assert known["FAISS IVF, OPQ"].options == {"factory": "OPQ96,IVF1024,PQ96x4fs,RFlat"}
    assert contenders(1_000_000, 384)["FAISS IVF, SQ8"].options == {"factory": "IVF4096,SQ8"}
    grids = {
        tuple(tuple(each.values()) for each in known[name].settings if each)
        for name in ("irkit int8", "ScaNN")
    }
    grids |= {
        tuple((one["nprobe"], 10 * one["k_factor"]) for one in known[name].settings) for name in products
    }
    assert len(grids) == 1
    assert {(each["nprobe"],) for each in known["FAISS IVF, SQ8"].settings} == {
        pair[:1] for pair in grids.pop()
    }
    assert all(
        contenders(*size)[name].settings == known[name].settings
        for size in ((10**6, 384), (1, 8))
        for name in known
    )


def test_dense_measures_a_collection_and_keeps_the_rows_of_others(tmp_path: Path, monkeypatch: Any) -> None:
    from benchmarks import dense, harness

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(dense, "PLOT", tmp_path / "plot.svg")
    monkeypatch.delenv("IRKIT_PEERS", raising=False)
    monkeypatch.setattr(dense, "prepared", lambda name, work: Path(name))
    for time, only in enumerate(((), ("passages",))):

        def measured(folder: Path, name: str, time: int = time) -> tuple[list[Any], list[Any]]:
            both = {"collection": name, "contender": "irkit none"}
            curve = {**both, "documents": 9, "dimensions": 8, "settings": {}, "is default": True}
            speed = {"recall@10": 0.99, "queries/s": 1.0 + time, "us/query": 1.0, "wall us/query": 1.0}
            return [curve | speed], [both | {"bytes/document": 9.0, "build CPU s": float(time)}]

        about = {"date": "", "commit": time, "cpu": "", "cores": 1, "gpu": None, "versions": {}}
        monkeypatch.setattr(harness, "provenance", lambda about=about: about)
        monkeypatch.setattr(dense, "measure_collection", lambda name, folder: measured(folder, name))
        dense.main(only=only)
    curves = {row["collection"]: row["queries/s"] for row in harness.read_results("dense_curves")}
    builds = [row for row in harness.read_results("dense") if "contender" in row]
    for suite in ("dense", "dense_curves", "dense_speed"):
        for row in harness.read_results(suite):
            assert row["provenance"]["commit"] == (row["collection"] == "passages")
    assert curves == {name: 1.0 + (name == "passages") for name in dense.COLLECTIONS}
    assert {row["collection"]: row["build CPU s"] for row in builds} == {
        name: float(name == "passages") for name in dense.COLLECTIONS
    }


def test_a_soak_notes_what_ends_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import serve_soak

    answers: list[Any] = []

    def answer(*arguments: Any) -> tuple[int, bytes]:
        status, value = answers.pop(0)
        if isinstance(value, Exception):
            raise value
        return status, json.dumps(value).encode()

    def problems(*given: Any) -> list[str]:
        answers[:] = given
        soak = serve_soak.Soak(MagicMock(), ["text"], float("inf"))
        with contextlib.suppress(SystemExit):
            soak.work(0)
        return soak.problems

    monkeypatch.setattr(serve_soak, "exchange", answer)
    added, found = (201, {}), (200, {"results": [{"hits": [{"id": "soak0x1"}]}]})
    assert "ConnectionResetError" in problems(added, (0, ConnectionResetError()))[0]
    assert "500" in problems(added, (500, {}))[0]
    assert (
        "finds ['other']"
        in problems(added, (200, {"results": [{"hits": [{"id": "other"}]}]}), (0, OSError()))[0]
    )
    assert "finds ['soak0x1']" in problems(added, found, found, (0, OSError()))[0]  # of five


def test_each_bar_of_a_server_has_a_verdict() -> None:
    from benchmarks.serve import verdicts

    loads = [("irkit float32", 3.0), ("irkit float32", 2.4), ("irkit int8", 5.0)]
    rows: list[dict[str, Any]] = [{"contender": name, "x sentence-transformers": x} for name, x in loads]
    found = verdicts([*rows, {"p50 of one client": "irkit float32", "more ms": 1.5}])
    assert [(row["bar"].split(": ")[0], row["is"], row["wanted"], row["met"]) for row in found] == [
        ("irkit float32", 2.4, ">= 2.5", "no"),  # the worst load counts
        ("irkit int8", 5.0, "", ""),
        ("irkit float32", 1.5, "<= 2", "yes"),
        ("irkit float32", "not measured", ">= 2.5", ""),  # x infinity-emb
        ("irkit bfloat16", "not measured", ">= 4", ""),
        ("irkit bfloat16", "not measured", ">= 4", ""),
    ]
    assert len({tuple(row) for row in found}) == 1  # one table


def test_bfloat16_is_left_out_where_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.serve import measured_dtypes

    monkeypatch.setattr("irkit.model.hardware.prefers_bfloat16", lambda device: True)
    assert measured_dtypes() == ["float32", "bfloat16", "int8"]
    monkeypatch.setattr("irkit.model.hardware.prefers_bfloat16", lambda device: False)
    assert measured_dtypes() == ["float32", "int8"]
    assert "without bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["ivfpqfs", "hnsw"])
def test_an_index_of_faiss_is_compared_with_the_bare_one(kind: str) -> None:
    from benchmarks import index

    row = index.measure(kind, 3000)
    assert (row["documents"], row["recall@10"] > 0.5, row["x FAISS"] > 0.05) == (3000, True, True)
    assert row[index.BARE] > 0


def test_every_bar_of_search_is_listed_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import harness, search_bars

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    every = search_bars.rows()
    assert {row["is"] for row in every} == {"not measured"}
    assert {row["met"] for row in every} == {""}
    times = {"x 100 hits": 3.5, "x flat": 0.9}
    harness.write_results("runs", [{"documents": "3204 multi_vector", "index": "plaid"} | times])
    scale = {"index": "dense", "documents": 10**6, "opening ms": 2.0, "first query ms": 301.0, "add ms": 20.0}
    harness.write_results("scale", [scale, scale | {"documents": 1000, "add ms": 99.0}])
    met = {(row["of"], row["bar"]): row["met"] for row in search_bars.rows() if row["met"]}
    assert met == {
        ("plaid, 3204 multi_vector", "time of 1,000 hits / 100 hits"): "no",
        ("plaid, 3204 multi_vector", "time of 1,000 hits / flat"): "yes",
        ("dense, a million documents", "opening ms"): "yes",
        ("dense, a million documents", "first query ms"): "no",
        ("dense, a million documents", "add ms"): "yes",
    }
    assert all(row["measured"] for row in search_bars.rows() if row["met"])
    growth = [{"documents": 50_000, "ms/query": 2.0}, {"documents": 500_000, "ms/query": 5.0}]
    harness.write_results("growth", [*growth, {"documents before": 90_000, "median s": 0.05}])
    found = search_bars.rows()
    assert {row["bar"]: row["met"] for row in found if row["is"] in (2.5, 0.05)} == {
        "time of a query / 50,000 documents, at recall 0.96": "no",
        "seconds to add 3 documents, without encoding": "yes",
    }
    table = harness.table_lines([*found[0]], found)
    assert any(
        line.startswith("| dense, a million documents | add ms | 20 | <= 20 | yes |") for line in table
    )


@pytest.mark.slow  # starts four processes
def test_growth_measures_the_fastest_setting_that_finds_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import growth, harness

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    small = {"QUERIES": 5, "ROUNDS": 1, "_LIMIT": 0.01, "_SETTINGS": ({}, {"nprobe": 1, "candidates": 10})}
    for name, value in small.items():
        monkeypatch.setattr(growth, name, value)
    monkeypatch.delenv("IRKIT_PEERS", raising=False)
    monkeypatch.setattr(growth, "measure_additions", functools.partial(growth.measure_additions, 300))
    growth.main([60])
    searched, added = harness.read_results("growth")
    assert (searched["documents"], searched["recall@10"]) == (60, 1)  # few documents are scanned
    assert (added["documents before"], added["added at once"]) == (300, 3)
    assert 0 < added["median s"] <= added["longest s"]
    monkeypatch.setattr(growth, "RECALL", 1.1)
    with pytest.raises(SystemExit, match="no setting finds 110% of 60 documents"):
        growth.main([60])


def test_a_learned_map_finds_what_maxsim_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import lemur
    from benchmarks.token_vectors import generate

    small = {"FEATURES": 32, "EPOCHS": 1, "TOKENS": 256, "QUERIES": 3, "CANDIDATES": (60,)}
    for name, value in small.items():
        monkeypatch.setattr(lemur, name, value)
    found = [*lemur.measure("generated", generate(60, 60, 16))]
    assert [row["index"] for row in found] == ["plaid", "lemur, 60 candidates"]
    assert [row["recall@10"] for row in found] == [1, 1]  # few documents are scanned, and all are candidates
