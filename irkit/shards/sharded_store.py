"""The stores of an index in several shards, opened, changed and refreshed together.

What a crash leaves: a change is committed shard by shard, and by the manifest of the whole at last. Each
document belongs to one shard, so it is changed completely or not at all. The manifest of the whole counts
changes, and each shard has the number of its last one. A shard whose number is higher is *ahead*: the change
was interrupted before the whole knew of it. The documents of that change that are stored count. Whoever
repeats the change skips what is there already, see `ShardedDocuments`.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from irkit.arguments import check_counts
from irkit.errors import BadValueError, StorageError
from irkit.index import Store
from irkit.index.array_files import SHARD, corrupt
from irkit.index.directory import MANIFEST
from irkit.index.documents import removal_list
from irkit.index.object_store import download_index
from irkit.index.part_store import index_records
from irkit.index.state import Snapshot, State
from irkit.index.store_writer import UNCHANGED
from irkit.shards.placement import global_rows
from irkit.utils.uris import is_uri

VOCABULARY = "vocabulary.txt"
BUILT = "built"
"""Key of a shard that a process of its own builds: documents of the whole index that were divided so far."""
MOST_SHARDS = 1000
_TRIES, _PAUSE = 50, 0.002  # without news of a process that commits shard by shard
_MOST_SECONDS = 5.0  # that a reader waits for such processes


class OtherDocumentsError(BadValueError):
    """A build that was killed was one of other documents."""


def other_documents(path: Path) -> OtherDocumentsError:
    """Return the error for a directory in which a build of other documents was begun."""
    return OtherDocumentsError(
        f"building {path}: a build of other documents was begun there; to discard it, ask to overwrite, with "
        "documents that can be read again"
    )


class ShardedStore(Store):
    """The manifest of the whole as a store, whose ``parts`` are the stores of the shards.

    An update changes all of them, and a snapshot shows a state of each. Readers see a change of another
    process when it is complete, unless that process was killed in the middle or takes seconds to store it.

    Attributes:
        parts: Stores of the shards.
    """

    parts: list[Store]

    def __init__(self, path: Path) -> None:
        """Use `open_store` or `ShardedStore.build`."""
        super().__init__(path)
        self.parts = []
        self._view: tuple[State, ...] = ()

    @classmethod
    def build(  # type: ignore[override]
        cls, path: str | Path, *, shards: int, key: Any = None, overwrite: bool = False
    ) -> ShardedStore:
        """Start an index of several shards, or resume a killed build, see `Store.build`.

        Raises:
            BadValueError: The number of shards is below 1 or above 1000.
        """
        check_counts("building an index", shards=shards)
        if shards > MOST_SHARDS:
            raise BadValueError(f"building an index: {shards} shards; expected at most {MOST_SHARDS}")
        store = super().build(path, key=key, overwrite=overwrite)
        assert isinstance(store, ShardedStore)
        try:
            names = store.meta.get("shards")
            if names is None:  # new: the names come first, because unnamed directories are removed
                names = _new_names(store.path, shards)
                with Store.update(store):
                    store.meta.update({"shards": names, "changes": 0})
            for number, name in enumerate(names):
                store.parts.append(_begin_part(store, name, [number, shards]))
            store._catch_up()
            store._look()
        except BaseException:
            store.close()
            raise
        return store

    def attach(self, verify: bool | None) -> None:
        """Open the shards.

        Raises:
            StorageError: A shard is missing, or belongs to another index.
        """
        names, parts = self.meta["shards"], []
        for number, name in enumerate(names):
            try:
                part = Store.open(self.path / name, verify=verify)
            except StorageError as error:
                if (self.path / name / MANIFEST).exists():
                    raise
                raise StorageError(
                    f"opening index {self.path}: its shard {name}, {number + 1} of {len(names)}, is missing; "
                    "restore the directory from a copy or build the index again"
                ) from error
            _check_part(self, part, [number, len(names)])
            parts.append(part)
        self.parts = parts
        self._wait_for_writer()
        self._look()

    # ---- one state of all stores ----

    def snapshot(self, state: State | tuple[State, ...] | None = None) -> Any:
        """Return a context in which this thread sees one state of every shard, see `Store.snapshot`."""
        view = state if isinstance(state, tuple) else self._view
        if not view or len(view) != len(self.parts) + 1:
            return super().snapshot()
        return _Snapshots(self, view)

    @contextlib.contextmanager
    def update(self) -> Iterator[Self]:
        """Change the index, see `Store.update`; each shard commits its part of the change.

        Raises:
            LockedError: Another process, or another thread, is writing.
            StorageError: The changes could not be written.
        """
        if self.updating:
            with super().update():
                yield self
            return
        number = 0
        try:
            with super().update():
                self._adopt()
                number = self.last_change() + 1
                with contextlib.ExitStack() as stack:
                    for part in self.parts:
                        stack.enter_context(part.update())
                    before = [[part.rows("hashes.bin"), part.rows(removal_list(part))] for part in self.parts]
                    adopted = self.state.serialise()
                    yield self
                    # Shards commit at the end of this block, before the whole could undo the change.
                    stores: list[Store] = [self, *self.parts]
                    if any(store._own.failed for store in stores):
                        raise StorageError(f"index {self.path}: a step of this update failed; {UNCHANGED}")
                    changed = [self.state.serialise() != adopted]
                    changed += [part.state.serialise() != part.state.saved for part in self.parts]
                    if any(changed):
                        self.meta["changes"] = number
                        for part, counts, is_changed in zip(self.parts, before, changed[1:], strict=True):
                            if is_changed:
                                part.meta.update({"change": number, "before": counts})
        except BaseException as error:
            if not number or all(part.meta.get("change") != number for part in self.parts):
                raise
            self._look()
            if self._changes() >= number or not isinstance(error, StorageError):
                raise
            reason = str(error).rpartition("; ")[0] or str(error)  # without what is said of a single store
            raise StorageError(f"{reason}; some documents are changed, so repeat the change") from error
        self._look()

    def refresh(self) -> bool:
        """Move to the newest committed state of every shard; return whether there was a newer one."""
        if self.updating:
            return False
        newer = self._refresh_all()
        if newer:
            self._wait_for_writer()
            self._look()
        return newer

    def _refresh_all(self) -> bool:
        names = self.committed.meta.get("shards")
        newer = super().refresh()
        if self.committed.meta.get("shards") != names:
            raise StorageError(f"index {self.path}: it was replaced by one of other shards; load it again")
        # after the whole, because its change is complete when it is committed
        return sum(part.refresh() for part in self.parts) > 0 or newer

    def _wait_for_writer(self) -> None:
        """Wait while another process commits shard by shard; a writer of which nothing comes was killed."""
        idle, end = 0, time.monotonic() + _MOST_SECONDS
        while idle < _TRIES and any(map(self._is_ahead, self.parts)) and time.monotonic() < end:
            time.sleep(_PAUSE)
            idle = 0 if self._refresh_all() else idle + 1

    def _is_ahead(self, part: Store) -> bool:
        return bool(part.meta.get("change", 0) > self._changes())

    def refresh_parts(self) -> None:
        """Move to the newest state of every shard of a build, which other processes have changed."""
        for part in self.parts:
            part.refresh()
        self._look()

    def ahead(self, part: Store) -> list[int] | None:
        """Return the rows and the removals of a shard before an interrupted change; None without one.

        Inside an update it is a change before this one. The documents of a build come in their order, so what
        a shard has beyond those of the whole was stored before, in portions of whatever size.
        """
        if self.building:
            rows = global_rows(part)
            first = int(np.searchsorted(rows, self.meta.get("documents", 0)))
            return [first, 0] if first < len(rows) else None
        return list(part.meta["before"]) if self._is_ahead(part) else None

    def publish(self) -> None:
        """Finish a build, see `Store.publish`.

        Raises:
            OtherDocumentsError: A shard has documents beyond the last one, from an earlier build that was
                killed.
        """
        for part in self.parts:
            if (global_rows(part)[-1:] >= self.meta.get("documents", 0)).any():
                raise other_documents(self.path)
        super().publish()
        self._look()

    def close(self) -> None:
        """Close the files of all shards, see `Store.close`."""
        super().close()
        self._view = ()
        for part in self.parts:
            part.close()

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every array by name, summed over the shards."""
        total = Counter(super().sizes())
        for part in self.parts:
            total.update(part.sizes())
        return dict(sorted(total.items()))

    def verify(self) -> None:
        """Compare the checksum of every file, see `Store.verify`."""
        super().verify()
        for part in self.parts:
            part.verify()

    def check_uncut(self) -> None:
        """Refuse a file that was truncated since it was opened, see `Store.check_uncut`."""
        super().check_uncut()
        for part in self.parts:
            part.check_uncut()

    def _look(self) -> None:
        """Show the newest state of all stores to threads that begin to read.

        Raises:
            CorruptError: A number that counts documents or changes is none.
        """
        _check_counts(self.path, self.committed.meta, ("documents", "changes"))
        for part in self.parts:
            _check_counts(part.path, part.committed.meta, ("change", BUILT))
        self._view = (self.committed, *(part.committed for part in self.parts))

    def _changes(self) -> int:
        return int(self.meta.get("changes", 0))

    def last_change(self) -> int:
        """Return the number of the last change of the whole or of a shard."""
        return max(self._changes(), *(int(part.meta.get("change", 0)) for part in self.parts))

    def _adopt(self) -> None:
        """Take over the terms that an interrupted change has given to shards, inside ``update``."""
        longest = max(self.parts, key=lambda part: part.rows(VOCABULARY))
        have = self.rows(VOCABULARY)
        if longest.rows(VOCABULARY) > have:
            self.append(VOCABULARY, longest.read(VOCABULARY)[have:])
            about = self.meta["index"]
            about["dim"] = max(about["dim"], longest.meta["index"]["dim"])

    def _catch_up(self) -> None:
        """Count the documents that every shard of a resumed build has, if shards were built by themselves."""
        built = min(int(part.meta.get(BUILT, 0)) for part in self.parts)
        if built > self.meta.get("documents", 0):
            with Store.update(self):
                self._adopt()
                self.meta["documents"] = built
                for about in index_records(self).values():
                    about["rows"] = built

    def _forked(self) -> None:
        super()._forked()
        self._view = ()


class _Snapshots:
    """Shows one state of every store to this thread inside a ``with`` block; gives these states."""

    __slots__ = ("_snapshots", "_view")

    def __init__(self, store: ShardedStore, view: tuple[State, ...]) -> None:
        self._view = view
        stores = zip((store, *store.parts), view, strict=True)
        self._snapshots: list[Snapshot] = [Store.snapshot(member, state) for member, state in stores]

    def __enter__(self) -> Any:
        first, *_ = [snapshot.__enter__() for snapshot in self._snapshots]
        return _View(self._view, first)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for snapshot in self._snapshots:
            snapshot.__exit__(kind, error, trace)


class _View(tuple[State, ...]):
    """States of the stores, for `ShardedStore.snapshot`; ``derived`` belongs to the first."""

    derived: dict[Any, Any]

    def __new__(cls, states: tuple[State, ...], first: State) -> _View:
        view = super().__new__(cls, states)
        view.derived = first.derived
        return view


def open_store(path: str | Path, *, verify: bool | None = None) -> Store:
    """Open a finished index, of one store or of several shards, see `Store.open`.

    For the URI of an index in an object store, a copy is opened, see `irkit.index.object_store`.

    Raises:
        StorageError: The path has no finished index, or a shard of it is missing.
        CorruptError: A file is missing, truncated or altered.
    """
    if is_uri(path):
        path = download_index(str(path))
    store = Store.open(path, verify=verify)
    if "shards" not in store.meta:
        return store
    for attempt in range(_TRIES):
        whole = ShardedStore(store.path)
        whole.committed = whole._load()
        names = whole.meta["shards"]
        try:
            whole.attach(verify)
            return whole
        except StorageError:  # the index was replaced meanwhile, if it has other shards now
            if attempt + 1 == _TRIES or whole._load().meta.get("shards") == names:
                raise
    raise AssertionError("unreachable")


def _check_counts(path: Path, meta: dict[str, Any], keys: tuple[str, ...]) -> None:
    before = meta.get("before", [0, 0])
    counts = [meta.get(key, 0) for key in keys] + (before if isinstance(before, list) else [before])
    if not all(type(count) is int and count >= 0 for count in counts) or len(counts) != len(keys) + 2:
        raise corrupt(path, f"{', '.join(keys)} and before are {counts!r:.80}, expected numbers from 0 on")


def _new_names(path: Path, shards: int) -> list[str]:
    """Return names of directories that no shard has or had."""
    known = [int(file.name.split("-")[1]) for file in path.iterdir() if SHARD.fullmatch(file.name)]
    return [f"shard-{max(known, default=0) + 1}-{number:03d}" for number in range(shards)]


def _begin_part(store: ShardedStore, name: str, position: list[int]) -> Store:
    """Return the store of a shard, empty or of a build that is resumed; it is published at once."""
    path = store.path / name
    if (path / MANIFEST).exists():
        part = Store.open(path, verify=True)
        _check_part(store, part, position)
        return part
    part = Store.build(path, key=store.meta["build"])
    try:
        with part.update():
            part.meta["shard"] = position
        part.publish()
    except BaseException:
        part.close()
        raise
    return part


def _check_part(store: Store, part: Store, position: list[int]) -> None:
    if part.meta.get("shard") != position or part.meta.get("build") != store.meta.get("build"):
        raise StorageError(
            f"opening index {store.path}: {part.path.name} is shard {part.meta.get('shard')} of another "
            f"index, expected {position}; restore the directory from a copy or build the index again"
        )
