"""Suite ``kernels``: the bench of every kernel that runs on this machine.

A bench is a file ``bench_*.py`` in the kernel's folder with ``DEVICES``, what it runs on, and
``run(device) -> rows``, which checks correctness before it times.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from benchmarks.harness import Row, write_results

FOLDER = Path(__file__).parents[1] / "kernels" / "irkit_kernels"


def main() -> None:
    """Run every bench on the CPU."""
    write_results("kernels", run_kernels("cpu"))


def run_kernels(device: str) -> list[Row]:
    """Rows of every bench that knows ``device``, cpu or cuda."""
    rows: list[Row] = []
    for file in sorted(FOLDER.glob("*/bench_*.py")):
        name = file.parent.name
        spec = importlib.util.spec_from_file_location(f"irkit_kernels.{name}.{file.stem}", file)
        if spec is None or spec.loader is None:
            raise SystemExit(f"kernels: cannot load {file}")
        bench = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(bench)
        if device in bench.DEVICES:
            rows += [{"kernel": name, **row} for row in bench.run(device)]
    return rows
