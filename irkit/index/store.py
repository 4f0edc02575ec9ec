"""The files of an index: arrays that only grow, and a manifest that is the only truth about them.

How a change survives a crash:

* **Arrays** are plain little-endian rows in one file each, which are only appended to. A rewritten array is a
  new file, whose name has the next number, its *generation* (``values.g3.bin``).
* **The manifest** ``irkit.json`` names the files, the rows of each that count, and their checksums, and
  carries a checksum of itself. Files, and bytes at the end of a file, that it does not name do not exist for
  a reader.
* **A commit** writes the new manifest aside (``irkit.json.tmp``), syncs it and the files that were written,
  all at once, and renames it to its name. Renaming is atomic: a crash leaves the old manifest or the new
  one, and each names files that are complete. What is left of a failed change is removed by the next writer.
* **A build** commits to a manifest of its own, ``irkit.building.json``, so that the index that it replaces
  stays in use. It records a *key* of what is built. A build with the same key resumes from the last commit;
  any other key starts over. To *publish* it, its manifest is renamed to ``irkit.json``.
* **One writer** at a time: it holds the lock of ``irkit.lock``. Readers need no lock. They map files into
  memory, and mapped files stay readable after they are removed or replaced.

Lucene's ``segments_N`` files and LMDB's two meta pages do the same: one small atomic write makes data count.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from irkit.arguments import brief, check_flags
from irkit.errors import BadTypeError, BadValueError, StorageError
from irkit.index import directory
from irkit.index.array_files import write_at
from irkit.index.state import State, load_state
from irkit.index.store_writer import UNCHANGED, StoreWriter
from irkit.utils.atomic import explained, make_folder, sync, sync_all
from irkit.utils.locks import FileLock

_NEEDED = {"index", "model"}  # values of the manifest that readers of an index rely on
_MADE = "the change is made, but may not survive a power cut"
_UNTIDY = "the change is made; files that no longer count are left to the next one"


class Store(StoreWriter):
    """The files of one index, read by many and changed by one at a time.

    A change happens inside ``with store.update():``. Its end commits everything or, after an exception,
    leaves the directory as it was. An open store shows one committed state, also while another process
    writes; ``refresh`` moves to the newest.

    Any number of threads may read a store while another thread changes or refreshes it. Each thread sees the
    last committed state; a thread sees its own change before it is committed, and the others do not. A second
    thread that tries to change the store gets a `LockedError`.

    A process may be forked at any time: the child sees the last committed state, and a change or a build in
    progress belongs to the parent alone.

    Attributes:
        building: Whether this is a build that is not yet published.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> directory = tempfile.mkdtemp()
        >>> with Store.build(directory) as store:
        ...     with store.update():
        ...         store.append("numbers.bin", np.arange(3))
        ...     store.publish()
        >>> Store.open(directory).read("numbers.bin").tolist()
        [0, 1, 2]
    """

    parts: Sequence[Store] = ()  # the stores of the shards, see `irkit.shards`

    def __init__(self, path: Path) -> None:
        """Use `Store.open` or `Store.build`."""
        super().__init__(path)
        self.building = False
        self._lock: FileLock | None = None  # of a build
        self._changing = threading.Lock()  # held by the thread that changes the store
        self._moving = threading.Lock()  # held while the committed state changes, here and on the disk
        _stores.add(self)

    @classmethod
    def open(cls, path: str | Path, *, verify: bool | None = None) -> Store:
        """Open a finished index; nothing is written, so a read-only directory will do.

        Args:
            path: Directory of the index.
            verify: Compare the checksum of every file (about 2 GB/s); sizes are compared in any case. None
                does so for an index of up to 64 MB.

        Raises:
            StorageError: The path has no finished index.
            CorruptError: A file is missing, truncated or altered.
        """
        check_flags("opening an index", verify=verify is None or verify)
        store = cls(directory.directory_of(path))
        store.committed = store._load()
        small = sum(store.sizes().values()) <= store.limits.verify_bytes
        if small if verify is None else verify:
            store.verify()
        return store

    @classmethod
    def build(cls, path: str | Path, *, key: Any = None, overwrite: bool = False) -> Store:
        """Start an index or resume a killed build; the lock is held until ``publish`` or ``close``.

        Args:
            path: A new or empty directory, or the directory of an index to replace.
            key: JSON value that says what is built, from what, and how. A killed build with the same key is
                resumed, any other is discarded. None starts over.
            overwrite: Replace the index that is there. It stays in use until ``publish``.

        Raises:
            StorageError: The directory holds an index (without ``overwrite``) or something else.
            LockedError: Another process is writing.
        """
        check_flags("building an index", overwrite=overwrite)
        try:
            key = json.loads(json.dumps(key))
        except (TypeError, ValueError, RecursionError) as error:
            raise BadTypeError(f"building an index: key is {brief(key)}; expected JSON: {error}") from None
        store = cls(directory.directory_of(path))
        store.building = True
        directory.check_target(store.path, overwrite)
        with explained(f"creating {path}"):
            make_folder(store.path)
        store._lock = directory.lock_index(store.path)
        try:
            directory.check_target(store.path, overwrite)  # again, now that nobody else can change it
            with contextlib.suppress(StorageError):  # no build to resume, or not a whole one
                store.committed = store._load(verify=True)
            if key is None or store.meta.get("build") != key:
                store._begin(key)
            store._clean()
        except BaseException:
            store.close()
            raise
        return store

    @contextlib.contextmanager
    def update(self) -> Iterator[Self]:
        """Change the index: everything in the ``with`` block or, after an exception, nothing of it.

        The update takes the lock and moves to the newest state first. An update inside another one becomes
        part of it. This thread can read inside the block what it has appended.

        Raises:
            LockedError: Another process, or another thread, is writing.
            StorageError: The changes could not be written.
        """
        # an update inside another one only notes that it failed
        own = self._own
        if own.updating:
            try:
                yield self
            except BaseException:
                own.failed = True
                raise
            return
        # one thread of one process writes, from the newest state on
        if not self._changing.acquire(blocking=False):
            raise directory.busy(self.path)
        before, changing = own.state, self._changing  # a fork replaces self._changing
        try:
            with contextlib.nullcontext() if self._lock else directory.lock_index(self.path):
                if not self._lock:
                    self.refresh()
                    self._clean()
                own.state, own.updating, own.failed = self.committed.copy(), True, False
                # the change, and its commit; after an exception, back to what is on the disk
                try:
                    yield self
                    if not own.updating:
                        raise StorageError(
                            f"index {self.path}: this process was forked inside an update, which its parent "
                            "finishes; leave such a process with os._exit, or start it in another way"
                        )
                    if own.failed:
                        raise StorageError(f"index {self.path}: a step of this update failed; {UNCHANGED}")
                    self._commit(own.state)
                except BaseException:
                    if not own.updating:  # forked: nothing here is this process's to undo
                        raise
                    own.state.maps.clear()  # files are cut
                    with self._moving:  # the truth is on the disk: the new manifest may have its name already
                        self.committed = self._load()
                    self._clean()
                    raise
                finally:
                    own.state, own.updating = before, False
                    self._dirty.clear()
                self._clean(_UNTIDY)
        finally:
            changing.release()

    def publish(self) -> None:
        """Finish a build: its index replaces the old one in one step. Release the lock."""
        if not self.building or self._lock is None:
            raise BadValueError(f"index {self.path}: there is no build to publish")
        with explained(f"publishing {self.path}", "run the same build again to finish it"), self._moving:
            (self.path / directory.BUILDING).replace(self.path / directory.MANIFEST)
            self.building = False
        with explained(f"publishing {self.path}", _MADE):
            sync(self.path)
        self._clean(_UNTIDY)
        self._unlock()

    def refresh(self) -> bool:
        """Move to the newest committed state; return whether there was a newer one."""
        if self.updating:  # it is the newest
            return False
        with self._moving:
            with explained(f"reading {self._manifest}"):
                newer = self._manifest.read_bytes() != self.committed.saved
            if newer:
                before = self.committed
                state = load_state(self.path, self._manifest, next(self._numbers), False, before)
                gone = _NEEDED & set(self.committed.meta) - set(state.meta)
                if gone and "index" in self.committed.meta:
                    raise StorageError(
                        f"index {self.path}: it was replaced by one without {sorted(gone)}; open it again"
                    )
                self.committed = state
        return newer

    def close(self) -> None:
        """Release the lock; a build that was not published can be resumed."""
        self._unlock()
        with self._moving:
            self.committed = replace(self.committed, maps={}, derived={}, grown={})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _manifest(self) -> Path:
        return self.path / (directory.BUILDING if self.building else directory.MANIFEST)

    def _load(self, verify: bool = False) -> State:
        return load_state(self.path, self._manifest, next(self._numbers), verify)

    def _begin(self, key: Any) -> None:
        """Commit an empty state of a build, beside the manifest of an index that may be there."""
        with explained(f"reading {self.path}"):
            generation = max((manifest.generation for manifest in directory.manifests(self.path)), default=0)
        number = next(self._numbers)
        self._commit(State(meta={"build": key}, generation=generation, version=number, epoch=number))

    def _commit(self, state: State) -> None:
        """Store a state and show it to all threads, unless it is stored already."""
        data = state.serialise()
        if data == state.saved:
            return
        with explained(f"writing {self._manifest}", UNCHANGED):
            write_at(self.path / directory.ASIDE, 0, data)
            before = {entry.file for entry in self.committed.arrays.values()}
            new = [self.path] * (not self._dirty <= before)  # a file has a new name
            # all that it names is on the disk before the manifest has its name
            sync_all([*(self.path / file for file in (*self._dirty, directory.ASIDE)), *new])
            for name in state.arrays:
                state.map(name, self.path)
            state.saved, state.version, state.derived = data, next(self._numbers), {}
            with self._moving:
                (self.path / directory.ASIDE).replace(self._manifest)
                self.committed = state
        with explained(f"writing {self._manifest}", _MADE):
            sync(self.path)

    def _clean(self, outcome: str = "") -> None:
        """Remove files that no manifest names, and bytes after the committed rows; needs the lock."""
        with explained(f"cleaning {self.path}", outcome):
            directory.clean(self.path, self.building, self.committed.saved, self.committed)

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _forked(self) -> None:
        """Leave a change in progress to the parent, and make locks that no thread of the parent holds."""
        if self._changing.locked():  # forget the files of the change, and what was read of its rows
            self._dirty.clear()
            self.committed = replace(self.committed, epoch=next(self._numbers))
        self._changing, self._moving, self._lock = threading.Lock(), threading.Lock(), None
        if self.updating:
            self._own.state, self._own.updating = None, False


def check_store(operation: str, store: object, example: str) -> None:
    """Raise BadTypeError unless ``store`` is a `Store`, such as ``example`` makes."""
    if not isinstance(store, Store):
        raise BadTypeError(f"{operation}: got {brief(store)}; expected a Store, such as {example}")


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


os.register_at_fork(after_in_child=lambda: list(map(Store._forked, _stores)))
