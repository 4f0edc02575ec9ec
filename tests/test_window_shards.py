"""Long documents in windows in shards are one index of them: hits, passages, changes, crashes and copies."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray_here import RayHere
from test_shards import arrays_of, die_at, elsewhere
from test_windows import LENGTH, collection
from three_heads import WEIGHTS, make_model

from irkit import Dense, Model, Retriever
from irkit.data import Document
from irkit.errors import BadValueError, CorruptError, StorageError
from irkit.exporting import export
from irkit.index import (
    Limits,
    SeveralIndex,
    Store,
    compact,
    create_index,
    use_limits,
)
from irkit.index.several_index import index_parts
from irkit.ray_engine import ShardedRetriever
from irkit.ray_engine.ray_build import _window_encoder
from irkit.ray_engine.shard_builder import Portion, ShardBuilder
from irkit.retrieval.windows import batch_documents
from irkit.serve.messages import RerankRequest
from irkit.serve.search_work import rerank_ids
from irkit.shards import ShardedStore, ShardedWindows, open_store, reshard, rewrite
from irkit.shards.codecs import Work
from irkit.shards.placement import placement, shard_of

QUERIES = ["gnu hip", "neural search", "token model fez"]
SMALL = Limits(dense_scan=20, dense_scan_per_hit=1, dense_points=2, plaid_uncompressed=50, plaid_scan=8)
CODES: dict[str, Any] = {
    "dense": {"kind": "dense", "keep": "none"},
    "multi_vector": {"kind": "plaid", "centroids": 8, "device": "cpu"},
}
KINDS: dict[str, tuple[str, Any, str]] = {  # model, index, pool
    "flat": ("dense", "flat", "max"),
    "dense": ("dense", CODES["dense"], "mean"),
    "plaid": ("multi_vector", CODES["multi_vector"], "max"),
    "muvera": ("multi_vector", {"kind": "muvera", "repetitions": 4, "bits": 2, "candidates": 20}, "mean"),
    "inverted": ("sparse", {"kind": "inverted", "mode": "exact"}, "mean"),
    "first": ("multi_vector", "flat", "first"),
    "several": ("several", {"kind": "several", "indexes": CODES}, "max"),
    "several-mean": ("several", None, "mean"),
}


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with use_limits(SMALL):
        yield


@pytest.fixture(scope="module")
def models(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    several = make_model(tiny_bert, tmp_path_factory.mktemp("several") / "model")
    torch.manual_seed(0)
    sparse = Model.sparse(tiny_bert, device="cpu")  # finds something with random weights
    return {**several.heads, "several": several, "sparse": sparse}


def build(path: Path, models: dict[str, Model], kind: str, documents: Any, shards: int | None) -> Retriever:
    model, index, pool = KINDS[kind]
    windows = {**LENGTH, "pool": pool}
    Retriever.build(
        models[model], documents, path, index=index, windows=windows, shards=shards, chunk_size=17
    ).close()
    return Retriever.load(path, models[model])


def check_same(one: Retriever, many: Retriever) -> None:
    """Compare everything that an index can be asked; hits have passages."""
    assert all(isinstance(part, ShardedWindows) for part in index_parts(many.index).values())
    assert len(one) == len(many)
    assert [document.id for document in one.documents] == [document.id for document in many.documents]
    fusions: list[Any] = [None, WEIGHTS] if isinstance(one.index, SeveralIndex) else [None]
    filters: list[Any] = [None, {"year": {">=": 1992}}, ["d3", "d7", "no"]]
    ids = [document.id for document in one.documents][::3]
    counts = (1, 5, 200)
    for turn, fuse in enumerate(fusions):
        for number, filter in enumerate(filters):
            for k in counts if len(fusions) == 1 else (counts[(turn + number) % 3],):
                wanted = one.search(QUERIES, k, filter, fuse=fuse)
                assert many.search(QUERIES, k, filter, fuse=fuse) == wanted
        # a query that is encoded alone may differ in its last bits
        alone = [one.search(query, 5, fuse=fuse) for query in QUERIES]
        assert [many.search(query, 5, fuse=fuse) for query in QUERIES] == alone
        options: Any = {"fuse": fuse, "offset": 1, "group_by": "year", "per_group": 2}
        assert many.search(QUERIES[0], 5, **options) == one.search(QUERIES[0], 5, **options)
        assert many.rerank(QUERIES[0], ids, fuse=fuse) == one.rerank(QUERIES[0], ids, fuse=fuse)
    assert any(hit.passage is not None for hits in one.search(QUERIES) for hit in hits)
    assert many.run({"q": QUERIES[1]}, 20)["q"] == one.run({"q": QUERIES[1]}, 20)["q"]
    if len(fusions) == 1:
        assert many.explain(QUERIES[0], ids[0]) == one.explain(QUERIES[0], ids[0])
    assert many.facets("year") == one.facets("year")
    about, expected = many.stats(), one.stats()
    for key in ("kind", "representation", "dim", "documents", "windows"):
        assert about[key] == expected[key]
    assert about["shards"] == len(many.store.parts)


def change(*retrievers: Retriever) -> None:
    for retriever in retrievers:
        retriever.add(collection(8, seed=1, start=100))
        retriever.update(collection(5, seed=2))
        retriever.remove([f"d{number}" for number in range(5, 30, 4)])


@pytest.mark.parametrize(
    ("kind", "shards"),
    [
        pytest.param(kind, shards, marks=() if (kind, shards) == ("plaid", 2) else pytest.mark.slow)
        for kind in KINDS
        for shards in (1, 2, 5)
    ],
)
def test_shards_equal_one_index(models: dict[str, Model], kind: str, shards: int, tmp_path: Path) -> None:
    documents = collection(35)
    one = build(tmp_path / "one", models, kind, documents, None)
    many = build(tmp_path / "many", models, kind, documents, shards)
    reader = Retriever.load(tmp_path / "many", models[KINDS[kind][0]])
    check_same(one, many)
    for part in index_parts(many.index).values():
        with elsewhere(SimpleNamespace(index=part.inner)):  # type: ignore[arg-type, attr-defined]
            assert many.search(QUERIES, 5) == one.search(QUERIES, 5)
    before = reader.search(QUERIES, 5)
    change(one, many)
    check_same(one, many)
    assert reader.search(QUERIES, 5) == before
    assert reader.refresh()
    check_same(one, reader)
    # copies, also without removed documents
    many.save(tmp_path / "saved")
    rewrite(tmp_path / "many")
    reshard(tmp_path / "saved", 3)
    compact(tmp_path / "one")
    one = Retriever.load(tmp_path / "one", models[KINDS[kind][0]])
    for name, count in (("many", shards), ("saved", 3)):
        again = Retriever.load(tmp_path / name, models[KINDS[kind][0]], verify=True)
        assert (again.stats()["shards"], again.stats()["removed"]) == (count, 0)
        check_same(one, again)
    for retriever in (one, again):
        retriever.add(collection(3, seed=3, start=200))
        retriever.remove("d0")
    check_same(one, again)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", pytest.param("several", marks=pytest.mark.slow)])
def test_one_index_becomes_shards_and_the_other_way_round(
    models: dict[str, Model], kind: str, tmp_path: Path
) -> None:
    one = build(tmp_path / "one", models, kind, collection(35), None)
    shutil.copytree(tmp_path / "one", tmp_path / "many")
    model = models[KINDS[kind][0]]
    for shards in (3, 1, 2):
        reshard(tmp_path / "many", shards)
        check_same(one, Retriever.load(tmp_path / "many", model))
    for commit in (4, 9):
        die_at(commit, lambda: reshard(tmp_path / "many", 3))
        assert Retriever.load(tmp_path / "many", model).stats()["shards"] == 2
    reshard(tmp_path / "many", 3)
    many = Retriever.load(tmp_path / "many", model)
    check_same(one, many)
    with pytest.raises(BadValueError, match="windows"):
        export(many, "jsonl", tmp_path / "out.jsonl")
    # without documents
    many.remove([document.id for document in many.documents])
    reshard(tmp_path / "many", 2)
    many = Retriever.load(tmp_path / "many", model)
    assert (many.search(QUERIES[0]), many.search(QUERIES[0], filter=["d1"])) == ([], [])
    many.add(collection(35))
    assert [document.id for document in many.documents] == [document.id for document in one.documents]
    assert len(many.search(QUERIES[0], 50)) == len(one.search(QUERIES[0], 50))


@pytest.mark.slow
def test_actors_find_what_one_index_finds(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = RayHere(cpus=2)
    monkeypatch.setitem(sys.modules, "ray", ray)
    one = build(tmp_path / "one", models, "several", collection(35), None)
    build(tmp_path / "many", models, "several", collection(35), 3).close()
    many = ShardedRetriever.load(tmp_path / "many", models["several"], replicas=2)
    check_same(one, many)
    change(one, many)
    check_same(one, many)
    ray.kill(many.actors.replicas[0][0])  # its replica takes over
    with many.watch(False) as answers:
        for _ in range(2):
            assert many.search(QUERIES, fuse=WEIGHTS) == one.search(QUERIES, fuse=WEIGHTS)
    assert answers.repeated > 0
    # served
    ids = [hit.id for hit in one.search(QUERIES[0], 9)]
    asked = RerankRequest(queries=QUERIES[:1], ids=[ids]).model_dump()
    assert rerank_ids(asked, many) == rerank_ids(asked, one)
    many.actors.close()
    check_same(one, many)  # in this process
    with use_limits(replace(SMALL, shared_bytes=0)):
        some = ShardedRetriever.load(tmp_path / "many", models["several"], timeout=0.01)
    ray.kill(some.actors.replicas[1][0])
    with some.watch(True) as answers:
        found = some.search(QUERIES[0], 60, fuse={"dense": 1.0})
    assert answers.missing == {"shard-1-001"}
    kept = [item.id for item in one.documents if shard_of([item.id], 3)[0] != 1]
    assert {hit.id for hit in found} == {*kept}


@pytest.mark.parametrize(
    "verb", ["add", *(pytest.param(verb, marks=pytest.mark.slow) for verb in ("update", "remove"))]
)
def test_an_interrupted_change_is_whole_for_each_document_and_can_be_repeated(
    verb: str, models: dict[str, Model], tmp_path: Path
) -> None:
    new = collection(7, seed=4, start=50 if verb == "add" else 0)
    given: Any = [item.id for item in new] if verb == "remove" else new
    one = build(tmp_path / "one", models, "flat", collection(20), None)
    getattr(one, verb)(given)
    build(tmp_path / "whole", models, "flat", collection(20), 3).close()
    wanted = {item.id: item.text for item in one.documents}
    last = len({*shard_of([item.id for item in new], 3)})  # shards that change; the whole is the last to know
    for commit in range(last + 1):
        path = tmp_path / str(commit)
        shutil.copytree(tmp_path / "whole", path)

        def interrupted(path: Path = path) -> None:
            getattr(Retriever.load(path, models["dense"]), verb)(given)

        die_at(commit, interrupted)
        left = Retriever.load(path, models["dense"])
        ids = {document.id for document in left.documents}
        assert {hit.id for hit in left.search(QUERIES[0], 60)} == ids
        getattr(left, verb)(given)
        again = Retriever.load(path, models["dense"])
        assert {item.id: item.text for item in again.documents} == wanted
        for ours, theirs in zip(again.search(QUERIES, 60), one.search(QUERIES, 60), strict=True):
            found = {hit.id: (hit.score, hit.passage) for hit in ours}
            assert found == {hit.id: (hit.score, hit.passage) for hit in theirs}
        if verb != "add":
            continue
        # numbers that no document has are none to the index either
        shards = placement(again.store).shards
        rows = np.flatnonzero(np.pad(shards, (0, len(again.index) - len(shards)), constant_values=-1) < 0)
        queries = again.model.encode_representation(QUERIES[:1], "query")  # type: ignore[union-attr]
        assert np.isneginf(again.index.rescore(queries, rows[None])).all()
        assert not again.index.passages(queries, rows[None]).any()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_killed_build_ends_as_one_that_was_not(models: dict[str, Model], tmp_path: Path) -> None:
    def make(path: Path) -> None:
        build(path, models, "plaid", collection(20), 2).close()

    make(tmp_path / "whole")
    for commit in (2, 5, 7, 10, 13, 17, 21):
        path = tmp_path / str(commit)
        die_at(commit, lambda path=path: make(path))  # type: ignore[misc]
        if not (path / "irkit.json").exists():
            make(path)
        assert arrays_of(path) == arrays_of(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["flat", "several-mean"])
def test_builders_on_ray_store_what_one_process_stores(
    models: dict[str, Model], kind: str, tmp_path: Path
) -> None:
    """Portions come again after a crash; the files are those of a build in one process."""
    model, documents = models[KINDS[kind][0]], collection(30)
    build(tmp_path / "whole", models, kind, documents, 2).close()
    whole = open_store(tmp_path / "whole")
    windows = Retriever.load(tmp_path / "whole", model).index.windows
    assert windows is not None
    with ShardedStore.build(tmp_path / "parts", shards=2, key=whole.meta["build"]) as store:
        with store.update():
            for each in (store, *store.parts):
                create_index(each, whole.meta["index"]["config"], windows=windows)
                each.meta["model"] = whole.meta["model"]
        builders = [ShardBuilder(part.path, part.limits) for part in store.parts]
        counts, start = np.zeros(2, int), 0
        last: list[list[Portion]] = [[], []]
        for change, chunk in enumerate(batch_documents(model, windows, documents, 17), 2):
            made = _window_encoder(model, 2)(chunk)
            stop = start + len(chunk[0])
            for shard, builder in enumerate(builders):
                portion = Portion(made.contents[shard], int(counts[shard]), start, stop, change)
                builder.add([*last[shard], portion])  # the one before comes again
                last[shard] = [portion]
            start, counts = stop, counts + made.counts
        [portion] = last[0]
        with pytest.raises(BadValueError, match="a build of other documents was begun there"):
            builders[0].add([replace(portion, start=portion.start + 1)])  # a document came before it
        for builder in builders:
            for name in index_parts(builder.index):
                builder.finish(name, Work(code=False, list=False))
            builder.finish_documents()
        store.refresh_parts()
        for part, wanted in zip(store.parts, whole.parts, strict=True):
            assert part.committed.arrays == wanted.committed.arrays


def test_damaged_windows_of_shards_are_told(models: dict[str, Model], tmp_path: Path) -> None:
    build(tmp_path / "good", models, "flat", collection(20), 2).close()

    def damaged(edit: Callable[[Store], object]) -> Retriever:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        with Store.open(tmp_path / "bad" / "shard-1-001") as store, store.update():
            edit(store)
        return Retriever.load(tmp_path / "bad", models["dense"])

    def rewrite(store: Store, name: str, edit: Callable[[Any], Any]) -> None:
        array = edit(store.read(name).copy())
        store.drop(name)
        store.append(name, array)

    swapped = damaged(lambda store: rewrite(store, "window_ends.bin", lambda ends: ends[::-1]))
    for work in (lambda: swapped.search("gnu"), lambda: swapped.remove("d3")):
        with pytest.raises(CorruptError, match="its windows are not divided"):
            work()
    for name in ("window_ends.bin", "window_spans.bin"):
        with pytest.raises(CorruptError, match="does not fit together"):
            damaged(lambda store, name=name: rewrite(store, name, lambda array: array[1:]))  # type: ignore[misc]
    twice = damaged(lambda store: rewrite(store, "sequence.bin", lambda rows: rows * 0))
    with pytest.raises(CorruptError, match="the same number"):
        twice.search("gnu")
    with pytest.raises(CorruptError, match="different windows"):
        damaged(lambda store: store.meta["index"]["windows"].update(length=7))


def test_wrong_windows_are_refused(models: dict[str, Model], tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match="cuts no texts"):
        Retriever.build("bm25", ["one text"], tmp_path / "words", shards=2, windows={})
    with pytest.raises(BadValueError, match="expected a length of at most"):
        Retriever.build(models["dense"], ["text"], tmp_path / "words", shards=2, windows={"length": 10**6})
    assert not (tmp_path / "words").exists()
    many = build(tmp_path / "many", models, "flat", collection(9), 2)
    assert isinstance(many.index, ShardedWindows)
    rows, one = Dense(torch.zeros(2, many.index.dim)), np.zeros((1, 2), np.int64)
    with pytest.raises(BadValueError, match="a row for each window"):
        many.index.add_windows(rows, [one])
    with pytest.raises(BadValueError, match="needs their ids and texts, too"):
        many.index.add_windows(rows, [one, one])
    with pytest.raises(BadValueError, match="in the index already"):
        many.add([Document("d3", "again")])
    with pytest.raises(BadValueError, match="several representations"):
        many.index.representations(np.array([0]))
    with pytest.raises(StorageError, match="reshard"):
        compact(tmp_path / "many")
    check_same(build(tmp_path / "one", models, "flat", collection(9), None), many)


def test_the_command_line_divides_documents_in_windows(
    models: dict[str, Model], command: Callable[..., Any], tmp_path: Path
) -> None:
    texts, out = tmp_path / "texts.jsonl", str(tmp_path / "index")
    records = [{"_id": item.id, "title": item.title, "text": item.text} for item in collection(20)]
    texts.write_text("".join(json.dumps(record) + "\n" for record in records))
    model = models["several"].name
    words = ("index", model, str(texts), "--out", out, "--shards", "3", "--windows", "6")
    code, _, error = command(*words)
    assert code == 0, error
    search = ("search", out, "--text", QUERIES[0], "--k", "5")
    before = command(*search)[:2]
    assert before[0] == 0
    assert command("reshard", out, "--shards", "2")[0] == 0
    assert command(*search)[:2] == before
    facts = json.loads(command("info", out, "--json")[1])
    assert (facts["shards"], facts["documents"], facts["checksums"]) == (2, 20, "verified")
    assert facts["windows"] > 20
    with Retriever.load(out) as retriever:
        retriever.remove("d3")
    assert command("compact", out)[0] == 0
    facts = json.loads(command("info", out, "--json")[1])
    assert (facts["shards"], facts["documents"], facts["removed"]) == (2, 19, 0)
