"""``irkit mine``: hard negatives for the queries of a training set, from any index."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irkit.cli.label import check_target, name_files, write_shown
from irkit.cli.options import (
    Activation,
    Device,
    IndexDir,
    MaxLength,
    OverwriteFile,
    TeacherDtype,
    TrainingFile,
)
from irkit.cli.output import note
from irkit.errors import BadValueError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from irkit.data import Qrels, Query
    from irkit.training.data import Record

__all__ = ["mine"]


def mine(
    directory: IndexDir,
    queries: Annotated[
        str, typer.Argument(metavar="QUERIES", help="Of the training set: BEIR folder, .jsonl, .tsv, ...")
    ],
    out: TrainingFile,
    qrels: Annotated[
        str | None, typer.Option(help="Judgments, a file or BEIR folder; by default the folder QUERIES.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a BEIR folder.")] = "train",
    negatives: Annotated[int, typer.Option(min=1, help="Of each query.")] = 7,
    ranks: Annotated[
        str,
        typer.Option("--range", metavar="FROM-TO", help="Ranks to take them from; 10-100: not the best 10."),
    ] = "0-100",
    sampling: Annotated[str, typer.Option(help="top, the best of these, or random.")] = "top",
    absolute_margin: Annotated[
        float | None, typer.Option(min=0, help="Least distance to the score of the worst relevant document.")
    ] = None,
    relative_margin: Annotated[
        float | None, typer.Option(min=0, help="The same as a share of that score, such as 0.05.")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="max_score, min_score, relevant_grade or seed."),
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="Model, index or cross-encoder:NAME, whose scores are kept.")
    ] = None,
    max_length: MaxLength = None,
    activation: Activation = "none",
    dtype: TeacherDtype = "float32",
    device: Device = None,
    overwrite: OverwriteFile = False,
) -> None:
    """Mine hard negatives for queries with judgments.

    Writes an object a line for each query, its relevant documents and then negatives, for irkit train. When
    it is interrupted, the same command goes on where it stopped.
    """
    check_target(out, overwrite)
    low, dash, high = ranks.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal()):
        raise BadValueError(f"--range {ranks}: expected two ranks such as 10-100")
    from irkit.config import with_overrides
    from irkit.retriever import Retriever
    from irkit.training.negatives import MiningConfig
    from irkit.training.negatives import mine as mine_negatives
    from irkit.training.teachers import load_teacher

    given: dict[str, Any] = {
        "num_negatives": negatives,
        "range_min": int(low),
        "range_max": int(high),
        "sampling_strategy": sampling,
        "absolute_margin": absolute_margin,
        "relative_margin": relative_margin,
    }
    config = MiningConfig.parse(with_overrides(given, override or ()), "irkit mine")
    items, judgments = _read(queries, qrels, split, config.relevant_grade)
    options: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "max_length": max_length,
        "activation": activation,
    }
    few = 0

    with Retriever.load(directory, device=device) as retriever:
        judge = load_teacher(teacher, **options) if teacher else None

        def records(skip: int) -> Iterator[Record]:
            nonlocal few
            for record in mine_negatives(retriever, items, judgments, config, teacher=judge, start=skip):
                few += len(record) - record.positives < negatives
                yield record

        key = [
            config.model_dump(),
            name_files(directory),
            name_files(teacher),
            options,
            repr(items),
            judgments,
        ]
        done = write_shown("mining", out, records, len(items), key)
    note(f"mined negatives for {done}")
    if few:
        note(
            f"{few:,} queries have fewer than {negatives} negatives; a wider --range or a smaller margin "
            "gives more"
        )


def _read(queries: str, qrels: str | None, split: str, grade: int) -> tuple[list[Query], Qrels]:
    """The queries that have a relevant document, and the judgments of these."""
    from irkit.data import check_documents, read_qrels, read_queries

    if qrels is None and not Path(queries).is_dir():
        raise BadValueError(f"irkit mine: {queries} is no BEIR folder; give its judgments as --qrels")
    source = qrels or queries
    judged = read_qrels(source, split if Path(source).is_dir() else None)
    known = {name: grades for name, grades in judged.items() if max(grades.values()) >= grade}
    items = [query for query in read_queries(queries) if query.id in known]
    check_documents(items)
    if not items:
        raise BadValueError(
            f"irkit mine: {source} has no document judged {grade} or more for a query of {queries}; are "
            "these the queries it judges?"
        )
    if len(items) < len(known):
        note(f"{len(known) - len(items):,} queries with relevant documents are not in {queries} and left out")
    return items, known
