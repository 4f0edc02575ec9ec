"""The file ``evaluation.jsonl`` at the end of a training: one value per collection, measure and query."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from irkit.errors import CorruptError
from irkit.evaluation.measures import Evaluation
from irkit.utils.atomic import explained, write_text

Results = dict[tuple[str, str], dict[str, float]]
"""Values by query, by measure and dataset."""


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
    """Read a file of `write_results`: (dataset, measure) -> query id -> value.

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


def read_means(path: Path) -> list[tuple[str, str, float]]:
    """Read dataset, measure and mean over the queries of each result; raises what `read_results` raises."""
    results = read_results(path).items()
    return [(dataset, measure, sum(row.values()) / len(row)) for (measure, dataset), row in results]
