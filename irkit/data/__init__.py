"""Read documents, queries and relevance judgments from files, folders and catalogues.

A *source* is

* a folder with the layout of BEIR: ``corpus.jsonl``, ``queries.jsonl``, ``qrels/SPLIT.tsv``,
* a file: ``.jsonl``, ``.csv``, ``.tsv`` (as in MS MARCO) or ``.txt`` (one text per line), each also with
  ``.gz``, or ``.parquet``,
* a file of topics or documents in the markup of TREC (``<top>``, ``<DOC>``), with any name,
* ``-``, standard input: JSON lines, tsv, texts or markup,
* the URI of such a folder or file, ``s3://...``, ``gs://...`` and others that fsspec knows; each kind of
  store needs a package of its own, such as s3fs or gcsfs,
* ``ir_datasets:ID`` of https://ir-datasets.com, or
* ``hf:NAME[:CONFIG][:SPLIT]`` of the Hugging Face hub.

Examples:
    >>> from irkit.data import read_documents, read_qrels, read_queries
    >>> documents = read_documents("scifact")  # doctest: +SKIP
    >>> queries, qrels = read_queries("scifact", split="test"), read_qrels("scifact")  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from irkit.arguments import brief, check_names
from irkit.data.catalogues import is_catalogued, read_remote_qrels, remote_corpus, remote_source
from irkit.data.collection_files import read_qrels_file, source_name
from irkit.data.document import JSON, Document, Qrels, Query, Vector
from irkit.data.source import (
    DOCUMENT_FIELDS,
    QUERY_FIELDS,
    Source,
    as_id,
    check_documents,
    file_source,
    name_fields,
    to_document,
    to_query,
)
from irkit.errors import BadTypeError, BadValueError, StorageError
from irkit.utils.uris import is_folder_of_store, is_uri, list_folder

__all__ = [
    "JSON",
    "Document",
    "DocumentsLike",
    "Qrels",
    "QueriesLike",
    "Query",
    "Source",
    "Vector",
    "check_documents",
    "corpus_of",
    "parse_documents",
    "parse_queries",
    "read_documents",
    "read_qrels",
    "read_queries",
]

DocumentsLike: TypeAlias = (
    str | Path | Mapping[str, Any] | Iterable[Document | Mapping[str, Any] | tuple[str, Any] | str]
)
"""A source; id -> text, vector or record; or an iterable of documents, records, texts, vectors or pairs."""

QueriesLike: TypeAlias = str | Path | Mapping[str, Any] | Iterable[Query | tuple[str, Any]]
"""A source; id -> text or vector; or an iterable of queries, or of pairs of id and either."""


def read_documents(
    source: str | Path,
    *,
    id: str | None = None,
    text: str | Sequence[str] | None = None,
    title: str | None = None,
    metadata: Sequence[str] | None = None,
) -> Source[Document]:
    r"""Read the documents of a source, streamed: no document is held in memory.

    A record needs an id (``_id``, ``id``, ``docid``, ``doc_id``, ``document_id``, ``pid``) and a text
    (``text``, ``contents``, ``content``, ``body``, ``document_text``, ``passage``). ``title`` and
    ``metadata`` are optional; all other keys become metadata. A ``vector`` (weights by term as in files of
    Anserini, or numbers) may replace the text or accompany it. The first line of a csv file names its
    columns; a row of csv or parquet without an id gets its number, counted from 0. The columns of a tsv file
    without a header are id and text; id, title and text; or id, url, title and text. The id of a plain line
    is its number. Blank lines are skipped.

    Args:
        source: See `irkit.data`.
        id: Key or column of the id, if it has another name.
        text: Key or column of the text, or several, whose texts are joined by spaces.
        title: Key or column of the title.
        metadata: The keys or columns that are kept as metadata; by default all others. A table must have
            all columns that are named here; a record of JSON may lack a title and metadata.

    Raises:
        StorageError: The file does not exist, or a folder lacks ``corpus.jsonl``.
        BadTypeError: A name of a column is not a string.
        BadValueError: A name of a column is empty. While iterating: a line is malformed, or a column is
            missing; the message names file and line.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "pages.csv")
        >>> path.write_text("url,summary,year\na.org,Bears sleep.,2011\n")
        41
        >>> next(iter(read_documents(path, id="url", text="summary")))
        Document(id='a.org', text='Bears sleep.', title='', metadata={'year': 2011})
    """
    name = source_name(source)
    fields = name_fields("reading documents", DOCUMENT_FIELDS, id, text, title, metadata)
    build = partial(to_document, fields=fields)
    if is_catalogued(name):
        return remote_source(name, "docs", fields, build)
    path = _member(name, "corpus.jsonl") if is_folder(name) else name
    return file_source(path, fields, build)


def read_queries(
    source: str | Path,
    split: str | None = None,
    *,
    id: str | None = None,
    text: str | Sequence[str] | None = None,
) -> Source[Query]:
    """Read the queries of a source.

    A record needs an id (``_id``, ``id``, ``qid``, ``query_id``) and a text (``text``, ``query``,
    ``question``, ``contents``) or weights by term (``vector``); a tsv file without a header has the columns
    id and text.

    Args:
        source: See `irkit.data`.
        split: Only the queries that this split of a BEIR folder judges, such as ``"test"``.
        id: Key or column of the id, if it has another name.
        text: Key or column of the text, or several, whose texts are joined by spaces; such as ``"desc"`` for
            topics of TREC, whose text is the title by default.

    Raises:
        StorageError: The file does not exist, or a folder lacks ``queries.jsonl``.
        BadTypeError: A name of a column is not a string.
        BadValueError: ``split`` is given, but the source is not a folder. While iterating: a line is
            malformed, or a judged query is missing.
    """
    check_names("reading queries", split=split)
    name, fields = source_name(source), name_fields("reading queries", QUERY_FIELDS, id, text)
    build = partial(to_query, fields=fields)
    if not is_folder(name):
        _reject_split(name, split)
        if is_catalogued(name):
            return remote_source(name, "queries", fields, build)
        return file_source(name, fields, build)
    queries = file_source(_member(name, "queries.jsonl"), fields, build)
    return queries if split is None else _only(queries, read_qrels(name, split))


def read_qrels(source: str | Path, split: str | None = None) -> Qrels:
    """Read relevance judgments from a TREC or BEIR file, a BEIR folder, or a catalogue.

    Args:
        source: See `irkit.data`.
        split: Split of a BEIR folder; by default ``"test"`` if it exists, otherwise the only split.

    Raises:
        StorageError: The file or the split does not exist.
        BadValueError: A line is malformed, several splits are possible, or ``split`` is given, but the
            source is not a folder.
    """
    check_names("reading judgments", split=split)
    name = source_name(source)
    if is_folder(name):
        return read_qrels_file(_split_file(name, split))
    _reject_split(name, split)
    return read_remote_qrels(name) if is_catalogued(name) else read_qrels_file(name)


def parse_documents(documents: DocumentsLike, start: int = 0) -> Iterator[Document]:
    """Yield documents from any form.

    Args:
        documents: A source (see `irkit.data`); id -> text, or id -> record, as BEIR holds a corpus; or an
            iterable of `Document`, records such as ``{"_id": "1", "text": "..."}``, pairs of id and text, or
            texts, whose ids are their positions. Vectors (lists of numbers, arrays) may replace texts.
        start: Position of the first document.

    Raises:
        BadTypeError: ``documents`` has another form.
        BadValueError: An item is malformed; the message says which.

    Examples:
        >>> [document.id for document in parse_documents(["a text", ("x", "another")])]
        ['0', 'x']
    """
    for position, item in enumerate(_items(documents, read_documents), start):
        try:
            yield item if isinstance(item, Document) else _document(item, position)
        except (BadValueError, BadTypeError) as error:
            raise BadValueError(f"item {position - start} of the documents given: {error}") from error


def parse_queries(queries: QueriesLike) -> Iterator[Query]:
    """Yield queries from a source, id -> text, or an iterable of `Query` or of pairs.

    Raises:
        BadTypeError: ``queries`` has another form.

    Examples:
        >>> list(parse_queries({"q1": "a question"}))
        [Query(id='q1', text='a question')]
    """
    for item in _items(queries, read_queries):
        if not isinstance(item, Query) and not (isinstance(item, tuple) and len(item) == 2):
            raise BadTypeError(f"queries: expected a Query or (id, text), got {brief(item)}")
        if isinstance(item, tuple):
            name, content = as_id(item[0]), item[1]
            item = Query(name, "", content) if _is_vector(content) else Query(name, content)
        yield item


def is_folder(name: str) -> bool:
    """Return whether a source is a folder, here or in an object store."""
    if is_uri(name):
        return is_folder_of_store(name)
    try:
        return Path(name).is_dir()
    except OSError:  # such as a name that is too long
        return False


def _member(folder: str, name: str) -> str:
    present = _names(folder)
    for file in (name, f"{name}.gz"):
        if file in present:
            return _inside(folder, file)
    names = ", ".join(present[:10])
    raise StorageError(
        f"reading folder {folder}: expected {name} or {name}.gz in it; found {names or 'nothing'}"
    )


def _names(folder: str) -> list[str]:
    """Return the names in a folder, sorted; none if the folder does not exist."""
    if is_uri(folder):
        return list_folder(folder)
    return sorted(path.name for path in Path(folder).iterdir()) if Path(folder).is_dir() else []


def _inside(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if is_uri(folder) else str(Path(folder, name))


def _split_file(folder: str, split: str | None) -> str:
    qrels_folder = _inside(folder, "qrels")
    files = {
        name.removesuffix(".gz").removesuffix(".tsv"): _inside(qrels_folder, name)
        for name in _names(qrels_folder)
        if name.removesuffix(".gz").endswith(".tsv") and not name.startswith(".")
    }
    if split is None:
        split = "test" if "test" in files or len(files) != 1 else next(iter(files))
    if split not in files:
        splits = ", ".join(files) or "none"
        if not files and any(".tsv" in name for name in _names(folder)):
            splits += "; give the folder above it, or one of the files in it"
        raise StorageError(f"reading folder {folder}: no split {split!r} (qrels/{split}.tsv); found {splits}")
    return files[split]


def _reject_split(source: str, split: str | None) -> None:
    if split is not None:
        if not is_catalogued(source):
            file_source(source, QUERY_FIELDS, to_query)  # raises if the file does not exist
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


def _items(collection: Any, read: Callable[[str | Path], Iterable[Any]]) -> Iterable[Any]:
    if isinstance(collection, str | Path):
        return read(collection)
    if hasattr(collection, "columns") and hasattr(collection, "to_dict"):  # iterating yields column names
        raise BadTypeError(
            f"got a {type(collection).__name__}, expected its rows; give frame.to_dict('records'), or pairs "
            "as zip(frame.id, frame.text)"
        )
    if not isinstance(collection, Iterable):
        raise BadTypeError(f"expected the name of a source or an iterable, got {brief(collection)}")
    return collection.items() if isinstance(collection, Mapping) else collection


def _is_vector(content: Any) -> bool:
    return isinstance(content, Mapping | list | tuple) or hasattr(content, "shape")


def _document(item: Any, position: int) -> Document:
    if isinstance(item, str):
        return Document(str(position), item)
    if isinstance(item, list) or hasattr(item, "shape"):
        return Document(str(position), "", vector=item)
    if isinstance(item, tuple) and len(item) == 2:
        name, content = item
        if not isinstance(content, Mapping):
            content = {"vector" if _is_vector(content) else "text": content}
        item = {**content, "_id": name}
    if not isinstance(item, Mapping):
        raise BadTypeError(f"expected a Document, a record, (id, text) or a text, got {brief(item)}")
    return to_document(dict(item))


def corpus_of(source: str | Path) -> str:
    """Return a key of the documents of a source. Sources with the same key have the same documents.

    Args:
        source: As for `read_documents`. Several IDs of ir_datasets may share their documents.

    Examples:
        >>> corpus_of("scifact") == corpus_of("./scifact")
        True
    """
    name = str(source)
    return remote_corpus(name) if is_catalogued(name) else str(Path(name).resolve())
