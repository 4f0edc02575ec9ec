"""Files and folders that appear whole or not at all, and errors of the operating system in words.

Everything is written aside, under a hidden name in the same folder, synced, and renamed to its own name
("published"). A kill leaves the old content and the hidden file or folder. The next writer removes hidden
files and folders that are not locked (`irkit.utils.locks`). To write

* a file: `replacing`, or `write_text`;
* a folder that is made from nothing again after a kill: `scratch`, then `publish_folder`;
* a folder that is resumed after a kill: any folder of the caller's, then `publish_folder`;
* files among others in a folder: `publish_entries`, with the file that marks the folder complete last.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from irkit.errors import StorageError
from irkit.utils.locks import hold_lock


def check_folder(folder: Path, operation: str) -> None:
    """Check that a folder is writable or can be made; callers do so before a long computation.

    Raises:
        StorageError: The check failed; the message begins with ``operation``.
    """
    target = Path(os.path.normpath(folder.absolute()))
    with explained(operation):
        nearest = next(path for path in (target, *target.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        reason = "is not writable" if nearest.is_dir() else "is a file"
        raise StorageError(f"{operation}: {nearest} {reason}; choose another directory")


@contextlib.contextmanager
def explained(operation: str, outcome: str = "") -> Iterator[None]:
    """Turn an error of the operating system inside the block into a StorageError.

    Args:
        operation: Start of the message: what was being done, such as ``"saving FILE"``.
        outcome: End of the message: what the state is now; empty for none.
    """
    try:
        yield
    except StorageError:
        raise
    except (OSError, UnicodeEncodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"{operation}: {reason}{'; ' if outcome else ''}{outcome}") from error


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a path to write a file to. At the end of the block the file is synced and replaces ``path``.

    Args:
        path: File to replace, or to make.

    Raises:
        StorageError: Writing failed; the old file is unchanged.

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
            with hold_lock(aside, create=True):
                yield aside
                sync(aside)
                aside.replace(target)
                with explained(f"writing {path}", "it is written, but may not survive a power cut"):
                    sync_name(target)
        finally:
            with contextlib.suppress(OSError):  # it was renamed, or never made
                aside.unlink()


@contextlib.contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """Yield a new hidden folder beside ``target`` to work in; the folder is removed at the end of the block.

    Hidden folders that killed processes left for the same target are removed at the start. If such a process
    had moved ``target`` to the name ``old`` in its hidden folder, and ``target`` is missing, ``old`` is moved
    back.
    """
    stem = f".{target.name[:50]}-"
    for left in abandoned(target.parent, rf"{re.escape(stem)}\d{{1,9}}-\w{{8}}\.part"):
        if _lives(int(left.name.split("-")[-2])):  # the process may be about to lock its folder
            continue
        if not target.exists():
            with contextlib.suppress(OSError):
                (left / "old").rename(target)
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(".part", f"{stem}{os.getpid()}-", target.parent))
    try:
        with hold_lock(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def abandoned(folder: Path, names: str) -> Iterator[Path]:
    """Yield the paths in a folder that no process has locked; each is locked until the next is asked for.

    Args:
        folder: Folder to search, without its subfolders.
        names: Regular expression that must match the whole name.
    """
    with contextlib.suppress(OSError):
        for path in sorted(path for path in folder.iterdir() if re.fullmatch(names, path.name)):
            with contextlib.suppress(OSError), hold_lock(path, required=True):
                yield path


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process belongs to another user
        pass
    return True


def publish_folder(unfinished: Path, folder: Path) -> None:
    """Rename the folder ``unfinished`` to ``folder``, after its content is synced to the disk.

    An existing ``folder`` is deleted first.

    Raises:
        StorageError: Writing failed.
    """
    with explained(f"saving {folder}"):
        sync_tree(unfinished)
        remove_folder(folder)
        unfinished.rename(folder)


def remove_folder(folder: Path) -> None:
    """Delete a folder if it exists; it is renamed first, so that nobody reads a half-deleted folder."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.deleted")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def publish_entries(paths: Iterable[Path], folder: Path) -> None:
    """Copy files and folders into a folder, in order; each appears whole and replaces one of the same name.

    Weights (``.safetensors``) become hard links if the file system has these, so that they are stored once.

    Raises:
        OSError: Writing failed.
    """
    for path in paths:
        target, aside = folder / path.name, folder / f".{path.name}.partial"
        _remove(aside)
        if path.is_dir():
            shutil.copytree(path, aside, copy_function=_link_or_copy)
            sync_tree(aside)
        else:
            _link_or_copy(path, aside)
            sync(aside)
        if path.is_dir() or target.is_dir():
            _remove(target)
        aside.replace(target)
        _remove(aside)  # it is still there if both were links to one file: then a rename does nothing
        sync_name(target)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    if Path(source).suffix == ".safetensors":
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)


def write_text(path: str | Path, text: str) -> None:
    """Write a file of UTF-8 text; it appears whole or not at all.

    Raises:
        StorageError: Writing failed; the old file is unchanged.
    """
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


def make_folder(folder: Path) -> None:
    """Make a directory and its missing parents, and sync their names, so that they survive a power cut."""
    missing = [path for path in folder.parents if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder, *missing):
        sync_name(path)


def sync_name(path: Path) -> None:
    """Wait until the name of a file or a directory is on the disk.

    Does nothing on a file system that cannot sync directories.

    Raises:
        OSError: The disk failed or is full.
    """
    try:
        sync(path.parent)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise


def sync(path: Path) -> None:
    """Wait until the content of a file, or the list of names in a directory, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(paths: Collection[Path]) -> None:
    """Wait until files and directories are on the disk.

    Each has a thread of its own: a file system then writes its journal once for all of them. One after the
    other, a dozen files took 15 times as long on ext4.
    """
    if paths:
        with ThreadPoolExecutor(len(paths)) as threads:
            for _ in threads.map(sync, paths):
                pass


def sync_tree(folder: Path) -> None:
    """Wait until a folder and everything in it is on the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)
