"""The `RemoteRetriever`: documents in another engine, searched by the methods of `irkit.Retriever`."""

from __future__ import annotations

import contextlib
import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self, Unpack

import numpy as np

from irkit.arguments import check_functions
from irkit.data import Document, QueriesLike, Query, parse_queries
from irkit.encoder_free import EncoderFreeModel
from irkit.errors import BadValueError, CorruptError, StorageError, reraise_as
from irkit.evaluation.run import Run
from irkit.exporting.contents import split_rows
from irkit.index.array_files import Array
from irkit.index.field_encoding import BOOL, FLOAT, STRING
from irkit.index.filters import Group, check_key, check_type, conditions
from irkit.index.filters import parse_filter as parse_conditions
from irkit.index.metrics import unit
from irkit.retrieval.collection import AnyModel, check_model, load_model
from irkit.retrieval.reranking import RerankOptions, RerankRunOptions, parse_id_lists
from irkit.retrieval.retriever import Retriever
from irkit.retrieval.scorer import Scorer, score_checked
from irkit.retrieval.searcher import OtherRetriever
from irkit.retrieval.searching import Filter, Hit, parse_contents, parse_filter, queries_of_run
from irkit.retrieval.selection import (
    DEEPER,
    Groups,
    RankOptions,
    SearchOptions,
    Selection,
    parse_selection,
)

_MANIFEST = "irkit.json"
_QUERIES = 256  # encoded together
_KINDS = {"number": (FLOAT,), "string": (STRING,), "boolean": (BOOL,)}
"""Types of `irkit.index.field_encoding` by the type that an export says of a key."""


class RemoteHit(NamedTuple):
    """A result of the engine.

    Attributes:
        row: Row of the document in the index that was exported.
        score: Score by the engine.
        document: Id and, if they were asked for, title, text and metadata.
    """

    row: int
    score: float
    document: Document


class RemoteRetriever(OtherRetriever):
    """Documents in another engine. irkit encodes queries, and the engine searches.

    Searches, runs and reranking take the arguments and return the results of `irkit.Retriever`; `Hybrid`
    takes a RemoteRetriever, too. The engine changes documents.

    Attributes:
        name: Place of the documents, for messages.
        about: What the export says: the model, kind and width of vectors, and the keys of the metadata.
    """

    def __init__(self, name: str, about: Any, model: AnyModel | Retriever | str | Path | None) -> None:
        """Store the arguments; callers create `irkit.remote.Qdrant` or `irkit.remote.LanceDB`.

        Raises:
            CorruptError: The engine holds no finished export of irkit.
            BadValueError: Its documents have several representations.
        """
        if not isinstance(about, dict) or not {"model", "kind", "dim", "keys"} <= about.keys():
            raise CorruptError(f"{name}: it is no finished export of irkit; run irkit export again")
        if about["kind"] == "several":
            raise BadValueError(
                f"{name}: its documents have several representations, which the engine's client searches; "
                "export an index of one head to search it from here"
            )
        self.name, self.about, self._choice = name, about, model

    @cached_property
    def model(self) -> AnyModel:
        """The model that encodes queries, loaded at the first use.

        Raises:
            BadValueError: The export names no model, so the caller has to pass one; or the model is not the
                one that encoded the documents.
        """
        saved, choice = self.about["model"], self._choice
        if choice is None:
            if saved["name"] in ("bm25", "impacts", None, ""):
                raise BadValueError(
                    f"{self.name}: queries need the terms of the index that was exported, or a model that "
                    "has no name; give it: model=DIRECTORY of the index, or a model"
                )
            choice = saved.get("settings") or saved["name"]
        if isinstance(choice, str | Path) and (Path(choice) / _MANIFEST).exists():
            choice = Retriever.load(choice)
        model = choice.model if isinstance(choice, Retriever) else load_model(choice)
        check_model(Path(self.name), saved, model)
        return model

    # ---- what an engine does ----

    @abstractmethod
    def _search(self, query: Any, k: int, where: Any, exact: bool, texts: bool) -> list[RemoteHit]:
        """Return the best documents of a query, in any order.

        Args:
            query: A vector in the form of `irkit.exporting.contents.Exported`, or a text.
            k: Maximum number of documents.
            where: Filter in the form of the engine, from `_translate`; None allows all documents.
            exact: Score all documents that the filter allows.
            texts: Whether results include title, text and metadata.
        """

    @abstractmethod
    def _translate(self, where: Group) -> Any:
        """Translate a filter to the form of the engine.

        Raises:
            BadValueError: The engine has no such filter.
        """

    @abstractmethod
    def fetch(self, ids: Sequence[str]) -> list[Document]:
        """Return the documents with these ids, in any order; ids that the engine lacks are left out."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of documents."""

    @abstractmethod
    def close(self) -> None:
        """Close files and connections."""

    def _asking(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which errors of the engine and of its client are StorageErrors."""
        return reraise_as(StorageError, f"searching {self.name}", "is the engine up?")

    def _encode(self, contents: list[Any]) -> Iterator[Any]:
        """Yield, for each query, the vector or text that the engine searches with."""
        for start in range(0, len(contents), _QUERIES):
            part = contents[start : start + _QUERIES]
            encoded = self.model.encode_representation(part, "query")
            if self.about.get("metric") == "cosine":  # the documents were stored with length 1
                encoded = unit(encoded)
            yield from split_rows(encoded)

    def _parse(self, queries: Any, operation: str) -> tuple[list[Any], bool]:
        """Return the queries in the form of the model, and whether the caller passed a single query."""
        return parse_contents(operation, self.model, queries)

    # ---- searching ----

    def _find(
        self, queries: Any, k: int, filter: Filter | None, options: SearchOptions
    ) -> tuple[list[list[Hit]], bool]:
        selection = parse_selection("search", k, options, SearchOptions)
        where = self._where(filter)
        contents, single = self._parse(queries, "searching")
        texts = selection.fields is None or not selection.fields <= {"id"}
        lists = [self._rank(query, selection, where, texts) for query in self._encode(contents)]
        hits = [[Hit.of(item.document, item.score, selection.fields) for item in line] for line in lists]
        return hits, single

    def run(
        self,
        queries: QueriesLike,
        k: int = 1000,
        filter: Filter | None = None,
        **options: Unpack[RankOptions],
    ) -> Run:
        """Rank documents for many queries, but return only ids and scores, see `irkit.Retriever.run`."""
        selection = parse_selection("search", k, options, RankOptions)
        where, items = self._where(filter), list(parse_queries(queries))
        contents = self._encode([self._content(item) for item in items])
        return Run(
            _ranking(item.id, self._rank(query, selection, where, False))
            for item, query in zip(items, contents, strict=True)
        )

    def rerank(
        self, queries: Any, candidates: Any, k: int | None = None, **options: Unpack[RerankOptions]
    ) -> Any:
        """Rank candidates by exact scores of the engine, or by a teacher that scores their texts.

        Args:
            queries: See `irkit.Retriever.rerank`.
            candidates: Ids of documents, or hits; for several queries a list of these. Or a `Run`.
            k: Maximum number of results per query; None returns all.
            options: See `irkit.retrieval.reranking.RerankOptions`; ``interaction`` is refused, because
                the engine scores.
        """
        # check the options
        is_run = isinstance(candidates, Run)
        known = RerankRunOptions if is_run else RerankOptions
        selection = parse_selection("reranking", sys.maxsize if k is None else k, options, known)
        if options.get("interaction") is not None:
            raise BadValueError(f"reranking: {self.name} scores by itself; leave the interaction out")
        if options.get("fuse") is not None:
            raise BadValueError(f"reranking: {self.name} has one representation; leave fuse out")
        self._check_group(selection, "reranking")
        teacher, progress = options.get("teacher"), options.get("progress")
        check_functions("reranking", teacher=teacher, progress=progress)
        # a run: one ranking per query of the run
        if is_run:
            items = queries_of_run(candidates, queries)
            lists = [list(candidates.columns(item.id)[0]) for item in items]
            contents = [self._content(item) for item in items]
            ranked = self._rerank(items, contents, lists, selection, teacher)
            rankings = []
            for item, line in zip(items, ranked, strict=True):
                rankings.append(_ranking(item.id, line))
                if progress is not None:
                    progress(1)
            return Run(rankings)
        # lists of candidates: hits per query
        contents, single = self._parse(queries, "reranking")
        lists = parse_id_lists([candidates] if single else candidates, len(contents))
        items = [Query(str(number), text if teacher else "") for number, text in enumerate(contents)]
        hits = [
            [Hit.of(item.document, item.score, selection.fields) for item in line]
            for line in self._rerank(items, contents, lists, selection, teacher)
        ]
        return hits[0] if single else hits

    def _rerank(
        self,
        items: list[Query],
        contents: list[Any],
        lists: list[list[str]],
        selection: Selection,
        teacher: Scorer | None,
    ) -> Iterator[list[RemoteHit]]:
        vectors = iter(()) if teacher else self._encode(contents)
        for item, ids in zip(items, lists, strict=True):
            query = None if teacher else next(vectors)
            hits: list[RemoteHit] = []
            if ids and teacher is None:
                where = self._where(ids)
                with self._asking():
                    hits = self._search(query, len(ids), where, True, True)
                hits += self._unmatched(ids, hits)
            elif teacher is not None and ids:
                documents = self._fetch_all(ids)
                [scores] = score_checked(teacher, [item], [documents])
                scored = zip(documents, scores.tolist(), strict=True)
                hits = [RemoteHit(0, score, document) for document, score in scored]
            # ties stay in the order of the candidates
            places = {identifier: place for place, identifier in enumerate(dict.fromkeys(ids))}
            hits = [hit._replace(row=places[hit.document.id]) for hit in hits]
            chosen, hits = self._choose(hits, selection)
            yield [hits[position] for position in chosen[selection.offset :].tolist()]

    def _unmatched(self, ids: list[str], hits: list[RemoteHit]) -> list[RemoteHit]:
        """Return candidates without a term of the query, which engines do not find; their score is 0.

        Raises:
            BadValueError: The engine has no document of an id.
        """
        found = {hit.document.id for hit in hits}
        documents = self._fetch_all([name for name in dict.fromkeys(ids) if name not in found])
        return [RemoteHit(0, 0.0, each) for each in documents] if self.about["kind"] == "sparse" else []

    def _fetch_all(self, ids: list[str]) -> list[Document]:
        """Return the documents with these ids, in any order.

        Raises:
            BadValueError: The engine has no document of an id.
        """
        documents = self.fetch(ids) if ids else []
        found = {document.id for document in documents}
        if missing := [name for name in dict.fromkeys(ids) if name not in found]:
            others = f", nor {len(missing) - 1} more of those given" if len(missing) > 1 else ""
            raise BadValueError(
                f"reranking: {self.name} has no document {missing[0]!r}{others}; give ids of its documents"
            )
        return documents

    def _content(self, query: Query) -> Any:
        model = self.model
        return model.content(query) if isinstance(model, EncoderFreeModel) else query.text

    def _where(self, filter: Filter | None) -> Any:
        """Check a filter as `Documents.filter` does, and translate it for the engine.

        The types of values are checked if the export says them.

        Raises:
            BadValueError: No document could meet a condition, or the engine has no such filter.
        """
        if filter is None:
            return None
        parsed = parse_conditions(parse_filter(filter))
        for condition in conditions(parsed):
            if condition.key != "_id":
                check_key(condition.key, self.about["keys"])
                kind, _ = self.about.get("types", {}).get(condition.key, ("other", False))
                check_type(condition, _KINDS.get(kind, ()))
        return self._translate(parsed)

    def _rank(self, query: Any, selection: Selection, where: Any, texts: bool) -> list[RemoteHit]:
        """Return the hits of a query from ``offset`` on; a grouped search asks for more until it is full."""
        self._check_group(selection, "search")
        key, depth = selection.group_by, selection.stop
        while True:
            with self._asking():
                hits = self._search(query, depth, where, False, texts or key is not None)
            chosen, hits = self._choose(hits, selection)
            ended = len(hits) < depth or key is None or hits[-1].score < selection.threshold
            if len(chosen) >= selection.stop or ended:
                return [hits[position] for position in chosen[selection.offset :].tolist()]
            depth *= DEEPER

    def _check_group(self, selection: Selection, operation: str) -> None:
        if selection.group_by is not None:
            check_key(selection.group_by, self.about["keys"], f"{operation}: group_by")

    def _choose(self, hits: list[RemoteHit], selection: Selection) -> tuple[Array, list[RemoteHit]]:
        """Sort hits, best first; return the positions that a selection chooses, and the sorted hits."""
        key, hits = selection.group_by, _in_order(hits)
        scores = np.array([item.score for item in hits], np.float32)
        documents = [item.document for item in hits]
        groups = None if key is None else Groups[Document](list, key)
        return selection.choose(scores, documents, groups), hits

    # ---- what it is ----

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.about['kind']})"


def _in_order(hits: list[RemoteHit]) -> list[RemoteHit]:
    """Return results with the best first, ties in the order of the documents."""
    return sorted(hits, key=lambda item: (-item.score, item.row))


def _ranking(query_id: str, hits: list[RemoteHit]) -> tuple[str, list[str], Array]:
    return (
        query_id,
        [item.document.id for item in hits],
        np.array([item.score for item in hits], np.float32),
    )
