"""Kill processes of Ray at random moments: ``python tests/ray_faults.py 50`` kills 50 and counts them.

``python tests/ray_faults.py 20 plaid`` does one part of that, and ``python tests/ray_faults.py 20 plaid node
builder`` names the victims. The parts:

* a kind of `KINDS`: builders, nodes and the driver of builds die. When the driver dies, the same command is
  given again. Every finished build must have the files of an undisturbed one, with the same checksums.
* ``search``: actors of searches and nodes die. Every answer must be that of one process. ``heads``: the same
  with a model of several heads, which share the actors.
* ``change``: the same while documents are added, updated and removed. Every answer must be that of one
  process before or after the change, and no change that has returned may be lost.
* ``stop``: actors are stopped by SIGSTOP, and go on by SIGCONT. Searches must be errors, or miss just the
  shards that they name, or be answered by another replica.

A cluster of three nodes runs on this machine: one with the driver, and two with a CPU each for the actors.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from three_heads import make_model
from tiny_bert import write_tiny_bert

from irkit import Retriever
from irkit.errors import StorageError
from irkit.index import Limits, use_limits
from irkit.shards import open_store
from irkit.shards.placement import shard_of

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # so that 127.0.0.1 stays what it is

SHARDS, CHUNK = 3, 50
STORE_BYTES = 100 << 20
WAIT = (1.0, 8.0)  # seconds between two kills
VICTIMS = ("builder", "builder", "driver", "node")
SEARCH_VICTIMS = ("searcher", "searcher", "node")
LONGEST = 900.0  # seconds of a build
KINDS: dict[str, tuple[str, Any]] = {
    "bm25": ("bm25", None),
    "codes": ("vectors", {"kind": "dense", "keep": "none"}),
    "plaid": ("vectors", {"kind": "plaid", "centroids": 64, "device": "cpu"}),
    "muvera": ("vectors", {"kind": "muvera", "repetitions": 4, "bits": 2}),
}
"""Model and index of each kind that is built."""
CODED = Limits(dense_scan=500, dense_points=8, plaid_uncompressed=500)  # so that few documents have codes


def write_corpus(path: Path, count: int, seed: int, kind: str = "bm25") -> None:
    """Write documents of random words, of which later ones bring new ones, or of vectors."""
    path.parent.mkdir(exist_ok=True)
    numbers, rng = random.Random(seed), np.random.default_rng(seed)
    with path.open("w") as stream:
        for number in range(count):
            words = [f"word{int(numbers.random() ** 2 * (100 + number))}" for _ in range(30)]
            record: dict[str, Any] = {"_id": f"d{number}", "text": " ".join(words), "year": number % 7}
            if kind != "bm25":
                shape = (16,) if kind == "codes" else (4, 16)
                record["vector"] = rng.standard_normal(shape).round(3).tolist()
            stream.write(json.dumps(record) + "\n")


def files(path: Path) -> list[Any]:
    """Names, rows and checksums of all arrays of all shards."""
    store = open_store(path, verify=True)
    return [
        {name: (entry.file, entry.rows, entry.crc32) for name, entry in each.committed.arrays.items()}
        for each in (store, *store.parts)
    ]


def build(address: str, corpus: str, out: str, kind: str) -> None:
    """Build the index on a cluster; the driver."""
    import ray

    from irkit.ray_engine import build_shards

    ray.init(address=address, _node_ip_address="127.0.0.1", log_to_driver=False)
    model, index = KINDS[kind]
    with use_limits(CODED):
        build_shards(model, corpus, out, shards=SHARDS, chunk_size=CHUNK, index=index).close()


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{time.strftime('%X')} {line}\n")
    sys.stdout.flush()


class Nodes:
    """A cluster on this machine, whose nodes can be killed."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()
        self.head = self._add(num_cpus=0)
        self.workers = [self._add(num_cpus=1) for _ in range(2)]
        self.address = self.cluster.address

    def _add(self, num_cpus: int) -> Any:
        return self.cluster.add_node(
            num_cpus=num_cpus,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            node_ip_address="127.0.0.1",
            wait=False,
        )

    def actors(self, kind: str) -> list[int]:
        """Return the ids of the processes of this cluster that are actors of a class."""
        nodes, found = {pid for node in (self.head, *self.workers) for pid in _pids(node)}, []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                title = (folder / "cmdline").read_bytes()
                if parent in nodes and title.startswith(f"ray::{kind}".encode()):
                    found.append(int(folder.name))
        return found

    def kill(self, number: int) -> None:
        """End a node by SIGKILL, and start another one in its place."""
        node = self.workers[number]
        for pid in _pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(Exception):
            self.cluster.remove_node(node, allow_graceful=False)
        self.workers[number] = self._add(num_cpus=1)


def kill_one(numbers: random.Random, pids: Sequence[int]) -> bool:
    """End one of some processes by SIGKILL; return False if it, or all, have ended already."""
    try:
        os.kill(numbers.choice(pids), signal.SIGKILL)
    except (IndexError, ProcessLookupError):
        return False
    return True


def _pids(node: Any) -> list[int]:
    return [info.process.pid for infos in list(node.all_processes.values()) for info in infos]


@contextlib.contextmanager
def cluster() -> Iterator[Nodes]:
    """Start a cluster, and end it."""
    nodes = Nodes()
    try:
        yield nodes
    finally:
        nodes.cluster.shutdown()


def run(
    kills: int,
    folder: Path,
    documents: int = 20_000,
    seed: int = 0,
    kind: str = "bm25",
    victims: Sequence[str] = VICTIMS,
) -> Counter[str]:
    """Build under so many kills; return how often each victim died, and the number of builds.

    Raises:
        AssertionError: A build ended with other files than an undisturbed one, or not at all.
    """
    numbers, counts = random.Random(seed), Counter[str]()
    corpus = folder / "corpus.jsonl"
    write_corpus(corpus, documents, seed, kind)
    model, index = KINDS[kind]
    with use_limits(CODED):
        whole = Retriever.build(model, corpus, folder / "whole", shards=SHARDS, chunk_size=CHUNK, index=index)
        whole.close()
    expected = files(folder / "whole")
    with cluster() as nodes:
        while sum(counts[victim] for victim in set(victims)) < kills:
            out = folder / f"build{counts['builds']}"
            command = [sys.executable, __file__, "build", nodes.address, str(corpus), str(out), kind]
            driver = _start(command, folder)
            end = time.monotonic() + LONGEST
            while True:
                assert time.monotonic() < end, f"{out} was not built in {LONGEST} s: {dict(counts)}"
                done = sum(counts[victim] for victim in set(victims)) >= kills
                with contextlib.suppress(subprocess.TimeoutExpired):
                    driver.wait(LONGEST if done else numbers.uniform(*WAIT))
                    assert driver.returncode == 0, (folder / "errors").read_text()[-3000:]
                    break
                victim, builders = numbers.choice(victims), nodes.actors("ShardBuilder")
                if not builders:  # nothing is being built yet
                    continue
                if victim == "builder":
                    if not kill_one(numbers, builders):
                        continue
                elif victim == "driver":
                    driver.kill()
                    driver.wait()
                    driver = _start(command, folder)
                else:
                    nodes.kill(numbers.randrange(2))
                counts[victim] += 1
                say(f"killed {victim}: {dict(counts)}")
            assert files(out) == expected, f"{out} has other files: {dict(counts)}"
            counts["builds"] += 1
            say(f"{out.name} has the files of an undisturbed build")
            shutil.rmtree(out)
    return counts


def _start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "errors").open("wb") as errors:
        return subprocess.Popen(command, stderr=errors)


class Searched:
    """Shards on a cluster, and the same documents in one index, which gives the expected answers."""

    def __init__(self, folder: Path, documents: int, seed: int, has_heads: bool = False) -> None:
        self.numbers, self.path, corpus = random.Random(seed), folder / "searched", folder / "corpus.jsonl"
        write_corpus(corpus, documents, seed)
        model: Any = "bm25"
        if has_heads:
            write_tiny_bert(folder)
            model = make_model(folder, folder / "model")
        self.one = Retriever.build(model, corpus, folder / "one")
        Retriever.build(model, corpus, self.path, shards=SHARDS).close()
        words = (self.numbers.randrange(100) for _ in range(40))
        self.queries = [f"word{first} word{second}" for first, second in zip(words, words, strict=True)]

    @contextlib.contextmanager
    def open(self, nodes: Nodes, **options: Any) -> Iterator[Any]:
        """Connect to a cluster, and give a `ShardedRetriever`."""
        import ray

        from irkit.ray_engine import ShardedRetriever

        ray.init(address=nodes.address, _node_ip_address="127.0.0.1", log_to_driver=False)
        try:
            with ShardedRetriever.load(self.path, **options) as many:
                yield many
        finally:
            ray.shutdown()

    def kill(self, nodes: Nodes, victims: Sequence[str], counts: Counter[str]) -> None:
        """Kill an actor or a node, and count it."""
        victim = self.numbers.choice(victims)
        if victim == "node":
            nodes.kill(self.numbers.randrange(2))
        elif not kill_one(self.numbers, nodes.actors("ShardSearcher")):
            return
        counts[victim] += 1
        say(f"killed {victim}: {dict(counts)}")

    def wait(self) -> float:
        """Return the time of the next kill."""
        return time.monotonic() + self.numbers.uniform(*WAIT) / 4


def search(
    kills: int,
    folder: Path,
    documents: int = 2000,
    seed: int = 0,
    victims: Sequence[str] = SEARCH_VICTIMS,
    has_heads: bool = False,
) -> Counter[str]:
    """Search while actors and nodes are killed; return how often each victim died, and the searches.

    Raises:
        AssertionError: An answer is not that of one process.
    """
    counts, searched = Counter[str](), Searched(folder, documents, seed, has_heads)
    expected = [searched.one.search(query) for query in searched.queries]
    with cluster() as nodes, searched.open(nodes, replicas=2, timeout=120) as many:
        while sum(counts[victim] for victim in set(victims)) < kills:
            end = searched.wait()
            while time.monotonic() < end:
                at = counts["searches"] % len(expected)
                assert many.search(searched.queries[at]) == expected[at]
                assert many.missing == ()
                counts["searches"] += 1
            searched.kill(nodes, victims, counts)
        for query, wanted in zip(searched.queries, expected, strict=True):
            assert many.search(query) == wanted
    return counts


def heads(kills: int, folder: Path, **options: Any) -> Counter[str]:
    """Do `search` with a model of several heads."""
    return search(kills, folder, 500, has_heads=True, **options)


def change(
    kills: int, folder: Path, documents: int = 2000, seed: int = 0, victims: Sequence[str] = SEARCH_VICTIMS
) -> Counter[str]:
    """Change documents, and search, while actors and nodes are killed; count victims, searches and changes.

    Raises:
        AssertionError: An answer is that of no state of the index, or a change that has returned is missing.
    """
    counts, searched = Counter[str](), Searched(folder, documents, seed)
    one, numbers = searched.one, searched.numbers

    def answers() -> list[Any]:
        return [one.search(query) for query in searched.queries]

    def is_done() -> bool:
        return sum(counts[victim] for victim in set(victims)) >= kills

    after = answers()
    with (
        cluster() as nodes,
        searched.open(nodes, replicas=2, timeout=120) as many,
        ThreadPoolExecutor() as pool,
    ):
        end = searched.wait()
        for step in itertools.count():
            if is_done():
                break
            # one change, by a thread of its own, while this one searches and kills
            verb, given = _draw(numbers, step, [document.id for document in one.documents])
            getattr(one, verb)(given)
            before, after = after, answers()
            call = pool.submit(getattr(many, verb), given)
            while not call.done():
                at = numbers.randrange(len(after))
                assert many.search(searched.queries[at]) in (before[at], after[at])
                assert many.missing == ()
                counts["searches"] += 1
                if time.monotonic() > end and not is_done():
                    searched.kill(nodes, victims, counts)
                    end = searched.wait()
            call.result()
            counts[verb] += 1
            # it has returned, so all searches see it
            for at in numbers.sample(range(len(after)), 5):
                assert many.search(searched.queries[at]) == after[at]
        for retriever in (many, Retriever.load(searched.path, verify=True)):
            assert [retriever.search(query) for query in searched.queries] == after
            assert list(retriever.documents) == list(one.documents)
    return counts


def _draw(numbers: random.Random, step: int, ids: list[str]) -> tuple[str, Any]:
    """Draw a change: its verb, and documents or ids."""
    verb, chosen = numbers.choice(("add", "update", "remove")), numbers.sample(ids, 7)
    if verb == "remove":
        return verb, chosen
    names = [f"n{step}-{number}" for number in range(9)] if verb == "add" else chosen
    return verb, [
        {"_id": name, "text": " ".join(f"word{numbers.randrange(120)}" for _ in range(30))} for name in names
    ]


def stop(stops: int, folder: Path, documents: int = 500, seed: int = 0) -> Counter[str]:
    """Stop actors for the time of some searches; count how often.

    Raises:
        AssertionError: A search did not miss the shards of a stopped actor, or others, or did not say so.
    """
    counts, searched = Counter[str](), Searched(folder, documents, seed)
    numbers, query = searched.numbers, "word1 word2 word3"
    whole = searched.one.search(query, documents)

    @contextlib.contextmanager
    def stopped(actor: Any) -> Iterator[None]:
        import ray

        pid = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    with cluster() as nodes:
        with use_limits(Limits(shared_bytes=0)), searched.open(nodes, timeout=5) as many:
            names = [part.path.name for part in many.store.parts]
            for _ in range(stops):
                number = numbers.randrange(len(many.actors.replicas))
                gone = set(many.actors.groups[number])
                with stopped(many.actors.replicas[number][0]):
                    with many.watch(False):
                        try:
                            raise AssertionError(f"no error: {many.search(query)}")
                        except StorageError as error:
                            assert "no answer of" in str(error)  # noqa: PT017
                    with many.watch(True) as seen:
                        some = many.search(query, documents)
                    assert seen.missing == set(many.missing) == {names[shard] for shard in gone}
                    assert some == [hit for hit in whole if shard_of([hit.id], SHARDS)[0] not in gone]
                assert many.search(query, documents) == whole
                assert many.missing == ()
                counts["stopped"] += 1
        with searched.open(nodes, replicas=2, timeout=20) as many, stopped(many.actors.replicas[0][0]):
            with many.watch(False) as seen:
                for _ in range(4):  # one of them asks the stopped replica first
                    assert many.search(query, documents) == whole
            assert seen.repeated > 0
            counts["stopped, with another replica"] += 1
    return counts


def everything(kills: int, folder: Path) -> Counter[str]:
    """Do all parts, a half of the kills in builds; return all counts."""
    counts, build_kills = Counter[str](), max(1, kills // 8)
    for kind in KINDS:
        counts += run(build_kills, folder / kind, 20_000 if kind == "bm25" else 5000, kind=kind)
    rest = max(3, kills - len(KINDS) * build_kills)
    counts += search(rest // 3, folder / "search")
    counts += heads(rest // 3, folder / "heads")
    counts += change(rest - 2 * (rest // 3), folder / "change")
    return counts + stop(3, folder / "stop")


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build(*sys.argv[2:])
    else:
        count, part, *names = int(sys.argv[1]), *(sys.argv[2:] or ["everything"])
        chosen = {"victims": names} if names else {}
        with tempfile.TemporaryDirectory() as temporary:
            others = {
                "search": search,
                "heads": heads,
                "change": change,
                "stop": stop,
                "everything": everything,
            }
            done: Counter[str] = (
                others[part](count, Path(temporary), **chosen)  # type: ignore[operator]
                if part in others
                else run(count, Path(temporary), 5000 if part != "bm25" else 20_000, kind=part, **chosen)
            )
            killed = {name: done[name] for name in ("builder", "searcher", "node", "driver") if done[name]}
            say(f"{sum(killed.values())} kills: {killed}; {dict(done)}")
