"""Shards searched by actors of Ray give what one process gives, also after actors were killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray_faults
from test_interrupted_shards import fail_at
from test_shards import CANDIDATES, arrays_of, real_vectors
from test_windows import LENGTH, collection
from three_heads import make_model

from irkit import Retriever
from irkit.data import Document
from irkit.encoder_free import BM25, RM3
from irkit.errors import BadTypeError, BadValueError, IrkitError, MissingDependencyError, StorageError
from irkit.index import Limits, Store, create_index, index_config, use_limits
from irkit.ray_engine import PartialResultWarning, ShardedRetriever, build_shards
from irkit.ray_engine.ray_build import _encoder
from irkit.ray_engine.ray_start import parse_engine, start_ray
from irkit.ray_engine.ray_stream import stream
from irkit.ray_engine.shard_builder import Portion, ShardBuilder
from irkit.shards import ShardedDocuments, ShardedIndex, ShardedStore, open_store
from irkit.shards.placement import shard_of

DIM = 8
CHANGE = {"change": 0, "before": 0}  # depends on the size of chunks
WORDS = [f"word{number}" for number in range(40)]


def make(count: int, prefix: str, numbers: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "_id": f"{prefix}{number}",
            "text": " ".join(numbers.choices(WORDS, k=numbers.randint(1, 12))),
            "metadata": {"year": 2000 + number % 3},
        }
        for number in range(count)
    ]


def test_what_is_no_engine_and_not_in_shards_is_refused(tmp_path: Path) -> None:
    assert parse_engine("ray") is None
    assert parse_engine("ray://host:10001") == "ray://host:10001"
    for wrong in ("spark", "ray://", "", None):
        with pytest.raises(BadValueError, match="expected ray"):
            parse_engine(wrong)  # type: ignore[arg-type]
    Retriever.build("bm25", ["one text"], tmp_path / "one")
    with pytest.raises(StorageError, match="reshard"):
        ShardedRetriever.load(tmp_path / "one")
    for options in ({"replicas": 0}, {"timeout": 0}, {"timeout": float("nan")}):
        with pytest.raises(BadValueError):
            ShardedRetriever.load(tmp_path / "one", **options)  # type: ignore[arg-type]
    with pytest.raises(BadTypeError, match="build_shards"):
        ShardedRetriever.build("bm25", ["one text"], tmp_path / "two", shards=2)
    assert not (tmp_path / "two").exists()


def test_a_start_keeps_the_handler_of_signals_and_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(address: str, **options: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        if "away" in address:
            raise ConnectionError("timeout")
        if ":" not in address:
            raise ValueError("Invalid address format")

    stand_in = SimpleNamespace(is_initialized=lambda: False, init=init)
    setup = SimpleNamespace(maybe_enable_token_auth_if_token_available=lambda **_: None)
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    monkeypatch.setitem(sys.modules, "ray._private.authentication.authentication_token_setup", setup)
    before = signal.getsignal(signal.SIGTERM)
    assert start_ray("ray://here:1") is stand_in
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(BadValueError, match=r"Ray at 'ray://away:1': timeout; expected a cluster"):
        start_ray("ray://away:1")
    with pytest.raises(BadValueError, match="Ray at 'here': Invalid address format; expected a cluster"):
        start_ray("here")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_client_goes_on_after_the_last_result_if_its_relay_dies() -> None:
    begun: list[int] = []

    class RayError(Exception):
        pass

    def relay(work: Any, done: int, gpu: bool) -> Any:
        begun.append(done)
        left = iter([list(range(done, done + 2)), None] if done < 4 else [[4], []])
        return SimpleNamespace(take=SimpleNamespace(remote=lambda: next(left)))

    def get(numbers: list[int] | None) -> list[tuple[int, None]]:
        if numbers is None:
            raise RayError("the relay died")
        return [(number, None) for number in numbers]

    ray = SimpleNamespace(
        util=SimpleNamespace(client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: True))),
        remote=lambda kind: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=relay)),
        **{"put": lambda work: work, "get": get, "kill": lambda relay: None},
        exceptions=SimpleNamespace(RayError=RayError),
    )
    assert list(stream(ray, lambda start: iter(()), lambda: abs)) == [0, 1, 2, 3, 4]
    assert begun == [0, 2, 4]
    with pytest.raises(IrkitError, match="work on Ray: it failed 5 times in a row: RayError: the relay died"):
        list(stream(SimpleNamespace(**vars(ray) | {"get": lambda _: get(None)}), iter, lambda: abs))


def test_work_that_ray_cannot_do_is_refused_before_it_is_started(
    tmp_path: Path, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, out = tmp_path / "texts.jsonl", tmp_path / "out"
    texts.write_text('{"_id": "1", "text": "one"}\n')
    for words, wanted in (
        (("index", "bm25", str(texts), "--engine", "ray"), "--shards"),
        (("index", "bm25", str(texts), "--shards", "2", "--engine", "spark"), "expected ray"),
        (("index", "bm25", "-", "--shards", "2", "--engine", "ray"), "only once"),
    ):
        code, _, error = command(*words, "--out", str(out))
        assert code == 2
        assert wanted in error
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for documents in (iter(["one"]), (text for text in ["one"]), "-", pipe):
        with pytest.raises(BadTypeError, match="only once"):
            build_shards("bm25", documents, out, shards=2)
    for options in ({"shards": 0}, {"shards": 2, "chunk_size": 0}):
        with pytest.raises(BadValueError):
            build_shards("bm25", ["one"], out, **options)
    with pytest.raises(BadValueError, match="no directory"):
        build_shards("bm25", ["one"], "memory://out", shards=2)
    # without Ray
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.data", None)
    for words in (
        ("index", "bm25", str(texts), "--shards", "2", "--out", str(out)),
        ("encode", "model", str(texts), "--out", str(tmp_path / "v.npy")),
        ("mine", str(out), str(texts), "--out", str(tmp_path / "m.jsonl")),
        ("label", str(texts), "--teacher", "model", "--out", str(tmp_path / "l.jsonl")),
        ("search", str(out), "--text", "one"),
    ):
        code, _, error = command(*words, "--engine", "ray")
        assert code == 2
        assert "irkit[ray]" in error
    with pytest.raises(MissingDependencyError, match=r"irkit\[ray\]"):
        build_shards("bm25", ["one"], out, shards=2)
    assert not out.exists()


def test_a_builder_stores_each_portion_once(tmp_path: Path) -> None:
    """A builder gets portions again, after a crash, and portions of other sizes, after a killed driver."""
    documents = [Document(**{"id": f"d{number}", "text": f"word{number} all"}) for number in range(12)]
    Retriever.build("bm25", documents, tmp_path / "whole", shards=2, chunk_size=4).close()
    model, path = BM25(), tmp_path / "parts"
    whole = open_store(tmp_path / "whole")

    def begin() -> tuple[ShardedStore, list[ShardBuilder]]:
        store = ShardedStore.build(path, shards=2, key=whole.meta["build"])
        with store.update():
            for each in (store, *store.parts):
                create_index(each, index_config(whole.meta["index"]["config"]))
                each.meta["model"] = whole.meta["model"]
                model.begin(each)
        return store, [ShardBuilder(part.path, part.limits) for part in store.parts]

    def portions(start: int, stop: int) -> list[Portion]:
        """Return the portion of each shard, as if all earlier documents were known."""
        [made] = map(_encoder(model, 2), [documents[start:stop]])
        seen = list(dict.fromkeys(f"{word}\n" for item in documents[:stop] for word in stems(item.text)))
        before = list(dict.fromkeys(f"{word}\n" for item in documents[:start] for word in stems(item.text)))
        numbers = np.array([seen.index(f"{term}\n") for term in made.terms])
        terms = len("".join(before)), "".join(seen[len(before) :]).encode()
        owners = shard_of([item.id for item in documents[:start]], 2)
        return [
            Portion(
                content, int((owners == shard).sum()), start, stop, 2 + start // 4, terms, numbers, len(seen)
            )
            for shard, content in enumerate(made.contents)
        ]

    def stems(text: str) -> list[str]:
        return model.analyzer.terms(text)

    store, builders = begin()
    for builder, first, second in zip(builders, portions(0, 4), portions(4, 8), strict=True):
        builder.add([first])
        assert builder.add([first, second]) == 8  # the first again
    wrong = portions(8, 12)[0]
    with pytest.raises(BadValueError, match="other documents"):
        builders[0].add([Portion(**{**vars(wrong), "before": wrong.before + 1})])
    builders[0].add([portions(8, 12)[0]])
    store.close()  # the driver is killed; one shard is behind
    store, builders = begin()
    assert len(ShardedDocuments(store)) == 8
    assert store.rows("vocabulary.txt") == store.parts[0].rows("vocabulary.txt")
    rest = portions(6, 12)  # another size of chunks
    text = b"".join(portions(0, 12)[0].terms[1:])  # type: ignore[index, arg-type]
    for builder, portion in zip(builders, rest, strict=True):
        builder.add([Portion(**{**vars(portion), "terms": (0, text)})])
    index = ShardedIndex(store, ShardedDocuments(store))
    store.refresh_parts()
    with Store.update(store):
        store.meta["documents"] = store.meta["index"]["rows"] = 12
    store.refresh_parts()
    work = index.share()
    for builder in builders:
        builder.finish("", work)
        builder.finish_documents()
    store.refresh_parts()
    store.publish()
    for part, wanted in zip(store.parts, whole.parts, strict=True):
        assert part.committed.arrays == wanted.committed.arrays
        assert part.meta | CHANGE == wanted.meta | CHANGE


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray, on this machine only."""
    pytest.importorskip("ray", reason="needs: pip install 'irkit[ray]'")
    from irkit.ray_engine.ray_start import start_ray

    started = start_ray()
    yield started
    started.shutdown()


@pytest.mark.slow
def test_ray_on_this_machine_listens_on_no_other_address(ray: Any) -> None:
    node = ray._private.worker._global_node
    own = {info.process.pid for infos in node.all_processes.values() for info in infos}
    inodes = set()
    for pid in own:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    listening = []
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        listening += [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]
    assert listening
    assert set(listening) <= {
        "0100007F",
        "0000000000000000FFFF00000100007F",
        "00000000000000000000000001000000",
    }


def pids(ray: Any, retriever: ShardedRetriever) -> list[int]:
    """Processes of the first actor of each shard."""
    replicas = retriever.actors.replicas
    return [ray.get(actors[0].__ray_call__.remote(lambda self: os.getpid())) for actors in replicas]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_actors_find_what_one_process_finds(ray: Any, tmp_path: Path) -> None:
    numbers = random.Random(0)
    documents = make(200, "d", numbers)
    one = Retriever.build("bm25", documents, tmp_path / "one")
    Retriever.build("bm25", documents, tmp_path / "many", shards=2).close()
    queries = [" ".join(numbers.choices(WORDS, k=3)) for _ in range(20)]
    with ShardedRetriever.load(tmp_path / "many", timeout=120) as many:

        def check() -> None:
            assert many.search(queries) == one.search(queries)
            assert many.missing == ()

        check()
        assert many.search(queries, 5, {"year": 2001}) == one.search(queries, 5, {"year": 2001})
        assert many.search(queries, feedback=RM3(3, 5)) == one.search(queries, feedback=RM3(3, 5))
        # changes are seen by the next search
        for retriever in (one, many):
            retriever.add(make(9, "n", random.Random(1)))
            retriever.remove(["d3", "d4"])
        check()
        # a killed actor comes again
        os.kill(pids(ray, many)[0], signal.SIGKILL)
        check()
        # served
        from irkit.serve.catalogue import Catalogue
        from irkit.serve.serve_config import ServeConfig

        catalogue = Catalogue(ServeConfig(paths=(str(tmp_path / "many"),), engine="ray"))
        served = catalogue.index("many").retriever()
        assert isinstance(served, ShardedRetriever)
        assert served.search(queries) == one.search(queries)
        served.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["dense", "dense-codes", "muvera", "plaid", "faiss"])
def test_actors_choose_the_candidates_of_one_index(kind: str, ray: Any, tmp_path: Path) -> None:
    """With default settings, and so many documents that a search reads a part of the lists."""
    model, config = {**CANDIDATES, "faiss": ("dense", {"kind": "faiss", "factory": "ivfpqfs"})}[kind]
    rng = np.random.default_rng(3)

    def make(names: list[str]) -> list[dict[str, Any]]:
        rows = zip(names, real_vectors(model, len(names), rng), strict=True)
        return [
            {"_id": name, "text": "", "vector": row, "metadata": {"year": int(rng.integers(5))}}
            for name, row in rows
        ]

    documents = make([f"d{number}" for number in range(8000)])
    one = Retriever.build("vectors", documents, tmp_path / "one", index=config)
    with contextlib.ExitStack() as stack:
        others = []
        for count in (1, 2, 5):
            path = tmp_path / str(count)
            Retriever.build("vectors", documents, path, index=config, shards=count).close()
            others.append(stack.enter_context(ShardedRetriever.load(path, timeout=120)))
        for step in range(3):
            queries = real_vectors(model, 12, rng)
            for filter, k in ((None, 1), (None, 10), (None, 100), ({"year": {">": 1}}, 10), ({"year": 3}, 5)):
                wanted = one.search(queries, k, filter)
                for many in others:
                    assert many.search(queries, k, filter) == wanted
                    assert many.search(queries[:1], k, filter) == wanted[:1]
            names = [f"d{number}" for number in range(step, 8000, 97)]
            changed, added = make(names), make([f"n{step}-{number}" for number in range(60)])
            for retriever in (one, *others):
                retriever.update(changed)
                retriever.remove(names[::2])
                retriever.add(added)
        # without the shards of an actor the others are searched as one index
        with use_limits(Limits(shared_bytes=0)):
            some = ShardedRetriever.load(tmp_path / "5", timeout=5, partial_results=True)
        stack.enter_context(some)
        ray.kill(some.actors.replicas[0][0])
        with pytest.warns(PartialResultWarning, match="shard-1-000"):
            found = some.search(queries, 50)
        whole = {document.id for document in one.documents}
        assert all(hits and {hit.id for hit in hits} < whole for hits in found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_state_that_no_actor_has_is_searched(ray: Any, tmp_path: Path) -> None:
    """Another process has changed the index, and actors that have seen the earlier state have died."""
    Retriever.build("bm25", make(60, "d", random.Random(3)), tmp_path / "many", shards=2).close()
    query = "word1 word2 word3"
    with ShardedRetriever.load(tmp_path / "many", timeout=120) as many:
        before = many.search(query, 60)
        with Retriever.load(tmp_path / "many") as other:
            other.add(make(30, "n", random.Random(4)))
            after = other.search(query, 60)
        for pid in pids(ray, many):
            os.kill(pid, signal.SIGKILL)
        assert many.search(query, 60) == before != after
        assert many.refresh()
        assert many.search(query, 60) == after


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_dead_shard_is_an_error_or_a_marked_partial_result(ray: Any, tmp_path: Path) -> None:
    documents = make(60, "d", random.Random(2))
    Retriever.build("bm25", documents, tmp_path / "many", shards=2).close()
    with ShardedRetriever.load(tmp_path / "many", timeout=5) as many:
        whole = many.search("word1 word2 word3", 60)
        ray.kill(many.actors.replicas[0][0])  # for good; the other one has the files, too
        assert all(many.search("word1 word2 word3", 60) == whole for _ in range(3))
    with use_limits(Limits(shared_bytes=0)):
        many = ShardedRetriever.load(tmp_path / "many", timeout=5, partial_results=True)
    with many:
        ray.kill(many.actors.replicas[0][0])
        with pytest.warns(PartialResultWarning, match="shard-1-000"):
            some = many.search("word1 word2 word3", 60)
        assert many.missing == ("shard-1-000",)
        assert 0 < len(some) < len(whole)
        assert [hit for hit in whole if hit in some] == some
        with many.watch(False), pytest.raises(StorageError, match="no answer of shard-1-000"):
            many.search("word1 word2 word3")
        with many.watch(True) as answers:
            assert many.search("word1 word2 word3", 60) == some  # without a warning
        assert (answers.asked, answers.missing) == (2, {"shard-1-000"})
        assert answers.repeated > 0


def vectors(kind: str, count: int) -> list[dict[str, Any]]:
    numbers, rng = random.Random(4), np.random.default_rng(4)
    shape = (DIM,) if kind == "dense" else (3, DIM)
    return [
        item | ({"vector": rng.standard_normal(shape).astype(np.float32)} if kind != "bm25" else {})
        for item in make(count, "d", numbers)
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("kind", "index"), [("bm25", None), ("dense", "dense"), ("dense", "SQ8"), ("tokens", "plaid")]
)
def test_a_build_on_ray_has_the_files_of_one_process(
    kind: str, index: Any, ray: Any, tmp_path: Path, small_limits: Callable[..., None]
) -> None:
    small_limits(faiss_scan=50)
    documents, model = vectors(kind, 300), "bm25" if kind == "bm25" else "vectors"
    options: Any = {"index": index, "shards": 2, "chunk_size": 70}
    Retriever.build(model, documents, tmp_path / "one", **options).close()
    seen: list[tuple[str, int, Any]] = []
    options["progress"] = lambda *about: seen.append(about)
    built = build_shards(model, documents, tmp_path / "ray", **options)
    assert sum(count for stage, count, _ in seen if stage == "encoding") == len(built) == 300
    for ours, theirs in zip(
        [built.store, *built.store.parts], [(one := open_store(tmp_path / "one")), *one.parts], strict=True
    ):
        assert ours.committed.arrays == theirs.committed.arrays
        assert ours.meta == theirs.meta
    with pytest.raises(StorageError, match="there is one already"):
        build_shards(model, documents, tmp_path / "ray", **options)
    wrong = [*documents[:150], {"_id": "d3", "text": ""}]
    with pytest.raises(BadValueError, match="was used before"):
        build_shards(model, wrong, tmp_path / "wrong", **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_build_of_other_documents_is_refused_or_discarded(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = vectors("bm25", 60)
    options: Any = {"shards": 3, "chunk_size": 20}
    others = [*documents[:20], *(item | {"text": item["text"] + " more"} for item in documents[20:])]
    Retriever.build("bm25", others, tmp_path / "others", **options).close()
    with monkeypatch.context() as patch:
        fail_at(22, KeyboardInterrupt(), patch)  # some shards have their part of the second chunk
        with pytest.raises(KeyboardInterrupt):
            Retriever.build("bm25", documents, tmp_path / "ray", **options)
    with pytest.raises(BadValueError, match="a build of other documents was begun there"):
        build_shards("bm25", others, tmp_path / "ray", **options)
    build_shards("bm25", others, tmp_path / "ray", overwrite=True, **options).close()
    assert arrays_of(tmp_path / "ray") == arrays_of(tmp_path / "others")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_files_written_on_ray_are_those_of_one_process(
    ray: Any, tmp_path: Path, notes: Path, tiny_dense: Path, tiny_bert: Path, command: Callable[..., Any]
) -> None:
    index, model = str(tmp_path / "index"), str(tiny_dense)
    assert command("index", "bm25", str(notes), "--out", index)[0] == 0
    mined = str(tmp_path / "mined.jsonl")
    for words, out in (
        (("mine", index, str(notes), "--split", "test", "--negatives", "2"), mined),
        (("label", mined, "--corpus", str(notes), "--teacher", model), str(tmp_path / "labelled.jsonl")),
        (("encode", model, str(notes)), str(tmp_path / "vectors.npy")),
    ):
        code, _, error = command(*words, "--out", out)
        assert code == 0, error
        other = out.replace(".", "-ray.")
        code, _, error = command(*words, "--out", other, "--engine", "ray")
        assert code == 0, error
        assert Path(other).read_bytes() == Path(out).read_bytes()
    shards = ("--shards", "2")
    assert command("index", model, str(notes), "--out", f"{index}1", *shards)[0] == 0
    assert command("index", model, str(notes), "--out", f"{index}2", *shards, "--engine", "ray")[0] == 0
    assert ray_faults.files(Path(f"{index}1")) == ray_faults.files(Path(f"{index}2"))
    for words in (("--text", "search index"), (str(notes), "--k", "5")):
        plain = command("search", f"{index}1", *words)
        assert plain[0] == 0
        assert command("search", f"{index}1", *words, "--engine", "ray")[:2] == plain[:2]
    assert command("search", index, "--text", "search", "--engine", "ray")[0] == 2  # not in shards
    # a model of several heads
    heads, model = str(tmp_path / "heads"), make_model(tiny_bert, tmp_path / "model").name
    assert command("index", model, str(notes), "--out", heads, *shards)[0] == 0
    for fuse in ("rrf", "dense=0.4,sparse=0.2"):
        words = ("search", heads, "--text", "search index", "--fuse", fuse)
        plain = command(*words)
        assert plain[0] == 0
        assert command(*words, "--engine", "ray")[:2] == plain[:2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("has_codes", [False, True])
def test_several_heads_are_built_and_searched_on_ray_as_by_one_process(
    has_codes: bool, ray: Any, tmp_path: Path, tiny_bert: Path
) -> None:
    model = make_model(tiny_bert, tmp_path / "model")
    documents = make(300, "d", random.Random(6))
    heads = {"dense": {"kind": "dense", "keep": "none"}, "multi_vector": {"kind": "plaid", "device": "cpu"}}
    options: Any = {"index": {"kind": "several", "indexes": heads} if has_codes else None}
    options |= {"shards": 2, "chunk_size": 70}
    with use_limits(Limits(dense_scan=50, dense_points=2, plaid_uncompressed=50)):
        Retriever.build(model, documents, tmp_path / "one", **options).close()
        built = build_shards(model, documents, tmp_path / "ray", **options)
    one = open_store(tmp_path / "one")
    for ours, theirs in zip([built.store, *built.store.parts], [one, *one.parts], strict=True):
        assert ours.committed.arrays == theirs.committed.arrays
        assert ours.meta == theirs.meta
    queries, fuse = ["word1 word2", "word3"], {"dense": 0.3, "sparse": 0.7}
    with (
        Retriever.load(tmp_path / "one", model) as retriever,
        ShardedRetriever.load(tmp_path / "ray", model, timeout=120) as many,
    ):

        def check() -> None:
            assert len(many.actors.replicas) == 2  # all heads share them
            for options in ({}, {"fuse": fuse}, {"fuse": fuse, "filter": {"year": 2001}}):
                wanted = retriever.search(queries, 20, **options)
                assert built.search(queries, 20, **options) == wanted
                assert many.search(queries, 20, **options) == wanted
            assert many.explain(queries[0], "d1").score == retriever.explain(queries[0], "d1").score
            assert many.missing == ()

        check()
        os.kill(pids(ray, many)[0], signal.SIGKILL)
        check()
        for each in (retriever, many):
            each.add(make(9, "n", random.Random(1)))
            each.remove(["d3", "d4"])
        built.refresh()
        check()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_documents_in_windows_are_built_and_searched_on_ray_as_by_one_process(
    ray: Any, tmp_path: Path, tiny_bert: Path
) -> None:
    model, documents = make_model(tiny_bert, tmp_path / "model"), collection(60)
    heads = {"dense": {"kind": "dense", "keep": "none"}, "multi_vector": {"kind": "plaid", "device": "cpu"}}
    options: Any = {"index": {"kind": "several", "indexes": heads}, "windows": LENGTH, "chunk_size": 70}
    with use_limits(Limits(dense_scan=50, dense_points=2, plaid_uncompressed=50)):
        one = Retriever.build(model, documents, tmp_path / "one", shards=2, **options)
        built = build_shards(model, documents, tmp_path / "ray", shards=2, **options)
    for ours, theirs in zip([built.store, *built.store.parts], [one.store, *one.store.parts], strict=True):
        assert ours.committed.arrays == theirs.committed.arrays
        assert ours.meta == theirs.meta
    one = Retriever.load(tmp_path / "one", model)  # with the limits of a search
    with ShardedRetriever.load(tmp_path / "ray", model, timeout=120) as many:
        for _ in range(2):
            for options in ({}, {"fuse": {"dense": 0.3, "sparse": 0.7}}, {"filter": {"year": 1992}}):
                wanted = one.search(["gnu hip", "neural search"], 20, **options)
                assert any(hit.passage for hits in wanted for hit in hits)
                assert many.search(["gnu hip", "neural search"], 20, **options) == wanted
            for each in (one, many):
                each.update(collection(5, seed=2))
                each.remove([document.id for document in each.documents][:3])


CLIENT = """
import sys
from irkit import Retriever
from irkit.ray_engine import ShardedRetriever, build_shards

folder, address = sys.argv[1:]
build_shards("bm25", "corpus.jsonl", f"{folder}/ray", shards=3, chunk_size=90, address=address).close()
queries = ["word3 word299", "word5"]
with Retriever.load(f"{folder}/one") as one, ShardedRetriever.load(f"{folder}/ray", timeout=120) as many:
    assert many.search(queries) == one.search(queries)
"""


@contextlib.contextmanager
def head(token: str, folder: str) -> Iterator[str]:
    """Start a Ray on this machine that lets clients in with a token; give its address."""
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(str(probe.getsockname()[1]))
    words = f"--node-ip-address 127.0.0.1 --port {ports[0]} --ray-client-server-port {ports[1]}".split()
    words += ["--min-worker-port", "0", "--max-worker-port", "0", "--num-cpus", "2", "--disable-usage-stats"]
    words += ["--include-dashboard=false", "--temp-dir", folder]
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    secret["RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S"] = "300"  # by default 30, too few on a busy machine
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *words]
    options: Any = {"env": os.environ | secret, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **options)
    try:
        yield f"ray://127.0.0.1:{ports[1]}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.slow
def test_a_client_of_a_cluster_builds_and_searches(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs: pip install 'irkit[ray]'")
    texts = [(str(number), f"word{number} word{number % 7}") for number in range(300)]
    lines = [json.dumps({"id": id, "text": text}) for id, text in texts]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))  # the client gives its name in its own folder
    Retriever.build("bm25", tmp_path / "corpus.jsonl", tmp_path / "one", shards=3, chunk_size=90).close()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, head("a" * 64, folder) as address:
        for token, worked in (("a" * 64, True), ("b" * 64, False)):
            command = [sys.executable, "-W", "ignore", "-c", CLIENT, str(tmp_path), address]
            options: Any = {
                "env": os.environ | {"RAY_AUTH_TOKEN": token},
                "capture_output": True,
                "cwd": tmp_path,
            }
            done = subprocess.run(command, text=True, **options)
            # Ray forks the server of a client beside threads of gRPC, which ends the child now and then
            if "Starting Ray client server failed" in done.stderr:
                done = subprocess.run(command, text=True, **options)
            assert (done.returncode == 0) is worked, done.stderr
            assert worked or "and its token in" in done.stderr
    assert ray_faults.files(tmp_path / "one") == ray_faults.files(tmp_path / "ray")


@pytest.mark.slow
def test_builds_survive_kills(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs: pip install 'irkit[ray]'")
    counts = ray_faults.run(4, tmp_path, documents=5000)
    assert counts["builds"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize(("part", "count"), [("search", 3), ("heads", 3), ("change", 3), ("stop", 1)])
def test_searches_survive_kills_changes_and_stops(part: str, count: int) -> None:
    pytest.importorskip("ray", reason="needs: pip install 'irkit[ray]'")
    # in a process of its own, as this one may be connected to a Ray
    command = [sys.executable, "-W", "ignore", ray_faults.__file__, str(count), part]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
