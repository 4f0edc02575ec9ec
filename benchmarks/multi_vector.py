"""Suite ``multi_vector``: recall against queries a second of engines for token vectors, one query at a time.

Every engine is a process with one thread to search, so that engines which need another Python or another
PyTorch take turns with ours: the others wait while one works. Times are those of its processor. Builds have
two threads. Peers are found in the folder that ``IRKIT_PEERS`` names::

    tachiom/ ...   what the wheel of tachiom unpacks to
    python         an interpreter (or a script that starts one) that imports fast_plaid and xtr_warp
    work/          made by the suite: vectors, and indexes of peers, which are not built again

Without them the suite runs all the same and says what it left out.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks.bars import bars, speeds
from benchmarks.engines import BUILD_LIMIT, K
from benchmarks.harness import Row, write_results
from benchmarks.plot import draw_curves
from benchmarks.token_vectors import TokenVectors, generate, passages, read

Options = dict[str, Any]

COLLECTIONS = ("generated 10k", "generated 50k", "passages")
ROUNDS = 5
_ROUND = 1.0  # seconds that a setting may take in a round, if five queries take no more
_ALL = 10**9
# recall that proves them right; of passages that are there twice, rounding decides which comes first
EXACT = {"exact float32": 0.99, "exact bfloat16": 0.9, "irkit flat": 0.99}
_PLOT = Path(__file__).parents[1] / "docs" / "multi_vector.svg"


@dataclass(frozen=True)
class Contender:
    """An engine with what it builds and how it searches.

    Attributes:
        engine: Key of `benchmarks.engines.ENGINES`.
        options: Of the build.
        settings: Of the search, one after the other.
        peer: Its index is kept for the next run.
        python: Needs the interpreter in ``IRKIT_PEERS``. These take minutes to build the smallest
            collection; they leave the others out unless their index is there.
    """

    engine: str
    options: Options
    settings: tuple[Options, ...] = ({},)
    peer: bool = False
    python: bool = False


def contenders() -> dict[str, Contender]:
    """All of them by name."""
    plaid = [{"nprobe": probed, "candidates": scored} for probed, scored in _PLAID]
    tachiom = tuple(dict(zip(_TACHIOM_KEYS, values, strict=True)) for values in _TACHIOM)
    every = {"centroid_score_threshold": 0.0, "max_candidates": 1_000_000}
    warp = ({}, {"nprobe": 16}, {"nprobe": 64}, {"nprobe": 16, **every}, {"nprobe": 64, **every})
    fast = ({"n_ivf_probe": 4, "n_full_scores": 1024}, {})
    return {
        "exact float32": Contender("exact", {"dtype": "float32"}),
        "exact bfloat16": Contender("exact", {"dtype": "bfloat16"}),
        "irkit flat": Contender("irkit", {"kind": "flat"}),
        "irkit plaid": Contender("irkit", {"kind": "plaid"}, ({}, *plaid)),
        "irkit plaid, tokens kept": Contender(
            "irkit", {"kind": "plaid", "keep_tokens": True}, ({}, *plaid[3:5])
        ),
        "irkit plaid 2 bits": Contender("irkit", {"kind": "plaid", "nbits": 2}, ({}, *plaid[-2:])),
        "irkit muvera": Contender("irkit", {"kind": "muvera"}, ({"candidates": 50}, {}, {"candidates": 800})),
        "TACHIOM": Contender("tachiom", {}, tachiom, peer=True),
        "xtr-warp-rs": Contender("xtr_warp", {}, warp, peer=True, python=True),
        "fast-plaid": Contender("fast_plaid", {}, fast, peer=True, python=True),
    }


_PLAID = ((1, 32), (1, 64), (2, 64), (2, 256), (4, 512), (8, 1024), (8, _ALL))  # the last: all documents
_TACHIOM_KEYS = ("k_centroids", "ef_search", "k_docs_to_score", "alpha")
_TACHIOM = (
    (10, 20, 100, 0.45),
    (20, 30, 250, 0.45),
    (40, 60, 500, 0.35),
    (80, 120, 1000, 0.3),
    (160, 200, 2000, None),
)


def main() -> None:
    """Measure the three collections; store the curves, what they come to, and the plot."""
    rows: list[Row] = []
    builds: list[Row] = []
    with ExitStack() as stack:
        peers = os.environ.get("IRKIT_PEERS")
        work = Path(peers) / "work" if peers else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in COLLECTIONS:
            curve, built = measure(name, prepared(name, work))
            rows += curve
            builds += built
            write_results("multi_vector_curves", rows)
            write_results("multi_vector_speed", speeds(rows))
            write_results("multi_vector", [*bars(rows, builds), *builds])
            _PLOT.write_text(draw_curves(rows, COLLECTIONS[: COLLECTIONS.index(name) + 1]))


def prepared(name: str, work: Path) -> Path:
    """The folder of the vectors of a collection; made if it is not there."""
    folder = work / name.replace(" ", "-")
    if not folder.exists():
        aside = folder.with_suffix(".tmp")
        shutil.rmtree(aside, ignore_errors=True)
        vectors = passages() if name == "passages" else generate(50_000, 1000 * int(name[10:-1]))
        vectors.write(aside)
        aside.rename(folder)
    return folder


def measure(name: str, folder: Path, rounds: int = ROUNDS) -> tuple[list[Row], list[Row]]:
    """Build and search with every contender: rows of the curves, and of the builds."""
    vectors = read(folder)
    known = contenders()
    with ExitStack() as stack:
        servers, builds = {}, []
        for label, contender in known.items():
            target = folder.with_name(f"{folder.name}-{label.replace(' ', '-')}")
            built = _build(contender, folder, target)
            if "skipped" not in built:
                servers[label] = stack.enter_context(_Server(contender, folder, target))
                built["version"] = servers[label].version
            if contender.engine != "exact":
                builds.append(_build_row(name, label, built, len(vectors.tokens)))
                print(builds[-1], file=sys.stderr, flush=True)
            if not contender.peer:
                stack.callback(shutil.rmtree, target, ignore_errors=True)
        return _search(name, servers, known, vectors, rounds), builds


def _search(
    name: str,
    servers: dict[str, _Server],
    known: dict[str, Contender],
    vectors: TokenVectors,
    rounds: int,
) -> list[Row]:
    """Search once for the hits and to see how long it takes; then in turns for the time."""
    plan, recall = {}, {}
    for label, server in servers.items():
        for settings in known[label].settings:
            key = label, json.dumps(settings)
            answer = server.ask(settings, len(vectors.exact))
            recall[key] = _recall(label, answer["hits"], vectors)
            each = answer["cpu"] / len(vectors.exact)
            plan[key] = server, settings, min(len(vectors.exact), max(5, int(_ROUND / each)))
    times: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in plan}
    for number in range(rounds):
        for key in list(plan)[:: 1 if number % 2 == 0 else -1]:
            server, settings, count = plan[key]
            answer = server.ask(settings, count)
            times[key].append((answer["cpu"] / count, answer["seconds"] / count))
    baseline = times["exact bfloat16", "{}"]
    rows = []
    for (label, settings), taken in times.items():
        ratios = [slow / fast for (slow, _), (fast, _) in zip(baseline, taken, strict=True)]
        cpu, wall = (statistics.median(each) for each in zip(*taken, strict=True))
        rows.append(
            {
                "collection": name,
                "contender": label,
                "settings": settings,
                "recall@10": recall[label, settings],
                "queries/s": 1 / cpu,
                "ms/query": 1000 * cpu,
                "wall ms/query": 1000 * wall,
                "x exact bfloat16": statistics.median(ratios),
            }
        )
    return rows


def _recall(label: str, hits: list[list[int]], vectors: TokenVectors) -> float:
    """Share of the exact ten best that were found; stops if our answer is no ranking or exact search errs."""
    if label.startswith("irkit") and any(len(set(each)) != K or min(each) < 0 for each in hits):
        raise SystemExit(f"multi_vector: {label} did not find {K} different documents for every query")
    pairs = zip(hits, vectors.exact[:, :K].tolist(), strict=True)
    recall = float(np.mean([len(set(found) & set(best)) / K for found, best in pairs]))
    if recall < EXACT.get(label, 0):
        raise SystemExit(f"multi_vector: {label} is wrong, recall@10 is {recall:.3f}")
    return recall


def _build_row(name: str, label: str, built: Row, tokens: int) -> Row:
    return {
        "collection": name,
        "contender": label,
        "version": built.get("version"),
        "build CPU s": built.get("cpu"),
        "memory of the build MB": built.get("memory"),
        "bytes/token": built["bytes"] / tokens if built.get("bytes") else None,
        "note": built.get("skipped", ""),
    }


def _build(contender: Contender, folder: Path, target: Path) -> Row:
    """What the build took, or why there is none: ``{"skipped": reason}``."""
    note = target.with_suffix(".json")
    if contender.peer and note.exists():
        kept: Row = json.loads(note.read_text())
        return kept
    if contender.python and folder.name != COLLECTIONS[0].replace(" ", "-"):
        return {"skipped": "built for the smallest collection only"}
    missing = _missing(contender)
    if missing:
        return {"skipped": missing}
    shutil.rmtree(target, ignore_errors=True)
    command, environment = _command("build", contender, folder, target), _environment(2)
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode == -signal.SIGXCPU:
        built = {"skipped": f"not built after {BUILD_LIMIT} s of processor time"}
    elif result.returncode:
        raise SystemExit(f"multi_vector: building {contender} failed:\n{result.stderr}")
    else:
        built = json.loads(result.stdout.splitlines()[-1])
    if contender.peer:
        note.write_text(json.dumps(built))
    return built


def _missing(contender: Contender) -> str:
    """Why a contender cannot run; empty if it can."""
    if not contender.peer:
        return ""
    if "IRKIT_PEERS" not in os.environ:
        return "IRKIT_PEERS is not set"
    check = "import fast_plaid, xtr_warp" if contender.python else "import tachiom"
    command = [_python(contender), "-c", check]
    try:
        result = subprocess.run(command, env=_environment(1), capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return result.stderr.strip().rpartition("\n")[2] if result.returncode else ""


class _Server:
    """A process that searches on request."""

    def __init__(self, contender: Contender, folder: Path, target: Path) -> None:
        self._process = subprocess.Popen(
            _command("serve", contender, folder, target),
            env=_environment(1),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version: str = self._answer()["version"]

    def ask(self, settings: Options, queries: int) -> Row:
        """Search for the first ``queries`` queries."""
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
            raise SystemExit(f"multi_vector: {' '.join(map(str, self._process.args))} ended")  # type: ignore
        answer: Row = json.loads(line)
        return answer


def _command(verb: str, contender: Contender, folder: Path, target: Path) -> list[str]:
    options = json.dumps(contender.options)
    program = [_python(contender), "-m", "benchmarks.engines", verb, contender.engine, options]
    return [*program, str(folder), str(target)]


def _python(contender: Contender) -> str:
    return f"{os.environ['IRKIT_PEERS']}/python" if contender.python else sys.executable


def _environment(threads: int) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    paths = [str(Path(__file__).parents[1]), os.environ.get("IRKIT_PEERS", "")]
    limits = dict.fromkeys([*names, "RAYON_NUM_THREADS"], str(threads))
    return os.environ | limits | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
