"""Filters that were never seen before, on a million documents with five keys, beside DuckDB and SQLite.

Every answer is compared with those of the others. Times are of one thread, from the condition to a mask of
rows; the keys were filtered by once before, and no filter comes twice. The filter of irkit is also timed as
the first one after an index was opened, and after another process added a document.
"""

from __future__ import annotations

import importlib.util
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Row, write_results
from irkit.data import Document
from irkit.index import Documents, Store, create_index

Array = np.ndarray[Any, Any]
DOCUMENTS, BATCH = 1_000_000, 1024
ROUNDS = 7
SHARES = (0.01, 0.1, 0.5, 0.9)
BARS = {0.01: 20, 0.1: 60, 0.5: 60, 0.9: 60}
"""Milliseconds that a filter may take, by the share of documents that meet it."""


def columns(count: int) -> dict[str, list[Any]]:
    """Return values of five keys: two of numbers, two of repeated strings, and one of distinct strings."""
    rng = np.random.default_rng(0)
    sites, kinds = rng.integers(0, 1000, count), rng.integers(0, 100, count)
    return {
        "score": rng.random(count).tolist(),
        "number": rng.integers(0, 1_000_000, count).tolist(),
        "site": [f"site-{number:03}" for number in sites.tolist()],
        "kind": [f"kind-{number:02}" for number in kinds.tolist()],
        "url": [f"https://example.org/{number:03}/{row}" for row, number in enumerate(sites.tolist())],
    }


def conditions(share: float, number: int) -> dict[str, tuple[str, str, Any]]:
    """Return conditions that about this share of the documents meets; each ``number`` has its own."""
    at = share + number / 5000
    return {
        "number": ("number", "<", int(1_000_000 * at)),
        "float": ("score", "<", at),
        "string, few values": ("kind", "<", f"kind-{int(100 * share):02}{number}"),
        "string, all differ": ("url", "<", f"https://example.org/{int(1000 * share):03}/{number}"),
    }


def build(path: Path, values: dict[str, list[Any]]) -> Documents:
    """Store documents with this metadata."""
    records = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    with Store.build(path) as store:
        create_index(store)
        documents = Documents(store)
        for start in range(0, len(records), BATCH):
            part = enumerate(records[start : start + BATCH], start)
            documents.add([Document(f"d{row}", "", metadata=record) for row, record in part])
        documents.finish()
        store.publish()
    return Documents(Store.open(path, verify=False))


def engines(folder: Path, values: dict[str, list[Any]]) -> Iterator[tuple[str, Callable[..., Array]]]:
    """Yield name and search of irkit, SQLite with an index for each key, and DuckDB if it is installed."""
    count = len(values["url"])

    # irkit
    documents = build(folder / "index", values)
    yield "irkit", lambda key, sign, wanted: documents.filter({key: {sign: wanted}})
    names = ", ".join(values)

    def mask(rows: Array) -> Array:
        found = np.zeros(count, np.bool_)
        found[rows] = True
        return found

    # SQLite
    lite = sqlite3.connect(folder / "sqlite")
    lite.execute(f"CREATE TABLE fields ({names}, row INTEGER PRIMARY KEY)")
    lite.executemany(
        "INSERT INTO fields VALUES (?, ?, ?, ?, ?, ?)", zip(*values.values(), range(count), strict=True)
    )
    for key in values:
        lite.execute(f"CREATE INDEX by_{key} ON fields ({key})")
    lite.commit()

    def ask_sqlite(key: str, sign: str, wanted: Any) -> Array:
        rows = lite.execute(f"SELECT row FROM fields WHERE {key} {sign} ?", [wanted])
        return mask(np.fromiter((row for (row,) in rows), np.int64))

    yield "SQLite", ask_sqlite

    # DuckDB
    if importlib.util.find_spec("duckdb") and importlib.util.find_spec("pandas"):
        import duckdb
        import pandas

        duck = duckdb.connect(str(folder / "duck"), config={"threads": 1})
        frame = pandas.DataFrame(values | {"row": range(count)})
        duck.register("frame", frame)
        duck.execute("CREATE TABLE fields AS SELECT * FROM frame")

        def ask_duckdb(key: str, sign: str, wanted: Any) -> Array:
            found = duck.execute(f"SELECT row FROM fields WHERE {key} {sign} ?", [wanted])
            return mask(found.fetchnumpy()["row"])

        yield "DuckDB", ask_duckdb


def measure(count: int) -> list[Row]:
    """Time every engine for every kind of condition; raise AssertionError if their answers differ."""
    with tempfile.TemporaryDirectory() as folder:
        asks = dict(engines(Path(folder), columns(count)))
        times: dict[tuple[str, float], dict[str, list[float]]] = {}
        for share in SHARES:
            for number in range(ROUNDS + 1):  # the first is not measured
                for kind, condition in conditions(share, number).items():
                    answers = []
                    for name, ask in asks.items():
                        start = time.perf_counter()
                        answers.append(ask(*condition))
                        elapsed = 1000 * (time.perf_counter() - start)
                        if number:
                            times.setdefault((kind, share), {}).setdefault(name, []).append(elapsed)
                    assert all(np.array_equal(answers[0], other) for other in answers), (kind, condition)
        for share in SHARES:
            for number in range(ROUNDS):
                for kind, condition in conditions(share, ROUNDS + 1 + number).items():
                    for name, elapsed in fresh(Path(folder, "index"), condition, f"{share}-{number}-{kind}"):
                        times[kind, share].setdefault(name, []).append(elapsed)
    return [
        {"condition": kind, "documents that meet it": f"{share:.0%}", "bar, ms": BARS[share]}
        | {f"{name}, ms": float(np.median(values)) for name, values in found.items()}
        for (kind, share), found in sorted(times.items())
    ]


def fresh(path: Path, condition: tuple[str, str, Any], id: str) -> Iterator[tuple[str, float]]:
    """Yield the milliseconds of a filter, the first after opening an index, and of one after an addition."""
    key, sign, wanted = condition
    documents = Documents(Store.open(path, verify=False))
    start = time.perf_counter()
    documents.filter({key: {sign: wanted}})
    yield "irkit after opening", 1000 * (time.perf_counter() - start)
    values = {name: values[0] for name, values in columns(1).items()}
    Documents(Store.open(path, verify=False)).add([Document(id, "", metadata=values)])
    documents.store.refresh()
    start = time.perf_counter()
    documents.filter({key: {sign: wanted}})
    yield "irkit after an addition", 1000 * (time.perf_counter() - start)


def main() -> None:
    """Measure and store the results."""
    write_results("filters", measure(DOCUMENTS))
