"""Training files that are written over hours: a writer that was killed goes on where it stopped."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from irkit.errors import LockedError
from irkit.files import explained
from irkit.training.data import Record, to_line

__all__ = ["write_resumable"]


def write_resumable(
    path: str | Path, records: Callable[[int], Iterator[Record]], key: Any
) -> tuple[int, int]:
    """Write records, one JSON object a line; the file appears when it is complete.

    Meanwhile they are in ``.NAME.HASH.part`` beside it, where the hash is that of ``key``: the same work goes
    on there, and other work starts anew. What is there of other work is removed in the end.

    Args:
        path: File to write; one that is there is replaced in the end.
        records: Gives all records but the first so many.
        key: JSON that stands for all that decides about the records.

    Returns:
        The number of records, and how many of them were there already.

    Raises:
        StorageError: It cannot be written.
        LockedError: Another process is writing it.
    """
    target = Path(path).resolve()
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=8).hexdigest()
    aside = target.with_name(f".{target.name}.{digest}.part")
    with explained(f"writing {path}"):
        with aside.open("a+b") as stream:
            _lock(stream, path)
            try:
                count = done = _whole_lines(stream)
                for record in records(done):
                    stream.write(to_line(record).encode())
                    count += 1
                    stream.flush()  # a process that is killed loses nothing
                os.fsync(stream.fileno())
                aside.replace(target)
            finally:  # a process that was forked meanwhile has the file open, too
                fcntl.flock(stream, fcntl.LOCK_UN)
        for other in target.parent.glob(f".{target.name}.*.part"):
            if other.is_file():
                other.unlink(missing_ok=True)
    return count, done


def _lock(stream: IO[bytes], path: str | Path) -> None:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LockedError(
            f"writing {path}: another process is writing it; wait until it has finished"
        ) from None


def _whole_lines(stream: IO[bytes]) -> int:
    """The number of lines, after which what is left of a line that was being written is cut off."""
    stream.seek(0)
    count = end = 0
    for line in stream:
        if line.endswith(b"\n"):
            count, end = count + 1, end + len(line)
    stream.truncate(end)
    return count
