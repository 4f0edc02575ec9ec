"""Results of a study: means and deviations over seeds, and tests of variants against the baseline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from irkit.errors import BadValueError
from irkit.evaluation.significance import correct_p
from irkit.training.result_files import Results

AVERAGE = "average"
"""Name of the average of all datasets in the results."""


class Cell(NamedTuple):
    """Results of one variant on one dataset, or on the average of all, for one measure.

    Attributes:
        variant: Name of the variant.
        measure: Measure, such as ``nDCG@10``.
        dataset: Name of the dataset, or ``"average"`` for the mean over the datasets, each of equal weight.
        seeds: For each seed, the mean of the measure over the queries.
        mean: Mean over the seeds.
        deviation: Sample standard deviation over the seeds; None for a single seed.
        difference: ``mean`` minus the mean of the baseline; None without results of the baseline.
        p: Result of `paired_p`; None for the baseline itself, or without results of the baseline.
        corrected_p: ``p`` after Holm's correction for all variants under the same measure and dataset.
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
        """Return True if ``corrected_p`` is below ``alpha``; False if it is None."""
        return self.corrected_p is not None and self.corrected_p < alpha


def tabulate(
    runs: Mapping[str, Mapping[int, Results]], baseline: str, datasets: Sequence[str] = ()
) -> list[Cell]:
    """Summarise the results of all runs, and test the variants against the baseline.

    Args:
        runs: Results by variant and seed. Variants may have fewer seeds than others, or none.
        baseline: Name of the variant that the others are tested against.
        datasets: Names of the datasets to include, in order; empty for all.

    Returns:
        One cell per measure, dataset and variant, sorted in this order; variants without a seed have none.
        Cells of the average over several datasets come last.

    Raises:
        BadValueError: Runs were evaluated on different queries.
    """
    finished = {variant: seeds for variant, seeds in runs.items() if seeds}
    if not finished:
        return []
    first = next(iter(next(iter(finished.values())).values()))
    measures = list(dict.fromkeys(measure for measure, _ in first))
    names = list(datasets or dict.fromkeys(dataset for _, dataset in first))
    cells: list[Cell] = []
    for measure in measures:
        strata = []  # of each dataset, arrays (seeds, queries) by variant
        for name in names:
            key = measure, name
            strata.append({variant: _aligned(variant, runs[variant], key, first) for variant in finished})
            cells += _test_variants(measure, name, finished, strata[-1:], baseline)
        if len(names) > 1:
            cells += _test_variants(measure, AVERAGE, finished, strata, baseline)
    return cells


def paired_p(differences: Iterable[npt.NDArray[np.float64]]) -> float:
    """Compute the two-sided p of a paired t-test: is the mean difference, averaged over datasets, 0?

    With one dataset this is the usual paired t-test. With several, the variances of the means add up, and the
    degrees of freedom follow Welch and Satterthwaite.

    Args:
        differences: For each dataset, ``(queries,)`` differences between two variants; at least two queries.

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
    variant: str, seeds: Mapping[int, Results], key: tuple[str, str], first: Results
) -> npt.NDArray[np.float64]:
    """Return the values of a variant ``(seeds, queries)``, with queries in the order of the first run.

    Args:
        variant: Name of the variant, for messages.
        seeds: Results of the variant by seed.
        key: Key of the results that is wanted: a measure and a dataset.
        first: Results of the first run of the study.

    Raises:
        BadValueError: A run was evaluated on other queries than the first run.
    """
    queries = first.get(key, {})
    for seed, scores in seeds.items():
        values = scores.get(key, {})
        if not queries or values.keys() != queries.keys():
            raise BadValueError(
                f"{key[0]} on {key[1]!r}: {variant!r} with seed {seed} has {len(values)} queries, the first "
                f"run {len(queries)}; expected the same ones: remove the folder of the run that differs"
            )
    return np.array([[scores[key][query] for query in queries] for scores in seeds.values()])


def _test_variants(
    measure: str,
    dataset: str,
    runs: Mapping[str, Mapping[int, Results]],
    strata: list[dict[str, npt.NDArray[np.float64]]],
    baseline: str,
) -> list[Cell]:
    cells = {}
    for variant, seeds in runs.items():
        by_seed = np.mean([part[variant].mean(1) for part in strata], 0)  # (seeds,)
        deviation = float(by_seed.std(ddof=1)) if len(by_seed) > 1 else None
        means = dict(zip(seeds, by_seed.tolist(), strict=True))
        cells[variant] = Cell(variant, measure, dataset, means, float(by_seed.mean()), deviation)
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
