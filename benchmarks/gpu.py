"""Suite ``gpu``: kernels, indexes, encoders and all tests marked ``gpu`` on CUDA, in under 10 minutes.

Needs no data and no weights: models are random, lengths follow those of MS MARCO passages. What a part
imports and this machine lacks is skipped by name. Each part is a process of its own, as an error on a GPU
leaves a process of no further use: ``python -m benchmarks.gpu PART SECONDS`` prints a row a line, tiny ones
where there is no GPU. The row is in ``results/gpu.jsonl`` before the next is measured.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.harness import Row, add_result, begin_results

ROOT = Path(__file__).parents[1]
SECONDS = 580  # of all parts
GRACE = 10  # a part ends by its own clock, or is stopped so much later
PARTS = {  # seconds of each, the most telling first; what one leaves over goes to the tests
    "limits": 10,
    "maxsim": 55,
    "splade_pool": 45,
    "layers": 15,
    "ragged_pool": 28,
    "residual_maxsim": 15,
    "search": 95,
    "BERT-base": 30,
    "texts": 25,
    "ModernBERT-base": 30,
    "MiniLM-L6": 20,
    "tite": 60,
    "training": 80,
    "tests": SECONDS,
}
OURS = ("irkit", "irkit_kernels", "benchmarks")

Run = Callable[[str, float], Iterator[Row]]


def main() -> str | None:
    """Run all parts, or say why not; return what failed, if anything."""
    import torch

    if not torch.cuda.is_available():
        print("gpu: skipped, torch sees no CUDA device")
        raise SystemExit(0)
    begin_results("gpu")
    failed = run_parts(PARTS, run_part, partial(add_result, "gpu"))
    return f"gpu: failed: {', '.join(failed)}; see above" if failed else None


def run_parts(
    parts: Mapping[str, float],
    run: Run,
    keep: Callable[[Row], object],
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Run parts in order while there is time, and keep each row as it comes.

    Args:
        parts: Seconds that each part may take, by name.
        run: Function that yields the rows of a part and ends within a number of seconds.
        keep: Function that stores a row.
        clock: Function that returns the time in seconds.

    Returns:
        Parts with a row that holds an error.
    """
    end, failed = clock() + SECONDS, []
    for name, seconds in parts.items():
        start = clock()
        if end - start <= GRACE:
            keep({"part": name, "skipped": f"{SECONDS} s are over"})
            continue
        count = 0
        for row in run(name, min(seconds, end - start - GRACE)):
            keep(row)
            count += 1
            if "error" in row and name not in failed:
                failed.append(name)
        took = f"gpu: {name} took {clock() - start:.0f} s, {count} rows"
        print(took, file=sys.stderr, flush=True)
    return failed


def run_part(name: str, seconds: float, command: list[str] | None = None) -> Iterator[Row]:
    """Yield the rows that the process of a part prints, and a last row if something was wrong.

    Args:
        name: Name of the part.
        seconds: Time that it gets.
        command: Starts the process; by default the command of the part.
    """
    rows = _printed(name, seconds, command)
    yield from count_tests(rows) if name == "tests" else rows


def count_tests(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield rows of the tests that fail, and at the end how many passed or could not be run."""
    counts = Counter[str]()
    for row in rows:
        if "outcome" not in row:
            yield row
            continue
        counts[row["outcome"]] += 1
        if row["outcome"] == "failed":
            yield {"test": row["test"], "error": "failed"}
    found = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    yield {"part": "tests", "result": found or "none ran"}


def gpu_tests() -> list[str]:
    """Return the files with tests that are marked ``gpu``: collecting the others takes a minute."""
    files = [*(ROOT / "tests").glob("test_*.py"), *(ROOT / "kernels").rglob("test_*.py")]
    marks = ("pytest.mark.gpu", "@on_device")
    return sorted(str(file) for file in files if any(mark in file.read_text() for mark in marks))


def _printed(name: str, seconds: float, command: list[str] | None) -> Iterator[Row]:
    fine: tuple[int, ...] = (0,)
    command = command or [sys.executable, "-m", "benchmarks.gpu", name, f"{seconds:.0f}"]
    if name == "tests":
        command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu_tests", "-m", "gpu"]
        # other versions of packages have warnings of their own
        command += ["--continue-on-collection-errors", "-W", "default", *gpu_tests()]
        command += ["-n", "8"] if find_spec("xdist") else []  # most of the time kernels are compiled
        fine = (0, 1, 5)  # what failed is in the rows; there may be no tests
    ended: Row = {}
    for line in _lines(command, seconds, ended):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            yield row
        else:
            print(line, file=sys.stderr, flush=True)
    if ended["code"] not in fine:
        yield {
            "part": name,
            "error": f"stopped after {seconds + GRACE:.0f} s"
            if ended["stopped"]
            else f"code {ended['code']}",
        }


def _lines(command: list[str], seconds: float, ended: Row) -> Iterator[str]:
    """Yield the lines that a process prints; stop it ``GRACE`` after its time. ``ended`` says how."""
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment
    ) as process:

        def stop() -> None:
            ended["stopped"] = True
            os.killpg(process.pid, signal.SIGKILL)  # and the workers of pytest

        ended["stopped"] = False
        timer = threading.Timer(seconds + GRACE, stop)
        timer.start()
        try:
            for line in process.stdout or ():
                yield line.rstrip("\n")
            ended["code"] = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def rows_of(part: str) -> Iterator[Row]:
    """Yield the measurements of a part, row by row."""
    from benchmarks.gpu_timing import find_device, measure, measure_limits

    device = find_device()
    if part == "limits":
        limits = measure_limits(device)
        yield {"limit": "copy", "is": limits.copy / 1e9, "unit": "GB/s read and written"}
        for dtype, flops in limits.products.items():
            yield {"limit": f"product of {dtype}", "is": flops / 1e12, "unit": "TFLOP/s"}
    elif part == "tite":
        from benchmarks import tite

        rows = []
        for row in tite.measure(device.name):
            rows.append(row)
            yield {name: value for name, value in row.items() if name != "seconds"}
        yield from [*tite.bars(rows, device.name), *tite.table(rows)]
    elif part == "training":
        from benchmarks.gpu_training import measure_training

        yield from measure_training(device)
    elif part == "search":
        from benchmarks.gpu_search import measure_search

        yield from measure_search(device)
    elif part in ("texts", "MiniLM-L6", "BERT-base", "ModernBERT-base"):
        from benchmarks.gpu_encoders import measure_encoder, measure_texts

        yield from measure_texts(device) if part == "texts" else measure_encoder(part, device)
    else:
        from benchmarks.gpu_kernels import KERNELS

        for case in KERNELS[part](device):
            yield from measure(case, device)


def print_rows(
    part: str, seconds: float, rows: Iterator[Row], clock: Callable[[], float] = time.monotonic
) -> int:
    """Print rows while there is time; return the exit code of the process."""
    end = clock() + seconds
    try:
        for row in rows:
            print(json.dumps(row), flush=True)
            if clock() > end:
                print(json.dumps({"part": part, "skipped": f"the rest, after {seconds:.0f} s"}), flush=True)
                return 0
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing in OURS:
            raise
        print(json.dumps({"part": part, "skipped": f"needs {missing}"}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(print_rows(sys.argv[1], float(sys.argv[2]), rows_of(sys.argv[1])))
