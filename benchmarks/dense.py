"""Suite ``dense``: recall against queries per second of engines for dense vectors, one query at a time.

Peers run in an interpreter of their own, in the folder that ``IRKIT_PEERS`` names::

    python         an interpreter (or a script that starts one) that imports faiss, hnswlib, usearch and scann
    work/          made by the suite: vectors, and indexes of peers, which are not built again

Without them the suite runs all the same and says what it left out. ``--sizes 1000000`` adds a million
generated vectors. ``--only "generated 200k x 768"`` measures a collection, and leaves the other stored rows.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.contest import Contender, Hits, build_row, measure, work_folder
from benchmarks.dense_bars import bars, speeds
from benchmarks.dense_vectors import DenseVectors, generate, passages, read
from benchmarks.harness import Row, read_results, write_results
from benchmarks.plot import draw_curves
from benchmarks.worker import K, Options

COLLECTIONS = ("generated 200k x 384", "generated 200k x 768", "passages")
ROUNDS = 3
_ROUND = 0.1  # seconds that a setting may take in a round, if five queries take no more
_PROBES = (2, 4, 6, 8, 12, 16, 32, 64, 80, 96, 112, 128, 136, 144, 160, 192, 224, 256, 320, 384, 512)  # lists
_CANDIDATES = (20, 50, 120, 200, 300)  # that are ranked again; the same numbers for all engines
_EXPANSIONS = (16, 32, 64, 128, 256, 512)
PLOT = Path(__file__).parents[1] / "docs" / "dense.svg"


def contenders(documents: int, dim: int) -> dict[str, Contender]:
    """Return the contenders of a collection by name, each with the settings that it is measured at."""
    contender = partial(Contender, "benchmarks.dense_engines")
    peer = partial(contender, python=True)
    lists = 1024 if documents < 500_000 else 4096

    def grid(first: str, second: str, choices: Sequence[int] = _CANDIDATES) -> tuple[Options, ...]:
        return tuple({first: one, second: other} for one in _PROBES for other in choices)

    def faiss(codes: str, before: str = "", settings: tuple[Options, ...] = ()) -> Contender:
        return peer("faiss", {"factory": f"{before}IVF{lists},{codes}"}, settings or product, "faiss")

    # settings of searches, from fast to exact
    ours = ({}, *grid("probes", "candidates"))
    scanned = grid("leaves_to_search", "pre_reorder_num_neighbors")
    graph = tuple({"efSearch": each} for each in _EXPANSIONS)
    product = grid("nprobe", "k_factor", [each // K for each in _CANDIDATES])
    return {
        "irkit float16": contender("irkit", {"keep": "float16"}, ours),
        "irkit int8": contender("irkit", {"keep": "int8"}, ours),
        "irkit none": contender("irkit", {"keep": "none"}, ours),
        "FAISS IVF, PQ": faiss(f"PQ{dim // 4}x4fs,RFlat"),
        "FAISS IVF, PQ d/2": faiss(f"PQ{dim // 2}x4fs,RFlat"),
        "FAISS IVF, OPQ": faiss(f"PQ{dim // 4}x4fs,RFlat", f"OPQ{dim // 4},"),
        "FAISS IVF, RaBitQ": faiss("RaBitQfs,RFlat"),
        "FAISS IVF, SQ8": faiss("SQ8", settings=tuple({"nprobe": each} for each in _PROBES)),
        "FAISS HNSW": peer("faiss", {"factory": "HNSW32"}, graph, "faiss"),
        "hnswlib": peer(
            "hnswlib",
            {"M": 16, "ef_construction": 200},
            tuple({"ef": each} for each in _EXPANSIONS),
            "hnswlib",
        ),
        "usearch": peer(
            "usearch", {"dtype": "f16"}, tuple({"expansion_search": each} for each in _EXPANSIONS), "usearch"
        ),
        "ScaNN": peer("scann", {}, scanned, "scann"),
    }


def main(sizes: Sequence[int] = (), only: Sequence[str] = ()) -> None:
    """Measure the collections; store the curves, what they come to, and the plot.

    Args:
        sizes: Numbers of generated vectors of 384 dimensions to measure, too.
        only: Collections to measure beside those whose rows are stored; by default all, in place of these.
    """
    names = [*(only or COLLECTIONS), *(f"generated {size // 1000}k x 384" for size in sizes)]
    rows, builds = _others(names) if only else ([], [])
    with work_folder() as work:
        for name in names:
            curve, built = measure_collection(name, prepared(name, work))
            rows += curve
            builds += built
            write_results("dense_curves", rows)
            write_results("dense_speed", _from(rows, speeds(rows)))
            write_results("dense", [*_from(rows, bars(rows, builds)), *builds])
            PLOT.write_text(draw_curves(rows, list(dict.fromkeys(row["collection"] for row in rows)), 0.9))


def _others(names: Sequence[str]) -> tuple[list[Row], list[Row]]:
    """Return the stored rows of curves and builds of other collections."""
    curves, every = (read_results(suite) for suite in ("dense_curves", "dense"))
    builds = [row for row in every if "contender" in row]
    kept = ([row for row in rows if row["collection"] not in names] for rows in (curves, builds))
    return next(kept), next(kept)


def _from(curves: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """Return rows with the provenance of the curves of their collection, if these were stored before."""
    sources = {row["collection"]: row["provenance"] for row in curves if "provenance" in row}
    return [
        row | ({"provenance": sources[row["collection"]]} if row["collection"] in sources else {})
        for row in rows
    ]


def prepared(name: str, work: Path) -> Path:
    """Return the folder of the vectors of a collection; they are made if they are not there."""
    folder = work / f"dense-{name.replace(' ', '-')}"
    if not folder.exists():
        aside = folder.with_suffix(".tmp")
        shutil.rmtree(aside, ignore_errors=True)
        if name == "passages":
            vectors = passages()
        else:
            _, size, _, dim = name.split()
            vectors = generate(1000 * int(size.removesuffix("k")), int(dim))
        vectors.write(aside)
        aside.rename(folder)
    return folder


def measure_collection(name: str, folder: Path, rounds: int = ROUNDS) -> tuple[list[Row], list[Row]]:
    """Build and search with every contender; return rows of the curves, and of the builds."""
    vectors = read(folder)
    documents, dim = vectors.values.shape
    known = contenders(documents, dim)
    builds, hits, times = measure(known, folder, len(vectors.exact), rounds, _ROUND)
    curves = []
    for (label, chosen), taken in times.items():
        cpu, wall = (statistics.median(each) for each in zip(*taken, strict=True))
        curves.append(
            {
                "collection": name,
                "documents": documents,
                "dimensions": dim,
                "contender": label,
                "settings": json.loads(chosen),
                "is default": chosen == "{}",
                "recall@10": _recall(label, hits[label, chosen], vectors),
                "queries/s": 1 / cpu,
                "us/query": 1e6 * cpu,
                "wall us/query": 1e6 * wall,
            }
        )
    rows = [build_row(name, label, built, "document", documents) for label, built in builds.items()]
    return curves, rows


def _recall(label: str, hits: Hits, vectors: DenseVectors) -> float:
    """Return the share of the exact ten best that were found; stop if our answer is no ranking."""
    if label.startswith("irkit") and any(len(set(each)) != K or min(each) < 0 for each in hits):
        raise SystemExit(f"dense: {label} did not find {K} different documents for every query")
    pairs = zip(hits, vectors.exact.tolist(), strict=True)
    return float(np.mean([len(set(found) & set(best)) / K for found, best in pairs]))
