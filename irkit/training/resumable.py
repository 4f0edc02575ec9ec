"""Training files that take hours to write: a writer that was killed resumes where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from irkit.errors import LockedError
from irkit.training.training_data import TrainingRow, to_line
from irkit.utils.atomic import abandoned, explained
from irkit.utils.locks import try_lock, unlock


def write_resumable(
    path: str | Path, rows: Callable[[int], Iterator[TrainingRow]], key: Any
) -> tuple[int, int]:
    """Write training rows, one JSON object per line; the file appears when it is complete.

    Until then the rows are in ``.NAME.HASH.part`` beside the file, where HASH is the hash of ``key``. A call
    with the same key continues this hidden file, and a call with another key starts over. Unfinished files of
    other keys are removed at the end.

    Args:
        path: File to write; an existing file is replaced at the end.
        rows: Called with the number of rows that are in the hidden file already; returns all rows after
            these.
        key: JSON value that identifies everything on which the rows depend.

    Returns:
        The number of rows, and how many of them an earlier call had written.

    Raises:
        StorageError: The file cannot be written.
        LockedError: Another process is writing the file.
    """
    target = Path(path).resolve()
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=8).hexdigest()
    aside = target.with_name(f".{target.name}.{digest}.part")
    with explained(f"writing {path}"):
        with aside.open("a+b") as stream:
            if not try_lock(stream):
                raise LockedError(
                    f"writing {path}: another process is writing it; wait until it has finished"
                )
            try:
                count = done = _whole_lines(stream)
                for row in rows(done):
                    stream.write(to_line(row).encode())
                    count += 1
                    stream.flush()  # a process that is killed loses nothing
                os.fsync(stream.fileno())
                aside.replace(target)
            finally:
                unlock(stream)
        for other in abandoned(target.parent, rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.part"):
            other.unlink(missing_ok=True)
    return count, done


def _whole_lines(stream: IO[bytes]) -> int:
    """Cut off an unfinished last line, and return the number of lines before it."""
    stream.seek(0)
    count = end = 0
    for line in stream:
        if line.endswith(b"\n"):
            count, end = count + 1, end + len(line)
    stream.truncate(end)
    return count
