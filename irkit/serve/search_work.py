"""Answer searches: one index or several fused, ranked again, explained and highlighted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from math import isfinite
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from irkit.data import Document
from irkit.encoder_free import RM3, Vectors
from irkit.index import SeveralIndex
from irkit.model import Model
from irkit.model.cross_encoder import CrossEncoder
from irkit.ray_engine.ray_search import ShardedRetriever
from irkit.ray_engine.shard_actors import Answers
from irkit.remote.remote_retriever import RemoteRetriever
from irkit.retrieval.explanation import Explanation
from irkit.retrieval.hybrid import Hybrid
from irkit.retrieval.retriever import Retriever
from irkit.retrieval.scorer import ModelScorer, Scorer
from irkit.retrieval.searching import Hit
from irkit.retrieval.selection import SearchOptions, parse_selection
from irkit.serve.meters import SHARDS
from irkit.serve.problems import Problem
from irkit.serve.query_words import highlight, make_snippet, rank_passages

JSONObject = dict[str, Any]
AnyRetriever: TypeAlias = Retriever | RemoteRetriever
"""What is served."""
OWN = ("k", "highlights", "snippet", "explain")
"""Options of a request that others, which are searched together with it, need not share."""
_RANKING = ("offset", "threshold", "group_by", "per_group")


class Job(NamedTuple):
    """What a request asks of an index: queries, and keys and values of a `SearchRequest`."""

    queries: list[Any]
    options: JSONObject


class Served(Protocol):
    """The models and indexes of a server by name; `irkit.serve.catalogue.Catalogue` is one."""

    @property
    def models(self) -> Mapping[str, Any]:
        """Models."""

    @property
    def indexes(self) -> Mapping[str, Any]:
        """Indexes."""


def one_state(retriever: AnyRetriever) -> AbstractContextManager[Any]:
    """Return a context that shows one state of an index; an engine elsewhere has no such states."""
    return retriever.store.snapshot() if isinstance(retriever, Retriever) else nullcontext()


@contextmanager
def _watch_shards(parts: Mapping[str, AnyRetriever], partial: bool) -> Iterator[Mapping[str, Answers]]:
    """Let shards on Ray miss inside the block, if ``partial`` is set; give and count what they answer."""
    with ExitStack() as stack:
        watched = {
            part: stack.enter_context(retriever.watch(partial))
            for part, retriever in parts.items()
            if isinstance(retriever, ShardedRetriever)
        }
        try:
            yield watched
        finally:
            for part, answers in watched.items():
                for outcome in ("asked", "repeated", "missing"):
                    count = getattr(answers, outcome)
                    SHARDS.labels(part, outcome).inc(len(count) if outcome == "missing" else count)


def find(served: Served, name: str, retriever: AnyRetriever, jobs: Sequence[Job]) -> list[list[JSONObject]]:
    """Return for each job the result of each query; all jobs are searched together.

    Args:
        served: Finds the other indexes and the models that the options name.
        name: Name of the index.
        retriever: The index.
        jobs: With options that differ in `OWN` alone; in ``k`` only if a list of hits is the beginning of a
            longer one.
    """
    # one search with the options of all jobs
    queries = [query for job in jobs for query in job.queries]
    options = {**jobs[0].options, "k": max(job.options["k"] for job in jobs)}
    shows_text = any(job.options["highlights"] or job.options["snippet"] for job in jobs)
    if shows_text and options["fields"] is not None:
        options["fields"] = [*options["fields"], "title", "text"]
    fuse, rerank = options["fuse"], options["rerank"]
    if (fuse or rerank) and not all(isinstance(query, str) for query in queries):
        raise Problem(422, "fuse and rerank take texts as queries")
    if isinstance(retriever.model, Vectors):  # a search would take a list of too few axes as a single query
        retriever.model.encode_representation(queries, "query")
    with ExitStack() as stack:
        parts = _open(served, name, retriever, options, stack)
        watched = stack.enter_context(_watch_shards(parts, options["partial"]))
        lines = iter(_rank(served, name, parts, queries, options))
        found = []
        # give each job its results
        for job in jobs:
            results = [
                {"query": query, "hits": [_hit(hit) for hit in next(lines)[: job.options["k"]]]}
                for query in job.queries
            ]
            if len(parts) > 1 or rerank:
                for part, other_index in parts.items():
                    _add_scores(part, other_index, job.queries, results)
            for part, other_index in parts.items():
                _add_scores_of_heads(part, other_index, job.queries, results)
            _annotate(name, retriever, results, job.options)
            missing = [
                f"{part}/{shard}" for part, answers in watched.items() for shard in sorted(answers.missing)
            ]
            for result in results if missing else ():
                result["missing"] = missing
            found.append(results)
    return found


def _open(
    served: Served, name: str, retriever: AnyRetriever, options: JSONObject, stack: ExitStack
) -> dict[str, AnyRetriever]:
    """Open every index that a search names, all of one state until the stack ends; ``name`` comes first."""
    fuse, rerank = options["fuse"], options["rerank"]
    named = (*(fuse["indexes"] if fuse else ()), *([rerank["by"]] if rerank else ()))
    for part in sorted({name, *named} & served.indexes.keys()):  # in one order, so that no two wait for ever
        stack.enter_context(served.indexes[part].turn())
    if isinstance(retriever, RemoteRetriever):
        retriever = served.indexes[name].retriever()  # a reload may have closed the other one
    parts: dict[str, AnyRetriever] = {name: retriever}
    for other in named:
        if other in served.indexes:
            parts[other] = served.indexes[other].retriever()
            stack.enter_context(one_state(parts[other]))
    return parts


def _rank(
    served: Served, name: str, parts: Mapping[str, AnyRetriever], queries: list[Any], options: JSONObject
) -> Sequence[Sequence[Hit]]:
    """Return the hits of each query: of an index or several fused, and ranked again if asked for."""
    # what the first stage searches, and how
    fuse, rerank, k = options["fuse"], options["rerank"], options["k"]
    selecting = _selecting(options)
    selection = parse_selection("search", k, selecting, SearchOptions)
    asking: Any = {} if options["heads"] is None else {"fuse": options["heads"]}
    if options["feedback"] is not None:
        if fuse:
            raise Problem(422, "feedback expands the queries of one index; expected a search without fuse")
        asking["feedback"] = RM3(**options["feedback"])
    first: Any = parts[name]
    if fuse:
        others = fuse["indexes"]
        unknown = [other for other in others if other not in parts]
        if unknown or len({name, *others}) <= len(others):
            problem = f"names {unknown[0][:60]!r}, which is no index" if unknown else "names an index twice"
            raise Problem(422, f"fuse {problem}; known: {', '.join(served.indexes)}")
        first = Hybrid(
            [parts[part] for part in (name, *others)],
            fuse["method"],
            weights=fuse["weights"],
            depth=fuse["depth"],
        )
    if not rerank:
        lists: list[list[Hit]] = first.search(queries, k, options["filter"], **asking, **selecting)
        return lists

    # the second stage ranks all hits of the first one down to a depth
    depth, by = max(rerank["depth"], selection.stop), rerank["by"]
    lists = first.search(queries, depth, options["filter"], fields=["id"], **asking)
    second = parts.get(by, parts[name])
    if by in parts:
        teacher: Scorer | None = None  # by the vectors that the index stores
    elif by in served.models:
        model = served.models[by].model
        teacher = model if isinstance(model, CrossEncoder) else ModelScorer(model)
    else:
        raise Problem(422, f"rerank by {by[:60]!r}: there is no index or model of this name")
    ids = [find_known(second, [hit.id for hit in line]) for line in lists]
    return second.rerank(queries, ids, k, teacher=teacher, **selecting)


def _selecting(options: JSONObject) -> Any:
    """Return the options of `Retriever.search` and `rerank` that a request has as a `Selection`."""
    ranking = {key: options[key] for key in _RANKING if options[key] is not None}
    if options["group_by"] is None and ranking["per_group"] == 1:
        del ranking["per_group"]
    return {**ranking, "fields": options["fields"]}


def _annotate(name: str, retriever: AnyRetriever, results: list[JSONObject], options: JSONObject) -> None:
    """Add highlights, snippets and explanations to hits, and remove fields that were not asked for."""
    fields = options["fields"]
    unwanted = [] if fields is None else [field for field in ("title", "text") if field not in fields]
    for result in results:
        query = result["query"] if isinstance(result["query"], str) else ""
        for hit in result["hits"]:
            if options["highlights"] and query:
                hit["highlight"] = highlight(query, hit["title"], hit["text"])
            if options["snippet"]:
                hit["snippet"] = make_snippet(query, hit["title"], hit["text"])
            if options["explain"] and find_known(retriever, [hit["id"]]):
                hit["explanation"] = explain(name, retriever, result["query"], hit["id"])
            hit.update(dict.fromkeys(unwanted, ""))


def rerank_ids(options: JSONObject, retriever: AnyRetriever) -> list[JSONObject]:
    """Rank documents of an index for each query, as the route ``rerank`` answers a `RerankRequest`."""
    queries, asking = options["queries"], _selecting(options)
    if options["fuse"] is not None:
        asking["fuse"] = options["fuse"]
    return [
        {"query": query, "hits": [_hit(hit) for hit in line]}
        for query, line in zip(
            queries, retriever.rerank(queries, options["ids"], options["k"], **asking), strict=True
        )
    ]


def explain(name: str, retriever: AnyRetriever, query: Any, document: Any) -> JSONObject:
    """Explain the score of a document, as the route ``explain`` answers.

    Args:
        name: Name of the index.
        retriever: The index.
        query: A text, or weights of terms.
        document: Id of a document of the index, or a `Document`.
    """
    if isinstance(retriever, RemoteRetriever):
        raise Problem(422, f"index {name} is in another engine, whose scores are not explained")
    if isinstance(document, str) and document not in retriever.documents:
        raise Problem(404, f"index {name} has no document {document[:60]!r}")
    explained = retriever.explain(query, document)
    description = _describe(explained, retriever.model.kind, query)
    if explained.parts:
        heads = cast(Model, retriever.model).heads
        description["parts"] = {
            head: _describe(part, heads[head].kind, query) for head, part in explained.parts.items()
        }
    return description | {"index": name, "id": document if isinstance(document, str) else document.id}


def _describe(explained: Explanation, kind: str, query: Any) -> JSONObject:
    """Return what the route ``explain`` answers of an index, or of a head, of a kind."""
    description = explained.to_dict() | {"view": explained.words().view(), "words": []}
    passages: list[JSONObject] = []
    if kind == "dense":  # its matches are passages
        passages = [
            {"start": match.document.start, "end": match.document.end, "score": match.score}
            for match in explained.matches
        ]
        description["matches"] = []
    elif kind != "several":
        passages = rank_passages(explained)
        if isinstance(query, str):
            description["words"] = explained.words().to_dict()["matches"]
    part = {"dense": "passages", "multi_vector": "tokens", "several": "heads"}.get(kind, "terms")
    return description | {"part": part, "passages": passages}


def fetch_known(retriever: AnyRetriever, ids: list[str]) -> dict[str, Document]:
    """Return the documents with these ids by id; ids that the index lacks are left out."""
    if isinstance(retriever, RemoteRetriever):
        by_id = {document.id: document for document in retriever.fetch(ids)}
        return {name: by_id[name] for name in ids if name in by_id}
    rows = retriever.documents.find(ids)
    return {document.id: document for document in retriever.documents.fetch(rows[rows >= 0])}


def find_known(retriever: AnyRetriever, ids: list[str]) -> list[str]:
    """Return the ids that the index has, in their order."""
    if isinstance(retriever, RemoteRetriever):
        return [*fetch_known(retriever, ids)]
    rows = retriever.documents.find(ids)
    return [name for name, row in zip(ids, rows.tolist(), strict=True) if row >= 0]


def _add_scores(part: str, retriever: AnyRetriever, queries: list[Any], results: list[JSONObject]) -> None:
    """Add to each hit its exact score in an index, under ``part``; None if the index lacks the document."""
    if not all(isinstance(query, str) for query in queries):
        return
    ids = [find_known(retriever, [hit["id"] for hit in result["hits"]]) for result in results]
    for result, hits in zip(results, retriever.rerank(queries, ids), strict=True):
        scores = {hit.id: hit.score for hit in hits}
        for hit in result["hits"]:
            hit.setdefault("parts", {})[part] = scores.get(hit["id"])


def _add_scores_of_heads(
    part: str, retriever: AnyRetriever, queries: list[Any], results: list[JSONObject]
) -> None:
    """Add to each hit its exact score by each head of an index with several representations."""
    if not isinstance(retriever, Retriever) or not isinstance(retriever.index, SeveralIndex):
        return
    encoded: Any = cast(Model, retriever.model).encode_representation(queries, "query")
    for number, result in enumerate(results):
        rows = retriever.documents.find([hit["id"] for hit in result["hits"]])[None]
        for head, one in retriever.index.parts.items():
            scores = one.rescore(encoded.parts[head][number : number + 1], rows)[0].tolist()
            for hit, score in zip(result["hits"], scores, strict=True):
                hit.setdefault("parts", {})[f"{part}/{head}"] = score if isfinite(score) else None


def _hit(hit: Hit) -> JSONObject:
    answer = {
        "id": hit.id,
        "score": hit.score,
        "title": hit.title,
        "text": hit.text,
        "metadata": dict(hit.metadata),
    }
    return answer if hit.passage is None else answer | {"passage": hit.passage._asdict()}
