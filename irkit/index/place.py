"""The directory of an index: who may write to it, and whether one may be built there."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path
from typing import Self

from irkit.arguments import shown
from irkit.errors import BadTypeError, LockedError, StorageError
from irkit.files import check_folder, explained
from irkit.index.files import DATA_FILE, peek

__all__ = ["ASIDE", "BUILDING", "MANIFEST", "Lock", "absence", "busy", "check_place", "directory_of"]

MANIFEST = "irkit.json"
BUILDING = "irkit.building.json"  # the manifest of a build that is not published
ASIDE = "irkit.json.tmp"  # a manifest on its way
_LOCK = "irkit.lock"
_RECIPE = "recipe.yaml"  # of the command line


class Lock:
    """The right to write to a directory, for one holder at a time. A process that is forked does not hold it.

    Raises:
        LockedError: Somebody else holds it.
        StorageError: The directory cannot be written to.
    """

    def __init__(self, directory: Path) -> None:
        self._descriptor = -1
        with explained(f"locking {directory}", "the index can be read, not changed"):
            self._descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise busy(directory) from None
        _locks.add(self)

    def release(self) -> None:
        """Let others write; does nothing the second time."""
        if self._descriptor >= 0:  # to close it is not enough where a child has it, too
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.forget()

    def forget(self) -> None:
        """Leave the lock to the process that this one was forked from."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_locks() -> None:
    for lock in _locks:
        lock.forget()


os.register_at_fork(after_in_child=_forget_locks)


def busy(directory: Path) -> LockedError:
    """Why an index cannot be changed now."""
    return LockedError(
        f"index {directory}: somebody else is writing to it (in this process or another); "
        "try again when that has finished"
    )


def directory_of(path: str | Path) -> Path:
    """The directory of that name.

    Raises:
        BadTypeError: It is no name.
        StorageError: No directory can have that name.
    """
    if not isinstance(path, str | Path):
        raise BadTypeError(f"index: got {shown(path, 100)} as its directory, expected a path")
    try:
        Path(path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, or a null character
        raise StorageError(f"index {str(path)!r}: {error}; choose another directory") from None
    return Path(path)


def check_place(directory: Path, overwrite: bool, operation: str = "building an index in") -> None:
    """Refuse to replace an index without ``overwrite``, and to build among other files at all.

    ``operation`` is what messages begin with.

    Raises:
        StorageError: An index cannot be built there.
    """
    manifest, place = directory / MANIFEST, directory.resolve()
    for parent in place.parents:
        if _is_index(parent):
            raise StorageError(
                f"{operation} {directory}: it is inside the index {parent}; choose another directory"
            )
    check_folder(directory, f"{operation} {directory}")
    if not place.exists():
        return
    with explained(f"reading {directory}"):
        present = {path.name for path in directory.iterdir()}
        whole = peek(manifest) is not None
        data = {name for name in present if DATA_FILE.fullmatch(name)}
        damaged = not whole and MANIFEST in present and (data or b'"checksum"' in manifest.read_bytes())
    ours = whole or damaged
    known = {BUILDING, _LOCK, ASIDE} | ({MANIFEST, _RECIPE} if ours else set())
    other = sorted(present - known - data)
    if other and not whole:
        raise StorageError(
            f"{operation} {directory}: the directory holds other files "
            f"({', '.join(other[:3])}); choose a new or an empty one"
        )
    if ours and not overwrite:
        raise StorageError(
            f"{operation} {directory}: there is one already; "
            + (
                "choose another directory"
                + ("" if operation.startswith("saving") else " or give overwrite=True")
            )
        )


def _is_index(folder: Path) -> bool:
    try:
        return any(peek(folder / name) for name in (MANIFEST, BUILDING))
    except OSError:  # it is closed to us
        return False


def absence(directory: Path) -> StorageError:
    """Why there is no index to open."""
    if (directory / BUILDING).exists():
        reason = "its build has not finished; run the same build again to resume it"
    else:
        found = "no irkit.json in it" if directory.is_dir() else "no such directory"
        found = "it is a file" if directory.is_file() else found
        reason = f"{found}; expected a directory that an index was built in"
    return StorageError(f"opening index {directory}: {reason}")
