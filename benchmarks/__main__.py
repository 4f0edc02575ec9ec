"""Run a suite, store its results, put them into the pages that show them, and print them."""

from __future__ import annotations

import argparse
import importlib
import os
from typing import Any

SUITES = (
    "adds",
    "dense",
    "encode",
    "families",
    "filters",
    "gpu",
    "growth",
    "heads",
    "index",
    "kernels",
    "lemur",
    "memory",
    "multi_vector",
    "openvino",
    "runs",
    "scale",
    "serve",
    "shard_builds",
    "shards",
    "sparse",
    "studies",
    "tite",
    "training",
)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument(
        "--sizes",
        help="numbers of documents of the suites adds, dense, growth, runs, scale, shard_builds and shards",
    )
    parser.add_argument("--soak", type=float, help="minutes that the suite serve loads a server, instead")
    parser.add_argument(
        "--only",
        help="studies, kernels, kinds of scale or shards, or collections of dense, separated by commas",
    )
    parser.add_argument("--show", action="store_true", help="print the stored results instead of measuring")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads its OpenMP
    from benchmarks.harness import render
    from benchmarks.pages import fill_pages

    failed = None
    if not arguments.show:
        options: dict[str, Any] = {}
        if arguments.sizes:
            options["sizes"] = [*map(int, arguments.sizes.split(","))]
        if arguments.only:
            options["only"] = arguments.only.split(",")
        if arguments.soak:
            arguments.suite = "serve_soak"
            failed = importlib.import_module("benchmarks.serve_soak").run_soak(arguments.soak)
        else:
            failed = importlib.import_module(f"benchmarks.{arguments.suite}").main(**options)
        fill_pages()
    if arguments.suite != "studies":  # its results are those of each study
        print(render(arguments.suite))
    raise SystemExit(failed)  # None is success


if __name__ == "__main__":
    main()
