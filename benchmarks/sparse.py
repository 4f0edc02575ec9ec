"""Suite ``sparse``: recall against queries per second of engines for sparse vectors, one query at a time.

Peers are found in the folder that ``IRKIT_PEERS`` names::

    seismic/ bm25s/ ...   what the wheels of pyseismic-lsr and bm25s unpack to
    work/                 made by the suite: vectors, and indexes of peers, which are not built again

Without them the suite runs all the same and says what it left out.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
from functools import partial
from pathlib import Path

from benchmarks.contest import Contender, Hits, build_row, measure, work_folder
from benchmarks.harness import Row, write_results
from benchmarks.plot import draw_curves
from benchmarks.sparse_bars import bars, bm25, exact, speeds
from benchmarks.sparse_vectors import BM25, SparseVectors, generate, read, recall, texts
from benchmarks.worker import K, Options

_TEXTS = {"SciFact": ("scifact",), "MS MARCO": ("msmarco-dl19-pool", "msmarco-dl21-pool")}
COLLECTIONS = ("generated 200k", "generated 1M", *_TEXTS)  # of the curves
SMALL = ("generated 100", "generated 300", "generated 1k", "generated 5k")  # searched exactly alone
ROUNDS = 5
_ROUND = 0.2  # seconds that a setting may take in a round, if five queries take no more
_POSTINGS = {"generated 1M": 1000, "generated 200k": 300}  # of Seismic, for each term
_CUTS, _FACTORS = (3, 4, 5, 6, 7, 8, 10, 12, 16), (0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5)
_EFFORTS = tuple(round(0.02 * 1.15**step, 3) for step in range(28))  # up to 0.87
_EXACT = {"numpy scan": 0.999, "numba scan": 0.999, "irkit exact": 0.999, "irkit BM25": 0.999, "bm25s": 0.999}
PLOT = Path(__file__).parents[1] / "docs" / "sparse.svg"


def contenders(name: str) -> dict[str, Contender]:
    """Return the contenders of a collection, each with the settings that it is measured at."""
    contender = partial(Contender, "benchmarks.sparse_engines")
    grid = itertools.product(_CUTS, _FACTORS)
    seismic = tuple({"query_cut": cut, "heap_factor": factor} for cut, factor in grid)
    together = {"how": "together"}
    exact: tuple[Options, ...] = ({"mode": "exact"}, {"mode": "exact"} | together)
    if name in SMALL:
        arrays = {"how": "arrays"}
        return {
            "numpy scan": contender("numpy", {}),
            "numba scan": contender("numba", {}, ({}, together, arrays)),
            "irkit": contender("irkit", {"kind": "inverted"}, (*exact, {"mode": "exact"} | arrays)),
        }
    ours = (*exact, *({"mode": "approximate", "effort": effort} for effort in _EFFORTS))
    known = {
        "numpy scan": contender("numpy", {}),
        "numba scan": contender("numba", {}, ({}, together)),
        "irkit": contender("irkit", {"kind": "inverted"}, ours),
        "pyseismic-lsr": contender(
            "seismic", {"n_postings": _POSTINGS.get(name, 100)}, seismic, peer="seismic"
        ),
    }
    if name in _TEXTS:
        options = {"kind": "inverted", "dtype": "float32", "bm25": BM25}  # as `Retriever.build` has it
        known["irkit BM25"] = contender("irkit", options, exact)
        known["bm25s"] = contender("bm25s", {"bm25": BM25}, ({}, together), peer="bm25s")
    return known


def main() -> None:
    """Measure the collections; store the curves, what they come to, and the plot."""
    rows: list[Row] = []
    builds: list[Row] = []
    with work_folder() as work:
        for name in (*SMALL, *COLLECTIONS):
            curve, built = measure_collection(name, prepared(name, work))
            rows += curve
            builds += built if name in COLLECTIONS else []
            drawn = [each for each in COLLECTIONS if any(row["collection"] == each for row in rows)]
            curves = [row for row in rows if row["collection"] in drawn]
            write_results("sparse_curves", rows)
            write_results("sparse_speed", [*speeds(curves), *exact(rows), *bm25(rows)])
            write_results("sparse", [*bars(rows, builds), *builds])
            if drawn:
                dots = [row for row in curves if "how" not in row["settings"]]
                PLOT.write_text(draw_curves(dots, drawn, 0.9))


def prepared(name: str, work: Path) -> Path:
    """Return the folder of the vectors of a collection; make it if it is missing."""
    folder = work / f"sparse-{name.replace(' ', '-')}"
    if not folder.exists():
        aside = folder.with_suffix(".tmp")
        shutil.rmtree(aside, ignore_errors=True)
        size = name.removeprefix("generated ").replace("k", "000").replace("M", "000000")
        vectors = texts(_TEXTS[name]) if name in _TEXTS else generate(int(size))
        vectors.write(aside)
        aside.rename(folder)
    return folder


def measure_collection(name: str, folder: Path, rounds: int = ROUNDS) -> tuple[list[Row], list[Row]]:
    """Build and search with every contender: rows of the curves, and of the builds."""
    vectors, known = read(folder), contenders(name)
    builds, hits, times = measure(known, folder, len(vectors.best), rounds, _ROUND)
    curves = []
    for (label, chosen), taken in times.items():
        settings = known[label].options | json.loads(chosen)
        exact = label == "irkit" and settings["mode"] == "exact"
        contender = "irkit exact" if exact else label
        cpu, wall = (statistics.median(each) for each in zip(*taken, strict=True))
        curves.append(
            {
                "collection": name,
                "contender": contender,
                "settings": settings,
                "recall@10": _recall(contender, hits[label, chosen], vectors),
                "queries/s": 1 / cpu,
                "us/query": 1e6 * cpu,
                "wall us/query": 1e6 * wall,
            }
        )
    return curves, [
        build_row(name, label, built, "posting", len(vectors.terms))
        for label, built in builds.items()
        if not label.endswith("scan")
    ]


def _recall(contender: str, hits: Hits, vectors: SparseVectors) -> float:
    """Return the recall of hits; a wrong ranking or exact search ends the run."""
    if contender.startswith("irkit") and any(len(set(each)) != K or min(each) < 0 for each in hits):
        raise SystemExit(f"sparse: {contender} did not find {K} different documents for every query")
    found = recall(hits, vectors)
    if found < _EXACT.get(contender, 0):
        raise SystemExit(f"sparse: {contender} is wrong, recall@10 is {found:.4f}")
    return found
