"""Suite ``memory``: most memory a process holds that encodes the passages of suite ``encode``.

A fresh process each, imports, weights and vectors included.
"""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.encode import DTYPES, PEER, collections, load
from benchmarks.harness import Row, peak_memory, write_results


def main() -> None:
    """Measure every contender."""
    rows: list[Row] = []
    for name in (PEER, *DTYPES):
        command = [sys.executable, "-m", "benchmarks.memory", name]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"memory: {name} failed:\n{result.stderr}")
        rows.append(json.loads(result.stdout.splitlines()[-1]))
    write_results("memory", rows)


if __name__ == "__main__":
    _, passages, _ = collections()[0]
    load(sys.argv[1], query=False)(passages)
    contender = sys.argv[1] if sys.argv[1] == PEER else f"irkit {sys.argv[1]}"
    print(json.dumps({"contender": contender, "texts": len(passages), "memory MB": peak_memory()}))
