"""``irkit search``: search for one query, for a file of queries, or at a prompt; and ``irkit explain``."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irkit.arguments import brief
from irkit.cli.options import Directory, Offset, OptionalCount, Settings, check_engine, drop_missing
from irkit.cli.output import DEFAULT_FIELDS, format_value, note, show_hits, show_table
from irkit.cli.runs import check_out, read_judged, write_judged
from irkit.errors import BadValueError, StorageError
from irkit.utils.progress import progress_bar

if TYPE_CHECKING:
    from irkit.data import Query
    from irkit.retrieval.explanation import Explanation
    from irkit.retrieval.retriever import Retriever


def search(
    directory: Directory,
    queries: str | None = None,
    *,
    text: str | None = None,
    k: OptionalCount = None,
    out: str | None = None,
    qrels: str | None = None,
    measures: str = "nDCG@10",
    split: str | None = None,
    id_column: str | None = None,
    text_column: list[str] | None = None,
    condition: Annotated[list[str] | None, typer.Option("--filter", metavar="CONDITION")] = None,
    ignore_identical_ids: bool = False,
    offset: Offset = 0,
    threshold: float | None = None,
    group_by: str | None = None,
    per_group: OptionalCount = None,
    fields: str | None = None,
    facet: str | None = None,
    model: str | None = None,
    override: Settings = None,
    rm3: bool = False,
    fuse: str | None = None,
    device: str | None = None,
    engine: str | None = None,
) -> None:
    """Search an index.

    Searches for one query (--text), for the queries of a file, or at a prompt. The queries of a file make a
    run, which goes to standard output unless --out or --qrels is given.

    Args:
        queries: BEIR folder, .jsonl, .csv, .tsv, .txt, <top>, also .gz; .parquet; or - (standard input).
            Without QUERIES and --text, search asks for queries at a prompt.
        text: Search for this query.
        k: Results per query; default: 1000 in a run, 10 otherwise.
        id_column: Column or key of the id of QUERIES; default: a usual name (id, ...).
        text_column: Column or key of the text of QUERIES, such as desc of TREC topics. May be repeated; the
            texts are joined by spaces.
        condition: Condition on metadata: year>=2000, lang=de or JSON. May be repeated; all must hold.
        fields: What to show of each document, separated by commas: title, text, metadata, metadata.KEY.
        facet: Key of metadata: instead of a search, count the documents of each of its --k most frequent
            values. Documents that do not meet --filter do not count.
        override: Set k1 or b of BM25, as k1=1.2. May be repeated.
        rm3: Expand queries of BM25 by terms of the documents found first (RM3).
        fuse: For an index of several heads: rrf (default), or weights such as dense=0.4,sparse=0.2.
        engine: Let actors of Ray search the shards of the index: ray on this machine, or ray://HOST:PORT.

    Examples:
        irkit search notes-index --text "which animals hibernate" --k 3 --filter "year>=2000"
        irkit search notes-index --facet topic --filter "year>=2000"
        irkit search notes-index examples/notes --out run.trec --qrels examples/notes --measures "AP R@100"
    """
    # refuse options that do not go together
    filters = parse_filters(condition or ())
    ranking = drop_missing(offset=offset, threshold=threshold, group_by=group_by, per_group=per_group)
    field_names = DEFAULT_FIELDS if fields is None else [name.strip() for name in fields.split(",")]
    of_file = out or qrels or split or id_column or text_column or ignore_identical_ids
    _refuse(
        "--out, --qrels, --split, --id-column, --text-column and --ignore-identical-ids need QUERIES: a file "
        "or -",
        queries is None and of_file,
    )
    _refuse("got QUERIES and --fields, but a run has only ids and scores", queries is not None and fields)
    _refuse("got QUERIES and --text; give one of them", queries is not None and text is not None)
    _refuse("got --model and --set, which BM25 has; give one of them", override and model is not None)
    _refuse(
        "got --ignore-identical-ids, which comes after --offset and --group-by; leave it or them out",
        ignore_identical_ids and (offset or group_by),
    )
    _refuse(
        "got --facet, which counts documents without a search; leave out queries and their options",
        facet is not None
        and (queries is not None or text is not None or of_file or ranking != {"offset": 0} or fields or rm3),
    )
    check_out(out, qrels)
    check_engine(engine, "irkit search")
    # slow imports, and checks of values
    from irkit.config import with_overrides
    from irkit.data import Query
    from irkit.encoder_free import RM3
    from irkit.evaluation.run import is_jsonl
    from irkit.retrieval.selection import SearchOptions, parse_selection

    selecting: Any = {**ranking, "fields": field_names}
    parse_selection("search", k or 10, selecting, SearchOptions)  # before the index is opened
    choice = with_overrides({}, override) if override else model
    options: dict[str, Any] = {"filter": filters, "feedback": RM3() if rm3 else None, **ranking}
    options["fuse"] = parse_fuse(fuse)

    # count documents
    if facet is not None:
        with _open(directory, choice, device, engine) as retriever:
            counts = retriever.facets(facet, filters, k or 10)
        show_table([facet, "documents"], [(format_value(value), count) for value, count in counts])
        return

    # answer one query, or several at a prompt
    if queries is None:
        with _open(directory, choice, device, engine) as retriever:
            if text is None:
                _answer_lines(retriever, k or 10, field_names, options)
                return
            Query("query", text)  # checks the text
            hits = retriever.search(text, k or 10, fields=field_names, **options)
            show_hits(hits, field_names, offset)
            if not hits:
                _note_nothing_found(retriever, filters, bool(offset) or threshold is not None)
        return

    # make a run of a file of queries
    k = k or 1000
    with _hint_text(queries):
        items, judgments = read_judged(queries, qrels, split, measures, id_column, text_column, k)
    with _open(directory, choice, device, engine) as retriever:
        if (out or judgments is None) and not is_jsonl(out or "-"):
            _check_ids(retriever, items)
        with progress_bar("searching", "queries", len(items)) as update:
            run = retriever.run(items, k + ignore_identical_ids, progress=update, **options)
        if ignore_identical_ids:
            run = run.without_identical_ids().cut(k)
        if items and next(iter(run), None) is None:
            _note_nothing_found(retriever, filters, bool(offset) or threshold is not None)
    write_judged(run, out, judgments, measures)


def _open(directory: str, model: Any, device: str | None, engine: str | None) -> Retriever:
    """Open the index here, or by actors of Ray."""
    if engine is None:
        from irkit.retrieval.retriever import Retriever

        return Retriever.load(directory, model, device=device)
    from irkit.ray_engine import ShardedRetriever

    address = check_engine(engine, "irkit search")
    return ShardedRetriever.load(directory, model, address=address, device=device)


def _refuse(message: str, conflict: object) -> None:
    """Raise BadValueError if options are in conflict."""
    if conflict:
        raise BadValueError(message)


@contextmanager
def _hint_text(queries: str) -> Iterator[None]:
    """If the file of queries cannot be read, say how to search for one query."""
    try:
        yield
    except StorageError as error:
        if not str(error).startswith(f"reading {queries}: "):
            raise
        raise StorageError(f"{error}; one query is given as --text {queries!r}") from error


def _check_ids(retriever: Retriever, queries: list[Query]) -> None:
    """Refuse ids that a TREC run cannot hold, before the search."""
    from irkit.evaluation.run import check_trec_words

    check_trec_words(query.id for query in queries)
    rows = retriever.index.live.nonzero()[0]
    for start in range(0, len(rows), 1 << 16):
        check_trec_words(retriever.documents.ids(rows[start : start + (1 << 16)]))


def _note_nothing_found(retriever: Retriever, filters: dict[str, Any] | None, cut: bool) -> None:
    reason = "no document meets --filter" if filters else "no document has a word of the query"
    reason = "no result is left by --offset and --threshold" if cut else reason
    note("nothing found: " + (reason if len(retriever) else "the index has no documents"))


def _answer_lines(retriever: Retriever, k: int, fields: list[str], options: dict[str, Any]) -> None:
    """Answer one query per line of standard input."""
    retriever.search("", 1, **options)  # loads model and index before the first query
    is_terminal = sys.stdin.isatty()
    for query in _ask(len(retriever)) if is_terminal else _read_lines():
        start = time.perf_counter()
        hits = retriever.search(query, k, fields=fields, **options)
        milliseconds = 1000 * (time.perf_counter() - start)
        show_hits(hits, fields, options["offset"])
        typer.echo()
        if is_terminal:
            note(f"{len(hits)} of {len(retriever):,} documents in {milliseconds:.0f} ms")


def _ask(n_documents: int) -> Iterator[str]:
    import readline  # noqa: F401 (line editing and history for input())

    note(f"{n_documents:,} documents. Ask; an empty line or Ctrl-D ends.")
    try:
        while line := input("query> ").strip():
            yield line
    except EOFError:
        typer.echo()


def _read_lines() -> Iterable[str]:
    from irkit.data.collection_files import decode, read_lines

    return (decode(line, f"standard input:{number}") for number, line in read_lines("-"))


_CONDITION = re.compile(r"\s*([^=!<>]+?)\s*(==|!=|<=|>=|=|<|>)(?![=<>!])\s*(.*?)\s*", re.DOTALL)


def parse_filters(conditions: Iterable[str]) -> dict[str, Any] | None:
    """Return the filter for `irkit.Retriever.search` that demands all conditions; None for no condition.

    Args:
        conditions: ``KEY OPERATOR VALUE``, with an operator of ``= != < <= > >=`` and a value in JSON or
            a plain string; or a whole filter in JSON. The key ``_id`` stands for the id of a document.

    Raises:
        BadValueError: A condition is malformed, or two conditions test a key with the same operator.

    Examples:
        >>> parse_filters(["year>=2000", "year<2010", "lang=de", 'kind=["a", "b"]'])
        {'year': {'>=': 2000, '<': 2010}, 'lang': 'de', 'kind': ['a', 'b']}
    """
    merged: dict[str, Any] = {}
    for condition in conditions:
        for key, test in _parse(condition).items():
            before = merged.setdefault(key, {})
            if before == {}:
                merged[key] = test
            elif isinstance(before, dict) and isinstance(test, dict) and not before.keys() & test.keys():
                merged[key] = before | test
            else:
                raise BadValueError(f"filter {condition!r}: another condition says the same of {key!r}")
    return merged or None


def _parse(condition: str) -> dict[str, Any]:
    if condition.lstrip().startswith("{"):
        try:
            return dict(json.loads(condition))
        except ValueError as error:
            raise BadValueError(f"filter {condition!r}: not valid JSON: {error}") from error
    match = _CONDITION.fullmatch(condition)
    if match is None:
        raise BadValueError(
            f"filter {condition!r}: expected something like year>=2000, lang=de or JSON in braces"
        )
    key, sign, value = match.groups()
    operand: Any = value
    if key != "_id" or value.startswith("["):  # ids are strings, even if they look like numbers
        try:
            operand = json.loads(value, parse_constant=str)  # NaN and Infinity are no JSON
        except ValueError:
            operand = value
    return {key: operand if sign in ("=", "==") else {sign: operand}}


def parse_fuse(text: str | None) -> str | dict[str, float] | None:
    """Return ``fuse`` for `irkit.Retriever.search`: a method, or weights by head.

    Raises:
        BadValueError: A weight is not a number.

    Examples:
        >>> parse_fuse("dense=0.4,sparse=0.2"), parse_fuse("rrf")
        ({'dense': 0.4, 'sparse': 0.2}, 'rrf')
    """
    if text is None or "=" not in text:
        return text
    weights = dict(part.partition("=")[::2] for part in text.split(","))
    try:
        return {name.strip(): float(weight) for name, weight in weights.items()}
    except ValueError:
        raise BadValueError(
            f"--fuse {brief(text)}: expected rrf or weights by head, such as dense=0.4,sparse=0.2"
        ) from None


def explain(
    directory: Directory,
    query: str,
    docid: str,
    *,
    html: Path | None = None,
    tokens: bool = False,
    model: str | None = None,
    device: str | None = None,
) -> None:
    """Show what the score of a document is made of.

    Prints which words of the document each word of the query matched, and the score of each match. For the
    index of a dense model, prints the score of each passage of the document.

    Args:
        query: Text of the query.
        docid: Id of a document of the index.
        html: Write a page (HTML).
        tokens: Show tokens instead of words.

    Examples:
        irkit explain tokens-index "which animals hibernate" bears --html bears.html
    """
    if html is not None and not html.resolve().parent.is_dir():
        raise StorageError(f"--html {html}: there is no such directory")
    from irkit.retrieval.retriever import Retriever

    with Retriever.load(directory, model, device=device) as retriever:
        explanation = retriever.explain(query, docid)
    if not tokens:
        explanation = explanation.words()
    if html is not None:
        explanation.write_html(html)
        note(f"wrote {html}")
    for name, part in (explanation.parts or {"": explanation}).items() if html is None else ():
        if name:
            note(f"head {name}: score {part.score:.4f}")
        _show(part)


def _show(explanation: Explanation) -> None:
    """Print the matches of an explanation."""
    if not explanation.matches:
        empty = explanation.score == -inf  # the score of a document without token vectors
        reason = "the document has no tokens" if empty else "query and document share no term"
        note(f"nothing matched: {reason}")
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(explanation)
    else:
        header, matches = ["query", "document", "score"], explanation.matches
        if any(match.weights for match in matches):
            header += ["query weight", "document weight"]  # a match of words has none
        blank = [""] * (len(header) - 3)
        show_table(
            header, [(m.query.token, m.document.token, m.score, *(m.weights or blank)) for m in matches]
        )
