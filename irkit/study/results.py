"""Results of a study: means and deviations over seeds, and tests of the variants against the baseline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from irkit.errors import BadValueError, CorruptError
from irkit.evaluation import correct_p

__all__ = ["AVERAGE", "Cell", "Scores", "paired_p", "read_scores", "tabulate"]

AVERAGE = "average"  # of all datasets

Scores = dict[tuple[str, str], dict[str, float]]  # (measure, dataset) -> query -> value


class Cell(NamedTuple):
    """One variant on one dataset, or on their average, under one measure.

    Attributes:
        variant: Its name.
        measure: Such as ``nDCG@10``.
        dataset: Its name, or ``"average"``: the mean over the datasets, each of equal weight.
        seeds: Seed -> mean over the queries.
        mean: Over the seeds.
        deviation: Of a sample, over the seeds; None of a single one.
        difference: Of the mean to that of the baseline; None without one.
        p: Of `paired_p`; None of the baseline, and without one.
        corrected_p: Holm's, for all variants under the same measure and dataset.
    """

    variant: str
    measure: str
    dataset: str
    seeds: dict[int, float]
    mean: float
    deviation: float | None
    difference: float | None = None
    p: float | None = None
    corrected_p: float | None = None

    def significant(self, alpha: float = 0.05) -> bool:
        """Whether the corrected p is below ``alpha``."""
        return self.corrected_p is not None and self.corrected_p < alpha


def read_scores(path: Path) -> Scores:
    """Read the ``evaluation.jsonl`` that a training ends with.

    Raises:
        CorruptError: It is not what a training writes.
    """
    scores: Scores = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            scores.setdefault((row["measure"], row["dataset"]), {})[row["query_id"]] = float(row["value"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"reading {path}: {error!r}; remove its folder to train again") from error
    return scores


def tabulate(
    runs: Mapping[str, Mapping[int, Scores]], baseline: str, datasets: Sequence[str] = ()
) -> list[Cell]:
    """Summarise and test.

    Args:
        runs: Variant -> seed -> its scores; a variant may have fewer seeds than others, or none.
        baseline: Name of the variant that the others are tested against.
        datasets: The ones that count, in this order; by default all that there are.

    Returns:
        A cell for each measure, dataset and variant with a seed, in this order; of several datasets,
        their average comes last.

    Raises:
        BadValueError: Runs were evaluated on different queries.
    """
    finished = {variant: seeds for variant, seeds in runs.items() if seeds}
    if not finished:
        return []
    first = next(iter(next(iter(finished.values())).values()))
    measures = list(dict.fromkeys(measure for measure, _ in first))
    names = list(datasets or dict.fromkeys(dataset for _, dataset in first))
    values = {
        (measure, name): {
            variant: _aligned(variant, seeds, (measure, name), first) for variant, seeds in finished.items()
        }
        for measure in measures
        for name in names
    }  # variant -> (seeds, queries)
    cells: list[Cell] = []
    for measure in measures:
        for name in [*names, AVERAGE] if len(names) > 1 else names:
            strata = [values[measure, each] for each in (names if name == AVERAGE else [name])]
            cells += _tested(measure, name, finished, strata, baseline)
    return cells


def paired_p(differences: Iterable[npt.NDArray[np.float64]]) -> float:
    """Two-sided p of a paired t-test of the mean over datasets of the mean difference.

    With one dataset this is the usual paired t-test. With several, variances of the means add up, and the
    degrees of freedom are those of Welch and Satterthwaite.

    Args:
        differences: Of each dataset ``(queries,)``, two at least.

    Examples:
        >>> round(paired_p([np.array([0.1, 0.2, 0.3])]), 4)
        0.0742

    Source: Satterthwaite 1946, An Approximate Distribution of Estimates of Variance Components.
    """
    from scipy.stats import t

    parts = list(differences)
    if min(map(len, parts)) < 2:
        raise BadValueError("testing a study: a dataset has one query; expected two at least")
    mean = sum(part.mean() for part in parts)
    variances = [part.var(ddof=1) / len(part) for part in parts]
    if not (total := sum(variances)):
        return float(mean == 0)
    freedom = total**2 / sum(v**2 / (len(part) - 1) for v, part in zip(variances, parts, strict=True))
    return float(2 * t.sf(abs(mean) / np.sqrt(total), freedom))


def _aligned(
    variant: str, seeds: Mapping[int, Scores], key: tuple[str, str], first: Scores
) -> npt.NDArray[np.float64]:
    """Values of one dataset ``(seeds, queries)``, the queries in the order of the first run."""
    queries = first.get(key, {})
    for seed, scores in seeds.items():
        found = scores.get(key, {})
        if not queries or found.keys() != queries.keys():
            raise BadValueError(
                f"{key[0]} on {key[1]!r}: {variant!r} with seed {seed} has {len(found)} queries, the first "
                f"run {len(queries)}; expected the same ones: remove the folder of the run that differs"
            )
    return np.array([[scores[key][query] for query in queries] for scores in seeds.values()])


def _tested(
    measure: str,
    dataset: str,
    runs: Mapping[str, Mapping[int, Scores]],
    strata: list[dict[str, npt.NDArray[np.float64]]],
    baseline: str,
) -> list[Cell]:
    cells = {}
    for variant, seeds in runs.items():
        by_seed = np.mean([part[variant].mean(1) for part in strata], 0)  # (seeds,)
        deviation = float(by_seed.std(ddof=1)) if len(by_seed) > 1 else None
        each = dict(zip(seeds, by_seed.tolist(), strict=True))
        cells[variant] = Cell(variant, measure, dataset, each, float(by_seed.mean()), deviation)
    if baseline not in cells:
        return list(cells.values())
    others = [variant for variant in cells if variant != baseline]
    ps = [paired_p(part[other].mean(0) - part[baseline].mean(0) for part in strata) for other in others]
    tests = dict(zip(others, zip(ps, correct_p(ps, "holm"), strict=True), strict=True))
    zero = cells[baseline].mean
    return [
        cell._replace(difference=cell.mean - zero, p=p, corrected_p=corrected_p)
        for variant, cell in cells.items()
        for p, corrected_p in [tests.get(variant, (None, None))]
    ]
