"""The `Retriever`: the interface to a model, an index and its documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

from irkit.core.representation import Representation
from irkit.data import JSON, Document, DocumentsLike, QueriesLike, Vector
from irkit.errors import BadTypeError
from irkit.evaluation.run import Run
from irkit.index import IndexConfig, StageProgress, WindowsConfig
from irkit.index.object_store import staged
from irkit.index.state import snapshot
from irkit.model import Model
from irkit.retrieval import changing, searching
from irkit.retrieval.building import CHUNK, build_collection, copy_index
from irkit.retrieval.collection import AnyModel, Collection, LoadOptions, open_collection
from irkit.retrieval.explanation import Explanation, explain_document
from irkit.retrieval.fusing import Fuse
from irkit.retrieval.reranking import Candidates, RerankOptions, RerankRunOptions, rerank
from irkit.retrieval.searching import Filter, Hit, find_documents, make_run
from irkit.retrieval.selection import RankOptions, SearchOptions, parse_selection
from irkit.utils.uris import is_uri

if TYPE_CHECKING:
    from irkit.encoder_free import RM3


class Retriever:
    """Documents in an index on disk, searched with the model that encoded them.

    A retriever shows one committed state of the index, even while another process writes; `refresh` moves to
    the newest state. A change, in shards that of each document, is stored completely or, after any error, not
    at all. Any number of threads may search while another one changes or refreshes: a call sees one state.

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

    def __init__(self, collection: Collection, reopen: Callable[[], Retriever] | None = None) -> None:
        """Use `Retriever.build` or `Retriever.load`; ``reopen`` opens the same index in another process."""
        self.collection, self._reopen = collection, reopen
        self.store, self.index, self.documents = collection.store, collection.index, collection.documents

    @classmethod
    def build(
        cls,
        model: AnyModel | str | Path,
        documents: DocumentsLike,
        path: str | Path,
        *,
        index: str | Mapping[str, Any] | IndexConfig | None = None,
        chunk_size: int = CHUNK,
        overwrite: bool = False,
        shards: int | None = None,
        windows: Mapping[str, Any] | WindowsConfig | None = None,
        progress: StageProgress | None = None,
    ) -> Self:
        """Encode documents, streamed, and index them.

        If a build was killed, the same call resumes it after the last stored chunk.

        Args:
            model: A model; an argument of `Model.from_pretrained`; ``"bm25"``; or, for documents with
                representations that were computed elsewhere, ``"vectors"`` or ``"impacts"``, see
                `irkit.encoder_free`.
            documents: A source (see `irkit.data`); id -> text; or an iterable of `Document`, records
                such as ``{"_id": "1", "text": "..."}``, pairs of id and text, or texts, whose ids are
                their positions: "0", "1", ... For the model ``"vectors"``, vectors may replace texts.
            path: A new or empty directory, or the directory of an index to replace. Or the URI of one in an
                object store, such as ``"s3://bucket/notes"``, see `irkit.index.object_store`.
            index: ``"flat"`` (exact), ``"hnsw"``, ``"plaid"``, ``"auto"`` (chosen by the number of
                documents; reads 20,000 of them ahead) or another argument of `irkit.index.index_config`. The
                default is ``"inverted"`` for sparse representations, exact for BM25, and ``"flat"`` for
                others. A model with several heads gets an index for each, all of the given kind, or as
                ``{"kind": "several", "indexes": {"dense": "hnsw"}}`` says.
            chunk_size: Number of documents encoded and stored together.
            overwrite: Replace an existing index; it stays in use until the new one is complete.
            shards: Number of directories among which documents are divided, see `irkit.shards`.
            windows: Encode documents of any length in windows, see `irkit.index.WindowsConfig`; ``{}`` takes
                the length that the model reads. Each is found as one document, and `Hit.passage` tells the
                best window.
            progress: Called with the progress of each stage ("encoding", then the stages of the index), see
                `irkit.index.StageProgress`.

        Raises:
            StorageError: An index or something else is at ``path``, or the disk is full.
            BadTypeError: An argument has an impossible type; nothing is written.
            BadValueError: A document is malformed, an id comes twice, or a killed build of other documents is
                there (``overwrite`` discards it). For a file or a list this is checked before the encoding,
                and the message names the line.
            LockedError: Another process is writing there.
        """
        if is_uri(path):
            settings: Any = {"index": index, "chunk_size": chunk_size, "shards": shards, "windows": windows}
            with staged(str(path), overwrite) as folder:
                cls.build(model, documents, folder, overwrite=True, progress=progress, **settings).close()
            return cls.load(path, model if isinstance(model, Model) else None)
        return cls(
            build_collection(model, documents, path, index, chunk_size, overwrite, progress, shards, windows)
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: AnyModel | Mapping[str, Any] | str | Path | None = None,
        **options: Unpack[LoadOptions],
    ) -> Self:
        """Open an index.

        Args:
            path: Directory of the index; or its URI, of which a checked copy is opened that cannot be
                changed, see `irkit.index.object_store`.
            model: The model the index was built with. By default the model that the index names is loaded at
                its first use. ``{"k1": 1.2, "b": 0.75}`` changes these settings of BM25: weights are then
                computed in memory at the first search, and the files do not change.
            options: Device and precision of the model, and what is verified, see
                `irkit.retrieval.collection.LoadOptions`.

        Raises:
            StorageError: The path has no finished index, or no model.
            CorruptError: A file is missing, truncated or altered.
            BadTypeError: An option is unknown.
            BadValueError: The index was built with another model than ``model``.
        """
        collection = open_collection(path, model, options)
        if model is not None:
            collection.model  # noqa: B018 (loads and checks it)
        if isinstance(model, Model):
            return cls(collection)
        source = path if is_uri(path) else collection.store.path.absolute()
        return cls(collection, partial(cls.load, source, model, **options))

    @property
    def model(self) -> AnyModel:
        """The model, loaded at its first use; warns if only its query side differs from the build."""
        return self.collection.model

    @snapshot
    def save(self, path: str | Path) -> None:
        """Copy the state of the index that this object shows; the copy appears whole or not at all.

        Args:
            path: A new or empty directory; or a URI, see `build`.

        Raises:
            StorageError: The directory is not empty, or the disk is full.
        """
        copy_index(self.store, path)

    @overload
    def search(  # type: ignore[overload-overlap]
        self,
        queries: str | Vector,
        k: int = 10,
        filter: Filter | None = None,
        *,
        feedback: RM3 | None = None,
        fuse: Fuse | None = None,
        **options: Unpack[SearchOptions],
    ) -> list[Hit]: ...
    @overload
    def search(
        self,
        queries: Sequence[str | Vector] | Representation,
        k: int = 10,
        filter: Filter | None = None,
        *,
        feedback: RM3 | None = None,
        fuse: Fuse | None = None,
        **options: Unpack[SearchOptions],
    ) -> list[list[Hit]]: ...
    @snapshot
    def search(
        self,
        queries: str | Vector | Sequence[str | Vector] | Representation,
        k: int = 10,
        filter: Filter | None = None,
        *,
        feedback: RM3 | None = None,
        fuse: Fuse | None = None,
        **options: Unpack[SearchOptions],
    ) -> list[Hit] | list[list[Hit]]:
        """Return the ``k`` best documents of every query.

        Args:
            queries: One text or several; weights by term for `irkit.encoder_free.Impacts`; vectors or a
                `Representation` for `irkit.encoder_free.Vectors`.
            k: Maximum number of results, at least 1. Sparse models and BM25 return only documents that share
                a term with the query.
            filter: Ids, such as ``["d1", "d2"]``; or conditions on metadata, see `Documents.filter`, such as
                ``{"year": {">=": 2000}, "lang": ["de", "en"]}``, in which ``"_id": [...]`` stands for ids.
                Unknown ids match nothing.
            feedback: Expands queries of BM25 by terms of the documents found first, see
                `irkit.encoder_free.RM3`.
            fuse: For an index of several representations: how their hits are fused. ``"rrf"``, the default,
                adds up reciprocal ranks; weights by head, such as ``{"dense": 0.4, "sparse": 0.2}``, add up
                scores of the heads they name, see `irkit.retrieval.fusing.search_several`.
            options: See `irkit.retrieval.selection.SearchOptions`.

        Returns:
            The hits of one query, or a list of hits per query; best first, ties in the order of the
            documents.

        Raises:
            BadTypeError: An option is unknown.
            BadValueError: A number is out of range, the filter makes no sense, no document has the key to
                group by, or the model is another one.
        """
        selection = parse_selection("search", k, options, SearchOptions)
        return find_documents(self.collection, queries, selection, filter, feedback, fuse)

    @snapshot
    def run(
        self,
        queries: QueriesLike,
        k: int = 1000,
        filter: Filter | None = None,
        *,
        feedback: RM3 | None = None,
        fuse: Fuse | None = None,
        progress: Callable[[int], object] | None = None,
        **options: Unpack[RankOptions],
    ) -> Run:
        """Rank documents for many queries, as `search` does, but return only ids and scores.

        Args:
            queries: A source (see `irkit.data`); id -> text; or an iterable of `Query` or of pairs.
            k: Maximum number of results per query.
            filter: See `search`.
            feedback: See `search`.
            fuse: See `search`.
            progress: Called with the number of queries finished since its last call.
            options: See `irkit.retrieval.selection.RankOptions`.

        Raises:
            BadValueError: See `search`; or a query id comes twice.
        """
        selection = parse_selection("search", k, options, RankOptions)
        return make_run(self.collection, queries, selection, filter, feedback, fuse, progress)

    @overload
    def rerank(  # type: ignore[overload-overlap]
        self, queries: str, candidates: Candidates, k: int | None = None, **options: Unpack[RerankOptions]
    ) -> list[Hit]: ...
    @overload
    def rerank(
        self,
        queries: QueriesLike,
        candidates: Run,
        k: int | None = None,
        **options: Unpack[RerankRunOptions],
    ) -> Run: ...
    @overload
    def rerank(
        self,
        queries: Sequence[str],
        candidates: Sequence[Candidates],
        k: int | None = None,
        **options: Unpack[RerankOptions],
    ) -> list[list[Hit]]: ...
    @snapshot
    def rerank(
        self, queries: Any, candidates: Any, k: int | None = None, **options: Unpack[RerankOptions]
    ) -> list[Hit] | list[list[Hit]] | Run:
        """Rank candidates by exact scores of the model or of a teacher.

        Documents of the index are scored by their stored representations; only queries and other texts are
        encoded.

        Args:
            queries: One text or several; for a run, queries as for `run`.
            candidates: For one query: ids of documents of the index or hits, whose ids count; or documents:
                id -> text, or an iterable of `Document`, records or pairs. For several queries a list of
                these. Or the `Run` of a first stage.
            k: Maximum number of results per query; None returns all.
            options: See `irkit.retrieval.reranking.RerankOptions`; for a run, `RerankRunOptions`.

        Returns:
            Hits, as `search` returns them; for a run, a run. Documents that score -inf (they have no tokens)
            are left out.

        Raises:
            BadTypeError: An option is unknown.
            BadValueError: The index has no document of an id, the text of a query of the run is missing, a
                number is out of range, no candidate has the key to group by, or there are both an interaction
                and a teacher.
        """
        return rerank(self.collection, queries, candidates, k, options)

    @snapshot
    def explain(
        self, query: str | Vector, document: str | Document | Mapping[str, Any] | tuple[str, Any]
    ) -> Explanation:
        """Explain which tokens or terms of a document match which of the query.

        For a dense model, each match is a passage of the document, scored as a document of its own. For a
        model with token pooling, tokens and score are taken before pooling. For a model with several heads
        there is an explanation for each, see `Explanation.parts`.

        Args:
            query: A text; weights by term for `irkit.encoder_free.Impacts`.
            document: Id of a document of the index; or a `Document`, a record, or a pair of id and text.

        Raises:
            BadTypeError: The query is not a string.
            BadValueError: The index lacks the document, or vectors were computed elsewhere.
        """
        return explain_document(self.collection, query, document)

    @snapshot
    def facets(self, key: str, filter: Filter | None = None, k: int = 10) -> list[tuple[JSON, int]]:
        """Return the ``k`` most frequent values of a key of the metadata, and how many documents have each.

        Only documents that meet ``filter`` count, see `search`; `Documents.facets` explains the rest.
        """
        return self.documents.facets(key, None if filter is None else searching.parse_filter(filter), k)

    def add(self, documents: DocumentsLike, *, progress: StageProgress | None = None) -> None:
        """Add documents.

        Args:
            documents: See `build`; texts without ids are numbered from the number of documents ever added.
            progress: See `build`.

        Raises:
            BadValueError: An id comes twice or is in the index, or a document is malformed; nothing is added.
            LockedError: Another process is writing.
        """
        changing.add(self.collection, documents, progress)

    def remove(self, ids: str | Iterable[str]) -> None:
        """Remove documents; their bytes stay on disk until the index is built again.

        Raises:
            BadValueError: The index has no document of an id; nothing is removed.
        """
        changing.remove(self.collection, ids)

    def update(self, documents: DocumentsLike, *, progress: StageProgress | None = None) -> None:
        """Replace documents by others of the same ids, in one step for every reader.

        Args:
            documents: See `build`; they are held in memory.
            progress: See `build`.

        Raises:
            BadValueError: The index has no document of an id (use `add`), an id comes twice, or a document is
                malformed; nothing is replaced.
        """
        changing.update(self.collection, documents, progress)

    def refresh(self) -> bool:
        """Move to the newest stored state; return whether there was a newer one."""
        return self.store.refresh()

    def close(self) -> None:
        """Close the files."""
        self.store.close()

    @snapshot
    def stats(self) -> dict[str, Any]:
        """Return `Index.stats` (kind, documents, removed ones, bytes, ...) and the manifest of the model."""
        return self.index.stats() | {"model": self.store.meta["model"]}

    def __len__(self) -> int:
        """Return the number of documents that a search can find."""
        return int(self.index.live.sum())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path: another process opens the directory itself and sees its newest state."""
        if self._reopen is None:
            raise BadTypeError(
                f"pickling a Retriever: the model of {self.store.path} was given as an object, not by name; "
                "pickle Retriever.load(path), or Retriever.load(path, name)"
            )
        return self._reopen, ()

    def __repr__(self) -> str:
        kind, model = self.index.config.kind, self.store.meta["model"]["name"]
        return f"Retriever({str(self.store.path)!r}, {len(self)} documents, {kind}, {model!r})"
