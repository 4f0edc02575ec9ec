"""Collections: documents, queries and relevance judgments from files, folders and catalogues.

A *source* is

* a folder in the layout of BEIR: ``corpus.jsonl``, ``queries.jsonl``, ``qrels/SPLIT.tsv``,
* a file: ``.jsonl``, ``.tsv`` (as MS MARCO's) or ``.txt`` (one text a line), each also with ``.gz``,
* a file of topics or documents in the markup of TREC (``<top>``, ``<DOC>``), of any name,
* ``-``, standard input in any of these formats,
* ``ir_datasets:ID`` of https://ir-datasets.com, or
* ``hf:NAME[:CONFIG][:SPLIT]`` of the Hugging Face hub.

Examples:
    >>> from irkit.data import read_documents, read_qrels, read_queries
    >>> documents = read_documents("scifact")  # doctest: +SKIP
    >>> queries, qrels = read_queries("scifact", split="test"), read_qrels("scifact")  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from irkit.arguments import check_names
from irkit.data.document import JSON, Document, Qrels, Query, Vector
from irkit.data.files import name_of
from irkit.data.qrels import read_qrels_file
from irkit.data.remote import PREFIXES, read_remote_qrels, remote_source
from irkit.data.source import (
    DOCUMENT_FIELDS,
    QUERY_FIELDS,
    Source,
    check_documents,
    file_source,
    to_document,
    to_query,
)
from irkit.errors import BadValueError, StorageError

__all__ = [
    "JSON",
    "Document",
    "Qrels",
    "Query",
    "Source",
    "Vector",
    "check_documents",
    "read_documents",
    "read_qrels",
    "read_queries",
]


def read_documents(source: str | Path) -> Source[Document]:
    """Read the documents of a source, streamed: nothing is kept in memory.

    A record needs an id (``_id``, ``id``, ``docid``, ``doc_id``, ``document_id``) and a text (``text``,
    ``contents``, ``content``, ``body``, ``document_text``); ``title`` and ``metadata`` are optional and every
    other key joins the metadata. Weights by term (``vector``, as in Anserini's files) may stand in for the
    text, or be beside it. Columns of a tsv file without a header are id and text; id, title and text; or id,
    url, title and text. The id of a plain line is its number. Blank lines are skipped.

    Raises:
        StorageError: There is no such file, or a folder lacks ``corpus.jsonl``.
        BadValueError: While iterating: a line is malformed; the message names file and line.
    """
    name = name_of(source)
    if name.startswith(PREFIXES):
        return remote_source(name, "docs", DOCUMENT_FIELDS, to_document)
    path = _member(name, "corpus.jsonl") if _is_folder(name) else name
    return file_source(path, DOCUMENT_FIELDS, to_document)


def read_queries(source: str | Path, split: str | None = None, field: str | None = None) -> Source[Query]:
    """Read the queries of a source.

    A record needs an id (``_id``, ``id``, ``qid``, ``query_id``) and a text (``text``, ``query``,
    ``question``, ``contents``) or weights by term (``vector``); a tsv file without a header has the columns
    id and text.

    Args:
        source: See `irkit.data`.
        split: Only the queries that this split of a BEIR folder judges, such as ``"test"``.
        field: Key of the text instead of those above, such as ``"desc"`` of topics of TREC, whose text is
            the title otherwise.

    Raises:
        StorageError: There is no such file, or a folder lacks ``queries.jsonl``.
        BadValueError: ``split`` with anything but a folder. While iterating: a line is malformed, or a
            judged query is missing.
    """
    check_names("reading queries", split=split, field=field)
    name, build = name_of(source), partial(to_query, field=field)
    if not _is_folder(name):
        _reject_split(name, split)
        if name.startswith(PREFIXES):
            return remote_source(name, "queries", QUERY_FIELDS, build)
        return file_source(name, QUERY_FIELDS, build)
    queries = file_source(_member(name, "queries.jsonl"), QUERY_FIELDS, build)
    return queries if split is None else _only(queries, read_qrels(name, split))


def read_qrels(source: str | Path, split: str | None = None) -> Qrels:
    """Read relevance judgments: a TREC or BEIR file, a BEIR folder, or a catalogue's.

    Args:
        source: See `irkit.data`.
        split: Of a BEIR folder; by default ``"test"`` where there is one, else the only one.

    Raises:
        StorageError: There is no such file, or no such split.
        BadValueError: A line is malformed, the choice of the split is open, or ``split`` is given with
            anything but a folder.
    """
    check_names("reading judgments", split=split)
    name = name_of(source)
    if _is_folder(name):
        return read_qrels_file(_split_file(name, split))
    _reject_split(name, split)
    return read_remote_qrels(name) if name.startswith(PREFIXES) else read_qrels_file(name)


def _is_folder(name: str) -> bool:
    try:
        return Path(name).is_dir()
    except OSError:  # too long a name, for one
        return False


def _member(folder: str, name: str) -> str:
    for path in (Path(folder, name), Path(folder, f"{name}.gz")):
        if path.is_file():
            return str(path)
    found = ", ".join(sorted(path.name for path in Path(folder).iterdir())[:10])
    raise StorageError(
        f"reading folder {folder}: expected {name} or {name}.gz in it; found {found or 'nothing'}"
    )


def _split_file(folder: str, split: str | None) -> str:
    files = {path.name.split(".tsv")[0]: path for path in sorted(Path(folder, "qrels").glob("*.tsv*"))}
    if split is None:
        split = "test" if "test" in files or len(files) != 1 else next(iter(files))
    if split not in files:
        found = ", ".join(files) or "none"
        if not files and list(Path(folder).glob("*.tsv*")):
            found += "; give the folder above it, or one of the files in it"
        raise StorageError(f"reading folder {folder}: no split {split!r} (qrels/{split}.tsv); found {found}")
    return str(files[split])


def _reject_split(source: str, split: str | None) -> None:
    if split is not None:
        if not source.startswith(PREFIXES):
            file_source(source, QUERY_FIELDS, to_query)  # says so if there is no such file
        raise BadValueError(
            f"{source}: split={split!r} works for a BEIR folder only; give a file of the queries"
        )


def _only(queries: Source[Query], qrels: Qrels) -> Source[Query]:
    def judged() -> Iterator[tuple[int, Query]]:
        missing = set(qrels)
        for number, query in queries.numbered():
            if query.id in qrels:
                missing.discard(query.id)
                yield number, query
        if missing:
            raise BadValueError(
                f"{queries.name}: lacks {len(missing)} judged queries, among them {min(missing)!r}"
            )

    return Source(queries.name, judged)
