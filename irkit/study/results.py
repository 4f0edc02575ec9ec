"""Results of a study: means and deviations over seeds, costs, and tests of variants against the baseline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from irkit.errors import BadValueError
from irkit.evaluation.significance import correct_p
from irkit.training.result_files import Results
from irkit.training.validation import geometric_mean

AVERAGE = "average"
"""Name of the average of all datasets in the results."""
GEOMETRIC = "geometric mean"
"""Name of the geometric mean of all datasets in the results; it is not tested."""

Costs = Mapping[tuple[str, str], float]
"""Costs of one run, by cost and dataset."""


class Cell(NamedTuple):
    """Results of one variant on one dataset, or on the average of all, for one measure.

    Attributes:
        variant: Name of the variant.
        measure: Measure, such as ``nDCG@10``, or a cost, such as ``FLOPS``.
        dataset: Name of a dataset or of a group of datasets; ``"average"`` for the mean over these, each of
            equal weight; ``"geometric mean"`` for their geometric mean.
        seeds: For each seed, the mean of the measure over the queries.
        mean: Mean over the seeds.
        deviation: Sample standard deviation over the seeds; None for a single seed.
        difference: ``mean`` minus the mean of the baseline; None without results of the baseline.
        p: Result of `paired_p`; None for the baseline itself, for costs and geometric means, or without
            results of the baseline.
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
    runs: Mapping[str, Mapping[int, Results]],
    baseline: str,
    datasets: Sequence[str] = (),
    groups: Mapping[str, str] | None = None,
) -> list[Cell]:
    """Summarise the results of all runs, and test the variants against the baseline.

    Args:
        runs: Results by variant and seed. Variants may have fewer seeds than others, or none.
        baseline: Name of the variant that the others are tested against.
        datasets: Names of the datasets to include, in order; empty for all. Representations of a model with
            several heads are datasets, too: ``SciFact`` stands for ``SciFact/dense`` and the others.
        groups: Names of groups by dataset. A group has the mean of its datasets and counts as one of them.

    Returns:
        One cell per measure, dataset and variant, sorted in this order; variants without a seed, or that were
        not measured on a dataset, have none. Cells of the average and the geometric mean over several
        datasets come last; they are of the datasets that the measure was computed on. These cells are missing
        if a variant lacks one of them, or if a name in ``datasets`` stands for several representations.

    Raises:
        BadValueError: Runs were evaluated on different queries.
    """
    finished = {variant: seeds for variant, seeds in runs.items() if seeds}
    if not finished:
        return []
    # measures, and the datasets of each column
    every = [scores for seeds in finished.values() for scores in seeds.values()]
    computed = dict.fromkeys(key for scores in every for key in scores)
    measures = list(dict.fromkeys(measure for measure, _ in computed))
    known = dict.fromkeys(dataset for scores in every for _, dataset in scores)
    columns: dict[str, list[str]] = {}  # the datasets of each group; others are alone
    chosen = _chosen(known, datasets)
    for name in chosen:
        columns.setdefault((groups or {}).get(name) or name, []).append(name)
    cells: list[Cell] = []
    for measure in measures:
        strata: list[_Stratum] = []
        whole = not datasets or {*chosen} <= {*datasets}
        # each column: a dataset, or the mean of a group; other datasets may have other measures
        own = {
            column: [name for name in names if (measure, name) in computed or name not in known]
            for column, names in columns.items()
        }
        own = {column: names for column, names in own.items() if names}
        for column, names in own.items():
            keys = [(measure, name) for name in names]
            there = {
                variant: seeds
                for variant, seeds in finished.items()
                if any(key in scores for scores in seeds.values() for key in keys)
            }
            there = there or finished  # whose error names the dataset
            of_column = [
                _Stratum(
                    1 / len(names),
                    {variant: _aligned(variant, seeds, key, every) for variant, seeds in there.items()},
                )
                for key in keys
            ]
            cells += _test_variants(measure, column, there, of_column, baseline)
            strata += [_Stratum(part.weight / len(own), part.values) for part in of_column]
            whole = whole and len(there) == len(finished)
        # means over all columns
        if len(own) > 1 and whole:
            cells += _test_variants(measure, AVERAGE, finished, strata, baseline)
            cells += _geometric_means(measure, cells, list(own), baseline)
    return cells


def tabulate_costs(
    runs: Mapping[str, Mapping[int, Costs]], baseline: str, datasets: Sequence[str] = ()
) -> list[Cell]:
    """Summarise what the runs cost; arguments as for `tabulate`. Nothing is grouped, and nothing is tested.

    Returns:
        One cell per cost, dataset and variant that has it.
    """
    keys = dict.fromkeys(key for seeds in runs.values() for costs in seeds.values() for key in costs)
    order = list(dict.fromkeys(cost for cost, _ in keys))
    chosen = _chosen(dict.fromkeys(dataset for _, dataset in keys), datasets)
    cells = []
    for cost, dataset in sorted(keys, key=lambda key: order.index(key[0])):
        if dataset not in chosen:
            continue
        values = {
            variant: {seed: costs[cost, dataset] for seed, costs in seeds.items() if (cost, dataset) in costs}
            for variant, seeds in runs.items()
        }
        cells += _untested(cost, dataset, values, baseline)
    return cells


def _geometric_means(
    measure: str, cells: Sequence[Cell], columns: Sequence[str], baseline: str
) -> list[Cell]:
    """Return the geometric mean, over datasets and groups, of each variant and seed."""
    values: dict[str, dict[int, float]] = {}
    by_variant: dict[str, list[dict[int, float]]] = {}
    for cell in cells:
        if cell.measure == measure and cell.dataset in columns:
            by_variant.setdefault(cell.variant, []).append(cell.seeds)
    for variant, parts in by_variant.items():
        values[variant] = {seed: geometric_mean(part[seed] for part in parts) for seed in parts[0]}
    return _untested(measure, GEOMETRIC, values, baseline)


def _untested(
    measure: str, dataset: str, values: Mapping[str, Mapping[int, float]], baseline: str
) -> list[Cell]:
    """Summarise values by variant and seed in cells that have no p value."""
    cells = []
    zero = values.get(baseline)
    for variant, seeds in values.items():
        if not seeds:
            continue
        row = np.array(list(seeds.values()))
        deviation = float(row.std(ddof=1)) if len(row) > 1 else None
        mean = float(row.mean())
        difference = mean - float(np.mean(list(zero.values()))) if zero else None
        cells.append(Cell(variant, measure, dataset, dict(seeds), mean, deviation, difference))
    return cells


class _Stratum(NamedTuple):
    """Values of one dataset: its weight in a mean, and arrays ``(seeds, queries)`` by variant."""

    weight: float
    values: dict[str, npt.NDArray[np.float64]]


def paired_p(differences: Iterable[npt.NDArray[np.float64]], weights: Sequence[float] | None = None) -> float:
    """Compute the two-sided p of a paired t-test: is the mean difference, averaged over datasets, 0?

    With one dataset this is the usual paired t-test. With several, the variances of the means add up, and the
    degrees of freedom follow Welch and Satterthwaite.

    Args:
        differences: For each dataset, ``(queries,)`` differences between two variants; at least two queries.
        weights: Weight of each dataset in the average; None weighs all equally.

    Examples:
        >>> round(paired_p([np.array([0.1, 0.2, 0.3])]), 4)
        0.0742

    Source: Satterthwaite 1946, An Approximate Distribution of Estimates of Variance Components.
    """
    from scipy.stats import t

    parts = list(differences)
    if min(map(len, parts)) < 2:
        raise BadValueError("testing a study: a dataset has one query; expected two at least")
    factors = [1.0] * len(parts) if weights is None else list(weights)
    mean = sum(weight * part.mean() for weight, part in zip(factors, parts, strict=True))
    variances = [w * w * part.var(ddof=1) / len(part) for w, part in zip(factors, parts, strict=True)]
    if not (total := sum(variances)):
        return float(mean == 0)
    freedom = total**2 / sum(v**2 / (len(part) - 1) for v, part in zip(variances, parts, strict=True))
    return float(2 * t.sf(abs(mean) / np.sqrt(total), freedom))


def _chosen(known: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the datasets to tabulate: the named ones, or their representations; all without ``names``."""
    if not names:
        return list(known)
    parts = {name: [dataset for dataset in known if dataset.rpartition("/")[0] == name] for name in names}
    datasets = [dataset for name in names for dataset in ([name] if name in known else parts[name] or [name])]
    return list(dict.fromkeys(datasets))


def _aligned(
    variant: str, seeds: Mapping[int, Results], key: tuple[str, str], every: Iterable[Results]
) -> npt.NDArray[np.float64]:
    """Return the values of a variant ``(seeds, queries)``, with queries in the order of the first run.

    Args:
        variant: Name of the variant, for messages.
        seeds: Results of the variant by seed.
        key: Key of the results that is wanted: a measure and a dataset.
        every: Results of all runs; the first that has the key gives the queries.

    Raises:
        BadValueError: A run was evaluated on other queries than the first run.
    """
    queries = next((scores[key] for scores in every if key in scores), {})
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
    strata: Sequence[_Stratum],
    baseline: str,
) -> list[Cell]:
    means: dict[str, dict[int, float]] = {}
    for variant, seeds in runs.items():
        by_seed = np.sum([part.weight * part.values[variant].mean(1) for part in strata], 0)  # (seeds,)
        by_seed = np.exp(by_seed) if measure.startswith("gm_") else by_seed  # whose values are logarithms
        means[variant] = dict(zip(seeds, by_seed.tolist(), strict=True))
    cells = _untested(measure, dataset, means, baseline)
    if baseline not in means:
        return cells
    others = [variant for variant in means if variant != baseline]
    weights = [part.weight for part in strata]

    def differences(variant: str) -> Iterator[npt.NDArray[np.float64]]:
        return (part.values[variant].mean(0) - part.values[baseline].mean(0) for part in strata)

    if min(part.values[baseline].shape[1] for part in strata) < 2:  # one query cannot be tested
        return cells
    ps = [paired_p(differences(variant), weights) for variant in others]
    tests = dict(zip(others, zip(ps, correct_p(ps, "holm"), strict=True), strict=True))
    return [
        cell._replace(p=p, corrected_p=corrected_p)
        for cell in cells
        for p, corrected_p in [tests.get(cell.variant, (None, None))]
    ]
