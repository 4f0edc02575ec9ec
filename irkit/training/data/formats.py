"""Formats of training files: how a row of each becomes a record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from irkit.data.files import parse_json, read_lines
from irkit.errors import BadTypeError, BadValueError
from irkit.training.data.record import Record

__all__ = ["read_records"]


def read_records(path: str | Path) -> Iterator[Record]:
    """Read a training file record by record."""
    for number, line in read_lines(str(path)):
        where = f"{path}:{number}"
        try:
            yield _irkit(parse_json(line, where))
        except (BadValueError, BadTypeError) as error:
            raise BadValueError(f"{where}: {error}") from error


def _irkit(row: dict[str, Any]) -> Record:
    scores, documents = row.get("scores"), row.get("documents")
    return Record(
        row.get("query_id") or "",
        row.get("query"),
        tuple(row.get("document_ids") or ()),
        None if documents is None else tuple(documents),
        None if scores is None else tuple(scores),
        row.get("positives", 1),
    )
