"""Retriever: a model, an index and the documents in it, as one object."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, cast, overload

import numpy as np

from irkit.data import Document, Query, Vector
from irkit.data.given import Collection, Queries, given_documents, given_queries
from irkit.errors import BadTypeError, BadValueError, StorageError
from irkit.explanation import Explanation, TermWeights, explain, match_terms
from irkit.index import (
    AutoConfig,
    Documents,
    Flat,
    Hits,
    IndexConfig,
    StageProgress,
    Store,
    check_index,
    create_index,
    index_config,
    open_index,
)
from irkit.lexical import BM25, Impacts, LexicalModel, Vectors
from irkit.lookup import Filter, Hit, allowed_rows, find_rows, given_strings, read_hits
from irkit.model import Device, Model
from irkit.model_choice import (
    AnyModel,
    changed_settings,
    default_index,
    describe_model,
    load_model,
    name_model,
    same_documents,
)
from irkit.representation import Representation, Sparse
from irkit.reranking import (
    Candidates,
    Interaction,
    RerankOptions,
    given_candidates,
    rerank_ids,
    rerank_run,
    rerank_taught,
    rerank_texts,
    stored_documents,
)
from irkit.run import Run, check_counts

if TYPE_CHECKING:
    from irkit.feedback import RM3
    from irkit.training.teachers import Teacher

__all__ = ["Hit", "Retriever"]

_CHUNK = 1024  # documents encoded and stored together
_QUERIES = 256  # encoded and searched together
_UNCHANGED = "nothing was changed"


class Retriever:
    """Searches documents with the model that encoded them; everything is kept in one directory.

    A reader shows one committed state, also while another process writes; `refresh` moves to the newest.
    A change is stored whole or, on any error, not at all.

    Attributes:
        store: The files.
        index: Representations of the documents, by row.
        documents: Ids, texts and metadata, by row.

    Examples:
        >>> model = "sentence-transformers/all-MiniLM-L6-v2"
        >>> texts = {"b": "Bears sleep in winter.", "c": "Copper conducts electricity."}
        >>> retriever = Retriever.build(model, texts, "animals")  # doctest: +SKIP
        >>> [hit.id for hit in retriever.search("hibernation", k=1)]  # doctest: +SKIP
        ['b']
    """

    def __init__(self, store: Store, load_model: Callable[[], AnyModel]) -> None:
        """Use `Retriever.build` or `Retriever.load`."""
        self.store, self.index, self.documents = store, open_index(store), Documents(store)
        self._load_model, self._build = load_model, store.meta["build"]
        self._again: Callable[[], Self] | None = None  # opens the same, in another process

    # ---- making and opening ----

    @classmethod
    def build(
        cls,
        model: AnyModel | str | Path,
        documents: Collection,
        path: str | Path,
        *,
        index: str | Mapping[str, Any] | IndexConfig | None = None,
        chunk_size: int = _CHUNK,
        overwrite: bool = False,
        progress: StageProgress | None = None,
    ) -> Self:
        """Encode documents, streamed, and index them.

        A build that was killed goes on after its last finished chunk when the same call is made again.

        Args:
            model: A model; what `Model.from_pretrained` takes; or ``"bm25"``, or ``"vectors"`` that were
                computed elsewhere, see `irkit.lexical`.
            documents: A source (see `irkit.data`); id -> text; or an iterable of `Document`, records
                such as ``{"_id": "1", "text": "..."}``, pairs of id and text, or texts, whose ids are
                their positions: "0", "1", ... Of the model ``"vectors"``, vectors where texts may be.
            path: A new or empty directory, or that of an index to replace.
            index: ``"flat"`` (exact), ``"hnsw"``, ``"plaid"``, ``"auto"`` (by the number of documents, whose
                first 20,000 are read ahead) or any other choice of `irkit.index.index_config`. By default
                ``"inverted"`` of sparse representations, exact for BM25, and ``"flat"`` of others.
            chunk_size: Documents that are encoded and stored together.
            overwrite: Replace the index that is there; it stays in use until the new one is complete.
            progress: Told of the stages ("encoding", and those of the index), see `StageProgress`.

        Raises:
            StorageError: There is an index or something else at ``path``, or the disk is full.
            BadValueError: A document is malformed, an id comes twice, or a killed build of other documents
                is there (``overwrite`` discards it).
            LockedError: Another process is writing there.
        """
        model, stream = load_model(model), given_documents(documents)
        if isinstance(model, Vectors):
            model, stream = model.fit(stream)
        config = default_index(model) if index is None else index_config(index)
        about = describe_model(model)
        if isinstance(config, AutoConfig):
            first = list(islice(stream, config.documents))
            stream = chain(first, stream)
            lexical = isinstance(model, LexicalModel) and model.kind == "sparse"
            config = default_index(model) if lexical else config.choose(model.kind, len(first))
        check_index(config, model.represent([], "document"))
        key = {**about, "name": None, "index": config.model_dump(mode="json")}
        if isinstance(model, Vectors):
            key["first"] = model.first
        store = Store.build(path, key=key, overwrite=overwrite)
        try:
            create_index(store, config)
            with store.update():
                store.meta["model"] = about
                if isinstance(model, LexicalModel):
                    model.begin(store)
            retriever = cls(store, lambda: model)
            if not retriever._resumes(stream, progress):
                if not overwrite or isinstance(documents, Iterator):
                    raise BadValueError(
                        f"building {path}: a build of other documents was begun there; to discard it, ask "
                        "to overwrite, with documents that can be read again"
                    )
                store.close()
                Store.build(path, overwrite=True).close()  # another key: what was begun is discarded
                return cls.build(
                    model,
                    documents,
                    path,
                    index=config,
                    chunk_size=chunk_size,
                    overwrite=True,
                    progress=progress,
                )
            for chunk, part in retriever._encode(stream, chunk_size, progress):
                with store.update():
                    retriever._append(chunk, part)
            retriever.index.finish(progress)
            store.publish()
        except BaseException:
            store.close()
            raise
        return retriever

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: AnyModel | Mapping[str, Any] | str | Path | None = None,
        *,
        device: Device | None = None,
        dtype: str = "float32",
        verify: bool = True,
    ) -> Self:
        """Open an index.

        Args:
            path: Its directory.
            model: The model it was built with; by default the one it names, loaded when first needed. A BM25
                may have another ``k1`` and ``b``, of which ``{"k1": 1.2, "b": 0.75}`` will do: weights are
                then made in memory at the first search, and what is stored stays as it is.
            device: Where a model that is loaded here runs; one device or several, as in
                `Model.from_pretrained`.
            dtype: See `Model.from_pretrained`.
            verify: Compare the checksum of every file (some 2 GB/s).

        Raises:
            StorageError: There is no finished index, or no model.
            CorruptError: A file is missing, truncated or altered.
            BadValueError: ``model`` is not the one it was built with.
        """
        store = Store.open(path, verify=verify)
        if "model" not in store.meta:
            raise StorageError(
                f"opening {path}: no index of a Retriever; expected one with a model and texts"
            )
        saved = store.meta["model"]
        chosen = saved.get("settings", saved["name"]) if model is None else model
        if isinstance(model, Mapping):
            chosen = changed_settings(saved, model)
        retriever = cls(store, partial(load_model, chosen, device=device, dtype=dtype))
        if not isinstance(model, Model):
            retriever._again = partial(
                cls.load, store.path.absolute(), model, device=device, dtype=dtype, verify=verify
            )
        if model is not None:
            retriever.model  # noqa: B018 (is checked)
        return retriever

    @cached_property
    def model(self) -> AnyModel:
        """The model, loaded when first asked for; warns if only its query side is another one."""
        saved, model = self.store.meta["model"], self._load_model()
        given = describe_model(model)
        if not same_documents(saved, given):
            raise BadValueError(
                f"index {self.store.path}: it was built with {name_model(saved)}, not with "
                f"{name_model(given)}; use that model or build the index again"
            )
        if given.get("queries") != saved.get("queries"):
            warnings.warn(
                f"index {self.store.path}: {name_model(given)} makes something else of queries than the "
                "model it was built with, of documents the same; results are those of the model given now",
                stacklevel=3,  # whoever needed the model
            )
        if isinstance(model, BM25) and given["fingerprint"] != saved["fingerprint"]:
            cast(Flat, self.index).formula = model.config.k1, model.config.b
        return model.open(self.store) if isinstance(model, LexicalModel) else model

    def save(self, path: str | Path) -> None:
        """Copy the index as this object shows it; the copy appears whole or not at all.

        Args:
            path: A new or empty directory.

        Raises:
            StorageError: Something is there, or the disk is full.
        """
        with Store.build(path) as copy:
            with copy.update():
                for name in self.store.sizes():
                    copy.append(name, self.store.read(name)[:0])
                    for block in self.store.blocks(name):
                        copy.append(name, block)
                copy.meta.update(self.store.meta)
            copy.publish()

    # ---- searching ----

    @overload
    def search(  # type: ignore[overload-overlap]
        self,
        queries: str | Vector,
        k: int = 10,
        filter: Filter | None = None,
        *,
        feedback: RM3 | None = None,
    ) -> list[Hit]: ...
    @overload
    def search(
        self,
        queries: Sequence[str | Vector] | Representation,
        k: int = 10,
        filter: Filter | None = None,
        *,
        feedback: RM3 | None = None,
    ) -> list[list[Hit]]: ...
    def search(
        self,
        queries: str | Vector | Sequence[str | Vector] | Representation,
        k: int = 10,
        filter: Filter | None = None,
        *,
        feedback: RM3 | None = None,
    ) -> list[Hit] | list[list[Hit]]:
        """The ``k`` best documents of every query.

        Args:
            queries: A text or several; of `irkit.lexical.Impacts` weights by term, or several; of
                `irkit.lexical.Vectors` a vector, several, or a `Representation`.
            k: At least 1; there are fewer results where fewer documents qualify. For sparse models and BM25
                these share a term with the query.
            filter: Ids, such as ``["d1", "d2"]``; or conditions on metadata, see `Documents.filter`, such as
                ``{"year": {">=": 2000}, "lang": ["de", "en"]}``, where ``"_id": [...]`` stands for ids.
                Ids that are not there match nothing.
            feedback: Of an index of BM25: expands the queries and searches again, see `irkit.feedback`.

        Returns:
            Hits of the text, or of each of several; best first, ties in the order the documents came in.

        Raises:
            BadValueError: ``k`` is below 1, the filter makes no sense, or the model is another one.
        """
        items, single = self._given("searching", queries)
        results = [
            hits
            for found in self._find(items, k, filter, feedback)
            for hits in read_hits(self.documents, found)
        ]
        return results[0] if single else results

    def run(
        self,
        queries: Queries,
        k: int = 1000,
        filter: Filter | None = None,
        *,
        feedback: RM3 | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Run:
        """Rank documents for many queries: as `search`, but ids and scores only.

        Args:
            queries: A source (see `irkit.data`); id -> text; or an iterable of `Query` or of pairs.
            k: Results of each query, at most.
            filter: As for `search`.
            feedback: As for `search`.
            progress: Called with the number of queries finished since its last call.

        Raises:
            BadValueError: As for `search`; or a query id comes twice.
        """
        named = list(given_queries(queries))
        names = iter([query.id for query in named])

        def rankings() -> Iterator[tuple[str, list[str], Any]]:
            for found in self._find(list(map(self.content, named)), k, filter, feedback):
                rows, place = np.unique(found.rows, return_inverse=True)  # each id is read once
                none = int(np.searchsorted(rows, 0))  # 1 if -1, no hit, is among them
                ids = np.array([""] * none + self.documents.ids(rows[none:]), dtype=object)
                hits = (found.rows >= 0).sum(1)  # come first
                for line, scores, count in zip(place, found.scores, hits, strict=True):
                    yield next(names), ids[line[:count]].tolist(), scores[:count]
                if progress is not None:
                    progress(len(hits))

        return Run(rankings())

    @overload
    def rerank(  # type: ignore[overload-overlap]
        self, queries: str, candidates: Candidates, k: int | None = None, **options: Unpack[RerankOptions]
    ) -> list[Hit]: ...
    @overload
    def rerank(
        self, queries: Queries, candidates: Run, k: int | None = None, **options: Unpack[RerankOptions]
    ) -> Run: ...
    @overload
    def rerank(
        self,
        queries: Sequence[str],
        candidates: Sequence[Candidates],
        k: int | None = None,
        **options: Unpack[RerankOptions],
    ) -> list[list[Hit]]: ...
    def rerank(
        self,
        queries: Any,
        candidates: Any,
        k: int | None = None,
        *,
        interaction: Interaction | None = None,
        teacher: Teacher | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> list[Hit] | list[list[Hit]] | Run:
        """Rank candidates by the exact scores of the model, whatever kind it is, or by those of a teacher.

        What is in the index is scored as it is stored there; only queries and other texts are encoded.

        Args:
            queries: A text or several; for a run, as for `run`.
            candidates: Ids of documents of the index, or hits, whose ids count; or documents: id -> text, or
                an iterable of `Document`, records or pairs. Of several queries a list of these. Or the `Run`
                of a first stage.
            k: Results of each query, at most; None is all.
            interaction: Scores representations instead of `irkit.score`, such as a
                `irkit.late_interaction.MultiVectorAttention`.
            teacher: Reads the texts and scores them, such as the cross-encoder that
                `irkit.training.teachers.load_teacher` loads; the model is not used.
            progress: Called with the number of queries of a run finished since its last call.

        Returns:
            As from `search`; of a run, a run. A document that scores -inf (it has no tokens) is left out.

        Raises:
            BadValueError: The index has no document of an id, the text of a query of the run is not given,
                ``k`` is below 1, or there are both an interaction and a teacher.
        """
        if interaction is not None and teacher is not None:
            raise BadValueError("reranking: an interaction and a teacher; expected one of them at most")
        if isinstance(candidates, Run):
            return rerank_run(self, queries, candidates, k, interaction, teacher, progress)
        texts, single = self._given("reranking", queries)
        given = given_candidates([candidates] if single else candidates, len(texts))
        by_id = all(isinstance(item, str) for some in given for item in some)
        if by_id and teacher is None:
            hits = read_hits(self.documents, rerank_ids(self, texts, cast(Any, given), k, interaction))
            return hits[0] if single else hits
        documents = [stored_documents(self, some) for some in cast(Any, given)] if by_id else cast(Any, given)
        if teacher is None:
            ranked = rerank_texts(cast(Model, self.model), texts, documents, k, interaction)
        else:
            asked = [Query(str(number), text) for number, text in enumerate(texts)]
            ranked = rerank_taught(teacher, asked, documents, k)
        hits = [[Hit.of(document, value) for document, value in some] for some in ranked]
        return hits[0] if single else hits

    def explain(
        self, query: str | Vector, document: str | Document | Mapping[str, Any] | tuple[str, Any]
    ) -> Explanation:
        """Which tokens or terms of a document matched those of the query, see `irkit.explanation`.

        Args:
            query: A text; of `irkit.lexical.Impacts` weights by term.
            document: Id of a document of the index; or a `Document`, a record, or a pair of id and text.

        Raises:
            BadTypeError: The query is not a string.
            BadValueError: There is no such document, or the model makes one dense vector of a text.
        """
        if isinstance(document, str):
            advice = "give one that is not in it as a Document"
            row = find_rows(self.documents, [document], "explaining a score", advice)
            [found] = self.documents.fetch(row)
        else:
            [found] = given_documents([document])
        if isinstance(self.model, Vectors):
            raise BadValueError("explaining a score: vectors that were computed elsewhere belong to no words")
        if not isinstance(self.model, Impacts):
            return explain(cast(Model, self.model), cast(str, query), found.full_text)
        if isinstance(document, str):
            weights = cast(Sparse, self.index.representations(row))
        else:
            weights = self.model.represent([self.content(found)], "document")
        names, asked = self.model.vocabulary, self.model.represent([cast(Any, query)], "query")
        return match_terms(
            TermWeights("", asked, names, ()), TermWeights(found.full_text, weights, names, ())
        )

    # ---- changing ----

    def add(self, documents: Collection, *, progress: StageProgress | None = None) -> None:
        """Add documents.

        Args:
            documents: As for `build`; ids of mere texts go on from the number of documents ever added.
            progress: As for `build`.

        Raises:
            BadValueError: An id comes twice or is there already, or a document is malformed; nothing is
                added.
            LockedError: Another process is writing.
        """
        with self.store.update():
            self._check_build()
            self._add(given_documents(documents, len(self.documents)), progress)

    def remove(self, ids: str | Iterable[str]) -> None:
        """Remove documents; their bytes stay on disk until the index is built again.

        Raises:
            BadValueError: There is no document of one of the ids; nothing is removed.
        """
        with self.store.update():
            self._check_build()
            names = given_strings("removing documents", ids)
            self.index.remove(find_rows(self.documents, names, "removing documents", _UNCHANGED))

    def update(self, documents: Collection, *, progress: StageProgress | None = None) -> None:
        """Replace documents by others of the same ids in one step: a reader sees all of it or nothing.

        Args:
            documents: As for `build`; kept in memory meanwhile.
            progress: As for `build`.

        Raises:
            BadValueError: There is no document of one of the ids (`add` those), an id comes twice, or a
                document is malformed; nothing is replaced.
        """
        items = list(given_documents(documents))
        with self.store.update():
            self._check_build()
            names = [item.id for item in items]
            self.index.remove(find_rows(self.documents, names, "updating documents", _UNCHANGED))
            self._add(items, progress)

    def refresh(self) -> bool:
        """Move to the newest state that is stored; whether there was a newer one."""
        return self.store.refresh()

    def close(self) -> None:
        """Let go of the files."""
        self.store.close()

    # ---- what it is ----

    def stats(self) -> dict[str, Any]:
        """Of `Index.stats` (kind, documents, removed and its share, bytes, ...), and the model it needs."""
        return self.index.stats() | {"model": self.store.meta["model"]}

    def __len__(self) -> int:
        """Documents that can be found."""
        return int(self.index.live.sum())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """For other processes, which open the directory themselves; they see its newest state."""
        if self._again is None:
            raise BadTypeError(
                f"pickling a Retriever: the model of {self.store.path} was given as an object, not by name; "
                "pickle Retriever.load(path), or Retriever.load(path, name)"
            )
        return self._again, ()

    def __repr__(self) -> str:
        kind, model = self.index.config.kind, self.store.meta["model"]["name"]
        return f"Retriever({str(self.store.path)!r}, {len(self)} documents, {kind}, {model!r})"

    # ---- inside ----

    def content(self, item: Document | Query) -> Any:
        """What the model takes of a document or a query: its text, or its vector."""
        text = item.text if isinstance(item, Query) else item.full_text
        if item.vector is not None and not text and not isinstance(self.model, Impacts | Vectors):
            raise BadValueError(
                f"{type(item).__name__.lower()} {item.id!r}: it has a vector and no text, but this model "
                "takes texts; vectors are indexed with the model 'vectors' and searched by vectors"
            )
        return self.model.content(item) if isinstance(self.model, LexicalModel) else text

    def _given(self, operation: str, queries: Any) -> tuple[list[Any], bool]:
        """Queries, and whether it is only one."""
        if isinstance(self.model, Vectors):
            return self.model.given(queries)
        if isinstance(self.model, Impacts):
            single = isinstance(queries, Mapping | str) or not isinstance(queries, Iterable)
            return [queries] if single else list(queries), single
        some = queries[:1] if isinstance(queries, list | tuple) else [queries]
        if shapes := [tuple(item.shape) for item in some if hasattr(item, "shape")]:
            raise BadTypeError(
                f"{operation}: got a {type(some[0]).__name__} of shape {shapes[0]}, expected texts, which "
                "the model encodes; vectors (n, dim) go to retriever.index.search(Dense(vectors), k), whose "
                "rows go to retriever.documents.fetch"
            )
        return given_strings(operation, queries), isinstance(queries, str)

    def _find(self, texts: list[Any], k: int, filter: Filter | None, feedback: RM3 | None) -> Iterator[Hits]:
        """Rows and scores of some queries at a time."""
        self._check_build()
        check_counts("search", k=k)
        k = min(int(k), max(1, len(self.index)))
        allowed = None if filter is None else allowed_rows(self.documents, filter)
        for start in range(0, len(texts), _QUERIES):
            queries = self.model.represent(texts[start : start + _QUERIES], "query")
            if feedback is not None:
                queries = feedback.expand(self.index, queries, allowed)
            hits = self.index.search(queries, k, allowed)
            if self.model.kind == "sparse":  # who shares no term with a query is no answer to it
                nothing = hits.scores == 0
                hits.rows[nothing], hits.scores[nothing] = -1, -np.inf
                order = np.argsort(-hits.scores, axis=1, kind="stable")  # scores below 0 come before them
                hits = Hits(
                    np.take_along_axis(hits.rows, order, axis=1),
                    np.take_along_axis(hits.scores, order, axis=1),
                )
            yield hits

    def _check_build(self) -> None:
        if self.store.meta["build"] != self._build:
            raise StorageError(
                f"index {self.store.path}: it was replaced by one of another model or kind; load it again"
            )

    def _resumes(self, stream: Iterator[Document], progress: StageProgress | None) -> bool:
        """Whether ``stream`` starts with what is stored, all of which it is moved past."""
        for start in range(0, len(self.documents), _CHUNK):
            rows = np.arange(start, min(start + _CHUNK, len(self.documents)))
            if self.documents.fetch(rows) != list(islice(stream, len(rows))):
                return False
        if progress is not None:
            progress("encoding", len(self.documents), None)
        return True

    def _encode(
        self, documents: Iterable[Document], chunk_size: int, progress: StageProgress | None
    ) -> Iterator[tuple[list[Document], Representation]]:
        waiting: deque[Document] = deque()

        def contents() -> Iterator[Any]:
            for document in documents:
                waiting.append(document)
                yield self.content(document)

        told = None if progress is None else lambda count: progress("encoding", count, None)
        options: dict[str, Any] = {"chunk_size": chunk_size, "progress": told}
        stream: Iterator[Representation]
        if isinstance(self.model, LexicalModel):
            stream = self.model.stored(contents(), **options)
        else:
            stream = self.model.represent_stream(contents(), "document", **options)
        for part in stream:
            yield [waiting.popleft() for _ in range(len(part))], part

    def _add(self, documents: Iterable[Document], progress: StageProgress | None) -> None:
        for chunk, part in self._encode(documents, _CHUNK, progress):
            self._append(chunk, part)
        self.index.finish(progress)

    def _append(self, documents: list[Document], part: Representation) -> None:
        self.documents.add(documents)
        if isinstance(self.model, LexicalModel):
            self.model.keep(part.dim)
        self.index.add(part)
