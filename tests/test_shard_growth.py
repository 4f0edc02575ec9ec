"""Shards that grow have the codec that one index of the same documents has, after crashes, too."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_shards import SMALL, arrays_of, die_at, elsewhere, real_vectors

from irkit import Retriever
from irkit.index import compact, use_limits
from irkit.shards import reshard

LIMITS = replace(SMALL, plaid_scan=1, plaid_candidates=24, plaid_visited=4, plaid_margin=2)

# representation and index by name
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense-float32": ("dense", {"kind": "dense", "keep": "float32", "candidates": 20}),
    "dense-bits": ("dense", {"kind": "dense", "keep": "float16", "bits": 2, "metric": "euclidean"}),
    "dense-int8": ("dense", {"kind": "dense", "keep": "int8", "metric": "cosine", "candidates": 20}),
    "dense-codes": ("dense", {"kind": "dense", "keep": "none", "candidates": 20}),
    "muvera": ("tokens", {"kind": "muvera", "candidates": 15, "repetitions": 6, "bits": 2}),
    "plaid": ("tokens", {"kind": "plaid", "nbits": 4, "device": "cpu"}),
    "faiss": ("dense", {"kind": "faiss", "factory": "IVF8,PQ6x4fs", "nprobe": 3, "refine": 2}),
    "plaid-tokens": ("tokens", {"kind": "plaid", "keep_tokens": True, "device": "cpu"}),
}
SOME = [pytest.param(kind, marks=() if kind == "dense-codes" else pytest.mark.slow) for kind in KINDS]


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with use_limits(LIMITS):
        yield


class Source:
    """Random documents and queries of a kind."""

    def __init__(self, kind: str) -> None:
        self.model, self.rng = KINDS[kind][0], np.random.default_rng(3)

    def documents(self, prefix: str, count: int) -> list[dict[str, Any]]:
        return [
            {"_id": f"{prefix}{number}", "text": "", "vector": row, "metadata": {"year": number % 5}}
            for number, row in enumerate(self.vectors(count))
        ]

    def vectors(self, count: int) -> list[np.ndarray]:
        return real_vectors(self.model, count, self.rng)


def versions(retriever: Retriever) -> list[int]:
    """Return the versions of the codecs of all shards, each once, ascending."""
    index: Any = retriever.index
    return sorted({part.codec_version for part in getattr(index, "parts", [index])})


def coded(retriever: Retriever) -> int:
    """Return the number of rows that have codes, or are in structures of FAISS."""
    index: Any = retriever.index
    parts = getattr(index, "parts", [index])
    return sum(part.covered if index.config.kind == "faiss" else part.coded for part in parts)


def check(one: Retriever, others: list[Retriever], source: Source) -> None:
    """Compare hits and scores bit by bit."""
    queries = source.vectors(8)
    for many in others:
        assert versions(many) == versions(one)
        assert coded(many) == coded(one)
    for filter, k in itertools.product((None, {"year": {">": 1}}, {"year": 3}), (1, 10)):
        wanted = one.search(queries, k, filter)
        for many in others:
            assert many.search(queries, k, filter) == wanted
            with elsewhere(many):
                assert many.search(queries, k, filter) == wanted
    ids = [document.id for document in one.documents][::40]
    for many in others:
        assert many.rerank(queries[:1], [ids]) == one.rerank(queries[:1], [ids])


@pytest.mark.parametrize("kind", SOME)
def test_shards_grow_as_one_index(kind: str, tmp_path: Path) -> None:
    source, index = Source(kind), KINDS[kind][1]
    documents = source.documents("d", 60)
    built = [
        Retriever.build("vectors", documents, tmp_path / str(count), index=index, shards=count)
        for count in (None, 1, 2, 5)
    ]
    one, *others = built
    check(one, others, source)
    seen = versions(one)
    for step, count in enumerate((120, 20, 150, 30, 500)):
        new = source.documents(f"s{step}-", count)
        for retriever in built:
            retriever.add(new)
        check(one, others, source)
        if step % 2:
            for retriever in built:
                retriever.remove([f"d{number}" for number in range(step, 60, 7)])
                retriever.update(new[:9])
            check(one, others, source)
        seen += versions(one)
    assert len({*seen}) > 1  # trained again
    # without removed rows, then grown again
    one.close()
    compact(one.store.path)
    one = Retriever.load(one.store.path)
    for number, (many, count) in enumerate(zip(others, (2, 5, 3), strict=True)):
        reshard(many.store.path, count)
        others[number] = Retriever.load(many.store.path)
    check(one, others, source)
    for step, count in enumerate((200, 1000)):
        new = source.documents(f"last{step}-", count)
        for retriever in (one, *others):
            retriever.add(new)
        check(one, others, source)
    assert versions(one) > seen[-1:]


@pytest.mark.slow
def test_lists_are_made_when_one_index_makes_them(tmp_path: Path) -> None:
    """Rows of a few additions have none; they are more than a twentieth of the rows of some shards."""
    source, index = Source("plaid"), KINDS["plaid"][1] | {"centroids": 32}
    documents = source.documents("d", 1500)
    built = [
        Retriever.build("vectors", documents, tmp_path / str(count), index=index, shards=count)
        for count in (None, 2, 5)
    ]
    one, *others = built
    unlisted = []
    for step in range(4):
        new = source.documents(f"s{step}-", 60)
        for retriever in built:
            retriever.add(new)
        check(one, others, source)
        listed = one.index.listed  # type: ignore[attr-defined]
        for many in others:
            assert sum(part.listed for part in many.index.parts) == listed  # type: ignore[attr-defined]
        unlisted.append(one.index.coded - listed)  # type: ignore[attr-defined]
    assert 0 in unlisted
    assert max(unlisted) > 0


def best_scores(retriever: Retriever, queries: list[np.ndarray]) -> list[list[tuple[float, str]]]:
    """Return scores and ids of hits; an interrupted addition has numbered documents in another order."""
    return [sorted((-hit.score, hit.id) for hit in hits) for hits in retriever.search(queries, 10)]


def recall(left: Retriever, queries: list[np.ndarray]) -> float:
    """Return the share of the 10 best documents that are found; check that their scores are what they are."""
    ids = [document.id for document in left.documents]
    found = 0
    for query in queries:
        hits, best = left.search(query, 10), left.rerank(query, ids)
        with elsewhere(left):
            assert left.search(query, 10) == hits
        scores = {hit.id: hit.score for hit in best}
        assert [hit.score for hit in hits] == pytest.approx([scores[hit.id] for hit in hits], rel=1e-5)
        found += len({hit.id for hit in hits} & {hit.id for hit in best[:10]})
    return found / (10 * len(queries))


@pytest.mark.parametrize("kind", SOME)
def test_shards_of_which_some_lack_the_newest_codec_are_searched_and_get_it(
    kind: str, tmp_path: Path
) -> None:
    """A process is killed before each commit of a change that trains."""
    source, index = Source(kind), KINDS[kind][1]
    documents, new = source.documents("d", 60), source.documents("n", 340)
    queries = [query for query in source.vectors(9) if len(query)]  # all documents score 0 without tokens
    Retriever.build("vectors", documents, tmp_path / "whole", index=index, shards=3).close()
    shutil.copytree(tmp_path / "whole", tmp_path / "undisturbed")
    undisturbed = Retriever.load(tmp_path / "undisturbed")
    old = versions(undisturbed)
    undisturbed.add(new)
    wanted, newest = best_scores(undisturbed, queries), versions(undisturbed)
    usual = recall(undisturbed, queries)
    for commit, expected in enumerate((old, old + newest, old + newest, newest)):
        path = tmp_path / str(commit)
        shutil.copytree(tmp_path / "whole", path)
        die_at(commit, lambda path=path: Retriever.load(path).add(new))  # type: ignore[misc]
        left = Retriever.load(path)
        assert versions(left) == expected
        assert recall(left, queries) > 0.8 * usual
        if len(expected) > 1:  # another change, a reshard
            ids = {document.id for document in left.documents}
            for name in ("changed", "resharded"):
                copy = tmp_path / f"{name}{commit}"
                shutil.copytree(path, copy)
                if name == "resharded":
                    reshard(copy, 2)
                other = Retriever.load(copy)
                if name == "changed":
                    other.remove("d0")
                    assert versions(other) == expected
                    assert recall(other, queries) > 0.8 * usual
                    other.index.finish()
                trains = name == "resharded" and kind == "faiss"  # on the rows that are left
                assert versions(other) == ([len(ids)] if trains else newest)
                assert coded(other) == len(ids)
                assert {document.id for document in other.documents} == ids - {"d0"} or name != "changed"
                assert recall(other, queries) > 0.8 * usual
        left.add(new)
        for again in (left, Retriever.load(path, verify=True)):
            assert versions(again) == newest
            assert best_scores(again, queries) == wanted


@pytest.mark.parametrize(
    "kind", ["dense-codes", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("plaid", "faiss"))]
)
def test_a_build_that_is_killed_while_it_trains_ends_as_one_that_was_not(kind: str, tmp_path: Path) -> None:
    documents, index = Source(kind).documents("d", 90), KINDS[kind][1]

    def build(path: Path) -> None:
        Retriever.build("vectors", documents, path, index=index, shards=3).close()

    build(tmp_path / "whole")
    for commit in range(8, 40, 2):
        path = tmp_path / str(commit)
        die_at(commit, lambda path=path: build(path))  # type: ignore[misc]
        if (path / "irkit.json").exists():
            break
        build(path)
        assert arrays_of(path) == arrays_of(tmp_path / "whole")
    else:
        pytest.fail("no build was complete")


def test_vectors_that_float32_cannot_square_are_scanned(tmp_path: Path) -> None:
    """They wait in all shards until a codec can be trained."""
    source, index = Source("dense-float32"), KINDS["dense-float32"][1]
    documents = source.documents("d", 90)
    for item in documents:
        item["vector"] = item["vector"] * np.float32(1e18 if item["_id"] != "d3" else 1)  # type: ignore[arg-type]
    built = [
        Retriever.build("vectors", documents, tmp_path / str(count), index=index, shards=count)
        for count in (None, 3)
    ]
    one, many = built
    for _ in range(2):
        assert versions(many) == versions(one) == [0]
        queries = source.vectors(4)
        assert many.search(queries, 10) == one.search(queries, 10)
        for retriever in built:
            retriever.add([("again" + str(len(retriever)), documents[3]["vector"])])


def test_shards_with_hubs_choose_the_centroids_of_one_index(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def make(count: int, prefix: str) -> list[dict[str, Any]]:
        tokens = rng.standard_normal((count, 8, 16), dtype=np.float32)
        return [{"_id": f"{prefix}{n}", "text": "", "vector": each} for n, each in enumerate(tokens)]

    documents, more = make(1500, "d"), make(400, "n")
    queries = [*rng.standard_normal((20, 6, 16), dtype=np.float32)]
    with use_limits(replace(LIMITS, plaid_hubs=64)):
        one, many = (
            Retriever.build("vectors", documents, tmp_path / str(shards), index="plaid", shards=shards)
            for shards in (None, 3)
        )
        for added in (more, []):
            near = one.store.read("hub_centroids.bin")
            assert near.shape[1] < one.index.stats()["centroids"]
            for part in many.index.parts:  # type: ignore[attr-defined]
                np.testing.assert_array_equal(part.store.read("hub_centroids.bin"), near)
            for k in (1, 10, 60):
                assert many.search(queries, k) == one.search(queries, k)
            for retriever in (one, many):
                retriever.add(added)
