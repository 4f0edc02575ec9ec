"""Paired significance tests between the evaluations of several systems."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

from irkit.arguments import brief
from irkit.errors import BadTypeError, BadValueError
from irkit.evaluation.measures import Evaluation


class Comparison(NamedTuple):
    """A row of `compare`: one system against the baseline under one measure.

    Attributes:
        system: Name of the system.
        measure: Name of the measure.
        mean: Mean of the system over the queries.
        difference: Mean of the system less the mean of the baseline.
        p: p value of the test before the correction.
        corrected_p: p value after the correction.
        significant: Whether ``corrected_p`` is below ``alpha``.
    """

    system: str
    measure: str
    mean: float
    difference: float
    p: float
    corrected_p: float
    significant: bool


def compare(
    baseline: Evaluation,
    systems: Mapping[str, Evaluation],
    *,
    correction: Literal["holm", "bonferroni"] | None = "holm",
    alpha: float = 0.05,
) -> list[Comparison]:
    """Test every system against the baseline by a paired two-sided t-test over the queries, per measure.

    Args:
        baseline: Evaluation of the baseline.
        systems: Name -> evaluation, with the measures and the queries of the baseline.
        correction: Correction for several tests; the systems under one measure are one family.
        alpha: A corrected p below this level is significant.

    Returns:
        One row per measure and system. Systems equal to the baseline on all queries have p = 1.

    Raises:
        BadTypeError: An argument is not an evaluation.
        BadValueError: Measures or queries differ, there are fewer than two queries, or an option makes
            no sense.

    Source: Holm 1979, A Simple Sequentially Rejective Multiple Test Procedure.
    """
    if not isinstance(systems, Mapping):
        raise BadTypeError(f"compare: systems are {brief(systems)}; expected name -> evaluation")
    for evaluation in (baseline, *systems.values()):
        if not isinstance(evaluation, Evaluation):
            raise BadTypeError(f"compare: got {brief(evaluation)}; expected what `evaluate` returns")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < 1:
        raise BadValueError(f"compare: alpha is {brief(alpha)}; expected a number between 0 and 1")
    rows: list[Comparison] = []
    for measure, base in baseline.per_query.items():
        for name, system in systems.items():
            queries = system.per_query.get(measure, {}).keys()
            if queries != base.keys() or len(base) < 2:
                raise BadValueError(
                    f"compare: {measure} of {name!r} has {len(queries)} queries, the baseline {len(base)}; "
                    "expected the same queries, two at least: evaluate all runs with the same measures and "
                    'judgments, and missing="zero"'
                )
        ps = [_p_value(base, system.per_query[measure]) for system in systems.values()]
        for (name, system), p, corrected in zip(systems.items(), ps, correct_p(ps, correction), strict=True):
            mean = system.mean[measure]
            difference = mean - baseline.mean[measure]
            rows.append(Comparison(name, measure, mean, difference, p, corrected, corrected < alpha))
    return rows


def correct_p(ps: list[float], correction: str | None) -> list[float]:
    """Return the p values of one family of tests, corrected for the number of tests, see `compare`."""
    if correction is None:
        return ps
    if not isinstance(correction, str) or correction not in ("holm", "bonferroni"):
        raise BadValueError(
            f"compare: unknown correction {brief(correction)}; expected holm, bonferroni or None"
        )
    order = np.argsort(ps, kind="stable")
    factors = len(ps) - np.arange(len(ps)) if correction == "holm" else np.full(len(ps), len(ps))
    stepped = np.maximum.accumulate(np.array(ps)[order] * factors) if ps else np.empty(0)
    corrected = np.empty(len(ps))
    corrected[order] = np.minimum(stepped, 1)
    return corrected.tolist()


def _p_value(base: Mapping[str, float], other: Mapping[str, float]) -> float:
    from scipy.stats import ttest_rel

    pairs = np.array([(other[query], value) for query, value in base.items()], dtype=np.float64)
    if (pairs[:, 0] == pairs[:, 1]).all():  # 0 / 0
        return 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # equal differences everywhere: p is 0
        return float(ttest_rel(pairs[:, 0], pairs[:, 1]).pvalue)
