"""The process of one engine, under the Python that has it: builds an index, or searches on request.

``python -m MODULE build ENGINE OPTIONS VECTORS FOLDER`` builds an index and prints what it took;
``serve`` instead of ``build`` answers requests, a line of JSON each: ``{"settings": ..., "queries": 30}``
searches for the first 30 queries. OPTIONS is JSON and chooses what is built. How many threads there are,
the environment says.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.harness import peak_memory

__all__ = ["BUILD_LIMIT", "Engine", "K", "Options", "Search", "build", "work"]

Options = dict[str, Any]
Search = Callable[[int, Options], list[list[int]]]
"""The hits of so many queries, the first ones, with these settings."""

K = 10  # hits
BUILD_LIMIT = 3600  # seconds of processor time; a longer build is ended by SIGXCPU


@dataclass(frozen=True)
class Engine:
    """How to build and to open an index, and the package that does it."""

    package: str
    build: Callable[[Any, Path, Options], None]
    open: Callable[[Any, Path, Options], Search]


def work(engines: Mapping[str, Engine], read: Callable[[Path], Any]) -> None:
    """Do what the command line says."""
    verb, name, options, source, folder = sys.argv[1:]
    if verb == "build":
        resource.setrlimit(resource.RLIMIT_CPU, (BUILD_LIMIT, BUILD_LIMIT + 10))
        print(json.dumps(build(engines[name], json.loads(options), read(Path(source)), Path(folder))))
    else:
        _serve(engines[name], json.loads(options), read(Path(source)), Path(folder))


def build(engine: Engine, options: Options, vectors: Any, folder: Path) -> dict[str, float]:
    """Build, and say how long it took, how much memory and how many bytes."""
    before, start, used = peak_memory(), time.perf_counter(), _cpu_seconds()
    engine.build(vectors, folder, options)
    return {
        "seconds": time.perf_counter() - start,
        "cpu": _cpu_seconds() - used,
        "memory": peak_memory() - before,
        "bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
    }


def _serve(engine: Engine, options: Options, vectors: Any, folder: Path) -> None:
    """Answer requests until there are no more."""
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever an engine prints is no answer
    search = engine.open(vectors, folder, options)
    print(json.dumps({"version": metadata.version(engine.package)}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start, used = time.perf_counter(), time.process_time()
        hits = search(request["queries"], request["settings"])
        answer = {"cpu": time.process_time() - used, "seconds": time.perf_counter() - start, "hits": hits}
        print(json.dumps(answer), file=answers, flush=True)


def _cpu_seconds() -> float:
    """Return the seconds of CPU of this process, all threads, and of the processes it started."""
    return sum(
        resource.getrusage(who).ru_utime + resource.getrusage(who).ru_stime
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
