"""Values of measures as standard scores: how far a run is above or below other runs, query by query."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from irkit.arguments import shown
from irkit.data.files import decode, name_of, read_lines
from irkit.errors import BadTypeError, BadValueError
from irkit.evaluation import Evaluation
from irkit.trec_measures import aggregate

__all__ = ["Standards", "read_standards", "standardize"]

Standards: TypeAlias = Mapping[str, Mapping[str, tuple[float, float]]]
"""Query id -> measure -> mean and standard deviation over other runs."""

_UNKNOWN = -1e6  # trec_eval's mark


def read_standards(path: str | Path) -> Standards:
    """Read trec_eval's file of standards: query, measure, mean and standard deviation a line.

    Raises:
        StorageError: The file cannot be read.
        BadValueError: A line is malformed.
    """
    standards: dict[str, dict[str, tuple[float, float]]] = {}
    for number, line in read_lines(name_of(path)):
        try:
            query, measure, *texts = decode(line, f"{path}:{number}").split()
            mean, deviation = map(float, texts)
        except ValueError:
            deviation = -1.0
        if deviation < 0 or not math.isfinite(mean + deviation):
            raise BadValueError(
                f"{path}:{number}: expected query, measure, mean, standard deviation; got {line[:60]!r}"
            )
        standards.setdefault(query, {})[measure] = mean, deviation
    return standards


def standardize(evaluation: Evaluation, standards: Standards) -> Evaluation:
    """Turn values into standard scores: (value - mean) / standard deviation, trec_eval's ``-Z``.

    Args:
        evaluation: Of the run in question, under the names that the standards have.
        standards: Query -> measure -> mean and standard deviation, as `read_standards` gives them.

    Returns:
        Scores per query and their means (sums of counts, as ever); ``num_q`` stays. A value without a
        standard, or off one of deviation 0, is -1,000,000 as in trec_eval.

    Raises:
        BadTypeError: Evaluation or standards are something else.
        BadValueError: No query of the evaluation has a standard.

    Examples:
        >>> evaluation = Evaluation({"map": 0.5}, {"map": {"q1": 0.5}})
        >>> standardize(evaluation, {"q1": {"map": (0.25, 0.125)}}).mean
        {'map': 2.0}

    Source: Webber, Moffat and Zobel 2008, Score Standardization for Inter-Collection Comparison.
    """
    if not isinstance(evaluation, Evaluation):
        raise BadTypeError(f"standardize: got {shown(evaluation)}; expected what `evaluate` returns")
    rows = standards.values() if isinstance(standards, Mapping) else [standards]
    for row in rows:
        values = row.values() if isinstance(row, Mapping) else [row]
        if not all(isinstance(pair, tuple) and [type(x) for x in pair] == [float, float] for pair in values):
            raise BadTypeError(
                f"standardize: standards have {shown(row)}; expected measure -> (mean, deviation), floats"
            )
    if not any(query in standards for row in evaluation.per_query.values() for query in row):
        raise BadValueError(
            "standardize: no query of the evaluation has a standard; do they belong together?"
        )
    per_query = {
        name: {
            query: value if name == "num_q" else _score(value, standards.get(query, {}).get(name))
            for query, value in row.items()
        }
        for name, row in evaluation.per_query.items()
    }
    return Evaluation({name: aggregate(name, row.values()) for name, row in per_query.items()}, per_query)


def _score(value: float, standard: tuple[float, float] | None) -> float:
    if standard is None:
        return _UNKNOWN
    mean, deviation = standard
    if deviation:
        return (value - mean) / deviation
    return 0.0 if value == mean else _UNKNOWN
