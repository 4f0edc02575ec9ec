"""Measures of runs, through ir_measures and pytrec_eval, and paired significance tests between them."""

from __future__ import annotations

import difflib
import operator
import re
import subprocess
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from irkit.arguments import check_flags, shown
from irkit.data import Qrels, read_qrels
from irkit.errors import BadTypeError, BadValueError
from irkit.run import Run
from irkit.trec_measures import TrecMeasure, aggregate, check_ids, for_library, parse_trec_measure, score_trec

__all__ = ["Comparison", "Evaluation", "as_run", "choose_queries", "compare", "correct_p", "evaluate"]

T = TypeVar("T")


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found; the keys are the measures as they were asked for.

    Attributes:
        mean: Measure -> mean over the queries (of counts such as NumRel: the sum; of ``gm_`` measures: the
            geometric mean, whose values per query are logarithms).
        per_query: Measure -> query id -> value.
    """

    mean: dict[str, float]
    per_query: dict[str, dict[str, float]]


class Comparison(NamedTuple):
    """One system against the baseline under one measure: a row of `compare`."""

    system: str
    measure: str
    mean: float
    difference: float
    p: float
    corrected_p: float
    significant: bool


def evaluate(
    run: Run | Mapping[str, Mapping[str, float]] | str | Path,
    qrels: Qrels | str | Path,
    measures: str | Iterable[str] = ("nDCG@10",),
    *,
    missing: Literal["zero", "skip"] = "zero",
    drop_identical_ids: bool = False,
) -> Evaluation:
    """Score a run.

    Documents with equal scores are ordered as the measure's reference implementation does, trec_eval's by
    descending document id, whatever their order in the run. Queries without judgments do not count.

    Args:
        run: A run, a dictionary or a file.
        qrels: Judgments, or a source of them (`irkit.data.read_qrels`).
        measures: Names as ir_measures has them, such as ``nDCG@10``, ``RR@10``, ``R@1000`` or
            ``AP(rel=2)``, or as trec_eval 10 prints them, such as ``ndcg_cut_10``, ``gm_map`` or
            ``Rprec_mult_0.20(rel=2)``; in one string they are separated by spaces.
        missing: Judged queries that the run lacks count as ``"zero"``, as in published results
            (``trec_eval -c``), or are left out: ``"skip"``, trec_eval's default, which flatters a run
            that fails on a query.
        drop_identical_ids: Ignore documents that have the id of the query (BEIR's convention).

    Returns:
        Means and values per query.

    Raises:
        BadValueError: A measure is unknown or lacks a parameter, run and judgments share no query, or a grade
            is beyond a million, which trec_eval cannot count.
        BadTypeError: A grade is not an integer, or an id is not a string.
        StorageError: A file cannot be read.

    Warns:
        UserWarning: No judged document is in the run, so that most measures are 0.

    Examples:
        >>> result = evaluate({"q1": {"d1": 2.0, "d2": 1.0}}, {"q1": {"d2": 1}}, "RR@10 P@1")
        >>> result.mean
        {'RR@10': 0.5, 'P@1': 0.0}

    Source: MacAvaney et al. 2022, https://arxiv.org/abs/2111.13466 (ir_measures).
    """
    check_flags("evaluate", drop_identical_ids=drop_identical_ids)
    chosen = _parse(measures)
    run = as_run(run)
    if drop_identical_ids:
        run = run.without_identical_ids()
    judgments = choose_queries(_judgments(qrels), run, missing)
    _check_documents(judgments, run)
    trec = {measure for measure in chosen.values() if isinstance(measure, TrecMeasure)}
    values: dict[Any, dict[str, float]] = {**score_trec(trec, judgments, run)}
    values |= _score(set(chosen.values()) - trec, judgments, run)
    mean = {name: _mean(name, measure, values[measure]) for name, measure in chosen.items()}
    return Evaluation(mean, {name: values[measure] for name, measure in chosen.items()})


def compare(
    baseline: Evaluation,
    systems: Mapping[str, Evaluation],
    *,
    correction: Literal["holm", "bonferroni"] | None = "holm",
    alpha: float = 0.05,
) -> list[Comparison]:
    """Test every system against the baseline: paired two-sided t-test over the queries, per measure.

    Args:
        baseline: Evaluation of the run that the others are held against.
        systems: Name -> evaluation, with the measures and the queries of the baseline.
        correction: For testing several systems; the systems under one measure are one family.
        alpha: Level under which a corrected p is significant.

    Returns:
        One row for each measure and system. Systems equal to the baseline on all queries have p = 1.

    Raises:
        BadTypeError: What is given is no evaluation.
        BadValueError: Measures or queries differ, there are fewer than two queries, or an option makes
            no sense.

    Source: Holm 1979, A Simple Sequentially Rejective Multiple Test Procedure.
    """
    if not isinstance(systems, Mapping):
        raise BadTypeError(f"compare: systems are {shown(systems)}; expected name -> evaluation")
    for evaluation in (baseline, *systems.values()):
        if not isinstance(evaluation, Evaluation):
            raise BadTypeError(f"compare: got {shown(evaluation)}; expected what `evaluate` returns")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < 1:
        raise BadValueError(f"compare: alpha is {shown(alpha)}; expected a number between 0 and 1")
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


def as_run(run: Run | Mapping[str, Mapping[str, float]] | str | Path) -> Run:
    """Take a run, or make one of a dictionary or a file."""
    if isinstance(run, Run):
        return run
    return Run.read(run) if isinstance(run, str | Path) else Run.from_dict(run)


def choose_queries(judgments: Mapping[str, T], run: Run, missing: str) -> dict[str, T]:
    """Choose the queries that count: the judged ones, those of the run alone if ``missing`` is ``"skip"``.

    Raises:
        BadValueError: There are no judgments, run and judgments share no query, or ``missing`` is neither
            ``"zero"`` nor ``"skip"``.
    """
    if not isinstance(missing, str) or missing not in ("zero", "skip"):
        raise BadValueError(f'evaluate: expected missing="zero" or "skip", got {shown(missing)}')
    if not judgments:
        raise BadValueError("evaluate: there are no judgments; expected grades of documents by query")
    judged = [query for query in judgments if query in run]
    if not judged:
        examples = [next(iter(ids), "none") for ids in (judgments, run.query_ids)]
        raise BadValueError(
            f"evaluate: none of the {len(judgments)} judged queries (such as {examples[0]!r}) is among the "
            f"{len(run)} of the run (such as {examples[1]!r}); do they belong together?"
        )
    return {query: judgments[query] for query in (judged if missing == "skip" else judgments)}


def _parse(measures: str | Iterable[str]) -> dict[str, Any]:
    """The measures by the names that were given."""
    import ir_measures
    from ir_measures.measures import registry

    chosen: dict[str, Any] = {}
    for name in _names(measures):
        if re.split(r"[@(]", name)[0] not in registry and (trec := parse_trec_measure(name)):
            chosen[name] = trec
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of ast.Num, from Python 3.12 on
                measure = ir_measures.parse_measure(name)
            measure.validate_params()  # type: ignore[no-untyped-call]
        except (AssertionError, NameError, ValueError, TypeError) as error:
            raise BadValueError(f"measure {name!r}: {error or 'not understood'}. {_nearest(name)}") from error
        for key in {"cutoff", "rel"} & measure.params.keys():
            value = measure.params[key]
            if isinstance(value, bool) or not 1 <= value < 1 << 31:  # trec_eval would abort
                raise BadValueError(f"measure {name!r}: expected {key} of at least 1 and below 2^31")
        gains = measure.params.get("gains", {})
        if not all(type(number) is int for pair in gains.items() for number in pair):
            raise BadValueError(f"measure {name!r}: expected whole numbers as gains, such as {{1: 1, 2: 3}}")
        if not ir_measures.DefaultPipeline.supports(measure):  # type: ignore[no-untyped-call]
            raise BadValueError(
                f"measure {name!r}: needs a package that is not installed, or other parameters; try "
                "pip install 'ir-measures[cwl-eval,pyndeval]'"
            )
        chosen[name] = measure
    if not chosen:
        raise BadValueError("evaluate: got no measures, expected some such as nDCG@10")
    return chosen


def _names(measures: str | Iterable[str]) -> list[str]:
    import ir_measures

    if isinstance(measures, str):  # split at spaces, and at commas outside parentheses and between names
        return re.findall(r"(?:\([^)]*\)|,(?=[-.\d])(?!11pt)|[^\s,(])+", measures)
    known = isinstance(measures, Iterable) and not isinstance(measures, bytes)
    given = list(measures) if known else [measures]
    for name in given:
        if not isinstance(name, str | ir_measures.Measure):
            raise BadTypeError(f"evaluate: got {shown(name)} as a measure; expected a name such as nDCG@10")
    return list(map(str, given))


def _mean(name: str, measure: Any, values: Mapping[str, float]) -> float:
    if isinstance(measure, TrecMeasure):
        return aggregate(name, values.values())
    total = measure.aggregator()  # in the order of the judgments: equal runs have equal means, bit by bit
    for value in values.values():
        total.add(value)
    return float(total.result())


def _nearest(name: str) -> str:
    from ir_measures.measures import registry

    known = {key.lower(): measure.__name__ for key, measure in registry.items()}
    near = difflib.get_close_matches(re.split(r"[@(]", name)[0].lower(), known, 3)
    hint = f"Did you mean {' or '.join(dict.fromkeys(known[key] for key in near))}? " if near else ""
    return (
        f"{hint}Measures look like nDCG@10, RR@10, R@1000, P(rel=2)@5, AP or trec_eval's ndcg_cut_10, gm_map"
    )


def _judgments(qrels: Qrels | str | Path) -> Qrels:
    if isinstance(qrels, str | Path):
        return read_qrels(qrels)
    try:  # plain integers, which trec_eval insists on
        found = {
            query: {doc: operator.index(grade) for doc, grade in row.items()} for query, row in qrels.items()
        }
    except (AttributeError, TypeError) as error:
        raise BadTypeError(
            f"evaluate: qrels must be query id -> document id -> integer grade: {error}"
        ) from error
    for name in (*found, *chain.from_iterable(found.values())):
        if not isinstance(name, str):
            raise BadTypeError(f"evaluate: qrels have the id {shown(name)}; expected ids that are strings")
    return found


def _check_documents(judgments: Qrels, run: Run) -> None:
    """Refuse ids that trec_eval would take for others; warn if the run has no document that is judged."""
    found = not any(query in run and run.columns(query)[0] for query in judgments)  # nothing to compare
    for query, row in judgments.items():
        ids = run.columns(query)[0] if query in run else []
        check_ids(query, ids)
        found = found or not row.keys().isdisjoint(ids)
    if not found:
        query = next(query for query in judgments if query in run)
        examples = [next(iter(ids), "none") for ids in (judgments[query], run.columns(query)[0])]
        warnings.warn(
            f"evaluate: no judged document is in the run: for query {query!r} it has such as "
            f"{examples[1]!r}, the judgments {examples[0]!r}; do they belong together?",
            stacklevel=3,
        )


def _score(measures: set[Any], qrels: Qrels, run: Run) -> dict[Any, dict[str, float]]:
    """Measure -> query -> value, the queries in the order of ``qrels``."""
    import ir_measures

    queries = list(qrels)  # of which gdeval reads numbers only
    judged = dict(zip(map(str, range(len(queries))), for_library(qrels).values(), strict=True))
    rankings = [dict(run[query]) if query in run else {} for query in queries]
    results = {str(number): ranking for number, ranking in enumerate(rankings) if ranking}
    found: dict[Any, dict[str, float]] = {measure: {} for measure in measures}
    # gains apart: ir_measures may score a plain nDCG with those of another one that is asked at once
    gained = [measure for measure in measures if "gains" in measure.params]
    for group in ([*measures - set(gained)], *([measure] for measure in gained)):
        try:
            for metric in ir_measures.iter_calc(group, judged, results) if group else ():
                found[metric.measure][queries[int(metric.query_id)]] = metric.value
        except subprocess.CalledProcessError as error:
            names = [str(measure) for measure in group if measure.NAME == "ERR" or "dcg" in measure.params]
            raise BadValueError(
                f"evaluate: {', '.join(names)}: gdeval, which computes it, takes grades up to 4; instead of "
                "nDCG(dcg='exp-log2')@10 take nDCG(gains={1: 1, 2: 3, 3: 7, ...})@10, which takes any"
            ) from error
    for measure in measures:  # what counts the judgments alone must not depend on the run
        if measure.NAME == "NumQ":
            found[measure] = dict.fromkeys(qrels, 1.0)
        elif measure.NAME == "NumRel":
            found[measure] = {
                query: sum(grade >= 1 for grade in row.values()) for query, row in qrels.items()
            }
    return {m: {query: row[query] for query in qrels if query in row} for m, row in found.items()}


def _p_value(base: Mapping[str, float], other: Mapping[str, float]) -> float:
    from scipy.stats import ttest_rel

    pairs = np.array([(other[query], value) for query, value in base.items()], dtype=np.float64)
    if (pairs[:, 0] == pairs[:, 1]).all():  # 0 / 0
        return 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # equal differences everywhere: p = 0 is meant
        return float(ttest_rel(pairs[:, 0], pairs[:, 1]).pvalue)


def correct_p(ps: list[float], correction: str | None) -> list[float]:
    """The p values of one family of tests, corrected for their number as `compare` does."""
    if correction is None:
        return ps
    if not isinstance(correction, str) or correction not in ("holm", "bonferroni"):
        raise BadValueError(
            f"compare: unknown correction {shown(correction)}; expected holm, bonferroni or None"
        )
    order = np.argsort(ps, kind="stable")
    factors = len(ps) - np.arange(len(ps)) if correction == "holm" else np.full(len(ps), len(ps))
    stepped = np.maximum.accumulate(np.array(ps)[order] * factors) if ps else np.empty(0)
    corrected = np.empty(len(ps))
    corrected[order] = np.minimum(stepped, 1)
    return corrected.tolist()
