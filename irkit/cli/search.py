"""``irkit search``: one question, a file of them, or a prompt."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irkit.bars import bar
from irkit.cli.filters import parse_filters
from irkit.cli.options import (
    Device,
    IgnoreIdenticalIds,
    IndexDir,
    Judgments,
    Measures,
    MovedModel,
    RunOut,
    Split,
)
from irkit.cli.output import note, show_hits
from irkit.cli.runs import check_out, read_judged, write_judged
from irkit.errors import BadValueError, StorageError

if TYPE_CHECKING:
    from irkit.data import Query
    from irkit.feedback import RM3
    from irkit.retriever import Retriever
    from irkit.run import Run

__all__ = ["search"]


def search(
    directory: IndexDir,
    queries: Annotated[
        str | None,
        typer.Argument(
            metavar="QUERIES",
            help="BEIR folder, .jsonl, .tsv, .txt, <top>, also .gz; - (standard input); none: a prompt.",
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(help="One query.")] = None,
    k: Annotated[
        int | None, typer.Option(min=1, help="Results of a query: 1000 in a run, 10 to be read.")
    ] = None,
    out: RunOut = None,
    qrels: Judgments = None,
    measures: Measures = "nDCG@10",
    split: Split = None,
    field: Annotated[
        str | None, typer.Option(help="Key of the text of QUERIES, such as desc of TREC topics.")
    ] = None,
    condition: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="CONDITION",
            help="On metadata: year>=2000, lang=de or JSON; may be repeated, and all must hold.",
        ),
    ] = None,
    ignore_identical_ids: IgnoreIdenticalIds = False,
    model: MovedModel = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Of BM25: k1 or b, as k1=1.2."),
    ] = None,
    rm3: Annotated[
        bool, typer.Option("--rm3", help="Of BM25: expand queries by terms of what they find first.")
    ] = False,
    device: Device = None,
) -> None:
    """Search an index.

    For one query (--text), for a file of queries or, without either, at a prompt. The queries of a file
    make a run, which is written to standard output unless --out or --qrels says otherwise.
    """
    wanted = parse_filters(condition or ())
    if queries is None and (out or qrels or split or field or ignore_identical_ids):
        raise BadValueError(
            "--out, --qrels, --split, --field and --ignore-identical-ids need QUERIES: a file or -"
        )
    if queries is not None and text is not None:
        raise BadValueError("got QUERIES and --text; give one of them")
    if override and model is not None:
        raise BadValueError("got --model and --set, which BM25 has; give one of them")
    check_out(out, qrels)
    from irkit.config import with_overrides
    from irkit.feedback import RM3
    from irkit.retriever import Retriever
    from irkit.run import is_jsonl

    chosen = with_overrides({}, override) if override else model
    feedback = RM3() if rm3 else None

    if queries is None:
        from irkit.data import Query

        with Retriever.load(directory, chosen, device=device) as retriever:
            if text is not None:
                Query("query", text)  # is checked
                hits = retriever.search(text, k or 10, wanted, feedback=feedback)
                show_hits(hits)
                if not hits:
                    _note_nothing(retriever, wanted)
            else:
                _answer(retriever, k or 10, wanted, feedback)
        return

    with _hinted(queries):
        items, judgments = read_judged(queries, qrels, split, measures, field)
    with Retriever.load(directory, chosen, device=device) as retriever:
        if (out or judgments is None) and not is_jsonl(out or "-"):
            _check_ids(retriever, items)
        search_all = partial(retriever.run, filter=wanted, feedback=feedback)
        run = _run(search_all, items, k or 1000, ignore_identical_ids)
        if items and next(iter(run), None) is None:
            _note_nothing(retriever, wanted)
    write_judged(run, out, judgments, measures)


@contextmanager
def _hinted(queries: str) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        if not str(error).startswith(f"reading {queries}: "):
            raise
        raise StorageError(f"{error}; one query is given as --text {queries!r}") from error


def _run(search_all: Callable[..., Run], queries: list[Query], k: int, drop_identical: bool) -> Run:
    with bar("searching", "queries", len(queries)) as update:
        run = search_all(queries, k + drop_identical, progress=update)
    return run.without_identical_ids().cut(k) if drop_identical else run


def _check_ids(retriever: Retriever, queries: list[Query]) -> None:
    """Refuse ids that a TREC run cannot hold now, rather than when it is written."""
    from irkit.run import check_trec_words

    check_trec_words(query.id for query in queries)
    rows = retriever.index.live.nonzero()[0]
    for start in range(0, len(rows), 1 << 16):
        check_trec_words(retriever.documents.ids(rows[start : start + (1 << 16)]))


def _note_nothing(retriever: Retriever, wanted: dict[str, Any] | None) -> None:
    reason = "no document meets --filter" if wanted else "no document has a word of the query"
    note("nothing found: " + (reason if len(retriever) else "the index has no documents"))


def _answer(retriever: Retriever, k: int, wanted: dict[str, Any] | None, feedback: RM3 | None) -> None:
    """Answer query after query from standard input."""
    # what is slow the first time is done before the first question
    retriever.search("", 1, wanted, feedback=feedback)
    asked = _prompted(len(retriever)) if sys.stdin.isatty() else _piped()
    for query in asked:
        start = time.perf_counter()
        hits = retriever.search(query, k, wanted, feedback=feedback)
        milliseconds = 1000 * (time.perf_counter() - start)
        show_hits(hits)
        typer.echo()
        if sys.stdin.isatty():
            note(f"{len(hits)} of {len(retriever):,} documents in {milliseconds:.0f} ms")


def _prompted(documents: int) -> Iterator[str]:
    import readline  # noqa: F401 (line editing and history for input())

    note(f"{documents:,} documents. Ask; an empty line or Ctrl-D ends.")
    try:
        while line := input("query> ").strip():
            yield line
    except EOFError:
        typer.echo()


def _piped() -> Iterable[str]:
    from irkit.data.files import decode, read_lines

    return (decode(line, f"standard input:{number}") for number, line in read_lines("-"))
