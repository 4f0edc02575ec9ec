"""Measures of runs, computed by ir_measures and pytrec_eval."""

from __future__ import annotations

import difflib
import math
import operator
import re
import subprocess
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from irkit.arguments import brief, check_flags
from irkit.data import Qrels, read_qrels
from irkit.errors import BadTypeError, BadValueError
from irkit.evaluation.run import Run
from irkit.evaluation.trec import TrecMeasure, check_ids, for_library, parse_trec_measure, score_trec


@dataclass(frozen=True)
class Evaluation:
    """The measures of a run, by the names that `evaluate` was called with.

    Attributes:
        mean: Measure -> mean over the queries; for counts such as NumRel the sum, for ``gm_`` measures the
            geometric mean.
        per_query: Measure -> query id -> value; values of ``gm_`` measures are logarithms.
    """

    mean: dict[str, float]
    per_query: dict[str, dict[str, float]]


def evaluate(
    run: Run | Mapping[str, Mapping[str, float]] | str | Path,
    qrels: Qrels | str | Path,
    measures: str | Iterable[str] = ("nDCG@10",),
    *,
    missing: Literal["zero", "skip"] = "zero",
    drop_identical_ids: bool = False,
) -> Evaluation:
    """Compute measures of a run.

    Documents with equal scores are ordered as the reference implementation of the measure orders them; for
    trec_eval's measures by descending document id. Queries without judgments do not count.

    Args:
        run: A run, a dictionary or a file.
        qrels: Judgments, or a source of them (`irkit.data.read_qrels`).
        measures: Names of ir_measures, such as ``nDCG@10``, ``RR@10``, ``R@1000`` or ``AP(rel=2)``, or of
            trec_eval 10, such as ``ndcg_cut_10``, ``gm_map`` or ``Rprec_mult_0.20(rel=2)``. In one string
            they are separated by spaces.
        missing: ``"zero"`` counts a judged query that the run lacks as 0, as published results do
            (``trec_eval -c``). ``"skip"`` leaves it out, as trec_eval does by default; this favours a run
            that fails on a query.
        drop_identical_ids: Ignore documents that have the id of the query (the convention of BEIR).

    Returns:
        Means and values per query.

    Raises:
        BadValueError: A measure is unknown or lacks a parameter, run and judgments share no query, or a grade
            is above a million, which trec_eval cannot count.
        BadTypeError: A grade is not an integer, or an id is not a string.
        StorageError: A file cannot be read.

    Warns:
        UserWarning: The run has no judged document, so that most measures are 0.

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
    judgments = _choose_queries(_judgments(qrels), run, missing)
    _check_documents(judgments, run)
    trec = {measure for measure in chosen.values() if isinstance(measure, TrecMeasure)}
    values: dict[Any, dict[str, float]] = {**score_trec(trec, judgments, run)}
    values |= _score(set(chosen.values()) - trec, judgments, run)
    mean = {name: _mean(name, measure, values[measure]) for name, measure in chosen.items()}
    return Evaluation(mean, {name: values[measure] for name, measure in chosen.items()})


def as_run(run: Run | Mapping[str, Mapping[str, float]] | str | Path) -> Run:
    """Return a run, made of a dictionary or a file if necessary."""
    if isinstance(run, Run):
        return run
    return Run.read(run) if isinstance(run, str | Path) else Run.from_dict(run)


def _choose_queries(judgments: Qrels, run: Run, missing: str) -> Qrels:
    """Return the judgments of the queries that count, see ``missing`` of `evaluate`.

    Raises:
        BadValueError: The judgments are empty, run and judgments share no query, or ``missing`` is neither
            ``"zero"`` nor ``"skip"``.
    """
    if not isinstance(missing, str) or missing not in ("zero", "skip"):
        raise BadValueError(f'evaluate: expected missing="zero" or "skip", got {brief(missing)}')
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


def cutoffs(measures: str | Iterable[str]) -> dict[str, int]:
    """Return how many documents per query each measure looks at; measures that look at all are left out.

    Raises:
        BadValueError: A measure is unknown or has wrong parameters.

    Examples:
        >>> cutoffs("nDCG@10 AP recall_1000")
        {'nDCG@10': 10, 'recall_1000': 1000}
    """
    found = {
        name: measure.cutoff if isinstance(measure, TrecMeasure) else measure.params.get("cutoff")
        for name, measure in _parse(measures).items()
    }
    return {name: cutoff for name, cutoff in found.items() if cutoff is not None}


def _parse(measures: str | Iterable[str]) -> dict[str, Any]:
    """Parse and check measure names; return a dict {name: measure object}."""
    import ir_measures
    from ir_measures.measures import registry

    chosen: dict[str, Any] = {}
    for name in names_of(measures):
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
        # parameters that ir_measures accepts, but that abort trec_eval or that nothing installed computes
        for key in {"cutoff", "rel"} & measure.params.keys():
            value = measure.params[key]
            if isinstance(value, bool) or not 1 <= value < 1 << 31:  # otherwise trec_eval aborts
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


def names_of(measures: str | Iterable[str]) -> list[str]:
    """Return the names of measures, which a string has between spaces or commas."""
    import ir_measures

    if isinstance(measures, str):  # split at spaces, and at commas outside parentheses and between names
        return re.findall(r"(?:\([^)]*\)|,(?=[-.\d])(?!11pt)|[^\s,(])+", measures)
    is_list = isinstance(measures, Iterable) and not isinstance(measures, bytes)
    names = list(measures) if is_list else [measures]
    for name in names:
        if not isinstance(name, str | ir_measures.Measure):
            raise BadTypeError(f"evaluate: got {brief(name)} as a measure; expected a name such as nDCG@10")
    return list(map(str, names))


def mean_of(name: str, values: Mapping[str, float]) -> float:
    """Combine the values of all queries, of the measure that `evaluate` calls ``name``, see `Evaluation`."""
    return _mean(name, _parse([name])[name], values)


def _mean(name: str, measure: Any, values: Mapping[str, float]) -> float:
    """Combine the values of all queries: sum counts, take geometric means of ``gm_``, average the others."""
    if isinstance(measure, TrecMeasure):
        total = float(sum(values.values()))
        mean = total if name.startswith("num_") or not values else total / len(values)
        return math.exp(mean) if name.startswith("gm_") else mean
    aggregator = measure.aggregator()  # adds in the order of the judgments: equal runs have equal means
    for value in values.values():
        aggregator.add(value)
    return float(aggregator.result())


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
    try:  # trec_eval demands plain integers
        judgments = {
            query: {doc: operator.index(grade) for doc, grade in row.items()} for query, row in qrels.items()
        }
    except (AttributeError, TypeError) as error:
        raise BadTypeError(
            f"evaluate: qrels must be query id -> document id -> integer grade: {error}"
        ) from error
    for name in (*judgments, *chain.from_iterable(judgments.values())):
        if not isinstance(name, str):
            raise BadTypeError(f"evaluate: qrels have the id {brief(name)}; expected ids that are strings")
    return judgments


def _check_documents(judgments: Qrels, run: Run) -> None:
    """Raise BadValueError at ids that trec_eval would confuse; warn if no document of the run is judged."""
    ids = {query: run.columns(query)[0] for query in judgments if query in run}
    for query, docs in ids.items():
        check_ids(query, docs)
    if any(ids.values()) and all(judgments[query].keys().isdisjoint(docs) for query, docs in ids.items()):
        query, n_results = next(iter(ids)), sum(map(len, ids.values()))
        examples = [next(iter(docs), "none") for docs in (judgments[query], ids[query])]
        warnings.warn(
            f"evaluate: no judged document is in the run, in none of {n_results:,} results of {len(ids)} "
            f"judged queries: for query {query!r} it has such as "
            f"{examples[1]!r}, the judgments {examples[0]!r}; do they belong together?",
            stacklevel=3,
        )


def _score(measures: set[Any], qrels: Qrels, run: Run) -> dict[Any, dict[str, float]]:
    """Compute measures of ir_measures: measure -> query -> value, the queries in the order of ``qrels``."""
    import ir_measures

    queries = list(qrels)  # passed on by number: gdeval takes no other ids
    judged = dict(zip(map(str, range(len(queries))), for_library(qrels).values(), strict=True))
    rankings = [dict(run[query]) if query in run else {} for query in queries]
    results = {str(number): ranking for number, ranking in enumerate(rankings) if ranking}
    values: dict[Any, dict[str, float]] = {measure: {} for measure in measures}
    # measures with gains run alone: ir_measures may score a plain nDCG with the gains of another measure
    gained = [measure for measure in measures if "gains" in measure.params]
    for group in ([*measures - set(gained)], *([measure] for measure in gained)):
        try:
            for metric in ir_measures.iter_calc(group, judged, results) if group else ():
                values[metric.measure][queries[int(metric.query_id)]] = metric.value
        except subprocess.CalledProcessError as error:
            names = [str(measure) for measure in group if measure.NAME == "ERR" or "dcg" in measure.params]
            raise BadValueError(
                f"evaluate: {', '.join(names)}: gdeval, which computes it, takes grades up to 4; instead of "
                "nDCG(dcg='exp-log2')@10 take nDCG(gains={1: 1, 2: 3, 3: 7, ...})@10, which takes any"
            ) from error
    for measure in measures:  # counts of judgments must not depend on the run
        if measure.NAME == "NumQ":
            values[measure] = dict.fromkeys(qrels, 1.0)
        elif measure.NAME == "NumRel":
            values[measure] = {
                query: sum(grade >= 1 for grade in row.values()) for query, row in qrels.items()
            }
    return {m: {query: row[query] for query in qrels if query in row} for m, row in values.items()}
