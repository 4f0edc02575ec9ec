"""Locks on files and folders: only one holder at a time may write, across processes and within one.

Locks use `flock`; the operating system releases them when the process ends, also when it is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self


def try_lock(file: int | IO[Any]) -> bool:
    """Lock an open file without waiting; return False if another holder has the lock.

    The lock lasts until `unlock`, or until every process that inherited the open file has closed it.

    Raises:
        OSError: The file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: int | IO[Any]) -> None:
    """Release the lock of an open file, even if a forked process still has the file open."""
    fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def hold_lock(path: Path, *, create: bool = False, required: bool = False) -> Iterator[None]:
    """Lock a file or a folder inside the block, to tell others that the path is in use.

    Args:
        path: File or folder to lock; links are not followed.
        create: Whether a missing file is created.
        required: Whether a lock that another holder has, or that the file system lacks, is an error. If
            False, the block then runs without the lock.

    Raises:
        OSError: The path cannot be opened, or ``required`` is set and the lock cannot be taken.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    descriptor = os.open(path, flags, 0o666)
    try:
        try:
            if not try_lock(descriptor):
                raise BlockingIOError(f"{path} is in use")
        except OSError:
            if required:
                raise
        yield
    finally:
        os.close(descriptor)


class FileLock:
    """Holds an exclusive lock on the file ``path``, taken on construction without waiting.

    A forked process does not hold the lock. The file is created if it is missing.

    Raises:
        BlockingIOError: The lock is already held.
        OSError: The file cannot be opened, or its file system has no locks.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not try_lock(self._descriptor):
                raise BlockingIOError(f"{path} is locked")
        except BaseException:
            self.forget()
            raise
        _locks.add(self)

    def release(self) -> None:
        """Release the lock and close the file; does nothing if the lock is released already."""
        if self._descriptor >= 0:
            unlock(self._descriptor)  # closing is not enough where a forked process has the file open
            self.forget()

    def forget(self) -> None:
        """Close the file in a forked process; the parent process keeps the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.release()


_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_locks() -> None:
    for lock in _locks:
        lock.forget()


os.register_at_fork(after_in_child=_forget_locks)
