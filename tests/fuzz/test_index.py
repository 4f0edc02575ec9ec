"""Indexes whose files were damaged, or made by somebody else: an error, or another ranking."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from irkit_kernels.sparse_search import Thresholds

from irkit import Model, Retriever
from irkit.data import Document
from irkit.index import Limits, use_limits
from irkit.index.array_files import read_manifest
from irkit.shards import rewrite

N, DIM = 160, 16
WORDS = [f"{first}{second}" for first, second in itertools.product("bdfgklmnprst", "aeiou")]
MANIFEST = "irkit.json"
SPARSE = {"kind": "inverted", "mode": "exact"}
CODES = {"kind": "plaid", "nbits": 2}
FLAT = dict.fromkeys(("dense", "sparse", "multi_vector"), "flat")
KINDS: dict[str, tuple[str, str, Any]] = {  # model, vectors, index
    "flat": ("vectors", "dense", "flat"),
    "flat_multi_vector": ("vectors", "multi_vector", "flat"),
    "flat_sparse": ("impacts", "sparse", "flat"),
    "flat_bm25": ("bm25", "text", "flat"),
    **{
        f"flat_{dtype}": ("vectors", "dense", {"kind": "flat", "dtype": dtype})
        for dtype in ("bfloat16", "float16")
    },
    "flat_dense_int8": ("vectors", "dense", {"kind": "flat", "dtype": "int8"}),
    "flat_int8": ("vectors", "multi_vector", {"kind": "flat", "dtype": "int8"}),
    **{
        f"dense_{keep}": ("vectors", "dense", {"kind": "dense", "keep": keep})
        for keep in ("none", "int8", "float16", "float32")
    },
    **{
        f"dense_{bits}_bits": ("vectors", "dense", {"kind": "dense", "keep": "int8", "bits": bits})
        for bits in (2, 4)
    },
    "hnsw": ("vectors", "dense", "hnsw"),
    "ivf": ("vectors", "dense", "ivf"),
    "pq": ("vectors", "dense", "pq"),
    "ivfpqfs": ("vectors", "dense", "ivfpqfs"),
    "pca": ("vectors", "dense", "PCAR8,IVF4_HNSW8,PQ4x4"),
    "inverted": ("impacts", "sparse", SPARSE),
    "inverted_uint8": ("impacts", "sparse", {**SPARSE, "dtype": "uint8"}),
    "approximate": ("impacts", "sparse", {**SPARSE, "mode": "approximate"}),
    "bm25": ("bm25", "text", SPARSE),
    "bm25_uint16": ("bm25", "text", {"kind": "inverted", "mode": "approximate", "dtype": "uint16"}),
    **{
        f"plaid_{bits}": ("vectors", "multi_vector", {"kind": "plaid", "nbits": bits})
        for bits in (1, 2, 4, 8)
    },
    "plaid_tokens": ("vectors", "multi_vector", {"kind": "plaid", "keep_tokens": True, "nprobe": 2}),
    "muvera": ("vectors", "multi_vector", {"kind": "muvera", "repetitions": 2, "bits": 2, "candidates": 20}),
    "several": ("tiny several", "text", {"kind": "several", "indexes": {"multi_vector": CODES}}),
    "several_flat": ("tiny several", "text", {"kind": "several", "indexes": FLAT}),
    "windows_flat": ("tiny dense", "text", "flat"),
    "windows_dense": ("tiny dense", "text", "dense"),
    "windows_inverted": ("tiny sparse", "text", {"kind": "inverted"}),
    "windows_plaid": ("tiny multi_vector", "text", CODES),
    "windows_several": ("tiny several", "text", {"kind": "several", "indexes": {"multi_vector": CODES}}),
    "shards_bm25": ("bm25", "text", SPARSE),
    "shards_dense": ("vectors", "dense", {"kind": "dense", "keep": "int8"}),
    "shards_faiss": ("vectors", "dense", "ivfpqfs"),
    "shards_plaid": ("vectors", "multi_vector", CODES),
    "shards_windows_plaid": ("tiny multi_vector", "text", CODES),
    "shards_windows_several": (
        "tiny several",
        "text",
        {"kind": "several", "indexes": {"multi_vector": CODES}},
    ),
}


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    """Structures are made and searched for few documents, too."""
    limits = Limits(
        flat_scan=16,
        flat_share=1,
        dense_scan=10,
        dense_scan_per_hit=1,
        faiss_scan=16,
        faiss_scan_per_hit=1,
        inverted_unlisted=16,
        plaid_uncompressed=64,
        plaid_scan=8,
        plaid_candidates=8,
        plaid_visited=2,
        inverted_kernel=Thresholds(few=8, approximate=16, per_score=0),
    )
    with use_limits(limits):
        yield


@functools.cache
def documents(kind: str, start: int, stop: int) -> list[Document]:
    """Of a kind of vectors, or of texts; always the same."""
    items = []
    for number in range(start, stop):
        rng = np.random.default_rng(number)
        words = rng.choice(WORDS, rng.integers(1, 12)).tolist()
        vector: Any = {
            "dense": rng.normal(size=DIM),
            "multi_vector": rng.normal(size=(rng.integers(1, 6), DIM)),
            "sparse": {word: float(rng.random() + 0.1) for word in words},
            "text": None,
        }[kind]
        metadata = {"number": number, "lang": ["de", "en"][number % 2]} if number % 3 else {}
        items.append(Document(f"d{number}", " ".join(words), f"title {number}", metadata, vector))
    return items


@pytest.fixture(scope="module")
def tiny(tiny_bert: Path) -> dict[str, Model]:
    """Encoders of random weights."""
    heads = {"dense": {}, "sparse": "token_weight", "multi_vector": {"projection": {"dim": 8}}}
    torch.manual_seed(0)
    several = Model.several(tiny_bert, heads, device="cpu")
    return {"tiny several": several} | {f"tiny {name}": head for name, head in several.heads.items()}


def use(
    path: Path,
    vectors: str,
    change: bool = False,
    verify: bool = True,
    renew: Any = None,
    model: Model | None = None,
) -> Any:
    """What reads an index, and what it finds; ``renew`` changes the files after it was opened."""
    queries: Any = [item.vector for item in documents(vectors, 5000, 5003)]
    if vectors == "text":
        queries = [" ".join(WORDS[:5]), WORDS[7], "none"]
    with Retriever.load(path, model, verify=verify) as retriever:
        if renew:
            retriever.search(queries, 5)
            renew()
            retriever.refresh()
        found = [retriever.search(queries, 5), retriever.search(queries[0], 20)]
        found += [
            retriever.search(queries, 5, {"lang": "de"}),
            retriever.search(queries, 3, ["d3", "d9", "?"]),
        ]
        found += [retriever.run(dict(zip("abc", queries, strict=True)), 4).to_dict()]
        found += [retriever.explain(queries[0], "d7")] if vectors == "text" else []
        found += [list(retriever.documents), retriever.stats()["documents"], len(retriever)]
        if change:
            retriever.remove(["d4", "d5"])
            retriever.add(documents(vectors, 1000, 1024))
            found.append(retriever.search(queries, 5))
    if change:
        rewrite(path)
        with Retriever.load(path, model) as retriever:
            found.append(retriever.search(queries, 5))
    return found


def make_index(path: Path, name: str, tiny: dict[str, Model]) -> dict[str, bytes]:
    """The files of an index with a bit of everything, and their contents."""
    model, vectors, index = KINDS[name]
    options: Any = {"windows": {"length": 6, "stride": 4}} if "windows" in name else {}
    options |= {"shards": 2} if name.startswith("shards") else {}
    source = documents(vectors, 0, N)
    with Retriever.build(tiny.get(model, model), source, path, index=index, **options) as retriever:
        retriever.remove([f"d{number}" for number in range(10, 15)])
        retriever.add(documents(vectors, N, N + 12))
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


class Damage:
    """Mutations of the files of one index: of its manifest and arrays, and of those of its shards."""

    def __init__(self, files: dict[str, bytes], folder: Path, mutate: SimpleNamespace) -> None:
        self.files, self.folder, self.mutate = files, folder, mutate
        self.manifests = {name: json.loads(files[name]) for name in files if Path(name).name == MANIFEST}
        self.arrays = {
            str(Path(name).with_name(array)): str(Path(name).with_name(entry["file"]))
            for name, manifest in self.manifests.items()
            for array, entry in manifest["arrays"].items()
        }
        few = [name for name in sorted(self.manifests) for _ in range(len(self.arrays) // 3)]
        self.names = few + sorted(self.arrays)

    def make(self, random: Random) -> list[Any]:
        """Steps: a name with an edit, where the name is that of an array or of a manifest; or a word."""
        words = [["unrepaired"]] * (random.random() < 0.25) + [["change"]] * (random.random() < 0.1)
        words += [["unverified"]] * (random.random() < 0.1) + [["refreshed"]] * (random.random() < 0.1)
        steps = []
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            name = random.choice(self.names)
            value = self.manifests[name] if name in self.manifests else self.files[self.arrays[name]]
            steps.append([name, self.mutate.choose(random, value)])
        return words + steps

    def write(self, case: list[Any]) -> Path:
        """The damaged index; with checksums and sizes repaired unless the case says otherwise."""
        shutil.rmtree(self.folder, ignore_errors=True)
        files, edits = dict(self.files), dict[str, list[Any]]()
        for name, *edit in case:
            if edit and name in self.manifests:
                edits.setdefault(name, []).append(edit[0])
            elif edit:
                files[self.arrays[name]] = self.mutate.apply(files[self.arrays[name]], edit[0])
        for name in self.manifests:
            repair = ["unrepaired"] not in case
            files[name] = self._manifest(name, files, edits.get(name, []), repair)
        for name, content in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(content)
        return self.folder

    def _manifest(self, name: str, files: dict[str, bytes], edits: list[Any], repair: bool) -> bytes:
        manifest = json.loads(self.files[name])
        if repair:
            for entry in manifest["arrays"].values():
                file = str(Path(name).with_name(entry["file"]))
                if files[file] != self.files[file]:
                    size = int(np.prod(entry["shape"], dtype=int)) * np.dtype(entry["dtype"]).itemsize
                    entry["rows"] = len(files[file]) // size
                    entry["crc32"] = zlib.crc32(files[file][: entry["rows"] * size])
            manifest.pop("checksum")
        manifest = functools.reduce(self.mutate.apply, edits, manifest)
        if repair and isinstance(manifest, dict):
            manifest["checksum"] = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
        return json.dumps(manifest).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory, where there is such a place."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.mark.sampled
@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_index(
    name: str, fuzz: Any, mutate: SimpleNamespace, folder: Path, tiny: dict[str, Model]
) -> None:
    damage = Damage(make_index(folder / "good", name, tiny), folder / "bad", mutate)
    vectors, model = KINDS[name][1], tiny.get(KINDS[name][0])
    expected = {change: use(damage.write([]), vectors, change, model=model) for change in (False, True)}
    for entry in read_manifest(damage.files[MANIFEST], folder).arrays.values():
        assert entry.nbytes == len(damage.files[entry.file])

    def run(case: list[Any]) -> str:
        change, refreshed, verify = (["change"] in case), ["refreshed"] in case, ["unverified"] not in case
        path = damage.write([] if refreshed else case)
        renew = partial(damage.write, case) if refreshed else None
        found = use(path, vectors, change, verify, renew, model)
        if repr(found) == repr(expected[change]):
            return "right"
        trusted = not verify or refreshed  # a reader that refreshes compares no checksums
        return "wrong" if ["unrepaired"] in case and not trusted else "different"

    fuzz(f"index_{name}", damage.make, run)
