"""Retriever: a model, an index and the documents in it, as one object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, cast, overload

from irkit.arguments import check_counts, check_flags, check_functions
from irkit.building import CHUNK, add_documents, begin_build, check_given
from irkit.data import Document, Query, Vector
from irkit.data.given import Collection, Queries, given_documents, given_queries
from irkit.errors import BadTypeError, BadValueError, StorageError
from irkit.explanation import Explanation, TermWeights, explain, match_terms
from irkit.index import Documents, Flat, Hits, IndexConfig, StageProgress, Store, index_config, open_index
from irkit.index.place import check_place, directory_of
from irkit.index.state import pinned
from irkit.lexical import BM25, Impacts, LexicalModel, Vectors
from irkit.lookup import Filter, Hit, find_rows, given_strings, read_hits
from irkit.model import Device, Model
from irkit.model_choice import (
    AnyModel,
    changed_settings,
    check_described,
    check_model,
    check_placement,
    load_model,
    named_model,
)
from irkit.representation import Representation, Sparse
from irkit.reranking import Candidates, Interaction, RerankOptions, rerank
from irkit.run import Run
from irkit.searching import find_hits, given_contents, read_run

if TYPE_CHECKING:
    from irkit.feedback import RM3
    from irkit.training.teachers import Teacher

__all__ = ["Hit", "Retriever"]

_UNCHANGED = "nothing was changed"


class Retriever:
    """Searches documents with the model that encoded them; everything is kept in one directory.

    A reader shows one committed state, also while another process writes; `refresh` moves to the newest.
    A change is stored whole or, on any error, not at all. Any number of threads may search one object while
    one changes or refreshes it: every call sees one committed state.

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
        chunk_size: int = CHUNK,
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
            BadTypeError: An argument is of a type that makes no sense; nothing is touched.
            BadValueError: A document is malformed, an id comes twice, or a killed build of other documents
                is there (``overwrite`` discards it). Of a file or a list that is found out before anything is
                encoded; the message names the line.
            LockedError: Another process is writing there.
        """
        check_counts("building an index", chunk_size=chunk_size)
        check_flags("building an index", overwrite=overwrite)
        check_functions("building an index", progress=progress)
        check_place(directory_of(path), overwrite)
        index = None if index is None else index_config(index)
        check_given(documents)
        model, store, remaining = begin_build(load_model(model), documents, path, index, overwrite, progress)
        try:
            retriever = cls(store, lambda: model)
            add_documents(retriever, remaining, chunk_size, progress)
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
        if device is not None or not isinstance(dtype, str) or dtype != "float32":
            check_placement(device, dtype)
        store = Store.open(path, verify=verify)
        if not {"model", "build"} <= set(store.meta):
            raise StorageError(
                f"opening {path}: no index of a Retriever; expected one with a model and texts"
            )
        saved = store.meta["model"]
        check_described(store.path, saved)
        chosen = changed_settings(saved, model) if isinstance(model, Mapping) else model
        find = partial(named_model, store.path, saved) if chosen is None else partial(load_model, chosen)
        retriever = cls(store, partial(find, device=device, dtype=dtype))
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
        check_model(self.store.path, saved, model)
        if isinstance(model, BM25) and model.fingerprint != saved["fingerprint"]:
            cast(Flat, self.index).formula = model.config.k1, model.config.b
        return model.open(self.store) if isinstance(model, LexicalModel) else model

    @pinned
    def save(self, path: str | Path) -> None:
        """Copy the index as this object shows it; the copy appears whole or not at all.

        Args:
            path: A new or empty directory.

        Raises:
            StorageError: Something is there, or the disk is full.
        """
        check_place(directory_of(path), False, "saving an index to")
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
    @pinned
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
        contents, single = given_contents("searching", self.model, queries)
        found = self._find(contents, k, filter, feedback)
        results = [hits for some in found for hits in read_hits(self.documents, some)]
        return results[0] if single else results

    @pinned
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
        check_functions("search", progress=progress)
        named = list(given_queries(queries))
        found = self._find([self.content(query) for query in named], k, filter, feedback)
        return read_run(self.documents, [query.id for query in named], found, progress)

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
    @pinned
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
        return rerank(self, queries, candidates, k, interaction, teacher, progress)

    @pinned
    def explain(
        self, query: str | Vector, document: str | Document | Mapping[str, Any] | tuple[str, Any]
    ) -> Explanation:
        """Which tokens or terms of a document matched those of the query, see `irkit.explanation`.

        Of a model with token pooling these are the tokens before it, and so is the score.

        Args:
            query: A text; of `irkit.lexical.Impacts` weights by term.
            document: Id of a document of the index; or a `Document`, a record, or a pair of id and text.

        Raises:
            BadTypeError: The query is not a string.
            BadValueError: There is no such document, or the model makes one dense vector of a text.
        """
        if isinstance(document, str):
            advice = "expected an id of the index; Retriever.explain takes other texts as a Document"
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
        check_functions("adding documents", progress=progress)
        with self.store.update():
            self._check_build()
            add_documents(self, given_documents(documents, len(self.documents)), progress=progress)

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
        check_functions("updating documents", progress=progress)
        items = list(given_documents(documents))
        with self.store.update():
            self._check_build()
            names = [item.id for item in items]
            self.index.remove(find_rows(self.documents, names, "updating documents", _UNCHANGED))
            add_documents(self, items, progress=progress)

    def refresh(self) -> bool:
        """Move to the newest state that is stored; whether there was a newer one."""
        return self.store.refresh()

    def close(self) -> None:
        """Let go of the files."""
        self.store.close()

    # ---- what it is ----

    @pinned
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

    def _find(
        self, contents: list[Any], k: int, filter: Filter | None, feedback: RM3 | None
    ) -> Iterator[Hits]:
        self._check_build()
        return find_hits(self, contents, k, filter, feedback)

    def _check_build(self) -> None:
        self.store.check_uncut()
        if self.store.meta.get("build") != self._build:
            raise StorageError(
                f"index {self.store.path}: it was replaced by one of another model or kind; load it again"
            )
