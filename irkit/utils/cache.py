"""A cache of results computed once from a large file: folders of files that are mapped into memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from irkit_kernels._machine_code import cache_folder

from irkit.utils.atomic import explained, scratch, sync_name, sync_tree

_VERSION = 3  # of the format of everything in the cache


def hash_of(name: str) -> int:
    """Return a hash of 64 bits, the same in every process."""
    return int.from_bytes(
        hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "little", signed=True
    )


def file_key(path: str) -> tuple[Any, ...]:
    """Return a key that changes when the file does: its path, size and time of modification."""
    with explained(f"reading {path}"):
        state = Path(path).stat()
    return str(Path(path).resolve()), state.st_size, state.st_mtime_ns


def cached(key: object, build: Callable[[Path], None]) -> Path:
    """Return the folder that ``build`` filled for ``key``, now or earlier.

    The folder is in irkit's cache, which may be deleted when nothing runs. If several processes build the
    same folder, the first one counts.

    Args:
        key: Everything that determines the content; its ``repr`` counts.
        build: Fills an empty folder.

    Raises:
        StorageError: The folder could not be written.
    """
    root = cache_folder()
    digest = hashlib.blake2b(repr((_VERSION, key)).encode(), digest_size=12).hexdigest()
    folder = root / digest
    if folder.is_dir():
        return folder
    with explained(f"writing to {root}", "set IRKIT_CACHE to a folder that can be written"):
        root.mkdir(parents=True, exist_ok=True)
        with scratch(folder) as aside:
            build(aside)
            sync_tree(aside)
            try:
                aside.replace(folder)
                sync_name(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process was first
                    raise
    return folder
