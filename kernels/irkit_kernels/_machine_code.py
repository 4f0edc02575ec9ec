"""Keep the machine code of kernels on disk, so that a process need not compile what another one has compiled.

A file holds the code of one module and its digest. Its name is a hash of all that determines the code: the
IR, the CPU with its features, and LLVM. The files are in the folder ``code`` of irkit's cache, see
`cache_folder`. They may be deleted.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["cache_folder", "keep_code"]

_DIGEST = 32  # bytes


def keep_code(engine: Any, key: tuple[Any, ...]) -> None:
    """Let an engine of llvmlite load the code of ``key`` from disk, or compile it and write it there.

    A file that is missing, damaged or cannot be read is compiled anew. If a file cannot be written, the next
    process compiles again.

    Args:
        engine: Its module is not compiled yet.
        key: Everything that determines the code; its ``repr`` counts.
    """
    try:
        file = cache_folder() / "code" / hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()
    except RuntimeError:  # this user has no home
        return
    engine.set_object_cache(lambda module, code: _write(file, code), lambda module: _read(file))


def cache_folder() -> Path:
    """Return the folder that the environment variable ``IRKIT_CACHE`` names; default: ``~/.cache/irkit``."""
    return Path(os.environ.get("IRKIT_CACHE") or Path.home() / ".cache" / "irkit")


def _read(file: Path) -> bytes | None:
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST], content[_DIGEST:]
    return code if digest == _digest(code) else None


def _write(file: Path, code: bytes) -> None:
    """Write the file aside and rename it, because other processes may read it."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent)
        os.close(descriptor)
        aside = Path(name)
        try:
            aside.write_bytes(_digest(code) + code)
            aside.replace(file)
        finally:
            aside.unlink(missing_ok=True)


def _digest(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=_DIGEST).digest()
