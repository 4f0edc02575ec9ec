"""Preferences of several judges for some documents over others, and trec_eval's measures of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from irkit.arguments import shown
from irkit.data.files import decode, name_of, read_lines
from irkit.errors import BadTypeError, BadValueError
from irkit.evaluation import Evaluation, as_run, choose_queries
from irkit.run import Run
from irkit.trec_measures import TrecMeasure, aggregate, parse_trec_measure, score_trec

__all__ = ["Preferences", "evaluate_preferences", "read_preferences"]

Preferences: TypeAlias = Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]
"""Query id -> judge -> part -> document id -> grade; a judge prefers the higher grade within a part."""

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_RETRIEVED, _IMPLIED, _ALL = range(3)
_SCOPES = {"_ret": _RETRIEVED, "_imp": _IMPLIED, "": _ALL}
"""What pairs count: both documents retrieved; one of them at least; every pair."""


class _Judge(NamedTuple):
    prefers: Array  # (documents, documents) bool: the first over the second
    grades: Array  # (documents,), nan where the judge gave none
    whole: bool  # one part: any two grades compare
    fulfilled: list[int]  # by scope
    possible: list[int]


def read_preferences(path: str | Path) -> Preferences:
    """Read trec_eval's preferences: query, judge, part, document and grade, or the same without part.

    Without part, these are TREC judgments whose second column names the judge. Parts of one judge may share
    documents; preferences carry on through those. Grade 0 says not relevant.

    Returns:
        Query -> judge -> part -> document -> grade.

    Raises:
        StorageError: The file cannot be read.
        BadValueError: A line is malformed, or a document has two grades in one part.
    """
    preferences: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for number, line in read_lines(name_of(path)):
        columns = decode(line, f"{path}:{number}").split()
        try:
            grade = float(columns[-1])
        except ValueError:
            grade = math.nan
        if len(columns) not in (4, 5) or not math.isfinite(grade):
            raise BadValueError(
                f"{path}:{number}: expected query, judge, part, document and a number, or the same without "
                f"part; got {line[:60]!r}"
            )
        query, judge, part, doc = columns[0], columns[1], "".join(columns[2:-2]), columns[-2]
        row = preferences.setdefault(query, {}).setdefault(judge, {}).setdefault(part, {})
        if row.setdefault(doc, grade) != grade:
            raise BadValueError(
                f"{path}:{number}: judge {judge!r} gave document {doc!r} of query {query!r} {row[doc]:g} "
                f"before and {grade:g} here; keep one of the lines"
            )
    return preferences


def evaluate_preferences(
    run: Run | Mapping[str, Mapping[str, float]] | str | Path,
    preferences: Preferences | str | Path,
    measures: str | Iterable[str] = ("prefs_avgjg",),
    *,
    missing: Literal["zero", "skip"] = "zero",
) -> Evaluation:
    """Score a run against preferences.

    Args:
        run: A run, a dictionary or a file.
        preferences: As `read_preferences` gives them, or its file.
        measures: ``prefs_simp``, ``prefs_pair``, ``prefs_avgjg`` (each also with ``_ret`` and ``_imp``),
            ``prefs_avgjg_Rnonrel`` (also ``_ret``), ``prefs_num_prefs_poss``, ``prefs_num_prefs_ful`` (also
            ``_ret``), ``num_q``; and as means over the judges ``map_avgjg``, ``P_avgjg_10`` and
            ``Rprec_mult_avgjg_0.20``.
        missing: As in `irkit.evaluation.evaluate`.

    Raises:
        BadTypeError: Preferences or measures are something else.
        BadValueError: A measure is unknown, a judge contradicts themself, or run and preferences share no
            query.
        StorageError: A file cannot be read.

    Examples:
        >>> preferences = {"q": {"ann": {"": {"a": 2, "b": 1, "c": 0}}}}
        >>> evaluate_preferences({"q": {"b": 2.0, "a": 1.0}}, preferences).mean
        {'prefs_avgjg': 0.6666666666666666}

    Source: trec_eval 10, https://github.com/usnistgov/trec_eval.
    """
    run = as_run(run)
    given = read_preferences(preferences) if isinstance(preferences, str | Path) else preferences
    _check_preferences(given)
    chosen = choose_queries(given, run, missing)
    if isinstance(measures, bytes) or not isinstance(measures, Iterable):
        raise BadTypeError(f"evaluate_preferences: measures are {shown(measures)}; expected names")
    names = measures.replace(",", " ").split() if isinstance(measures, str) else list(measures)
    for name in names:
        if not isinstance(name, str):
            raise BadTypeError(f"evaluate_preferences: measure {shown(name)}; expected a name")
    if not names:
        raise BadValueError("evaluate_preferences: got no measures, expected some such as prefs_avgjg")
    values: dict[str, dict[str, float]] = {}
    for name in names:
        if name not in _MEASURES:
            values[name] = _mean_over_judges(_plain(name), chosen, run)
    if len(values) < len(names):
        results = run.to_dict()
        for query, judges in chosen.items():
            views, retrieved = _judges(query, judges, results.get(query, {}))
            for name in _MEASURES.keys() & set(names):
                values.setdefault(name, {})[query] = float(_MEASURES[name](views, retrieved))
    return Evaluation(
        {name: aggregate(name, values[name].values()) for name in names}, {n: values[n] for n in names}
    )


def _check_preferences(given: Preferences) -> None:
    """Refuse what is not query -> judge -> part -> document -> grade."""
    level: list[tuple[str, Any]] = [("", given)]
    for what in ("judges by query", "parts by judge", "grades by part", "grades by document"):
        for key, value in level:
            if not isinstance(value, Mapping) or (key and not value):
                raise BadTypeError(f"evaluate_preferences: {key!r} has {shown(value)}; expected {what}")
        level = [pair for _, value in level for pair in value.items()]
        for key, _ in level:
            if not isinstance(key, str):
                raise BadTypeError(f"evaluate_preferences: got {shown(key)}; expected ids that are strings")
    for doc, grade in level:
        if not isinstance(grade, int | float) or not abs(grade) <= 1e15:
            raise BadTypeError(f"evaluate_preferences: grade {shown(grade)} of {doc!r}; expected a number")


def _plain(name: str) -> TrecMeasure:
    """The measure that ``name`` is the mean over the judges of."""
    measure = parse_trec_measure(name.replace("_avgjg", "", 1)) if "_avgjg" in name else None
    if measure is None or measure.family not in ("map", "P", "Rprec_mult"):
        raise BadValueError(
            f"measure {name!r}: expected one of {', '.join(_MEASURES)}, map_avgjg, P_avgjg_10 or "
            "Rprec_mult_avgjg_0.20"
        )
    return measure


def _mean_over_judges(measure: TrecMeasure, preferences: Preferences, run: Run) -> dict[str, float]:
    found: dict[str, list[float]] = {query: [] for query in preferences}
    for judge in dict.fromkeys(judge for judges in preferences.values() for judge in judges):
        qrels = {
            query: {doc: math.floor(grade) for part in judges[judge].values() for doc, grade in part.items()}
            for query, judges in preferences.items()
            if judge in judges
        }
        for query, value in score_trec([measure], qrels, run)[measure].items():
            found[query].append(value)
    return {query: sum(row) / max(len(row), 1) for query, row in found.items()}


def _judges(
    query: str, judges: Mapping[str, Mapping[str, Mapping[str, float]]], results: Mapping[str, float]
) -> tuple[list[_Judge], int]:
    """What each judge prefers among the documents that any judged, and how many were retrieved.

    The retrieved come first, by descending score; here trec_eval orders equal scores by ascending id.
    """
    judged = {doc for parts in judges.values() for part in parts.values() for doc in part}
    ranked = sorted(results.items(), key=lambda item: (-item[1], item[0]))
    found = [doc for doc, _ in ranked if doc in judged]
    places = {doc: place for place, doc in enumerate([*found, *sorted(judged.difference(found))])}
    views = []
    for judge, parts in judges.items():
        prefers = np.zeros((len(places), len(places)), dtype=bool)
        grades = np.full(len(places), np.nan)
        for part in parts.values():
            at, given = np.array([places[doc] for doc in part], dtype=np.intp), np.array([*part.values()])
            clash = ((grades[at] > 0) != (given > 0)) & ~np.isnan(grades[at])
            prefers[np.ix_(at, at)] |= given[:, None] > given[None, :]
            grades[at] = given
            if clash.any():
                raise BadValueError(
                    f"query {query!r}: judge {judge!r} calls a document relevant and not relevant"
                )
        if len(parts) > 1:
            prefers = _closure(prefers)
        if prefers.diagonal().any():
            raise BadValueError(f"query {query!r}: judge {judge!r} prefers two documents to each other")
        views.append(_Judge(prefers, grades, len(parts) == 1, *_count(prefers, len(found))))
    return views, len(found)


def _closure(prefers: Array) -> Array:
    """Add the preferences that follow from others."""
    before = -1
    while before != (before := int(prefers.sum())):
        prefers = prefers | (prefers.astype(np.float32) @ prefers.astype(np.float32) > 0)
    return prefers


def _count(prefers: Array, retrieved: int) -> tuple[list[int], list[int]]:
    """Fulfilled and possible preferences by scope, of the pairs whose first ``retrieved`` were retrieved."""
    both, implied = prefers[:retrieved, :retrieved], int(prefers[:retrieved, retrieved:].sum())
    fulfilled, possible = int(np.triu(both).sum()), int(both.sum())
    either = possible + implied + int(prefers[retrieved:, :retrieved].sum())
    return [fulfilled, fulfilled + implied, fulfilled + implied], [possible, either, int(prefers.sum())]


def _simple(judges: list[_Judge], _: int, scope: int) -> float:
    return _ratio(sum(j.fulfilled[scope] for j in judges), sum(j.possible[scope] for j in judges))


def _mean(judges: list[_Judge], _: int, scope: int) -> float:
    return sum(_ratio(j.fulfilled[scope], j.possible[scope]) for j in judges) / len(judges)


def _pair(judges: list[_Judge], retrieved: int, scope: int) -> float:
    """Mean over pairs of documents of the part of the judges that the ranking satisfies."""
    counts = np.array([judge.prefers for judge in judges]).sum(0, dtype=np.int64)
    total = np.triu(counts + counts.T)  # rows: the document that the ranking puts first
    end = retrieved if scope == _RETRIEVED else len(counts)
    rows = retrieved if scope != _ALL else end
    first = slice(0, retrieved)
    pairs = total[first, :end] > 0
    shares = counts[first, :end][pairs] / total[first, :end][pairs]
    return _ratio(float(shares.sum()), int((total[:rows, :end] > 0).sum()))


def _balanced(judges: list[_Judge], retrieved: int, scope: int) -> float:
    """Mean over the judges, with as many documents that are not relevant as there are relevant ones."""
    return sum(_balance(judge, retrieved, scope) for judge in judges) / len(judges)


def _balance(judge: _Judge, retrieved: int, scope: int) -> float:
    """One judge's part of `_balanced`: spare documents drop out from the end, lacking ones count as last.

    Counts over documents that are not relevant, or not retrieved, follow trec_eval to the letter.
    """
    grades = judge.grades[:retrieved] if scope == _RETRIEVED else judge.grades
    others = [place for place, grade in enumerate(grades.tolist()) if grade <= 0]
    relevant, every = int((grades > 0).sum()), int((judge.grades > 0).sum())
    lacking = relevant - len(others)
    if lacking >= 0:
        hits = int((judge.grades[:retrieved] > 0).sum())
        return _ratio(judge.fulfilled[scope] + hits * lacking, judge.possible[scope] + every * lacking)
    limit = relevant if judge.whole else every
    kept = np.delete(np.arange(len(grades)), others[limit:])
    prefers = judge.prefers[np.ix_(kept, kept)]
    fulfilled, possible = (row[scope] for row in _count(prefers, int((kept < retrieved).sum())))
    if judge.whole:
        seen = sum(place < retrieved for place in others[:limit])
        fulfilled += sum(limit - 1 - place for place in range(seen))
        possible += len(others) * limit
    return _ratio(fulfilled, possible)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _total(judges: list[_Judge], _: int, field: str, scope: int) -> int:
    return sum(getattr(judge, field)[scope] for judge in judges)


_MEASURES: dict[str, Callable[[list[_Judge], int], float]] = {
    "num_q": lambda judges, retrieved: 1.0,
    "prefs_num_prefs_poss": partial(_total, field="possible", scope=_ALL),
    "prefs_num_prefs_ful": partial(_total, field="fulfilled", scope=_ALL),
    "prefs_num_prefs_ful_ret": partial(_total, field="fulfilled", scope=_RETRIEVED),
    **{f"prefs_simp{name}": partial(_simple, scope=scope) for name, scope in _SCOPES.items()},
    **{f"prefs_pair{name}": partial(_pair, scope=scope) for name, scope in _SCOPES.items()},
    **{f"prefs_avgjg{name}": partial(_mean, scope=scope) for name, scope in _SCOPES.items()},
    "prefs_avgjg_Rnonrel": partial(_balanced, scope=_ALL),
    "prefs_avgjg_Rnonrel_ret": partial(_balanced, scope=_RETRIEVED),
}
