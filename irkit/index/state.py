"""States of a store, snapshots, and the reader of a state: arrays, values, and results derived from them."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from irkit.errors import BadValueError, CorruptError, StorageError
from irkit.index.array_files import (
    Array,
    Manifest,
    checksum,
    corrupt,
    is_cut,
    mapped_file,
    read_manifest,
    release,
)
from irkit.index.directory import absence
from irkit.index.layout import check_layout
from irkit.index.limits import current_limits
from irkit.utils.atomic import explained

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


@dataclass
class State(Manifest):
    """A state of a store: committed and shared by threads, or being changed by an update.

    Attributes:
        version: Number that no other state has.
        epoch: Version of the state that was loaded; states of one epoch differ by appended rows.
        saved: The manifest of this state, as bytes; of an update, the manifest that it began with.
        maps: Arrays that are mapped into memory.
        derived: Values that were computed from this state.
        grown: Values that a later state extends, and the files that each was computed from.
    """

    version: int = 0
    epoch: int = 0
    saved: bytes = b""
    maps: dict[str, Array] = field(default_factory=dict)
    derived: dict[Hashable, Any] = field(default_factory=dict)
    grown: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict)

    def copy(self) -> State:
        """Return a copy that may be changed."""
        arrays, meta = dict(self.arrays), json.loads(json.dumps(self.meta))  # faster than copy.deepcopy
        maps, derived, grown = dict(self.maps), dict(self.derived), dict(self.grown)
        return replace(self, arrays=arrays, meta=meta, maps=maps, derived=derived, grown=grown)

    def share(self, before: State, directory: Path) -> None:
        """Take over the maps of an earlier state whose files are the same."""
        for name, entry in self.arrays.items():
            array = before.maps.get(name)
            if array is not None and before.arrays[name] == entry and (file := mapped_file(array)):
                with contextlib.suppress(OSError):
                    status = (directory / entry.file).stat()
                    if file == (status.st_dev, status.st_ino):
                        self.maps[name] = array

    def follows(self, before: State) -> bool:
        """Return whether this state has the files of an earlier one, to which rows were only appended.

        Files of another build, or of a directory that replaced this one, are other files.
        """
        common = [name for name in self.arrays if name in before.maps and mapped_file(before.maps[name])]
        common = [name for name in common if self.arrays[name].file == before.arrays[name].file]
        return bool(common) and all(
            mapped_file(self.maps[name]) == mapped_file(before.maps[name])
            and self.arrays[name].rows >= before.arrays[name].rows
            for name in common
        )

    def map(self, name: str, directory: Path) -> Array:
        """Return an array, mapped into memory at the first call."""
        if name not in self.maps:
            self.maps[name] = self.arrays[name].map(directory)
        return self.maps[name]

    def verify(self, directory: Path) -> None:
        """Raise CorruptError if the checksum of a file differs from the one in the manifest."""
        for name, entry in self.arrays.items():
            actual = checksum(self.map(name, directory))
            if actual != entry.crc32:
                problem = f"altered; its checksum is {actual:08x}, expected {entry.crc32:08x}"
                raise corrupt(f"file {directory / entry.file}", problem)


def load_state(
    directory: Path, manifest: Path, version: int, verify: bool, before: State | None = None
) -> State:
    """Load the state on disk and map every file; start again if a writer has replaced the state meanwhile.

    Args:
        directory: Directory of the index.
        manifest: Its manifest.
        version: Number of the state.
        verify: Whether to compare checksums.
        before: An earlier state. If rows were only appended since, its epoch and what was computed from it
            are taken over.

    Raises:
        StorageError: The path has no index.
        CorruptError: A file is missing or truncated, or, with ``verify``, altered.
    """
    for _ in range(100):
        with explained(f"opening index {directory}"):
            try:
                data = manifest.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                raise absence(directory) from None
        parsed = read_manifest(data, manifest)
        check_layout(directory, parsed.arrays, parsed.meta)
        state = State(**vars(parsed), version=version, epoch=version, saved=data)
        if before is not None:
            state.share(before, directory)
        try:
            for name in state.arrays:
                state.map(name, directory)
            break
        except CorruptError:
            if manifest.read_bytes() == data:
                raise
    else:
        raise StorageError(f"opening index {directory}: it is being rewritten all the time; try again")
    if verify:
        state.verify(directory)
    if before is not None and state.follows(before):
        state.epoch, state.grown = before.epoch, dict(before.grown)
    return state


class ThreadState(threading.local):
    """What one thread alone sees of a store.

    Attributes:
        state: State of its update, or the snapshot that it reads; None is the committed state.
        updating: Whether this thread changes the store.
        failed: Whether a step of its update has failed.
    """

    state: State | None = None
    updating = False
    failed = False


class Snapshot:
    """Shows a state to this thread inside a ``with`` block, unless the thread sees one of its own already."""

    __slots__ = ("_before", "_own", "_state")

    def __init__(self, own: ThreadState, state: State) -> None:
        self._own, self._state = own, state

    def __enter__(self) -> State:
        own = self._own
        self._before = own.state
        own.state = state = self._before or self._state
        return state

    def __exit__(self, *exception: object) -> None:
        self._own.state = self._before


def snapshot(method: F) -> F:
    """Decorate a method so that it sees one state of ``self.store`` throughout, see `Store.snapshot`."""

    @functools.wraps(method)
    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        with self.store.snapshot():
            return method(self, *arguments, **options)

    return cast(F, run)


class StoreReader:
    """Reads the arrays and values of a store.

    A thread sees the last committed state; inside ``with store.snapshot():`` it sees the same state
    throughout, and inside an update of its own it sees the changes made so far.

    Attributes:
        path: The directory.
        committed: The last committed state, also inside a snapshot or an update.
        limits: Sizes at which an index in the store changes its method, and sizes of blocks.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.limits = path, current_limits()
        self.committed = State()
        self._own = ThreadState()
        self._checked = set[tuple[str, int, int]]()  # file, rows and epoch, see `once`

    @property
    def meta(self) -> dict[str, Any]:
        """JSON values of the manifest; change them inside ``update``."""
        return self.state.meta

    @property
    def version(self) -> int:
        """A number that rises with every change."""
        return self.state.version

    @property
    def epoch(self) -> int:
        """A number that rises when rows may change other than by appending.

        That is when the index is opened, when a change is undone, when a refresh finds other files, and
        when a process is forked inside a change.
        """
        return self.state.epoch

    def snapshot(self, state: State | None = None) -> Snapshot:
        """Return a context in which this thread sees one state, whatever is committed or refreshed meanwhile.

        Inside another snapshot, or inside ``update``, the thread keeps seeing that one.

        Args:
            state: An earlier snapshot; by default the last committed one.
        """
        return Snapshot(self._own, state or self.committed)

    def rows(self, name: str) -> int:
        """Return the rows of an array; 0 if this state lacks it."""
        entry = self.state.arrays.get(name)
        return entry.rows if entry else 0

    def file(self, name: str) -> str | None:
        """Return the name of the file of an array; None if this state lacks the array."""
        entry = self.state.arrays.get(name)
        return entry.file if entry else None

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every array by name."""
        return {name: entry.nbytes for name, entry in sorted(self.state.arrays.items())}

    def read(self, name: str) -> Array:
        """Return the array ``(rows, ...)``, mapped into memory; treat it as read-only."""
        state = self.state
        if name not in state.arrays:
            raise BadValueError(f"index {self.path}: no array {name!r}; it has {sorted(state.arrays)}")
        return state.map(name, self.path)

    def blocks(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[Array]:
        """Yield copies of rows ``start`` to ``stop``, 16 MB at a time; the file does not stay in memory."""
        array = self.read(name)
        chosen = array[start:stop]
        size = max(1, self.limits.read_bytes // max(1, chosen[:1].nbytes))
        for begin in range(0, len(chosen), size):
            yield chosen[begin : begin + size].copy()
            release(array)

    def take(self, name: str, rows: Array) -> Array:
        """Return a copy of ``rows (n,)``, ascending; the file does not stay in memory."""
        array, size = self.read(name), self.limits.take_rows
        copy = np.empty((len(rows), *array.shape[1:]), array.dtype)
        for start in range(0, len(rows), size):
            copy[start : start + size] = array[rows[start : start + size]]
            release(array)
        return copy

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of ``make()``, which sees one state; it is kept until the store changes."""
        values = self.state.derived
        if key not in values:
            with self.snapshot() as state:
                values = state.derived  # of the state that make() reads
                values[key] = make()
        value: T = values[key]
        return value

    def extended(self, key: Hashable, names: Sequence[str], extend: Callable[[T | None], T]) -> T:
        """Return the value of ``extend(before)``; it is kept until the store changes.

        Args:
            key: Name of the value.
            names: Arrays that the value is computed from.
            extend: Called with the value of an earlier state if these arrays have only got more rows since,
                and with None otherwise. It must not change what it is called with.
        """

        def make() -> T:
            state = self.state
            files = [entry and entry.file for entry in map(state.arrays.get, names)]
            before_files, before = state.grown.get(key, (None, None))
            value = extend(before if before_files == files else None)
            state.grown[key] = files, value
            return value

        return self.derived(key, make)

    def once(self, name: str, check: Callable[[], object]) -> None:
        """Call ``check()`` once for the rows of an array, and again only after the files are reopened."""
        entry = self.state.arrays[name]
        if (key := (entry.file, entry.rows, self.epoch)) not in self._checked:
            check()
            self._checked.add(key)

    def verify(self) -> None:
        """Compare the checksum of every file.

        Raises:
            CorruptError: A file was altered.
        """
        self.state.verify(self.path)

    def check_uncut(self) -> None:
        """Refuse a file that was truncated since it was opened: reading it would end the process.

        Raises:
            CorruptError: There is one.
        """
        state = self.state
        for name, array in list(state.maps.items()):
            if is_cut(array):
                problem = (
                    "cut short while it is in use; replace an index by another directory, never write into "
                    "its files"
                )
                raise corrupt(f"file {self.path / state.arrays[name].file}", problem)

    @property
    def state(self) -> State:
        """The state that this thread sees; it is not to be changed outside of this class."""
        return self._own.state or self.committed

    @property
    def updating(self) -> bool:
        """Whether this thread changes the store."""
        return self._own.updating
