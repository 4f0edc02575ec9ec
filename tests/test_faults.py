"""A disk that loses power, fills up or fails at any moment: an index opens, as it was or as it shall be.

A small history of changes is recorded, down to single writes. For every moment of it the folders are made
that a power cut may leave: what was not synced is there, lost, full of zeros or torn, and of the names that
were made, moved and removed since their folder was synced some have come to the disk and some have not.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_indexes import CONFIGS, LIMITS

from irkit import Model, Retriever
from irkit.data import Document
from irkit.errors import StorageError
from irkit.index import compact, use_limits

FORMS = {
    **dict.fromkeys(("flat", "faiss", "dense", "dense_codes"), "dense"),
    **dict.fromkeys(("plaid", "muvera"), "multi_vector"),
    "inverted": "impacts",
    "bm25": "bm25",
}
SEVERAL = {"kind": "several", "indexes": {"dense": "flat", "sparse": "flat"}}
KINDS: dict[str, tuple[str, Any]] = {
    name: (form, CONFIGS.get(name, "inverted" if name == "bm25" else name)) for name, form in FORMS.items()
}
KINDS |= {"several": ("text", SEVERAL), "windows": ("text", "flat"), "windows_several": ("text", SEVERAL)}
FAST = ["flat", "bm25"]
SAVING = 5  # the step of a history that writes the copy
MODELS: dict[str, Model] = {}  # of the kinds whose documents are encoded


@pytest.fixture(scope="module", autouse=True)
def models(tiny_bert: Path) -> None:
    """Make encoders of random weights."""
    torch.manual_seed(0)
    MODELS["several"] = Model.several(tiny_bert, {"dense": {}, "sparse": "token_weight"}, device="cpu")
    MODELS["windows_several"] = MODELS["several"]
    MODELS["windows"] = MODELS["several"].heads["dense"]


@pytest.fixture(scope="module", autouse=True)
def little_is_much() -> Iterator[None]:
    """A dozen documents are looked up, not scanned."""
    with use_limits(LIMITS):
        yield


# ---- a history ----


def content(form: str, seed: int) -> Any:
    """A text, weights by term, or a vector."""
    rng = np.random.default_rng(seed)
    words = [f"word{number}" for number in rng.integers(0, 12, 5)]
    if form in ("bm25", "text"):
        return " ".join(words)
    if form == "impacts":
        return {word: float(rng.integers(1, 9)) for word in words}
    return rng.standard_normal((3, 4) if form == "multi_vector" else 4).astype(np.float32)


def documents(kind: str, begin: int, end: int, version: int = 0) -> list[Document]:
    form = KINDS[kind][0]
    made = [(f"d{number}", content(form, number + 1000 * version)) for number in range(begin, end)]
    if form in ("bm25", "text"):
        return [Document(name, text) for name, text in made]
    return [Document(name, f"version {version}", vector=given) for name, given in made]


def history(kind: str) -> list[Callable[[Path], object]]:
    """Changes below a folder, one after the other."""
    form, config = KINDS[kind]
    model = MODELS.get(kind) or (form if form in ("bm25", "impacts") else "vectors")
    options: Any = {
        "index": config,
        "chunk_size": 24 if kind.startswith("windows") else 6,
    }  # of windows, or documents
    options["windows"] = {"length": 4, "stride": 3} if kind.startswith("windows") else None

    def build(root: Path) -> None:
        Retriever.build(model, documents(kind, 0, 12), root / "index", **options)

    def rebuild(root: Path) -> None:
        Retriever.build(model, documents(kind, 5, 17, 1), root / "index", overwrite=True, **options)

    def load(root: Path) -> Retriever:
        return Retriever.load(root / "index", MODELS.get(kind))

    return [
        build,
        lambda root: load(root).add(documents(kind, 12, 24)),
        lambda root: load(root).remove(["d3", "d14"]),
        lambda root: load(root).update(documents(kind, 5, 9, 1)),
        lambda root: compact(root / "index"),
        lambda root: load(root).save(root / "copy"),
        rebuild,
        lambda root: load(root).add(documents(kind, 30, 32)),
    ]


def seen(kind: str, root: Path) -> tuple[Any, ...]:
    """All that readers see of the index and of its copy; None for one that is not there."""
    return tuple(_seen(kind, root / name) for name in ("index", "copy"))


def _seen(kind: str, path: Path) -> Any:
    if not (path / "irkit.json").exists():
        with pytest.raises(StorageError, match="opening index"):
            Retriever.load(path)
        return None
    with Retriever.load(path, MODELS.get(kind)) as retriever:
        found = retriever.search([content(KINDS[kind][0], seed) for seed in (5, 500)], 40)
        kept = [(document.id, document.text) for document in retriever.documents]
        hits = [[(hit.id, hit.score) for hit in some] for some in found]
        return kept, hits, retriever.stats()["removed"]


def stems(folder: Path) -> list[str]:
    """Names of the files without their numbers."""
    return sorted(path.name.split(".g")[0] for path in folder.glob("*"))


# ---- a disk ----

Tree = dict[str, bytes | None]  # by path; None is a folder


class Disk:
    """Follows the changes below a folder and collects what a cut may leave of it.

    Attributes:
        left: Folders, each with the steps of the history of which it may show the result.
        operations: Changes seen.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.left: dict[frozenset[Any], set[int]] = {}
        self.operations = 0
        self.allowed: set[int] = set()
        self._names: dict[str, int] = {}  # number of the file by path, 0 for a folder
        self._durable: dict[str, int] = {}
        self._waiting: list[tuple[str, str, int | None]] = []  # folder, path, number; None where removed
        self._contents: dict[int, list[bytes]] = {}  # the synced one, then those since
        self._numbers = itertools.count(1)
        self._one_at_a_time = threading.RLock()

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Follow what changes a disk through `os`; other writes, such as mapped ones, are found between."""
        for name in ("pwrite", "ftruncate", "truncate", "posix_fallocate", "unlink", "mkdir"):
            patch.setattr(os, name, self._around(getattr(os, name)))
        for name in ("replace", "rename"):
            patch.setattr(os, name, self._around(getattr(os, name), self._moved))
        patch.setattr(os, "fsync", self._around(os.fsync, self._synced))

    def _around(
        self, real: Callable[..., Any], after: Callable[..., None] | None = None
    ) -> Callable[..., Any]:
        def function(*arguments: Any, **options: Any) -> Any:
            with self._one_at_a_time:
                self.look()
                result = real(*arguments, **options)
                if after is not None:
                    after(*arguments)
                self.look()
                return result

        return function

    def look(self) -> None:
        """Take in what has changed since."""
        real = {str(path.relative_to(self.root)): path for path in sorted(self.root.rglob("*"))}
        for path in [path for path in self._names if path not in real]:
            del self._names[path]
            self._name(path, None)
        for path, place in real.items():
            if path not in self._names:
                number = 0 if place.is_dir() else next(self._numbers)
                self._contents.setdefault(number, [b""])
                self._names[path] = number
                self._name(path, number)
            if place.is_file():
                content, versions = place.read_bytes(), self._contents[self._names[path]]
                if content != versions[-1]:
                    versions.append(content)
                    self.cut()

    def _name(self, path: str, number: int | None) -> None:
        self._waiting.append((str(Path(path).parent), path, number))
        self.cut()

    def _moved(self, source: Any, target: Any) -> None:
        if self.root not in Path(target).parents:  # an index that is tried in a temporary folder
            return
        old, new = (str(Path(path).relative_to(self.root)) for path in (source, target))
        number = self._names[new] = self._names.pop(old)
        self._waiting.append((str(Path(new).parent), f"{old}\0{new}", number))  # both in one
        self.cut()

    def _synced(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if self.root != path and self.root not in path.parents:
            return
        name = str(path.relative_to(self.root))
        if path.is_dir():
            kept = [change for change in self._waiting if change[0] != name]
            self._apply(self._durable, [change for change in self._waiting if change[0] == name])
            self._waiting = kept
        else:
            del self._contents[self._names[name]][:-1]
        self.cut()

    @staticmethod
    def _apply(names: dict[str, int], changes: Sequence[tuple[str, str, int | None]]) -> dict[str, int]:
        for _, path, number in changes:
            source, _, target = path.rpartition("\0")
            names.pop(source or path, None)
            if number is not None:
                names[target] = number
        return names

    def cut(self) -> None:
        """Collect what is left if the power goes now."""
        self.operations += 1
        waiting = self._waiting
        some = [waiting[:count] for count in range(len(waiting) + 1)]
        some += [waiting[:place] + waiting[place + 1 :] for place in range(len(waiting) - 1)]
        for changes in some:
            names = self._apply(dict(self._durable), changes)
            for path in list(names):  # a folder that is lost takes along what is in it
                if path.rpartition("/")[0] not in ("", *names):
                    del names[path]
            unsynced = {number for number in names.values() if len(self._contents.get(number, ())) > 1}
            for way in (_all, _none, _zeros, _torn):
                self._keep(names, dict.fromkeys(unsynced, way))
            if len(changes) == len(waiting):
                for number, way in itertools.product(unsynced, (_none, _zeros, _torn)):
                    self._keep(names, {number: way})

    def _keep(self, names: dict[str, int], ways: dict[int, Callable[[list[bytes]], bytes]]) -> None:
        tree = frozenset(
            (path, ways.get(number, _all)(self._contents[number]) if number else None)
            for path, number in names.items()
        )
        self.left[tree] = self.left.get(tree, self.allowed) & self.allowed


def _all(versions: list[bytes]) -> bytes:
    return versions[-1]


def _none(versions: list[bytes]) -> bytes:
    return versions[0]


def _zeros(versions: list[bytes]) -> bytes:
    """The length has come to the disk, what was appended has not."""
    return versions[0][: len(versions[-1])].ljust(len(versions[-1]), b"\0")


def _torn(versions: list[bytes]) -> bytes:
    """Half of what was appended has."""
    old, new = versions[0], versions[-1]
    return new[: (len(old) + len(new)) // 2] if len(new) > len(old) else new + old[len(new) :][:1]


def put(tree: Tree, root: Path) -> None:
    """Make a folder hold these files."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for path, content in sorted(tree.items()):
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)


def files(root: Path) -> Tree:
    paths = sorted(root.rglob("*"))
    return {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in paths}


# ---- power cuts ----


Recorded = tuple[Disk, list[Any], list[Tree], list[dict[str, list[str]]]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recorded]:
    return functools.cache(lambda kind: record(kind, tmp_path_factory.mktemp(kind)))


def record(kind: str, root: Path) -> Recorded:
    """Carry out the history; what is seen before it and after each step, all files, and their names."""
    disk, steps = Disk(root), history(kind)
    states, trees, names = [seen(kind, root)], [dict[str, bytes | None]()], [dict[str, list[str]]()]
    for number, step in enumerate(steps, 1):
        disk.allowed = {number - 1, number}
        with pytest.MonkeyPatch.context() as patch:
            disk.watch(patch)
            step(root)
            disk.look()
        disk.allowed = {number}  # it was acknowledged
        disk.cut()
        states.append(seen(kind, root))
        trees.append(files(root))
        names.append({name: stems(root / name) for name in ("index", "copy")})
    return disk, states, trees, names


def check_cuts(kind: str, found_before: Recorded, root: Path, wanted: int | None) -> tuple[int, int]:
    """Look at what cuts leave, all of it or so many, and go on from there."""
    disk, states, _, names = found_before
    steps = history(kind)
    assert all(one != other for one, other in itertools.pairwise(states))
    chosen = list(disk.left.items())
    if wanted is not None:
        order = np.random.default_rng(len(kind)).permutation(len(chosen))[:wanted]
        chosen = [chosen[number] for number in sorted(order.tolist())]
    for number, (tree, allowed) in enumerate(chosen):
        put(dict(tree), root)
        found = seen(kind, root)
        assert found in [states[step] for step in allowed], (number, allowed)
        step = max(step for step in allowed if states[step] == found)
        if step < len(steps):
            steps[step](root)
            assert seen(kind, root) == states[step + 1], (number, step)
            written = "copy" if step == SAVING else "index"
            assert stems(root / written) == names[step + 1][written], (number, step)
    return disk.operations, len(chosen)


@pytest.mark.parametrize("kind", ["flat", pytest.param("bm25", marks=pytest.mark.slow)])
def test_a_cut_leaves_the_old_index_or_the_new_one(kind: str, recorded: Any, tmp_path: Path) -> None:
    operations, checked = check_cuts(kind, recorded(kind), tmp_path / "cut", 25)
    assert operations > 200
    assert checked == 25


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_cut_leaves_the_old_index_or_the_new_one(
    kind: str, recorded: Any, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    operations, checked = check_cuts(kind, recorded(kind), tmp_path / "cut", None)
    record_property("operations", operations)
    record_property("states", checked)
    assert checked > 500


# ---- faults that a process sees ----


class Faults:
    """Lets calls that change the disk fail below a folder: one of them, or all from one on.

    Attributes:
        calls: Made so far.
        happened: Whether one has failed.
    """

    def __init__(self, root: Path, place: int, code: int, lasting: bool = False) -> None:
        self.calls, self.happened = 0, False
        self._root, self._place, self._code, self._lasting = root, place, code, lasting

    def inject(self, patch: pytest.MonkeyPatch) -> None:
        names = ["pwrite", "posix_fallocate", "mkdir"]
        if not self._lasting:  # a disk that stays full can still remove and rename
            names += ["fsync", "ftruncate", "truncate", "unlink", "replace", "rename"]
        for name in names:
            patch.setattr(os, name, self._failing(getattr(os, name)))
        opened = Path.open

        def open_path(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            stream = opened(path, mode, *arguments, **options)
            if "w" in mode and self._root in path.parents:
                write = self._failing(stream.write)
                stream = _Stream(stream, write)
            return stream

        patch.setattr(Path, "open", open_path)

    def _failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def function(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self._place or (self._lasting and self.calls > self._place):
                self.happened = True
                raise OSError(self._code, os.strerror(self._code))
            return real(*arguments, **options)

        return function


class _Stream:
    def __init__(self, stream: Any, write: Callable[..., Any]) -> None:
        self._stream, self.write = stream, write

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.close()


def check_faults(kind: str, found_before: Recorded, root: Path, stride: int, lasting: bool) -> int:
    """Let each ``stride``-th call of every step fail; the change is then made or not, and made again."""
    _, states, trees, _ = found_before
    steps, count = history(kind), 0
    for step, action in enumerate(steps):
        for call in itertools.count(1 + step % stride, stride):
            put(trees[step], root)
            code = errno.ENOSPC if lasting or call // stride % 2 else errno.EIO
            faults = Faults(root, call, code, lasting)
            problem = None
            with pytest.MonkeyPatch.context() as patch:
                faults.inject(patch)
                try:
                    action(root)
                except StorageError as error:
                    problem = error
            if not faults.happened:
                break
            count += 1
            found = seen(kind, root)
            if found == states[step + 1]:  # all that may be missing is that it is durable, or tidy
                assert problem is None or "the change is made" in str(problem), (step, call, problem)
                continue
            assert found == states[step], (step, call)
            assert problem is not None
            action(root)
            assert seen(kind, root) == states[step + 1], (step, call)
    return count


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("kind", FAST)
def test_a_fault_leaves_the_old_index(kind: str, lasting: bool, recorded: Any, tmp_path: Path) -> None:
    assert check_faults(kind, recorded(kind), tmp_path / "faulty", 29, lasting) > 5


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_fault_leaves_the_old_index(kind: str, lasting: bool, recorded: Any, tmp_path: Path) -> None:
    assert check_faults(kind, recorded(kind), tmp_path / "faulty", 1, lasting) > 50


@pytest.mark.parametrize("kind", FAST)
def test_short_writes_change_nothing(
    kind: str, recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, states, trees, _ = recorded(kind)
    write, root = os.pwrite, tmp_path / "short"
    monkeypatch.setattr(os, "pwrite", lambda file, some, at: write(file, some[: 1 + len(some) // 3], at))
    root.mkdir()
    for step, state in zip(history(kind), states[1:], strict=True):
        step(root)
        assert seen(kind, root) == state
    assert files(root) == trees[-1]


@pytest.mark.parametrize("kind", FAST)
def test_an_object_goes_on_after_a_fault(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    history(kind)[0](root)
    for call in itertools.count(1, 5):
        path = tmp_path / f"copy{call}"
        with Retriever.load(root / "index") as source:
            source.save(path)
        retriever, query = Retriever.load(path), content(KINDS[kind][0], 5)
        before = retriever.search(query, 40)
        faults = Faults(path, call, errno.EIO)
        with pytest.MonkeyPatch.context() as patch:
            faults.inject(patch)
            try:
                retriever.add(documents(kind, 12, 24))
            except StorageError:
                assert retriever.search(query, 40) in (before, Retriever.load(path).search(query, 40))
        if not faults.happened:
            break
        if len(retriever) == 12:
            retriever.add(documents(kind, 12, 24))
        assert retriever.search(query, 40) == Retriever.load(path).search(query, 40)
        assert len(retriever) == 24
