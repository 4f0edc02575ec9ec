"""Steps that ``irkit mine`` and ``irkit label`` share: both write a training file and can resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irkit.cli.recipe_files import hint_resume
from irkit.cli.runs import check_out
from irkit.errors import BadValueError, StorageError
from irkit.utils.progress import progress_bar

if TYPE_CHECKING:
    from irkit.training.training_data import TrainingRow


def check_target(out: Path, overwrite: bool) -> None:
    """Check ``--out`` before the work.

    Raises:
        StorageError: Its directory does not exist, or the file exists.
        BadValueError: It is not a .jsonl file.
    """
    if out.suffix != ".jsonl":
        raise BadValueError(f"--out {out}: expected the extension .jsonl")
    check_out(str(out), None)
    if out.exists() and not overwrite:
        raise StorageError(f"--out {out}: it exists; choose another file or give --overwrite")


def file_states(source: str | Path | None) -> list[Any]:
    """Return JSON that changes when a file, or a file of a directory, does: names, sizes and times."""
    if source is None or not (path := Path(source)).exists():
        return [str(source)]
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    states = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return [str(path.resolve()), states]


def write_rows(
    action: str, out: Path, rows: Callable[[int], Iterator[TrainingRow]], total: int, key: Any
) -> str:
    """Write rows with a progress bar, see `irkit.training.resumable`; return a summary in words."""
    from irkit.training.resumable import write_resumable

    start = time.monotonic()
    with progress_bar(action, "queries", total) as update:

        def count_rows(skip: int) -> Iterator[TrainingRow]:
            update(skip)
            for row in rows(skip):
                update(1)
                yield row

        with hint_resume():
            count, before = write_resumable(out, count_rows, key)
    resumed = f" ({before:,} of them before)" if before else ""
    return f"{count:,} queries{resumed} in {time.monotonic() - start:,.1f} s into {out}"
