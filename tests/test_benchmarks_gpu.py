"""The suite ``gpu`` where there is no GPU: what is kept, skipped and stopped, and how time is taken."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT))
    from benchmarks import gpu, gpu_timing, harness
    from benchmarks.gpu_timing import Case, Device, Limits, measure


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def cpu(run: Callable[[], Any]) -> tuple[float, float]:
    run()
    return 0.5, 1.0


DEVICE = Device("cpu", 1000, cpu)


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_timing, "measure_limits", lambda device: Limits(100.0, {"float32": 40.0}))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    return tmp_path / "gpu.jsonl"


def test_suite_skips_with_a_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    command = [sys.executable, "-m", "benchmarks", "gpu"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "gpu: skipped, torch sees no CUDA device\n")


def test_rows_are_on_the_disk_before_the_next_is_measured(results: Path) -> None:
    harness.begin_results("gpu")
    seen = []

    def run(name: str, seconds: float) -> Iterator[dict[str, Any]]:
        for number in range(2):
            seen.append(len(results.read_text().splitlines()))
            yield {"part": name, "number": number}

    assert gpu.run_parts({"a": 5, "b": 5}, run, partial(harness.add_result, "gpu")) == []
    assert seen == [1, 2, 3, 4]  # provenance, and what came before
    rows = harness.read_results("gpu")
    assert rows[0]["provenance"]["versions"]["torch"]
    assert [(row["part"], row["number"]) for row in rows] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_a_part_that_fails_keeps_its_rows_and_leaves_the_others() -> None:
    def run(name: str, seconds: float) -> Iterator[dict[str, Any]]:
        yield {"part": name, "ms": 1.0}
        if name == "b":
            yield {"part": name, "error": "code 1"}

    rows = list[dict[str, Any]]()
    assert gpu.run_parts({"a": 5, "b": 5, "c": 5}, run, rows.append) == ["b"]
    assert [row["part"] for row in rows] == ["a", "b", "b", "c"]


def test_the_table_is_printed_whatever_failed(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import __main__ as command
    from benchmarks import pages

    def run(name: str, seconds: float) -> Iterator[dict[str, Any]]:
        if name == "limits":
            yield {"part": name, "error": "code 1"}
        else:
            yield from ({"kernel": name, "ms": 0.25}, {"kernel": name, "skipped": "needs it"})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(gpu, "run_part", run)
    monkeypatch.setattr(gpu, "PARTS", {"maxsim": 5, "limits": 5, "splade_pool": 5})
    monkeypatch.setattr(pages, "fill_pages", lambda: None)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "gpu"])
    with pytest.raises(SystemExit, match="gpu: failed: limits; see above"):
        command.main()
    printed = capsys.readouterr().out
    assert "| limits | code 1 |" in printed
    assert "| maxsim | 0.25 |\n| splade_pool | 0.25 |" in printed  # rows of the same columns are one table
    assert "a GPU, irkit" in printed


def test_parts_have_what_time_is_left() -> None:
    clock, given = Clock(), {}

    def run(name: str, seconds: float) -> Iterator[dict[str, Any]]:
        given[name] = seconds
        clock.now += seconds + gpu.GRACE
        yield {"part": name}

    rows = list[dict[str, Any]]()
    parts = {"a": 300.0, "b": 300.0, "c": 300.0}
    assert gpu.run_parts(parts, run, rows.append, clock) == []
    assert given == {"a": 300.0, "b": gpu.SECONDS - 300.0 - 2 * gpu.GRACE}
    assert clock.now <= gpu.SECONDS
    assert rows[-1] == {"part": "c", "skipped": f"{gpu.SECONDS} s are over"}


def test_all_parts_end_within_ten_minutes() -> None:
    *others, tests = gpu.PARTS
    assert tests == "tests"
    assert sum(gpu.PARTS[name] for name in others) <= 510  # the tests took 62 s once
    assert gpu.SECONDS <= 600 - 2 * gpu.GRACE


def test_a_part_ends_by_its_own_clock(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(9):
            clock.now += 4
            yield {"number": number}

    assert gpu.print_rows("a", 10, rows(), clock) == 0
    *found, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert found == [{"number": 0}, {"number": 1}, {"number": 2}]
    assert last == {"part": "a", "skipped": "the rest, after 10 s"}


def test_what_is_missing_is_skipped_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    def rows(module: str) -> Iterator[dict[str, Any]]:
        yield {"number": 1}
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    assert gpu.print_rows("a", 10, rows("pydantic.fields")) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"part": "a", "skipped": "needs pydantic"}
    with pytest.raises(ModuleNotFoundError, match=r"irkit\.nothing"):
        gpu.print_rows("a", 10, rows("irkit.nothing"))


def test_a_process_that_fails_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(gpu.run_part("nothing", 60)) == [{"part": "nothing", "error": "code 1"}]
    monkeypatch.setattr(gpu, "GRACE", 1)
    code = 'import time; print(\'{"number": 1}\\n{"cut\', flush=True); time.sleep(600)'
    start = time.monotonic()
    assert list(gpu.run_part("a", 1.0, [sys.executable, "-c", code])) == [
        {"number": 1},
        {"part": "a", "error": "stopped after 2 s"},
    ]
    assert time.monotonic() - start < 60


def test_tests_are_counted_and_those_that_fail_are_named() -> None:
    rows = [{"test": str(number), "outcome": "passed"} for number in range(3)]
    rows += [{"test": "x", "outcome": "failed"}, {"part": "tests", "error": "stopped after 9 s"}]
    assert list(gpu.count_tests(rows)) == [
        {"test": "x", "error": "failed"},
        {"part": "tests", "error": "stopped after 9 s"},
        {"part": "tests", "result": "3 passed, 1 failed"},
    ]
    assert list(gpu.count_tests([])) == [{"part": "tests", "result": "none ran"}]


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)], ids=str)
def test_files_that_need_what_is_not_there_are_skipped_by_name(workers: tuple[str], tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("import no_such_package.deep\ndef test_a(): pass\n")
    (tmp_path / "test_b.py").write_text("import irkit.no_such_module\ndef test_b(): pass\n")
    (tmp_path / "test_c.py").write_text("def test_c(): pass\ndef test_d(): assert 0\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu_tests", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors", *workers, "--rootdir", str(tmp_path), str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    rows = (json.loads(line) for line in result.stdout.splitlines() if line.startswith("{"))
    assert {(row["test"], row["outcome"]) for row in rows} == {
        ("test_a.py", "files skipped, needs no_such_package"),
        ("test_b.py", "failed"),
        ("test_c.py::test_c", "passed"),
        ("test_c.py::test_d", "failed"),
    }


def test_every_test_marked_gpu_is_in_the_files() -> None:
    files = {Path(name).name for name in gpu.gpu_tests()}
    assert {"test_encoder.py", "test_products.py", "test_triton_launches.py"} <= files
    assert len(files) < 20


def case(**ways: Any) -> Case:
    def inputs(seed: int) -> Tensor:
        return torch.full((10,), float(seed + 1))

    return Case({"kernel": "sum"}, "float32", inputs, ways, lambda x: (x.double().sum()[None],), 50.0, 10.0)


def total(x: Tensor) -> Tensor:
    return x.sum()[None]


def test_what_is_wrong_missing_or_broken_is_not_timed() -> None:
    def broken(x: Tensor) -> Tensor:
        raise ValueError("no such thing")

    ways = {"irkit": total, "torch": total, "wrong": lambda x: total(x) + 1, "broken": broken}
    rows = {row["way"]: row for row in measure(case(**ways, peer="needs peer"), DEVICE)}
    assert rows["peer"] == {"kernel": "sum", "way": "peer", "skipped": "needs peer"}
    assert rows["broken"]["error"] == "ValueError: no such thing"
    assert rows["wrong"]["error"] == "differs by 0.1; not timed"
    assert (rows["irkit"]["ms"], rows["irkit"]["x torch"]) == (500.0, 1.0)
    nan = {row["way"]: row for row in measure(case(irkit=lambda x: total(x) * torch.nan), DEVICE)}
    assert nan["irkit"]["error"] == "differs by nan; not timed"


def test_a_case_that_cannot_be_made_leaves_the_others() -> None:
    def exact(x: Tensor) -> tuple[Tensor, ...]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    (row,) = measure(case(irkit=total)._replace(exact=exact), DEVICE)
    assert row == {"kernel": "sum", "error": "OutOfMemoryError: CUDA out of memory"}


def test_a_device_that_has_failed_ends_the_part() -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        list(measure(case(irkit=broken, torch=total), DEVICE))


def test_the_limit_is_what_takes_longest() -> None:
    found = gpu_timing.share(Limits(100.0, {"float32": 40.0}), "float32", 50.0, 10.0, 1.0)
    assert found == {"% of limit": 50.0, "limit": "memory"}
    found = gpu_timing.share(Limits(100.0, {"float32": 40.0}), "float32", 50.0, 30.0, 1.0)
    assert found == {"% of limit": 75.0, "limit": "matrix"}
    assert gpu_timing.share(Limits(100.0, {}), "int8", 50.0, 30.0, 1.0)["limit"] == "memory"


def test_no_input_is_used_again_while_the_cache_may_hold_it() -> None:
    """Between two uses of an input others of more than twice the cache are used, by whichever way."""
    used = list[int]()

    def way(x: Tensor) -> Tensor:
        used.append(int(x[0]))
        return x.sum()[None]

    list(measure(case(irkit=way, torch=way), DEVICE))
    count = len(set(used))
    assert count * 40 > 2 * DEVICE.cache
    timed = used[2 * (1 + count) : -2]  # after the comparison and a warm-up of both, before their memory
    assert len(timed) > 2 * gpu_timing.ROUNDS
    for at in range(len(timed) - count):
        assert len(set(timed[at : at + count])) == count


def test_events_are_put_around_all_calls_while_the_device_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    log = list[str]()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, other: Event) -> float:
            return 7.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"))
    seconds, host = gpu_timing._event_seconds(lambda: log.append("run"))
    assert log == ["wait", "run", "wait", "sleep", "event", "run", "event", "wait"]
    assert seconds == 0.007
    assert host > 0


@pytest.mark.parametrize("name", ["maxsim", "splade_pool", "ragged_pool", "residual_maxsim"])
def test_kernels_agree_with_exact_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu_kernels

    monkeypatch.setattr(gpu_timing, "ROUNDS", 1)
    for size, value in {"TERMS": 300, "WIDTH": 64, "QUERY": 3, "DOCUMENT": (2, 9)}.items():
        monkeypatch.setattr(gpu_kernels, size, value)
    for one in gpu_kernels.KERNELS[name](DEVICE):
        ways = {way: run for way, run in one.ways.items() if way in ("irkit", "torch")}
        rows = list(measure(one._replace(ways=ways), DEVICE._replace(cache=0)))
        assert [row["way"] for row in rows] == list(ways)
        assert all("ms" in row for row in rows)


@pytest.mark.parametrize("name", ["BERT-base", "ModernBERT-base"])
def test_encoders_agree_with_transformers(name: str) -> None:
    from benchmarks.gpu_encoders import measure_encoder

    rows = list(measure_encoder(name, DEVICE))
    assert [row["contender"] for row in rows] == ["transformers", "irkit sdpa"]
    assert all(row["tokens/s"] > 0 for row in rows)


def test_strings_to_vectors_without_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu_encoders import measure_texts

    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    skipped, ours = measure_texts(DEVICE)
    assert skipped["skipped"] == "needs sentence_transformers"
    assert ours["texts/s"] == 20.0  # in the second that the clock says


class BruteForce:
    """In the place of fast-plaid: scores all documents, in the form of its interface."""

    wrong = 0  # is added to the rows

    def __init__(self, index: str, device: str) -> None:
        Path(index).mkdir()

    def create(self, documents_embeddings: list[Tensor]) -> None:
        self.documents = documents_embeddings

    def search(self, asked: Tensor, top_k: int, show_progress: bool) -> list[list[tuple[int, float]]]:
        scores = torch.stack([(asked @ each.T).amax(2).sum(1) for each in self.documents], dim=1)
        best = scores.topk(top_k, dim=1)
        return [
            [(row + self.wrong, score) for row, score in zip(*pair, strict=True)]
            for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]


@pytest.mark.parametrize("wrong", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_indexes_are_timed_beside_their_peers_if_they_are_right(
    wrong: int, monkeypatch: pytest.MonkeyPatch, small_limits: Callable[..., None]
) -> None:
    from benchmarks import gpu_search

    peer = type("FastPlaid", (BruteForce,), {"wrong": wrong})
    monkeypatch.setitem(sys.modules, "fast_plaid", ModuleType("fast_plaid"))
    monkeypatch.setitem(sys.modules, "fast_plaid.search", SimpleNamespace(FastPlaid=peer))
    # little data, which gets codes and lists all the same
    small_limits(plaid_uncompressed=50, plaid_scan=10, dense_scan=100, dense_scan_per_hit=1)
    sizes = gpu_search.Sizes(60, 5, 4, 500, 400, 4, 2)
    rows = {
        (row["what"].split()[1], row["contender"]): row for row in gpu_search.measure_search(DEVICE, sizes)
    }
    tokens = {name: row for (kind, name), row in rows.items() if kind == "token"}
    if wrong:
        assert tokens["fast-plaid"]["error"].endswith("; not timed")
        assert [*tokens] == ["irkit plaid, cpu", "fast-plaid"]
    else:
        ours, theirs, ratio = tokens.values()
        assert theirs["recall@10"] == 1.0
        assert ratio["contender"] == "irkit plaid, cpu: x fast-plaid"
        assert ratio["tokens/s"] == ours["tokens/s"] / theirs["tokens/s"]
        assert [*ours] == [*theirs] == [*ratio]  # one table
    dense = [row for (kind, _), row in rows.items() if kind == "dense"]
    names = ["torch", "irkit flat, cpu", "irkit flat, cpu: x torch", "irkit dense, cpu"]
    assert [row["contender"] for row in dense] == names
    assert all(row["queries/s one by one"] > 0 for row in (*dense, tokens["irkit plaid, cpu"]))
    assert dense[0]["recall@10"] == dense[1]["recall@10"] == 1.0


def test_an_index_that_is_missing_or_fails_leaves_the_others() -> None:
    from benchmarks.gpu_search import measured, over

    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'fast_plaid'", name="fast_plaid")

    class PanicException(BaseException):
        """What Rust raises."""

    def broken() -> Any:
        raise PanicException("no such thing")

    def lost() -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    labels, scores = {"what": "vectors", "documents": 20}, torch.zeros(1, 20)
    skipped = measured(labels, "peer", missing, (1, 1), scores)
    assert skipped == {"what": "vectors", "contender": "peer", "skipped": "needs fast_plaid"}
    failed = measured(labels, "peer", broken, (1, 1), scores)
    assert failed == {"what": "vectors", "contender": "peer", "error": "PanicException: no such thing"}
    assert list(over(skipped, failed)) == []
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measured(labels, "peer", lost, (1, 1), scores)


def test_recall_counts_different_documents_and_takes_equal_scores_as_equally_good() -> None:
    from benchmarks.gpu_search import recall_of

    scores = torch.tensor([[*range(20, 10, -1), 11.0, 11 - 1e-3]])  # the tenth and the eleventh are equal
    best = np.arange(10)[None]
    assert recall_of(best, scores) == 1.0
    assert recall_of(np.where(best == 9, 10, best), scores) == 1.0
    for other in (11, 0, -1):
        assert recall_of(np.where(best == 9, other, best), scores) == 0.9


def test_exact_scores_are_those_of_irkit() -> None:
    from benchmarks.gpu_collections import Sizes, exact_scores, make_texts
    from irkit import MultiVector, Ragged, score

    texts = make_texts(DEVICE, Sizes(30, 6, 5, 0, 0, 0, 0))
    asked = Ragged(texts.queries.flatten(0, 1), torch.full((6,), 32))
    expected = score(MultiVector(asked), MultiVector(Ragged(texts.values, texts.lengths)))[:5]
    torch.testing.assert_close(exact_scores(texts, 5, at_once=2), expected)
    torch.testing.assert_close(texts.values.norm(dim=1), torch.ones(len(texts.values)), rtol=0, atol=1e-3)
    assert expected.topk(2).values.diff().lt(-1).all()  # a query is about one document


@pytest.mark.slow
def test_what_tells_most_of_a_gpu_is_measured_first(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, small_limits: Callable[..., None]
) -> None:
    """On a simulated device, with the random numbers of the CPU."""
    from benchmarks import gpu_search

    monkeypatch.setitem(sys.modules, "fast_plaid", ModuleType("fast_plaid"))
    monkeypatch.setitem(sys.modules, "fast_plaid.search", SimpleNamespace(FastPlaid=BruteForce))
    # little data, which gets codes and lists all the same
    small_limits(plaid_uncompressed=50, plaid_scan=10, dense_scan=100, dense_scan_per_hit=1)
    monkeypatch.setattr(gpu_search, "WARM", 10)
    sizes = gpu_search.Sizes(40, 4, 4, 400, 300, 4, 2)
    texts, (vectors, queries) = (
        make(DEVICE, sizes) for make in (gpu_search.make_texts, gpu_search.make_vectors)
    )
    there = request.getfixturevalue("gpu").device
    moved = texts._replace(values=texts.values.to(there))
    monkeypatch.setattr(gpu_search, "make_texts", lambda *_: moved)
    monkeypatch.setattr(gpu_search, "make_vectors", lambda *_: (vectors.to(there), queries))
    rows = list(gpu_search.measure_search(DEVICE._replace(name="cuda"), sizes))
    assert [row["contender"] for row in rows] == [
        "irkit plaid, gpu",
        "torch",
        "irkit flat, gpu",
        "irkit flat, gpu: x torch",
        "fast-plaid",
        "irkit plaid, gpu: x fast-plaid",
        "irkit dense, gpu",
        "irkit dense, cpu",
        "irkit flat, cpu",
        "irkit plaid, cpu",
    ]
    assert all(row["queries/s"] > 0 for row in rows)
