"""Suite ``adds``: documents added one at a time to a large index for minutes, while two processes search it.

The writer adds a document every 10 ms, each in a commit of its own, with metadata. Each reader asks for 10
hits every 100 ms, so that the three processes fit two cores. The index may not lose a document, and searches
may not become slower than 1.2 times those of the first minute.

``python -m benchmarks adds --sizes 100000`` sets the number of documents of the index.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import Row, peak_memory, write_results
from benchmarks.scale import CONTENTS, documents

KINDS = ("dense", "bm25")
MINUTES, RATE, READERS = 10, 100, 2  # documents per second
PAUSE = 0.1  # seconds between two searches of a reader
MOST_SLOWER = 1.2


def main(sizes: Sequence[int] = (1_000_000,)) -> None:
    """Measure every kind at every size, and store the rows."""
    rows: list[Row] = []
    for size in sizes:
        for kind in KINDS:
            rows.append(measure(kind, size))
            write_results("adds", rows)


def measure(kind: str, size: int, minutes: float = MINUTES) -> Row:
    """Build an index, let processes search it while this one adds documents, and compare search times.

    The times of the first minute are compared with the times of the last one.
    """
    from irkit import Retriever

    with tempfile.TemporaryDirectory() as folder:
        # build, then add here while the readers search
        made = [sys.executable, "-m", "benchmarks.scale", "build", kind, str(size), folder]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
        command = [sys.executable, "-m", "benchmarks.adds", kind, folder, str(60 * minutes)]
        readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(READERS)]
        took, late = add(kind, folder, 60 * minutes)

        # what the readers saw, and what the index holds
        printed = [reader.communicate()[0] for reader in readers]
        if any(reader.returncode for reader in readers):
            raise SystemExit("adds: a reader failed")
        answers = [json.loads(each) for each in printed]
        with Retriever.load(f"{folder}/index", verify=False) as index:
            kept = len(index)
    if kept != size + len(took):
        raise SystemExit(f"adds: {size} and {len(took)} documents were added, the index has {kept}")

    # medians of the first and of the last minute
    times = [pair for answer in answers for pair in answer["searches"]]
    first, last = (_median(times, *span) for span in ((0, 60), (60 * minutes - 60, 60 * minutes)))
    return {
        "index": kind,
        "documents": size,
        "added": len(took),
        "added/s": len(took) / (60 * minutes),
        "add ms": 1000 * statistics.median(took),
        "add p99 ms": 1000 * _p99(took),
        "latest s": late,
        "search ms, first minute": 1000 * first,
        "search ms, last minute": 1000 * last,
        "growth": last / first,
        "bar": MOST_SLOWER,
        "memory of a reader MB": max(answer["memory"] for answer in answers),
    }


def add(kind: str, folder: str, seconds: float) -> tuple[list[float], float]:
    """Add documents at the rate; return the time of each, and how late the last one was."""
    from irkit import Retriever

    made = documents(kind, int(seconds * RATE), 3, "n")
    took: list[float] = []
    with Retriever.load(f"{folder}/index", verify=False) as index:
        begin = time.monotonic()
        for number, document in enumerate(made):
            due = begin + number / RATE
            time.sleep(max(0.0, due - time.monotonic()))
            start = time.monotonic()
            if start - begin > seconds:
                break
            index.add([document])
            took.append(time.monotonic() - start)
        return took, max(0.0, time.monotonic() - due)


def search(kind: str, folder: str, seconds: float) -> dict[str, Any]:
    """Search at a steady rate; return when each search began, how long it took, and the memory."""
    from irkit import Retriever

    contents = list(CONTENTS[kind][2](50, 2))
    queries = [" ".join(text.split()[:4]) for text in contents] if kind == "bm25" else contents
    with Retriever.load(f"{folder}/index", verify=False) as index:
        found = [len(index.search(query, 10)) for query in queries]
        begin, times = time.monotonic(), []
        while (start := time.monotonic()) - begin < seconds:
            number = len(times) % len(queries)
            hits = index.search(queries[number], 10)
            times.append((start - begin, time.monotonic() - start))
            if len(hits) < found[number]:
                raise SystemExit(f"adds: a search found {len(hits)} documents, before {found[number]}")
            time.sleep(PAUSE)
    return {"searches": times, "memory": peak_memory()}


def _median(times: list[tuple[float, float]], start: float, stop: float) -> float:
    """Return the median time of searches that began in a span."""
    return statistics.median(took for at, took in times if start <= at < stop)


def _p99(times: list[float]) -> float:
    return sorted(times)[int(0.99 * len(times))]


if __name__ == "__main__":
    chosen, place, duration = sys.argv[1:]
    print(json.dumps(search(chosen, place, float(duration))))
