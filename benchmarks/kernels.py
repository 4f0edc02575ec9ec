"""Suite ``kernels``: the bench of every CPU kernel.

A bench is a file ``bench_*.py`` in the kernel's folder with ``run() -> rows``, which checks correctness
before it times. Kernels on a GPU are timed by the suite ``gpu``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import read_results, write_results

FOLDER = Path(__file__).parents[1] / "kernels" / "irkit_kernels"


def main(only: Collection[str] = ()) -> None:
    """Run the benches of some kernels, or of all; rows of other kernels stay as they are stored."""
    known = [file.parent.name for file in _files()]
    if unknown := sorted({*only} - {*known}):
        raise SystemExit(f"kernels: no bench of {', '.join(unknown)}; expected some of {', '.join(known)}")
    for name, bench in benches(only).items():
        measured = [{"kernel": name, **row} for row in bench.run()]
        stored = read_results("kernels") if (harness.RESULTS / "kernels.jsonl").exists() else []
        kept = [row for row in stored if row["kernel"] in known and row["kernel"] != name]
        write_results("kernels", sorted([*kept, *measured], key=lambda row: known.index(row["kernel"])))


def _files() -> list[Path]:
    return sorted(FOLDER.glob("*/bench_*.py"))


def benches(only: Collection[str] = ()) -> dict[str, Any]:
    """Return the modules of the benches of some kernels, or of all, by kernel."""
    found = {}
    for file in _files():
        name = file.parent.name
        if only and name not in only:
            continue
        spec = importlib.util.spec_from_file_location(f"irkit_kernels.{name}.{file.stem}", file)
        if spec is None or spec.loader is None:
            raise SystemExit(f"kernels: cannot load {file}")
        found[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[name])
    return found
