"""Engines that take turns: what the suites that set recall against speed have in common.

Every engine is a process with one thread to search, so that engines which need another Python or other
libraries take turns with ours: the others wait while one works. Times are those of its processor. Builds
have two threads. Peers are found in the folder that ``IRKIT_PEERS`` names, which is on their path; in its
folder ``work`` their indexes are kept, with what the build took, and not built again with the same options.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self

from benchmarks.harness import Row, provenance
from benchmarks.worker import BUILD_LIMIT, Options

__all__ = ["Contender", "Hits", "Key", "Times", "build_row", "measure", "work_folder"]

Key = tuple[str, str]
"""Name of a contender, and its settings as JSON."""

Hits = list[list[int]]
Times = list[tuple[float, float]]


@dataclass(frozen=True)
class Contender:
    """An engine with what it builds and how it searches.

    Attributes:
        module: Where the engine is, such as ``benchmarks.engines``.
        engine: Its key in the ``ENGINES`` of the module.
        options: Options of the build.
        settings: Settings of the searches, one after the other.
        peer: Package that a peer imports; its index is kept for the next run. Empty for irkit.
        python: Whether it needs the interpreter in ``IRKIT_PEERS``.
    """

    module: str
    engine: str
    options: Options
    settings: tuple[Options, ...] = ({},)
    peer: str = ""
    python: bool = False

    def command(self, verb: str, source: Path, target: Path) -> list[str]:
        """Return the command of the process, see `benchmarks.worker`."""
        program = [self.interpreter(), "-m", self.module, verb, self.engine, json.dumps(self.options)]
        return [*program, str(source), str(target)]

    def interpreter(self) -> str:
        """Return the Python of the process."""
        return f"{os.environ['IRKIT_PEERS']}/python" if self.python else sys.executable

    def missing(self) -> str:
        """Return why the contender cannot run; empty if it can."""
        if not self.peer:
            return ""
        if "IRKIT_PEERS" not in os.environ:
            return "IRKIT_PEERS is not set"
        command = [self.interpreter(), "-c", f"import {self.peer}"]
        try:
            result = subprocess.run(command, env=_environment(1), capture_output=True, text=True)
        except OSError as error:
            return str(error)
        return result.stderr.strip().rpartition("\n")[2] if result.returncode else ""


class Server:
    """A process that searches on request."""

    def __init__(self, contender: Contender, source: Path, target: Path) -> None:
        self._process = subprocess.Popen(
            contender.command("serve", source, target),
            env=_environment(1),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version: str = self._answer()["version"]

    def ask(self, settings: Options, queries: int) -> Row:
        """Search for the first ``queries`` queries: ``cpu`` and ``seconds`` it took, and the ``hits``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"settings": settings, "queries": queries}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # its input ends, so it does

    def _answer(self) -> Row:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"benchmarks: {' '.join(map(str, self._process.args))} ended")  # type: ignore
        answer: Row = json.loads(line)
        return answer


@contextmanager
def work_folder() -> Iterator[Path]:
    """Yield the folder of vectors and indexes: ``IRKIT_PEERS/work``, or one that is removed at the end."""
    if "IRKIT_PEERS" in os.environ:
        yield Path(os.environ["IRKIT_PEERS"]) / "work"
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)


def measure(
    known: Mapping[str, Contender],
    source: Path,
    queries: int,
    rounds: int,
    limit: float,
    more: Mapping[str, int] = MappingProxyType({}),
) -> tuple[dict[str, Row], dict[Key, Hits], dict[Key, Times]]:
    """Build with every contender, search once for the hits, then in turns for the time.

    Args:
        known: Contenders by name.
        source: Folder of the vectors; indexes are beside it, named after it and the contender.
        queries: Number of queries that are searched for, the first ones.
        rounds: Turns of each setting.
        limit: Seconds that a setting may take in a round, if five queries take no more; where all take less,
            they are asked up to 20 times.
        more: Queries that some contenders search for once, for their hits alone.

    Returns:
        What each build took, or ``{"skipped": reason}``; hits of all queries; and, a round, seconds of the
        processor and of the clock a query.
    """
    with ExitStack() as stack:
        servers, builds = {}, {}
        for label, contender in known.items():
            target = source.with_name(f"{source.name}-{label.replace(' ', '-').replace('/', '-')}")
            if not contender.peer:
                stack.callback(shutil.rmtree, target, ignore_errors=True)
            builds[label] = _build(contender, source, target)
            if "skipped" not in builds[label]:
                servers[label] = stack.enter_context(Server(contender, source, target))
                builds[label]["version"] = servers[label].version
            print(source.name, label, builds[label], file=sys.stderr, flush=True)
        settings = {label: known[label].settings for label in servers}
        return builds, *_take_turns(servers, settings, queries, rounds, limit, more)


def build_row(name: str, label: str, built: Row, unit: str, count: int) -> Row:
    """Return the row of a build for the table of a suite; bytes are given per ``unit``, ``count`` in all."""
    return {
        "collection": name,
        "contender": label,
        "version": built.get("version"),
        "build CPU s": built.get("cpu"),
        "memory of the build MB": built.get("memory"),
        f"bytes/{unit}": built["bytes"] / count if built.get("bytes") else None,
        "note": built.get("skipped", ""),
    } | ({"provenance": built["provenance"]} if "provenance" in built else {})


def _take_turns(
    servers: Mapping[str, Server],
    settings: Mapping[str, tuple[Options, ...]],
    queries: int,
    rounds: int,
    limit: float,
    more: Mapping[str, int],
) -> tuple[dict[Key, Hits], dict[Key, Times]]:
    plan, hits = {}, {}
    for label, server in servers.items():
        for chosen in settings[label]:
            server.ask(chosen, 1)  # what is compiled is compiled now
            answer = server.ask(chosen, queries)
            key = label, json.dumps(chosen)
            hits[key] = (server.ask(chosen, more[label]) if label in more else answer)["hits"]
            affordable = limit / answer["cpu"]
            count = min(queries, max(5, int(affordable * queries)))
            plan[key] = server, chosen, count, min(20, max(1, int(affordable)))
    times: dict[Key, Times] = {key: [] for key in plan}
    for number in range(rounds):
        for key in list(plan)[:: 1 if number % 2 == 0 else -1]:
            server, chosen, count, repeats = plan[key]
            answers = [server.ask(chosen, count) for _ in range(repeats)]
            cpu, seconds = (sum(each[what] for each in answers) for what in ("cpu", "seconds"))
            times[key].append((cpu / count / repeats, seconds / count / repeats))
    return hits, times


def _build(contender: Contender, source: Path, target: Path) -> Row:
    """Build an index, and return its measurements, or the reason why there are none."""
    note, options = target.with_name(f"{target.name}.json"), json.dumps(contender.options)
    if contender.peer and note.exists():
        kept: Row = json.loads(note.read_text())
        if kept.get("options") == options and "provenance" in kept:
            return kept
    missing = contender.missing()
    if missing:
        return {"skipped": missing}
    shutil.rmtree(target, ignore_errors=True)
    command = contender.command("build", source, target)
    result = subprocess.run(command, env=_environment(2), capture_output=True, text=True)
    if result.returncode == -signal.SIGXCPU:
        built: Row = {"skipped": f"not built after {BUILD_LIMIT} s of processor time"}
    elif result.returncode:
        raise SystemExit(f"benchmarks: building {contender} failed:\n{result.stderr}")
    else:
        built = json.loads(result.stdout.splitlines()[-1])
    if contender.peer:
        note.write_text(json.dumps(built | {"options": options, "provenance": provenance()}))
    return built


def _environment(threads: int) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    paths = [str(Path(__file__).parents[1]), os.environ.get("IRKIT_PEERS", "")]
    limits = dict.fromkeys([*names, "RAYON_NUM_THREADS"], str(threads))
    return os.environ | limits | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
