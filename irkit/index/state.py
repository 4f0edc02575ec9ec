"""What a reader of a store sees: one committed state, pinned while it is read."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from irkit.errors import CorruptError, StorageError
from irkit.files import explained
from irkit.index.files import REMEDY, Array, Entry, Manifest, is_cut, read_manifest
from irkit.index.layout import check_layout
from irkit.index.place import absence

__all__ = ["Own", "Pin", "State", "load_state", "pinned"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class State:
    """A state of a store. Threads share a committed one, which stays as it is; an update has one of its own.

    Attributes:
        version: Unlike that of any other state.
        epoch: The version that was loaded; states of one epoch differ by appended rows.
        entries: The arrays, by name.
        meta: Free JSON values.
        generation: Number of the newest file.
        saved: The manifest that says all this; that of an update, what it began with.
        maps: The arrays mapped into memory.
        derived: What was computed from this state.
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
        """The same, to be changed."""
        entries, meta = dict(self.entries), copy.deepcopy(self.meta)
        return replace(self, entries=entries, meta=meta, maps=dict(self.maps), derived=dict(self.derived))

    def map(self, name: str, directory: Path) -> Array:
        """An array, mapped into memory when first asked for."""
        if name not in self.maps:
            self.maps[name] = self.entries[name].map(directory)
        return self.maps[name]

    def check_uncut(self, directory: Path) -> None:
        """Raise CorruptError if a file that is mapped was truncated."""
        for name, array in list(self.maps.items()):
            if is_cut(array):
                raise CorruptError(
                    f"index file {directory / self.entries[name].file}: cut short while it is in use; "
                    f"replace an index by another directory, never write into its files; {REMEDY}"
                )

    def verify(self, directory: Path) -> None:
        """Raise CorruptError unless the files are what was written."""
        for name, entry in self.entries.items():
            entry.verify(directory, self.map(name, directory))

    def manifest(self) -> bytes:
        """What is written of it."""
        return Manifest(self.entries, self.meta, self.generation).serialise()


def load_state(directory: Path, manifest: Path, version: int, verify: bool) -> State:
    """The state on disk, every file mapped; read again when a writer has replaced it meanwhile.

    Raises:
        StorageError: There is none.
        CorruptError: A file is missing or truncated, or altered, which only ``verify`` finds.
    """
    for _ in range(100):
        with explained(f"opening index {directory}"):
            try:
                data = manifest.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                raise absence(directory) from None
        found = read_manifest(data, manifest)
        check_layout(directory, found.arrays, found.meta)
        state = State(version, version, dict(found.arrays), dict(found.meta), found.generation, data)
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


class Own(threading.local):
    """What a store shows to one thread alone.

    Attributes:
        state: That of its update, or the one it has pinned; None is the committed one.
        updating: Whether it is the thread that changes the store.
        failed: Whether a step of its update has failed.
    """

    state: State | None = None
    updating = False
    failed = False


class Pin:
    """Shows a state to this thread while it is entered, unless the thread sees one of its own already."""

    __slots__ = ("_before", "_own", "_state")

    def __init__(self, own: Own, state: State) -> None:
        self._own, self._state = own, state

    def __enter__(self) -> State:
        own = self._own
        self._before = own.state
        own.state = state = self._before or self._state
        return state

    def __exit__(self, *exception: object) -> None:
        self._own.state = self._before


def pinned(method: F) -> F:
    """Let a method see one state of ``self.store`` throughout, see `Store.pinned`."""

    @functools.wraps(method)
    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        with self.store.pinned():
            return method(self, *arguments, **options)

    return cast(F, run)
