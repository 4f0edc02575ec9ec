"""Files that appear whole or not at all, and errors of the operating system in words."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from irkit.errors import StorageError

__all__ = ["check_folder", "explained", "replacing", "sync", "write_text"]


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
    aside = target.with_name(f".{target.name[:60]}.{os.getpid()}.part")  # 60 characters are 240 bytes at most
    with explained(f"writing {path}"):
        if target.exists() and not target.is_file():
            raise FileExistsError("it is a folder or a device; use another name")
        try:
            yield aside
            sync(aside)
            aside.replace(target)
        finally:
            with contextlib.suppress(OSError):  # it was renamed, or never came to be
                aside.unlink()


def write_text(path: str | Path, text: str) -> None:
    """Write a file of UTF-8 text; it appears whole or not at all.

    Raises:
        StorageError: Writing failed; what was there before is as it was.
    """
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
