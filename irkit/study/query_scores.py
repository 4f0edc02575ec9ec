"""The file ``scores.jsonl.gz`` of a study: the values of all queries, from which every p can be computed.

The first line is an object with the name and the baseline of the study and the groups of its datasets. Every
other line has a variant, a seed, a measure, a dataset and ``values`` by query.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from irkit.arguments import suggest
from irkit.errors import BadValueError, CorruptError
from irkit.study.results import Cell, tabulate
from irkit.training.result_files import Results
from irkit.utils.atomic import explained, replacing

SCORES = "scores.jsonl.gz"


class Scores(NamedTuple):
    """Values of all queries of a study.

    Attributes:
        name: Title of the study.
        baseline: Name of the variant that the others are compared with.
        groups: Names of groups by dataset.
        runs: Results by variant and seed.
    """

    name: str
    baseline: str
    groups: dict[str, str]
    runs: dict[str, dict[int, Results]]


def write_scores(scores: Scores, path: Path) -> None:
    """Write the file; equal scores give equal bytes.

    Raises:
        StorageError: Writing failed.
    """
    rows: list[Mapping[str, object]] = [
        {"name": scores.name, "baseline": scores.baseline, "groups": scores.groups}
    ]
    rows += [
        {"variant": variant, "seed": seed, "measure": measure, "dataset": dataset, "values": values}
        for variant, seeds in scores.runs.items()
        for seed, results in seeds.items()
        for (measure, dataset), values in results.items()
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with replacing(path) as aside:
        aside.write_bytes(gzip.compress(text.encode(), mtime=0))


_DAMAGED = (gzip.BadGzipFile, zlib.error, EOFError, KeyError, TypeError, ValueError, AttributeError)


def read_scores(path: str | Path) -> Scores:
    """Read a file of `write_scores`, or such a file in the directory of a study.

    Raises:
        StorageError: The file cannot be read.
        CorruptError: The file has other content.
    """
    path = Path(path)
    path = path / SCORES if path.is_dir() else path
    try:
        with explained(f"reading {path}"):
            packed = path.read_bytes()
        first, *rest = map(json.loads, gzip.decompress(packed).decode().rstrip("\n").split("\n"))
        scores = Scores(str(first["name"]), str(first["baseline"]), dict(first["groups"]), {})
        for row in rest:
            results = scores.runs.setdefault(row["variant"], {}).setdefault(int(row["seed"]), {})
            results[row["measure"], row["dataset"]] = {q: float(v) for q, v in row["values"].items()}
    except _DAMAGED as error:
        raise CorruptError(f"reading {path}: no scores of a study: {error!r}") from error
    return scores


def compare_variants(first: str, second: str) -> list[Cell]:
    """Test a variant of a study against a variant of this or another study, from their stored scores.

    Args:
        first: The baseline: the directory of a study or its file of scores, then ``:`` and the name of a
            variant; without a name it is the baseline of the study.
        second: What is tested, in the same form.

    Returns:
        The cells of both, named as the arguments are, see `irkit.study.results.tabulate`.

    Raises:
        StorageError: A file cannot be read.
        CorruptError: A file holds no scores.
        BadValueError: A variant is unknown, both are the same, or the two were measured on other queries.

    Examples:
        >>> compare_variants("projections:Linear", "projections:FFN, depth 3")  # doctest: +SKIP
    """
    if first == second:
        raise BadValueError(f"comparing variants: got {first!r} twice; expected two")
    groups: dict[str, str] = {}
    runs: dict[str, dict[int, Results]] = {}
    for word in (first, second):
        path, colon, variant = word.partition(":") if not Path(word).exists() else (word, "", "")
        scores = read_scores(path)
        variant = variant if colon else scores.baseline
        if variant not in scores.runs:
            near = suggest(variant, list(scores.runs))
            raise BadValueError(f"comparing variants: {path} has no results of {variant!r}; {near}")
        groups |= scores.groups
        runs[word] = scores.runs[variant]
    return tabulate(runs, first, groups=groups)
