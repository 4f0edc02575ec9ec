"""Steps that verbs with runs share: read queries and judgments, write a run and its measures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from irkit.cli.output import note, show_table
from irkit.errors import BadValueError, StorageError

if TYPE_CHECKING:
    from irkit.data import Qrels, Query
    from irkit.evaluation.run import Run


def check_out(out: str | None, qrels: str | None) -> None:
    """Refuse an ``--out`` that cannot be written, before the work.

    Raises:
        StorageError: Its directory does not exist or is not writable, or it is a directory itself.
        BadValueError: The run and the measures would both go to standard output.
    """
    if out == "-" and qrels is not None:
        raise BadValueError("--out - and --qrels would both write to standard output; give --out FILE")
    if out is None or out == "-":
        return
    folder = Path(out).resolve().parent
    if not folder.is_dir():
        raise StorageError(f"--out {out}: there is no such directory")
    if Path(out).is_dir():
        raise StorageError(f"--out {out}: it is a directory; name a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"--out {out}: its directory is not writable")


def read_judged(
    queries: str, qrels: str | None, split: str | None, measures: str, field: str | None = None
) -> tuple[list[Query], Qrels | None]:
    """Read queries, and their judgments if ``qrels`` names any.

    Raises:
        BadValueError: There is a split, but no folder with splits; or a measure is unknown.
    """
    from irkit.data import read_qrels, read_queries
    from irkit.data.remote import PREFIXES

    folders = [name for name in (queries, qrels) if name is not None and Path(name).is_dir()]
    if split is not None and not folders:
        if not queries.startswith(PREFIXES):
            read_queries(queries)  # raises if there is no such file
        raise BadValueError(f"--split {split}: neither QUERIES nor --qrels is a BEIR folder")
    items = list(read_queries(queries, split if queries in folders else None, field))
    if not items:
        note(f"warning: {queries} holds no queries")
    if qrels is None:
        return items, None
    from irkit.evaluation.measures import evaluate

    evaluate({"q": {"d": 1.0}}, {"q": {"d": 1}}, measures)  # a misspelt measure is an error before the work
    return items, read_qrels(qrels, split if qrels in folders else None)


def write_judged(run: Run, out: str | None, judgments: Qrels | None, measures: str) -> None:
    """Write a run to ``out``, and print its measures; without either, write it to standard output."""
    if out is not None or judgments is None:
        run.write(out or "-")
    if judgments is not None:
        from irkit.evaluation.measures import evaluate

        show_table(["measure", "value"], evaluate(run, judgments, measures).mean.items())
