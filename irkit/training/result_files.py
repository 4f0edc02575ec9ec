"""The files that a training ends with.

``evaluation.jsonl`` has a value per collection, measure and query, ``costs.jsonl`` a value per collection and
cost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from irkit.errors import CorruptError
from irkit.evaluation.measures import Evaluation, mean_of
from irkit.utils.atomic import explained, write_text

COSTS = "costs.jsonl"
"""Name of the file of costs in the directory of a run."""
Results = dict[tuple[str, str], dict[str, float]]
"""Values by query, by measure and dataset, in this order."""


def write_results(evaluations: Mapping[str, Evaluation], path: Path) -> None:
    """Write one JSON object per collection, measure and query: dataset, measure, query_id, value.

    Raises:
        StorageError: Writing failed.
    """
    lines = (
        json.dumps({"dataset": name, "measure": measure, "query_id": query, "value": value})
        for name, evaluation in evaluations.items()
        for measure, values in evaluation.per_query.items()
        for query, value in values.items()
    )
    write_text(path, "".join(f"{line}\n" for line in lines))


def read_results(path: Path) -> Results:
    """Read a file of `write_results`: (measure, dataset) -> query id -> value.

    Raises:
        StorageError: The file cannot be read.
        CorruptError: The file has other content.
    """
    results: Results = {}
    try:
        with explained(f"reading {path}"):
            text = path.read_text(encoding="utf-8")
        for line in text.splitlines():
            row = json.loads(line)
            results.setdefault((row["measure"], row["dataset"]), {})[row["query_id"]] = float(row["value"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"reading {path}: {error!r}; remove its folder to train again") from error
    return results


def write_costs(costs: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Write one JSON object per collection and cost: dataset, cost, value.

    Args:
        costs: Costs by collection and name, see `irkit.training.vector_costs.Costs`.
        path: File to write.

    Raises:
        StorageError: Writing failed.
    """
    rows = [
        {"dataset": name, "cost": cost, "value": value}
        for name, values in costs.items()
        for cost, value in values.items()
    ]
    write_text(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def read_costs(path: Path) -> dict[tuple[str, str], float]:
    """Read a file of `write_costs`: (cost, dataset) -> value; errors as for `read_results`."""
    try:
        with explained(f"reading {path}"):
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {(row["cost"], row["dataset"]): float(row["value"]) for row in rows}
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"reading {path}: {error!r}; remove its folder to train again") from error


def read_means(path: Path) -> list[tuple[str, str, float]]:
    """Read dataset, measure and mean of each result, see `mean_of`; raises what `read_results` raises."""
    results = read_results(path).items()
    return [(dataset, measure, mean_of(measure, row)) for (measure, dataset), row in results]
