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
* `plaid` has at most 32,768 centroids. Beyond the size that reaches this number, the cost of assigning a
  token stays the same.
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
POWERS: dict[str, dict[str, float]] = {
    "bm25": {BUILD: -1.0, QUERY: 1.0, **_SAME},
    "inverted": {BUILD: -1.0, QUERY: 1.0, **_SAME},
    "flat": {BUILD: -1.0, QUERY: 1.0, **_SAME},
    "dense": {BUILD: 0.5, QUERY: 0.75, **_SAME},
    "plaid": {BUILD: 0.5, QUERY: 0.5, **_SAME},
}
"""Powers by kind and cost."""

UNTIL = {("plaid", BUILD): 335_000.0}
"""Number of documents beyond which a cost is constant: there, documents of 32 tokens fill all centroids."""

SHAPES = {
    "bm25": "texts of 50 words, queries of 4",
    "inverted": "40 weights a document, 10 a query",
    "flat": "vectors of 384 numbers",
    "dense": "vectors of 384 numbers",
    "plaid": "32 tokens of 64 numbers",
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


def rows_of(index: str, rows: Sequence[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Return the measurements of a kind, smallest first."""
    every = read_costs()["rows"] if rows is None else rows
    own = [row for row in every if row["index"] == index]
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
    scale = np.maximum(values, values.max() / 100)  # memory may be 0
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
