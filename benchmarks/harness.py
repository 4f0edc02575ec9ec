"""What every suite shares: interleaved timing, results with provenance, rendered tables."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

__all__ = [
    "add_result",
    "begin_results",
    "data_dir",
    "interleave",
    "matmul_peak",
    "peak_memory",
    "provenance",
    "read_results",
    "render",
    "table_lines",
    "write_results",
]

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "irkit",
    "torch",
    "transformers",
    "sentence-transformers",
    "tokenizers",
    "faiss-cpu",
    "numba",
    "triton",
    "openvino",
    "nncf",
)

_INSTRUCTIONS = {
    "amx_tile": "with AMX",
    "avx512_bf16": "with AVX512-BF16",
    "avx512_vnni": "with AVX512-VNNI",
    "avx512f": "with AVX512",
    "avx2": "with AVX2",
}

Row = dict[str, Any]


def data_dir() -> Path:
    """Return the folder of real collections: ``IRKIT_DATA``, or ``../shared/data`` beside the checkout."""
    path = Path(os.environ.get("IRKIT_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not path.is_dir():
        raise SystemExit(
            f"benchmarks: no collections at {path}; set IRKIT_DATA to the folder that holds them"
        )
    return path


def interleave(
    contenders: Mapping[str, Callable[[], Any]],
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time every contender once per round, after one unmeasured round; return seconds by name.

    What slows the machine for a while then slows all of them, so the ratios hold.
    """
    for run in contenders.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        order = list(contenders.items())
        for name, run in order if number % 2 == 0 else reversed(order):
            gc.collect()
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return seconds


def ratio(seconds: Mapping[str, Sequence[float]], name: str, baseline: str) -> float:
    """Return the median over the rounds of ``baseline / name`` within a round: above 1 is faster."""
    pairs = zip(seconds[baseline], seconds[name], strict=True)
    return statistics.median(slow / fast for slow, fast in pairs)


def matmul_peak(dtype: str, size: int = 2048, rounds: int = 5) -> float:
    """Measure the fastest square matrix product on all cores, in FLOP/s."""
    import torch

    a, b = (torch.randn(size, size).to(getattr(torch, dtype)) for _ in range(2))
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        torch.nn.functional.linear(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def peak_memory() -> float:
    """Return the most MB that this process has held; unlike ``ru_maxrss``, a new program starts at zero."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def provenance() -> Row:
    """Describe when, on what and with which versions a number was measured."""
    import torch

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _git("rev-parse", "--short", "HEAD")
        + ("+" if _git("status", "--porcelain", "irkit", "kernels") else ""),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": versions,
    }


def write_results(suite: str, rows: Iterable[Row]) -> Path:
    """Replace ``results/SUITE.jsonl``: a line of provenance, then the rows that were measured there.

    A row with a "provenance", as `read_results` gives it, keeps it; any other row gets that of now. Where it
    differs from that of the row before, another line of provenance comes between.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{suite}.jsonl"
    now, lines, last = provenance(), [], None
    for row in [*rows]:
        source = row.get("provenance", now)
        if source != last:
            lines.append(json.dumps(source))
        lines.append(json.dumps(_cells(row)))
        last = source
    aside = path.with_suffix(".tmp")
    aside.write_text("\n".join(lines or [json.dumps(now)]) + "\n")
    aside.replace(path)
    return path


def begin_results(suite: str) -> Path:
    """Replace ``results/SUITE.jsonl`` by a line of provenance; `add_result` adds the rows."""
    return write_results(suite, [])


def add_result(suite: str, row: Row) -> None:
    """Add a row to ``results/SUITE.jsonl``; it is on the disk before this returns."""
    with (RESULTS / f"{suite}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_results(suite: str) -> list[Row]:
    """Return the rows of ``results/SUITE.jsonl``, each with its "provenance"."""
    source, rows = {}, []
    for line in (RESULTS / f"{suite}.jsonl").read_text().splitlines():
        item: Row = json.loads(line)
        if "versions" in item:
            source = item
        else:
            rows.append(item | {"provenance": source})
    return rows


def render(suite: str, kernel: str | None = None) -> str:
    """Write the results of a suite as markdown: a table per set of columns, and lines of provenance.

    Args:
        suite: Name of the suite.
        kernel: Only the rows of this kernel, without the column that names it.
    """
    rows = read_results(suite)
    if kernel:
        rows = [
            {key: value for key, value in row.items() if key != "kernel"}
            for row in rows
            if row["kernel"] == kernel
        ]
    if not rows:
        return "Not measured yet."
    lines: list[str] = []
    tables: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        tables.setdefault(tuple(_cells(row)), []).append(row)
    same = len({_source(row) for row in rows}) == 1
    for columns, table in tables.items():
        lines += ["", *table_lines(columns, table)]
        if not same:
            lines += _sources(table)
    return "\n".join([*lines[1:], *(_sources(rows) if same else ())])


def table_lines(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table of rows with the same columns."""
    head = [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns))]
    return [*head, *(f"| {' | '.join(map(_cell, _cells(row).values()))} |" for row in rows)]


def _sources(table: Sequence[Row]) -> list[str]:
    """Return the provenance of a table; where there are several, each names its rows by their first cells."""
    groups: dict[str, list[list[str]]] = {}
    for row in table:
        groups.setdefault(_source(row), []).append([_cell(value) for value in _cells(row).values()])
    if len(groups) == 1:
        return ["", *groups]
    for count in range(1, len(_cells(table[0])) + 1):
        names = {
            source: [*dict.fromkeys(" ".join(cells[:count]) for cells in group)]
            for source, group in groups.items()
        }
        if len({*chain.from_iterable(names.values())}) == sum(map(len, names.values())):
            break
    largest = max(groups, key=lambda source: len(groups[source]))
    if count > 1:
        names[largest] = ["Other rows"]
    order = sorted(groups, key=lambda source: names[source] == ["Other rows"])
    return [line for source in order for line in ("", f"{', '.join(names[source])}: {source}")]


def _source(row: Row) -> str:
    """Return the provenance of a row in words."""
    source = row["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
    machine = source["gpu"] or f"{source['cpu']}, {source['cores']} cores"
    return f"{source['date']}, commit {source['commit']}, {machine}, {versions}."


def _cells(row: Row) -> Row:
    """Return a row without its provenance."""
    return {key: value for key, value in row.items() if key != "provenance"}


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cpu() -> str:
    """Return the name of the CPU and its widest vector instructions, as Linux tells them."""
    path = Path("/proc/cpuinfo")
    fields = [line.partition(":") for line in path.read_text().splitlines()] if path.exists() else []
    about = {name.strip(): text.strip() for name, _, text in fields}
    flags = about.get("flags", about.get("Features", "")).split()
    widest = next((label for flag, label in _INSTRUCTIONS.items() if flag in flags), "")
    return " ".join(filter(None, (about.get("model name", platform.processor()), widest)))


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent
        )
    except OSError:
        return ""
    return result.stdout.strip()
