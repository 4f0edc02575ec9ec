"""Suite ``kernels``: the bench of every kernel that runs on this machine.

A bench is a file ``bench_*.py`` in the kernel's folder with ``DEVICES``, what it runs on, and
``run(device) -> rows``, which checks correctness before it times.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, write_results

FOLDER = Path(__file__).parents[1] / "kernels" / "irkit_kernels"


def main() -> None:
    """Run every bench on the CPU."""
    write_results("kernels", run_kernels("cpu"))


def run_kernels(device: str) -> list[Row]:
    """Rows of every bench that knows ``device``, cpu or cuda."""
    return [{"kernel": name, **row} for name, bench in benches(device).items() for row in bench.run(device)]


def benches(device: str) -> dict[str, Any]:
    """Modules of the benches that know ``device``, by kernel."""
    found = {}
    for file in sorted(FOLDER.glob("*/bench_*.py")):
        name = file.parent.name
        spec = importlib.util.spec_from_file_location(f"irkit_kernels.{name}.{file.stem}", file)
        if spec is None or spec.loader is None:
            raise SystemExit(f"kernels: cannot load {file}")
        bench = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(bench)
        if device in bench.DEVICES:
            found[name] = bench
    return found
