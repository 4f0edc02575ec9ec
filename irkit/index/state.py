"""States of a store, and snapshots: a reader sees one state as long as it reads."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from irkit.errors import CorruptError, StorageError
from irkit.index.array_files import Array, Entry, Manifest, corrupt, is_cut, read_manifest
from irkit.index.directory import absence
from irkit.index.layout import check_layout
from irkit.utils.atomic import explained

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class State:
    """A state of a store: committed and shared by threads, or being changed by an update.

    Attributes:
        version: Number that no other state has.
        epoch: Version of the state that was loaded; states of one epoch differ by appended rows.
        entries: The arrays, by name.
        meta: JSON values of the manifest.
        generation: Number of the newest file.
        saved: The manifest of this state, as bytes; of an update, the manifest that it began with.
        maps: Arrays that are mapped into memory.
        derived: Values that were computed from this state.
    """

    version: int = 0
    epoch: int = 0
    entries: dict[str, Entry] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    generation: int = 0
    saved: bytes = b""
    maps: dict[str, Array] = field(default_factory=dict)
    derived: dict[Hashable, Any] = field(default_factory=dict)

    def copy(self) -> State:
        """Return a copy that may be changed."""
        entries, meta = dict(self.entries), copy.deepcopy(self.meta)
        return replace(self, entries=entries, meta=meta, maps=dict(self.maps), derived=dict(self.derived))

    def map(self, name: str, directory: Path) -> Array:
        """Return an array, mapped into memory at the first call."""
        if name not in self.maps:
            self.maps[name] = self.entries[name].map(directory)
        return self.maps[name]

    def check_uncut(self, directory: Path) -> None:
        """Raise CorruptError if a file that is mapped was truncated."""
        for name, array in list(self.maps.items()):
            if is_cut(array):
                problem = (
                    "cut short while it is in use; replace an index by another directory, never write into "
                    "its files"
                )
                raise corrupt(f"file {directory / self.entries[name].file}", problem)

    def verify(self, directory: Path) -> None:
        """Raise CorruptError if a file is not what was written."""
        for name, entry in self.entries.items():
            entry.verify(directory, self.map(name, directory))

    def manifest(self) -> bytes:
        """Return its manifest."""
        return Manifest(self.entries, self.meta, self.generation).serialise()


def load_state(directory: Path, manifest: Path, version: int, verify: bool) -> State:
    """Load the state on disk and map every file; start again if a writer has replaced the state meanwhile.

    Raises:
        StorageError: There is no index.
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
        state = State(version, version, dict(parsed.arrays), dict(parsed.meta), parsed.generation, data)
        try:
            for name in state.entries:
                state.map(name, directory)
            break
        except CorruptError:
            if manifest.read_bytes() == data:
                raise
    else:
        raise StorageError(f"opening index {directory}: it is being rewritten all the time; try again")
    if verify:
        state.verify(directory)
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
