"""An index of several heads in shards is one index of several heads: hits, changes, crashes and copies."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray_here import RayHere
from test_shards import arrays_of, die_at
from three_heads import QUERIES, WEIGHTS, make_model

from irkit import Dense, Model, MultiVector, Retriever
from irkit.core.ragged import Ragged
from irkit.core.representation import Several
from irkit.errors import BadTypeError, BadValueError, CorruptError, StorageError
from irkit.exporting import export
from irkit.index import Limits, SeveralConfig, SeveralIndex, Store, compact, create_index, use_limits
from irkit.ray_engine import PartialResultWarning, ShardedRetriever
from irkit.shards import ShardedIndex, open_store, reshard, rewrite
from irkit.shards.placement import shard_of

WORDS = ["search", "index", "vector", "token", "model", "neural", "text", "the", "of", "in", "an", "on"]
SMALL = Limits(
    dense_scan=20,
    dense_scan_per_hit=1,
    dense_points=2,
    faiss_scan=20,
    faiss_scan_per_hit=1,
    plaid_uncompressed=100,
    plaid_hubs=8,
    plaid_scan=8,
)
CODES: dict[str, Any] = {
    "kind": "several",
    "indexes": {
        "dense": {"kind": "dense", "keep": "none", "probes": 64, "candidates": 200},
        "multi_vector": {"kind": "plaid", "centroids": 8, "device": "cpu"},
    },
}


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with use_limits(SMALL):
        yield


@pytest.fixture(scope="module")
def model(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tiny_bert, tmp_path_factory.mktemp("several") / "model")


def make(count: int, prefix: str, seed: int) -> list[dict[str, Any]]:
    numbers = random.Random(seed)
    return [
        {
            "_id": f"{prefix}{number}",
            "text": " ".join(numbers.choices(WORDS, k=numbers.randint(3, 14))),
            "metadata": {"year": 2000 + number % 4},
        }
        for number in range(count)
    ]


def check_same(one: Retriever, many: Retriever) -> None:
    """Compare everything that an index of several heads can be asked."""
    assert isinstance(many.index, SeveralIndex)
    assert all(isinstance(part, ShardedIndex) for part in many.index.parts.values())
    assert len(one) == len(many)
    assert [document.id for document in one.documents] == [document.id for document in many.documents]
    fusions: list[Any] = [None, "rrf", WEIGHTS, {"sparse": 1.0}, {"dense": 2.0, "multi_vector": 0.1}]
    filters: list[Any] = [None, {"year": {">=": 2002}}, ["d3", "d7", "no"]]
    for turn, fuse in enumerate(fusions):
        for number, filter in enumerate(filters):
            k = (1, 5, 200)[(turn + number) % 3]  # each filter with each number of hits
            found, wanted = (each.search(QUERIES, k, filter, fuse=fuse) for each in (many, one))
            assert found == wanted
        options: Any = {"fuse": fuse, "offset": 2, "group_by": "year", "per_group": 2}
        assert many.search(QUERIES[0], 5, **options) == one.search(QUERIES[0], 5, **options)
    ids = [document.id for document in one.documents][::5]
    for weights in (None, WEIGHTS):
        found, wanted = (each.rerank(QUERIES[0], ids, fuse=weights) for each in (many, one))
        assert found == wanted
    assert many.run({"q": QUERIES[1]}, 20)["q"] == one.run({"q": QUERIES[1]}, 20)["q"]
    explained, expected = (each.explain(QUERIES[0], ids[0]) for each in (many, one))
    assert explained.score == expected.score
    assert [*explained.parts] == [*expected.parts]
    assert many.facets("year") == one.facets("year")
    about, wanted_about = many.stats(), one.stats()
    assert about["shards"] == len(many.store.parts)
    for key in ("kind", "representation", "dim", "documents"):
        assert about[key] == wanted_about[key]
        for name, part in about["parts"].items():
            assert part[key] == wanted_about["parts"][name][key]


def change(retriever: Retriever) -> None:
    retriever.add(make(30, "new", 1))
    retriever.update(make(9, "d", 2))
    retriever.remove([f"d{number}" for number in range(5, 60, 6)])


@pytest.mark.parametrize(
    ("index", "shards"),
    [
        pytest.param(index, shards, marks=() if (index, shards) == (CODES, 2) else pytest.mark.slow)
        for index in (None, CODES)
        for shards in (1, 2, 5)
    ],
)
def test_shards_equal_one_index(model: Model, index: Any, shards: int, tmp_path: Path) -> None:
    documents = make(60, "d", 0)
    one = Retriever.build(model, documents, tmp_path / "one", index=index)
    Retriever.build(model, documents, tmp_path / "many", index=index, shards=shards, chunk_size=25).close()
    many = Retriever.load(tmp_path / "many", model)
    check_same(one, many)
    for retriever in (one, many):
        change(retriever)
    check_same(one, many)
    check_same(one, Retriever.load(tmp_path / "many"))  # finds the model by its name
    many.save(tmp_path / "saved")
    rewrite(tmp_path / "many")
    reshard(tmp_path / "saved", 3)
    compact(tmp_path / "one")
    one = Retriever.load(tmp_path / "one")
    for name, count in (("many", shards), ("saved", 3)):
        again = Retriever.load(tmp_path / name, verify=True)
        stats = again.stats()
        assert (stats["shards"], stats["removed"]) == (count, 0)
        check_same(one, again)
    for retriever in (one, again):
        retriever.add(make(5, "last", 3))
        retriever.remove("d0")
    check_same(one, again)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> RayHere:
    """Actors in this process, two at most."""
    ray = RayHere(cpus=2)
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


@pytest.mark.slow
@pytest.mark.parametrize("index", [pytest.param(None, marks=pytest.mark.slow), CODES], ids=["exact", "codes"])
def test_actors_that_all_heads_share_find_what_one_index_finds(
    model: Model, index: Any, ray: RayHere, tmp_path: Path
) -> None:
    documents = make(60, "d", 0)
    one = Retriever.build(model, documents, tmp_path / "one", index=index)
    Retriever.build(model, documents, tmp_path / "many", index=index, shards=3).close()
    many = ShardedRetriever.load(tmp_path / "many", model, replicas=2)
    assert [(len(group), len(replicas)) for group, replicas in zip(*actors_of(many), strict=True)] == [
        (2, 2),
        (1, 2),
    ]
    check_same(one, many)
    for retriever in (one, many):
        change(retriever)
    check_same(one, many)
    with many.watch(False) as answers:
        assert many.search(QUERIES, fuse=WEIGHTS) == one.search(QUERIES, fuse=WEIGHTS)
        assert (answers.asked, answers.repeated, answers.missing) == (6, 0, set())  # 3 heads, 2 actors
        ray.kill(many.actors.replicas[0][0])  # its replica takes over
        for _ in range(2):
            assert many.search(QUERIES, fuse=WEIGHTS) == one.search(QUERIES, fuse=WEIGHTS)
    assert answers.repeated > 0
    # settings of a search reach the actors
    for each in (one, many) if index else ():
        part = each.index.parts["dense"]  # type: ignore[attr-defined]
        part.config = part.config.model_copy(update={"probes": 1, "candidates": 12})
    check_same(one, many)
    many.actors.close()
    check_same(one, many)  # in this process


@pytest.mark.slow
@pytest.mark.parametrize(
    "dense",
    [
        {"kind": "dense", "keep": "none"},
        pytest.param({"kind": "faiss", "factory": "IVF4,SQ8", "nprobe": 1}, marks=pytest.mark.slow),
    ],
)
def test_every_head_grows_as_in_one_index(
    dense: dict[str, Any], model: Model, ray: RayHere, tmp_path: Path
) -> None:
    """Centroids are trained again, by changes that go through a retriever with actors."""
    index = {
        "kind": "several",
        "indexes": {"dense": dense, "multi_vector": {"kind": "plaid", "device": "cpu"}},
    }
    one = Retriever.build(model, make(40, "d", 0), tmp_path / "one", index=index)
    Retriever.build(model, make(40, "d", 0), tmp_path / "many", index=index, shards=3).close()
    many = ShardedRetriever.load(tmp_path / "many", model)
    seen = []
    for step, count in enumerate((30, 110, 200)):
        for retriever in (one, many):
            retriever.add(make(count, f"s{step}-", step + 1))
        check_same(one, many)
        parts = [(one.index.parts[name], many.index.parts[name].parts) for name in index["indexes"]]  # type: ignore[attr-defined]
        seen.append([first.codec_version for first, _ in parts])
        for first, shards in parts:
            assert {part.codec_version for part in shards} == {first.codec_version}
            coded = "covered" if first.config.kind == "faiss" else "coded"
            assert sum(getattr(part, coded) for part in shards) == getattr(first, coded)
    for version in zip(*seen, strict=True):
        assert len({*version}) > 1
    check_same(one, Retriever.load(tmp_path / "many", model))
    for retriever in (one, many):
        retriever.remove([f"d{number}" for number in range(0, 40, 3)])
        retriever.close()
    compact(tmp_path / "one")
    reshard(tmp_path / "many", 2)
    check_same(*[Retriever.load(tmp_path / name, model) for name in ("one", "many")])


def actors_of(retriever: ShardedRetriever) -> tuple[Any, Any]:
    return retriever.actors.groups, retriever.actors.replicas


def test_a_shard_that_is_dead_misses_in_all_heads_and_is_waited_for_once(
    model: Model, ray: RayHere, tmp_path: Path
) -> None:
    documents = make(60, "d", 0)
    Retriever.build(model, documents, tmp_path / "many", shards=3).close()
    here = Retriever.load(tmp_path / "many", model)
    wanted = [document["_id"] for document in documents if shard_of([document["_id"]], 3)[0] == 1]
    with use_limits(replace(SMALL, shared_bytes=0)):
        many = ShardedRetriever.load(tmp_path / "many", model, timeout=0.01)
    alive, dead = many.actors.replicas[0][0], many.actors.replicas[1][0]
    ray.kill(dead)
    for search in (many.search, lambda *given, **options: many.run({"q": given[0]}, **options)):
        with pytest.raises(StorageError, match=r"no answer of shard-1-001 in 0.01 s"):
            search(QUERIES[0])
    assert many.missing == ("shard-1-001",)
    for fuse in (None, WEIGHTS):
        alive.calls = dead.calls = 0
        with many.watch(True) as answers:
            some = many.search(QUERIES[0], 60, fuse=fuse)
        assert (answers.asked, answers.missing) == (3 + 2 + 2, {"shard-1-001"})
        assert dead.calls <= 2  # asked of the first head only
        assert alive.calls == 3
        assert {hit.id for hit in some} == {item["_id"] for item in documents} - {*wanted}
        assert some == here.search(QUERIES[0], 60, [hit.id for hit in some], fuse=fuse)
    # one warning a search, and a run of several batches is one search
    with use_limits(replace(SMALL, shared_bytes=0)):
        partial = ShardedRetriever.load(tmp_path / "many", model, timeout=0.01, partial_results=True)
    ray.kill(partial.actors.replicas[1][0])
    for search in (partial.search, lambda queries: partial.run(enumerate_ids(queries))):
        with pytest.warns(PartialResultWarning, match="no answer of shard-1-001") as caught:
            search(QUERIES * 600)
        assert len(caught) == 1
        assert partial.missing == ("shard-1-001",)
    with pytest.warns(PartialResultWarning, match="shard-1-001"):
        partial.index.parts["dense"].search(Dense(torch.ones(1, 32)), 3)  # type: ignore[attr-defined]
    partial.actors.close()
    assert len(partial.search(QUERIES[0], 60)) == 60
    assert partial.missing == ()


def enumerate_ids(queries: list[str]) -> dict[str, str]:
    return {str(number): query for number, query in enumerate(queries)}


def test_actors_search_a_state_that_they_cannot_show_here(model: Model, ray: RayHere, tmp_path: Path) -> None:
    """Another process has changed the index before the actors were first asked."""
    Retriever.build(model, make(60, "d", 0), tmp_path / "many", shards=2).close()
    many = ShardedRetriever.load(tmp_path / "many", model)
    other = Retriever.load(tmp_path / "many", model)
    before = other.search(QUERIES, fuse=WEIGHTS)
    change(other)
    assert many.search(QUERIES, fuse=WEIGHTS) == before
    assert many.refresh()
    check_same(other, many)


@pytest.mark.parametrize("waiting", ["dense", pytest.param("multi_vector", marks=pytest.mark.slow)])
def test_codes_of_one_head_are_kept_by_another_number_of_shards(
    model: Model, waiting: str, tmp_path: Path
) -> None:
    """One head has codes of all documents, and the other one of the first ones."""
    one = Retriever.build(model, make(60, "d", 0), tmp_path / "one", index=CODES, shards=2)
    more = {"dense_scan": 1000} if waiting == "dense" else {"plaid_uncompressed": 10_000}
    with use_limits(replace(SMALL, **more)):
        one = Retriever.load(tmp_path / "one", model)
        one.add(make(30, "new", 1))
        one.save(tmp_path / "many")
        reshard(tmp_path / "many", 3)
        many = Retriever.load(tmp_path / "many", model)
        for name in ("dense", "multi_vector"):
            counts = [
                sum(part.coded for part in each.index.parts[name].parts)  # type: ignore[attr-defined]
                for each in (one, many)
            ]
            assert counts == [60 if name == waiting else 90] * 2
            rows = [
                each.index.parts[name].representations(each.documents.find(["new3", "d3"]))  # type: ignore[attr-defined]
                for each in (one, many)
            ]
            for first, second in zip(*(each.arrays().values() for each in rows), strict=True):
                np.testing.assert_allclose(first, second, atol=1e-5)
        check_same(one, many)


def test_rows_with_codes_after_rows_without_are_copied_decoded(tmp_path: Path) -> None:
    """Shards that were changed by interrupted calls may have codes of different heads."""
    torch.manual_seed(0)
    config = SeveralConfig.model_validate(CODES)

    def make_rows(count: int) -> Any:
        tokens = Ragged(torch.randn(3 * count, 8), torch.full((count,), 3))
        return Several({"dense": Dense(torch.randn(count, 8)), "multi_vector": MultiVector(tokens)})

    sources: list[Any] = []
    for name, limits in (("dense", {"plaid_uncompressed": 1000}), ("multi_vector", {"dense_scan": 1000})):
        store = Store.build(tmp_path / name)
        store.limits = replace(SMALL, **limits)
        sources.append(create_index(store, config))
        sources[-1].add(make_rows(60))
        sources[-1].finish()
    assert [[part.coded for part in source.parts.values()] for source in sources] == [[60, 0], [0, 60]]
    with Store.build(tmp_path / "target") as store:
        target = create_index(store, config)
        for source in sources:
            target.copy(source, np.arange(60))
        for name, part in target.parts.items():  # type: ignore[attr-defined]
            for number, source in enumerate(sources):
                ours = part.representations(np.arange(60) + 60 * number).arrays()
                for key, array in source.parts[name].representations(np.arange(60)).arrays().items():
                    np.testing.assert_allclose(ours[key], array, atol=5e-3)
        target.finish()
        store.publish()
    Store.open(tmp_path / "target", verify=True)


def test_one_index_becomes_shards_and_exports(model: Model, tmp_path: Path) -> None:
    one = Retriever.build(model, make(40, "d", 0), tmp_path / "one")
    one.remove(["d3"])
    one.save(tmp_path / "many")
    reshard(tmp_path / "many", 3)
    many = Retriever.load(tmp_path / "many", model)
    check_same(one, many)
    for name, retriever in (("one", one), ("many", many)):
        assert export(retriever, "jsonl", tmp_path / f"{name}.jsonl") == 39
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    with pytest.raises(BadValueError, match="vespa holds one representation of a document"):
        export(many, "vespa", tmp_path / "out")
    # without documents it has its heads, too
    one.remove([document.id for document in one.documents])
    reshard(one.store.path, 2)
    empty = Retriever.load(one.store.path, model)
    assert empty.search(QUERIES, fuse=WEIGHTS) == [[], []]
    empty.add(make(3, "d", 0))
    assert len(empty.search(QUERIES[0])) == 3


@pytest.mark.slow
def test_a_killed_build_ends_as_one_that_was_not(model: Model, tmp_path: Path) -> None:
    documents = make(30, "d", 0)  # a shard alone would not code them

    def build(path: Path) -> None:
        Retriever.build(model, documents, path, index=CODES, shards=2, chunk_size=15).close()

    build(tmp_path / "whole")
    for commit in (5, *range(14, 36)):  # most of them while codes are made
        path = tmp_path / str(commit)
        die_at(commit, lambda path=path: build(path))  # type: ignore[misc]
        if not (path / "irkit.json").exists():
            build(path)
        assert arrays_of(path) == arrays_of(tmp_path / "whole")


def test_an_interrupted_change_is_whole_for_each_document_and_can_be_repeated(
    model: Model, tmp_path: Path
) -> None:
    new = make(9, "new", 1)
    one = Retriever.build(model, make(40, "d", 0), tmp_path / "one")
    one.add(new)
    Retriever.build(model, make(40, "d", 0), tmp_path / "whole", shards=3).close()
    for commit in range(4):  # of three shards, and of the whole at last
        path = tmp_path / str(commit)
        shutil.copytree(tmp_path / "whole", path)
        die_at(commit, lambda path=path: Retriever.load(path, model).add(new))  # type: ignore[misc]
        left = Retriever.load(path, model)
        known = [item["_id"] for item in new if item["_id"] in left.documents]
        assert len(left) == 40 + len(known)
        assert (len(known) == 0) is (commit == 0)
        assert set(known) <= {hit.id for hit in left.search(QUERIES[0], 60, fuse={"dense": 1.0})}
        left.add(new)
        again = Retriever.load(path, model)
        assert {document.id for document in again.documents} == {document.id for document in one.documents}
        for ours, theirs in zip(
            again.search(QUERIES, 60, fuse=WEIGHTS), one.search(QUERIES, 60, fuse=WEIGHTS), strict=True
        ):
            scores = {hit.id: hit.score for hit in theirs}
            assert {hit.id: hit.score for hit in ours} == pytest.approx(scores, abs=1e-5)


def test_wrong_shards_of_several_heads_are_refused(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "many"
    Retriever.build(model, make(20, "d", 0), path, shards=2).close()
    retriever = Retriever.load(path, model)
    with pytest.raises(BadValueError, match="in the index already"):
        retriever.add([("d3", "again")])
    with pytest.raises(BadTypeError, match="got Dense, expected Several with the parts dense, multi"):
        retriever.index.add(Dense(torch.zeros(1, 32)))
    with pytest.raises(BadValueError, match="needs their ids and texts, too"):
        retriever.index.add(retriever.index.representations(np.arange(2)))
    assert len(retriever) == 20
    check_same(Retriever.build(model, make(20, "d", 0), tmp_path / "one"), retriever)
    retriever.close()
    # a manifest of the whole, or of a shard, that irkit did not write
    for folder, change_record in (
        (path, lambda about: about["parts"].pop("sparse")),
        (path, lambda about: about["parts"]["dense"].update(rows=3)),
        (path / "shard-1-000", lambda about: about["parts"]["dense"].update(rows=3)),
    ):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(path, copy)
        with Store.open(copy / folder.relative_to(path)) as store, store.update():
            change_record(store.meta["index"])
        with pytest.raises(CorruptError):
            open_store(copy)
    shutil.rmtree(path / "shard-1-001")
    with pytest.raises(StorageError, match="its shard shard-1-001, 2 of 2, is missing"):
        Retriever.load(path)


def test_the_command_line_divides_an_index_of_several_heads(
    model: Model, command: Callable[..., Any], tmp_path: Path
) -> None:
    texts, out = tmp_path / "texts.jsonl", str(tmp_path / "index")
    texts.write_text("".join(json.dumps(item) + "\n" for item in make(20, "d", 0)))
    code, _, error = command("index", model.name, str(texts), "--out", out, "--shards", "3")
    assert code == 0, error
    words = ("search", out, "--text", QUERIES[0], "--k", "5", "--fuse")
    before = [command(*words, fuse)[:2] for fuse in ("rrf", "dense=0.4, sparse=0.2")]
    assert all(code == 0 for code, _ in before)
    assert command("reshard", out, "--shards", "2")[0] == 0
    after = [command(*words, fuse)[:2] for fuse in ("rrf", "dense=0.4, sparse=0.2")]
    assert after == before
    facts = json.loads(command("info", out, "--json")[1])
    assert (facts["shards"], facts["documents"], facts["checksums"]) == (2, 20, "verified")
    assert [part["shards"] for part in facts["parts"].values()] == [2, 2, 2]
