"""The judged collections that a model is measured on; `irkit.training.measuring` measures it."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, PositiveInt, StringConstraints, model_validator

from irkit.config import Config, as_list
from irkit.data import (
    Document,
    Qrels,
    Query,
    Source,
    corpus_of,
    read_documents,
    read_qrels,
    read_queries,
)
from irkit.errors import BadValueError, ConfigError
from irkit.evaluation.measures import Evaluation, cutoffs, evaluate, names_of
from irkit.evaluation.run import Run
from irkit.heads.multi_vector_config import TokenPooling
from irkit.index.index_kinds import AnyIndexConfig, index_config
from irkit.training.teachers import load_teacher

_BEIR_13 = {
    "ArguAna": "arguana",
    "Climate-FEVER": "climate-fever",
    "DBPedia": "dbpedia-entity/test",
    "FEVER": "fever/test",
    "FiQA": "fiqa/test",
    "HotpotQA": "hotpotqa/test",
    "NFCorpus": "nfcorpus/test",
    "NQ": "nq",
    "Quora": "quora/test",
    "SCIDOCS": "scidocs",
    "SciFact": "scifact/test",
    "Touche": "webis-touche2020/v2",
    "TREC-COVID": "trec-covid",
}
_CQADUPSTACK = (
    *("android", "english", "gaming", "gis", "mathematica", "physics", "programmers", "stats", "tex"),
    *("unix", "webmasters", "wordpress"),
)


def _named_index(choice: Any) -> Any:
    return index_config(choice) if isinstance(choice, str) else choice


class SecondPass(Config):
    """A second, costlier model that scores the best documents of the first again.

    Attributes:
        scorer: Any teacher, see `irkit.training.teachers.load_teacher`, such as ``cross-encoder:NAME``.
        top: Number of best documents per query that the second pass scores. The other documents keep their
            order and rank after them.

    Source: Multi-Vector Attention Models for Deep Re-ranking, table 6.
    """

    scorer: str
    top: PositiveInt


class EvaluationConfig(Config):
    """A judged collection that a model is measured on.

    Attributes:
        source: BEIR folder, ``ir_datasets:ID`` or any other source of documents, queries and judgments that
            `irkit.data` reads.
        split: Split of the judgments of a folder.
        name: Name in the results; the last part of ``source`` by default.
        measures: Measures by their names in ir-measures, separated by spaces; the first chooses the best
            model.
        k: Number of documents retrieved per query; no measure may look at more.
        dtype: Precision of the encoder, see `Model.from_pretrained`.
        documents: Search only this many documents: the judged ones, and others drawn at random. The values
            are then higher than on all documents, and comparable only with each other.
        run: Rerank this run, in a file of TREC or of JSON lines: each query scores only the documents that
            the run has for it.
        document_length: Number of tokens at which documents are cut; None cuts them as in training.
        token_pooling: How a multi-vector model pools the vectors of texts; None pools as in training.
        index: Search an index of this kind, such as ``plaid``, or with these settings; None searches exactly.
        second_pass: Another model that scores the best documents again; None leaves them as they are.
        group: Name of a group. Averages count the mean of a group as one collection.
        drop_identical_ids: Ignore documents that have the id of the query, as BEIR does.
        at_end: Measure only the final model; the collection must not choose it.
    """

    source: str
    split: str | None = None
    name: str = ""
    measures: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)] = "nDCG@10"
    k: PositiveInt = 100
    dtype: Literal["float32", "bfloat16", "int8", "auto"] = "float32"
    documents: PositiveInt | None = None
    run: str | None = None
    document_length: PositiveInt | None = None
    token_pooling: TokenPooling | None = None
    index: Annotated[AnyIndexConfig, BeforeValidator(_named_index)] | None = None
    second_pass: SecondPass | None = None
    group: str = ""
    drop_identical_ids: bool = False
    at_end: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.run and self.documents:
            raise ValueError("'run' has its own documents; leave out 'documents'")
        if self.run and self.index:
            raise ValueError("'run' is reranked, which takes no 'index'; leave one out")
        return self

    @property
    def title(self) -> str:
        """Name of the collection in the results."""
        return self.name or Path(self.source).name

    @property
    def measure(self) -> str:
        """The first of the measures, which chooses the best model."""
        return names_of(self.measures)[0]


def expand_suites(collections: Iterable[EvaluationConfig]) -> list[EvaluationConfig]:
    """Replace ``source: beir-13`` and ``source: beir-14`` by the collections of BEIR that are public.

    The other keys of such an entry apply to every collection. ``beir-13`` is what SPLADE and many others
    measure on. ``beir-14`` also has the 12 parts of CQADupStack, one group.

    Raises:
        ValueError: Such an entry has a key that only one collection can have.

    Source: Thakur et al. 2021, "BEIR: A Heterogeneous Benchmark for Zero-shot Evaluation of Information
    Retrieval Models", https://arxiv.org/abs/2104.08663.

    Examples:
        >>> [len(expand_suites([EvaluationConfig(source=name)])) for name in ("beir-13", "beir-14")]
        [13, 25]
    """
    return [part for collection in collections for part in _expand(collection)]


def parse_collections(written: Any) -> list[EvaluationConfig]:
    """Return the collections of ``evaluation`` in a recipe: of one entry, or of a list.

    Raises:
        ConfigError: A key or a value of an entry is unknown.
    """
    return expand_suites(EvaluationConfig.parse(entry) for entry in as_list(written))


def _expand(entry: EvaluationConfig) -> list[EvaluationConfig]:
    suite = entry.source
    if suite not in ("beir-13", "beir-14"):
        return [entry]
    if unfit := [key for key in ("name", "split", "run", "group") if getattr(entry, key)]:
        raise ValueError(f"{suite} is {_count(suite)} collections; {unfit[0]!r} is for one of them")
    parts: list[tuple[str, str, dict[str, str]]] = [(name, path, {}) for name, path in _BEIR_13.items()]
    if suite == "beir-14":
        group = {"group": "CQADupStack"}
        parts += [(f"CQADupStack {name}", f"cqadupstack/{name}", group) for name in _CQADUPSTACK]
    shared = {} if "drop_identical_ids" in entry.model_fields_set else {"drop_identical_ids": True}
    return [
        entry.model_copy(update={**shared, "source": f"ir_datasets:beir/{path}", "name": name, **more})
        for name, path, more in parts
    ]


def _count(suite: str) -> int:
    return int(suite.removeprefix("beir-"))


Collections = Annotated[list[EvaluationConfig], BeforeValidator(as_list), AfterValidator(expand_suites)]
"""Field of a recipe: one collection, or several."""


@dataclass(frozen=True)
class JudgedCollection:
    """A collection whose documents, queries and judgments fit each other.

    Attributes:
        config: What to measure.
        queries: The judged queries.
        qrels: The judgments.
        source: All documents.
        chosen: Ids of the documents that are searched; None for all.
        total: Number of documents that are searched.
        corpus: Key of all documents; collections of the same documents have the same key.
        candidates: Numbers of the queries that may find each document, by id; None if all queries may.
    """

    config: EvaluationConfig
    queries: list[Query]
    qrels: Qrels
    source: Source[Document]
    chosen: frozenset[str] | None
    total: int
    corpus: str
    candidates: Mapping[str, list[int]] | None = None

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a document that are compared."""
        if self.candidates is not None:
            return sum(map(len, self.candidates.values()))
        return len(self.queries) * self.total

    def documents(self) -> Iterator[Document]:
        """Read the documents that are searched."""
        return (document for document in self.source if self.chosen is None or document.id in self.chosen)


def open_collections(configs: Sequence[EvaluationConfig]) -> list[JudgedCollection]:
    """Read queries and judgments, and check that they fit the documents.

    Raises:
        StorageError: A file cannot be read.
        BadValueError: A measure is unknown, no query or no judged document is in the collection, or a run
            has none of the queries or documents that the collection lacks.
        ConfigError: Two collections have the same name, or a measure looks at more documents than ``k``.
    """
    titles = [config.title for config in configs]
    if len(set(titles)) < len(titles):
        raise ConfigError(
            f"evaluation: the collections are named {', '.join(titles)}; give each a name of its own"
        )
    return [_open(config) for config in configs]


def _check_settings(config: EvaluationConfig) -> None:
    """Refuse settings that would fail only after training, or measure something else."""
    evaluate({"q": {"d": 1.0}}, {"q": {"d": 1}}, config.measures)  # a misspelt measure fails now
    for name, cutoff in cutoffs(config.measures).items():
        if cutoff > config.k:
            raise ConfigError(
                f"evaluation of {config.title}: {name} looks at {cutoff} documents per query, but only "
                f"{config.k} are retrieved; set k: {cutoff}"
            )
    if config.second_pass is not None:
        load_teacher(config.second_pass.scorer, device="cpu")  # a missing model, too


def _open(config: EvaluationConfig) -> JudgedCollection:
    _check_settings(config)
    qrels = read_qrels(config.source, config.split)
    queries = [query for query in read_queries(config.source, config.split) if query.id in qrels]
    source = read_documents(config.source)
    if source.once:
        raise BadValueError(f"evaluation: {config.source} can be read only once; save it to a file")
    if not queries:
        raise BadValueError(f"evaluation: none of the queries of {config.source} is judged; check split")
    # count documents, judged documents and candidates
    corpus = corpus_of(config.source)
    judged = {identifier for query in queries for identifier in qrels[query.id]}
    candidates = None if config.run is None else _read_candidates(config.run, queries)
    total = n_judged = n_candidates = 0
    for document in source:
        total, n_judged = total + 1, n_judged + (document.id in judged)
        n_candidates += candidates is not None and document.id in candidates
    if not n_judged:
        raise BadValueError(f"evaluation: no judged document is among the {total:,} of {config.source}")
    # rerank the documents of a run
    if candidates is not None:
        if missing := len(candidates) - n_candidates:
            raise BadValueError(
                f"evaluation: {missing:,} of the {len(candidates):,} documents of {config.run} are not in "
                f"{config.source}; expected a run over this collection"
            )
        return JudgedCollection(
            config, queries, qrels, source, frozenset(candidates), n_candidates, corpus, candidates
        )
    # or search all documents, or a sample with the judged ones
    chosen = None
    if config.documents is not None and config.documents < total:
        others = (document.id for document in source if document.id not in judged)
        chosen = frozenset(judged) | set(heapq.nsmallest(config.documents - n_judged, others, _random_order))
        total = max(config.documents, n_judged)
    return JudgedCollection(config, queries, qrels, source, chosen, total, corpus)


def _read_candidates(path: str, queries: Sequence[Query]) -> dict[str, list[int]]:
    """Read which queries, by number, a run has each document for.

    Raises:
        StorageError: The run cannot be read.
        BadValueError: The run is malformed or has no document for any of the queries.
    """
    run = Run.read(path)
    candidates: dict[str, list[int]] = {}
    for number, query in enumerate(queries):
        for document in run.columns(query.id)[0] if query.id in run else ():
            candidates.setdefault(document, []).append(number)
    if not candidates:
        raise BadValueError(
            f"evaluation: {path} has no document for any of the {len(queries):,} judged queries"
        )
    return candidates


def _random_order(identifier: str) -> bytes:
    """Return the sort key of an id for a random order that is always the same."""
    return hashlib.blake2b(identifier.encode(), digest_size=8).digest()


def summarize(
    evaluations: Mapping[str, Evaluation], groups: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Compute the means of each measure over the collections.

    Args:
        evaluations: Results by the title of the collection.
        groups: Names of groups by title, see `EvaluationConfig`.

    Returns:
        Arithmetic means by measure. If there are several collections, also their geometric mean as
        ``geometric_measure``, and each of their values as ``collection_measure``; a group is one collection.
    """
    columns: dict[str, dict[str, list[float]]] = {}  # values by measure, then by collection or group
    for title, evaluation in evaluations.items():
        name = (groups or {}).get(title) or title
        for measure, value in evaluation.mean.items():
            columns.setdefault(measure, {}).setdefault(name, []).append(value)
    values = {m: {name: sum(v) / len(v) for name, v in row.items()} for m, row in columns.items()}
    means = {measure: sum(row.values()) / len(row) for measure, row in values.items()}
    for measure, row in values.items():
        if len(row) > 1:
            means[f"geometric_{measure}"] = geometric_mean(row.values())
            means |= {f"{name}_{measure}": value for name, value in row.items()}
    return means


def geometric_mean(values: Iterable[float]) -> float:
    """Compute the geometric mean of numbers of at least 0; it is 0 if one of them is 0."""
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values)) if all(value > 0 for value in values) else 0.0
