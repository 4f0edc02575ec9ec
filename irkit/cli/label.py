"""``irkit label``: scores of a teacher for the documents of a training file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from irkit.bars import bar
from irkit.cli.options import (
    Activation,
    Device,
    MaxLength,
    OverwriteFile,
    TeacherDtype,
    TrainingFile,
    goes_on,
)
from irkit.cli.output import note
from irkit.cli.runs import check_out
from irkit.errors import BadValueError, StorageError

if TYPE_CHECKING:
    from irkit.training.data import Record

__all__ = ["check_target", "label", "name_files", "write_shown"]


def label(
    source: Annotated[
        str, typer.Argument(metavar="TRAIN", help="Examples in any format that irkit train reads.")
    ],
    teacher: Annotated[str, typer.Option(help="Model, index or cross-encoder:NAME.")],
    out: TrainingFile,
    queries: Annotated[
        str | None, typer.Option(help="Where queries are that TRAIN has by id; by default the folder CORPUS.")
    ] = None,
    corpus: Annotated[str | None, typer.Option(help="Where documents are that TRAIN has by id.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a BEIR folder.")] = None,
    normalization: Annotated[
        str, typer.Option(help="Of the scores of a query: none, minmax or zscore.")
    ] = "none",
    max_length: MaxLength = None,
    activation: Activation = "none",
    dtype: TeacherDtype = "float32",
    device: Device = None,
    overwrite: OverwriteFile = False,
) -> None:
    """Add scores of a teacher to examples.

    They take the place of those that are there. When it is interrupted, the same command goes on where it
    stopped.
    """
    check_target(out, overwrite)
    from irkit.training.data import DataConfig, read_records
    from irkit.training.data.texts import TextStore
    from irkit.training.labels import label as label_records
    from irkit.training.labels import resolve
    from irkit.training.losses.base import Normalization
    from irkit.training.teachers import IndexTeacher, load_teacher

    if normalization not in get_args(Normalization):
        raise BadValueError(f"--normalization {normalization}: expected {', '.join(get_args(Normalization))}")
    config = DataConfig(source=source, queries=queries, corpus=corpus, split=split)
    options: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "max_length": max_length,
        "activation": activation,
    }
    judge = load_teacher(teacher, **options)
    folder = next((name for name in (corpus, source) if name and Path(name).is_dir()), None)
    asked, answers = queries or folder, None if isinstance(judge, IndexTeacher) else corpus or folder
    texts = {
        "queries": TextStore(asked, "queries") if asked else None,
        "corpus": TextStore(answers) if answers else None,
    }

    with bar("checking", "queries") as update:
        total = 0
        for record in read_records(config):
            resolve(record, judge, **texts)  # a text that is missing fails now, not after hours
            total += 1
            update(1)

    def records(skip: int) -> Iterator[Record]:
        some = islice(read_records(config), skip, None)
        return label_records(some, judge, **texts, normalization=cast(Normalization, normalization))

    key = [*map(name_files, (source, teacher, queries, corpus)), split, options, normalization]
    done = write_shown("labelling", out, records, total, key)
    note(f"labelled the documents of {done}")


def check_target(out: Path, overwrite: bool) -> None:
    """Refuse a file that could not be written, or is there, before the work.

    Raises:
        StorageError: Its directory is not there, or the file is.
        BadValueError: It is no .jsonl file.
    """
    if out.suffix != ".jsonl":
        raise BadValueError(f"--out {out}: expected the extension .jsonl")
    check_out(str(out), None)
    if out.exists() and not overwrite:
        raise StorageError(f"--out {out}: it exists; choose another file or give --overwrite")


def name_files(source: str | Path | None) -> list[Any]:
    """What stands for a file or directory as it is now: its name, and the age and size of what is in it."""
    if source is None or not (place := Path(source)).exists():
        return [str(source)]
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    return [
        str(place.resolve()),
        [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files],
    ]


def write_shown(
    action: str, out: Path, records: Callable[[int], Iterator[Record]], total: int, key: Any
) -> str:
    """Write records with a bar, see `irkit.training.resumable`; what was done, in words."""
    from irkit.training.resumable import write_resumable

    start = time.monotonic()
    with bar(action, "queries", total) as update:

        def shown(skip: int) -> Iterator[Record]:
            update(skip)
            for record in records(skip):
                update(1)
                yield record

        with goes_on():
            count, before = write_resumable(out, shown, key)
    there = f" ({before:,} of them before)" if before else ""
    return f"{count:,} queries{there} in {time.monotonic() - start:,.1f} s into {out}"
