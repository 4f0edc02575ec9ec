"""Kill builders, nodes and the driver of builds on Ray at random moments: ``python tests/ray_faults.py 20``.

``python tests/ray_faults.py 20 plaid`` builds another kind of `KINDS`, and ``python tests/ray_faults.py 20
search`` kills the actors of a search, and nodes, instead: every answer must be that of one process.
``python tests/ray_faults.py 20 plaid node builder`` names the victims.

A cluster of three nodes runs on this machine: one with the driver, and two with a CPU each for the actors. A
build goes on under kills; when the driver dies, the same command is given again. Every finished build must
have the files of an undisturbed one, with the same checksums.
"""

from __future__ import annotations

import contextlib
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
from pathlib import Path
from typing import Any

import numpy as np

from irkit import Retriever
from irkit.index import Limits, use_limits
from irkit.shards import open_store

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # so that 127.0.0.1 stays what it is

SHARDS, CHUNK = 3, 50
STORE_BYTES = 100 << 20
WAIT = (1.0, 8.0)  # seconds between two kills
VICTIMS = ("builder", "builder", "driver", "node")
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


def processes(title: str) -> list[int]:
    """Return the ids of processes whose title begins so."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(title.encode()):
                found.append(int(folder.name))
    return found


class Nodes:
    """A cluster on this machine, whose nodes can be killed."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()
        self._add(num_cpus=0)
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

    def kill(self, number: int) -> None:
        """End a node by SIGKILL, and start another one in its place."""
        node = self.workers[number]
        for infos in list(node.all_processes.values()):
            for info in infos:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(info.process.pid, signal.SIGKILL)
        with contextlib.suppress(Exception):
            self.cluster.remove_node(node, allow_graceful=False)
        self.workers[number] = self._add(num_cpus=1)


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
                victim, builders = numbers.choice(victims), processes("ray::ShardBuilder")
                if not builders:  # nothing is being built yet
                    continue
                if victim == "builder":
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(numbers.choice(builders), signal.SIGKILL)
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


def search(
    kills: int,
    folder: Path,
    documents: int = 2000,
    seed: int = 0,
    victims: Sequence[str] = ("searcher", "searcher", "node"),
) -> Counter[str]:
    """Search while actors and nodes are killed; return how often each victim died, and the searches.

    Raises:
        AssertionError: An answer is not that of one process.
    """
    import ray

    from irkit.ray_engine import ShardedRetriever

    numbers, counts, out = random.Random(seed), Counter[str](), folder / "searched"
    write_corpus(folder / "corpus.jsonl", documents, seed)
    Retriever.build("bm25", folder / "corpus.jsonl", out, shards=SHARDS).close()
    queries = [f"word{numbers.randrange(100)} word{numbers.randrange(100)}" for _ in range(20)]
    with Retriever.load(out) as one:
        expected = [one.search(query) for query in queries]
    with cluster() as nodes:
        ray.init(address=nodes.address, _node_ip_address="127.0.0.1", log_to_driver=False)
        try:
            with ShardedRetriever.load(out, replicas=2, timeout=120) as many:
                while sum(counts[victim] for victim in set(victims)) < kills:
                    end = time.monotonic() + numbers.uniform(*WAIT) / 4
                    while time.monotonic() < end:
                        at = counts["searches"] % len(queries)
                        assert many.search(queries[at]) == expected[at]
                        assert many.missing == ()
                        counts["searches"] += 1
                    victim = numbers.choice(victims)
                    if victim == "node":
                        nodes.kill(numbers.randrange(2))
                    else:
                        with contextlib.suppress(ProcessLookupError, IndexError):
                            os.kill(numbers.choice(processes("ray::ShardSearcher")), signal.SIGKILL)
                    counts[victim] += 1
                    say(f"killed {victim}: {dict(counts)}")
                for query, wanted in zip(queries, expected, strict=True):
                    assert many.search(query) == wanted
        finally:
            ray.shutdown()
    return counts


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build(*sys.argv[2:])
    else:
        count, kind, *names = int(sys.argv[1]), *(sys.argv[2:] or ["bm25"])
        chosen = {"victims": names} if names else {}
        with tempfile.TemporaryDirectory() as temporary:
            done = (
                search(count, Path(temporary), **chosen)
                if kind == "search"
                else run(count, Path(temporary), 5000 if kind != "bm25" else 20_000, kind=kind, **chosen)
            )
            say(str(dict(done)))
