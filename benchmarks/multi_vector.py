"""Suite ``multi_vector``: recall against queries per second of engines for token vectors, one query each.

Peers are found in the folder that ``IRKIT_PEERS`` names::

    tachiom/ ...   what the wheel of tachiom unpacks to
    python         an interpreter (or a script that starts one) that imports fast_plaid and xtr_warp
    work/          made by the suite: vectors, and indexes of peers, which are not built again

Without them the suite runs all the same and says what it left out.
"""

from __future__ import annotations

import shutil
import statistics
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.contest import Contender, build_row, measure, work_folder
from benchmarks.harness import Row, write_results
from benchmarks.multi_vector_bars import bars, speeds
from benchmarks.plot import draw_curves
from benchmarks.token_vectors import TokenVectors, generate, passages, read
from benchmarks.worker import K

COLLECTIONS = ("generated 10k", "generated 50k", "passages")
ROUNDS = 5
_ROUND = 1.0  # seconds that a setting may take in a round, if five queries take no more
_ALL = 10**9
_QUERIES = 100
_PRECISE = ("irkit plaid", "TACHIOM")  # of all queries, as 100 leave the third digit of a recall to chance
# recall that proves them right; of passages that are there twice, rounding decides which comes first
EXACT = {"exact float32": 0.99, "exact bfloat16": 0.9, "irkit flat": 0.99}
PLOT = Path(__file__).parents[1] / "docs" / "multi_vector.svg"


def contenders() -> dict[str, Contender]:
    """Return all contenders by name."""
    plaid = [{"nprobe": probed, "candidates": scored} for probed, scored in _PLAID]
    tachiom = tuple(dict(zip(_TACHIOM_KEYS, values, strict=True)) for values in _TACHIOM)
    every = {"centroid_score_threshold": 0.0, "max_candidates": 1_000_000}
    warp = ({}, {"nprobe": 16}, {"nprobe": 64}, {"nprobe": 16, **every}, {"nprobe": 64, **every})
    fast = ({"n_ivf_probe": 4, "n_full_scores": 1024}, {})
    return {
        "exact float32": _contender("exact", {"dtype": "float32"}),
        "exact bfloat16": _contender("exact", {"dtype": "bfloat16"}),
        "irkit flat": _contender("irkit", {"kind": "flat"}),
        "irkit plaid": _contender("irkit", {"kind": "plaid"}, ({}, *plaid)),
        "irkit plaid, tokens kept": _contender(
            "irkit", {"kind": "plaid", "keep_tokens": True}, ({}, *plaid[3:5])
        ),
        "irkit plaid 2 bits": _contender("irkit", {"kind": "plaid", "nbits": 2}, ({}, *plaid[-2:])),
        "irkit muvera": _contender(
            "irkit", {"kind": "muvera"}, ({"candidates": 50}, {}, {"candidates": 800})
        ),
        "TACHIOM": _contender("tachiom", {}, tachiom, peer="tachiom"),
        "xtr-warp-rs": _contender("xtr_warp", {}, warp, peer="xtr_warp", python=True),
        "fast-plaid": _contender("fast_plaid", {}, fast, peer="fast_plaid", python=True),
    }


_contender = partial(Contender, "benchmarks.engines")
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
    with work_folder() as work:
        for name in COLLECTIONS:
            curve, built = measure_collection(name, prepared(name, work))
            rows += curve
            builds += built
            write_results("multi_vector_curves", rows)
            write_results("multi_vector_speed", speeds(rows))
            write_results("multi_vector", [*bars(rows, builds), *builds])
            PLOT.write_text(draw_curves(rows, COLLECTIONS[: COLLECTIONS.index(name) + 1]))


def prepared(name: str, work: Path) -> Path:
    """Return the folder of the vectors of a collection; make it if it is missing."""
    folder = work / name.replace(" ", "-")
    if not folder.exists():
        aside = folder.with_suffix(".tmp")
        shutil.rmtree(aside, ignore_errors=True)
        vectors = passages() if name == "passages" else generate(50_000, 1000 * int(name[10:-1]))
        vectors.write(aside)
        aside.rename(folder)
    return folder


def measure_collection(name: str, folder: Path, rounds: int = ROUNDS) -> tuple[list[Row], list[Row]]:
    """Build and search with every contender: rows of the curves, and of the builds."""
    vectors = read(folder)
    known = contenders()
    some = {label: each for label, each in known.items() if _takes_part(each, label, folder)}
    every = len(vectors.exact)
    more = dict.fromkeys(_PRECISE, every)
    builds, hits, times = measure(some, folder, min(every, _QUERIES), rounds, _ROUND, more)
    curves = []
    for (label, settings), taken in times.items():
        pairs = zip(times["exact bfloat16", "{}"], taken, strict=True)
        cpu, wall = (statistics.median(each) for each in zip(*taken, strict=True))
        curves.append(
            {
                "collection": name,
                "contender": label,
                "settings": settings,
                "recall@10": _recall(label, hits[label, settings], vectors),
                "queries/s": 1 / cpu,
                "ms/query": 1000 * cpu,
                "wall ms/query": 1000 * wall,
                "x exact bfloat16": statistics.median(slow / fast for (slow, _), (fast, _) in pairs),
            }
        )
    left_out = {"skipped": "built for the smallest collection only"}
    return curves, [
        build_row(name, label, builds.get(label, left_out), "token", len(vectors.tokens))
        for label, contender in known.items()
        if contender.engine != "exact"
    ]


def _takes_part(contender: Contender, label: str, folder: Path) -> bool:
    """Return True unless building takes minutes: peers in another Python build the smallest one only."""
    smallest = folder.name == COLLECTIONS[0].replace(" ", "-")
    return not contender.python or smallest or folder.with_name(f"{folder.name}-{label}").exists()


def _recall(label: str, hits: list[list[int]], vectors: TokenVectors) -> float:
    """Return the share of the exact ten best that were found; a wrong ranking of irkit ends the run."""
    if label.startswith("irkit") and any(len(set(each)) != K or min(each) < 0 for each in hits):
        raise SystemExit(f"multi_vector: {label} did not find {K} different documents for every query")
    pairs = zip(hits, vectors.exact[: len(hits), :K].tolist(), strict=True)
    recall = float(np.mean([len(set(found) & set(best)) / K for found, best in pairs]))
    if recall < EXACT.get(label, 0):
        raise SystemExit(f"multi_vector: {label} is wrong, recall@10 is {recall:.3f}")
    return recall
