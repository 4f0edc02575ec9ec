"""Read relevance judgments from TREC and BEIR files."""

from __future__ import annotations

from collections.abc import Iterable

from irkit.arguments import brief
from irkit.data.collection_files import decode, read_lines
from irkit.data.document import Qrels
from irkit.errors import BadValueError

Judgment = tuple[int, str, str, str | int]
"""Line number, query id, document id and grade."""

_HEADERS = (b"query-id", b"query_id", b"qid")


def read_qrels_file(path: str) -> Qrels:
    """Read TREC's four columns (query, iteration, document, grade) or BEIR's three (query, document, grade).

    A header line of BEIR is skipped. Columns are separated by tabs or spaces.

    Raises:
        StorageError: The file cannot be read.
        BadValueError: A line is malformed; the message names file and line.
    """
    return collect_qrels(path, _judgments(path))


def collect_qrels(name: str, judgments: Iterable[Judgment]) -> Qrels:
    """Collect judgments by query.

    Raises:
        BadValueError: A grade is not an integer, or a document has two grades for a query.
    """
    qrels: Qrels = {}
    for number, query_id, doc_id, grade in judgments:
        try:
            value = int(grade)
        except ValueError as error:
            raise BadValueError(f"{name}:{number}: expected an integer grade, got {brief(grade)}") from error
        if qrels.setdefault(query_id, {}).setdefault(doc_id, value) != value:
            raise BadValueError(
                f"{name}:{number}: document {doc_id!r} of query {query_id!r} was judged "
                f"{qrels[query_id][doc_id]} before and is {value} here; keep one of the lines"
            )
    return qrels


def _judgments(path: str) -> Iterable[Judgment]:
    width = None
    for number, line in read_lines(path):
        columns = line.split(b"\t") if line.count(b"\t") == 2 else line.split()
        header = width is None and columns[0].lower() in _HEADERS
        width = width or len(columns)
        if len(columns) != width or width not in (3, 4):
            raise BadValueError(
                f"{path}:{number}: expected 4 columns (query 0 document grade) or 3 (query document grade), "
                f"the same on every line; got {len(columns)}: {line[:60].decode(errors='replace')!r}"
            )
        if not header:
            texts = [decode(column, f"{path}:{number}") for column in columns]
            yield number, texts[0], texts[-2], texts[-1]
