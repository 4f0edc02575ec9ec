"""Suite ``kernels``: the bench of every CPU kernel.

A bench is a file ``bench_*.py`` in the kernel's folder with ``run() -> rows``, which checks correctness
before it times. Kernels on a GPU are timed by the suite ``gpu``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from benchmarks.harness import write_results

FOLDER = Path(__file__).parents[1] / "kernels" / "irkit_kernels"


def main() -> None:
    """Run every bench."""
    rows = ({"kernel": name, **row} for name, bench in benches().items() for row in bench.run())
    write_results("kernels", rows)


def benches() -> dict[str, Any]:
    """Modules of the benches, by kernel."""
    found = {}
    for file in sorted(FOLDER.glob("*/bench_*.py")):
        name = file.parent.name
        spec = importlib.util.spec_from_file_location(f"irkit_kernels.{name}.{file.stem}", file)
        if spec is None or spec.loader is None:
            raise SystemExit(f"kernels: cannot load {file}")
        found[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[name])
    return found
