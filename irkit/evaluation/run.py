"""The `Run`: ranked documents of many queries, read and written as TREC file, JSON lines or dictionary."""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from irkit.arguments import brief, check_counts, check_utf8
from irkit.data.collection_files import decode, parse_json, read_lines, source_name
from irkit.errors import BadKeyError, BadTypeError, BadValueError
from irkit.utils.atomic import replacing
from irkit.utils.uris import without_query

Ranking: TypeAlias = tuple[str, Sequence[str], "Sequence[float] | np.ndarray[Any, Any]"]
"""A query id, document ids and their scores."""

_SPACE = re.compile(r"[ \t\n\r\v\f]")  # separates the columns of a TREC file; other spaces of Unicode do not


class ScoredDoc(NamedTuple):
    """A result of a query, in the form that ir_measures reads."""

    query_id: str
    doc_id: str
    score: float


class Run:
    """Documents of every query by descending score; ties keep their order.

    Iterating yields a `ScoredDoc` per result, ``len`` is the number of queries, and ``run[query_id]`` is the
    ranking of a query.

    Args:
        rankings: For each query its id, document ids and scores (finite, higher is better).

    Raises:
        BadValueError: A query appears twice, or a document appears twice for one query; a score is not a
            finite number; an id is empty.
        BadTypeError: An id is not a string.

    Examples:
        >>> run = Run.from_dict({"q1": {"d1": 0.5, "d2": 2.0}})
        >>> run["q1"]
        [('d2', 2.0), ('d1', 0.5)]
    """

    def __init__(self, rankings: Iterable[Ranking] = ()) -> None:
        self._results: dict[str, tuple[list[str], np.ndarray[Any, np.dtype[np.float64]]]] = {}
        if not isinstance(rankings, Iterable):
            raise BadTypeError(f"Run: got {brief(rankings)}, expected rankings")
        for ranking in rankings:
            if not isinstance(ranking, Sequence) or len(ranking) != 3:
                raise BadTypeError(f"Run: got {brief(ranking)}, expected query id, document ids and scores")
            query_id, doc_ids, scores = ranking
            values = _check(query_id, doc_ids, scores)
            if query_id in self._results:
                raise BadValueError(f"Run: query {query_id!r} appears twice; expected one ranking per query")
            order = np.argsort(-values, kind="stable")
            self._results[query_id] = [doc_ids[i] for i in order.tolist()], values[order]

    @classmethod
    def from_dict(cls, results: Mapping[str, Mapping[str, float]]) -> Run:
        """Make a run of query id -> document id -> score, the form of pytrec_eval, ranx and BEIR."""
        for value in [results, *results.values()] if isinstance(results, Mapping) else [results]:
            if not isinstance(value, Mapping):
                raise BadTypeError(
                    f"Run.from_dict: got {brief(value)}, expected {{query id: {{document id: score}}}}"
                )
        return cls((query_id, list(row), list(row.values())) for query_id, row in results.items())

    @classmethod
    def read(cls, path: str | Path) -> Run:
        """Read a TREC run, or JSON lines if the name ends in ``.jsonl``; both also with ``.gz``.

        Documents are ranked by score, whatever the order of the lines. The second column, the rank and the
        tag are ignored.

        Raises:
            StorageError: The file cannot be read.
            BadValueError: A line is malformed, a score is not a finite number, or a document appears twice
                for a query; the message names file and line.
        """
        name = source_name(path)
        parse = _parse_json if is_jsonl(name) else _parse_trec
        interned: dict[str, str] = {}  # one object per distinct document id
        results: dict[str, dict[str, float]] = {}
        for number, line in read_lines(name):
            where = f"{name}:{number}"
            query_id, doc_id, score = parse(line, where)
            try:
                value = float(score)
            except (TypeError, ValueError, OverflowError):
                value = math.nan
            if not math.isfinite(value):
                raise BadValueError(f"{where}: expected a finite number as score, got {score!r}")
            row = results.setdefault(query_id, {})
            if doc_id in row:
                raise BadValueError(
                    f"{where}: document {doc_id!r} of query {query_id!r} appeared before; "
                    "a run ranks a document once"
                )
            row[interned.setdefault(doc_id, doc_id)] = value
        return cls.from_dict(results)

    def write(self, path: str | Path, tag: str = "irkit") -> None:
        """Write a TREC run, or JSON lines if the name ends in ``.jsonl``; both also with ``.gz``.

        The file appears whole or not at all. Scores read back exactly. Queries without results are not
        written.

        Args:
            path: A file, or ``"-"`` for standard output (TREC).
            tag: Name of the system, the last column of the TREC format.

        Raises:
            StorageError: The file cannot be written.
            BadValueError: An id or the tag has a space, which the TREC format cannot hold.
        """
        name = source_name(path)
        lines = self._json_lines() if is_jsonl(name) else self._trec_lines(tag)
        if name == "-":
            sys.stdout.writelines(lines)
            return
        with replacing(name) as aside, aside.open("wb") as raw:
            packed = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if name.endswith(".gz") else None
            with packed or nullcontext(raw) as stream:
                stream.writelines(line.encode() for line in lines)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Return query id -> document id -> score, best first."""
        return {query_id: dict(self[query_id]) for query_id in self._results}

    def cut(self, k: int) -> Run:
        """Return a run with the best ``k`` results of every query."""
        check_counts("Run.cut", k=k)
        return Run.from_dict({query_id: dict(self[query_id][:k]) for query_id in self._results})

    def without_identical_ids(self) -> Run:
        """Return a run without the documents that have the id of their query, the convention of BEIR.

        In ArguAna and Quora the queries are documents of the corpus, and each would retrieve itself first.

        Source: ``ignore_identical_ids`` of https://github.com/beir-cellar/beir.
        """
        return Run.from_dict(
            {query: {doc: score for doc, score in self[query] if doc != query} for query in self._results}
        )

    @property
    def query_ids(self) -> list[str]:
        """The ids of the queries, in their order."""
        return list(self._results)

    def columns(self, query_id: str) -> tuple[list[str], np.ndarray[Any, np.dtype[np.float64]]]:
        """Return document ids and scores of a query, best first; the scores are read-only.

        Raises:
            BadKeyError: The run has no such query.
        """
        try:
            ids, scores = self._results[query_id]
        except (KeyError, TypeError, RecursionError):
            raise BadKeyError(
                f"Run: it has no query {brief(query_id)}, but {len(self)} others; `in` says whether it has"
            ) from None
        return ids.copy(), scores

    def __getitem__(self, query_id: str) -> list[tuple[str, float]]:
        ids, scores = self.columns(query_id)
        return list(zip(ids, scores.tolist(), strict=True))

    def __contains__(self, query_id: object) -> bool:
        return isinstance(query_id, str) and query_id in self._results

    def __len__(self) -> int:
        return len(self._results)

    def __iter__(self) -> Iterator[ScoredDoc]:
        for query_id in self._results:
            for doc_id, score in self[query_id]:
                yield ScoredDoc(query_id, doc_id, score)

    def __repr__(self) -> str:
        return f"Run({len(self)} queries, {sum(len(ids) for ids, _ in self._results.values())} results)"

    def _json_lines(self) -> Iterator[str]:
        for result in self:
            yield json.dumps(result._asdict(), ensure_ascii=False) + "\n"

    def _trec_lines(self, tag: str) -> Iterator[str]:
        check_trec_words((tag, *self._results, *(result.doc_id for result in self)))
        for query_id in self._results:
            for rank, (doc_id, score) in enumerate(self[query_id], 1):
                yield f"{query_id} Q0 {doc_id} {rank} {score!r} {tag}\n"


def _check(query_id: str, doc_ids: Sequence[str], scores: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Check the results of one query; return its scores as float64, which holds float32 exactly."""
    # ids
    if isinstance(doc_ids, str | bytes) or not isinstance(doc_ids, Sequence):
        raise BadTypeError(f"Run: document ids are {brief(doc_ids)}; expected a list of strings")
    for word in (query_id, *doc_ids):
        if not isinstance(word, str):
            raise BadTypeError(
                f"Run: expected ids that are strings, got {brief(word)} ({type(word).__name__})"
            )
    if not query_id or "" in doc_ids:
        raise BadValueError(f"Run: query {query_id!r} has an empty id")
    check_utf8(f"Run: query {query_id!a}", (query_id, *doc_ids))
    # scores
    try:
        array = np.asarray(scores)
        if array.dtype.kind in "SU":  # numpy would convert "5"
            raise TypeError(f"they are {array.dtype}")
        values = array.astype(np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadValueError(f"Run: query {query_id!r}: scores are not numbers ({error})") from error
    if values.shape != (len(doc_ids),):
        raise BadValueError(
            f"Run: query {query_id!r} has {len(doc_ids)} documents and scores of shape {values.shape}; "
            "expected one score for each"
        )
    if not np.isfinite(values).all():
        worst = int(np.isfinite(values).argmin())
        raise BadValueError(
            f"Run: query {query_id!r}, document {doc_ids[worst]!r}: expected a finite score, "
            f"got {values[worst]}"
        )
    if len(set(doc_ids)) < len(doc_ids):
        twice = next(doc_id for i, doc_id in enumerate(doc_ids) if doc_id in doc_ids[:i])
        raise BadValueError(f"Run: query {query_id!r} ranks document {twice!r} twice")
    return values


def check_trec_words(words: Iterable[str]) -> None:
    """Check that a column of a TREC run can hold each id or tag.

    Raises:
        BadValueError: A word is empty or has a space.
    """
    for word in words:
        if not isinstance(word, str) or not word or _SPACE.search(word):
            spaced = isinstance(word, str) and word
            problem = "has a space, which separates columns there; write .jsonl" if spaced else "is no word"
            raise BadValueError(f"writing a TREC run: {brief(word)} {problem}")


def is_jsonl(name: str) -> bool:
    """Return True if a run of that file name is JSON lines."""
    return without_query(name).removesuffix(".gz").endswith(".jsonl")


def _parse_trec(line: bytes, where: str) -> tuple[str, str, Any]:
    # columns between 5 tabs may have spaces; else, like trec_eval, ignore words after the tag
    columns = line.split(b"\t") if line.count(b"\t") == 5 else line.split(None, 5)
    if len(columns) < 6:
        raise BadValueError(
            f"{where}: expected the 6 columns of a TREC run (query Q0 document rank score tag), "
            f"got {len(columns)}: {_line_start(line)}"
        )
    return decode(columns[0], where), decode(columns[2], where), decode(columns[4], where)


def _line_start(line: bytes) -> str:
    return repr(line[:80].decode(errors="replace"))


def _parse_json(line: bytes, where: str) -> tuple[str, str, Any]:
    record = parse_json(line, where)
    query_id, doc_id, score = (record.get(name) for name in ScoredDoc._fields)
    if not (isinstance(query_id, str) and query_id and isinstance(doc_id, str) and doc_id):
        raise BadValueError(
            f'{where}: expected {{"query_id": "q1", "doc_id": "d1", "score": 1.5}}, got {_line_start(line)}'
        )
    return query_id, doc_id, score
