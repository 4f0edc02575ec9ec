"""One directory of append-only arrays and a manifest that is the only truth about them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from irkit.arguments import check_flags, shown
from irkit.errors import BadTypeError, BadValueError, StorageError
from irkit.files import explained, make_folder, sync
from irkit.index.files import (
    DATA_FILE,
    Array,
    Entry,
    checksum,
    peek,
    release,
    write_at,
)
from irkit.index.place import ASIDE, BUILDING, MANIFEST, Lock, busy, check_place, directory_of
from irkit.index.state import Own, Pin, State, load_state

__all__ = ["Store"]

T = TypeVar("T")

_BLOCK_BYTES = 1 << 24
_TAKE_ROWS = 1 << 12
_NEEDED = {"index", "model"}  # meta that readers of an index rely on
_UNCHANGED = "the stored index is unchanged"
_MADE = "the change is made, but may not survive a power cut"
_UNTIDY = "the change is made; files that no longer count are left to the next one"


class Store:
    """The files of one index, read by many and changed by one at a time.

    A change happens inside ``with store.update():``. It takes the lock, and its end either commits
    everything (data first, then the manifest, renamed into place) or, on any exception, leaves the
    directory as it was. A build commits into a manifest of its own, so that an index it replaces stays
    in use until ``publish``, and a killed build goes on from its last commit.

    An open store shows one committed state, also while another process writes; ``refresh`` moves to the
    newest. Arrays are mapped into memory, not read.

    Any number of threads may read a store while another thread changes or refreshes it. Each sees the last
    committed state, in ``with store.pinned():`` the same throughout; what is changed inside ``update`` only
    its own thread sees until it ends. A second thread that tries to change it gets a `LockedError`.

    A process may be forked at any time: the child shows the last committed state, and a change or a build
    that was going on is the parent's alone.

    Attributes:
        path: The directory.
        building: Whether this is a build that is not yet published.

    Examples:
        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> with Store.build(directory) as store:
        ...     with store.update():
        ...         store.append("numbers.bin", np.arange(3))
        ...     store.publish()
        >>> Store.open(directory).read("numbers.bin").tolist()
        [0, 1, 2]
    """

    def __init__(self, path: Path) -> None:
        """Use `Store.open` or `Store.build`."""
        self.path = path
        self.building = False
        self._committed = State()
        self._own = Own()
        self._numbers = itertools.count(1)  # of versions
        self._dirty: set[str] = set()  # files written since the last commit
        self._lock: Lock | None = None  # of a build
        self._checked = set[tuple[str, int, int]]()  # file, rows and epoch, see `once`
        self._changing = threading.Lock()  # held by the thread that changes the store
        self._moving = threading.Lock()  # while the committed state changes, here and on the disk
        _stores.add(self)

    @property
    def meta(self) -> dict[str, Any]:
        """Free JSON values, kept in the manifest; change them inside ``update``."""
        return self._state.meta

    @property
    def version(self) -> int:
        """Rises with every change."""
        return self._state.version

    @property
    def epoch(self) -> int:
        """Rises when rows may have changed other than by appending (opened, refreshed, rolled back)."""
        return self._state.epoch

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> Store:
        """Open a finished index; nothing is written, so a read-only directory will do.

        Args:
            path: Its directory.
            verify: Compare the checksum of every file (some 2 GB/s); sizes are compared in any case.

        Raises:
            StorageError: There is no finished index.
            CorruptError: A file is missing, truncated or altered.
        """
        check_flags("opening an index", verify=verify)
        store = cls(directory_of(path))
        store._committed = store._load(verify)
        return store

    @classmethod
    def build(cls, path: str | Path, *, key: Any = None, overwrite: bool = False) -> Store:
        """Start an index or go on with a killed build; the lock is held until ``publish`` or ``close``.

        Args:
            path: A new or empty directory, or that of an index to replace.
            key: JSON value that says what is being built, from what, and how. What a killed build with
                the same key has committed is kept, any other is discarded. None: start anew.
            overwrite: Replace the index that is there. It stays in use until ``publish``.

        Raises:
            StorageError: The directory holds an index (without ``overwrite``) or something else.
            LockedError: Another process is writing.
        """
        check_flags("building an index", overwrite=overwrite)
        try:
            key = json.loads(json.dumps(key))
        except (TypeError, ValueError, RecursionError) as error:
            raise BadTypeError(f"building an index: key is {shown(key)}; expected JSON: {error}") from None
        store = cls(directory_of(path))
        store.building = True
        check_place(store.path, overwrite)
        with explained(f"creating {path}"):
            make_folder(store.path)
        store._lock = Lock(store.path)
        try:
            check_place(store.path, overwrite)  # again, now that nobody else can change it
            with contextlib.suppress(StorageError):  # no build to resume, or not a whole one
                store._committed = store._load(verify=True)
            if key is None or store.meta.get("build") != key:
                store._begin(key)
            store._clean()
        except BaseException:
            store.close()
            raise
        return store

    def pinned(self, state: State | None = None) -> Pin:
        """A context in which this thread sees one state, whatever is committed or refreshed meanwhile.

        Inside another one, or inside ``update``, all stays as it is there.

        Args:
            state: One that was pinned before; by default the last committed one.
        """
        return Pin(self._own, state or self._committed)

    def rows(self, name: str) -> int:
        """Rows of an array; 0 when there is none of this name."""
        entry = self._state.entries.get(name)
        return entry.rows if entry else 0

    def sizes(self) -> dict[str, int]:
        """Bytes of every array by name."""
        return {name: entry.nbytes for name, entry in sorted(self._state.entries.items())}

    def read(self, name: str) -> Array:
        """The array ``(rows, ...)``, mapped into memory; treat it as read-only."""
        state = self._state
        if name not in state.entries:
            raise BadValueError(f"index {self.path}: no array {name!r}; it has {sorted(state.entries)}")
        return state.map(name, self.path)

    def blocks(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[Array]:
        """Copies of rows ``start`` to ``stop``, in order, 16 MB each; the file does not stay in memory."""
        array = self.read(name)
        chosen = array[start:stop]
        size = max(1, _BLOCK_BYTES // max(1, chosen[:1].nbytes))
        for begin in range(0, len(chosen), size):
            yield chosen[begin : begin + size].copy()
            release(array)

    def take(self, name: str, rows: Array) -> Array:
        """A copy of ``rows (n,)``, ascending; the file does not stay in memory."""
        array = self.read(name)
        taken = np.empty((len(rows), *array.shape[1:]), array.dtype)
        for start in range(0, len(rows), _TAKE_ROWS):
            taken[start : start + _TAKE_ROWS] = array[rows[start : start + _TAKE_ROWS]]
            release(array)
        return taken

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of ``make()``, which sees one state; kept until the store changes."""
        kept = self._state.derived
        if key not in kept:
            with self.pinned() as state:
                kept = state.derived  # of what make() reads, whatever is committed meanwhile
                kept[key] = make()
        value: T = kept[key]
        return value

    def once(self, name: str, check: Callable[[], object]) -> None:
        """Call ``check()`` unless it was for the same rows of an array, since the files were opened anew."""
        entry = self._state.entries[name]
        if (key := (entry.file, entry.rows, self.epoch)) not in self._checked:
            check()
            self._checked.add(key)

    def append(self, name: str, array: Array) -> None:
        """Add rows to an array, inside ``update``; the first call settles dtype and row shape.

        Args:
            name: Letters and ``_`` in lower case and a suffix, such as ``"values.bin"``.
            array: ``(rows, ...)``.

        Raises:
            StorageError: The rows could not be written; the update is void.
        """
        self._check_updating()
        data = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        entry = self._state.entries.get(name)
        entry = entry or Entry(self._new_file(name), data.dtype.str, data.shape[1:], 0, 0)
        if (data.dtype.str, data.shape[1:]) != (entry.dtype, entry.shape):
            raise BadValueError(
                f"index {self.path}: rows of {name} are {entry.shape} {entry.dtype}, "
                f"got {data.shape[1:]} {data.dtype.str}"
            )
        content = data.reshape(-1).view(np.uint8).data
        with self._writing(entry.file) as path:
            write_at(path, entry.nbytes, content)
        self._change(
            name, replace(entry, rows=entry.rows + len(data), crc32=zlib.crc32(content, entry.crc32))
        )

    def replace(self, name: str, write: Callable[[Path], object]) -> None:
        """Put a file that ``write(path)`` makes in the place of an array, as bytes, inside ``update``.

        Args:
            name: As for `append`.
            write: Called with the path to write; fails with an OSError.
        """
        self._check_updating()
        file = self._new_file(name)
        with self._writing(file) as path:
            write(path)
            entry = Entry(file, "|u1", (), path.stat().st_size, 0)
            entry = replace(entry, crc32=checksum(entry.map(self.path)))
        self._change(name, entry)

    def drop(self, name: str) -> None:
        """Forget an array, inside ``update``; nothing happens if there is none of this name."""
        self._check_updating()
        if name in self._state.entries:
            self._change(name, None)

    @contextlib.contextmanager
    def update(self) -> Iterator[Self]:
        """Change the index: all of the block or, on an exception, nothing of it.

        Takes the lock and moves to the newest state first. Inside another ``update`` it becomes part of
        that one. What was appended can be read inside the block, by this thread.

        Raises:
            LockedError: Another process, or another thread, is writing.
            StorageError: The changes could not be written.
        """
        own = self._own
        if own.updating:
            try:
                yield self
            except BaseException:
                own.failed = True
                raise
            return
        if not self._changing.acquire(blocking=False):
            raise busy(self.path)
        before, changing = own.state, self._changing
        try:
            with contextlib.nullcontext() if self._lock else Lock(self.path):
                if not self._lock:
                    self.refresh()
                    self._clean()
                own.state, own.updating, own.failed = self._committed.copy(), True, False
                try:
                    yield self
                    if not own.updating:
                        raise StorageError(
                            f"index {self.path}: this process was forked inside an update, which its parent "
                            "finishes; leave such a process with os._exit, or start it in another way"
                        )
                    if own.failed:
                        raise StorageError(f"index {self.path}: a step of this update failed; {_UNCHANGED}")
                    self._commit(own.state)
                except BaseException:
                    if not own.updating:  # forked: nothing here is this process's to undo
                        raise
                    own.state.maps.clear()  # files are cut
                    with self._moving:  # the truth is on disk: the new manifest may be renamed already
                        self._committed = self._load()
                    self._clean()
                    raise
                finally:
                    own.state, own.updating = before, False
                    self._dirty.clear()
                self._clean(_UNTIDY)
        finally:
            changing.release()

    def publish(self) -> None:
        """Finish a build: in one step its index replaces the one that was there, and the lock is free."""
        if not self.building or self._lock is None:
            raise BadValueError(f"index {self.path}: there is no build to publish")
        with explained(f"publishing {self.path}", "run the same build again to finish it"), self._moving:
            (self.path / BUILDING).replace(self.path / MANIFEST)
            self.building = False
        with explained(f"publishing {self.path}", _MADE):
            sync(self.path)
        self._clean(_UNTIDY)
        self._unlock()

    def refresh(self) -> bool:
        """Move to the newest committed state; whether there was a newer one."""
        if self._own.updating:  # it is the newest
            return False
        with self._moving:
            with explained(f"reading {self._manifest}"):
                newer = self._manifest.read_bytes() != self._committed.saved
            if newer:
                state = self._load()
                gone = _NEEDED & set(self._committed.meta) - set(state.meta)
                if gone and "index" in self._committed.meta:
                    raise StorageError(
                        f"index {self.path}: it was replaced by one without {sorted(gone)}; open it again"
                    )
                self._committed = state
        return newer

    def verify(self) -> None:
        """Compare the checksum of every file.

        Raises:
            CorruptError: A file was altered.
        """
        self._state.verify(self.path)

    def check_uncut(self) -> None:
        """Refuse to go on with a file that was truncated since it was opened: to read it would be fatal.

        Raises:
            CorruptError: There is one.
        """
        self._state.check_uncut(self.path)

    def close(self) -> None:
        """Release the lock; a build that was not published stays to be resumed."""
        self._unlock()
        with self._moving:
            self._committed = replace(self._committed, maps={}, derived={})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _state(self) -> State:
        return self._own.state or self._committed

    @property
    def _manifest(self) -> Path:
        return self.path / (BUILDING if self.building else MANIFEST)

    def _load(self, verify: bool = False) -> State:
        return load_state(self.path, self._manifest, next(self._numbers), verify)

    def _begin(self, key: Any) -> None:
        """Commit an empty state, beside an index that may be there."""
        with explained(f"reading {self.path}"):
            manifests = [peek(self.path / name) for name in (MANIFEST, BUILDING)]
        generation = max((manifest.generation for manifest in manifests if manifest), default=0)
        number = next(self._numbers)
        self._commit(State(number, number, meta={"build": key}, generation=generation))

    def _commit(self, state: State) -> None:
        """Store a state and show it to all threads; one that is stored already stays as it is."""
        data = state.manifest()
        if data == state.saved:
            return
        with explained(f"writing {self._manifest}", _UNCHANGED):
            for file in self._dirty:
                sync(self.path / file)
            sync(self.path)
            write_at(self.path / ASIDE, 0, data)
            sync(self.path / ASIDE)
            for name in state.entries:
                state.map(name, self.path)
            state.saved, state.version, state.derived = data, next(self._numbers), {}
            with self._moving:
                (self.path / ASIDE).replace(self._manifest)
                self._committed = state
        with explained(f"writing {self._manifest}", _MADE):
            sync(self.path)

    def _clean(self, outcome: str = "") -> None:
        """Remove what no manifest names and cut what follows the committed rows; needs the lock."""
        with explained(f"cleaning {self.path}", outcome):
            manifests = [peek(self.path / name) for name in (MANIFEST, BUILDING)]
            if not self.building and manifests[1] and self._outdated(manifests[1].meta.get("build")):
                (self.path / BUILDING).unlink()
                manifests.pop()
            named = {entry.file for manifest in manifests if manifest for entry in manifest.arrays.values()}
            for path in self.path.iterdir():
                if path.name == ASIDE or (DATA_FILE.fullmatch(path.name) and path.name not in named):
                    path.unlink()
            for entry in self._committed.entries.values():
                if (self.path / entry.file).stat().st_size > entry.nbytes:
                    os.truncate(self.path / entry.file, entry.nbytes)

    def _outdated(self, key: Any) -> bool:
        """Whether a build is that of a compaction, see `irkit.index.compact`, of a state that is no more."""
        state = zlib.crc32(self._committed.saved)
        return isinstance(key, dict) and key.get("compact", state) != state

    def _new_file(self, name: str) -> str:
        state = self._state
        state.generation += 1
        stem, _, suffix = name.partition(".")
        file = f"{stem}.g{state.generation}.{suffix}"
        if not DATA_FILE.fullmatch(file):
            raise BadValueError(f"array name {name!r}: expected letters and _, and a suffix: values.bin")
        return file

    @contextlib.contextmanager
    def _writing(self, file: str) -> Iterator[Path]:
        self._dirty.add(file)
        try:
            with explained(f"writing {self.path / file}", _UNCHANGED):
                yield self.path / file
        except BaseException:
            self._own.failed = True
            raise

    def _check_updating(self) -> None:
        if not self._own.updating:
            raise BadValueError(f"index {self.path}: a change must be inside `with store.update():`")

    def _change(self, name: str, entry: Entry | None) -> None:
        state = self._state
        if entry:
            state.entries[name] = entry
        else:
            del state.entries[name]
        state.maps.pop(name, None)
        state.version, state.derived = next(self._numbers), {}

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _forked(self) -> None:
        """Leave what was going on to the parent, and take locks that no thread of the parent holds."""
        self._changing, self._moving, self._lock = threading.Lock(), threading.Lock(), None
        if self._own.updating:
            self._own.state, self._own.updating = None, False


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _forked() -> None:
    for store in _stores:
        store._forked()


os.register_at_fork(after_in_child=_forked)
