"""``irkit label``: score the documents of a training file by a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from irkit.cli.output import note
from irkit.cli.shared_options import Activation, Device, MaxLength, OverwriteFile, TeacherDtype, TrainingFile
from irkit.cli.training_files import check_target, file_states, write_rows
from irkit.errors import BadValueError
from irkit.utils.progress import progress_bar

if TYPE_CHECKING:
    from irkit.training.training_data import TrainingRow


def label(
    source: Annotated[
        str, typer.Argument(metavar="TRAIN", help="Examples in any format that irkit train reads.")
    ],
    teacher: Annotated[str, typer.Option(help="Model, index or cross-encoder:NAME.")],
    out: TrainingFile,
    queries: Annotated[
        str | None, typer.Option(help="Source of the queries that TRAIN names by id; default: CORPUS.")
    ] = None,
    corpus: Annotated[
        str | None, typer.Option(help="Source of the documents that TRAIN names by id.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of a BEIR folder.")] = None,
    normalization: Annotated[
        str, typer.Option(help="Normalize the scores of each query: none, minmax or zscore.")
    ] = "none",
    max_length: MaxLength = None,
    activation: Activation = "none",
    dtype: TeacherDtype = "float32",
    device: Device = None,
    overwrite: OverwriteFile = False,
) -> None:
    """Add scores of a teacher to examples.

    They replace existing scores. After an interruption, the same command resumes.
    """
    check_target(out, overwrite)
    from irkit.retrieval.scorer import IndexScorer
    from irkit.training.labels import label as label_rows
    from irkit.training.labels import resolve
    from irkit.training.losses.loss import Normalization
    from irkit.training.teachers import load_teacher
    from irkit.training.training_data import DataConfig, read_training_rows
    from irkit.training.training_data.text_store import TextStore

    if normalization not in get_args(Normalization):
        raise BadValueError(f"--normalization {normalization}: expected {', '.join(get_args(Normalization))}")
    config = DataConfig(source=source, queries=queries, corpus=corpus, split=split)
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    options |= {"max_length": max_length, "activation": activation}
    scorer = load_teacher(teacher, **options)
    folder = next((name for name in (corpus, source) if name and Path(name).is_dir()), None)
    query_source = queries or folder
    corpus_source = None if isinstance(scorer, IndexScorer) else corpus or folder
    query_texts = TextStore(query_source, "queries") if query_source else None
    corpus_texts = TextStore(corpus_source) if corpus_source else None

    with progress_bar("checking", "queries") as update:
        total = 0
        for row in read_training_rows(config):
            resolve(row, scorer, query_texts, corpus_texts)  # a missing text is an error now, not after hours
            total += 1
            update(1)

    def rows(skip: int) -> Iterator[TrainingRow]:
        remaining = islice(read_training_rows(config), skip, None)
        return label_rows(
            remaining,
            scorer,
            queries=query_texts,
            corpus=corpus_texts,
            normalization=cast(Normalization, normalization),
        )

    key = [*map(file_states, (source, teacher, queries, corpus)), split, options, normalization]
    summary = write_rows("labelling", out, rows, total, key)
    note(f"labelled the documents of {summary}")
