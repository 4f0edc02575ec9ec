"""An index in several shards is one index: the same hits, scores, ties, filters, facets and explanations."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from irkit import Dense, Hybrid, Retriever
from irkit.data import Document
from irkit.encoder_free import BM25, RM3
from irkit.errors import BadTypeError, BadValueError, LockedError, StorageError
from irkit.index import Limits, compact, use_limits
from irkit.retrieval.searching import Hit
from irkit.shards import open_store, reshard
from irkit.shards.placement import shard_of
from irkit.utils.atomic import sync_all

DIM = 8
WORDS = [f"word{number}" for number in range(40)]
SMALL = Limits(
    dense_scan=30,
    dense_scan_per_hit=1,
    dense_points=8,
    faiss_scan=30,
    faiss_scan_per_hit=1,
    faiss_points=1,
    inverted_unlisted=10,
    plaid_uncompressed=100,
    plaid_hubs=8,
    flat_scan=20,
    flat_share=1,
)

# model and index by name
KINDS: dict[str, tuple[str, Any]] = {
    "bm25": ("bm25", None),
    "impacts": ("impacts", {"kind": "inverted", "dtype": "float32", "mode": "exact"}),
    "impacts-uint8": ("impacts", {"kind": "inverted", "dtype": "uint8", "mode": "exact"}),
    "sparse-flat": ("impacts", "flat"),
    "flat": ("dense", "flat"),
    "flat-int8": ("dense", {"kind": "flat", "dtype": "int8"}),
    "dense": ("dense", {"kind": "dense", "probes": 64, "candidates": 200}),
    "dense-codes": ("dense", {"kind": "dense", "keep": "none", "probes": 64, "candidates": 200}),
    "hnsw": ("dense", {"kind": "faiss", "factory": "hnsw", "ef_search": 300}),
    "pq": ("dense", {"kind": "faiss", "factory": "pq", "refine": 100}),
    "tokens-flat": ("tokens", "flat"),
    "tokens-int8": ("tokens", {"kind": "flat", "dtype": "int8"}),
    "plaid": ("tokens", {"kind": "plaid", "centroids": 16, "device": "cpu"}),
    "muvera": ("tokens", {"kind": "muvera", "repetitions": 4, "bits": 2, "candidates": 300}),
    "muvera-lists": (
        "tokens",
        {"kind": "muvera", "repetitions": 4, "bits": 2, "candidates": 20, "probes": 64},
    ),
}
APPROXIMATE = ("hnsw",)


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with use_limits(SMALL):
        yield


class Source:
    """Random documents and queries for a model; small whole numbers make many ties."""

    def __init__(self, model: str, seed: int) -> None:
        self.model, self.random, self.numbers = model, random.Random(seed), np.random.default_rng(seed)

    def document(self, name: str) -> dict[str, Any]:
        words = self.random.choices(WORDS, k=self.random.randint(1, 12))
        year, lang = self.random.choice([1999, 2000, 2001]), self.random.choice(["de", "en"])
        record: dict[str, Any] = {"_id": name, "text": " ".join(words), "metadata": {"year": year}}
        if self.random.random() < 0.5:
            record["metadata"]["lang"] = lang
        return record if self.model == "bm25" else record | {"vector": self.vector()}

    def vector(self) -> Any:
        if self.model == "impacts":
            return {word: self.random.randint(1, 3) for word in self.random.sample(WORDS, 6)}
        shape = (DIM,) if self.model == "dense" else (int(self.numbers.integers(1, 4)), DIM)
        return self.numbers.integers(-2, 3, shape).astype(np.float32)

    def query(self) -> Any:
        return " ".join(self.random.choices(WORDS, k=3)) if self.model == "bm25" else self.vector()

    @property
    def name(self) -> str:
        return self.model if self.model in ("bm25", "impacts") else "vectors"


def check_hits(ours: list[list[Hit]], theirs: list[list[Hit]], kind: str) -> None:
    """Compare hits bit by bit; those of graphs by their scores.

    The graphs of shards find as much as that of one index, or more, as a search looks at as many candidates
    in each. A graph returns any of equal scores.
    """
    if kind not in APPROXIMATE:
        assert ours == theirs
        return
    for first, second in zip(ours, theirs, strict=True):
        scores, wanted = (np.array([hit.score for hit in line]) for line in (first, second))
        assert len(scores) == len(wanted)
        assert (scores >= wanted).all()
        both = {hit.id: hit.score for hit in second}
        assert all(hit.score == both.get(hit.id, hit.score) for hit in first)


@contextlib.contextmanager
def elsewhere(many: Retriever) -> Iterator[None]:
    """Search as if other processes had the shards: each sends the scores that it computes."""
    many.index.searched_here = False
    try:
        yield
    finally:
        del many.index.searched_here


def check_same(one: Retriever, many: Retriever, source: Source, kind: str) -> None:
    """Compare everything that an index can be asked."""
    assert len(one) == len(many)
    assert [document.id for document in one.documents] == [document.id for document in many.documents]
    queries = [source.query() for _ in range(4)]
    filters: list[Any] = [None, {"year": {">=": 2000}}, {"$not": {"lang": "de"}}, ["d3", "d7", "d1", "no"]]
    for filter in filters:
        for k in (1, 10, 250):
            wanted = one.search(queries, k, filter)
            check_hits(many.search(queries, k, filter), wanted, kind)
            with elsewhere(many):
                check_hits(many.search(queries, k, filter), wanted, kind)
            assert [many.search(query, k, filter) for query in queries] == many.search(queries, k, filter)
    if kind not in APPROXIMATE:
        options: Any = {"offset": 3, "group_by": "year", "per_group": 2}
        assert many.search(queries[0], 5, **options) == one.search(queries[0], 5, **options)
    items = [(str(number), query) for number, query in enumerate(queries)]
    if source.model == "bm25":
        assert list(many.run(dict(items), 20)) == list(one.run(dict(items), 20))
        assert many.search(queries, 10, feedback=RM3(3, 5)) == one.search(queries, 10, feedback=RM3(3, 5))
    ids = [document.id for document in one.documents][::7]
    check_hits([many.rerank(queries[0], ids)], [one.rerank(queries[0], ids)], kind)
    if source.model in ("bm25", "impacts"):
        assert many.explain(queries[0], ids[0]) == one.explain(queries[0], ids[0])
    for filter in filters[:3]:
        assert many.facets("year", filter) == one.facets("year", filter)
    assert many.documents.metadata_keys() == one.documents.metadata_keys()


def change(retrievers: list[Retriever], source: Source, step: int) -> None:
    """Make one random change of all indexes."""
    ids = [document.id for document in retrievers[0].documents]
    chosen = source.random.sample(ids, 5)
    kind = source.random.choice(["add", "update", "remove"])
    new = [f"n{step}-{number}" for number in range(6)] if kind == "add" else chosen
    documents = [source.document(name) for name in new]
    for retriever in retrievers:
        if kind == "remove":
            retriever.remove(chosen)
        else:
            getattr(retriever, kind)(documents)


def check_kind(kind: str, tmp_path: Path, shards: tuple[int, ...], changes: int, seed: int = 0) -> None:
    model, index = KINDS[kind]
    source = Source(model, seed)
    documents = [source.document(f"d{number}") for number in range(120)]
    built = [Retriever.build(source.name, documents, tmp_path / "one", index=index)]
    for count in shards:
        Retriever.build(source.name, documents, tmp_path / str(count), index=index, shards=count).close()
        built.append(Retriever.load(tmp_path / str(count)))
    one, *rest = built
    for many in rest:
        check_same(one, many, source, kind)
    for step in range(changes):
        change(built, source, step)
        if step % 10 == 0 or step == changes - 1:
            for many in rest:
                check_same(one, many, source, kind)
    if model in ("dense", "tokens"):
        one.close()
        compact(one.store.path)  # what is left out decides how many candidates a filter takes
        one = Retriever.load(one.store.path)
    for many, count in zip(rest, (*shards[1:], 3), strict=True):
        reshard(many.store.path, count)
        again = Retriever.load(many.store.path)
        assert again.stats()["shards"] == count
        assert again.stats()["removed"] == 0
        check_same(one, again, source, kind)
        change_again = source.document(f"last{count}")
        again.add([change_again])
        assert again.documents[f"last{count}"].text == change_again["text"]


@pytest.mark.parametrize("kind", ["bm25", "muvera-lists"])
def test_shards_equal_one_index(kind: str, tmp_path: Path) -> None:
    check_kind(kind, tmp_path, (3,), 2)


@pytest.mark.parametrize("keep_tokens", [pytest.param(False, marks=pytest.mark.slow), True])
def test_shards_of_plaid_choose_the_candidates_of_one_index(keep_tokens: bool, tmp_path: Path) -> None:
    """Each step of a search drops documents here, and centroids are trained on a part of the tokens."""
    source = Source("tokens", 6)
    documents = [source.document(f"d{number}") for number in range(400)]
    config = {"kind": "plaid", "centroids": 16, "train_size": 512, "keep_tokens": keep_tokens}
    cut = {"plaid_scan": 1, "plaid_candidates": 12, "plaid_visited": 2, "plaid_margin": 1}
    with use_limits(replace(SMALL, **cut)):
        built = [
            Retriever.build(
                "vectors", documents, tmp_path / str(count), index=config | {"device": "cpu"}, shards=count
            )
            for count in (None, 1, 2, 5)
        ]
        for retriever in built[1:]:
            assert retriever.index.store.parts[0].rows("centroids.bin") == 16
        for step in range(3):
            queries = [*[source.query() for _ in range(8)], np.empty((0, DIM), np.float32)]
            for filter, k in itertools.product((None, {"year": 2000}, {"lang": "de"}), (1, 3)):
                first, *others = [retriever.search(queries, k, filter) for retriever in built]
                assert all(hits == first for hits in others)
                for retriever in built[1:]:
                    with elsewhere(retriever):
                        assert retriever.search(queries, k, filter) == first
            for retriever in built:
                retriever.remove([f"d{number}" for number in range(step, 400, 23)])
            new = [source.document(f"n{step}-{number}") for number in range(9)]
            for retriever in built:
                retriever.add(new)  # not compressed


CANDIDATES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {"kind": "dense"}),
    "dense-float32-bits": ("dense", {"kind": "dense", "keep": "float32", "bits": 2, "metric": "euclidean"}),
    "dense-int8": ("dense", {"kind": "dense", "keep": "int8", "metric": "cosine"}),
    "dense-codes": ("dense", {"kind": "dense", "keep": "none"}),
    "muvera": ("tokens", {"kind": "muvera", "candidates": 30, "repetitions": 6, "bits": 2}),
    "plaid": ("tokens", {"kind": "plaid", "device": "cpu"}),
    "tokens-int8": ("tokens", {"kind": "flat", "dtype": "int8"}),
}


def real_vectors(kind: str, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Vectors around 40 centres, one in ten as it was before, or texts of such tokens."""
    centres = np.random.default_rng(0).standard_normal((40, 24))

    def near(n: int) -> np.ndarray:
        return (centres[rng.integers(0, 40, n)] + 0.5 * rng.standard_normal((n, 24))).astype(np.float32)

    rows = [near(1)[0] if kind == "dense" else near(int(rng.integers(0, 6))) for _ in range(count)]
    return [rows[number // 2] if number % 10 == 9 else row for number, row in enumerate(rows)]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "dense-int8" else pytest.mark.slow) for kind in CANDIDATES],
)
def test_shards_choose_the_candidates_of_one_index(kind: str, tmp_path: Path) -> None:
    """With default settings a search drops most documents by their codes, the same whatever the shards."""
    model, config = CANDIDATES[kind]
    rng = np.random.default_rng(5)

    def make(names: list[str]) -> list[dict[str, Any]]:
        rows = zip(names, real_vectors(model, len(names), rng), strict=True)
        return [
            {"_id": name, "text": "", "vector": row, "metadata": {"year": int(rng.integers(5))}}
            for name, row in rows
        ]

    documents = make([f"d{number}" for number in range(1500)])
    built = [
        Retriever.build("vectors", documents, tmp_path / str(count), index=config, shards=count)
        for count in (None, 1, 2, 5)
    ]

    def check() -> None:
        one, *others = built
        queries = real_vectors(model, 12, rng)
        turns = itertools.product((None, {"year": {">": 1}}, {"year": 3}), (1, 10, 60))
        for turn, (filter, k) in enumerate(turns):
            wanted = one.search(queries, k, filter)
            assert all(many.search(queries, k, filter) == wanted for many in others)
            many = others[(turn + turn // 3) % 3]
            with elsewhere(many):
                assert many.search(queries, k, filter) == wanted
        assert all(many.search([], 10) == [] for many in others)
        ids = [document.id for document in one.documents][::40]
        reranked = one.rerank(queries[:1], [ids])
        assert all(many.rerank(queries[:1], [ids]) == reranked for many in others)

    check()
    for step in range(2):
        names = [f"d{number}" for number in range(step, 1500, 29)]
        changed, added = make(names), make([f"n{step}-{number}" for number in range(40)])
        for retriever in built:
            retriever.update(changed)
            retriever.remove(names[::2])
            retriever.add(added)
        check()
    for retriever, count in zip(built, (None, 3, 5, 2), strict=True):
        retriever.close()
        if count is None:
            compact(retriever.store.path)
        else:
            reshard(retriever.store.path, count)
    built = [Retriever.load(tmp_path / str(count)) for count in (None, 1, 2, 5)]
    check()


@pytest.mark.parametrize("kind", ["dense", pytest.param("muvera", marks=pytest.mark.slow), "plaid"])
def test_a_shard_may_have_all_candidates(kind: str, tmp_path: Path) -> None:
    """All documents of a topic are in one shard, so chance does not tell how many candidates it has."""
    config, rng = CANDIDATES[kind][1], np.random.default_rng(8)
    centres = 2 * rng.standard_normal((6, 24))

    def near(topic: int) -> np.ndarray:
        shape = 24 if kind == "dense" else (4, 24)
        return (centres[topic] + rng.standard_normal(shape)).astype(np.float32)

    names = [f"d{number}" for number in range(3000)]
    documents = [
        {"_id": name, "text": "", "vector": near(2 * int(rng.integers(3)) + shard)}
        for name, shard in zip(names, shard_of(names, 2).tolist(), strict=True)
    ]
    cut = {"dense_scan": 1, "dense_scan_per_hit": 1}
    cut |= {"plaid_uncompressed": 100, "plaid_scan": 1, "plaid_candidates": 40, "plaid_margin": 1}
    with use_limits(replace(Limits(), **cut)):
        one, many = [
            Retriever.build("vectors", documents, tmp_path / str(count), index=config, shards=count)
            for count in (None, 2)
        ]
        queries = [near(number % 6) for number in range(24)]
        for k in (1, 10):
            wanted = one.search(queries, k)
            assert many.search(queries, k) == wanted
            with elsewhere(many):
                assert many.search(queries, k) == wanted


def test_shards_of_a_graph_find_the_hits_of_one_index_if_all_documents_are_candidates(tmp_path: Path) -> None:
    """Vectors without ties; the shards of few documents are scanned."""
    rng = np.random.default_rng(3)
    documents = [
        {"_id": f"d{number}", "text": "", "vector": row, "metadata": {"year": number % 3}}
        for number, row in enumerate(rng.standard_normal((150, DIM)).astype(np.float32))
    ]
    config = {"kind": "faiss", "factory": "hnsw", "ef_search": 400}
    one, *others = [
        Retriever.build("vectors", documents, tmp_path / str(count), index=config, shards=count)
        for count in (None, 2, 5)
    ]
    queries = list(rng.standard_normal((10, DIM)).astype(np.float32))
    for filter, many in itertools.product((None, {"year": 1}), others):
        for ours, theirs in zip(
            many.search(queries, 10, filter), one.search(queries, 10, filter), strict=True
        ):
            assert ours == theirs


def test_a_hybrid_over_shards_equals_one_over_single_indexes(tmp_path: Path) -> None:
    source, vectors = Source("bm25", 8), Source("dense", 8)
    documents = [source.document(f"d{number}") for number in range(80)]
    numbers = [vectors.vector() for _ in documents]

    class Encoded:
        """Searches vectors by texts, so that a `Hybrid` takes them."""

        def content(self, item: Any) -> Any:
            return np.resize([len(item.text), item.text.count("1")], DIM).astype(np.float32)

    def build(shards: int | None) -> Hybrid:
        name = str(shards)
        dense = [record | {"vector": numbers[at]} for at, record in enumerate(documents)]
        words = Retriever.build("bm25", documents, tmp_path / f"words{name}", shards=shards)
        other = Retriever.build("vectors", dense, tmp_path / f"dense{name}", shards=shards and shards + 1)
        other.collection.content = Encoded().content  # type: ignore[method-assign]
        return Hybrid([words, other], "minmax", depth=30)

    one, many = build(None), build(3)
    for step in range(2):
        queries = {str(number): source.query() for number in range(6)}
        texts = list(queries.values())
        for options in ({}, {"offset": 3, "group_by": "year", "per_group": 2}, {"fields": ["title"]}):
            selecting: Any = options
            assert many.search(texts, 8, **selecting) == one.search(texts, 8, **selecting)
        for filter in ({"year": {">=": 2000}}, {"$not": {"lang": "de"}}, ["d3", "d7"]):
            assert many.search(texts, 8, filter) == one.search(texts, 8, filter)
        assert list(many.run(queries, 20)) == list(one.run(queries, 20))
        for first, second in zip(one.retrievers, many.retrievers, strict=True):
            assert isinstance(first, Retriever)
            assert isinstance(second, Retriever)
            assert second.facets("lang", {"year": 2000}) == first.facets("lang", {"year": 2000})
            for retriever in (first, second):
                retriever.remove([f"d{step}", f"d{step + 9}"])


def test_a_hybrid_over_shards_explains_as_one_over_single_indexes(tmp_path: Path) -> None:
    source = Source("bm25", 9)
    documents = [source.document(f"d{number}") for number in range(40)]

    def build(shards: int | None) -> Hybrid:
        parts = ((BM25(), documents), (BM25(k1=2.0), documents[1:]))
        return Hybrid(
            Retriever.build(model, some, tmp_path / f"{number}-{shards}", shards=shards)
            for number, (model, some) in enumerate(parts)
        )

    one, many = build(None), build(3)
    query = source.query()
    for hit in one.search(query, 5):
        first, second = many.explain(query, hit.id)
        assert [first, second] == one.explain(query, hit.id)
        assert first is not None
        assert first.score == pytest.approx(one.retrievers[0].rerank(query, [hit.id])[0].score)
    assert many.explain(query, "d0")[1] is None  # the second one does not hold it
    assert None not in many.explain(query, ("other", documents[0]["text"]))
    with pytest.raises(BadValueError, match="no index of the Hybrid holds 'none'"):
        many.explain(query, "none")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_shards_equal_one_index_after_many_changes(kind: str, tmp_path: Path) -> None:
    check_kind(kind, tmp_path, (1, 2, 5), 100, seed=1)


def die_at(commit: int, work: Callable[[], object]) -> None:
    """Run ``work`` in a child that ends, as by SIGKILL, before the given commit of a store."""
    child = os.fork()
    if not child:
        count = itertools.count()

        def counted(paths: Collection[Path]) -> None:  # the last step before the manifest gets its name
            if next(count) == commit:
                os._exit(9)
            sync_all(paths)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("irkit.index.store.sync_all", counted)
            try:
                work()
            finally:
                os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.parametrize("verb", ["add", "update", "remove"])
def test_an_interrupted_change_is_whole_for_each_document_and_can_be_repeated(
    verb: str, tmp_path: Path
) -> None:
    source = Source("bm25", 3)
    documents = [source.document(f"d{number}") for number in range(40)]
    names = [f"n{number}" if verb == "add" else f"d{number}" for number in range(9)]
    metadata = {"tags": ("a", "b"), "by": {1: "x"}}  # JSON has no tuples, and no numbers as keys
    new = [source.document(name) | {"text": f"{name} fresh", "metadata": metadata} for name in names]
    given: Any = names if verb == "remove" else new
    one = Retriever.build("bm25", documents, tmp_path / "one")
    getattr(one, verb)(given)
    Retriever.build("bm25", documents, tmp_path / "whole", shards=3).close()
    last = len(set(shard_of(names, 3)))  # shards that change; the whole is the last to know
    for commit in range(last + 2):
        path = tmp_path / str(commit)
        shutil.copytree(tmp_path / "whole", path)
        die_at(commit, lambda path=path: getattr(Retriever.load(path), verb)(given))  # type: ignore[misc]
        left = Retriever.load(path)
        texts = {document.id: document.text for document in left.documents}
        assert all(texts[item["_id"]] == item["text"] for item in documents[9:])
        old = {item["_id"]: item["text"] for item in documents[:9]}
        for item in new:
            before = old.get(item["_id"])
            assert texts.get(item["_id"]) in (before, None if verb == "remove" else item["text"])
        if commit > last:  # it was complete
            continue
        getattr(left, verb)(given)
        again = Retriever.load(path)
        for query in ("fresh", "word1 word2", "n3 d3"):
            ours, theirs = (
                sorted((-hit.score, hit.id, hit.text) for hit in retriever.search(query, 50))
                for retriever in (again, one)
            )
            assert ours == theirs
        assert {document.id for document in again.documents} == {document.id for document in one.documents}


@pytest.mark.parametrize("kind", ["flat", "dense"])
def test_an_addition_that_was_interrupted_in_this_process_leaves_nothing_to_later_ones(
    kind: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(5)

    def vectors(prefix: str, count: int) -> list[tuple[str, Any]]:
        return [(f"{prefix}{number}", rng.standard_normal(DIM).astype(np.float32)) for number in range(count)]

    first, second = vectors("a", 30), vectors("c", 7)
    many = Retriever.build("vectors", first, tmp_path / "many", index=kind, shards=3)
    rows = Dense(torch.zeros(7, DIM))

    def add(prefix: str, count: int, work: Callable[[], object]) -> None:
        with many.store.update():
            many.documents.add([Document(f"{prefix}{number}", "") for number in range(count)])
            work()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add("b", 7, interrupt)  # before the vectors are stored
    for _ in range(2):  # as many as were interrupted, then as many as were added last
        with pytest.raises(BadValueError, match="needs their ids and texts, too"):
            many.index.add(rows)
        if "c0" not in many.documents:
            many.add(second)
    with pytest.raises(BadValueError, match="needs their ids"):
        add("e", 8, lambda: many.index.add(rows))  # fewer vectors than documents
    one = Retriever.build("vectors", first, tmp_path / "one", index=kind)
    one.add(second)
    queries = [vector for _, vector in vectors("q", 5)]
    for each in (many, Retriever.load(tmp_path / "many", verify=True)):
        assert each.search(queries, 40) == one.search(queries, 40)


def arrays_of(path: Path) -> list[Any]:
    """Checksums of all arrays of all shards."""
    store = open_store(path)
    return [
        {name: (entry.rows, entry.crc32) for name, entry in each.committed.arrays.items()}
        for each in (store, *store.parts)
    ]


def test_a_killed_build_ends_as_one_that_was_not(tmp_path: Path) -> None:
    source = Source("bm25", 4)
    documents = [source.document(f"d{number}") for number in range(60)]

    def build(path: Path) -> None:
        Retriever.build("bm25", documents, path, shards=3, chunk_size=20).close()

    build(tmp_path / "whole")
    for commit in range(1, 30, 4):
        path = tmp_path / str(commit)
        die_at(commit, lambda path=path: build(path))  # type: ignore[misc]
        if not (path / "irkit.json").exists() and path.exists():
            with pytest.raises(StorageError, match="its build has not finished"):
                Retriever.load(path)
        if not (path / "irkit.json").exists():
            build(path)
        assert arrays_of(path) == arrays_of(tmp_path / "whole")
        assert len(list(path.glob("shard-*"))) == 3


@pytest.mark.slow
def test_a_killed_build_is_resumed_in_smaller_chunks(tmp_path: Path) -> None:
    source = Source("bm25", 4)
    documents = [source.document(f"d{number}") for number in range(50)]

    def build(path: Path, chunk: int) -> None:
        Retriever.build("bm25", documents, path, shards=2, chunk_size=chunk).close()

    build(tmp_path / "whole", 20)
    queries = [source.query() for _ in range(9)]
    with Retriever.load(tmp_path / "whole") as whole:
        wanted = whole.search(queries, 20)
    for commit in range(4, 14):
        path = tmp_path / str(commit)
        die_at(commit, lambda path=path: build(path, 20))  # type: ignore[misc]
        if not (path / "irkit.json").exists():
            build(path, 6)
        with Retriever.load(path, verify=True) as resumed:
            assert [document.id for document in resumed.documents] == [each["_id"] for each in documents]
            assert resumed.search(queries, 20) == wanted


def test_a_failed_step_of_a_change_undoes_the_change_in_all_shards(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    items = [(f"d{number}", rng.standard_normal((2, 4)).astype(np.float32)) for number in range(20)]
    new = [(f"n{number}", rng.standard_normal((2, 4)).astype(np.float32)) for number in range(8)]
    many = Retriever.build("vectors", items, tmp_path / "index", index="plaid", shards=3)
    before, query = many.search(items[0][1], 20), items[0][1]
    name = next(name for name in map(str, range(99)) if shard_of([name], 3)[0] == 0)  # not the last shard
    large = (name, np.full((2, 4), 1e6, np.float32))  # for float16
    failed = pytest.raises(StorageError, match="a step of this update failed")
    with failed, many.store.update(), contextlib.suppress(BadValueError):
        many.add([*new, large])
    for each in (many, Retriever.load(tmp_path / "index", verify=True)):
        assert (len(each), each.search(query, 20)) == (20, before)
    many.add(new)
    assert len(many.search(query, 30)) == 28


def test_an_addition_may_leave_a_shard_out(tmp_path: Path) -> None:
    """The tokens of all shards but one wait for centroids, and no shard keeps its tokens otherwise."""
    rng = np.random.default_rng(0)

    def tokens(name: str, count: int) -> tuple[str, Any]:
        return name, rng.standard_normal((count, 8)).astype(np.float32)

    names = [f"n{number}" for number in range(40)]
    left_out = shard_of(names, 3)[0]
    kept = [name for name, shard in zip(names, shard_of(names, 3), strict=True) if shard != left_out]
    with use_limits(replace(SMALL, narrow=20)):
        first = [tokens(f"d{number}", 12) for number in range(30)]
        second = [tokens(name, 12) for name in kept]
        one = Retriever.build("vectors", first, tmp_path / "one", index="plaid")
        many = Retriever.build("vectors", first, tmp_path / "many", index="plaid", shards=3)
        queries = [vector for _, vector in (tokens("q", 4) for _ in range(6))]
        for retriever in (one, many):
            retriever.add(second)
        assert many.search(queries, 20) == one.search(queries, 20)
        many.close()
        reshard(tmp_path / "many", 2)  # also where one shard has had no wide codes to add
        assert Retriever.load(tmp_path / "many").search(queries, 20) == one.search(queries, 20)


def test_no_queries_have_no_hits(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    items = [(f"d{number}", rng.standard_normal(8).astype(np.float32)) for number in range(400)]
    with use_limits(SMALL):
        for index in ("flat", "dense"):
            many = Retriever.build("vectors", items[:390], tmp_path / index, index=index, shards=2)
            many.add(items[390:])
            assert many.index.search(Dense(torch.zeros(0, 8)), 3).rows.shape == (0, 3)


def test_a_killed_reshard_leaves_the_index_and_can_be_repeated(tmp_path: Path) -> None:
    source = Source("bm25", 5)
    documents = [source.document(f"d{number}") for number in range(40)]
    one = Retriever.build("bm25", documents, tmp_path / "one")
    for commit in (3, 11):
        path = tmp_path / str(commit)
        Retriever.build("bm25", documents, path, shards=2).close()
        die_at(commit, lambda path=path: reshard(path, 3))  # type: ignore[misc]
        assert Retriever.load(path).stats()["shards"] == 2
        reshard(path, 3)
        assert Retriever.load(path).stats()["shards"] == 3
        check_same(one, Retriever.load(path), source, "bm25")
        assert len(list(path.glob("shard-*"))) == 3


def test_one_index_becomes_shards_and_saves(tmp_path: Path) -> None:
    source = Source("tokens", 6)
    documents = [source.document(f"d{number}") for number in range(60)]
    one = Retriever.build("vectors", documents, tmp_path / "one", index="plaid")
    one.save(tmp_path / "copy")
    reshard(tmp_path / "copy", 3)
    many = Retriever.load(tmp_path / "copy")
    assert many.stats()["shards"] == 3
    many.save(tmp_path / "saved")
    check_same(one, Retriever.load(tmp_path / "saved"), source, "plaid")
    reshard(tmp_path / "copy", 2)
    check_same(one, many, source, "plaid")  # it shows what it has opened
    with pytest.raises(StorageError, match="load it again"):
        many.refresh()


def test_equal_facets_are_in_order_of_addition_after_a_reshard(tmp_path: Path) -> None:
    """Rows with codes are copied shard by shard."""
    source = Source("dense", 8)
    documents = [source.document(f"d{number}") | {"metadata": {"n": number % 7}} for number in range(56)]
    Retriever.build("vectors", documents, tmp_path / "many", index=KINDS["dense"][1], shards=3).close()
    reshard(tmp_path / "many", 2)
    assert Retriever.load(tmp_path / "many").facets("n") == [(number, 8) for number in range(7)]


@pytest.mark.parametrize("kind", ["dense", "plaid", "flat"])
def test_a_shard_without_documents_is_written_and_filled(kind: str, tmp_path: Path) -> None:
    model, index = KINDS[kind]
    source = Source(model, 8)
    documents = [source.document(f"d{number}") for number in range(60)]
    many = Retriever.build("vectors", documents, tmp_path / "many", index=index, shards=2)
    many.remove([f"d{number}" for number in range(1, 60)])
    reshard(tmp_path / "many", 4)  # one has the document
    reshard(tmp_path / "many", 3)
    many = Retriever.load(tmp_path / "many", verify=True)
    assert [document.id for document in many.documents] == ["d0"]
    many.add(documents[1:])
    assert len(many.search(source.query(), 100)) == 60


def test_wrong_shards_are_refused(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(20)]
    path, other = tmp_path / "index", tmp_path / "other"
    for shards in (0, 1001, True, 2.5):
        with pytest.raises((BadValueError, BadTypeError)):
            Retriever.build("bm25", texts, path, shards=shards)  # type: ignore[arg-type]
    assert not path.exists()
    Retriever.build("bm25", texts, path, shards=2).close()
    Retriever.build("bm25", texts[:9], other, shards=2).close()
    with pytest.raises(StorageError, match="there is one already"):
        Retriever.build("bm25", texts, path, shards=2)
    with pytest.raises(StorageError, match="reshard"):
        compact(path)
    retriever = Retriever.load(path)
    with pytest.raises(BadValueError, match="in the index already"):
        retriever.add([("3", "again")])
    with pytest.raises(BadValueError, match="given more than once"):
        retriever.add([("x", "new"), ("x", "new")])
    with pytest.raises(BadValueError, match="no document 'z'"):
        retriever.remove(["1", "z"])
    assert len(retriever) == 20
    with retriever.store.update(), pytest.raises(LockedError):
        Retriever.load(path).add([("y", "new")])
    # a shard of another index, in another place, or missing
    first, second = sorted(path.glob("shard-*"))
    first.rename(tmp_path / "aside")
    with pytest.raises(StorageError, match=r"its shard shard-1-000, 1 of 2, is missing"):
        Retriever.load(path)
    shutil.copytree(second, first)
    with pytest.raises(StorageError, match="shard-1-000 is shard"):
        Retriever.load(path)


def test_shards_from_the_command_line(tmp_path: Path, notes: Path, command: Callable[..., Any]) -> None:
    out = str(tmp_path / "out")
    assert command("index", "bm25", str(notes), "--out", out, "--shards", "3")[0] == 0
    plain = command("search", out, "--text", "search index")
    assert command("reshard", out, "--shards", "2")[0] == 0
    assert command("search", out, "--text", "search index") == plain
    assert json.loads(command("info", out, "--json")[1])["shards"] == 2
    with Retriever.load(out) as retriever:
        before = len(retriever)
        retriever.remove([hit.id for hit in retriever.search("search index", k=2)])
    kept = command("search", out, "--text", "search index")
    code, _, err = command("compact", out)
    assert (code, "2 removed ones are gone" in err) == (0, True), err
    assert command("search", out, "--text", "search index") == kept
    facts = json.loads(command("info", out, "--json")[1])
    assert (facts["shards"], facts["documents"], facts["removed"]) == (2, before - 2, 0)
    for verb in ("reshard --shards 2", "compact"):
        assert command(*verb.split(), str(tmp_path / "no"))[0] == 2


def batch(step: int) -> list[tuple[str, str]]:
    return [(f"s{step}-{number}", f"step{step} text{number}") for number in range(5)]


def change_until_killed(path: Path, log: Path) -> None:
    """Add batches, remove the first of each, and write every finished change to the log."""
    retriever, done = Retriever.load(path), len(log.read_text().splitlines())
    for change in itertools.count(done):
        step, is_removal = divmod(change, 2)
        if is_removal:
            retriever.remove([f"s{step}-0"])
        else:
            retriever.add(batch(step))
        with log.open("a") as stream:
            stream.write("done\n")


def check_log(retriever: Retriever, done: int) -> None:
    """Check that the first changes, which were acknowledged, are stored; the next one may be."""
    there = {document.id: document.text for document in retriever.documents}
    for change in range(0, done, 2):
        (removed, first), *others = batch(change // 2)
        assert all(there[name] == text for name, text in others)
        assert there.get(removed) in ((None,) if change + 1 < done else (None, first))
    assert all(hit.id in there for hit in retriever.search("first text1 step0", 500))


@pytest.mark.slow
def test_no_acknowledged_change_is_lost(tmp_path: Path) -> None:
    """Kill a process that changes shards at random moments; whoever goes on repeats its last change."""
    numbers, path, log = random.Random(7), tmp_path / "index", tmp_path / "log"
    Retriever.build("bm25", [("d", "first")], path, shards=3).close()
    log.touch()
    for _ in range(30):
        child = os.fork()
        if not child:
            with contextlib.suppress(BadValueError):  # the last change was complete, but not in the log
                change_until_killed(path, log)
            os._exit(3)
        time.sleep(numbers.uniform(0.05, 0.6))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            with log.open("a") as stream:
                stream.write("done\n")
        check_log(Retriever.load(path), len(log.read_text().splitlines()))
    assert len(log.read_text().splitlines()) > 20
