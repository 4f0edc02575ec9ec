"""Costs of indexes as functions of the number of documents, fitted to measurements.

Each cost is ``a + b * documents ** power`` with a and b of 0 or more. The power follows from how a kind of
index works. It is not fitted, because a power fitted to a few small sizes says little about large ones:

* Building one document takes constant time, plus its share of a fixed start-up (power -1). Where each
  document is compared with all lists, the time grows with their number: the square root of the documents
  (0.5).
* Queries of BM25, `inverted` and `flat` read a constant share of all documents (1). `dense` reads 6 times
  the square root of its lists; the number of documents in those lists grows with the power 0.75. `plaid`
  reads a fixed number of centroids per query; the tokens of a centroid grow with the square root (0.5), and
  so does the number of centroids, all of which are scored.
* `muvera` is searched as `dense` is. Building and searching `hnsw` visit neighbours whose number grows as the
  logarithm of the documents; a power of 0.07 grows so near a million (the inverse of its logarithm).
* `plaid` has at most 32,768 centroids. Beyond the size that reaches this number, the cost of assigning a
  token stays the same, and so does the sample of tokens that centroids are trained on.
* A build takes memory for buffers and samples, which fill up: it grows until a number of documents (`UNTIL`)
  and then stays. The samples of `dense` and `muvera` grow with the number of lists (0.5). `flat` has
  neither; its memory is pages of its files. The graph of `hnsw` is in memory (1).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

BUILD, BYTES, QUERY = "build us/document", "bytes/document", "query ms"
BUILD_MEMORY, MEMORY, OPENING = "memory of the build MB", "memory of the reader MB", "opening ms"

_SAME = {BYTES: -1.0, BUILD_MEMORY: 1.0, MEMORY: 1.0, OPENING: 1.0}
_LISTS = {BUILD: 0.5, QUERY: 0.75, **_SAME, BUILD_MEMORY: 0.5}
POWERS: dict[str, dict[str, float]] = {
    "bm25": {BUILD: -1.0, QUERY: 1.0, **_SAME},
    "inverted": {BUILD: -1.0, QUERY: 1.0, **_SAME},
    "flat": {BUILD: -1.0, QUERY: 1.0, **_SAME},
    "dense": _LISTS,
    "plaid": {BUILD: 0.5, QUERY: 0.5, **_SAME},
    "muvera": _LISTS,
    "hnsw": {BUILD: 0.07, QUERY: 0.07, **_SAME},
}
"""Powers by kind and cost."""

UNTIL = {
    ("plaid", BUILD): 335_000.0,
    ("plaid", BUILD_MEMORY): 335_000.0,
    ("bm25", BUILD_MEMORY): 350_000.0,
    ("inverted", BUILD_MEMORY): 350_000.0,
}
"""Number of documents beyond which a cost is constant.

Documents of 32 tokens fill all centroids of `plaid` there. For `bm25` and `inverted` it is read off the
measurements: memory grows in proportion to 100,000 documents, and to a million by as much as to 350,000.
"""

SHAPES = {
    "bm25": "texts of 50 words, queries of 4",
    "inverted": "40 weights a document, 10 a query",
    "flat": "vectors of 384 numbers",
    "dense": "vectors of 384 numbers",
    "plaid": "32 tokens of 64 numbers",
    "muvera": "32 tokens of 64 numbers",
    "hnsw": "vectors of 384 numbers",
}
"""What the measured documents and queries are."""


class Line(NamedTuple):
    """A cost as a function of the number of documents: ``fixed + slope * min(documents, until) ** power``."""

    fixed: float
    slope: float
    power: float
    until: float = math.inf

    def at(self, documents: float) -> float:
        """Return the cost at a number of documents."""
        return self.fixed + self.slope * float(min(documents, self.until) ** self.power)


class Check(NamedTuple):
    """A measurement beside its prediction from measurements of at most a tenth of its documents.

    Attributes:
        documents: Documents of the measurement.
        fitted: Documents of the measurements that the prediction is made from.
        measured: The cost.
        predicted: The prediction.
    """

    documents: int
    fitted: tuple[int, ...]
    measured: float
    predicted: float


def read_costs() -> dict[str, Any]:
    """Return the content of costs.json: ``rows`` of measurements, and where they were ``measured``."""
    content = files("irkit.planning").joinpath("costs.json").read_text()
    return json.loads(content)  # type: ignore[no-any-return]


def measured_kinds() -> list[str]:
    """Return the kinds that have a line: those with two measurements or more."""
    return [kind for kind in POWERS if len(rows_of(kind)) > 1]


def rows_of(index: str, rows: Sequence[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Return the measurements of a kind, smallest first."""
    all_rows = read_costs()["rows"] if rows is None else rows
    own = [row for row in all_rows if row["index"] == index]
    return sorted(own, key=lambda row: int(row["documents"]))


def fit(rows: Sequence[dict[str, Any]], cost: str) -> Line:
    """Fit the line of a cost by least squares of relative errors.

    Args:
        rows: Two or more measurements of one kind.
        cost: Name of the cost.
    """
    from scipy.optimize import nnls

    kind = rows[0]["index"]
    power, until = POWERS[kind][cost], UNTIL.get((kind, cost), math.inf)
    sizes = np.minimum([row["documents"] for row in rows], until, dtype=float)
    values = np.array([row[cost] for row in rows], float)
    unit = sizes.max() ** power  # numbers of one size
    # small memory, even 0, says little: a process has some left from before
    scale = np.maximum(values, values.max() / (10 if cost in (BUILD_MEMORY, MEMORY) else 100))
    matrix = np.stack([np.ones(len(sizes)), sizes**power / unit], 1) / scale[:, None]
    fixed, slope = nnls(matrix, values / scale)[0]
    return Line(float(fixed), float(slope / unit), power, until)


def check(rows: Sequence[dict[str, Any]], cost: str) -> Check | None:
    """Compare the largest measurement with a prediction from measurements a tenth of its size or smaller."""
    largest = rows[-1]
    small = [row for row in rows if 10 * row["documents"] <= largest["documents"]]
    if len(small) < 2:
        return None
    predicted = fit(small, cost).at(largest["documents"])
    sizes = tuple(int(row["documents"]) for row in small)
    return Check(int(largest["documents"]), sizes, float(largest[cost]), predicted)
