"""What a store shows: arrays and values of one committed state, and what is derived from them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from irkit.errors import BadValueError
from irkit.index.array_files import Array, release
from irkit.index.limits import current_limits
from irkit.index.state import Snapshot, State, ThreadState

T = TypeVar("T")


class StoreReader:
    """Reads the arrays and values of a store.

    A thread sees the last committed state; inside ``with store.snapshot():`` it sees the same state
    throughout, and inside an update of its own it sees the changes made so far.

    Attributes:
        path: The directory.
        limits: Sizes at which an index in the store changes its method, and sizes of blocks.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.limits = path, current_limits()
        self._committed = State()
        self._own = ThreadState()
        self._checked = set[tuple[str, int, int]]()  # file, rows and epoch, see `once`

    @property
    def meta(self) -> dict[str, Any]:
        """JSON values of the manifest; change them inside ``update``."""
        return self._state.meta

    @property
    def version(self) -> int:
        """A number that rises with every change."""
        return self._state.version

    @property
    def epoch(self) -> int:
        """A number that rises when rows may change other than by appending (open, refresh, roll back)."""
        return self._state.epoch

    def snapshot(self, state: State | None = None) -> Snapshot:
        """Return a context in which this thread sees one state, whatever is committed or refreshed meanwhile.

        Inside another snapshot, or inside ``update``, the thread keeps seeing that one.

        Args:
            state: An earlier snapshot; by default the last committed one.
        """
        return Snapshot(self._own, state or self._committed)

    def rows(self, name: str) -> int:
        """Return the rows of an array; 0 if there is none of this name."""
        entry = self._state.entries.get(name)
        return entry.rows if entry else 0

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every array by name."""
        return {name: entry.nbytes for name, entry in sorted(self._state.entries.items())}

    def read(self, name: str) -> Array:
        """Return the array ``(rows, ...)``, mapped into memory; treat it as read-only."""
        state = self._state
        if name not in state.entries:
            raise BadValueError(f"index {self.path}: no array {name!r}; it has {sorted(state.entries)}")
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
        values = self._state.derived
        if key not in values:
            with self.snapshot() as state:
                values = state.derived  # of the state that make() reads
                values[key] = make()
        value: T = values[key]
        return value

    def once(self, name: str, check: Callable[[], object]) -> None:
        """Call ``check()``, once for the rows of an array, until the files are opened anew."""
        entry = self._state.entries[name]
        if (key := (entry.file, entry.rows, self.epoch)) not in self._checked:
            check()
            self._checked.add(key)

    def verify(self) -> None:
        """Compare the checksum of every file.

        Raises:
            CorruptError: A file was altered.
        """
        self._state.verify(self.path)

    def check_uncut(self) -> None:
        """Refuse a file that was truncated since it was opened: reading it would end the process.

        Raises:
            CorruptError: There is one.
        """
        self._state.check_uncut(self.path)

    @property
    def _state(self) -> State:
        return self._own.state or self._committed
