"""The measures of trec_eval 10, by the names that trec_eval gives them.

pytrec_eval computes most of them. It contains trec_eval 9, so the rest is defined here:

* ``iprec_at_recall`` and ``11pt_avg``, where version 10 rounds and version 9 truncates,
* ``rbp``, ``rbp_resid`` and ``unj``, which version 9 lacks,
* ``utility`` and ``ndcg`` with parameters, which pytrec_eval cannot pass on (``ndcg`` aborts the process; the
  gains of ir_measures' nDCG are whole numbers only).

Version 10 also compares scores in double precision; pytrec_eval gets ranks instead of scores.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from irkit.arguments import brief, check_utf8, is_count
from irkit.data import Qrels
from irkit.errors import BadTypeError, BadValueError
from irkit.evaluation.run import Run

_MAX_GRADE = 1_000_000

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_PLAIN = re.compile(
    r"num_(?:q|ret|rel|rel_ret|nonrel_judged_ret)|(?:gm_)?(?:map|bpref)|Rprec|recip_rank|infAP|11pt_avg|utility|"
    r"ndcg(?:_rel)?|Rndcg|G|binG|set_(?:P|recall|relative_P|map|F)|rbp(?:_resid)?"
)
_RECALL, _NUMBER = r"(?:0?\.\d+|[01](?:\.0+)?)", r"-?(?:\d+\.?\d*|\.\d+)"
_AT_RANK = ("P", "recall", "map_cut", "ndcg_cut", "relative_P", "success", "unj")
_PARAMETERS = {  # family -> pattern of its parameters, an example
    **dict.fromkeys(_AT_RANK, (r"[1-9]\d{0,8}", "10")),
    "Rprec_mult": (r"(?=.*[1-9])\d{1,6}(?:\.\d{1,2})?", "0.20"),
    "iprec_at_recall": (_RECALL, "0.10"),
    "11pt_avg": (rf"{_RECALL}(?:,{_RECALL})*", "0.2,0.5,0.8"),
    "utility": (rf"(?:{_NUMBER},){{3}}0(?:\.0*)?", "1,-1,0,0"),
    "ndcg": (rf"\d{{1,9}}={_NUMBER}(?:,\d{{1,9}}={_NUMBER})*", "1=3,2=9"),
    "rbp": (r"p=0?\.\d+", "p=0.8"),
    "rbp_resid": (r"p=0?\.\d+", "p=0.8"),
}


class TrecMeasure(NamedTuple):
    """A measure of trec_eval: its name, the parameters after the name, and the lowest relevant grade."""

    family: str
    parameters: str
    level: int

    @property
    def cutoff(self) -> int | None:
        """Number of documents per query that the measure looks at; None looks at all."""
        return int(self.parameters) if self.family in _AT_RANK else None


def parse_trec_measure(name: str) -> TrecMeasure | None:
    """Parse the name of a measure; return None if trec_eval has no such measure.

    Args:
        name: A name as trec_eval prints it, such as ``map``, ``P_10`` or ``utility_2,-1,0,0``, or as its
            option ``-m`` takes it, such as ``P.10``. ``(rel=2)`` after the name stands for the option
            ``-l2``.

    Raises:
        BadValueError: The measure does not take these parameters.
    """
    head, level = re.fullmatch(r"(.*?)(?:\(rel=([1-9]\d{0,8})\))?", name, re.DOTALL).groups("1")  # type: ignore[union-attr]
    if _PLAIN.fullmatch(head):
        return TrecMeasure(head, "", int(level))
    families = [name for name in _PARAMETERS if head == name or head.startswith((f"{name}_", f"{name}."))]
    if not families:
        return None
    family = max(families, key=len)
    parameters = head[len(family) + 1 :]
    pattern, example = _PARAMETERS[family]
    if not re.fullmatch(pattern, parameters):
        raise BadValueError(f"measure {name!r}: expected {family}_{example} or the like")
    return TrecMeasure(family, parameters, int(level))


def score_trec(
    measures: Collection[TrecMeasure], qrels: Qrels, run: Run
) -> dict[TrecMeasure, dict[str, float]]:
    """Score every query of the judgments; a query that the run lacks has an empty ranking, as with ``-c``.

    Returns:
        Measure -> query -> value, the queries in the order of ``qrels``. Values of ``gm_map`` and
        ``gm_bpref`` are logarithms.
    """
    import pytrec_eval

    results: dict[TrecMeasure, dict[str, float]] = {measure: {} for measure in measures}
    if not measures:
        return results
    rankings = {query: _rank(run[query]) if query in run else [] for query in qrels}

    # a dummy query comes first: trec_eval crashes if the first ranking is empty
    dummy = max(qrels) + "+"
    judgments = for_library(qrels) | {dummy: {"": 0}}
    # negated ranks instead of scores: pytrec_eval holds single precision, in which close scores are equal
    scores = {dummy: {"": 0}}
    scores |= {query: {doc: -rank for rank, doc in enumerate(docs)} for query, docs in rankings.items()}
    own = {measure for measure in measures if measure.family in _DEFINITIONS and measure[:2] != ("ndcg", "")}
    for level in {measure.level for measure in measures}:
        names = {measure: _library_name(measure) for measure in measures if measure.level == level}
        names = {measure: name for measure, name in names.items() if measure not in own}
        evaluator = pytrec_eval.RelevanceEvaluator(judgments, {*names.values()}, relevance_level=level)
        values = evaluator.evaluate(scores)
        for measure, name in names.items():
            results[measure] = {query: values[query][name] for query in qrels if query in values}

    for query, docs in rankings.items():
        row = qrels[query]
        grades = np.array([row.get(doc, -1) for doc in docs], dtype=np.int64)  # -1: not judged
        judged = np.array(list(row.values()), dtype=np.int64)
        for measure in own:
            results[measure][query] = float(_DEFINITIONS[measure.family](grades, judged, measure))
    return results


def for_library(qrels: Qrels) -> Qrels:
    """Prepare judgments for pytrec_eval, which may hang if all grades of a query are negative.

    A query whose grades are all negative gets a document of grade 0 whose id is empty; no run has an empty
    id.

    Raises:
        BadValueError: A grade is above a million: trec_eval keeps a counter for each grade.
    """
    for query, row in qrels.items():
        check_ids(query, row)
        for doc, grade in row.items():
            if abs(grade) > _MAX_GRADE:
                raise BadValueError(
                    f"evaluate: document {doc!r} of query {query!r} has the grade {brief(grade)}; expected "
                    f"-{_MAX_GRADE:,} to {_MAX_GRADE:,}"
                )
    return {
        query: {**row, "": 0} if row and max(row.values()) < 0 else row  # no run has an empty id
        for query, row in qrels.items()
    }


def check_ids(query: str, docs: Iterable[str]) -> None:
    """Check for ids that trec_eval, which is written in C, would confuse or abort at.

    Raises:
        BadValueError: An id has a null character, which ends strings of C, or an unpaired surrogate.
    """
    words = (query, *docs)
    check_utf8(f"evaluate: query {query!a}", words)
    if "\0" in "".join(words):
        raise BadValueError(
            f"evaluate: query {query!r}: an id of it has a null character, which ends ids in trec_eval; "
            "expected others"
        )


def relevance_strings(run: Run, qrels: Qrels, depth: int = 10) -> dict[str, str]:
    """Write the grades of the first documents, one character each, as trec_eval's ``relstring`` does.

    Returns:
        Query -> grades, with ``>`` for grades above 9, ``-`` for unjudged documents and ``.`` for negative
        grades.

    Raises:
        BadValueError: ``depth`` is negative.

    Examples:
        >>> relevance_strings(Run.from_dict({"q": {"a": 3.0, "b": 2.0, "c": 1.0}}), {"q": {"a": 2, "c": 0}})
        {'q': '2-0'}
    """
    if not is_count(depth, 0):
        raise BadValueError(f"relevance_strings: expected a depth of at least 0, got {brief(depth)}")
    if not isinstance(run, Run):
        raise BadTypeError(f"relevance_strings: got {brief(run)}; expected a Run")
    if not isinstance(qrels, Mapping) or not all(isinstance(row, Mapping) for row in qrels.values()):
        raise BadTypeError(
            f"relevance_strings: qrels are {brief(qrels)}; expected grades by query and document"
        )
    strings = {}
    for query, row in qrels.items():
        docs = _rank(run[query])[:depth] if query in run else []
        grades = [row.get(doc) for doc in docs]
        strings[query] = "".join(
            "-" if grade is None else "." if grade < 0 else ">" if grade > 9 else str(grade)
            for grade in grades
        )
    return strings


def _rank(results: Iterable[tuple[str, float]]) -> list[str]:
    """Order documents as trec_eval does: by descending score, ties by descending id."""
    return [doc for doc, _ in sorted(results, key=lambda item: (item[1], item[0]), reverse=True)]


def _library_name(measure: TrecMeasure) -> str:
    if measure.family == "Rprec_mult":
        return f"{measure.family}_{float(measure.parameters):.2f}"
    return f"{measure.family}_{measure.parameters}".removesuffix("_")


def _interpolated(grades: Array, judged: Array, measure: TrecMeasure) -> float:
    """Average the interpolated precision over recall levels: the highest precision at the level or above.

    The levels are the parameters of the measure, 0 to 1 in tenths by default. A level times the number of
    relevant documents is rounded to a count, at least 1.
    """
    recalls = _numbers(measure.parameters) or [tenth / 10 for tenth in range(11)]
    hits = np.flatnonzero(grades >= measure.level)
    precision = np.arange(1, len(hits) + 1) / (hits + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]  # at the n-th relevant document or later
    relevant = int((judged >= measure.level).sum())
    needed = [max(math.floor(recall * relevant + 0.5), 1) for recall in recalls]
    return float(np.mean([best[count - 1] if count <= len(hits) else 0.0 for count in needed]))


def _utility(grades: Array, judged: Array, measure: TrecMeasure) -> float:
    """Compute the utility of a ranking as a weighted sum of counts.

    The counts are: relevant documents retrieved, other documents retrieved, relevant documents missed. The
    weights are the parameters of the measure, 1, -1 and 0 by default.
    """
    hits = int((grades >= measure.level).sum())
    weights = _numbers(measure.parameters) or [1.0, -1.0, 0.0]
    counts = [hits, len(grades) - hits, int((judged >= measure.level).sum()) - hits]
    return math.fsum(weight * count for weight, count in zip(weights, counts, strict=False))


def _ndcg(grades: Array, judged: Array, measure: TrecMeasure) -> float:
    """Compute nDCG with the gains that the parameters assign to grades; other grades are their own gain."""
    pairs = (pair.split("=") for pair in measure.parameters.split(","))
    gains = {int(grade): float(gain) for grade, gain in pairs}

    def gain(levels: Array) -> Array:
        return np.array([gains.get(grade, max(grade, 0)) for grade in levels.tolist()], dtype=np.float64)

    def dcg(row: Array) -> float:
        return float((row / np.log2(np.arange(len(row)) + 2)).sum())

    best = dcg(np.maximum(np.sort(gain(judged))[::-1], 0))
    return dcg(gain(grades)) / best if best else 0.0


def _rbp(grades: Array, judged: Array, measure: TrecMeasure) -> float:
    """Compute rank-biased precision; grades are divided by the highest grade of the query."""
    p = _persistence(measure)
    gains = np.maximum(grades, 0) / max(judged.max(initial=1), 1)
    return (1 - p) * float((gains * p ** np.arange(len(gains))).sum())


def _rbp_residual(grades: Array, judged: Array, measure: TrecMeasure) -> float:
    """Compute how much rbp could grow by unjudged documents, in the ranking and after its end."""
    p, unjudged = _persistence(measure), grades < 0
    if not unjudged.any():
        return 0.0
    return p ** len(grades) + (1 - p) * float((unjudged * p ** np.arange(len(grades))).sum())


def _unjudged(grades: Array, judged: Array, measure: TrecMeasure) -> float:
    cutoff = int(measure.parameters)
    return int((grades[:cutoff] < 0).sum()) / cutoff


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


def _persistence(measure: TrecMeasure) -> float:
    return float(measure.parameters.removeprefix("p=") or 0.9)


_DEFINITIONS: dict[str, Callable[[Array, Array, TrecMeasure], float]] = {
    "iprec_at_recall": _interpolated,
    "11pt_avg": _interpolated,
    "utility": _utility,
    "ndcg": _ndcg,
    "rbp": _rbp,
    "rbp_resid": _rbp_residual,
    "unj": _unjudged,
}
"""Source: trec_eval 10, https://github.com/usnistgov/trec_eval; rbp: Moffat and Zobel 2008."""
