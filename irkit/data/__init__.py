"""Read documents, queries and relevance judgments from files, folders and catalogues.

A *source* is

* a folder with the layout of BEIR: ``corpus.jsonl``, ``queries.jsonl``, ``qrels/SPLIT.tsv``,
* a file: ``.jsonl``, ``.tsv`` (as in MS MARCO) or ``.txt`` (one text per line), each also with ``.gz``,
* a file of topics or documents in the markup of TREC (``<top>``, ``<DOC>``), with any name,
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
from irkit.data.collection_files import read_qrels_file, source_name
from irkit.data.document import JSON, Document, Qrels, Query, Vector
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
    """Read the documents of a source, streamed: no document is held in memory.

    A record needs an id (``_id``, ``id``, ``docid``, ``doc_id``, ``document_id``) and a text (``text``,
    ``contents``, ``content``, ``body``, ``document_text``). ``title`` and ``metadata`` are optional; all
    other keys become metadata. A ``vector`` (weights by term as in files of Anserini, or numbers) may
    replace the text or accompany it. The columns of a tsv file without a header are id and text; id, title
    and text; or id, url, title and text. The id of a plain line is its number. Blank lines are skipped.

    Raises:
        StorageError: There is no such file, or a folder lacks ``corpus.jsonl``.
        BadValueError: While iterating: a line is malformed; the message names file and line.
    """
    name = source_name(source)
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
        field: Key of the text, such as ``"desc"`` for topics of TREC, whose text is the title by default.

    Raises:
        StorageError: There is no such file, or a folder lacks ``queries.jsonl``.
        BadValueError: ``split`` is given, but the source is not a folder. While iterating: a line is
            malformed, or a judged query is missing.
    """
    check_names("reading queries", split=split, field=field)
    name, build = source_name(source), partial(to_query, field=field)
    if not _is_folder(name):
        _reject_split(name, split)
        if name.startswith(PREFIXES):
            return remote_source(name, "queries", QUERY_FIELDS, build)
        return file_source(name, QUERY_FIELDS, build)
    queries = file_source(_member(name, "queries.jsonl"), QUERY_FIELDS, build)
    return queries if split is None else _only(queries, read_qrels(name, split))


def read_qrels(source: str | Path, split: str | None = None) -> Qrels:
    """Read relevance judgments from a TREC or BEIR file, a BEIR folder, or a catalogue.

    Args:
        source: See `irkit.data`.
        split: Split of a BEIR folder; by default ``"test"`` if it exists, otherwise the only split.

    Raises:
        StorageError: There is no such file, or no such split.
        BadValueError: A line is malformed, several splits are possible, or ``split`` is given, but the
            source is not a folder.
    """
    check_names("reading judgments", split=split)
    name = source_name(source)
    if _is_folder(name):
        return read_qrels_file(_split_file(name, split))
    _reject_split(name, split)
    return read_remote_qrels(name) if name.startswith(PREFIXES) else read_qrels_file(name)


def _is_folder(name: str) -> bool:
    try:
        return Path(name).is_dir()
    except OSError:  # such as a name that is too long
        return False


def _member(folder: str, name: str) -> str:
    for path in (Path(folder, name), Path(folder, f"{name}.gz")):
        if path.is_file():
            return str(path)
    names = ", ".join(sorted(path.name for path in Path(folder).iterdir())[:10])
    raise StorageError(
        f"reading folder {folder}: expected {name} or {name}.gz in it; found {names or 'nothing'}"
    )


def _split_file(folder: str, split: str | None) -> str:
    files = {path.name.split(".tsv")[0]: path for path in sorted(Path(folder, "qrels").glob("*.tsv*"))}
    if split is None:
        split = "test" if "test" in files or len(files) != 1 else next(iter(files))
    if split not in files:
        splits = ", ".join(files) or "none"
        if not files and list(Path(folder).glob("*.tsv*")):
            splits += "; give the folder above it, or one of the files in it"
        raise StorageError(f"reading folder {folder}: no split {split!r} (qrels/{split}.tsv); found {splits}")
    return str(files[split])


def _reject_split(source: str, split: str | None) -> None:
    if split is not None:
        if not source.startswith(PREFIXES):
            file_source(source, QUERY_FIELDS, to_query)  # raises if there is no such file
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
