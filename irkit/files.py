"""Files that appear whole or not at all, and errors of the operating system in words."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from irkit.errors import StorageError

__all__ = [
    "abandoned",
    "check_folder",
    "explained",
    "make_folder",
    "replacing",
    "scratch",
    "sync",
    "sync_name",
    "write_text",
]


def check_folder(folder: Path, operation: str) -> None:
    """Refuse a folder that could not be written to, or made, before the work for it.

    Raises:
        StorageError: It could not; the message begins with ``operation``.
    """
    place = Path(os.path.normpath(folder.absolute()))
    with explained(operation):
        nearest = next(path for path in (place, *place.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        reason = "is not writable" if nearest.is_dir() else "is a file"
        raise StorageError(f"{operation}: {nearest} {reason}; choose another directory")


@contextlib.contextmanager
def explained(operation: str, outcome: str = "") -> Iterator[None]:
    """Turn an operating system's error into a StorageError that says what was being done."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, UnicodeEncodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"{operation}: {reason}{'; ' if outcome else ''}{outcome}") from error


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path to write to, whose file takes the place of another one when it is complete and on the disk.

    Args:
        path: Of the file to replace, or to make.

    Raises:
        StorageError: Writing failed; what was there before is as it was.

    Examples:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp(), "notes.txt")
        >>> with replacing(target) as aside:
        ...     _ = aside.write_text("all of it")
        >>> target.read_text()
        'all of it'
    """
    target = Path(path).resolve()
    stem = f".{target.name[:60]}."  # 60 characters are 240 bytes at most
    aside = target.with_name(f"{stem}{os.getpid()}.part")
    with explained(f"writing {path}"):
        if target.exists() and not target.is_file():
            raise FileExistsError("it is a folder or a device; use another name")
        for left in abandoned(target.parent, rf"{re.escape(stem)}\d{{1,9}}\.part"):
            with contextlib.suppress(OSError):
                left.unlink()
        try:
            with _locked(aside, os.O_CREAT):
                yield aside
                sync(aside)
                aside.replace(target)
                with explained(f"writing {path}", "it is written, but may not survive a power cut"):
                    sync_name(target)
        finally:
            with contextlib.suppress(OSError):  # it was renamed, or never came to be
                aside.unlink()


@contextlib.contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """A hidden folder beside ``target`` to make something in; it is removed at the end.

    Those of killed processes are removed at the start. What one of them had moved from ``target`` to ``old``
    in its folder is moved back where nothing has taken its place.
    """
    stem = f".{target.name[:50]}-"
    for left in abandoned(target.parent, rf"{re.escape(stem)}\d{{1,9}}-\w{{8}}\.part"):
        if _lives(int(left.name.split("-")[-2])):  # it may be about to lock its folder
            continue
        if not target.exists():
            with contextlib.suppress(OSError):
                (left / "old").rename(target)
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(".part", f"{stem}{os.getpid()}-", target.parent))
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def abandoned(folder: Path, names: str) -> Iterator[Path]:
    """Yield what killed processes left in a folder under names that match; what is in use is locked."""
    with contextlib.suppress(OSError):
        for path in sorted(path for path in folder.iterdir() if re.fullmatch(names, path.name)):
            with contextlib.suppress(OSError), _locked(path, must=True):
                yield path


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
        pass
    return True


@contextlib.contextmanager
def _locked(path: Path, flags: int = 0, *, must: bool = False) -> Iterator[None]:
    """Lock a file or a folder, by which others know that it is in use; some file systems have no locks.

    Raises:
        OSError: With ``must``: another process has locked it, or the file system has no locks.
    """
    flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if must:
                raise
        yield
    finally:
        os.close(descriptor)


def write_text(path: str | Path, text: str) -> None:
    """Write a file of UTF-8 text; it appears whole or not at all.

    Raises:
        StorageError: Writing failed; what was there before is as it was.
    """
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


def make_folder(folder: Path) -> None:
    """Make a directory and those above it; it stays after a power cut."""
    missing = [path for path in folder.parents if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder, *missing):
        sync_name(path)


def sync_name(path: Path) -> None:
    """Wait until the name of a file or a directory is on the disk, if its directory can be synced."""
    try:
        sync(path.parent)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
