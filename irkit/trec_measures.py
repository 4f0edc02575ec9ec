"""The measures of trec_eval 10 under its own names: through pytrec_eval, by definition where that differs.

pytrec_eval holds trec_eval 9. Version 10 rounds where 9 truncates (`iprec_at_recall`, `11pt_avg`), has `rbp`,
`rbp_resid` and `unj`, and compares scores in double precision.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from irkit.arguments import check_utf8, is_count, shown
from irkit.data import Qrels
from irkit.errors import BadTypeError, BadValueError
from irkit.run import Run

__all__ = [
    "TrecMeasure",
    "aggregate",
    "check_ids",
    "for_library",
    "parse_trec_measure",
    "relevance_strings",
    "score_trec",
]

_HIGHEST = 1_000_000  # grade

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_PLAIN = re.compile(
    r"num_(?:q|ret|rel|rel_ret|nonrel_judged_ret)|(?:gm_)?(?:map|bpref)|Rprec|recip_rank|infAP|11pt_avg|utility|"
    r"ndcg(?:_rel)?|Rndcg|G|binG|set_(?:P|recall|relative_P|map|F)|rbp(?:_resid)?"
)
_RECALL, _NUMBER = r"(?:0?\.\d+|[01](?:\.0+)?)", r"-?(?:\d+\.?\d*|\.\d+)"
_PARAMETERS = {  # family -> what may follow it, an example
    **dict.fromkeys(
        ("P", "recall", "map_cut", "ndcg_cut", "relative_P", "success", "unj"), (r"[1-9]\d{0,8}", "10")
    ),
    "Rprec_mult": (r"(?=.*[1-9])\d{1,6}(?:\.\d{1,2})?", "0.20"),
    "iprec_at_recall": (_RECALL, "0.10"),
    "11pt_avg": (rf"{_RECALL}(?:,{_RECALL})*", "0.2,0.5,0.8"),
    "utility": (rf"(?:{_NUMBER},){{3}}0(?:\.0*)?", "1,-1,0,0"),
    "ndcg": (rf"\d{{1,9}}={_NUMBER}(?:,\d{{1,9}}={_NUMBER})*", "1=3,2=9"),
    "rbp": (r"p=0?\.\d+", "p=0.8"),
    "rbp_resid": (r"p=0?\.\d+", "p=0.8"),
}


class TrecMeasure(NamedTuple):
    """A measure of trec_eval: its name, what follows the name, and the least grade that is relevant."""

    family: str
    parameters: str
    level: int


def parse_trec_measure(name: str) -> TrecMeasure | None:
    """Take the name of a measure apart; None if it is none of trec_eval's.

    Args:
        name: As trec_eval prints it, such as ``map``, ``P_10``, ``utility_2,-1,0,0``, or takes it, ``P.10``;
            ``(rel=2)`` behind it is its ``-l2``.

    Raises:
        BadValueError: What follows the name is not for this measure.
    """
    head, level = re.fullmatch(r"(.*?)(?:\(rel=([1-9]\d{0,8})\))?", name, re.DOTALL).groups("1")  # type: ignore[union-attr]
    if _PLAIN.fullmatch(head):
        return TrecMeasure(head, "", int(level))
    families = [each for each in _PARAMETERS if head == each or head.startswith((f"{each}_", f"{each}."))]
    if not families:
        return None
    family = max(families, key=len)
    parameters = head[len(family) + 1 :]
    shape, example = _PARAMETERS[family]
    if not re.fullmatch(shape, parameters):
        raise BadValueError(f"measure {name!r}: expected {family}_{example} or the like")
    return TrecMeasure(family, parameters, int(level))


def score_trec(
    measures: Collection[TrecMeasure], qrels: Qrels, run: Run
) -> dict[TrecMeasure, dict[str, float]]:
    """Score every query of the judgments; one that the run lacks has an empty ranking, as under ``-c``.

    Returns:
        Measure -> query -> value, the queries in the order of ``qrels``; of ``gm_map`` and ``gm_bpref``,
        logarithms.
    """
    import pytrec_eval

    found: dict[TrecMeasure, dict[str, float]] = {measure: {} for measure in measures}
    if not measures:
        return found
    first = max(qrels) + "+"  # is no query. trec_eval crashes where the first ranking that it sees is empty
    judgments = for_library(qrels) | {first: {"": 0}}
    rankings = {query: _rank(run[query]) if query in run else [] for query in qrels}
    for query, docs in rankings.items():
        check_ids(query, docs)
    # places instead of scores: pytrec_eval holds single precision, in which close scores would be equal
    scores = {first: {"": 0}}
    scores |= {query: {doc: -place for place, doc in enumerate(docs)} for query, docs in rankings.items()}
    own = {measure for measure in measures if measure.family in _DEFINITIONS and measure[:2] != ("ndcg", "")}
    for level in {measure.level for measure in measures}:
        names = {_library_name(measure): measure for measure in measures if measure.level == level}
        asked = [name for name, measure in names.items() if measure not in own]
        values = pytrec_eval.RelevanceEvaluator(judgments, asked, relevance_level=level).evaluate(scores)
        for query in qrels:
            for name in asked if query in values else ():
                found[names[name]][query] = values[query][name]
    for query, docs in rankings.items():
        grades, judged = _grades(docs, qrels[query]), np.array(list(qrels[query].values()), dtype=np.int64)
        for measure in own:
            found[measure][query] = float(_DEFINITIONS[measure.family](grades, judged, measure))
    return {measure: {query: row[query] for query in qrels if query in row} for measure, row in found.items()}


def for_library(qrels: Qrels) -> Qrels:
    """Add a document that is not relevant where all grades of a query are negative: pytrec_eval may hang.

    Raises:
        BadValueError: A grade is beyond a million: it keeps a counter for each, and wraps around at 2^31.
    """
    for query, row in qrels.items():
        check_ids(query, row)
        for doc, grade in row.items():
            if abs(grade) > _HIGHEST:
                raise BadValueError(
                    f"evaluate: document {doc!r} of query {query!r} has the grade {shown(grade)}; expected "
                    f"-{_HIGHEST:,} to {_HIGHEST:,}"
                )
    return {
        query: {**row, "": 0} if row and max(row.values()) < 0 else row  # no run has an empty id
        for query, row in qrels.items()
    }


def check_ids(query: str, docs: Iterable[str]) -> None:
    """Refuse ids that trec_eval, which is written in C, would take for others, or abort at.

    Raises:
        BadValueError: One has a null character, which ends it there, or an unpaired surrogate.
    """
    words = (query, *docs)
    check_utf8(f"evaluate: query {query!a}", words)
    if "\0" in "".join(words):
        raise BadValueError(
            f"evaluate: query {query!r}: an id of it has a null character, which ends ids in trec_eval; "
            "expected others"
        )


def aggregate(name: str, values: Iterable[float]) -> float:
    """Combine the values of all queries: counts to a sum, ``gm_`` to a geometric mean, others to a mean."""
    row = list(values)
    if name.startswith(("num_", "prefs_num_")):
        return float(sum(row))
    mean = sum(row) / len(row) if row else 0.0
    return math.exp(mean) if name.startswith("gm_") else mean


def relevance_strings(run: Run, qrels: Qrels, depth: int = 10) -> dict[str, str]:
    """Show the grades of the first documents, one character each: trec_eval's ``relstring``.

    Returns:
        Query -> grades, ``>`` above 9, ``-`` without a judgment and ``.`` for a negative grade.

    Raises:
        BadValueError: ``depth`` is negative.

    Examples:
        >>> relevance_strings(Run.from_dict({"q": {"a": 3.0, "b": 2.0, "c": 1.0}}), {"q": {"a": 2, "c": 0}})
        {'q': '2-0'}
    """
    if not is_count(depth, 0):
        raise BadValueError(f"relevance_strings: expected a depth of at least 0, got {shown(depth)}")
    if not isinstance(run, Run):
        raise BadTypeError(f"relevance_strings: got {shown(run)}; expected a Run")
    if not isinstance(qrels, Mapping) or not all(isinstance(row, Mapping) for row in qrels.values()):
        raise BadTypeError(
            f"relevance_strings: qrels are {shown(qrels)}; expected grades by query and document"
        )
    found = {}
    for query, row in qrels.items():
        docs = _rank(run[query])[:depth] if query in run else []
        grades = [row.get(doc) for doc in docs]
        found[query] = "".join(
            "-" if grade is None else "." if grade < 0 else ">" if grade > 9 else str(grade)
            for grade in grades
        )
    return found


def _rank(results: Iterable[tuple[str, float]]) -> list[str]:
    """Order documents as trec_eval does: by descending score, equal ones by descending id."""
    return [doc for doc, _ in sorted(results, key=lambda item: (item[1], item[0]), reverse=True)]


def _library_name(measure: TrecMeasure) -> str:
    if measure.family == "Rprec_mult":
        return f"{measure.family}_{float(measure.parameters):.2f}"
    return f"{measure.family}_{measure.parameters}".removesuffix("_")


def _grades(docs: list[str], row: Mapping[str, int]) -> Array:
    """Grades by rank, -1 without a judgment; a negative grade is none either."""
    return np.array([row.get(doc, -1) for doc in docs], dtype=np.int64)


def _interpolated(grades: Array, judged: Array, level: int, recalls: list[float]) -> list[float]:
    """Highest precision at each recall or beyond; recall * relevant is rounded to a number of documents."""
    hits = np.flatnonzero(grades >= level)
    precision = np.arange(1, len(hits) + 1) / (hits + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]  # at the n-th relevant document or any later
    needed = [max(math.floor(recall * int((judged >= level).sum()) + 0.5), 1) for recall in recalls]
    return [float(best[count - 1]) if count <= len(hits) else 0.0 for count in needed]


def _eleven_points(grades: Array, judged: Array, measure: TrecMeasure) -> float:
    recalls = _numbers(measure.parameters) or [tenth / 10 for tenth in range(11)]
    return float(np.mean(_interpolated(grades, judged, measure.level, recalls)))


def _utility(grades: Array, judged: Array, measure: TrecMeasure) -> float:
    """Weighted count: relevant found, others found, relevant missed."""
    found = int((grades >= measure.level).sum())
    weights = _numbers(measure.parameters) or [1.0, -1.0, 0.0]
    counts = [found, len(grades) - found, int((judged >= measure.level).sum()) - found]
    return math.fsum(weight * count for weight, count in zip(weights, counts, strict=False))


def _ndcg(grades: Array, judged: Array, measure: TrecMeasure) -> float:
    """The nDCG with the gains that the parameters give to grades; other grades are their own gain."""
    given = dict(pair.split("=") for pair in measure.parameters.split(","))
    gains = {int(grade): float(gain) for grade, gain in given.items()}

    def dcg(levels: Array) -> Array:
        return np.array([gains.get(grade, max(grade, 0)) for grade in levels.tolist()], dtype=np.float64)

    found, ideal = dcg(grades), np.maximum(np.sort(dcg(judged))[::-1], 0)
    best = float((ideal / np.log2(np.arange(len(ideal)) + 2)).sum())
    return float((found / np.log2(np.arange(len(found)) + 2)).sum()) / best if best else 0.0


def _rbp(grades: Array, judged: Array, measure: TrecMeasure) -> float:
    """Rank-biased precision; grades above 1 are divided by the highest of the query."""
    p = _persistence(measure)
    gains = np.maximum(grades, 0) / max(judged.max(initial=1), 1)
    return (1 - p) * float((gains * p ** np.arange(len(gains))).sum())


def _rbp_residual(grades: Array, judged: Array, measure: TrecMeasure) -> float:
    """What documents without judgment, in the ranking and behind it, could add."""
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
    "iprec_at_recall": lambda grades, judged, measure: _interpolated(
        grades, judged, measure.level, _numbers(measure.parameters)
    )[0],
    "11pt_avg": _eleven_points,
    "utility": _utility,
    "ndcg": _ndcg,
    "rbp": _rbp,
    "rbp_resid": _rbp_residual,
    "unj": _unjudged,
}
"""Source: trec_eval 10, https://github.com/usnistgov/trec_eval; rbp: Moffat and Zobel 2008."""
